"""Strategies by name, with the options that a config may set."""

import dataclasses
import inspect

import pytest

from axon_dist.core.errors import AxonDistWarning, MeshError
from axon_dist.parallel import STRATEGIES, compose, data_axes, ddp, fsdp, zero
from axon_dist.parallel.strategy import on_mesh
from axon_dist.sharding import LargestDim, Merge, Replicate, Wrapped
from axon_dist.train.config.schema import build_strategy


def test_rows_are_over_the_data_axes_of_the_mesh(make_world):
    world = make_world("dp=2,fsdp=2,tp=2")
    assert data_axes(world) == ("dp", "fsdp")
    assert STRATEGIES["ddp"](None, world) == ddp(("dp", "fsdp"))
    assert STRATEGIES["zero2"](None, world, min_elements=3) == zero(
        2, ("dp", "fsdp"), min_elements=3
    )
    assert STRATEGIES["hybrid_shard"](None, world) == fsdp("hybrid_shard", ("dp", "fsdp"))
    assert STRATEGIES["full_shard"](None, world) == fsdp(axes=("dp", "fsdp"))
    names = {"ddp", "zero1", "zero2", "fsdp", "hybrid", "tensor", "context", "expert", "pipeline"}
    assert names < set(STRATEGIES)


def test_state_is_split_over_the_ranks_of_positions_too(make_world):
    world = make_world("fsdp=2,cp=2")
    strategy = compose(STRATEGIES["full_shard"](None, world), STRATEGIES["context"](None, world))
    assert (strategy.batch_axes, strategy.params.axes) == (("fsdp",), ("fsdp", "cp"))
    assert strategy.reduced_axes == ("fsdp", "cp")
    assert STRATEGIES["ddp"](None, world) == ddp(("fsdp",))
    staged = make_world("pp=2,dp=2,cp=2")
    assert STRATEGIES["zero1"](None, staged) == zero(1, ("dp",))


@pytest.mark.parametrize("mesh", ["dp=4", "fsdp=4", "tp=2,fsdp=2"])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_strategy_without_axes_uses_the_only_data_axis(name, mesh, make_world):
    makers = {"ddp": ddp, "zero1": lambda: zero(1), "zero2": lambda: zero(2), "fsdp": fsdp}
    world = make_world(mesh)
    found = on_mesh(makers[name](), world.mesh)
    in_yaml = STRATEGIES[name](None, world)
    assert found.batch_axes == in_yaml.batch_axes
    assert (found.params, found.opt_state) == (in_yaml.params, in_yaml.opt_state)


class Own(Wrapped):
    """A policy of a user, which delegates to another."""

    def decide(self, path, shape, mesh, taken=None):
        """Delegates."""
        return self.policy.decide(path, shape, mesh, taken)


def test_a_default_axis_is_replaced_inside_policies_that_delegate_to_others(make_world):
    moments = Own(Merge((Own(LargestDim(("dp",))), Replicate())))
    found = on_mesh(dataclasses.replace(zero(1), opt_state=moments), make_world("fsdp=4").mesh)
    assert found.opt_state == Own(Merge((Own(LargestDim(("fsdp",))), Replicate())))
    assert found.opt_state.split_axes == ("fsdp",)


def test_strategies_without_axes_share_the_data_axes_of_a_mesh(make_world):
    mesh = make_world("dp=2,fsdp=2").mesh
    both = on_mesh(compose(ddp(), fsdp()), mesh)
    assert (both.batch_axes, both.params.axes) == (("dp", "fsdp"), ("fsdp",))
    in_yaml = build_strategy({"ddp": {}, "fsdp": {}}, None, make_world("dp=2,fsdp=2"))
    assert on_mesh(in_yaml, mesh) == both
    hybrid = on_mesh(fsdp(sharding_strategy="hybrid_shard"), mesh)
    assert hybrid == STRATEGIES["hybrid"](None, make_world("dp=2,fsdp=2"))
    assert on_mesh(fsdp(("dp", "fsdp")), mesh).batch_axes == ("dp", "fsdp")


@pytest.mark.parametrize(("make", "idle"), [(ddp, "fsdp"), (fsdp, "dp")])
def test_a_default_that_leaves_a_data_axis_without_work_warns(make, idle, make_world):
    mesh = make_world("dp=2,fsdp=2").mesh
    with pytest.warns(AxonDistWarning, match=f"along axis '{idle}'") as caught:
        assert on_mesh(make(), mesh) == make()
    assert [one.message.code for one in caught] == ["idle-data-axis"]


def test_axes_that_were_given_are_never_replaced(make_world):
    mesh = make_world("dp=2,fsdp=2").mesh
    assert on_mesh(fsdp("fsdp"), mesh) == fsdp("fsdp")
    assert on_mesh(fsdp("fsdp"), make_world("dp=4").mesh) == fsdp("fsdp")


def test_a_mesh_without_data_axes(make_world):
    with pytest.raises(MeshError, match=r"mesh tp=4 has no axis to split the batch over; add dp"):
        data_axes(make_world("tp=4"))


def test_signatures_show_what_is_left_to_say():
    options = lambda name: set(inspect.signature(STRATEGIES[name].make).parameters)
    assert "bucket_capacity" in options("ddp")
    assert "cpu_offload" in options("full_shard")
    assert {"min_elements", "shard_axes"} <= options("zero1")
    for name in ("ddp", "zero1", "full_shard"):
        assert not options(name) & {"axes", "name", "stage", "sharding_strategy"}
