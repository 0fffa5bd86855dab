"""The kernels and the loss of our own step, compiled for chips that are not here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step
from axon_dist.core.errors import ClaimError
from axon_dist.inspect import expect_kernels, target_devices
from axon_dist.mesh.targets import missing_compiler, prepare_environment
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import fsdp

pytestmark = pytest.mark.aot
LAYERS, LENGTH, SAMPLES = 2, 1024, 16


@functools.cache
def compiled(target, precision, **changes):
    if missing := missing_compiler(target):
        pytest.skip(missing)
    prepare_environment(target)
    devices = target_devices(target)
    world = World.init(f"fsdp={len(devices)}", devices)
    config = TransformerConfig(
        vocab_size=50_257, width=256, num_layers=LAYERS, num_heads=2, tied_head=True
    )
    make = lambda: Transformer(dataclasses.replace(config, **changes), rngs=nnx.Rngs(0))
    step = build_train_step(
        make, optax.adamw(1e-3), next_token_loss, fsdp(), world, precision=precision
    )
    batch = {"tokens": jax.ShapeDtypeStruct((SAMPLES * len(devices), LENGTH + 1), jnp.int32)}
    return step, step.lower(batch).compile()


@pytest.mark.parametrize(("target", "kernel"), [("h100:8", "fmha"), ("v5p:2x2x1", "splash")])
def test_bfloat16_takes_fused_attention_and_holds_no_logits(target, kernel):
    step, program = compiled(target, "bf16")
    claim = functools.partial(
        expect_kernels, attention=2 * LAYERS, loss=(SAMPLES * LENGTH, 50_257), remat=0
    )
    step.claims.of_program(claim).check_compiled(program, step.abstract_state)
    assert any(kernel in name for name in expect_kernels(program))


def test_float32_on_a_gpu_is_not_fused_and_an_expectation_says_so():
    _, program = compiled("h100:8", None)
    with pytest.raises(ClaimError, match=r"0 fused kernels of attention instead of 4"):
        expect_kernels(program, attention=2 * LAYERS)


def test_whole_logits_are_found():
    _, program = compiled("h100:8", "bf16", logits="whole")
    with pytest.raises(ClaimError, match=r"logits of \d+ positions and 50257 classes"):
        expect_kernels(program, loss=(SAMPLES * LENGTH, 50_257))
