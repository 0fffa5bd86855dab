import jax
import jax.numpy as jnp
import pytest

from axon_dist.inspect.parse import Shape, as_module, dtype_bits, parse, parse_shapes

TEXT = """HloModule step, is_scheduled=true, replica_count=2, num_partitions=4

FileNames
1 "/home/me/train.py"

FunctionNames
1 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=8 end_column=8}
2 {file_name_id=1 function_name_id=1 line=34 end_line=34 column=8 end_column=8}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}, execution_thread="main"

ENTRY %main.1_spmd (x: (f32[8,2], /*index=1*/bf16[4])) -> f32[8,2] {
  %x = (f32[8,2]{1,0:T(8,128)}, /*index=1*/bf16[4]{0:T(256)(2,1)S(1)}) parameter(0)
  %e = f32[8,2]{1,0} get-tuple-element(%x), index=0, metadata={op_name="f(x), index=7"}
  ROOT %r = f32[8,2]{1,0} all-reduce(%e), channel_id=3, replica_groups={{0,1},{2,3}}, \
to_apply=%add, metadata={op_name="jit(f)/psum" stack_frame_id=2}, backend_config={"a":"b, c=1"}
}
"""


def test_the_header_tables_and_computations():
    module = parse(TEXT)
    assert module.num_devices == 8
    assert module.sources == {1: "train.py:12", 2: "train.py:34"}
    assert list(module.computations) == ["add", "main.1_spmd"]
    assert module.entry.name == "main.1_spmd"
    assert module.entry.root.name == "r"


def test_instructions():
    module = parse(TEXT)
    x, e, r = module.entry.instructions
    assert x.shapes == (Shape("f32", (8, 2)), Shape("bf16", (4,)))
    assert (x.bytes, e.bytes) == (72, 64)
    assert (r.opcode, r.operands) == ("all-reduce", ("e",))
    assert module.entry.operand_shapes(r) == (Shape("f32", (8, 2)),)


def test_attributes_end_at_their_own_comma():
    *_, e, r = parse(TEXT).entry.instructions
    assert e.attribute("index") == "0"
    assert r.attribute("replica_groups") == "{{0,1},{2,3}}"
    assert r.attribute("backend_config") == '{"a":"b, c=1"}'
    assert r.attribute("dimensions") is None


def test_reducers_are_not_run_but_calls_are():
    module = parse(TEXT)
    assert module.called(module.entry.root) == []
    called = parse(TEXT.replace("all-reduce(%e)", "call(%e)"))
    assert [c.name for c in called.called(called.entry.root)] == ["add"]


def test_branches_are_called():
    text = TEXT.replace(
        "all-reduce(%e), channel_id=3", "conditional(%e), branch_computations={%add, %add}"
    )
    module = parse(text)
    assert [c.name for c in module.called(module.entry.root)] == ["add", "add"]


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("pred", 8), ("s4", 4), ("u2", 2), ("bf16", 16), ("f8e4m3fn", 8), ("c128", 128), ("token", 0)],
)
def test_widths(dtype, bits):
    assert dtype_bits(dtype) == bits


def test_bytes_of_packed_and_dynamic_shapes():
    packed, dynamic = parse_shapes("(s4[3]{0:E(4)}, f32[<=5,2]{1,0})")
    assert (packed.bytes, dynamic.bytes) == (2, 40)


def test_every_instruction_of_a_real_program_is_read():
    def body(x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ h), h.sum()), x, length=3)

    text = jax.jit(jax.grad(lambda x: body(x)[1].sum())).lower(jnp.ones((4, 4))).compile().as_text()
    module = as_module(text)
    read = sum(len(computation.instructions) for computation in module.computations.values())
    assert read == sum(line.startswith("  ") and " = " in line for line in text.splitlines())
    for computation in module.computations.values():
        for instruction in computation.instructions:
            assert all(name in computation.by_name for name in instruction.operands)
    assert as_module(module) is module
