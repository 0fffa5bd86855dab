"""Compiler options to ship with a step, by chip: what makes collectives fewer and hidden.

Pass them to `jax.jit(..., compiler_options=...)` or `.compile(compiler_options=...)`. Flags of
XLA:GPU are described in `xla.proto`; those of XLA:TPU are the ones that public recipes for large
models set (MaxText, `benchmarks/xla_flags_library.py`).
"""

from __future__ import annotations

from typing import TypeAlias

from .targets import Target, as_target

CompilerOptions: TypeAlias = dict[str, str | bool]
"""Names and values that `jax.jit` hands to XLA."""

_GPU = {
    # A collective in a loop is moved into the iteration before or after, where compute hides it.
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
}
_TPU = {
    # By default a product with a gathered operand becomes a loop of thousands of
    # collective-permutes (windowed einsum, Wang et al., ASPLOS 2023).
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    # A gather advances in steps between pieces of compute instead of stopping it.
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
}
_SPARSE_CORE = {
    # A reduce-scatter over a whole slice otherwise becomes an all-reduce of twice the bytes. Both
    # are needed; offloading the all-gathers too makes them synchronous.
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
}
_OPTIONS: dict[str, CompilerOptions] = {
    "cpu": {},
    "h100": {**_GPU},
    "v5e": {**_TPU},
    "v5p": {**_TPU, **_SPARSE_CORE},
    "v6e": {**_TPU, **_SPARSE_CORE},
}


def target_options(target: Target | str) -> CompilerOptions:
    """Returns the compiler options for a target.

    Args:
        target: a target or its name.

    Returns:
        Option names and values; empty for the CPU. v5e has no sparse core to offload to.

    Example:
        >>> target_options("h100:8")["xla_gpu_enable_pipelined_all_gather"]
        True
    """
    return dict(_OPTIONS[as_target(target).chip])
