"""Compiler options that make collectives fewer and hidden; the table of chips says whose they are.

Flags of XLA:GPU are described in `xla.proto`; those of XLA:TPU are the ones that public recipes for
large models set (MaxText, `benchmarks/xla_flags_library.py`).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TypeAlias

from ..core.compat import gpu_pipelining

CompilerOptions: TypeAlias = dict[str, str | bool]
"""Names and values that `jax.jit` hands to XLA."""

PIPELINED: MappingProxyType[str, str | bool] = MappingProxyType(
    gpu_pipelining("all_gather", "reduce_scatter", "all_reduce")
)
"""A collective in a loop is moved into the iteration before or after, where compute hides it."""

SUMS_STAY: MappingProxyType[str, str | bool] = MappingProxyType(
    gpu_pipelining("all_reduce", on=False)
)
"""Where sums of gradients are all that travels, each has enough beside it where it is; moved on,
that of the last iteration comes after the loop with nothing beside it."""

GATHERS_STAY: MappingProxyType[str, str | bool] = MappingProxyType(
    gpu_pipelining("all_gather", on=False)
)
"""Where weights are whole for a step, all that is computed of a microbatch comes of what its loop
does not change, and what XLA gathers of it, such as rows of a table's gradient, would be moved into
the iteration before with all of that: both passes ran twice."""

NO_WINDOWS: MappingProxyType[str, str | bool] = MappingProxyType(
    {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
)
"""By default a product with a gathered operand becomes, on a TPU, a loop of thousands of
collective-permutes (windowed einsum, Wang et al., ASPLOS 2023)."""

ASYNC_GATHERS: MappingProxyType[str, str | bool] = MappingProxyType(
    {
        # For v5e alone: elsewhere it has made wrong numbers (jax-ml/jax issue 38741), and libtpu
        # refuses it there since 0.0.50.
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
        "xla_enable_async_all_gather": "true",
    }
)
"""A gather on a TPU advances in steps between pieces of compute instead of stopping it."""

SPARSE_CORE: MappingProxyType[str, str | bool] = MappingProxyType(
    {
        # The first two together: a reduce-scatter over a whole slice otherwise becomes an
        # all-reduce of twice the bytes.
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
        # What the compute units cannot scatter, such as rows of 11008 over 64 chips, becomes an
        # all-reduce before anything asks whether the sparse core can.
        "xla_tpu_check_legacy_constraints_in_reduce_scatter_legalizer": "false",
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
        # A gather over two or three closed dims of a torus is another emitter, with a switch of its
        # own: without it the compute units run it themselves, and stand still meanwhile.
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
    }
)
"""The sparse core of a TPU sends while the others compute."""
