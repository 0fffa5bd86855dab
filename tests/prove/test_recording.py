"""Programs that cannot run in one process, or have two strategies, are compared by fingerprints."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.prove import Recording, compare
from axon_dist.prove.inputs import draws_of
from axon_dist.prove.recording import record
from axon_dist.prove.trace import subject_of
from axon_dist.train.app.config_records import fingerprints, record_config
from axon_dist.train.cli.main import main
from axon_dist.train.config import load_config

X = np.linspace(0.1, 1, 12, dtype=np.float32).reshape(3, 4)
ROWS = np.linspace(0.5, 1.5, 5, dtype=np.float32)


def program(late=1.0, dtype=jnp.float32, once=False):
    def step(x):
        def turn(carry, row):
            hidden = jnp.tanh(carry * row)
            factor = jnp.where(row > 1.2, late, 1.0)
            return hidden * factor, hidden.sum()

        y, sums = jax.lax.scan(turn, x.astype(dtype), jnp.asarray(ROWS, dtype))
        y = jnp.sinh(y) if once else y
        return (y / (1 + jnp.abs(sums).sum())).astype(jnp.float32)

    return record(subject_of(step, (X,)), {"device": 1}, steps=2)


def test_equal_programs_and_another_precision_do_not_differ(tmp_path):
    one = program()
    one.save(tmp_path / "one.json")
    loaded = Recording.load(tmp_path / "one.json")
    assert loaded.steps == one.steps
    assert compare(loaded, program()).ok
    # Each value is allowed what rounding to bfloat16 changes, and no more.
    assert compare(one, program(dtype=jnp.bfloat16)).ok
    assert not compare(one, program(dtype=jnp.bfloat16, late=1.5)).ok


def test_programs_that_differ_in_an_imaginary_part_differ():
    def of(factor):
        step = lambda x: jax.lax.complex(x, factor * jnp.sinh(x))
        return record(subject_of(step, (X,)), {"device": 1})

    assert compare(of(1.0), of(1.0)).ok
    assert not compare(of(1.0), of(1.5)).ok


@pytest.mark.parametrize("other", [np.nan, np.inf])
def test_what_is_not_a_number_differs_from_a_number(other):
    arrays = [{"w": np.array([1.0, x], np.float32)} for x in (2.0, 3.0, other)]
    two, three, bad = (fingerprints(x)["w"] for x in arrays)
    assert two.gap(two) is None
    assert two.gap(three) is not None
    assert two.gap(bad) is not None
    assert bad.gap(two) is not None


def test_the_complex_numbers_of_a_drawn_input_have_imaginary_parts():
    (drawn,) = draws_of([jax.ShapeDtypeStruct((3,), jnp.complex64)], 1)[0]
    assert drawn.dtype == jnp.complex64
    assert (drawn.imag != 0).all()


def test_the_turn_of_a_loop_and_an_operation_of_one_program_are_named():
    one = program()
    found = compare(one, program(late=1.01))
    assert (found.step, found.operation) == (1, "select_n")
    # The fourth row is the first above 1.2.
    assert "turn 4 of the loop" in found.layer
    assert found.place.file == __file__
    assert compare(one, program(once=True)).operation == "sinh"


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"format": 1}')
    with pytest.raises(ConfigError, match="PROVE009"):
        Recording.load(tmp_path / "x.json")


CONFIG = """
name: small
devices: {emulate: 2}
mesh: {dp: 2}
model: {width: 8, num_layers: 1, num_heads: 2, ffn_width: 8, max_length: 16, vocab_size: 16}
data: {sequence_length: 8}
optimizer: {name: sgd, learning_rate: 0.1}
train: {steps: 6, global_batch: 4}
"""

PLANTED = {
    "norm": (["model.norm_eps=0.01"], 1, "norm"),
    "rate": (["optimizer.learning_rate=0.11"], 1, "optimizer"),
    "precision": (["precision=bf16"], 0, ""),
    "tensor": (["mesh={tp: 2}", "parallel={tensor: {}}"], 0, ""),
    "fsdp": (["mesh={fsdp: 2}", "parallel={fsdp: {min_elements: 1}}"], 0, ""),
    "microbatches": (["train.accumulate=2"], 0, ""),
    "tensor-and-norm": (
        ["mesh={tp: 2}", "parallel={tensor: {}}", "model.norm_eps=0.01"], 1, "norm",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "a.yaml").write_text(CONFIG)
    record_config(load_config(folder / "a.yaml"), 2).save(folder / "a.json")
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", PLANTED)
def test_configs_are_compared_whatever_their_strategies(name, recorded, capsys):
    overrides, step, layer = PLANTED[name]
    (recorded / "b.yaml").write_text(CONFIG)
    record_config(load_config(recorded / "b.yaml", overrides), 2).save(recorded / "b.json")
    written = recorded / "found.json"
    files = [str(recorded / name) for name in ("a.json", "b.json")]
    assert main(["bisect", *files, "--json", str(written)]) == min(step, 1)
    found = json.loads(written.read_text())
    assert found["step"] == step, capsys.readouterr().out
    assert layer in found["layer"], capsys.readouterr().out


@pytest.mark.full
def test_other_data_and_other_weights_are_named_as_such(recorded):
    one = Recording.load(recorded / "a.json")
    config = load_config(recorded / "a.yaml", ["seed=1"])
    found = compare(one, record_config(config, 1))
    assert found.step == 1
    assert "inputs" in str(found)


@pytest.mark.full
def test_another_environment_is_compared(recorded):
    python = os.environ.get("AXON_OTHER_PYTHON")
    if python is None:
        pytest.skip("AXON_OTHER_PYTHON names no python of another environment with axon_dist")
    assert main(["bisect", str(recorded / "a.yaml"), "--python", python, "--steps", "2"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.yaml", "b.yaml", "--steps", "0"], "got --steps 0; it must be at least 1"),
        (["a.py:f", "b.py:f", "--steps", "-1"], "got --steps -1; it must be at least 1"),
        (["a.json", "b.json", "--steps", "2"], "--steps has no effect on a.json and b.json"),
    ],
)
def test_steps_that_cannot_be_compared(words, message, capsys):
    assert main(["bisect", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
