"""The program of an H100: an fp8 kernel for each of a layer's products, and the bytes sent."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import MixedPrecision, World, build_train_step, fsdp
from axon_dist.core.tree import leaves_with_paths
from axon_dist.inspect import collectives, target_devices
from axon_dist.inspect.computations import visits
from axon_dist.inspect.parse import as_module
from axon_dist.mesh.targets import missing_compiler
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.ops.fp8 import fp8_layers

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(missing_compiler("h100:8") is not None, reason="needs the CUDA compiler"),
]


LAYERS, RING = 4, 7 / 8


@functools.cache
def compiled(precision, scan=True, target="h100:8"):
    config = TransformerConfig.preset(
        "tiny", num_layers=LAYERS, width=256, ffn_width=512, num_heads=4, scan_layers=scan
    )
    world = World.init("fsdp=8", devices=list(target_devices(target)))
    step = build_train_step(
        lambda: Transformer(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), next_token_loss,
        fsdp(), world, precision=precision,
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((16, config.max_length + 1), jnp.int32)
    return step, as_module(step.lower({"tokens": tokens}).compile())


def products_in_fp8(module) -> int:
    """Counts the fp8 products of a step, including loop iterations and fusions."""
    found = 0
    for visit in visits(module):
        fusions = [one for one in visit.computation.instructions if one.opcode == "fusion"]
        inner = [computation for one in fusions for computation in module.called(one)]
        for computation in (visit.computation, *inner):
            for one in computation.instructions:
                if one.opcode in ("dot", "custom-call"):
                    operands = computation.operand_shapes(one)[:2]
                    is_fp8 = len(operands) == 2 and all(x.dtype[:2] == "f8" for x in operands)
                    found += visit.count * is_fp8
    return found


@pytest.mark.parametrize("scan", [False, True])
def test_three_products_per_layer(scan):
    """Seven dense layers in each block, one product forward and two backward."""
    assert products_in_fp8(compiled("fp8", scan)[1]) == LAYERS * 7 * 3


def sent(step, module, kind):
    """Counts the bytes sent, by the narrowest dtype of each collective."""
    found: dict[str, float] = dict.fromkeys(("u8", "bf16", "f32"), 0.0)
    for row in collectives(module, step.world.mesh).select(kind).rows:
        for narrow in [dtype for dtype in found if dtype in row.dtypes][:1]:
            found[narrow] += row.wire_bytes * row.count
    return found


def test_bytes_are_four_in_place_of_six():
    """Two gathers, of two bytes or one, and one reduction in bfloat16."""
    step, module = compiled("fp8")
    narrow_step, narrow_module = compiled(MixedPrecision.fp8(gather="fp8"))
    layers = fp8_layers(step.model_spec.abstract)
    count = sum(math.prod(step.model_spec.shapes[f"{layer}/kernel"]) for layer in layers)
    wide, narrow = sent(step, module, "all-gather"), sent(narrow_step, narrow_module, "all-gather")
    # All other transfers, of tokens and vectors, are the same in both.
    rest = wide["bf16"] - 2 * 2 * count * RING
    assert wide["u8"] == 0
    assert 0 <= rest < 0.1 * count
    assert narrow["u8"] + narrow["bf16"] - 2 * count * RING == pytest.approx(rest, abs=0.01 * count)
    assert narrow["bf16"] <= rest
    leaves = leaves_with_paths(step.model_spec.params)
    is_split = lambda path, x: any(step.strategy.params(path, x.shape, step.world.mesh))
    split = sum(math.prod(x.shape) for path, x in leaves if is_split(path, x))
    for one in (step, module), (narrow_step, narrow_module):
        assert sent(*one, "reduce-scatter") == {"u8": 0, "bf16": 2 * split * RING, "f32": 0}
