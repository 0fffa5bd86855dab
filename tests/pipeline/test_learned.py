"""Values that blocks return to the loss, or keep for the next microbatch, in all stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.core.errors import UnsupportedError
from axon_dist.pipeline import (
    Stacks,
    SwitchStages,
    UniformStages,
    Wire,
    buffer_paths,
    buffers_over_time,
    buffers_together,
    check_order,
    has_split,
)
from axon_dist.schedule import Schedule, build_schedule

from .chains import BLOCKS, PLACED, layer, microbatch, params_of, stored, traced, unit

OWN = [f"own{number}" for number in range(len(BLOCKS))]


@unit
def telling(block, x, own):
    """The next x, what the loss is told, and what the block has next time."""
    y = layer(block, x) * (1 + own)
    return y, jnp.mean(y**2, axis=0), 0.5 * own + jnp.mean(y)


def telling_loss(params, buffers, batch):
    """A loss that reads of every block what no other reads."""
    x, told, after = batch["x"] @ params["embed"], [], {}
    for number, name in enumerate(OWN):
        x, found, after[name] = telling(params["blocks"][number], x, buffers[name])
        told.append((number + 1) * jnp.sum(found))
    return jnp.sum(x**2) + sum(told), 1.0, {"told": told[1]}, buffers | after


def borrowing_loss(params, buffers, batch):
    """As before, but the last block reads what the first has."""
    total, weight, metrics, after = telling_loss(params, buffers, batch)
    again, _, _ = telling(params["blocks"][4], batch["x"] @ params["embed"], buffers["own0"])
    return total + jnp.sum(again), weight, metrics, after


def rank_buffers():
    return {name: jnp.float32(0.1 * number) for number, name in enumerate(OWN)}


KINDS = {"uniform": UniformStages.find, "switch": SwitchStages}


@pytest.mark.sample("uniform-two_ranks", "switch-v")
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_stages_tell_the_loss_and_keep_their_own(kind, placed):
    params, buffers, batch = params_of(), rank_buffers(), microbatch(1)
    storage = stored(params, *PLACED[placed])
    trace, data = traced(telling_loss, params, buffers, batch)
    programs = KINDS[kind](trace, storage).programs()
    held = storage.from_model(params)
    rest, rows, stages = storage.rest_of(held), storage.rows_of(held), storage.stages

    def run(rest):
        # The first stage's program enters; then each stage by the program that has it.
        owners = {stage: program for program in programs for stage in program.stages}
        wire, left = owners[0].first(dict(enumerate(rest)), data), {}
        for stage, device in enumerate(stages.placement):
            program = owners[stage]
            weights = [[leaf[device] for leaf in rows[row]] for row in program.rows]
            wire = program.middle(weights, dict(enumerate(rest)), data, jnp.int32(stage), wire)
            mine = zip(program.buffer_stages.items(), wire.new_buffers, strict=True)
            left |= {number: value for (number, home), value in mine if home == stage}
            wire = wire.sent
        return program.last(dict(enumerate(rest)), data, wire).total, left

    (total, left), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(rest)

    def want(params):
        total, *_, after = telling_loss(params, buffers, batch)
        return total, after

    (total_, after), grads_ = jax.jit(jax.value_and_grad(want, has_aux=True))(params)
    np.testing.assert_allclose(total, total_, rtol=1e-5)
    np.testing.assert_allclose([left[i] for i in range(5)], jax.tree.leaves(after), rtol=1e-5)
    for got, expected in zip(grads, storage.rest_of(storage.from_model(grads_)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_buffer_that_two_stages_read_is_no_stages_own():
    params, buffers = params_of(), rank_buffers()
    storage = stored(params, *PLACED["two_ranks"])
    trace, _ = traced(borrowing_loss, params, buffers, microbatch(0))
    assert UniformStages.find(trace, storage) is None
    learned = {
        i for program in SwitchStages(trace, storage).programs() for i in program.buffer_stages
    }
    assert learned == {1, 2, 3, 4}
    with pytest.raises(
        UnsupportedError, match=r"'own0' depends on the batch.*several stages.*LayerNorm"
    ):
        buffers_over_time(trace, buffers, 2, learned)


def test_buffers_that_are_read_need_the_order_of_microbatches():
    trace, _ = traced(telling_loss, params_of(), rank_buffers(), microbatch(0))
    turned = Schedule.from_csv("0F1,0F0,,0B1,0B0\n,1F1+1B1,1F0+1B0,,\n", "turned")
    check_order(trace, rank_buffers(), build_schedule("1f1b", 2, 2), {0: 0, 1: 1})
    check_order(trace, rank_buffers(), turned, {})
    with pytest.raises(UnsupportedError, match=r"'own1' of stage 1 .*'turned' .*all named ones"):
        check_order(trace, rank_buffers(), turned, {1: 1})


def test_buffers_of_stacked_blocks_are_split_except_for_streams():
    stacks = Stacks(((("blocks",), 3),))
    whole = {"blocks": {"bias": jnp.ones((3, 2)), "count": jnp.arange(3)}, "norm": jnp.ones(3)}
    apart = stacks.split_buffers(whole)
    assert [leaf.shape for leaf in jax.tree.leaves(apart)] == [(2,), (2,), (2,), (3,), (3,)]
    assert has_split(apart)
    assert not has_split(whole)
    together = buffers_together(apart)
    assert jax.tree.structure(together) == jax.tree.structure(whole)
    assert jax.tree.map(jnp.shape, together) == jax.tree.map(jnp.shape, whole)


def test_rows_of_a_split_buffer_have_its_path():
    stacks = Stacks(((("blocks",), 2),))
    whole = {"blocks": {"bias": jnp.ones((2, 3)), "count": jnp.arange(2)}, "norm": jnp.ones(3)}
    apart = stacks.split_buffers(whole)
    assert buffer_paths(apart) == ["blocks/bias", "blocks/bias", "blocks/count", "norm"]
    assert buffer_paths(whole) == ["blocks/bias", "blocks/count", "norm"]


def test_split_buffers_that_change_once_per_step_are_found_by_the_path_of_the_model():
    """Every microbatch reads their initial value, as it does of buffers that are not split."""

    def counting_loss(params, buffers, batch):
        after = jax.tree.map(lambda count: count + 1, buffers)
        x = batch["x"] @ params["embed"]
        for number in range(len(BLOCKS)):
            x, _, _ = telling(params["blocks"][number], x, buffers["blocks"]["own"].rows[number])
        return jnp.sum(x**2), 1.0, {}, after

    stacks = Stacks(((("blocks",), len(BLOCKS)),))
    buffers = stacks.split_buffers({"blocks": {"own": jnp.zeros(len(BLOCKS))}})
    trace, _ = traced(counting_loss, params_of(), buffers, microbatch(0))
    over_time, after = buffers_over_time(trace, buffers, 4, (), {"blocks/own"})
    assert over_time == {}
    np.testing.assert_array_equal(buffers_together(after)["blocks"]["own"], np.ones(len(BLOCKS)))
    over_time, after = buffers_over_time(trace, buffers, 4)
    np.testing.assert_array_equal(over_time[0], np.arange(4))
    np.testing.assert_array_equal(buffers_together(after)["blocks"]["own"], [4] * len(BLOCKS))


def test_values_within_a_stage_are_not_sent():
    assert Wire([1], [2], [3]).sent == Wire([1], [2])
