"""What makes two runs of one program give the same bits, by the devices that run it."""

from __future__ import annotations

from types import MappingProxyType

from ..core.errors import UnsupportedError
from ..mesh import Backend, World

_OPTIONS: MappingProxyType[Backend, dict[str, bool]] = MappingProxyType(
    {
        # XLA adds in a fixed order there, on however many threads.
        Backend.EMULATED: {},
        Backend.GLOO: {},
        # Scatters sort instead of racing, cuBLAS and cuDNN take algorithms with a fixed order, and
        # no kernel is chosen by how fast it was this time: a superset of
        # xla_gpu_exclude_nondeterministic_ops (openxla/xla, docs/determinism.md and #12520).
        Backend.NCCL: {"xla_gpu_deterministic_ops": True},
        # A TPU program has one order, which its compiler fixes.
        Backend.TPU: {},
    }
)


def deterministic_options(world: World) -> dict[str, bool]:
    """The compiler options under which a program gives the same bits every time.

    The same means: the same program, mesh, versions and kind of devices. Another mesh adds in
    another order.

    Args:
        world: the devices, and the mesh they form.

    Returns:
        Names and values for `jax.jit(..., compiler_options=...)`; none where nothing has to be set.

    Raises:
        UnsupportedError: for devices of which it is not known.

    Example:
        >>> deterministic_options(World.emulate(8))
        {}
    """
    if world.backend not in _OPTIONS:
        raise UnsupportedError(
            f"deterministic=True on {world.backend} devices: it is not known what makes them give "
            f"the same bits twice; use {', '.join(_OPTIONS)} devices, or leave it out"
        )
    return dict(_OPTIONS[world.backend])
