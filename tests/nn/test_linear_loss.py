"""The cross-entropy of a linear head against that of its logits, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axon_dist.core.errors import ConfigError, DTypeError
from axon_dist.inspect import flops
from axon_dist.ir.walk import equations
from axon_dist.models import cross_entropy
from axon_dist.nn import linear_cross_entropy, linear_scores
from axon_dist.ops.linear_loss import HeadLoss, Operands, _joined, _one_pass, _two_pass, evaluate

RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(4, 6, 8)).astype(np.float32)
KERNEL = RNG.normal(size=(8, 24)).astype(np.float32)
BIAS = RNG.normal(size=24).astype(np.float32)
LABELS = RNG.integers(0, 24, size=(4, 6)).astype(np.int32)
WEIGHTS = RNG.random((4, 6)).astype(np.float32)


def dense(hidden, kernel, bias, weights, z_loss=0.0, label_smoothing=0.0, soft_cap=None):
    """All logits, differentiated by JAX."""
    x = hidden @ kernel + bias
    x = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
    total = jax.nn.logsumexp(x, axis=-1)
    chosen = jnp.take_along_axis(x, LABELS[..., None], axis=-1)[..., 0]
    losses = total - (1 - label_smoothing) * chosen - label_smoothing * x.mean(-1)
    return jnp.sum(weights * (losses + z_loss * total**2)) / jnp.sum(weights)


ALL = {"z_loss": 0.1, "label_smoothing": 0.2, "soft_cap": 3.0}


@pytest.mark.sample("5-options1")
@pytest.mark.parametrize(("num_chunks", "options"), [(None, {}), (5, ALL)])
def test_value_and_gradients_equal_those_of_all_logits(options, num_chunks):
    given = HIDDEN, KERNEL, BIAS, WEIGHTS
    ours = lambda h, k, b, w: (
        linear_cross_entropy(h, k, LABELS, w, bias=b, num_chunks=num_chunks, **options).mean
    )
    plain = lambda *given: dense(*given, **options)
    want, grads = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2, 3)))(*given)
    got, found = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2, 3)))(*given)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    for mine, theirs in zip(found, grads, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


def test_the_gradient_is_linear_in_what_comes_back_and_can_be_differentiated():
    given = HIDDEN, KERNEL, BIAS, WEIGHTS
    ours = lambda h: linear_cross_entropy(h, KERNEL, LABELS, WEIGHTS, bias=BIAS).mean
    plain = lambda h: dense(h, *given[1:])
    back = lambda loss: jax.grad(lambda h: jnp.sum(jax.grad(lambda h: -3 * loss(h))(h) ** 2))
    one, other = jax.jit(lambda h: (back(ours)(h), back(plain)(h)))(HIDDEN)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_with_64_bits_the_loss_of_a_float32_model_and_its_gradients_are_float32():
    with jax.enable_x64(True):
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (HIDDEN, KERNEL, BIAS, WEIGHTS)]
        run = lambda h, k, b, w: linear_cross_entropy(h, k, LABELS, w, bias=b, num_chunks=2).mean
        loss, grads = jax.eval_shape(jax.value_and_grad(run, argnums=(0, 1, 2, 3)), *given)
        assert [x.dtype for x in (loss, *grads)] == ["float32"] * 5


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_with_64_bits_the_loss_has_the_dtype_of_the_model(dtype):
    """In chunks too, against all logits in the same dtype."""
    with jax.enable_x64(True):
        given = [jnp.asarray(x, dtype) for x in (HIDDEN, KERNEL, BIAS, WEIGHTS)]
        options = {"num_chunks": 2}
        run = lambda h, k, b, w: linear_cross_entropy(h, k, LABELS, w, bias=b, **options).mean
        plain = lambda h, k, b, w: jnp.average(
            optax.softmax_cross_entropy_with_integer_labels(h @ k + b, LABELS), weights=w
        )
        want, grads = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2, 3)))(*given)
        got, found = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3)))(*given)
        exact = 1e-12 if dtype == "float64" else 2e-5
        for mine, theirs in zip([got, *found], [want, *grads], strict=True):
            assert mine.dtype == dtype
            np.testing.assert_allclose(mine, theirs, rtol=exact, atol=exact / 10)
        scores = jax.jit(lambda h, k: linear_scores(h, k, LABELS, **options)[1]["accuracy"].mean)
        hits = (HIDDEN @ KERNEL).argmax(-1) == LABELS
        assert float(scores(*given[:2])) == pytest.approx(hits.mean())


def test_operands_of_several_dtypes_have_gradients_in_their_own():
    with jax.enable_x64(True):
        dtypes = ("float32", "bfloat16", "float64")
        given = [jnp.asarray(x, t) for x, t in zip((HIDDEN, KERNEL, BIAS), dtypes, strict=True)]
        run = lambda h, k, b: linear_cross_entropy(h, k, LABELS, bias=b, num_chunks=2).mean
        loss, grads = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(*given)
        assert loss.dtype == "float32"
        assert [x.dtype for x in grads] == list(dtypes)


def test_parts_of_a_row_that_are_masked_join_with_any_other():
    """A compiler may join two logits first, both -inf."""
    hidden, shown = (jnp.float32(-jnp.inf), jnp.float32(1)), (jnp.float32(2), jnp.float32(3))
    nothing = _joined(hidden, hidden)
    assert float(nothing[0]) == -jnp.inf
    for pair in ((nothing, shown), (shown, nothing)):
        assert [float(x) for x in _joined(*pair)] == [2.0, 3.0]


def test_only_what_moves_has_a_gradient_computed():
    count = lambda argnums: (
        flops(
            jax.jit(jax.grad(lambda h, k: linear_cross_entropy(h, k, LABELS).total, argnums))
            .lower(HIDDEN, KERNEL)
            .compile()
        ).high
    )
    one = 2 * LABELS.size * KERNEL.size
    assert count((0, 1)) == 3 * one  # the logits once, and one product for each gradient
    assert count(0) == 2 * one


def test_hits_are_those_of_argmax_and_the_first_of_equals_counts():
    scores = jax.jit(lambda h: linear_scores(h, KERNEL, LABELS, WEIGHTS, bias=BIAS, num_chunks=2))
    _, metrics = scores(HIDDEN)
    hits = (HIDDEN @ KERNEL + BIAS).argmax(-1) == LABELS
    assert 0 < hits.sum() < hits.size
    np.testing.assert_allclose(metrics["accuracy"].total, (WEIGHTS * hits).sum(), rtol=1e-6)
    assert float(metrics["accuracy"].weight) == pytest.approx(WEIGHTS.sum())
    one, equal = np.ones((1, 1), np.float32), np.array([[1, 2, 2, 0]], np.float32)
    hit = jax.jit(lambda labels: linear_scores(one, equal, labels)[1]["accuracy"].total)
    found = [float(hit(np.array([label]))) for label in range(4)]
    assert found == [0, 1, 0, 0]


def test_bfloat16_logits_are_rounded_and_nothing_else():
    rounded = (HIDDEN @ KERNEL).astype(jnp.bfloat16)
    want = jax.jit(cross_entropy)(rounded, LABELS).sum()
    got = jax.jit(lambda h: linear_cross_entropy(h, KERNEL, LABELS, logits_dtype="bfloat16"))(
        HIDDEN
    )
    assert got.total.dtype == jnp.float32
    assert float(got.total) == pytest.approx(float(want), rel=1e-6)
    assert float(linear_cross_entropy(HIDDEN, KERNEL, LABELS).total) != float(got.total)


@pytest.mark.sample("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_come_in_the_dtype_of_what_they_are_of(dtype):
    hidden, kernel = HIDDEN.astype(dtype), KERNEL.astype(dtype)
    ours = lambda h, k: linear_cross_entropy(h, k, LABELS, num_chunks=2).mean
    found = jax.jit(jax.grad(ours, argnums=(0, 1)))(hidden, kernel)
    plain = lambda h, k: cross_entropy(h @ k, LABELS).mean()
    wide = jax.jit(jax.grad(plain, argnums=(0, 1)))(
        *(x.astype("float32") for x in (hidden, kernel))
    )
    for mine, want in zip(found, wide, strict=True):
        assert mine.dtype == dtype
        np.testing.assert_allclose(mine.astype("float32"), want, rtol=0.02, atol=2e-3)


@pytest.mark.full
def test_positions_may_have_any_dims_and_vmap_goes_through():
    want = linear_cross_entropy(HIDDEN, KERNEL, LABELS, WEIGHTS).total
    flat = linear_cross_entropy(HIDDEN.reshape(-1, 8), KERNEL, LABELS.ravel(), WEIGHTS.ravel())
    each = jax.vmap(lambda *x: linear_cross_entropy(x[0], KERNEL, x[1], x[2]).total)
    assert float(flat.total) == pytest.approx(float(want), rel=1e-6)
    assert float(each(HIDDEN, LABELS, WEIGHTS).sum()) == pytest.approx(float(want), rel=1e-6)


def test_errors_name_shapes_and_options():
    with pytest.raises(ConfigError, match=r"hidden \[4, 6, 8\], kernel \[24, 8\].*kernel \[D, V\]"):
        linear_cross_entropy(HIDDEN, KERNEL.T, LABELS)
    with pytest.raises(ConfigError, match=r"weights \[4\].*one for each position"):
        linear_cross_entropy(HIDDEN, KERNEL, LABELS, WEIGHTS[:, 0])
    with pytest.raises(ConfigError, match=r"bias \[8\].*a bias \[V\]"):
        linear_cross_entropy(HIDDEN, KERNEL, LABELS, bias=BIAS[:8])
    with pytest.raises(ConfigError, match=r"labels of float32; they must be the integer ids"):
        linear_cross_entropy(HIDDEN, KERNEL, WEIGHTS)
    with pytest.raises(ConfigError, match=r"label_smoothing is 1; it must be at least 0 and below"):
        linear_cross_entropy(HIDDEN, KERNEL, LABELS, label_smoothing=1)
    with pytest.raises(ConfigError, match="soft_cap is -1; it must be positive"):
        linear_cross_entropy(HIDDEN, KERNEL, LABELS, soft_cap=-1)
    with pytest.raises(ConfigError, match="num_chunks is 0; it must be at least 1"):
        linear_cross_entropy(HIDDEN, KERNEL, LABELS, num_chunks=0)
    with pytest.raises(DTypeError, match="logits_dtype is 'float16'; logits are 'float32'"):
        linear_cross_entropy(HIDDEN, KERNEL, LABELS, logits_dtype="float16")


def reads_logits(equation):
    return any(x.aval.shape == (32, 100) for x in equation.invars)


def traced(dtype, **options):
    """The equations of a chunk of 32 positions and 100 classes, and the inputs of its loop."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 8), (8, 100))]
    loss = lambda h, k, labels: linear_cross_entropy(h, k, labels, num_chunks=2, **options).mean
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    program = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*shapes, labels).jaxpr
    (loop,) = (e for e in program.jaxpr.eqns if e.primitive.name == "scan")
    return list(equations(loop.params["jaxpr"].jaxpr)), [x.aval.shape for x in loop.invars]


@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
def test_three_products_and_one_pass_over_logits_in_half_precision(logits_dtype):
    found, given = traced(jnp.bfloat16, logits_dtype=logits_dtype)
    over_logits = [
        e.primitive.name
        for e in found
        if e.outvars[0].aval.shape in ((32,), (32, 1), (32, 8))
        and reads_logits(e)
        and e.primitive.name != "jit"
    ]
    # The statistics, the logits of the labels, and the product for the gradient of hidden states.
    assert sorted(over_logits) == ["dot_general", "gather", "reduce"]
    assert sum(e.primitive.name == "dot_general" for e in found) == 3
    # A constant as large as all logits would be hoisted out of the loop and read in each iteration.
    assert (32, 100) not in given


def test_products_in_float32_keep_to_two_passes_and_no_constant_is_hoisted():
    found, given = traced(jnp.float32, label_smoothing=0.1, z_loss=0.1, soft_cap=3.0)
    names = [e.primitive.name for e in found]
    assert names.count("dot_general") == 3
    assert "reduce_max" in names
    assert "reduce" not in names
    assert (32, 100) not in given


def test_one_pass_gives_what_two_give():
    low, high = np.float32(-np.inf), np.float32(3e4)
    rows = np.array([[low, 1, 2], [3, low, low], [high, -high, high], [0, 0, 0]], np.float32)
    whole = lambda reduce, x: x
    one, two = (jax.jit(f, static_argnums=1)(rows, whole) for f in (_one_pass, _two_pass))
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_allclose(one[1], two[1], rtol=1e-6)


@pytest.mark.sample("0.0-0.001-1.2-50257")
@pytest.mark.parametrize("classes", [50_257, 128_256])
@pytest.mark.parametrize(("lean", "nats", "times"), [(0.0, 1e-3, 1.2), (10.0, 2e-3, 4.0)])
def test_bfloat16_logits_and_products_in_bfloat16(classes, lean, nats, times):
    """Compares the error against float32 with that of rounding only the products.

    `lean` draws the hidden states toward their labels, as training does: large logits lose more.
    """
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(64, classes)).astype(np.float32) / 4
    labels = rng.integers(0, classes, 64).astype(np.int32)
    own = kernel[:, labels].T
    hidden = rng.normal(size=(64, 64)) + lean * own / np.linalg.norm(own, axis=1)[:, None]
    hidden = hidden.astype(np.float32)

    def of(dtype, logits_dtype):
        def loss(h, k):
            given = h.astype(dtype), k.astype(dtype), labels
            return linear_cross_entropy(*given, logits_dtype=logits_dtype).mean

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, kernel)

    want, wide, narrow = of("float32", "float32"), of("bfloat16", "float32"), of(*["bfloat16"] * 2)
    off = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b)
    assert abs(float(narrow[0] - want[0])) < nats
    for index in range(2):
        error, least = (off(each[1][index], want[1][index]) for each in (narrow, wide))
        assert error < times * least < 0.05


@pytest.mark.parametrize(
    ("memory_bytes", "chunks"), [(None, 4), (16 * 2**30, 4), (80 * 2**30, 2), (1000 * 2**30, 1)]
)
def test_chunks_grow_with_the_head_and_the_memory_of_the_chip(memory_bytes, chunks):
    """Traces 4096 positions of an 8B model, whose chunks each read the head's 2.1 GB gradient."""
    shapes = (4096, 4096), (4096, 128_256), (4096,), (4096,)
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.float32
    operands = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, dtypes, strict=True)]

    def run(*operands):
        parts = evaluate(
            HeadLoss(), Operands(*operands), (True, True, False), memory_bytes=memory_bytes
        )
        return parts.total, parts.grads[:2]

    program = jax.make_jaxpr(run)(*operands)
    loops = [e.params["length"] for e in program.eqns if e.primitive.name == "scan"]
    assert (loops or [1]) == [chunks]
    products = [e for e in equations(program) if e.primitive.name == "dot_general"]
    assert len(products) == 3


@pytest.mark.full
def test_the_number_of_chunks_changes_no_number():
    operands = Operands(HIDDEN, KERNEL, LABELS, WEIGHTS)
    results = [
        evaluate(HeadLoss(num_chunks=count), operands, (True, True, False)) for count in (1, 2, 3)
    ]
    for other in results[1:]:
        for one, two in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
