"""Kernels and rematerialisation, read from compiled text."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, ddp
from axon_dist.core.errors import ClaimError
from axon_dist.inspect import attention_kernels, expect_kernels, flops, kernels, recomputed, report

HLO = """HloModule step, num_partitions=2

%body (arg: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %arg = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%arg), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %fwd.3 = f32[8,4]{1,0} custom-call(%x, %x, %x), custom_call_target="__cudnn$fmhaSoftmax"
  %dot.remat2 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%next, %fwd.3)
}

%condition (arg.1: (s32[], f32[8,4])) -> pred[] {
  %arg.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %three), direction=LT
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %logits = f32[2,4,96]{2,1,0} broadcast(%zero), dimensions={}
  %k = f32[2,4,256,64]{3,2,1,0} broadcast(%zero), dimensions={}
  %splash_mha_fwd_residuals.7 = QUERIES custom-call(%k, %k, %k), KERNEL
  %splash_mha_dkv_no_residuals.8 = (f32[2,2,4,256,64]{4,3,2,1,0}, QUERIES) custom-call(%k), KERNEL
  %gemm = f32[8,4]{1,0} custom-call(%p), custom_call_target="__cublas$gemm"
  %start = (s32[], f32[8,4]{1,0}) tuple(%zero, %p)
  %loop = (s32[], f32[8,4]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %result = f32[8,4]{1,0} get-tuple-element(%loop), index=1
}
""".replace("QUERIES", "f32[2,4,256,64]{3,2,1,0}").replace(
    "KERNEL", 'custom_call_target="tpu_custom_call"'
)


def test_custom_calls_are_counted_by_target_and_pallas_kernels_by_name():
    fused = {
        "__cudnn$fmhaSoftmax": 3,
        "tpu_custom_call splash_mha_dkv_no_residuals": 1,
        "tpu_custom_call splash_mha_fwd_residuals": 1,
    }
    assert attention_kernels(HLO) == fused
    assert kernels(HLO) == {"__cublas$gemm": 1, **fused}


def test_the_products_of_splash_attention_are_counted():
    """Two forward, and five in the backward kernel that leaves the queries' gradient in blocks."""
    pair = 2 * 2 * 4 * 256 * 256 * 64
    found = flops(HLO)
    assert found.high == 7 * pair + 3 * 2 * 8 * 8 * 4
    assert found.opaque == ()


def test_rematerialized_work_of_xla_is_counted():
    found = recomputed(HLO)
    assert (found.count, found.bytes, found.flops) == (3, 3 * 8 * 8 * 4, 3 * 2 * 8 * 8 * 4)
    assert "3 instructions" in str(found)


def test_an_expectation_that_fails_says_what_was_found():
    assert expect_kernels(HLO, attention=5, loss=(9, 96), remat=3) == kernels(HLO)
    expect_kernels(HLO, attention=range(1, 10))
    with pytest.raises(ClaimError, match=r"5 fused kernels .* instead of 6 \(3 __cudnn\$fmhaSo"):
        expect_kernels(HLO, attention=6)
    with pytest.raises(ClaimError, match=r"logits of 8 positions and 96 classes, but none"):
        expect_kernels(HLO, loss=(8, 96))
    padded = HLO.replace("f32[2,4,96]", "f32[2,4,100]")
    with pytest.raises(ClaimError, match=r"logits of 8 positions and 96 classes, but none"):
        expect_kernels(padded, loss=(8, 96))
    with pytest.raises(ClaimError, match=r"by itself: 3 instructions, .*, instead of 0"):
        expect_kernels(HLO, remat=0)
    without = HLO.replace("__cudnn$fmhaSoftmax", "other").replace("splash_mha", "sort")
    with pytest.raises(ClaimError, match=r"0 fused kernels .* its custom calls: 1 __cublas\$gemm"):
        expect_kernels(without, attention=range(1, 9))


def test_a_step_claims_its_kernels():
    world = World.emulate(1, "dp=1")
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    make = lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    step = build_train_step(make, optax.sgd(0.1), loss, ddp(), world)
    compiled = step.lower({"x": jax.ShapeDtypeStruct((4, 2), jnp.float32)}).compile()
    claims = step.claims.of_program(functools.partial(expect_kernels, attention=0, remat=0))
    claims.check_compiled(compiled, step.abstract_state)
    assert report(compiled, world.mesh).to_dict()["recomputed"]["count"] == 0
    fused = step.claims.of_program(functools.partial(expect_kernels, attention=2))
    with pytest.raises(ClaimError, match=r"0 fused kernels of attention instead of 2"):
        fused.check_compiled(compiled, step.abstract_state)
