"""The same bits twice: on emulated devices, and compiled for GPUs that are not there."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Backend, World, build_train_step, fsdp
from axon_dist.core.errors import UnsupportedError
from axon_dist.inspect import as_module, target_devices
from axon_dist.mesh.targets import missing_compiler, target_options
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.step import deterministic_options

CONFIG = TransformerConfig(
    vocab_size=64, width=32, num_layers=2, num_heads=2, ffn_width=64, max_length=16, dropout=0.1
)

ON_GPUS = {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


def build(world, **options):
    return build_train_step(
        lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)), optax.adam(1e-2), next_token_loss,
        fsdp(axes=("dp",), min_elements=8), world, clip_norm=1.0, **options,
    )  # fmt: skip


def run_of(world):
    step = build(world, deterministic=True)
    state, losses = step.init(), []
    for number in range(4):
        tokens = np.random.default_rng(number).integers(0, 64, (16, 17)).astype(np.int32)
        state, metrics = step(state, {"tokens": tokens})
        losses.append(np.asarray(metrics["loss"]).tobytes())
    return losses, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)]


@pytest.mark.full
def test_two_runs_give_the_same_bits(world):
    assert run_of(world) == run_of(world)


def test_devices_of_which_nothing_is_known_are_refused():
    world = types.SimpleNamespace(backend="quantum")
    with pytest.raises(
        UnsupportedError, match=r"=True on quantum devices: no options are known .*; use emulated"
    ):
        deterministic_options(world)


@pytest.mark.parametrize("backend", list(Backend))
def test_every_kind_of_devices_is_known(backend):
    options = deterministic_options(types.SimpleNamespace(backend=backend))
    assert options == (ON_GPUS if backend is Backend.NCCL else {})


@pytest.mark.aot
@pytest.mark.skipif(missing_compiler("h100:8") is not None, reason="needs the CUDA compiler")
@pytest.mark.parametrize(
    "more", [dict.fromkeys(target_options("h100:8")), None], ids=["alone", "tuned"]
)
def test_on_gpus_the_option_reaches_the_compiler(more):
    """A gradient that is scattered into the token table sorts its rows instead of racing."""
    cache = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    world = World.init("dp=8", devices=list(target_devices("h100:8")))
    tokens = {"tokens": jax.ShapeDtypeStruct((16, 17), jnp.int32)}
    found = {}
    for deterministic in (False, True):
        step = build(world, deterministic=deterministic, compiler_options=more)
        module = as_module(step.lower(tokens).compile())
        found[deterministic] = sum(
            i.opcode == "sort" for c in module.computations.values() for i in c.instructions
        )
    jax.config.update("jax_enable_compilation_cache", cache)
    assert found[False] == 0
    assert found[True] > 0


@pytest.mark.aot
@pytest.mark.skipif(missing_compiler("h100:1") is not None, reason="needs the CUDA compiler")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_on_one_gpu_no_product_asks_for_a_kernel_by_its_time(precision):
    """Triton has no kernel for a product but the fastest one: all of them are cuBLAS's."""
    world = World.init("dp=1", devices=list(target_devices("h100:1")))
    config = dataclasses.replace(CONFIG, vocab_size=256, width=64, dropout=0.0, max_length=32)
    step = build_train_step(
        lambda: Transformer(config, rngs=nnx.Rngs(0)), optax.adamw(3e-4), next_token_loss,
        fsdp(axes=("dp",)), world, clip_norm=1.0, precision=precision, deterministic=True,
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((4, 33), jnp.int32)
    program = step.lower({"tokens": tokens}).compile().as_text()
    assert "__cublas" in program
    assert "__triton_gemm" not in program
    assert ("__cudnn$fmha" in program) is (precision != "float32")
