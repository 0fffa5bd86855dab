"""The modelled time of compiled programs, by hand."""

import pytest

from axon_dist.inspect import model_time
from axon_dist.mesh.chips import hardware
from axon_dist.mesh.rates import ProductShape, rates_of

H100 = hardware("h100")
RATES = rates_of(H100)

LOOP = """HloModule step

%body (p: (s32[], f32[1000,1000], f32[8,1000,1000])) -> (s32[], f32[1000,1000], f32[8,1000,1000]) {
  %p = (s32[], f32[1000,1000], f32[8,1000,1000]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1000,1000]{1,0} get-tuple-element(%p), index=1
  %stack = f32[8,1000,1000]{2,1,0} get-tuple-element(%p), index=2
  %y = f32[1000,1000]{1,0} tanh(%x)
  %row = f32[1,1000,1000]{2,1,0} bitcast(%y)
  %zero = s32[] constant(0)
  %put = f32[8,1000,1000]{2,1,0} dynamic-update-slice(%stack, %row, %i, %zero, %zero)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[1000,1000], f32[8,1000,1000]) tuple(%next, %y, %put)
}

%goes (p: (s32[], f32[1000,1000], f32[8,1000,1000])) -> pred[] {
  %p = (s32[], f32[1000,1000], f32[8,1000,1000]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(8)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[1000,1000]) -> f32[8,1000,1000] {
  %x = f32[1000,1000]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %none = f32[] constant(0)
  %stack = f32[8,1000,1000]{2,1,0} broadcast(%none), dimensions={}
  %start = (s32[], f32[1000,1000], f32[8,1000,1000]) tuple(%zero, %x, %stack)
  %loop = (s32[], f32[1000,1000], f32[8,1000,1000]) while(%start), condition=%goes, body=%body, backend_config={"known_trip_count":{"n":"8"}}
  ROOT %result = f32[8,1000,1000]{2,1,0} get-tuple-element(%loop), index=2
}
"""  # noqa: E501


def test_a_stack_is_cleared_once_and_updated_in_place():
    found = model_time(LOOP, machine=H100)
    assert found.kernels["copies"] == 1 + 8
    one = 4e6
    assert found.seconds["copies"] == pytest.approx((8 * one + 8 * one) / RATES.memory, rel=1e-3)
    # tanh reads and writes; the loop counts in integers of a few bytes.
    assert found.seconds["kernels"] == pytest.approx(8 * 2 * one / RATES.memory, rel=1e-3)
    launched = sum(found.kernels.values())
    assert found.seconds["gaps"] == pytest.approx(launched * RATES.gap)
    assert found.total == pytest.approx(sum(found.seconds.values()))


def test_a_loop_that_never_runs_takes_no_time():
    found = model_time(LOOP.replace('"n":"8"', '"n":"0"'), machine=H100)
    assert found.kernels["kernels"] == 0
    assert found.kernels["copies"] == 1


PRODUCTS = """HloModule step
ENTRY %main (a: bf16[4096,768], b: bf16[768,3072], c: bf16[8,64,32], d: bf16[8,32,16]) -> bf16[4096,3072] {{
  %a = bf16[4096,768]{{1,0}} parameter(0)
  %b = bf16[768,3072]{{1,0}} parameter(1)
  %c = bf16[8,64,32]{{2,1,0}} parameter(2)
  %d = bf16[8,32,16]{{2,1,0}} parameter(3)
  {line}
}}
"""  # noqa: E501
CUBLAS = (
    'ROOT %x = bf16[4096,3072]{1,0} custom-call(%a, %b), custom_call_target="__cublas$gemm", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]}}}'
)


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        (
            "ROOT %x = bf16[4096,3072]{1,0} dot(%a, %b), lhs_contracting_dims={1}, "
            "rhs_contracting_dims={0}",
            ProductShape(4096, 3072, 768),
        ),
        (
            "ROOT %x = bf16[8,64,16]{2,1,0} dot(%c, %d), lhs_batch_dims={0}, rhs_batch_dims={0}, "
            "lhs_contracting_dims={2}, rhs_contracting_dims={1}",
            ProductShape(64, 16, 32, batch=8),
        ),
        (CUBLAS, ProductShape(4096, 3072, 768)),
    ],
)
def test_products_take_the_time_of_their_shape(line, shape):
    found = model_time(PRODUCTS.format(line=line), machine=H100)
    assert found.kernels["products"] == 1
    assert found.seconds["products"] == RATES.product_seconds(shape)
    expected = shape.flops / H100.flops / found.total
    assert found.utilization(shape.flops) == pytest.approx(expected)


def test_an_unknown_chip_gives_no_time():
    assert model_time(LOOP) is None


HIDDEN = """HloModule step, is_scheduled=true, num_partitions=8

ENTRY %main (x: bf16[8192,8192], w: bf16[8192,8192], s: bf16[1024,8192]) -> (bf16[8192,8192], bf16[8192,8192]) {
  %x = bf16[8192,8192]{1,0} parameter(0)
  %w = bf16[8192,8192]{1,0} parameter(1)
  %s = bf16[1024,8192]{1,0} parameter(2)
  %start = (bf16[1024,8192]{1,0}, bf16[8192,8192]{1,0}) all-gather-start(%s), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %y = bf16[8192,8192]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all = bf16[8192,8192]{1,0} all-gather-done(%start)
  ROOT %out = (bf16[8192,8192]{1,0}, bf16[8192,8192]{1,0}) tuple(%y, %all)
}
"""  # noqa: E501


def test_a_hidden_transfer_slows_compute_down():
    found = model_time(HIDDEN, machine=H100)
    wire = 7 / 8 * 2 * 8192**2 / H100.link
    assert found.seconds["wire"] == pytest.approx(RATES.slowdown(wire))
    assert found.seconds["products"] > wire
