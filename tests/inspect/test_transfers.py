"""The forms that GPU and TPU compilers give collectives, as short programs written by hand."""

import pytest

from axon_dist.inspect import collectives
from axon_dist.inspect.parse import parse
from axon_dist.inspect.transfers import transfers

HEADER = "HloModule step, is_scheduled=true, num_partitions=8\n\n"

PAIR = """
ENTRY %main (x: bf16[256,64]) -> bf16[2048,64] {
  %x = bf16[256,64]{1,0} parameter(0)
  %ag = (bf16[256,64]{1,0}, bf16[2048,64]{1,0}) all-gather-start(%x), replica_groups=[1,8]<=[8], \
dimensions={0}, backend_config={"collective_backend_config":{"is_sync":false}}
  %square = bf16[256,64]{1,0} multiply(%x, %x)
  ROOT %done = bf16[2048,64]{1,0} all-gather-done(%ag)
}
"""

COMBINED = """
ENTRY %main (x: bf16[80], y: f32[16]) -> (bf16[10], f32[2]) {
  %x = bf16[80]{0} parameter(0)
  %y = f32[16]{0} parameter(1)
  %rs = ((bf16[80]{0}, f32[16]{0}), (bf16[10]{0}, /*index=1*/f32[2]{0})) reduce-scatter-start(%x, \
%y), replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, dimensions={0}, to_apply=%add
  ROOT %done = (bf16[10]{0}, f32[2]{0}) reduce-scatter-done(%rs)
}
"""

WRAPPED = """
%wrapped (p: f32[80]) -> f32[10] {
  %p = f32[80]{0} parameter(0)
  ROOT %rs = f32[10]{0} reduce-scatter(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}

ENTRY %main (x: f32[80]) -> f32[10] {
  %x = f32[80]{0} parameter(0)
  %start = ((f32[80]{0}), f32[10]{0}, u32[]) async-start(%x), calls=%wrapped
  %update = ((f32[80]{0}), f32[10]{0}, u32[]) async-update(%start)
  %square = f32[80]{0} multiply(%x, %x)
  ROOT %done = f32[10]{0} async-done(%update)
}
"""

SPARSE_CORE = """
%fused (p: f32[80]) -> f32[10] {
  %p = f32[80]{0} parameter(0)
  ROOT %rs = f32[10]{0} reduce-scatter(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}

%offloaded (p: f32[80]) -> f32[10] {
  %p = f32[80]{0} parameter(0)
  ROOT %fusion = f32[10]{0} fusion(%p), kind=kCustom, calls=%fused
}, execution_thread="sparsecore"

ENTRY %main (x: f32[80]) -> f32[10] {
  %x = f32[80]{0} parameter(0)
  %start = ((f32[80]{0}, token[]), f32[10]{0}) call-start(%x), \
async_execution_thread="sparsecore", to_apply=%offloaded
  %square = f32[80]{0} multiply(%x, %x)
  ROOT %done = f32[10]{0} call-done(%start)
}
"""

GATHER = (
    "all-gather(%p), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}, "
    'frontend_attributes={chain_id="3"}'
)

CHAIN = f"""
%begin (p: bf16[10]) -> (bf16[80], u32[]) {{
  %p = bf16[10]{{0}} parameter(0)
  %g.0 = bf16[80]{{0}} {GATHER}
  ROOT %s = (bf16[80]{{0}}, u32[]) custom-call(%g.0), custom_call_target="AsyncCollectiveStart"
}}

%middle (p: bf16[10], a: bf16[64,64]) -> (bf16[64,64], bf16[80]) {{
  %p = bf16[10]{{0}} parameter(0)
  %a = bf16[64,64]{{1,0}} parameter(1)
  %product = bf16[64,64]{{1,0}} convolution(%a, %a), dim_labels=bf_io->bf
  %g.1 = bf16[80]{{0}} {GATHER}
  ROOT %both = (bf16[64,64]{{1,0}}, bf16[80]{{0}}) tuple(%product, %g.1)
}}

%end (p: bf16[10]) -> bf16[80] {{
  %p = bf16[10]{{0}} parameter(0)
  %g.2 = bf16[80]{{0}} {GATHER}
  ROOT %d = bf16[80]{{0}} custom-call(%g.2), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (x: bf16[10], a: bf16[64,64]) -> bf16[80] {{
  %x = bf16[10]{{0}} parameter(0)
  %a = bf16[64,64]{{1,0}} parameter(1)
  %async-collective-start = (bf16[80]{{0}}, u32[]) fusion(%x), kind=kCustom, calls=%begin
  %fusion.1 = (bf16[64,64]{{1,0}}, bf16[80]{{0}}) fusion(%x, %a), kind=kCustom, calls=%middle
  ROOT %async-collective-done = bf16[80]{{0}} fusion(%x), kind=kCustom, calls=%end
}}
"""

PERMUTE = """
ENTRY %main (x: f32[100]) -> f32[100] {
  %x = f32[100]{0} parameter(0)
  %start = (f32[100]{0}, f32[100]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=1, \
source_target_pairs={{0,1},{1,2},{2,3}}
  ROOT %done = f32[100]{0} collective-permute-done(%start)
}
"""

ALL_REDUCE = """
ENTRY %main (x: f32[80]) -> f32[80] {
  %x = f32[80]{0} parameter(0)
  %start = f32[80]{0} all-reduce-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %square = f32[80]{0} multiply(%x, %x)
  ROOT %done = f32[80]{0} all-reduce-done(%start)
}
"""

SEND = """
ENTRY %main (x: f32[100]) -> f32[100] {
  %x = f32[100]{0} parameter(0)
  %token = token[] after-all()
  %send = (f32[100]{0}, u32[], token[]) send(%x, %token), channel_id=1, \
frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2},{2,3}}}
  %square = f32[100]{0} multiply(%x, %x)
  %send-done = token[] send-done(%send), channel_id=1
  %recv = (f32[100]{0}, u32[], token[]) recv(%token), channel_id=1, \
frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2},{2,3}}}
  %recv-done = (f32[100]{0}, token[]) recv-done(%recv), channel_id=1
  ROOT %result = f32[100]{0} get-tuple-element(%recv-done), index=0
}
"""

REDUCED_SLICE = """
%all-reduce-scatter.1 (input: bf16[124,40]) -> bf16[16,40] {
  %input = bf16[124,40]{1,0} parameter(0)
  %zero = bf16[] constant(0)
  %pad = bf16[128,40]{1,0} pad(%input, %zero), padding=0_4x0_0
  %all-reduce = bf16[128,40]{1,0} all-reduce(%pad), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %id = u32[] partition-id()
  %rows = u32[] constant(16)
  %at = u32[] multiply(%id, %rows)
  %none = u32[] constant(0)
  ROOT %slice = bf16[16,40]{1,0} dynamic-slice(%all-reduce, %at, %none), \
dynamic_slice_sizes={16,40}
}

ENTRY %main (g: bf16[124,40]) -> bf16[16,40] {
  %g = bf16[124,40]{1,0} parameter(0)
  ROOT %shard = bf16[16,40]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
}
"""

OPERANDS = """
ENTRY %main (x: f32[10], y: f32[10]) -> (f32[10], f32[10]) {
  %x = f32[10]{0} parameter(0)
  %y = f32[10]{0} parameter(1)
  ROOT %a2a = (f32[10]{0}, f32[10]{0}) all-to-all(%x, %y), replica_groups={{0,1},{2,3},{4,5},{6,7}}
}
"""

RAGGED = """
ENTRY %main (x: f32[80], y: f32[160], a: s32[8], b: s32[8], c: s32[8], d: s32[8]) -> f32[160] {
  %x = f32[80]{0} parameter(0)
  %y = f32[160]{0} parameter(1)
  %a = s32[8]{0} parameter(2)
  %b = s32[8]{0} parameter(3)
  %c = s32[8]{0} parameter(4)
  %d = s32[8]{0} parameter(5)
  ROOT %sent = f32[160]{0} ragged-all-to-all(%x, %y, %a, %b, %c, %d), \
replica_groups={{0,1,2,3,4,5,6,7}}
}
"""


@pytest.mark.parametrize(
    ("text", "kind", "bytes_in", "bytes_out", "wire_bytes", "is_async", "exposure"),
    [
        (PAIR, "all-gather", 32768, 262144, 229376, True, "light"),
        (COMBINED, "reduce-scatter", 224, 28, 196, True, "exposed"),
        (WRAPPED, "reduce-scatter", 320, 40, 280, True, "light"),
        (SPARSE_CORE, "reduce-scatter", 320, 40, 280, True, "light"),
        (CHAIN, "all-gather", 20, 160, 140, True, "light"),
        (PERMUTE, "collective-permute", 400, 400, 400, True, "exposed"),
        (ALL_REDUCE, "all-reduce", 320, 320, 480, True, "light"),
        (SEND, "collective-permute", 400, 400, 400, True, "light"),
        (REDUCED_SLICE, "reduce-scatter", 10240, 1280, 8960, False, "exposed"),
        (OPERANDS, "all-to-all", 80, 80, 40, False, "exposed"),
        (RAGGED, "ragged-all-to-all", 320, 640, 280, False, "exposed"),
    ],
)
def test_each_form_is_one_row(text, kind, bytes_in, bytes_out, wire_bytes, is_async, exposure):
    (row,) = collectives(HEADER + text).rows
    assert row.kind == kind
    assert (row.bytes_in, row.bytes_out, row.wire_bytes) == (bytes_in, bytes_out, wire_bytes)
    assert (row.is_async, row.exposure) == (is_async, exposure)


def test_an_all_reduce_of_which_more_than_a_slice_is_left_is_one():
    for text in (
        REDUCED_SLICE.replace("%id = u32[] partition-id()", "%id = u32[] convert(%all-reduce)"),
        REDUCED_SLICE.replace("all-reduce-scatter.1", "fused_computation.1"),
    ):
        (row,) = collectives(HEADER + text).rows
        assert (row.kind, row.wire_bytes) == ("all-reduce", 17920)


def test_a_combined_collective_knows_its_arrays():
    (row,) = collectives(HEADER + COMBINED).rows
    assert (row.num_arrays, row.dtypes) == (2, ("bf16", "f32"))


def test_a_start_that_the_compiler_made_synchronous_is_exposed():
    text = PAIR.replace('"is_sync":false', '"is_sync":true')
    (row,) = collectives(HEADER + text).rows
    assert (row.is_async, row.exposure) == (False, "exposed")


def test_a_chain_spans_from_its_first_to_its_last_fusion():
    module = parse(HEADER + CHAIN)
    (transfer,) = transfers(module, module.entry)
    names = [module.entry.instructions[at].name for at in (transfer.start, transfer.done)]
    assert names == ["async-collective-start", "async-collective-done"]


def test_a_collective_in_a_fusion_is_synchronous():
    text = """
%fused (p: f32[80]) -> f32[80] {
  %p = f32[80]{0} parameter(0)
  ROOT %ar = f32[80]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}

ENTRY %main (x: f32[80]) -> f32[80] {
  %x = f32[80]{0} parameter(0)
  ROOT %f = f32[80]{0} fusion(%x), kind=kOutput, calls=%fused
}
"""
    (row,) = collectives(HEADER + text).rows
    assert (row.kind, row.is_async, row.group_size) == ("all-reduce", False, 8)
