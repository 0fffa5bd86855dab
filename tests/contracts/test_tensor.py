"""Tensor and sequence parallelism, alone and composed, equal one device."""

import functools
from collections.abc import Callable

import jax
import pytest

from axon_dist import ActivationCheckpointing, Strategy, compose, ddp
from axon_dist.parallel import STRATEGIES as AXON
from axon_dist.parallel import data_axes, fsdp, suggest_plan, tensor_parallel, zero

from .models import linen_net
from .test_strategies import Row, check


def tensor(model, world, sequence=False, rings=False):
    inputs = (jax.ShapeDtypeStruct((2, 16), "float32"),) if type(model).__name__ == "ToNNX" else ()
    return tensor_parallel(suggest_plan(model, *inputs), sequence=sequence, rings=rings)


def with_data(make: Callable, sequence: bool = False, rings: bool = False) -> Callable:
    return lambda model, world: compose(make(world), tensor(model, world, sequence, rings))


TENSOR: dict[str, Callable] = {
    "tensor": tensor,
    "tensor_sp": functools.partial(tensor, sequence=True),
    "tensor_rings": functools.partial(tensor, sequence=True, rings=True),
    "tensor_row": lambda model, world: AXON["tensor"](model, world, plan="transformer"),
    "ddp_tensor": with_data(lambda world: ddp()),
    "ddp_tensor_sp": with_data(lambda world: ddp(), sequence=True),
    "zero1_tensor": with_data(lambda world: zero(1, min_elements=8)),
    "zero2_tensor_sp": with_data(lambda world: zero(2, min_elements=8), sequence=True),
    "fsdp_tensor": with_data(lambda world: fsdp(min_elements=8)),
    "fsdp_tensor_sp": with_data(lambda world: fsdp(min_elements=8), sequence=True),
    "ddp_tensor_rings": with_data(lambda world: ddp(), sequence=True, rings=True),
    "fsdp_tensor_rings": with_data(lambda world: fsdp(min_elements=8), sequence=True, rings=True),
    "ddp_tensor_sums": lambda model, world: compose(
        with_data(lambda world: ddp(), sequence=True)(model, world),
        Strategy("remat", remat=ActivationCheckpointing(policy="sums")),
    ),
    "hybrid_tensor_sp": with_data(
        lambda world: fsdp("hybrid_shard", data_axes(world), min_elements=8), sequence=True
    ),
}

ROWS = [
    Row("tensor", "tp=8", "linen"),
    Row("zero1_tensor", "dp=2,tp=4", "weighted", 2),
    Row("fsdp_tensor", "fsdp=2,tp=4", "dropout", 2),
]
MODELS = ("mlp", "weighted", "batchnorm", "dropout", "linen", "transformer")
MESHES = {"tensor": ("tp=2", "tp=4"), "hybrid": ("dp=2,fsdp=2,tp=2",)}
FULL = [
    Row("ddp_tensor", "dp=2,tp=2", "dropout", 2),
    *(
        Row(strategy, mesh, model, k)
        for strategy in TENSOR
        for data in (strategy.split("_")[0],)
        for axis in ("fsdp" if data == "fsdp" else "dp",)
        for mesh in MESHES.get(data, (f"{axis}=2,tp=4", f"{axis}=4,tp=2"))
        for model in (
            ("transformer",) if strategy.endswith(("_row", "_sums", "_rings")) else MODELS
        )
        for k in (1, 2)
        if not (strategy == "tensor_row" and mesh == "tp=4")
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_one_device(row):
    check(row, TENSOR, has_gradients=False)


@pytest.mark.full
@pytest.mark.parametrize("row", dict.fromkeys([*ROWS, *FULL]), ids=str)
def test_equals_one_device_full(row):
    check(row, TENSOR)


def test_a_linen_module_is_split_within_its_bridge():
    assert len(tensor(linen_net(), None).layers[0].policy.plan.rules) == 2
