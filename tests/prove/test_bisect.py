"""Two programs that should be equal: in lower precision, or in another environment."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import ConfigError, MeshError
from axon_dist.prove import bisect
from axon_dist.prove.parting import bisect_recording, record
from axon_dist.prove.recording import Recording
from axon_dist.prove.trace import subject_of

from .parts import BATCH, KEY, SQUARE, sharded

SCALES = {"right": 1.0, "wrong": 1.02}


def network(dtype, scale, w, x):
    """Two layers, of which the second one may be scaled."""
    w, x = w.astype(dtype), x.astype(dtype)
    for number in range(2):
        hidden = jnp.tanh(x @ w)
        x = x + hidden * (scale if number else 1.0)  # scaled
    return w.astype(jnp.float32) * 0.9, x.astype(jnp.float32)


SCALED = next(
    number
    for number, line in enumerate(pathlib.Path(__file__).read_text().splitlines(), 1)
    if line.endswith("# scaled")
)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_bfloat16_is_equal_within_a_bound_of_each_operation(scale):
    one = functools.partial(network, jnp.float32, 1.0)
    other = functools.partial(network, jnp.bfloat16, scale * 1.5 if scale > 1 else 1.0)
    found = bisect(one, other, SQUARE, BATCH)
    assert found.ok == (scale == 1.0), found
    assert found.ok or (found.place.line, found.operation) == (SCALED, "mul"), found


def step(count, w, x, key, late=1.0):
    """One step of a network with dropout; from the second step on it may be changed."""
    keep = jax.random.bernoulli(key, 0.8, x.shape)
    hidden = jnp.tanh(x * keep @ w)
    hidden = hidden * jnp.where(count >= 1, late, 1.0)  # changed
    return count + 1, w + 0.1 * hidden.T @ x, hidden


COUNT = np.zeros((), np.int32)


def test_fingerprints_in_a_file_show_the_first_step_and_operation(tmp_path):
    subject = subject_of(step, (COUNT, SQUARE, BATCH, KEY))
    record(subject, {"device": 1}, steps=3).save(tmp_path / "old.npz")
    recording = Recording.load(tmp_path / "old.npz")
    assert bisect_recording(recording, subject).ok
    other = subject_of(functools.partial(step, late=1.01), (COUNT, SQUARE, BATCH, KEY))
    found = bisect_recording(recording, other)
    assert (found.ok, found.step) == (False, 2)
    line = pathlib.Path(__file__).read_text().splitlines()[found.place.line - 1]
    assert line.endswith("# changed"), found
    assert found.runs <= np.log2(found.operations) + 3


def test_fingerprints_are_compared_rank_by_rank_on_equal_meshes(make_world, tmp_path):
    make_world("dp=4")

    def make(reduce, mesh):
        def body(x):
            return reduce(jnp.tanh(x).mean(), "dp")

        return sharded(mesh, body, (P("dp"),), P()), (BATCH,)

    mean, total = (subject_of(functools.partial(make, r), ()) for r in (lax.pmean, lax.psum))
    record(mean, {"dp": 4}).save(tmp_path / "mean.npz")
    recording = Recording.load(tmp_path / "mean.npz")
    assert bisect_recording(recording, mean).ok
    assert bisect_recording(recording, total).operation == "psum"
    with pytest.raises(MeshError, match="PROVE011"):
        bisect_recording(recording, mean, "dp=2")
    with pytest.raises(ConfigError, match="PROVE012"):
        bisect_recording(recording, subject_of(lambda mesh: (jnp.sum, (SQUARE,)), ()))


def test_a_file_without_fingerprints_is_refused(tmp_path):
    file = tmp_path / "other.npz"
    file.write_text("no arrays")
    with pytest.raises(ConfigError, match="PROVE009"):
        Recording.load(file)
