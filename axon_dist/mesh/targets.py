"""Machines to compile for, by names such as `h100:8x8`, `v5p:4x4x4`, `v5e:16x16` and `cpu:8`."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from importlib import resources

import jax

from ..core.arguments import TEXT
from ..core.compat import backend_started
from ..core.errors import (
    BackendStartedError,
    ConfigError,
    UnsupportedError,
    did_you_mean,
    install_command,
)
from ..core.typing import JsonDict
from .chips import EMULATED, HARDWARE, CompilerOptions, Hardware, Platform, Wiring, chip_names

_EMULATED = "cpu"


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine to compile for: a number of devices of one kind and their wiring.

    Args:
        name: a name that `parse_target` reads, such as `"v5p:4x4x4"`.
        platform: `cpu`, `cuda` or `tpu`.
        chip: `cpu`, or a name of `HARDWARE`.
        shape: nodes and devices per node of a GPU cluster, or the dims of a TPU slice.
    """

    name: str
    platform: Platform
    chip: str
    shape: tuple[int, ...]

    @property
    def examples(self) -> tuple[str, ...]:
        """Names of targets with the same chip."""
        return tuple(f"{self.chip}:{shape}" for shape in _wiring(self.chip).examples)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def hbm_bytes(self) -> int | None:
        """The bytes of memory per device; None for the CPU."""
        return self.machine.memory_bytes if self.machine else None

    @property
    def machine(self) -> Hardware | None:
        """The chip's row in `HARDWARE`; None for the CPU."""
        return HARDWARE.get(self.chip)

    @property
    def wrap(self) -> tuple[bool, bool, bool] | None:
        """Which axes of a TPU slice wrap around into rings, or None if none does.

        A v5p slice has the wrap-around links if it consists of whole 4x4x4 cubes, a v5e or v6e
        slice has them along an axis of 16. The compiler must know: without rings it replaces
        all-gathers over the whole slice by all-reduces.
        """
        full = _wiring(self.chip).full_ring
        if not full:
            return None
        closed = [size % full == 0 for size in self.shape]
        if len(self.shape) == 3:
            return (True, True, True) if all(closed) else None
        return (closed[0], closed[1], False) if any(closed) else None

    @property
    def topology(self) -> JsonDict:
        """The arguments of `jax.experimental.topologies.get_topology_desc`."""
        sizes = "x".join(map(str, self.shape))
        if self.platform == "cuda":
            nodes, per_node = (1, *self.shape)[-2:]
            return {
                "topology_name": self.chip,
                "platform": self.platform,
                "target_config": _description(HARDWARE[self.chip]),
                "topology": f"{nodes}x{per_node}x1",
            }
        more = dict(_wiring(self.chip).topology)
        wrap = {"wrap": self.wrap} if self.wrap else {}
        name = f"{self.chip}:{sizes}"
        return {"topology_name": name, "platform": self.platform, **more, **wrap}


def parse_target(name: str) -> Target:
    """Parses the name of a target.

    `h100:8` is one node of eight GPUs, `h100:8x8` is eight nodes of eight, `v5p:4x4x4` is a TPU
    slice with these dims, and `cpu:8` is eight emulated devices.

    Args:
        name: `chip:shape`.

    Returns:
        The target; no device or compiler is accessed.

    Raises:
        ConfigError: if the chip is unknown or cannot have this shape.

    Example:
        >>> parse_target("h100:8x8").num_devices
        64
        >>> parse_target("v5p:2x2x2").shape
        (2, 2, 2)
    """
    TEXT.check("parse_target", "name", name)
    called, _, text = name.partition(":")
    known = {_EMULATED: _EMULATED, **chip_names()}
    if called not in known:
        raise ConfigError(
            f"no target chip {called!r:.80} in {name!r:.80}.{did_you_mean(called, known)}"
        )
    chip = known[called]
    row = _wiring(chip)
    parts = text.split("x")
    shape = tuple(int(part) for part in parts if re.fullmatch("[0-9]{1,9}", part))
    target = Target(name, row.platform, chip, shape)
    if len(shape) != len(parts) or len(shape) not in row.num_dims or 0 in shape:
        raise ConfigError(
            f"cannot read the shape {text!r:.80} of target {name!r:.80}; "
            f"write it as in {' or '.join(target.examples)}"
        )
    if shape[-1] > row.max_last_dim:
        raise ConfigError(
            f"target {name!r} asks for {shape[-1]} {chip} in one node, but at most "
            f"{row.max_last_dim} are wired together; write more of them as in "
            f"{target.examples[-1]}"
        )
    if target.machine is not None:
        target.machine.check_size(target.num_devices)
    return target


def as_target(target: Target | str) -> Target:
    """Parses a target's name; a target is returned as it is."""
    return parse_target(target) if isinstance(target, str) else target


def target_options(target: Target | str) -> CompilerOptions:
    """Returns the default compiler options of a target.

    `build_train_step` looks them up by its devices, so a step compiled for the devices of a target
    already has them.

    Args:
        target: a target or its name.

    Returns:
        Option names and values; empty for the CPU.

    Example:
        >>> sorted(set(target_options("h100:8x8")) - set(target_options("h100:8")))
        ['xla_gpu_experimental_parallel_collective_overlap_limit']
    """
    target = as_target(target)
    return target.machine.options_for(target.num_devices) if target.machine else {}


def _wiring(chip: str) -> Wiring:
    wiring = EMULATED if chip == _EMULATED else HARDWARE[chip].wiring
    assert wiring is not None, f"the table has no wiring of {chip}"
    return wiring


def compute_capability(chip: str) -> str | None:
    """The compute capability of an NVIDIA chip, as its devices report it; None for others.

    Args:
        chip: the name of a row of `HARDWARE`.

    Example:
        >>> compute_capability("h100"), compute_capability("v5p")
        ('9.0', None)
    """
    row = HARDWARE.get(chip)
    return row.capability or None if row else None


def _description(row: Hardware) -> str:
    """XLA's description of a GPU, or a similar GPU's.

    The name, memory, bandwidth and compute capability are those of the row in any case.
    """
    file = resources.files("axon_dist.mesh") / f"{row.like or row.name}.textproto"
    text = file.read_text()
    if not row.like:
        return text
    major, minor = row.capability.split(".")
    fields = {
        r'device_description_str: ".*"': f'device_description_str: "{_kind(row)}"',
        r"major: \d+ minor: \d+ }\n  core": f"major: {major} minor: {minor} }}\n  core",
        r"device_memory_size: \d+": f"device_memory_size: {row.memory_bytes}",
        r"memory_bandwidth: \d+": f"memory_bandwidth: {row.memory_bandwidth:.0f}",
    }
    for field, stated in fields.items():
        text, count = re.subn(field, stated, text)
        assert count == 1, f"{file} states {field!r} {count} times"
    return text


def _kind(row: Hardware) -> str:
    """A `device_kind` of a chip: the shortest that its regular expression matches."""
    return re.sub(r"\((\w+)\|.*?\)|\(.*?\)\?", r"\1", row.kinds[0])


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
    """Makes this process able to compile for a target; the process itself then runs on CPU.

    Sets environment variables that are not set yet, and `jax_platforms` to `cpu` unless it is set.

    Args:
        target: a target or its name.

    Raises:
        UnsupportedError: if the compiler is not installed.
        BackendStartedError: if JAX has already started without the CUDA plug-in, and can no longer
            load it.
    """
    target = as_target(target)
    platform = target.platform
    if missing := missing_compiler(target):
        raise UnsupportedError(missing)
    unset = {k: v for k, v in _VARIABLES[platform].items() if k not in os.environ}
    chosen = jax.config.values["jax_platforms"]
    if platform == "cuda" and unset and backend_started() and chosen != "cpu":
        raise BackendStartedError(
            "JAX has started its backend without the CUDA compiler; set "
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 and JAX_PLATFORMS=cpu before the process starts, "
            "or call prepare_environment('h100:8') before creating the first array"
        )
    os.environ.update(unset)
    if not backend_started() and not chosen:
        jax.config.update("jax_platforms", "cpu")


def missing_compiler(target: Target | str) -> str | None:
    """Says what to install to compile for a target, or None if nothing is missing.

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
        f"{install_command(extra)}"
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
