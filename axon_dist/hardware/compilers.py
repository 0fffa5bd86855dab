"""What has to be so in this process before it can compile for a machine it does not have."""

from __future__ import annotations

import importlib.util
import os

import jax

from ..core.compat import backend_started
from ..core.errors import BackendStartedError, UnsupportedError
from .targets import Target, as_target

_VARIABLES = {
    # The plug-in would otherwise ask the driver for its version, and there is no driver.
    "cuda": {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
    # libtpu would otherwise ask the cloud's metadata server what machine this is, and lock itself
    # to one process.
    "tpu": {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-16",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
    "cpu": {},
}
_COMPILERS = {
    "cuda": ("cuda", ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")),
    "tpu": ("aot", ("libtpu",)),
}


def prepare_environment(target: Target | str) -> None:
    """Makes this process able to compile for a target; it then computes on the CPU itself.

    Sets environment variables that are not set yet, and `jax_platforms` to `cpu` unless it is set.

    Args:
        target: a target or its name.

    Raises:
        UnsupportedError: the compiler is not installed.
        BackendStartedError: JAX has started and left the CUDA plug-in out, which it does not take
            back.
    """
    target = as_target(target)
    platform = target.platform
    missing = missing_compiler(target)
    if missing:
        raise UnsupportedError(missing)
    unset = {k: v for k, v in _VARIABLES[platform].items() if k not in os.environ}
    if (
        platform == "cuda"
        and unset
        and backend_started()
        and jax.config.values["jax_platforms"] != "cpu"
    ):
        raise BackendStartedError(
            "JAX has started its backend and left the CUDA compiler out; set "
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 and JAX_PLATFORMS=cpu before the process starts, "
            "or call prepare_environment('h100:8') before the first array is made"
        )
    os.environ.update(unset)
    if not backend_started() and not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")


def missing_compiler(target: Target | str) -> str | None:
    """Says what to install to compile for a target, or None where nothing is missing.

    Example:
        >>> missing_compiler("cpu:8") is None
        True
    """
    platform = as_target(target).platform
    if platform not in _COMPILERS:
        return None
    extra, modules = _COMPILERS[platform]
    if any(_is_installed(module) for module in modules):
        return None
    return (
        f"compiling for {platform} needs {modules[0]!r}, which is not installed; "
        f"pip install 'axon_dist[{extra}]'"
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
