"""The executor against plain JAX: stages written by hand, the sums of all microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axon_dist import World
from axon_dist.pipeline import Data, Executor, Loss, StageProgram, Wire
from axon_dist.schedule import Schedule, build_schedule

WIDTH, SAMPLES, COUNT = 4, 3, 4
EMBED, SHIFT, HEAD = range(3)
"""The parameters outside of the blocks."""


def array(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rest_of():
    return [array(0, 2, WIDTH), array(1, WIDTH), array(2, WIDTH)]


def batch_of():
    """Microbatches of unequal weight, one of them of none."""
    return [array(3, COUNT, SAMPLES, 2), np.asarray([2.0, 0.0, 5.0, 1.0], np.float32)]


def first(rest, data):
    x = data.batch[0] @ rest[EMBED] + data.buffers[0]
    return Wire([x], [jnp.int32(0)])


def middle(weights, rest, data, stage, wire):
    (kernel,), (x,), (number,) = weights[0], wire.floats, wire.others
    # The stage and the microbatch matter: another of either gives another value.
    x = x + jnp.tanh(x @ kernel + rest[SHIFT] * (1 + stage) + 0.1 * data.buffers[0])
    return Wire([x], [number + stage + 1])


def last(rest, data, wire):
    (x,), (number,) = wire.floats, wire.others
    y, weight = x * rest[HEAD], data.batch[1]
    mean = jnp.mean(y**2) + 0.01 * number
    # Metrics come weighed, as `weighed_metrics` has them.
    return Loss(mean * weight, weight, [jnp.mean(y) * weight, jnp.max(y) * weight])


def programs(stages_by_chunk):
    return [
        StageProgram(
            tuple(stages), chunk, range(chunk, chunk + 1), first, middle, last,
            (EMBED,), (SHIFT,), (HEAD,),
        )
        for chunk, stages in enumerate(stages_by_chunk)
    ]  # fmt: skip


def data_at(batch, index):
    return Data([0.5 * index], [leaf[index] for leaf in batch])


@functools.cache
def wanted(num_stages):
    """Sums over microbatches, one after another, on one device."""

    def total(kernels, rest, batch, index):
        data = data_at(batch, index)
        wire = first(rest, data)
        for stage in range(num_stages):
            wire = middle([[kernels[stage]]], rest, data, stage, wire)
        loss = last(rest, data, wire)
        return loss.total, loss

    gradient = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True), static_argnums=3)
    kernels, rest = array(4, num_stages, WIDTH, WIDTH), rest_of()
    runs = [gradient(kernels, rest, batch_of(), index) for index in range(COUNT)]
    grads = jax.tree.map(lambda *g: sum(g), *[grads for grads, _ in runs])
    metrics = [sum(loss.metrics[i] for _, loss in runs) for i in range(2)]
    sums = [sum(loss.total for _, loss in runs), sum(loss.weight for _, loss in runs)]
    return grads, [*sums, *metrics]


TABLES = {
    "gpipe": build_schedule("gpipe", 2, COUNT),
    "1f1b": build_schedule("1f1b", 2, COUNT),
    "interleaved": build_schedule("interleaved_1f1b", 2, COUNT),
    "split": build_schedule("zero_bubble_h1", 2, COUNT),
    "v": build_schedule("zero_bubble_v", 2, COUNT),
    "alone": build_schedule("1f1b", 1, COUNT),
}


def run(schedule: Schedule, scale=None, keeps=False):
    """The sums of the executor: kernels by stage, rest and loss added up over ranks."""
    size, placement = schedule.num_devices, schedule.placement
    own = [[s for s in range(len(placement)) if placement[s] == d] for d in range(size)]
    chunks = range(max(map(len, own)))
    kernels = array(4, schedule.num_stages, WIDTH, WIDTH)
    rows = [[np.stack([kernels[stages[chunk]] for stages in own])] for chunk in chunks]
    batch, rest = batch_of(), rest_of()

    def on_a_rank(rows, rest, batch):
        sums = Executor(
            schedule=schedule,
            stages=programs([[stages[chunk] for stages in own] for chunk in chunks]),
            axis="pp",
            weights=[[leaf[0] for leaf in row] for row in rows],
            rest=rest,
            data=functools.partial(data_at, batch),
            scale=scale,
            keeps=keeps,
        ).run()
        return jax.tree.map(lambda x: x[None], sums)

    mesh = World.emulate(size, f"pp={size}").mesh
    spec = PartitionSpec("pp")
    mapped = jax.shard_map(
        on_a_rank, mesh=mesh, in_specs=(spec, PartitionSpec(), PartitionSpec()),
        out_specs=spec, check_vma=False,
    )  # fmt: skip
    sums = jax.jit(mapped)(rows, rest, batch)
    of_stage = {stages[c]: sums.rows[c][0][d] for d, stages in enumerate(own) for c in chunks}
    return np.stack([of_stage[stage] for stage in sorted(of_stage)]), sums


def assert_sums(schedule, kernels, sums, scale=1.0):
    (want_kernels, want_rest), want_loss = wanted(schedule.num_stages)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5 * scale)
    close(kernels, want_kernels * scale)
    assert sorted(sums.rest) == [EMBED, SHIFT, HEAD]
    for i, want in enumerate(want_rest):
        close(sums.rest[i].sum(0), want * scale)
    loss = [sums.loss.total, sums.loss.weight, *sums.loss.metrics]
    np.testing.assert_allclose([x.sum() for x in loss], want_loss, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        *((name, False) for name in TABLES),
        *((name, True) for name in ("1f1b", "v")),
    ],
)
def test_sums_are_those_of_microbatches_one_after_another(name, keeps):
    assert_sums(TABLES[name], *run(TABLES[name], keeps=keeps))


def test_the_scale_acts_on_gradients_alone():
    table = TABLES["1f1b"]
    assert_sums(table, *run(table, scale=jnp.float32(8)), scale=8)


def test_buffers_have_as_many_slots_as_values_live_at_once():
    many = [build_schedule("1f1b", 2, count) for count in (4, 64)]
    make = lambda table: Executor(table, [], "pp", [], [], lambda index: Data([], []))
    few, more = (make(table).slots for table in many)
    assert few.inputs.num_slots == more.inputs.num_slots == 2
    assert few.gradients.num_slots == more.gradients.num_slots
