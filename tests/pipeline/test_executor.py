"""The executor against plain JAX: stages written by hand, the sums of all microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axon_dist import World
from axon_dist.pipeline import Executor, MicrobatchData, StageLoss, StageProgram, Wire
from axon_dist.pipeline.tables import slots_by_name
from axon_dist.schedule import Schedule, assign_slots, build_schedule

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
    # Metrics come weighted, as `weighted_metrics` has them.
    return StageLoss(mean * weight, weight, [jnp.mean(y) * weight, jnp.max(y) * weight])


def programs(stages_by_chunk):
    return [
        StageProgram(
            tuple(stages), chunk, range(chunk, chunk + 1), first, middle, last,
            (EMBED,), (SHIFT,), (HEAD,),
        )
        for chunk, stages in enumerate(stages_by_chunk)
    ]  # fmt: skip


def data_at(batch, index):
    return MicrobatchData([0.5 * index], [leaf[index] for leaf in batch])


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

    gradient = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    kernels, rest = array(4, num_stages, WIDTH, WIDTH), rest_of()
    runs = [gradient(kernels, rest, batch_of(), index) for index in range(COUNT)]
    runs = jax.device_get(runs)
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
            programs=programs([[stages[chunk] for stages in own] for chunk in chunks]),
            axis="pp",
            weights=[[leaf[0] for leaf in row] for row in rows],
            rest=rest,
            data=functools.partial(data_at, batch),
            scale=scale,
            saves_residuals=keeps,
        ).run()
        return jax.tree.map(lambda x: x[None], sums)

    mesh = World.emulate(size, f"pp={size}").mesh
    spec = PartitionSpec("pp")
    mapped = jax.shard_map(
        on_a_rank, mesh=mesh, in_specs=(spec, PartitionSpec(), PartitionSpec()),
        out_specs=spec, check_vma=False,
    )  # fmt: skip
    sums = jax.jit(mapped)(rows, rest, batch)
    rows = jax.device_get(sums.rows)
    of_stage = {stages[c]: rows[c][0][d] for d, stages in enumerate(own) for c in chunks}
    return np.stack([of_stage[stage] for stage in sorted(of_stage)]), sums


def assert_sums(schedule, kernels, sums, scale=1.0):
    (want_kernels, want_rest), want_loss = wanted(schedule.num_stages)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5 * scale)
    close(kernels, want_kernels * scale)
    assert sorted(sums.rest) == [EMBED, SHIFT, HEAD]
    for i, want in enumerate(want_rest):
        close(np.asarray(sums.rest[i]).sum(0), want * scale)
    loss = [sums.loss.total, sums.loss.weight, *sums.loss.metrics]
    np.testing.assert_allclose([np.asarray(x).sum() for x in loss], want_loss, rtol=1e-5)


# Backward in two halves; two chunks a rank, with what forward has kept. One chunk a rank is below.
@pytest.mark.sample("split-False", "v-True")
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
    few, more = (slots_by_name(assign_slots(table)) for table in many)
    assert few["inputs"].num_slots == more["inputs"].num_slots == 2
    assert few["gradients"].num_slots == more["gradients"].num_slots


LEARNING = {
    "1f1b": (build_schedule("1f1b", 2, COUNT), False),
    "kept": (build_schedule("1f1b", 2, COUNT), True),
    "split": (build_schedule("zero_bubble_h1", 2, COUNT), False),
    "alone": (build_schedule("1f1b", 1, COUNT), False),
    "backwards in another order": (
        Schedule.from_csv("0F0,0F1,0F2,0F3,,0B3,0B2,0B1,0B0\n,1F0,1F1,1F2,1F3+1B3,1B2,1B1,1B0,\n"),
        False,
    ),
}


def remembering(size):
    """One chunk of stages, each with a number that its output depends on and that moves."""

    def remembers(weights, rest, data, stage, wire):
        (x,), own = wire.floats, jnp.stack(data.buffers)[stage]
        y = x + jnp.tanh(x @ weights[0][0]) * (1 + own)
        return Wire([y], [], [0.5 * own + jnp.mean(y)] * size)

    enter = lambda rest, data: Wire([data.batch[0]], [])
    leave = lambda rest, data, wire: StageLoss(jnp.sum(wire.floats[0] ** 2), jnp.float32(1), [])
    learns = {stage: stage for stage in range(size)}
    return StageProgram(
        tuple(range(size)), 0, range(1), enter, remembers, leave, (), (), (), learns
    )


LEARNT_BATCH = array(3, COUNT, SAMPLES, WIDTH)


@functools.cache
def learnt(size):
    """The gradients of all microbatches one after another, and the numbers at the end."""
    program = remembering(size)

    def total(kernels, numbers, x):
        wire, left = Wire([x], []), []
        for stage in range(size):
            data = MicrobatchData(numbers, [])
            wire = program.middle([[kernels[stage]]], {}, data, stage, wire)
            left.append(wire.new_buffers[stage])
        return program.last({}, None, wire).total, left

    gradient = jax.jit(jax.grad(total, has_aux=True))
    numbers, grads = [jnp.asarray(np.float32(stage)) for stage in range(size)], 0
    for x in LEARNT_BATCH:
        grad, numbers = gradient(array(4, size, WIDTH, WIDTH), numbers, x)
        grads = grads + np.asarray(grad)
    return grads, numbers


@pytest.mark.sample("kept", "split", "backwards in another order")
@pytest.mark.parametrize("name", LEARNING)
def test_stages_keep_what_a_microbatch_has_left_for_the_next(name):
    """Each stage has a number that its output depends on, and that moves with what comes in."""
    table, keeps = LEARNING[name]
    size = table.num_stages
    kernels, (grads, numbers) = array(4, size, WIDTH, WIDTH), learnt(size)

    def on_a_rank(rows):
        sums = Executor(
            schedule=table,
            programs=[remembering(size)],
            axis="pp",
            weights=[[rows[0]]],
            rest=[],
            data=lambda index: MicrobatchData(
                [jnp.float32(s) for s in range(size)], [jnp.asarray(LEARNT_BATCH)[index]]
            ),
            saves_residuals=keeps,
            initial_buffers={stage: jnp.float32(stage) for stage in range(size)},
        ).run()
        return sums.rows[0][0][None], sums.final_buffers

    mesh, spec = World.emulate(size, f"pp={size}").mesh, PartitionSpec("pp")
    run = jax.shard_map(
        on_a_rank, mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec()), check_vma=False
    )
    found, learned = jax.jit(run)(kernels)
    np.testing.assert_allclose(found, grads, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose([learned[i] for i in range(size)], numbers, rtol=1e-5)
