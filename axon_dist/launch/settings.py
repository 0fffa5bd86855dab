"""Compares the settings of processes that change their program or its numbers.

All processes of a run must compile the same program. If two programs differ, a collective hangs, or
gloo and NCCL abort without naming the cause.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from ..core.files import kind_at

JAX_FLAGS = (
    "jax_accurate_erf_inv", "jax_allow_f16_reductions", "jax_bcoo_cusparse_lowering",
    "jax_compiler_enable_remat_pass", "jax_cpu_collectives_implementation", "jax_custom_jvp3",
    "jax_custom_vjp3", "jax_debug_infs", "jax_debug_nans", "jax_default_dtype_bits",
    "jax_default_matmul_precision", "jax_default_prng_impl", "jax_disable_jit",
    "jax_disable_most_optimizations", "jax_enable_custom_prng", "jax_enable_pgle",
    "jax_enable_x64", "jax_error_checking_behavior_divide", "jax_error_checking_behavior_nan",
    "jax_error_checking_behavior_oob", "jax_exec_time_optimization_effort",
    "jax_explicit_x64_dtypes", "jax_high_dynamic_range_gumbel", "jax_memory_fitting_effort",
    "jax_memory_fitting_level", "jax_numpy_dtype_promotion", "jax_optimization_level",
    "jax_pallas_enable_debug_checks", "jax_pgle_aggregation_percentile",
    "jax_pgle_profiling_runs", "jax_ragged_dot_use_ragged_dot_instruction",
    "jax_random_seed_offset", "jax_remat3", "jax_remat_barrier_no_cotangents", "jax_scan3",
    "jax_softmax_custom_jvp", "jax_sort_devices_by_process_index",
    "jax_threefry_gpu_kernel_lowering", "jax_threefry_partitionable", "jax_use_direct_linearize",
    "jax_use_hlo_logistic_lowering", "jax_use_magma", "jax_use_shardy_partitioner",
    "jax_use_simplified_jaxpr_constants", "jax_xla_profile_version",
)  # fmt: skip
"""JAX flags to compare; flags that this version of JAX lacks are skipped."""
FLAG_LISTS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables that hold lists of flags. Each flag is compared by itself, so order does not matter."""
VARIABLES = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")
"""Other variables that change numbers. Memory settings (XLA_PYTHON_CLIENT_*) do not."""
_OF_ONE_PROCESS = re.compile(
    r"xla_force_host_platform_device_count|dump|timeout|cache_(dir|file)|autotune_results|"
    r"cuda_data_dir|compilation_parallelism|megascale_.*(port|address|slice_id)"
)
"""Flags that may differ between processes: they set devices, folders, timeouts and ports, and do
not change the program."""
_LONGEST = 200
_SHOWN = 3


def read_settings(env: Mapping[str, str], jax_flags: Mapping[str, object]) -> dict[str, str]:
    """The settings to compare, by name; unset ones are left out.

    Args:
        env: the environment.
        jax_flags: JAX's flags by name, such as `jax.config.values`.

    Example:
        >>> env = {"XLA_FLAGS": "--xla_dump_to=/tmp/0 --xla_cpu_enable_fast_math", "HOME": "/"}
        >>> read_settings(env, {"jax_enable_x64": True, "jax_log_compiles": True})
        {'jax_enable_x64': 'True', 'XLA_FLAGS --xla_cpu_enable_fast_math': 'true'}
    """
    settings = {name: _text_of(jax_flags[name]) for name in JAX_FLAGS if name in jax_flags}
    for variable in FLAG_LISTS:
        for flag, value in _split_flags(env.get(variable, "")).items():
            if not _OF_ONE_PROCESS.search(flag):
                settings[f"{variable} {flag}"] = value
    settings |= {name: env[name] for name in VARIABLES if name in env}
    return {name: _shortened(value) for name, value in settings.items()}


def compare_settings(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the settings in which two processes differ.

    Example:
        >>> compare_settings({"a": "1", "b": "2"}, {"a": "1", "c": "3"})
        ('b', 'c')
    """
    return tuple(name for name in {**one, **other} if one.get(name) != other.get(name))


def difference_text(one: Mapping[str, str], other: Mapping[str, str], pair: tuple[int, int]) -> str:
    """Describes the settings in which two processes differ; "" if there are none.

    Args:
        one: the settings of the first.
        other: the settings of the second.
        pair: the indices of the two processes.

    Example:
        >>> difference_text({"jax_enable_x64": "True"}, {"jax_enable_x64": "False"}, (0, 2))
        "jax_enable_x64 is 'True' in process 0 and 'False' in process 2"
    """

    def state(settings: Mapping[str, str], name: str, process: int) -> str:
        # Another process may send arbitrary text, so its values are printed as ASCII and truncated.
        value = f"{settings[name]!a:.300}" if name in settings else "not set"
        return f"{value} in process {process}"

    texts = [
        f"{ascii(name)[1:-1]:.120} is {state(one, name, pair[0])} and {state(other, name, pair[1])}"
        for name in compare_settings(one, other)
    ]
    more = [f"{len(texts) - _SHOWN} more differ"] if len(texts) > _SHOWN else []
    return ", ".join(texts[:_SHOWN] + more)


def _split_flags(text: str) -> dict[str, str]:
    """Splits flags and values; a text that is only a path names a file with the flags.

    If a flag occurs several times, the last one counts.
    """
    if text.strip() and not text.strip().startswith("-"):
        path = Path(text.strip())
        is_readable = kind_at(path) == "a file" and os.access(path, os.R_OK)
        text = path.read_text(errors="replace") if is_readable else f"--file={text.strip()}"
    try:
        parts = shlex.split(text)
    except ValueError:
        parts = text.split()
    pairs = (part.partition("=") for part in parts)
    return {name: value if equals else "true" for name, equals, value in pairs}


def _text_of(value: object) -> str:
    return value.name.lower() if isinstance(value, enum.Enum) else str(value)


def _shortened(value: str) -> str:
    """Shortens a long value to its start and a checksum, because messages have a size limit."""
    if len(value) <= _LONGEST:
        return value
    digest = hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{value[:_LONGEST]}... ({len(value)} characters, sha256 {digest})"
