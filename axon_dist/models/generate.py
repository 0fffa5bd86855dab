"""`generate`: continues prompts, in one jitted scan."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..core.by_position import is_by_position
from ..core.checks import COUNT, MODULE, REAL, SEED, WHOLE, ArgumentKind, checked
from ..core.errors import ConfigError, UnsupportedError, warn
from ..core.own_context import in_own_context
from ..core.same_function import is_from
from ..core.typing import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: from the most likely part of `softmax(logits / temperature)`.

    Args:
        temperature: 0 takes the likeliest token; a value below 1 sharpens the distribution, a value
            above 1 flattens it.
        top_k: draw only from this many of the likeliest tokens; None for all.
        top_p: draw only from the smallest set of the likeliest tokens whose probabilities, after
            `top_k`, add up to at least this (nucleus sampling, arXiv:1904.09751); None for all.

    If two tokens are equally likely, the one with the lower id counts as likelier.

    Example:
        >>> Sampling(temperature=0.8, top_p=0.9).validate()
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def validate(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: a value is out of range, or has no effect because of another one.
        """
        REAL.check("Sampling", "temperature", self.temperature)
        COUNT.or_none().check("Sampling", "top_k", self.top_k)
        REAL.or_none().check("Sampling", "top_p", self.top_p)
        if self.temperature != 0 and not 1e-6 <= self.temperature <= 1e6:
            raise ConfigError(
                f"temperature={self.temperature} must be 0 or in [1e-6, 1e6]; 0 takes the "
                "likeliest token, 1 draws from the unchanged distribution",
                code="temperature-range",
            )
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(
                f"top_p={self.top_p} must be in (0, 1]; leave it out to draw from all tokens",
                code="top-p-range",
            )
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ConfigError(
                    f"temperature=0 takes the likeliest token, so {name}={getattr(self, name)} has "
                    "no effect; leave one of them out",
                    code="sampling-without-effect",
                )


def kept_logits(logits: Array, sampling: Sampling) -> Array:
    """Returns the logits to sample from: `log p` up to a constant, -inf for excluded tokens.

    Args:
        logits: `[..., V]`.
        sampling: has a temperature above 0.

    Returns:
        `[..., V]`, float32.

    Example:
        >>> kept_logits(jnp.log(jnp.array([1.0, 4.0, 3.0])), Sampling(top_k=1)).argmax().item()
        1
    """
    scaled = logits.astype(jnp.float32) / sampling.temperature
    size = scaled.shape[-1]
    count = size if sampling.top_k is None else min(sampling.top_k, size)
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    if count == size and top_p == 1.0:
        return scaled
    # Sorted by logit, the likeliest first; for equal logits the lower id comes first.
    values, ids = jax.lax.top_k(scaled, count)
    if top_p < 1.0:
        probabilities = jax.nn.softmax(values, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # Always keep the likeliest token, even if rounding makes its `before` exceed `top_p`.
        is_in_nucleus = (before < top_p).at[..., 0].set(True)
        values = jnp.where(is_in_nucleus, values, -jnp.inf)
    nothing = jnp.full_like(scaled, -jnp.inf)
    return jnp.put_along_axis(nothing, ids, values, axis=-1, inplace=False)


def draw(key: Array, logits: Array, sampling: Sampling) -> Array:
    """Draws one token for every row, each with its own random bits.

    Args:
        key: one typed key.
        logits: `[B, V]`.
        sampling: the options of the draw.

    Returns:
        Token ids, int32 `[B]`.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(logits.shape[0]))
    filtered = kept_logits(logits, sampling)
    return jax.vmap(jax.random.categorical)(keys, filtered).astype(jnp.int32)


_TOLERANCE = 1e-4

_COMPARED = 8
"""The most new tokens for which `decode` is compared with a call."""


@runtime_checkable
class Decoder(Protocol):
    """A model with a cache of earlier tokens, such as `Transformer`."""

    def start_cache(self, padding: Array, length: int) -> PyTree:
        """Makes an empty cache for rows that start with `padding` positions, int32 `[B]`."""
        ...

    def decode(self, tokens: Array, cache: PyTree) -> tuple[Array, PyTree]:
        """Returns logits `[B, V]` after further tokens `[B, T]`, and the extended cache."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """The result of `generate`.

    Args:
        tokens: the new tokens of each row, int32 `[B, N]`; the end token is repeated to the end.
        lengths: the number of new tokens of each row, including the end token, `[B]`.
    """

    tokens: np.ndarray
    lengths: np.ndarray

    @property
    def rows(self) -> list[list[int]]:
        """The new tokens of each row, up to its end token."""
        pairs = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [tokens[:length] for tokens, length in pairs]


_PROMPTS = ArgumentKind(
    "a list of prompts, each a list of token ids, as in [[1, 2], [3]]",
    lambda x: hasattr(x, "__len__") and not isinstance(x, (str, bytes, Mapping, type)),
)


Prompts: TypeAlias = Sequence[Sequence[int] | np.ndarray] | np.ndarray | Array


@in_own_context
@checked(
    model=MODULE,
    num_tokens=COUNT,
    seed=SEED,
    end=WHOLE.or_none(),
    vocab_size=COUNT.or_none(),
    prompts=_PROMPTS,
)
def generate(
    model: nnx.Module,
    prompts: Prompts,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    end: int | None = None,
    vocab_size: int | None = None,
) -> Generated:
    """Continues prompts token by token; equivalent to this loop:

        for _ in range(num_tokens):
            prompt = prompt + [draw(model(prompt)[-1])]

    It is one compiled program: prefill runs all prompts at once, then a `lax.scan` decodes one
    token at a time with a KV cache. Parameters that are sharded over a mesh stay sharded, and the
    tokens are the same as on one device. Dropout is off.

    A model without `start_cache` and `decode` is run over its whole sequence for each token. It
    must map tokens `[B, T]` to logits `[B, T, V]` and be causal, which is checked first. A model
    that inherits `decode`, but has a call or layers that compute other logits, such as a
    convolution over positions, is run in the same way, with a warning.

    Args:
        model: a `Transformer`, any `Decoder`, or any causal model of tokens.
        prompts: B sequences of token ids, each with its own length of at least 1.
        num_tokens: the number of tokens to add, N.
        temperature: 0 takes the likeliest token; see `Sampling`.
        top_k: draw only from this many of the likeliest tokens; None for all.
        top_p: draw only from the fewest tokens that together have this probability; None for all.
        seed: the seed of the draws; each row draws differently.
        end: the token that ends a row; None generates `num_tokens` for all rows.
        vocab_size: draw only tokens below this, if the model has more rows than the tokenizer has
            tokens; None for all.

    Returns:
        The new tokens.

    Raises:
        ConfigError: when there is no prompt, a prompt is empty, a token is outside the vocabulary,
            a value is out of range, or there are more tokens than the model's `max_length`.
        UnsupportedError: when a model without a cache is not causal, or gives no logits.

    Example:
        >>> from axon_dist.models import Transformer, TransformerConfig
        >>> config = TransformerConfig.preset("tiny", num_layers=1)
        >>> model = nnx.jit(lambda: Transformer(config, rngs=nnx.Rngs(0)))()
        >>> done = generate(model, [[1, 2, 3], [4]], 5, temperature=0)
        >>> done.tokens.shape, done.lengths.tolist()
        ((2, 5), [5, 5])
    """
    sampling = Sampling(temperature, top_k, top_p)
    sampling.validate()
    tokens, padding = _aligned(prompts)
    _check_fits(model, tokens, num_tokens, end)
    has_cache = isinstance(model, Decoder) and _decodes_as_called(
        model, tokens, padding, num_tokens
    )
    if not has_cache:
        _check_causal(model, tokens, padding, num_tokens)
    graphdef, leaves = nnx.split(model)
    options = {
        "graphdef": graphdef,
        "has_cache": has_cache,
        "num_tokens": num_tokens,
        "sampling": sampling,
        "end": end,
        "vocab_size": vocab_size,
        "replicated": _replicated(leaves),
    }
    run = functools.partial(_compiled, **options)
    try:
        hash(graphdef)
    except TypeError:
        # An unhashable graphdef cannot be a static argument, so every call compiles again.
        run = jax.jit(functools.partial(_generate, **options))
    added = np.asarray(run(leaves, tokens, padding, jax.random.key(seed)))
    is_end = np.zeros_like(added, bool) if end is None else added == end
    lengths = np.where(is_end.any(1), is_end.argmax(1) + 1, added.shape[1])
    return Generated(added, lengths)


def _generate(
    leaves: PyTree,
    tokens: Array,
    padding: Array,
    key: Array,
    *,
    graphdef: nnx.GraphDef,
    has_cache: bool,
    num_tokens: int,
    sampling: Sampling,
    end: int | None,
    vocab_size: int | None,
    replicated: NamedSharding | None,
) -> Array:
    """Maps tokens `[B, T]` to the tokens that follow, `[B, N]`."""

    def decode(tokens: Array, cache: PyTree) -> tuple[Array, PyTree]:
        return _decoder(graphdef, leaves, has_cache).decode(tokens, cache)

    def take(logits: Array, number: Array | int, is_over: Array) -> tuple[Array, Array]:
        if vocab_size is not None and vocab_size < logits.shape[-1]:
            # No text has a token of the padding, but its row need not have a low probability.
            logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
        token = draw(jax.random.fold_in(key, number), logits, sampling)
        if end is None:
            return token, is_over
        token = jnp.where(is_over, end, token)
        return token, is_over | (token == end)

    def step(carry: PyTree, number: Array) -> tuple[PyTree, Array]:
        token, cache, is_over = carry
        logits, cache = decode(token[:, None], cache)
        token, is_over = take(logits, number, is_over)
        return (token, cache, is_over), token

    # Minus one, because the last token is drawn but is never an input.
    size = tokens.shape[1] + num_tokens - 1
    cache = _decoder(graphdef, leaves, has_cache).start_cache(padding, size)
    logits, cache = decode(tokens, cache)
    first, is_over = take(logits, 0, jnp.zeros(tokens.shape[0], bool))
    _, others = jax.lax.scan(step, (first, cache, is_over), jnp.arange(1, num_tokens))
    added = jnp.concatenate([first[:, None], others.swapaxes(0, 1)], axis=1)
    return added if replicated is None else jax.lax.with_sharding_constraint(added, replicated)


_STATIC = ("graphdef", "has_cache", "num_tokens", "sampling", "end", "vocab_size", "replicated")
_compiled = jax.jit(_generate, static_argnames=_STATIC)


def _decoder(graphdef: nnx.GraphDef, leaves: PyTree, has_cache: bool) -> Any:
    """Returns a new copy of the model in eval mode, because a scan must not mutate the model."""
    model = nnx.merge(graphdef, leaves, copy=True)
    model.eval()
    return model if has_cache else Recomputing(model)


@dataclasses.dataclass(frozen=True)
class Recomputing:
    """Wraps a causal model without a cache as a `Decoder`, whose cache is all earlier tokens.

    Rows begin at position 0, so that absolute positions are right. The positions after the last
    token are zeros, which a causal model does not see.

    Args:
        model: maps tokens `[B, S]` to logits `[B, S, V]`.
    """

    model: Callable[[Array], Array]

    def start_cache(self, padding: Array, length: int) -> tuple[Array, Array]:
        """Returns zeros `[B, S]` for tokens, and counts `[B]` that start at minus the padding."""
        return jnp.zeros((padding.shape[0], length), jnp.int32), -padding

    def decode(
        self, tokens: Array, cache: tuple[Array, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        """Appends further tokens, and runs the model on all of them."""
        history, counts = cache
        rows = jnp.arange(history.shape[0])[:, None]
        columns = counts[:, None] + jnp.arange(tokens.shape[1])[None]
        # Padding has negative columns, which would wrap around; move them out of bounds, where
        # `drop` writes nothing.
        columns = jnp.where(columns < 0, history.shape[1], columns)
        history = history.at[rows, columns].set(tokens, mode="drop")
        counts = counts + tokens.shape[1]
        return self.model(history)[rows[:, 0], counts - 1], (history, counts)


def _aligned(prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
    """Left-pads prompts to one length; returns tokens `[B, T]` and padding `[B]`, int32."""
    rows = [np.asarray(row) for row in prompts]
    if not rows:
        raise ConfigError("got no prompt; give at least one, such as [[1, 2, 3]]")
    for number, row in enumerate(rows):
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ConfigError(
                f"prompt {number} is {row.dtype} of shape {row.shape}; a prompt is a sequence of "
                "token ids, and prompts are a sequence of those, such as [[1, 2, 3]]"
            )
        if not row.size:
            raise ConfigError(
                f"prompt {number} is empty; it needs at least one token to continue",
                code="empty-prompt",
            )
    longest = max(map(len, rows))
    padding = np.array([longest - len(row) for row in rows], np.int32)
    pairs = zip(rows, padding, strict=True)
    tokens = [np.pad(row.astype(np.int32), (missing, 0)) for row, missing in pairs]
    return np.stack(tokens), padding


def _check_fits(model: nnx.Module, tokens: np.ndarray, num_tokens: int, end: int | None) -> None:
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None)
    length = getattr(config, "max_length", None)
    if isinstance(length, int) and tokens.shape[1] + num_tokens > length:
        raise ConfigError(
            f"a prompt of {tokens.shape[1]} tokens plus {num_tokens} new tokens exceeds "
            f"max_length={length} of the model; shorten the prompt, or generate at most "
            f"{max(length - tokens.shape[1], 0)} tokens",
            code="prompt-too-long",
        )
    known = range(size) if isinstance(size, int) else range(np.iinfo(np.int32).max)
    asked = [int(tokens.min()), int(tokens.max()), *([] if end is None else [operator.index(end)])]
    for token in asked:
        if token not in known:
            raise ConfigError(
                f"got token {token}, but the model has tokens from 0 to {known[-1]}; encode the "
                "prompt with the tokenizer that the model was trained with",
                code="unknown-token",
            )


def _decodes_as_called(
    model: nnx.Module, tokens: np.ndarray, padding: np.ndarray, num_tokens: int
) -> bool:
    """Whether `decode` computes the same logits as a call, for the prompts and some more tokens.

    This is tested only if `decode` is from this library and the model has user-defined methods, or
    layers that may read several positions. A user-defined `decode` is trusted.

    Raises:
        UnsupportedError: when the call does not map tokens to logits of the same shape.
    """
    kind: Any = type(model)
    modules = [module for _, module in nnx.iter_modules(model)]
    unknown = sorted({type(module).__name__ for module in modules if not is_by_position(module)})
    if not unknown or not is_from(kind.decode, "axon_dist.", "flax."):
        return True
    try:
        decoded, called = _both_logits(model, tokens, padding, min(num_tokens, _COMPARED))
    except (TypeError, ValueError, AttributeError) as error:
        raise UnsupportedError(
            f"{kind.__name__} inherits decode, which must give the logits of a call, but the two "
            f"cannot be compared: {type(error).__name__}: {' '.join(str(error).split()):.200}. "
            "Make the call map tokens [B, T] to logits [B, T, V], or override decode",
            code="decode-not-compared",
        ) from error
    difference = float(np.abs(decoded - called).max())
    if difference <= _tolerance(model) * max(float(np.abs(called).max()), 1.0):
        return True
    warn(
        f"{kind.__name__} inherits decode, whose logits differ by {difference:.2g} from those of "
        f"a call; the model has layers that may read several positions: {', '.join(unknown)}. So "
        "each new token needs a call of the model on the whole sequence. Override decode with a "
        "matching one for more speed"
    )
    return False


def _both_logits(
    model: nnx.Module, tokens: np.ndarray, padding: np.ndarray, num_more: int
) -> list[np.ndarray]:
    """Returns the logits of `decode` and those of calls, `[N + 1, B, V]`.

    They are those after the prompts, and after each of N more tokens.
    """
    graphdef, leaves = nnx.split(model)
    size = tokens.shape[1] + num_more

    def logits(leaves: PyTree, tokens: Array, padding: Array, has_cache: bool) -> Array:
        def step(cache: PyTree, tokens: Array) -> tuple[PyTree, Array]:
            logits, cache = _decoder(graphdef, leaves, has_cache).decode(tokens[:, None], cache)
            return cache, logits

        decoder = _decoder(graphdef, leaves, has_cache)
        first, cache = decoder.decode(tokens, decoder.start_cache(padding, size))
        # Each token is another one: among equal tokens it does not show which of them a layer read.
        more = tokens[:, -1] + 1 + jnp.arange(num_more)[:, None]
        _, others = jax.lax.scan(step, cache, more % first.shape[-1])
        return jnp.concatenate([first[None], others])

    @jax.jit
    def run(leaves: PyTree, tokens: Array, padding: Array) -> Array:
        both = [logits(leaves, tokens, padding, has_cache) for has_cache in (True, False)]
        return jnp.stack(both)

    return [*np.asarray(run(leaves, tokens, padding), np.float32)]


def _tolerance(model: nnx.Module) -> float:
    """Returns the tolerance for comparing logits, relative to the largest."""
    leaves = jax.tree.leaves(nnx.state(model))
    dtypes = {str(leaf.dtype) for leaf in leaves}
    dtypes |= {
        jnp.dtype(dtype).name
        for _, module in nnx.iter_modules(model)
        if (dtype := getattr(module, "dtype", None)) is not None
    }
    return 5e-2 if dtypes & {"bfloat16", "float16"} else _TOLERANCE


def _check_causal(
    model: nnx.Module, tokens: np.ndarray, padding: np.ndarray, num_tokens: int
) -> None:
    """Raises unless a model without a cache is causal.

    Compares the logits of the prompts for two different continuations.
    """
    kind = type(model).__name__
    graphdef, leaves = nnx.split(model)
    length = tokens.shape[1] + num_tokens - 1
    is_after = np.arange(length) >= (tokens.shape[1] - padding)[:, None]
    padded = np.zeros((len(tokens), length), np.int32)
    padded[~is_after] = tokens[np.arange(tokens.shape[1]) >= padding[:, None]]

    @jax.jit
    def run(leaves: PyTree, tokens: Array) -> Array:
        return _decoder(graphdef, leaves, has_cache=False).model(tokens)

    logits, again = (np.asarray(run(leaves, np.where(is_after, x, padded))) for x in (0, 1))
    if logits.shape[:-1] != padded.shape:
        raise UnsupportedError(
            f"{kind} maps tokens of shape {padded.shape} to {logits.shape}, but generation needs "
            "logits for every position, [B, T, V]; wrap it in a module that returns these",
            code="no-logits-per-position",
        )
    seen, other = (x[~is_after].astype(np.float32) for x in (logits, again))
    if not np.isfinite(seen).all():
        raise UnsupportedError(
            f"the logits of {kind} for {length} positions are not finite; generate fewer tokens if "
            "that exceeds its maximum length",
            code="logits-not-finite",
        )
    if np.abs(seen - other).max() > _TOLERANCE * max(np.abs(seen).max(), 1.0):
        raise UnsupportedError(
            f"{kind} has no cache (start_cache and decode), and its logits depend on later tokens "
            "or differ from call to call; for generation, each position may see only earlier "
            "positions, and dropout must be off: give it a causal mask, or a cache",
            code="model-not-causal",
        )


def _replicated(leaves: PyTree) -> NamedSharding | None:
    """Returns a replicated sharding over the mesh of the parameters; None if they have no mesh."""
    for leaf in jax.tree.leaves(leaves):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None
