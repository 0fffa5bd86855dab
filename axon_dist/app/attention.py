"""Which attention a run computes with, in one sentence, so that it is never slow unsaid."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from axon_dist.mesh import World
from axon_dist.models import TransformerConfig, describe_attention
from axon_dist.parallel import ContextMode
from axon_dist.step import TrainStep

from ..config.schema import RunConfig


def attention_line(config: RunConfig, step: TrainStep) -> str | None:
    """What runs for the attention of a config's model; None for a model that is not ours.

    Args:
        config: a run, checked.
        step: its step, which knows strategy and devices.
    """
    model = config.model
    if not isinstance(model, TransformerConfig):
        return None
    rings = [x for x in step.strategy.layers if getattr(x, "mode", None) is ContextMode.RING]
    # Around a ring a kernel sees one of the two pieces of positions that a rank has.
    pieces = 2 * step.world.mesh.shape[rings[0].axes[0]] if rings else 1
    precision = step.strategy.precision
    dtype: Any = model.dtype or (model.param_dtype if precision is None else precision.compute)
    shape = config.data.sequence_length // pieces, model.num_heads, model.key_size
    segments = "segments" in getattr(config.data, "arrays", ())
    platform = platform_of(step.world)
    found = describe_attention(
        model.attention, platform, jnp.dtype(dtype), shape, segments, tiled=bool(rings)
    )
    return f"attention: {'around a ring, by pairs of blocks: ' if rings else ''}{found}"


def attention_rows(world: World) -> dict[str, str]:
    """Which attention `auto` takes on these devices, by the dtype of the compute."""
    shape = 1024, 8, 64
    return {
        name: describe_attention("auto", platform_of(world), jnp.dtype(name), shape)
        for name in ("bfloat16", "float32")
    }


def platform_of(world: World) -> str:
    """The platform of the devices, which need not be here: `cpu`, `gpu` or `tpu`."""
    platform = world.mesh.devices.flat[0].platform
    return "gpu" if platform in ("cuda", "gpu", "rocm") else platform
