"""Whether the compiler gets gradients right on these devices: sentinels over layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ..core.errors import ConfigError, MeshError, did_you_mean
from ..core.modules import wrap_calls
from ..core.tree import leaves_with_paths
from ..core.typing import Array, Batch
from ..mesh import World
from ..nn import Layout
from ..parallel import Strategy, ddp, fsdp, zero
from ..step import build_train_step
from .sentinels import FEATURES, POSITIONS, SENTINELS, Sentinel

TOLERANCE = 1e-4
"""The largest error of a gradient, relative to its largest element, that rounding explains."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One gradient of one sentinel in one layout.

    Args:
        sentinel: its name.
        layout: the name of the layout.
        leaf: `kernel`, or `inner`, a product before the operation, which its input's gradient
            reaches.
        error: the largest difference to one device, relative to the largest element there.
    """

    sentinel: str
    layout: str
    leaf: str
    error: float

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the error."""
        return self.error <= TOLERANCE


@dataclasses.dataclass(frozen=True)
class SplitPositions:
    """Splits the positions of what every sentinel gets, as context parallelism does.

    Args:
        axis: the mesh axis.
    """

    axis: str

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes it needs."""
        return (self.axis,)

    @property
    def sends_around(self) -> bool:
        """Never."""
        return False

    @property
    def splits_positions(self) -> bool:
        """Always."""
        return True

    def check(self, model: nnx.Module, layout: Layout) -> None:
        """Any model can be run so."""

    def extend(self, layout: Layout) -> Layout:
        """Positions are split in every layer."""
        return dataclasses.replace(layout, sequence=(*layout.sequence, self.axis))

    def __call__(self, model: nnx.Module, layout: Layout) -> None:
        """Pins the input of every operation."""
        pin = lambda call, module, x: call(module, layout.constrain(x))
        for _, module in list(nnx.iter_modules(model)):
            if isinstance(module, Guarded):
                wrap_calls(module, {"__call__": pin})


@dataclasses.dataclass(frozen=True)
class Laid:
    """A layout.

    Args:
        axes: the names of the two mesh axes.
        strategy: makes the strategy.
        core: whether it is among the quick ones.
    """

    axes: tuple[str, str]
    strategy: Callable[[], Strategy]
    core: bool = True


def _split(strategy: Strategy | None = None) -> Strategy:
    return dataclasses.replace(strategy or Strategy("cp"), layers=(SplitPositions("cp"),))


LAYOUTS: MappingProxyType[str, Laid] = MappingProxyType(
    {
        "samples over one axis of two": Laid(("dp", "tp"), ddp),
        "samples over the last axis": Laid(("tp", "dp"), ddp, core=False),
        "positions over one axis of two": Laid(("tp", "cp"), _split),
        "positions over the other axis": Laid(("dp", "cp"), lambda: _split(ddp()), core=False),
        "moments split": Laid(("dp", "tp"), lambda: zero(1, min_elements=1), core=False),
        "weights split over one axis": Laid(
            ("dp", "fsdp"), lambda: fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=1)
        ),
        "weights split, positions over the other": Laid(
            ("fsdp", "cp"), lambda: _split(fsdp(min_elements=1)), core=False
        ),
    }
)
"""The layouts by name."""


class Guarded(nnx.Module):
    """A product, and one operation after it.

    Args:
        sentinel: an operation whose gradient XLA has got wrong.
        rngs: source of the weights.
    """

    def __init__(self, sentinel: Sentinel, rngs: nnx.Rngs):
        draw = lambda *shape: nnx.Param(0.5 * jax.random.normal(rngs.params(), shape))
        self.inner, self.kernel = draw(FEATURES, FEATURES), draw(*sentinel.kernel)
        self.run = sentinel.run

    def __call__(self, x: Array) -> Array:
        """A scalar for samples `[B, T, D]`."""
        return jnp.mean(jnp.sin(self.run(jnp.tanh(x @ self.inner[...]), self.kernel[...])))


class Guard(nnx.Module):
    """Many operations side by side, so that one program compares them all.

    Args:
        names: of sentinels.
        rngs: source of the weights.
    """

    def __init__(self, names: Iterable[str], rngs: nnx.Rngs):
        self.guarded = nnx.Dict({name: Guarded(SENTINELS[name], rngs) for name in names})

    def __call__(self, x: Array) -> Array:
        """The sum of all of them."""
        return sum((guarded(x) for guarded in self.guarded.values()), jnp.zeros(()))


def check_numerics(
    devices: Sequence[Any], names: Iterable[str] | None = None, full: bool = False
) -> list[Finding]:
    """Compares the gradients of operations, laid out over devices, with those of one device.

    All products run in the highest precision, so that rounding explains little.

    Args:
        devices: an even number, at least four.
        names: of sentinels; the core ones by default.
        full: all sentinels and all layouts, in place of the core ones.

    Returns:
        A finding for every gradient, in the order of layouts and names.

    Raises:
        MeshError: for fewer than four devices or an odd number of them.
        ConfigError: for an unknown sentinel.

    Example:
        >>> world = World.emulate(8)
        >>> found = check_numerics(world.mesh.devices.flat[:4], ["dot"])
        >>> all(finding.is_right for finding in found)
        True
    """
    if len(devices) < 4 or len(devices) % 2:
        raise MeshError(
            f"comparing layouts needs a mesh with two axes, and got {len(devices)} devices; give "
            "an even number, at least four, such as World.emulate(4).mesh.devices.flat"
        )
    chosen = [name for name, row in SENTINELS.items() if full or row.core]
    chosen = chosen if names is None else list(names)
    for name in chosen:
        if name not in SENTINELS:
            raise ConfigError(f"unknown sentinel {name!r}.{did_you_mean(name, SENTINELS)}")
    samples = 2 * len(devices)
    draws = np.random.default_rng(0).normal(size=(samples, POSITIONS, FEATURES))
    batch = {"x": draws.astype(np.float32)}
    with jax.default_matmul_precision("highest"):
        expected = _on_one(Guard(chosen, nnx.Rngs(0)), batch, devices[0])
        found: list[Finding] = []
        for layout in (name for name, row in LAYOUTS.items() if full or row.core):
            for path, got in _laid_out(LAYOUTS[layout], chosen, batch, devices).items():
                _, sentinel, leaf = path.split("/")
                found.append(Finding(sentinel, layout, leaf, _error(got, expected[path])))
    return found


def _loss(model: nnx.Module, batch: Batch) -> Array:
    return model(batch["x"])  # type: ignore[operator]


def _on_one(model: nnx.Module, batch: Batch, device: Any) -> dict[str, Array]:
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda params, batch: _loss(nnx.merge(graphdef, params, rest, copy=True), batch)
    given = jax.device_put((params, batch), device)
    return _by_path(nnx.to_pure_dict(jax.jit(jax.grad(loss))(*given)))


def _laid_out(
    row: Laid, names: Sequence[str], batch: Batch, devices: Sequence[Any]
) -> dict[str, Array]:
    sizes = {row.axes[0]: len(devices) // 2, row.axes[1]: 2}
    world = World.init(sizes, list(devices))
    model = Guard(names, nnx.Rngs(0))
    step = build_train_step(model, optax.sgd(0.1), _loss, row.strategy(), world)
    grads, _ = step.gradients(step.init(), batch)
    return _by_path(grads)


def _by_path(tree: Any) -> dict[str, Array]:
    return dict(leaves_with_paths(tree))


def _error(got: Array, expected: Array) -> float:
    wanted = np.asarray(expected)
    # What an operation indexes by has no gradient at all.
    largest = float(np.abs(wanted).max()) or 1.0
    return float(np.abs(np.asarray(got) - wanted).max()) / largest
