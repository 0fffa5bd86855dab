"""Mixed precision: bfloat16 and float16 compute over float32 parameters, with a loss scale.

python examples/03_mixed_precision.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist import FSDP, GradScaler, World, build_train_step
from axon_dist.models import MLP

world = World.emulate(8, "fsdp=8")
x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
batch = {"x": x, "y": np.sin(x)}


def loss_fn(model: nnx.Module, batch: dict) -> jnp.ndarray:
    """The mean square error, in float32."""
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)


def losses(precision: str, scaler: GradScaler | None = None) -> tuple[list[float], int]:
    """Losses of six steps, and how many were skipped."""
    model = MLP((32, 256, 256, 32), rngs=nnx.Rngs(0))
    fsdp = FSDP(model, world.group("fsdp"), mixed_precision=precision)
    step = build_train_step(
        model, optax.adam(1e-3), loss_fn, fsdp, world, scaler=scaler, clip_norm=1.0
    )
    state, seen = step.init(), []
    for _ in range(6):
        state, metrics = step(state, batch)
        seen.append(float(metrics["loss"]))
    return seen, 0 if state.scaler is None else int(state.scaler.skipped)


if __name__ == "__main__":
    for precision, scaler in (
        ("float32", None),
        ("bf16", None),
        ("fp16", GradScaler()),
        ("fp16", GradScaler(init_scale=2.0**19)),
    ):
        seen, skipped = losses(precision, scaler)
        scale = f", first scale {scaler.init_scale:.0f}" if scaler else ""
        print(f"{precision:8} loss {seen[0]:.4f} -> {seen[-1]:.4f}, {skipped} skipped{scale}")
