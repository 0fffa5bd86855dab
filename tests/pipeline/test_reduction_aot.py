"""PP × FSDP × TP as H100s would run it: weights gathered and gradients scattered once per step."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, pipelined
from axon_dist.inspect import collectives, target_devices
from axon_dist.mesh.targets import missing_compiler
from axon_dist.models import Transformer, TransformerConfig, next_token_loss, num_params
from axon_dist.parallel import fsdp, suggest_plan, tensor_parallel

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(missing_compiler("h100:8") is not None, reason="needs the CUDA compiler"),
]


def test_gradients_are_scattered_in_the_compute_dtype_with_automatic_axes():
    """A rank holds its stage and the table and head, a half of each: bytes by arithmetic."""
    config = TransformerConfig.preset("1b", num_layers=4, attention="cudnn", max_length=2048)
    make = lambda: Transformer(config, rngs=nnx.Rngs(0))
    world = World.init("pp=2,fsdp=2,tp=2", devices=list(target_devices("h100:8")))
    tensor = tensor_parallel(suggest_plan(make), sequence=True)
    strategy = compose(fsdp(mixed_precision="bf16"), tensor, pipelined(2, 4))
    step = build_train_step(make, optax.adam(1e-4), next_token_loss, strategy, world)
    tokens = jax.ShapeDtypeStruct((16, 2049), jnp.int32)
    program = step.lower({"tokens": tokens}).compile()
    ledger = collectives(program, world.mesh)

    outside = 2 * config.vocab_size * config.width
    held = (num_params(config) - outside) // 4 + outside // 2
    once = 2 * held // 2
    for kind in ("all-gather", "reduce-scatter"):
        assert ledger.total_wire_bytes(kind, "fsdp") == pytest.approx(once, rel=0.01)
    assert ledger.total_wire_bytes("all-reduce", "fsdp") < 0.001 * once
    assert ledger.total_wire_bytes("all-reduce", ("pp", "fsdp")) < 0.001 * once
