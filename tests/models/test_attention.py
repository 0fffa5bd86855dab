import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.core.errors import UnsupportedError
from axon_dist.mesh.targets import missing_compiler
from axon_dist.models import (
    ATTENTION_FORMS,
    attention,
    auto_attention,
    cudnn_attention,
    describe_attention,
    einsum_attention,
    flash_attention,
)


def heads(batch=2, length=8, num_heads=4, kv_heads=2, size=6, dtype=jnp.float32):
    draw, counts = np.random.default_rng(0), (num_heads, kv_heads, kv_heads)
    return tuple(
        jnp.asarray(draw.normal(size=(batch, length, count, size)).astype(dtype))
        for count in counts
    )


def one_by_one(query, key, value, causal=True):
    """Computes attention in float64 numpy, one query and one head at a time."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.empty_like(query)
    group = query.shape[2] // key.shape[2]
    for b, t, h in np.ndindex(query.shape[:3]):
        seen = slice(t + 1 if causal else None)
        scores = key[b, seen, h // group] @ query[b, t, h] / np.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ value[b, seen, h // group]
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_einsum_equals_attention_one_query_at_a_time(kv_heads, causal):
    query, key, value = heads(kv_heads=kv_heads)
    out = jax.jit(einsum_attention, static_argnums=3)(query, key, value, causal)
    np.testing.assert_allclose(out, one_by_one(query, key, value, causal), rtol=2e-5, atol=2e-6)


def test_no_position_sees_a_later_one():
    query, key, value = heads(batch=1)

    def row(key, value):
        return einsum_attention(query, key, value)[0, 3].sum()

    grad_key, grad_value = jax.jit(jax.grad(row, argnums=(0, 1)))(key, value)
    for grad in (grad_key, grad_value):
        assert np.all(np.asarray(grad)[0, 4:] == 0)
        assert np.all(np.abs(np.asarray(grad)[0, :4]).sum(axis=(1, 2)) > 0)


def test_low_precision_comes_back_as_it_came_and_stays_close():
    query, key, value = heads(dtype=jnp.bfloat16)
    out = jax.jit(einsum_attention)(query, key, value)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(jnp.float32), one_by_one(query, key, value), rtol=0.02, atol=0.02
    )


@pytest.mark.full
@pytest.mark.sample("True")
@pytest.mark.parametrize("causal", [True, False])
def test_flash_kernel_equals_einsum_in_value_and_gradients(causal):
    arrays = heads(batch=1, length=128, num_heads=2, kv_heads=1, size=16)

    def value_and_grads(form):
        return jax.value_and_grad(lambda *qkv: jnp.sum(form(*qkv) ** 2), (0, 1, 2))(*arrays)

    got = value_and_grads(lambda *qkv: flash_attention(*qkv, causal, interpret=True))
    want = value_and_grads(lambda *qkv: einsum_attention(*qkv, causal))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_flash_lowers_to_one_kernel_for_tpu():
    arrays = heads(length=256, size=128, dtype=jnp.bfloat16)
    lowered = jax.jit(flash_attention).trace(*arrays).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 1


def test_flash_says_which_lengths_it_takes():
    with pytest.raises(UnsupportedError, match=r"sequence of 8: .* multiple of 128.*'auto'"):
        flash_attention(*heads())


def test_cudnn_raises_where_it_cannot_run():
    with pytest.raises(UnsupportedError, match=r"'cudnn' with float32 heads of 6: .*bfloat16"):
        cudnn_attention(*heads())


@pytest.mark.parametrize("causal", [True, False])
def test_auto_is_einsum_on_cpu(causal):
    got, want = auto_attention(*heads(), causal), einsum_attention(*heads(), causal)
    np.testing.assert_array_equal(got, want)


def test_auto_chooses_by_the_platform_it_is_lowered_for(monkeypatch):
    monkeypatch.setattr(attention, "_cudnn", lambda query, key, value, causal: jnp.sin(query))
    traced = jax.jit(auto_attention).trace(*heads(dtype=jnp.bfloat16, size=8))
    text = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "cpu")}
    assert "sine" in text["cuda"]
    assert "exponential" not in text["cuda"]
    assert "exponential" in text["cpu"]
    assert "sine" not in text["cpu"]


@pytest.mark.aot
def test_auto_takes_the_fused_kernel_when_lowered_for_cuda():
    arrays = heads(length=64, size=64, dtype=jnp.bfloat16)
    if missing := missing_compiler("h100:8"):
        pytest.skip(missing)
    grad = jax.jit(jax.grad(lambda q, k, v: auto_attention(q, k, v).astype(jnp.float32).sum()))
    text = grad.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text
    assert "exponential" not in text


def test_the_kernel_of_gpus_is_traced_where_no_cuda_is_installed(monkeypatch):
    """Forward and backward; lowering needs neither cuDNN nor a GPU in this process."""
    kernel = "jax._src.cudnn.fused_attention_stablehlo"
    asked = lambda *_: pytest.fail("this process was asked")
    for name in (
        "check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal",
    ):  # fmt: skip
        monkeypatch.setattr(f"{kernel}.{name}", asked)
    arrays = heads(length=64, size=64, dtype=jnp.bfloat16)
    text = str(jax.make_jaxpr(jax.grad(lambda q, k, v: auto_attention(q, k, v).sum()))(*arrays))
    assert "dot_product_attention_fwd" in text
    assert "dot_product_attention_bwd" in text


def test_every_form_has_a_name():
    assert sorted(ATTENTION_FORMS) == ["auto", "cudnn", "einsum", "flash"]


def test_the_attention_that_runs_is_reported_with_advice(monkeypatch):
    shape = 1024, 4, 64
    assert describe_attention("auto", "cpu", "float32", shape) == (
        "einsum, which stores the scores of all pairs: there is no fused kernel for CPUs"
    )
    told = describe_attention("auto", "gpu", "float32", shape)
    assert told.startswith(
        "einsum, which stores the scores of all pairs, because cudnn cannot run:"
    )
    assert "precision bf16" in told
    assert describe_attention("auto", "tpu", "float32", shape).startswith(
        "the fused kernel for TPU"
    )
    told = describe_attention("flash", "tpu", "bfloat16", (1000, 4, 64))
    assert "the length of 1000 is not a multiple of 128; a length that is a multiple" in told
    assert describe_attention("auto", "gpu", "bfloat16", shape) == "the fused kernel of cuDNN"
    told = describe_attention("auto", "gpu", "bfloat16", shape, segments=True)
    assert told.endswith("reads masks [B, 1, 1024, 1024] made from the segments")


def test_the_kernel_of_tpus_is_for_tpus_alone():
    query, *_ = heads(length=128)
    assert attention.splash_obstacle(query) == "the compilation target is not a TPU."
