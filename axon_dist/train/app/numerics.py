"""Checks that XLA computes correct gradients on these devices, for many operations and layouts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist.core.typing import Array, Batch

from ...core.errors import ConfigError, MeshError, did_you_mean
from ...core.modules import wrap_calls
from ...core.tree import leaves_with_paths
from ...mesh import World
from ...nn import Layout
from ...parallel import ContextMode, Strategy, ddp, fsdp, zero
from ...parallel.context import ContextLayers
from ...step import build_train_step

POSITIONS, FEATURES = 8, 8
"""The sizes T and D of the samples."""

SentinelFunction: TypeAlias = Callable[[Array, Array], Array]
"""Maps samples `[B, T, D]` and a kernel to any array."""


@dataclasses.dataclass(frozen=True)
class Sentinel:
    """One operation.

    Args:
        run: the operation.
        kernel: the shape of its kernel.
        core: whether it belongs to the quick subset, which has one operation of each kind.
    """

    run: SentinelFunction
    kernel: tuple[int, ...] = (FEATURES, FEATURES)
    core: bool = True


def _convolution(
    dims: int, groups: int = 1, padding: Any = "SAME", image: bool = False, **options: Any
) -> SentinelFunction:
    """Returns a convolution over positions, or over the samples as images `[B, T, D / 4, 4]`."""
    letters = "WHD"[:dims][::-1]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")

    options = {
        "window_strides": (1,) * dims,
        "padding": padding,
        "dimension_numbers": numbers,
        "feature_group_count": groups,
        **options,
    }

    def run(x: Array, kernel: Array) -> Array:
        x = x.reshape(*x.shape[:2], -1, 4) if image else x
        return jax.lax.conv_general_dilated(x, kernel, **options)

    return run


def _numbers(x: Array) -> Array:
    """Returns integers `[B, T]` in `[0, 8)` that depend on the samples."""
    return (jnp.abs(x[..., 0]) * 100).astype(jnp.int32) % FEATURES


def _recurrent(x: Array, kernel: Array) -> Array:
    def step(carry: Array, now: Array) -> tuple[Array, Array]:
        new = jnp.tanh(carry @ kernel + now)
        return new, new

    _, out = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    return out


def _attend(x: Array, kernel: Array) -> Array:
    query, key, value = jnp.split(x @ kernel, 3, -1)

    def heads(y):
        return y.reshape(*y.shape[:2], 2, -1)

    return jax.nn.dot_product_attention(heads(query), heads(key), heads(value), is_causal=True)


def _normal(x: Array, kernel: Array) -> Array:
    y = x @ kernel
    return (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)


def _matrix(kernel: Array) -> Array:
    """Returns a positive definite matrix near twice the identity."""
    return kernel @ kernel.T * 0.1 + 2 * jnp.eye(kernel.shape[0])


def _pooled(x: Array, kernel: Array, start: float, reduce: Any) -> Array:
    y = x @ kernel
    return jax.lax.reduce_window(y, start, reduce, (1, 3, 1), (1, 2, 1), "SAME")


def _ragged(x: Array, kernel: Array) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    half = rows.shape[0] // 2
    return jax.lax.ragged_dot(rows, kernel, jnp.array([half // 2, rows.shape[0] - half // 2]))


def _segments(x: Array, kernel: Array) -> Array:
    y = x @ kernel
    numbers = _numbers(x)
    return jax.vmap(lambda y, numbers: jax.ops.segment_sum(y, numbers, FEATURES))(y, numbers)


def _conditional(x: Array, kernel: Array) -> Array:
    return jax.lax.cond(kernel[0, 0] > 0, lambda: x @ kernel, lambda: (x + 1) @ kernel)


def _repeated(x: Array, kernel: Array) -> Array:
    return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ kernel), x)


SENTINELS: MappingProxyType[str, Sentinel] = MappingProxyType(
    {
        "conv": Sentinel(_convolution(1), (3, 8, 8)),
        "conv_strided": Sentinel(_convolution(1, window_strides=(2,)), (3, 8, 8)),
        "conv_dilated": Sentinel(_convolution(1, rhs_dilation=(2,)), (3, 8, 8), core=False),
        "conv_valid": Sentinel(_convolution(1, padding="VALID"), (3, 8, 8), core=False),
        "conv_transposed": Sentinel(
            _convolution(1, padding=((1, 2),), lhs_dilation=(2,)), (3, 8, 8), core=False
        ),
        "conv_grouped": Sentinel(_convolution(1, groups=2), (3, 4, 8)),
        "conv_depthwise": Sentinel(_convolution(1, groups=8), (3, 1, 8)),
        "conv_multiplied": Sentinel(_convolution(1, groups=8), (3, 1, 16), core=False),
        "conv_causal": Sentinel(_convolution(1, groups=8, padding=((3, 0),)), (4, 1, 8)),
        "conv2d": Sentinel(_convolution(2, image=True), (3, 3, 4, 8)),
        "conv2d_strided": Sentinel(
            _convolution(2, image=True, window_strides=(2, 2)), (3, 3, 4, 8), core=False
        ),
        "conv2d_depthwise": Sentinel(_convolution(2, 4, image=True), (3, 3, 1, 4)),
        "conv_patches": Sentinel(
            _convolution(2, image=True, padding="VALID", window_strides=(2, 2)), (2, 2, 4, 8)
        ),
        "dot": Sentinel(lambda x, k: x @ k),
        "dot_over_positions": Sentinel(lambda x, k: jnp.einsum("btd,ts->bsd", x, k)),
        "dot_of_all": Sentinel(lambda x, k: x.reshape(len(x), -1) @ k, (64, 8), core=False),
        "dot_of_samples": Sentinel(lambda x, k: jnp.einsum("btd,bsd->bts", x @ k, x)),
        "dot_of_experts": Sentinel(lambda x, k: jnp.einsum("btd,edf->betf", x, k), (2, 8, 4)),
        "ragged_dot": Sentinel(_ragged, (2, 8, 8)),
        "attention": Sentinel(_attend, (8, 24)),
        "recurrent": Sentinel(_recurrent),
        "repeated": Sentinel(_repeated, core=False),
        "rematerialised": Sentinel(jax.checkpoint(lambda x, k: jnp.tanh(x @ k) @ k), core=False),
        "chosen": Sentinel(_conditional, core=False),
        "solve": Sentinel(lambda x, k: jnp.linalg.solve(_matrix(k), x.swapaxes(1, 2))),
        "cholesky": Sentinel(lambda x, k: x @ jnp.linalg.cholesky(_matrix(k)), core=False),
        "fft": Sentinel(lambda x, k: jnp.abs(jnp.fft.rfft(x @ k, axis=1)) ** 2),
        "embedding": Sentinel(lambda x, k: k[_numbers(x)]),
        "taken_along": Sentinel(
            lambda x, k: jnp.take_along_axis(x @ k, _numbers(x)[..., None], 2), core=False
        ),
        "scattered": Sentinel(lambda x, k: jnp.zeros((8, 8)).at[_numbers(x)].add(x @ k)),
        "segments": Sentinel(_segments, core=False),
        "sorted": Sentinel(lambda x, k: jnp.sort(x @ k, axis=1) * jnp.arange(8.0)),
        "top": Sentinel(lambda x, k: jax.lax.top_k(x @ k, 3)[0] * jnp.arange(3.0), core=False),
        "rolled": Sentinel(lambda x, k: jnp.roll(x @ k, 1, axis=1) * x),
        "flipped": Sentinel(lambda x, k: jnp.flip(x @ k, axis=1) * x, core=False),
        "shifted": Sentinel(lambda x, k: (x @ k)[:, 1:] * x[:, :-1]),
        "padded": Sentinel(lambda x, k: jnp.pad(x @ k, ((0, 0), (2, 1), (0, 3))), core=False),
        "joined": Sentinel(
            lambda x, k: jnp.concatenate([x @ k, x[:, :2]], 1) * jnp.arange(10.0)[:, None],
            core=False,
        ),
        "norm": Sentinel(_normal),
        "softmax": Sentinel(lambda x, k: jax.nn.softmax(x @ k, axis=1) * x, core=False),
        "logsumexp": Sentinel(lambda x, k: jax.nn.logsumexp(x @ k, axis=(1, 2)), core=False),
        "largest": Sentinel(lambda x, k: (x @ k).max(1), core=False),
        "batch_norm": Sentinel(lambda x, k: (x @ k - (x @ k).mean((0, 1))) * jnp.arange(8.0)),
        "summed_up": Sentinel(lambda x, k: jnp.cumsum(x @ k, axis=1)),
        "multiplied_up": Sentinel(lambda x, k: jnp.cumprod(jnp.tanh(x @ k), axis=1), core=False),
        "associative": Sentinel(
            lambda x, k: jax.lax.associative_scan(lambda a, b: a * 0.5 + b, x @ k, axis=1),
            core=False,
        ),
        "mean_pooled": Sentinel(functools.partial(_pooled, start=0.0, reduce=jax.lax.add)),
        "max_pooled": Sentinel(functools.partial(_pooled, start=-math.inf, reduce=jax.lax.max)),
    }
)
"""All operations by name."""


TOLERANCE = 1e-4
"""The largest error of a gradient, relative to its largest element, that rounding can explain."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One gradient of one sentinel in one layout.

    Args:
        sentinel: its name.
        layout: the name of the layout.
        leaf: `kernel`; or `inner`, the weight of the product before the operation, whose gradient
            depends on that of the operation's input.
        error: the largest difference from one device, relative to the largest element there.
    """

    sentinel: str
    layout: str
    leaf: str
    error: float

    @property
    def is_right(self) -> bool:
        """Whether rounding can explain the error."""
        return self.error <= TOLERANCE


@dataclasses.dataclass(frozen=True)
class SplitPositions(ContextLayers):
    """Splits the positions of every sentinel's input, as context parallelism does."""

    def check(self, model: nnx.Module, layout: Layout) -> None:
        """Accepts any model."""

    def __call__(self, model: nnx.Module, layout: Layout) -> None:
        """Constrains the sharding of every operation's input."""

        def pin(call, module, x):
            return call(module, layout.constrain(x))

        for _, module in list(nnx.iter_modules(model)):
            if isinstance(module, SentinelModule):
                wrap_calls(module, {"__call__": pin})


@dataclasses.dataclass(frozen=True)
class LayoutCase:
    """A layout.

    Args:
        axes: the names of the two mesh axes.
        strategy: makes the strategy.
        core: whether it belongs to the quick subset.
    """

    axes: tuple[str, str]
    strategy: Callable[[], Strategy]
    core: bool = True


def _split(strategy: Strategy | None = None) -> Strategy:
    return dataclasses.replace(
        strategy or Strategy("cp"), layers=(SplitPositions(ContextMode.ULYSSES, "cp"),)
    )


LAYOUTS: MappingProxyType[str, LayoutCase] = MappingProxyType(
    {
        "samples over one axis of two": LayoutCase(("dp", "tp"), ddp),
        "samples over the last axis": LayoutCase(("tp", "dp"), ddp, core=False),
        "positions over one axis of two": LayoutCase(("tp", "cp"), _split),
        "samples over one axis, positions over the other": LayoutCase(
            ("dp", "cp"), lambda: _split(ddp()), core=False
        ),
        "moments split": LayoutCase(("dp", "tp"), lambda: zero(1, min_elements=1), core=False),
        "weights split over one axis": LayoutCase(
            ("dp", "fsdp"), lambda: fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=1)
        ),
        "weights split, positions over the other": LayoutCase(
            ("fsdp", "cp"), lambda: _split(fsdp(min_elements=1)), core=False
        ),
    }
)
"""The layouts by name."""


class SentinelModule(nnx.Module):
    """A matrix product followed by one operation.

    Args:
        sentinel: an operation to check, such as one whose gradient XLA has computed wrongly.
        rngs: source of the weights.
    """

    def __init__(self, sentinel: Sentinel, rngs: nnx.Rngs):
        def draw(*shape):
            return nnx.Param(0.5 * jax.random.normal(rngs.params(), shape))

        self.inner = draw(FEATURES, FEATURES)
        self.kernel = draw(*sentinel.kernel)
        self.run = sentinel.run

    def __call__(self, x: Array) -> Array:
        """Returns a scalar for samples `[B, T, D]`."""
        return jnp.mean(jnp.sin(self.run(jnp.tanh(x @ self.inner[...]), self.kernel[...])))


class SentinelsModule(nnx.Module):
    """Many independent operations in one model, so that one program checks them all.

    Args:
        names: the names of sentinels.
        rngs: source of the weights.
    """

    def __init__(self, names: Iterable[str], rngs: nnx.Rngs):
        self.sentinels = nnx.Dict({name: SentinelModule(SENTINELS[name], rngs) for name in names})

    def __call__(self, x: Array) -> Array:
        """Returns the sum of all outputs."""
        return sum((sentinel(x) for sentinel in self.sentinels.values()), jnp.zeros(()))


def check_numerics(
    devices: Sequence[Any], names: Iterable[str] | None = None, full: bool = False
) -> list[Finding]:
    """Compares the gradients of operations, laid out over devices, with those of one device.

    All products run in the highest precision, to keep rounding errors small.

    Args:
        devices: an even number of devices, at least four.
        names: the names of sentinels; the core ones by default.
        full: check all sentinels and layouts instead of the core ones.

    Returns:
        A finding for every gradient, in the order of layouts and names.

    Raises:
        MeshError: for fewer than four devices or an odd number of them.
        ConfigError: for an unknown sentinel.

    Example:
        >>> world = World.emulate(8)
        >>> findings = check_numerics(world.mesh.devices.flat[:4], ["dot"])
        >>> all(finding.is_right for finding in findings)
        True
    """
    if len(devices) < 4 or len(devices) % 2:
        raise MeshError(
            f"comparing layouts needs a mesh with two axes, but got {len(devices)} devices; give "
            "an even number, at least four, such as World.emulate(4).mesh.devices.flat",
            code="too-few-devices",
        )
    selected = [name for name, row in SENTINELS.items() if full or row.core]
    selected = selected if names is None else list(names)
    for name in selected:
        if name not in SENTINELS:
            raise ConfigError(f"unknown sentinel {name!r}.{did_you_mean(name, SENTINELS)}")
    samples = 2 * len(devices)
    draws = np.random.default_rng(0).normal(size=(samples, POSITIONS, FEATURES))
    batch = {"x": draws.astype(np.float32)}
    with jax.default_matmul_precision("highest"):
        expected = _on_one(SentinelsModule(selected, nnx.Rngs(0)), batch, devices[0])
        findings: list[Finding] = []
        for layout in (name for name, row in LAYOUTS.items() if full or row.core):
            for path, got in _laid_out(LAYOUTS[layout], selected, batch, devices).items():
                _, sentinel, leaf = path.split("/")
                findings.append(Finding(sentinel, layout, leaf, _error(got, expected[path])))
    return findings


def _loss(model: nnx.Module, batch: Batch) -> Array:
    return model(batch["x"])  # type: ignore[operator]


def _on_one(model: nnx.Module, batch: Batch, device: object) -> dict[str, Array]:
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, batch):
        return _loss(nnx.merge(graphdef, params, rest, copy=True), batch)

    arguments = jax.device_put((params, batch), device)
    return dict(leaves_with_paths(nnx.to_pure_dict(jax.jit(jax.grad(loss))(*arguments))))


def _laid_out(
    row: LayoutCase, names: Sequence[str], batch: Batch, devices: Sequence[Any]
) -> dict[str, Array]:
    sizes = {row.axes[0]: len(devices) // 2, row.axes[1]: 2}
    world = World.init(sizes, list(devices))
    model = SentinelsModule(names, nnx.Rngs(0))
    step = build_train_step(model, optax.sgd(0.1), _loss, row.strategy(), world)
    grads, _ = step.gradients(step.init(), batch)
    return dict(leaves_with_paths(grads))


def _error(got: Array, expected: Array) -> float:
    wanted = np.asarray(expected)
    # A leaf that only selects indices has gradient zero; do not divide by it.
    largest = float(np.abs(wanted).max()) or 1.0
    return float(np.abs(np.asarray(got) - wanted).max()) / largest
