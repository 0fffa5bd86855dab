import jax
import jax.numpy as jnp
import pytest
from jax import lax

from axon_dist.core.compat import RARE
from axon_dist.inspect import flops
from axon_dist.inspect.flops import CostModel
from axon_dist.inspect.model_time import product_shape
from axon_dist.inspect.parse import as_module
from axon_dist.mesh.rates import ProductShape
from axon_dist.planner.device import liveness_program
from axon_dist.planner.placement import unsplit


def compiled_flops(function, *args):
    return flops(jax.jit(function).lower(*args).compile())


def test_a_product_and_its_gradient():
    x, w = jnp.ones((16, 32)), jnp.ones((32, 8))
    one = 2 * 16 * 32 * 8
    assert compiled_flops(lambda x, w: x @ w, x, w).high == one
    both = jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), argnums=(0, 1))
    assert compiled_flops(both, x, w).high == 3 * one


def test_batched_products():
    q, k = jnp.ones((3, 5, 7)), jnp.ones((3, 11, 7))
    assert compiled_flops(lambda q, k: jnp.einsum("btd,bsd->bts", q, k), q, k).high == (
        2 * 3 * 5 * 11 * 7
    )


@pytest.mark.full
def test_loops_count_every_iteration():
    def body(x, w):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=9)[0]

    assert compiled_flops(body, jnp.ones((4, 8)), jnp.ones((8, 8))).high == 9 * 2 * 4 * 8 * 8


def test_rare_branches_do_not_count():
    def rare(h, w):
        with jax.named_scope(RARE):
            return lax.while_loop(lambda h: jnp.sum(h) < 1, lambda h: jnp.sin(h @ w @ w), h)

    def body(flag, x, w):
        return lax.cond(flag, rare, lambda h, w: h @ w, x, w)

    arrays = jnp.array(True), jnp.ones((4, 8)), jnp.ones((8, 8))
    found = compiled_flops(body, *arrays)
    assert (found.low, found.high, found.unknown_trip) == (512, 512, False)
    traced = jax.make_jaxpr(body)(*arrays)
    assert liveness_program(traced, [unsplit(x.ndim) for x in arrays], {}, "cpu").flops == 512


def test_branches_give_bounds():
    def body(flag, x, w):
        return lax.cond(flag, lambda h: h @ w @ w, lambda h: h @ w, x)

    count = compiled_flops(body, True, jnp.ones((4, 8)), jnp.ones((8, 8)))
    one = 2 * 4 * 8 * 8
    assert (count.low, count.high) == (one, 2 * one)


def test_a_loop_that_data_decide_is_flagged():
    def body(x):
        return lax.while_loop(lambda h: jnp.sum(h) < 10, lambda h: h @ h, x)

    count = compiled_flops(body, jnp.ones((4, 4)))
    assert count.unknown_trip
    assert count.high == 2 * 4**3


def test_the_work_is_that_of_one_device():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("dp"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharding)
    assert compiled_flops(lambda x, w: x @ w, x, jnp.ones((32, 8))).high == 2 * 64 * 32 * 8 // 8


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_a_convolution_counts_only_positions_inside(padding):
    image, kernel = jnp.ones((2, 9, 3)), jnp.ones((3, 3, 5))

    def body(image, kernel):
        return lax.conv_general_dilated(
            image, kernel, (2,), padding, dimension_numbers=("NWC", "WIO", "NWC")
        )

    positions = {"SAME": 5 * 3 - 2, "VALID": 4 * 3}[padding]
    assert compiled_flops(body, image, kernel).high == 2 * 2 * 3 * 5 * positions


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "SAME"},
        {"padding": "VALID", "window_strides": (2, 2)},
        {"padding": ((3, -1), (0, 2)), "window_strides": (3, 1), "rhs_dilation": (1, 2)},
        {"padding": ((2, 1), (1, 1)), "lhs_dilation": (2, 3), "rhs_dilation": (2, 1)},
        {"padding": "SAME", "feature_group_count": 2, "window_strides": (1, 2)},
    ],
)
@pytest.mark.parametrize("of", ["result", "image", "kernel"])
def test_traced_and_compiled_convolutions_do_the_same_work(options, of):
    options = {"window_strides": (1, 1), **options}
    groups = options.get("feature_group_count", 1)
    image, kernel = jnp.ones((2, 8, 9, 4)), jnp.ones((3, 2, 4 // groups, 6))

    def run(image, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(image, kernel, dimension_numbers=numbers, **options)

    total = lambda image, kernel: jnp.sum(2 * run(image, kernel))
    function = {"image": jax.grad(total), "kernel": jax.grad(total, 1)}.get(of, run)
    traced = jax.make_jaxpr(function)(image, kernel)
    found = liveness_program(traced, [unsplit(4), unsplit(4)], {}, "cpu").flops
    assert found == compiled_flops(function, image, kernel).high


def entry(line, *parameters):
    names = [f"  %{name} = {shape} parameter({n})" for n, (name, shape) in enumerate(parameters)]
    return "HloModule step\n\nENTRY %main () -> f32[] {{\n{}\n  ROOT {}\n}}\n".format(
        "\n".join(names), line
    )


def test_a_base_dilated_convolution_is_a_batched_product():
    # XLA:TPU writes the batch of a product as a spatial dim whose window meets one element only.
    text = entry(
        "%c = f32[16,4096,128] convolution(%x, %w), window={size=16 stride=15 lhs_dilate=16}, "
        "dim_labels=0fb_i0o->0bf",
        ("x", "bf16[16,512,4096]"),
        ("w", "bf16[512,16,128]"),
    )
    assert flops(text).high == 2 * 16 * 4096 * 512 * 128


def test_grouped_convolutions_use_the_inputs_of_one_group():
    text = entry(
        "%c = f32[2,8,6] convolution(%x, %w), window={size=1}, dim_labels=b0f_0io->b0f, "
        "feature_group_count=3",
        ("x", "f32[2,8,12]"),
        ("w", "f32[1,4,6]"),
    )
    assert flops(text).high == 2 * 2 * 8 * 6 * 4


ROWS, GROUPS = ("x", "bf16[1024,64]"), ("g", "s32[8]")


@pytest.mark.parametrize(
    ("result", "other", "dims"),
    [
        (
            "bf16[1024,32]",
            "bf16[8,64,32]",
            "lhs_contracting_dims={1}, rhs_contracting_dims={1}, lhs_ragged_dims={0}, "
            "rhs_group_dims={0}",
        ),
        (
            "bf16[8,64,32]",
            "bf16[1024,32]",
            "lhs_contracting_dims={0}, rhs_contracting_dims={0}, lhs_ragged_dims={0}",
        ),
    ],
    ids=["forward", "of the kernel"],
)
def test_each_row_of_a_grouped_product_belongs_to_one_group(result, other, dims):
    text = entry(f"%o = {result} ragged-dot(%x, %y, %g), {dims}", ROWS, ("y", other), GROUPS)
    assert flops(text).high == 2 * 1024 * 64 * 32
    module = as_module(text)
    shape = product_shape(module.entry, module.entry.root)
    rows, summed = (128, 64) if other.startswith("bf16[8") else (64, 128)
    assert shape == ProductShape(rows, 32, summed, batch=8)


def test_cublas_products():
    text = entry(
        '%g = (bf16[64,32], s8[128]) custom-call(%x, %w), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
        ("x", "bf16[64,128]"),
        ("w", "bf16[128,32]"),
    )
    assert flops(text).high == 2 * 64 * 32 * 128


@pytest.mark.parametrize(("suffix", "products"), [("", 2), ("Backward", 5)])
def test_cudnn_attention(suffix, products):
    text = entry(
        "%a = (bf16[1,256,4,64], u8[0]) custom-call(%q), "
        f'custom_call_target="__cudnn$fmhaSoftmax{suffix}", backend_config='
        '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16",'
        '"dimensions":["1","4","256","256"]},"mask_type":"CAUSAL"}}',
        ("q", "bf16[1,256,4,64]"),
    )
    assert flops(text).high == products * 2 * 4 * 256 * 256 * 64


def test_kernels_state_their_cost_or_are_named():
    stated = entry(
        '%k = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", backend_config='
        '{"custom_call_config":{"cost_estimate":{"flops":"123","bytes_accessed":"9"}}}',
        ("x", "f32[8]"),
    )
    silent = entry(
        '%k = f32[8] custom-call(%x), custom_call_target="tpu_custom_call"', ("x", "f32[8]")
    )
    assert (flops(stated).high, flops(stated).opaque) == (123, ())
    assert (flops(silent).high, flops(silent).opaque) == (0, ("tpu_custom_call",))


STACKED = """HloModule m

%fused (p0: bf16[6,8,4], p1: bf16[8,4], p2: s32[]) -> bf16[4,6,8] {
  %p0 = bf16[6,8,4]{1,0,2} parameter(0)
  %stack = bf16[4,6,8]{2,1,0} bitcast(%p0)
  %p1 = bf16[8,4]{0,1} parameter(1)
  %row = bf16[4,1,8]{2,1,0} bitcast(%p1)
  %zero = s32[] constant(0)
  %p2 = s32[] parameter(2)
  ROOT %new = bf16[4,6,8]{2,1,0} dynamic-update-slice(%stack, %row, %zero, %p2, %zero)
}

ENTRY %main (a: bf16[6,8,4], b: bf16[8,4], i: s32[]) -> bf16[4,6,8] {
  %a = bf16[6,8,4]{1,0,2} parameter(0)
  %b = bf16[8,4]{0,1} parameter(1)
  %i = s32[] parameter(2)
  ROOT %update = bf16[4,6,8]{2,1,0} fusion(%a, %b, %i), kind=kLoop, calls=%fused
}
"""


def test_a_layer_of_a_stack_is_written_alone_under_another_layout_too():
    module = as_module(STACKED)
    row = 8 * 4 * 2
    assert CostModel(module).computation(module.entry).traffic == 2 * row + 4


GATHERED = """HloModule m
%fused (p: bf16[8,100], at: s32[8,1]) -> f32[8] {
  %p = bf16[8,100]{1,0} parameter(0)
  %at = s32[8,1]{1,0} parameter(1)
  %wide = f32[8,100]{1,0} convert(%p)
  ROOT %chosen = f32[8]{0} gather(%wide, %at), offset_dims={}, collapsed_slice_dims={1}
}
ENTRY %main (a: bf16[8,100], b: s32[8,1]) -> f32[8] {
  %a = bf16[8,100]{1,0} parameter(0)
  %b = s32[8,1]{1,0} parameter(1)
  ROOT %f = f32[8]{0} fusion(%a, %b), kind=kLoop, calls=%fused
}
"""


@pytest.mark.parametrize(("root", "read"), [("gather", 8), ("reduce", 800)])
def test_a_gather_of_what_is_converted_reads_what_it_takes(root, read):
    module = as_module(GATHERED.replace("gather(", f"{root}("))
    # Two bytes of each element read, the indices, and a float32 for each row written.
    assert CostModel(module).computation(module.entry).traffic == 2 * read + 4 * 8 + 4 * 8


INPUT, KERNEL, OUTPUT = "bf16[4,32,32,64]", "bf16[32,3,3,64]", "bf16[4,32,32,32]"


@pytest.mark.parametrize(
    ("kind", "one", "two", "result"),
    [
        ("Forward", INPUT, KERNEL, OUTPUT),
        ("BackwardInput", OUTPUT, KERNEL, INPUT),
        ("BackwardFilter", INPUT, OUTPUT, KERNEL),
    ],
)
def test_backward_convolutions_of_cudnn_do_the_work_of_their_forward_one(kind, one, two, result):
    text = entry(
        f"%c = ({result}, u8[0]) custom-call(%x, %w), window={{size=3x3 pad=1_1x1_1}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{kind}"',
        ("x", one),
        ("w", two),
    )
    # Along each axis of 32 positions 3 x 32 - 2 products are inside.
    assert flops(text).high == 2 * 4 * 32 * 64 * 94**2
