"""Clipping, and what a step keeps of an update that is not finite."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist import GradScaler
from axon_dist.core.errors import ConfigError, DTypeError
from axon_dist.precision import clip_by_global_norm
from axon_dist.step import Nonfinite, TrainState
from axon_dist.step.options import StepOptions
from axon_dist.step.update import clip, skip_overflow, undo_nonfinite

GRADS = {"a": jnp.asarray(np.float32([3, 0])), "b": jnp.asarray(np.float32([[4]]))}
SCALER = GradScaler(init_scale=8.0, min_scale=2.0, growth_interval=2)
YES, NO = jnp.asarray(np.bool_(True)), jnp.asarray(np.bool_(False))


def state(value: float, scale: float | None = None) -> TrainState:
    """A state whose every array tells by its value where it comes from."""
    scaler = None
    if scale is not None:
        scaler = dataclasses.replace(SCALER.init(), scale=jnp.float32(scale))
    return TrainState(
        step=jnp.int32(value),
        params={"w": jnp.full(2, float(value))},
        opt_state={"moment": jnp.full(2, float(value)), "count": jnp.int32(value)},
        buffers={
            "draws": jnp.int32(value),
            "hits": jnp.int32(value),
            "mean": jnp.full(2, float(value)),
        },
        scaler=scaler,
    )


def numbers(state: TrainState) -> list:
    """One number per leaf: step, params, moment count and moment, draws, hits and mean."""
    trees = [state.step, state.params, state.opt_state, state.buffers]
    return [float(np.ravel(leaf)[0]) for leaf in jax.tree.leaves(trees)]


NEW, OLD = [2.0] * 7, [1.0] * 7
UNDONE = [2.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0]
"""The step and the draws count on; parameters, moments, statistics and their counts stay."""
RANDOM = frozenset({"draws"})


@pytest.mark.parametrize(("limit", "factor"), [(None, 1), (10.0, 1), (5.0, 1), (2.5, 0.5)])
def test_long_gradients_are_scaled_down_to_the_limit(limit, factor):
    clipped, measured = clip(GRADS, StepOptions(clip_norm=limit, metrics=("loss", "grad_norm")))
    assert float(measured["grad_norm"]) == 5
    for name, leaf in GRADS.items():
        np.testing.assert_allclose(clipped[name], leaf * factor, rtol=1e-6)


@pytest.mark.parametrize(
    ("number", "size", "limit", "dtype"),
    [
        (6e4, 100, 0.01, jnp.float16),
        (1e3, 1000, 0.01, jnp.float16),
        (5.0, 1000, 1.0, jnp.bfloat16),
        (3.0, 1000, 1.0, jnp.float32),
    ],
)
def test_the_factor_is_not_rounded_to_the_dtype_of_the_gradients(number, size, limit, dtype):
    clipped, norm = clip_by_global_norm({"w": jnp.full(size, number, dtype)}, limit)
    assert clipped["w"].dtype == dtype
    assert float(norm) == pytest.approx(number * size**0.5, rel=1e-3)
    each = float(clipped["w"][0])
    assert each == pytest.approx(limit / size**0.5, rel=float(jnp.finfo(dtype).eps) / 2)


def test_gradients_below_the_limit_keep_their_bits():
    grads = {"w": jnp.array([3e-7, 4e-7])}
    assert clip_by_global_norm(grads, 1e-6)[0]["w"].tolist() == grads["w"].tolist()
    assert clip_by_global_norm(grads, 0.0)[0]["w"].tolist() == [0, 0]


@pytest.mark.parametrize("limit", [-1, -1.0, float("nan"), np.float32(-1)])
def test_a_norm_below_zero_is_refused(limit):
    with pytest.raises(ConfigError, match=r"max_norm is .*at least 0, or None"):
        clip_by_global_norm({"w": jnp.ones(2)}, limit)


def test_integers_cannot_be_clipped():
    with pytest.raises(DTypeError, match=r"gradient 'w' of dtype int32.*astype"):
        clip_by_global_norm({"w": jnp.array([3, 4])}, 1.0)


def test_norms_are_measured_where_they_are_needed_alone():
    assert clip(GRADS, StepOptions())[1] == {}
    assert list(clip(GRADS, StepOptions(clip_norm=1.0))[1]) == ["grad_norm"]


def test_squares_of_half_precision_are_added_up_in_float32():
    many = {"a": jnp.full(4096, 1 / 16, jnp.bfloat16), "b": jnp.full(1, 300.0, jnp.float16)}
    clipped, measured = clip(many, StepOptions(clip_norm=1.0))
    assert float(measured["grad_norm"]) == pytest.approx(np.sqrt(16 + 90000), rel=1e-6)
    assert [leaf.dtype for leaf in jax.tree.leaves(clipped)] == [jnp.bfloat16, jnp.float16]


def test_an_overflow_keeps_the_state_and_lowers_the_scale():
    kept = skip_overflow(SCALER, NO, state(2, 8), state(1, 8), RANDOM)
    assert numbers(kept) == UNDONE
    assert (float(kept.scaler.scale), int(kept.scaler.skipped)) == (4, 1)
    taken = skip_overflow(SCALER, YES, state(2, 8), state(1, 8), RANDOM)
    assert numbers(taken) == NEW
    assert (float(taken.scaler.scale), int(taken.scaler.good_steps)) == (8, 1)


def undo(policy, loss, finite, was_nonfinite=None, scale=None):
    options = StepOptions(nonfinite=policy, scaler=None if scale is None else SCALER)
    new, lost = undo_nonfinite(
        options, jnp.float32(loss), finite, state(2, scale), state(1, scale), was_nonfinite, RANDOM
    )
    return numbers(new), bool(lost)


@pytest.mark.parametrize("policy", Nonfinite)
@pytest.mark.parametrize(
    ("loss", "finite"), [(1.0, NO), (np.nan, YES), (np.inf, YES), (-np.inf, YES), (np.nan, NO)]
)
def test_a_loss_or_a_gradient_alone_undoes_a_step(policy, loss, finite):
    kept = UNDONE if policy is Nonfinite.SKIP else OLD
    assert undo(policy, loss, finite) == (kept, True)


@pytest.mark.parametrize("policy", Nonfinite)
def test_a_finite_step_stays(policy):
    assert undo(policy, 1.0, YES) == (NEW, False)
    assert undo(policy, 1.0, YES, was_nonfinite=NO) == (NEW, False)


def test_once_not_finite_the_old_state_stays():
    assert undo(Nonfinite.STOP, 1.0, YES, was_nonfinite=YES) == (OLD, True)
    assert undo(Nonfinite.ROLLBACK, 1.0, YES, was_nonfinite=YES) == (OLD, True)
    assert undo(Nonfinite.STOP, np.nan, YES, was_nonfinite=NO) == (OLD, True)


@pytest.mark.parametrize("policy", [Nonfinite.SKIP, Nonfinite.STOP])
def test_an_overflow_counts_once_the_scale_is_at_its_lowest(policy):
    kept = UNDONE if policy is Nonfinite.SKIP else OLD
    assert undo(policy, 1.0, NO, scale=4.0) == (NEW, False)
    assert undo(policy, 1.0, NO, scale=2.0) == (kept, True)
    assert undo(policy, np.inf, NO, scale=4.0) == (kept, True)
    assert undo(policy, np.inf, YES, scale=4.0) == (kept, True)
