"""Host memory as memory kinds, refused before anything compiles where there is none."""

import types

import jax
import optax
import pytest

from axon_dist import CPUOffload, build_train_step, fsdp, zero
from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.parallel.strategy_values import check_offload

from . import tower


def kinds(tree) -> set:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize(
    ("offload", "params", "moments"),
    [
        ("none", {"device"}, {"device"}),
        ("params", {"pinned_host"}, {"device"}),
        ("optimizer", {"device"}, {"pinned_host"}),
        ("full", {"pinned_host"}, {"pinned_host"}),
    ],
)
def test_memory_kinds_of_the_state(world, offload, params, moments):
    strategy = fsdp(axes=("dp",), cpu_offload=offload, min_elements=8)
    # Arrays are drawn where they live, or put there.
    model = tower.make(1) if offload == "full" else tower.make(1)()
    step = build_train_step(model, optax.adam(1e-2), tower.loss_fn, strategy, world)
    state = step.init()
    assert kinds(state.params) == params
    assert kinds(state.opt_state) == moments


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_computes_the_same_and_leaves_the_state_on_the_host(world, stage):
    states = {}
    for offload in ("none", "full"):
        strategy = zero(stage, "dp", cpu_offload=offload, min_elements=8)
        step = build_train_step(tower.make(1), optax.sgd(0.1), tower.loss_fn, strategy, world)
        states[offload], _ = step(step.init(), tower.batch())
    assert kinds(states["full"].params) == {"pinned_host"}
    near, far = (jax.tree.leaves(jax.device_get(states[name].params)) for name in ("none", "full"))
    assert all((a == b).all() for a, b in zip(near, far, strict=True))


def test_where_there_is_no_host_memory(world):
    bare = types.SimpleNamespace(memory_kinds=lambda: frozenset({"device"}), backend=world.backend)
    check_offload(CPUOffload.NONE, bare)
    with pytest.raises(
        UnsupportedError, match=r"offload 'params' needs memory of kind 'pinned_host'.*\['device'\]"
    ):
        check_offload(CPUOffload.PARAMS, bare)


def test_an_unknown_choice():
    with pytest.raises(
        ConfigError, match=r"CPUOffload got 'parms', and has no such member\. Did you mean 'params'"
    ):
        fsdp(cpu_offload="parms")
