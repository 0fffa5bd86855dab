"""What an H100 would run: one kernel of fp8 operands for each of a layer's three products."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, fsdp
from axon_dist.hardware import missing_compiler
from axon_dist.hlo import as_module
from axon_dist.inspect import target_devices
from axon_dist.models import Transformer, TransformerConfig, next_token_loss

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(missing_compiler("h100:8") is not None, reason="needs the CUDA compiler"),
]


def products_in_fp8(scan: bool) -> int:
    config = TransformerConfig.preset(
        "tiny", num_layers=2, width=256, ffn_width=512, num_heads=4, scan_layers=scan
    )
    world = World.init("fsdp=8", devices=list(target_devices("h100:8")))
    step = build_train_step(
        lambda: Transformer(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), next_token_loss,
        fsdp(), world, precision="fp8",
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((16, config.max_length + 1), jnp.int32)
    module = as_module(step.lower({"tokens": tokens}).compile())
    found = 0
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode in ("dot", "custom-call"):
                operands = computation.operand_shapes(instruction)[:2]
                found += len(operands) == 2 and all(x.dtype.startswith("f8") for x in operands)
    return found


@pytest.mark.parametrize("scan", [False, True])
def test_three_products_per_layer(scan):
    """Seven dense layers in each block; the body of a loop stands once, and for both directions."""
    forward, backward = 7, 14
    blocks = 1 if scan else 2
    found = products_in_fp8(scan)
    assert found in (blocks * (forward + backward), blocks * (2 * forward + backward))
