"""What an H100 would run: a kernel of fp8 operands for each of a layer's products, and bytes."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import MixedPrecision, World, build_train_step, fsdp
from axon_dist.hardware import missing_compiler
from axon_dist.hlo import as_module
from axon_dist.hlo.walk import visits
from axon_dist.inspect import collectives, target_devices
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.precision import fp8_layers

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


def products_in_fp8(scan: bool) -> int:
    """How many a step runs, its loops counted turn by turn."""
    _, module = compiled("fp8", scan)
    found = 0
    for visit in visits(module):
        for instruction in visit.computation.instructions:
            if instruction.opcode in ("dot", "custom-call"):
                operands = visit.computation.operand_shapes(instruction)[:2]
                is_fp8 = len(operands) == 2 and all(x.dtype.startswith("f8") for x in operands)
                found += visit.count * is_fp8
    return found


@pytest.mark.parametrize("scan", [False, True])
def test_three_products_per_layer(scan):
    """Seven dense layers in each block; forward, and forward again at most, and two backward."""
    assert products_in_fp8(scan) in (LAYERS * 3 * 7, LAYERS * 4 * 7)


def sent(step, module, kind):
    """Bytes by the narrowest dtype of a collective."""
    found: dict[str, float] = dict.fromkeys(("u8", "bf16", "f32"), 0.0)
    for row in collectives(module, step.world.mesh).select(kind).rows:
        narrow = next(dtype for dtype in found if dtype in row.dtypes)
        found[narrow] += row.wire_bytes * row.count
    return found


def test_bytes_are_four_in_place_of_six():
    """Gathered twice, two bytes or one; reduced once, in bfloat16 and nothing wider."""
    step, module = compiled("fp8")
    narrow_step, narrow_module = compiled(MixedPrecision.fp8(gather="fp8"))
    layers = fp8_layers(step.parts.abstract)
    count = sum(math.prod(step.parts.shape_of(f"{layer}/kernel")) for layer in layers)
    wide, narrow = sent(step, module, "all-gather"), sent(narrow_step, narrow_module, "all-gather")
    # What travels beside, tokens and vectors, is the same in both.
    rest = wide["bf16"] - 2 * 2 * count * RING
    assert wide["u8"] == 0
    assert 0 <= rest < 0.1 * count
    assert narrow["u8"] + narrow["bf16"] - 2 * count * RING == pytest.approx(rest, abs=0.01 * count)
    assert narrow["bf16"] <= rest
    for one in (step, module), (narrow_step, narrow_module):
        reduced = sent(*one, "reduce-scatter")
        assert reduced["bf16"] == pytest.approx(2 * count * RING, rel=0.05)
        assert reduced["f32"] == 0
