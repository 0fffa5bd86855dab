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
from axon_dist.inspect import as_module, expect_kernels, target_devices
from axon_dist.inspect.computations import visits
from axon_dist.inspect.flops import CostModel
from axon_dist.mesh.targets import missing_compiler, prepare_environment
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.nn import linear_cross_entropy
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


@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
def test_the_loss_is_three_products_and_one_pass_each_way(logits_dtype):
    if missing := missing_compiler("h100:1"):
        pytest.skip(missing)
    prepare_environment("h100:1")
    place = jax.sharding.SingleDeviceSharding(target_devices("h100:1")[0])
    width, classes, chunk = 256, 50_304, 2048

    def loss(hidden, kernel, labels):
        return linear_cross_entropy(hidden, kernel, labels, logits_dtype=logits_dtype).mean

    shapes = ((2 * chunk, width), (width, classes)), jnp.bfloat16
    arrays = [jax.ShapeDtypeStruct(shape, shapes[1], sharding=place) for shape in shapes[0]]
    labels = jax.ShapeDtypeStruct((2 * chunk,), jnp.int32, sharding=place)
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1)))
    module = as_module(gradient.lower(*arrays, labels).compile())
    costs, products, passes = CostModel(module), 0, []
    for visit in visits(module):
        for one in visit.computation.instructions:
            if one.opcode in ("while", "tuple", "get-tuple-element", "parameter"):
                continue
            cost = costs.instruction(visit.computation, one)
            if cost.high:
                products += visit.count
            elif cost.traffic > chunk * classes:
                passes += [cost.traffic] * visit.count
    assert products == 2 * 3
    size = chunk * classes * jnp.dtype(logits_dtype).itemsize
    # The statistics read the logits; the gradient reads them, and is written once in bfloat16.
    expected = sorted(2 * [size, size + 2 * chunk * classes])
    assert sorted(passes) == pytest.approx(expected, rel=0.02)
