"""Kernels that the compiler cannot partition run on each rank's samples and heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from ..core.cudnn import MOST_BEFORE_HOPPER
from ..core.errors import UnsupportedError
from ..core.typing import Array
from ..nn.attention import attended
from ..nn.layout import Axes, Layout, manual_axes
from ..program.calls import wrap_calls

OPAQUE = ("flash",)
"""The forms of attention that are one opaque kernel; XLA partitions the others itself."""

FUSED = ("auto", "cudnn")
"""The forms whose kernel brings its own partitioning, which fails where other axes are manual."""


@dataclasses.dataclass(frozen=True)
class OverMesh:
    """Runs attention in `shard_map` over samples and heads, which attention never mixes.

    Args:
        mesh: names and sizes of its axes, over all devices.
        batch: the axes that split the samples.
        heads: the axes that split the heads.
        is_opaque: whether the kernel is one that the compiler cannot partition at all, so that
            every axis has to be manual: a form of `OPAQUE`, and on TPUs `auto`. Others of `FUSED`
            are left alone where no axis is manual.
        most_features: the largest head that cuDNN takes on these devices; None for any.
    """

    mesh: Mesh
    batch: Axes
    heads: Axes
    is_opaque: bool = True
    most_features: int | None = None

    def __call__(
        self, attend: Callable[..., Array], module: Any, *args: Any, **kwargs: Any
    ) -> Array:
        """Computes `attend(module, query, key, value)` of arrays `[B, T, H, K]`.

        Raises:
            UnsupportedError: when the call says more, or heads are too large for the chip's kernel.
        """
        query, key, value, segments = attended(attend, module, args, kwargs)
        if self.most_features is not None and query.shape[-1] > self.most_features:
            if module.form != "auto":
                raise UnsupportedError(
                    f"attention='cudnn' with heads of {query.shape[-1]}: these GPUs are older than "
                    f"Hopper, whose heads may be {self.most_features} at most; use "
                    "attention='auto' or 'einsum'"
                )
            module = nnx.clone(module)
            module.form = "einsum"
        more = () if segments is None else (segments,)
        call = lambda q, k, v, *s: attend(module, q, k, v, **({"segments": s[0]} if s else {}))
        manual = manual_axes()
        batch = tuple(axis for axis in self.batch if axis not in manual)
        heads = tuple(axis for axis in self.heads if axis not in manual)
        ways = lambda axes: math.prod(self.mesh.shape[axis] for axis in axes)
        if key.shape[2] % ways(heads):
            heads = ()
        if self.is_opaque and query.shape[0] % ways(batch):
            batch = ()
        left = tuple(axis for axis in self.mesh.axis_names if axis not in manual)
        is_partitioned = not self.is_opaque and not manual
        if is_partitioned or not (left if self.is_opaque else batch or heads):
            return call(query, key, value, *more)
        spec = PartitionSpec(batch or None, None, heads or None, None)
        run = jax.shard_map(
            call,
            mesh=None if manual else self.mesh,
            axis_names=frozenset(left if self.is_opaque else (*batch, *heads)),
            in_specs=(spec,) * 3 + (PartitionSpec(batch or None),) * len(more),
            out_specs=spec,
            check_vma=False,
        )
        return run(query, key, value, *more)


def map_kernels(model: nnx.Module, layout: Layout) -> None:
    """Wraps the attention of a merged model where it is one kernel, in place.

    Args:
        model: modules with a `form` among `OPAQUE` or `FUSED` and a method `attend` are changed.
        layout: which axes split samples.

    Raises:
        UnsupportedError: for cuDNN's attention on devices that are no GPUs.
    """
    heads = tuple(axis for axis in ("tp",) if axis in layout.mesh.axis_names)
    # Asked of the devices of the mesh, which need not be here.
    device = layout.mesh.devices.flat[0]
    on_tpu, on_gpu = device.platform == "tpu", device.platform in ("gpu", "cuda")
    for _, module in nnx.iter_modules(model):
        form = getattr(module, "form", None)
        if form in (*OPAQUE, *FUSED) and hasattr(module, "attend"):
            if form == "cudnn" and not on_gpu:
                raise UnsupportedError(
                    f"attention='cudnn' on devices of platform {device.platform!r}: cuDNN runs on "
                    "NVIDIA GPUs alone; use attention='auto' or 'einsum'"
                )
            is_opaque = form in OPAQUE or (on_tpu and form == "auto")
            most = _most_features(device) if on_gpu and form in FUSED else None
            over = OverMesh(layout.mesh, layout.batch, heads, is_opaque, most)
            wrap_calls(module, {"attend": over})


def _most_features(device: Any) -> int | None:
    """The largest head that cuDNN takes on a GPU, if that is fewer than on any."""
    capability = getattr(device, "compute_capability", None)
    is_old = capability is not None and float(capability) < 9
    return MOST_BEFORE_HOPPER if is_old else None
