"""The lowered programs are those that are pinned: a commit that is to change none changes none.

Where a change was meant, `python -m tests.repo.digests --write` pins the new ones and says which.
"""

import json

import jax
import jax.numpy as jnp
import pytest

from axon_dist.schedule import SCHEDULES
from tests.repo.digest_cells import CELLS
from tests.repo.digests import (
    PINS,
    digest,
    digest_of,
    jax_minor,
    read_pins,
    reason_to_skip,
    versions,
    write_pins,
)

REASON = reason_to_skip(PINS)


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if cell.quick else pytest.mark.full) for n, cell in CELLS.items()],
)
def test_the_program_is_the_pinned_one(name):
    assert digest(CELLS[name]) == read_pins(PINS)["pins"][name][jax_minor()], (
        f"the lowered program of {name!r} is another than the pinned one; if that was the aim, "
        "run python -m tests.repo.digests --write and say in the commit which programs change"
    )


def test_every_cell_is_pinned_for_every_version():
    pins = read_pins(PINS)
    assert sorted(pins["pins"]) == sorted(CELLS)
    assert {tuple(row) for row in pins["pins"].values()} == {tuple(sorted(pins["made with"]))}
    assert len(CELLS) >= 60
    assert 8 <= sum(cell.quick for cell in CELLS.values()) <= 12


def test_every_schedule_is_in_a_cell():
    assert [name for name in SCHEDULES if f"pipeline {name}" not in CELLS] == []


def lowered(function, *arguments):
    return digest_of(jax.jit(function).lower(*arguments).as_text())


X = jnp.ones(4)


def test_names_and_lines_do_not_count():
    def double(x):
        return 2.0 * x

    def scaled(x):

        return 2.0 * x

    first = lambda x: jax.jit(double)(x) + jnp.where(x > 0, x, 1.0)
    second = lambda values: jax.jit(scaled)(values) + jnp.where(values > 0, values, 1.0)
    assert lowered(first, X) == lowered(second, X)
    named = lambda tree: {"result": first(tree["weights"])}
    other = lambda tree: {"output": first(tree["bias"])}
    assert lowered(named, {"weights": X}) == lowered(other, {"bias": X})


@pytest.mark.parametrize(
    "other",
    [
        lambda x: jax.jit(lambda x: 2.5 * x)(x) + 1.0,
        lambda x: jax.jit(lambda x: 2.0 + x)(x) + 1.0,
        lambda x: jax.jit(lambda x: 2.0 * x)(x) + jnp.arange(4.0),
        lambda x: 1.0 + jax.jit(lambda x: 2.0 * x)(x),
        lambda x: (jax.jit(lambda x: 2.0 * x)(x) + 1.0).astype(jnp.bfloat16),
    ],
)
def test_other_computations_have_other_digests(other):
    assert lowered(other, X) != lowered(lambda x: jax.jit(lambda x: 2.0 * x)(x) + 1.0, X)


def test_donation_and_constants_count():
    plain = jax.jit(lambda x: x + 1)
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert digest_of(plain.lower(X).as_text()) != digest_of(donating.lower(X).as_text())
    ones, twos = jnp.arange(64.0), jnp.arange(64.0).at[40].set(0)
    assert lowered(lambda x: x + ones, ones) != lowered(lambda x: x + twos, ones)


def test_pins_of_other_versions_stay(tmp_path):
    path = tmp_path / "pins.json"
    pins = {"made with": {"0.1": "jax 0.1.0"}, "pins": {"a": {"0.1": "old"}, "b": {"0.1": "old"}}}
    path.write_text(json.dumps(pins))
    assert "has no pins for jax" in str(reason_to_skip(path))
    assert write_pins(path, {"b": "one", "a": "two"}) == ["new: a", "new: b"]
    assert write_pins(path, {"b": "two", "a": "two"}) == ["changed: b"]
    found = read_pins(path)
    assert found["made with"] == {"0.1": "jax 0.1.0", jax_minor(): versions()}
    assert found["pins"]["b"] == {"0.1": "old", jax_minor(): "two"}
    assert list(found["pins"]) == ["a", "b"]
    assert reason_to_skip(path) is None
