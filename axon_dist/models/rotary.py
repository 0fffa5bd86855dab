"""Rotary position embeddings (RoPE): the rotation angles of feature pairs, and their scaling.

Source: Su et al., RoFormer, arXiv:2104.09864; Chen et al., arXiv:2306.15595 (linear); Peng et al.,
YaRN, arXiv:2309.00071; Grattafiori et al., Llama 3, arXiv:2407.21783, section 3.4 (llama3).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp

from ..core.errors import ConfigError
from ..core.tree import wide
from ..core.typing import Array
from .config import check_above_zero, check_at_least_one, check_choice


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling, for sequences longer than those of the original training.

    Each kind divides the frequency of some pairs by the factor, leaves other pairs unchanged, and
    interpolates between the two. With w the wavelength of a pair, in positions, and n the
    `original_length`:

    | kind | divides the frequency of | leaves unchanged |
    |---|---|---|
    | `linear` | all pairs | none |
    | `llama3` | pairs with w > n / low | pairs with w < n / high |
    | `yarn` | pairs with fewer than low turns in n | pairs with more than high turns in n |

    Args:
        kind: a key of `ROPE_SCALINGS`.
        factor: the ratio of the new length to the original one.
        original_length: the sequence length of the original training, n; unused by `linear`.
        low: the frequency of a pair with fewer turns within n is divided by the whole factor.
        high: the frequency of a pair with more turns within n is unchanged.
        attention_factor: for `yarn`, the multiplier of queries and of keys; None for
            `0.1 ln(factor) + 1`.
        truncate: for `yarn`, whether the pair numbers at which the interpolation begins and ends
            are rounded outwards to integers, as in most models; False for fractions, as in gpt-oss.

    Example:
        >>> scaling = RopeScaling("llama3", factor=8.0, original_length=8192)
        >>> jnp.round(scaling.slowed(jnp.array([1.0, 1e-3, 8e-5]), 10_000.0) * 1e5).tolist()
        [100000.0, 21.0, 1.0]
    """

    kind: str = "llama3"
    factor: float = 8.0
    original_length: int = 8192
    low: float = 1.0
    high: float = 4.0
    attention_factor: float | None = None
    truncate: bool = True

    def validate(self) -> None:
        """Checks that the values are consistent.

        Raises:
            ConfigError: a number is out of range, or the kind is unknown.
        """
        check_choice("rope_scaling.kind", self.kind, ROPE_SCALINGS, "a kind of scaling")
        numbers = ("factor", "low", "high")
        if self.attention_factor is not None:
            numbers += ("attention_factor",)
        check_above_zero(self, numbers)
        check_at_least_one(self, ("original_length",))
        if self.low >= self.high:
            raise ConfigError(
                f"rope_scaling.low={self.low} must be below rope_scaling.high={self.high}: pairs "
                "with fewer turns are scaled more; swap the two",
                code="rope-scaling-order",
            )
        if self.attention_factor is not None and self.kind != "yarn":
            raise ConfigError(
                f"rope_scaling.attention_factor is an option of kind 'yarn', not of "
                f"{self.kind!r}; leave it out",
                code="attention-factor-kind",
            )

        if not self.truncate and self.kind != "yarn":
            raise ConfigError(
                f"rope_scaling.truncate=False is an option of kind 'yarn', not of {self.kind!r}; "
                "leave it out",
                code="truncate-kind",
            )

    def slowed(self, frequency: Array, theta: float) -> Array:
        """Returns the scaled frequencies of pairs, in radians per position.

        Args:
            frequency: the frequencies without scaling, float32 `[K/2]`.
            theta: base of the wavelengths.
        """
        return ROPE_SCALINGS[self.kind](self, frequency, theta)

    @property
    def temperature(self) -> float:
        """The multiplier of queries and of keys."""
        if self.kind != "yarn":
            return 1.0
        default = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return default if self.attention_factor is None else self.attention_factor


def _linear(scaling: RopeScaling, frequency: Array, theta: float) -> Array:
    return frequency / scaling.factor


def _llama3(scaling: RopeScaling, frequency: Array, theta: float) -> Array:
    turns = scaling.original_length * frequency / (2 * math.pi)
    fast = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return (1 - fast) * frequency / scaling.factor + fast * frequency


def _yarn(scaling: RopeScaling, frequency: Array, theta: float) -> Array:
    half = frequency.shape[0]

    def pair(turns: float) -> float:
        """Returns the (fractional) number of the pair that makes this many turns."""
        return half * math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(theta)

    first = pair(scaling.high)
    last = pair(scaling.low)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, 2 * half - 1)
    # Avoid a ramp of zero width, as the published code does.
    width = last - first if last != first else 1e-3
    slow = jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / width, 0, 1)
    return slow * frequency / scaling.factor + (1 - slow) * frequency


ROPE_SCALINGS: MappingProxyType[str, Callable[[RopeScaling, Array, float], Array]] = (
    MappingProxyType({"linear": _linear, "llama3": _llama3, "yarn": _yarn})
)
"""The kinds of RoPE scaling: (scaling, frequencies, base) -> frequencies."""


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotates the queries and keys of a layer.

    Args:
        theta: base of the wavelengths.
        fraction: the share of a head's features that are rotated, the first ones.
        scaling: the scaling of wavelengths.
        local_theta: base in layers with a window, which are not scaled; None for `theta` in all
            layers.
    """

    theta: float
    fraction: float = 1.0
    scaling: RopeScaling | None = None
    local_theta: float | None = None

    def __call__(
        self, x: Array, positions: Array | None = None, window: Array | int | None = None
    ) -> Array:
        """Rotates `[B, T, H, K]`.

        Args:
            x: queries or keys.
            positions: integers `[B, T]`; None for the sequence index.
            window: the window of the layer; 0 or None for none.
        """
        size = int(x.shape[-1] * self.fraction)
        frequency = frequencies(size // 2, self.theta)
        if self.scaling is not None:
            frequency = self.scaling.slowed(frequency, self.theta)
        factor: Array | float = 1.0 if self.scaling is None else self.scaling.temperature
        if self.local_theta is not None and window is not None:
            frequency = jnp.where(window > 0, frequencies(size // 2, self.local_theta), frequency)
            if factor != 1:
                factor = jnp.where(window > 0, 1.0, factor)
        if size == x.shape[-1]:
            return turn(x, frequency, positions, factor)
        turned = turn(x[..., :size], frequency, positions, factor)
        return jnp.concatenate([turned, x[..., size:]], axis=-1)


def frequencies(count: int, theta: float) -> Array:
    """Returns the frequencies of `count` pairs, in radians per position, float32."""
    return theta ** (-jnp.arange(count, dtype=jnp.float32) / count)


def turn(
    x: Array, frequency: Array, positions: Array | None = None, factor: Array | float = 1.0
) -> Array:
    """Rotates the pair `(x[i], x[i + K/2])` at position t by `t * frequency[i]`.

    The angles are float32, and the products at least float32.

    Args:
        x: `[B, T, H, K]`, K even.
        frequency: `[K/2]`.
        positions: integers `[B, T]`; None for the sequence index.
        factor: the multiplier of the result, a scalar.
    """
    if positions is None:
        positions = jnp.arange(x.shape[1])[None]
    at = positions.astype(jnp.float32)[..., None]
    angle = at * jax.lax.broadcast_to_rank(jnp.asarray(frequency), at.ndim)
    cos = jnp.cos(angle)[:, :, None, :]
    sin = jnp.sin(angle)[:, :, None, :]
    if isinstance(factor, jax.Array) or factor != 1:
        cos = cos * factor
        sin = sin * factor
    left, right = jnp.split(wide(x), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rotate(x: Array, theta: float, positions: Array | None = None) -> Array:
    """Rotates pairs of features by an angle that grows with the position (RoPE, arXiv:2104.09864).

    The pair `(x[i], x[i + K/2])` at position `t` turns by `t * theta^(-2i/K)`, so the product of a
    query and a key depends only on the distance between them.

    Args:
        x: `[B, T, H, K]`, K even.
        theta: base of the wavelengths.
        positions: integers `[B, T]`; None for the sequence index.

    Returns:
        The rotated array in the dtype of `x`; the rotation is float32.
    """
    return turn(x, frequencies(x.shape[-1] // 2, theta), positions)
