"""Kernels that the compiler cannot partition run on each rank's samples and heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

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
    """

    mesh: Mesh
    batch: Axes
    heads: Axes
    is_opaque: bool = True

    def __call__(
        self, attend: Callable[..., Array], module: Any, *args: Any, **kwargs: Any
    ) -> Array:
        """Computes `attend(module, query, key, value)` of arrays `[B, T, H, K]`.

        Raises:
            UnsupportedError: when the call says more.
        """
        query, key, value, segments = attended(attend, module, args, kwargs)
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
    """
    heads = tuple(axis for axis in ("tp",) if axis in layout.mesh.axis_names)
    # Found of devices that are not here, too.
    on_tpu = layout.mesh.devices.flat[0].platform == "tpu"
    for _, module in nnx.iter_modules(model):
        form = getattr(module, "form", None)
        if form in (*OPAQUE, *FUSED) and hasattr(module, "attend"):
            is_opaque = form in OPAQUE or (on_tpu and form == "auto")
            over = OverMesh(layout.mesh, layout.batch, heads, is_opaque)
            wrap_calls(module, {"attend": over})
