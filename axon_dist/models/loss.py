"""Losses of the small models, in float32, written for one device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axon_dist.core.errors import ConfigError, UnsupportedError, warn
from axon_dist.core.same_function import Comparison, compare, is_from
from axon_dist.core.tree import wide
from axon_dist.core.typing import Array
from axon_dist.core.weighted import AUXILIARY, Weighted, WithTerm
from axon_dist.ops.ids import wide_ids
from axon_dist.ops.linear_loss import BEFORE_HEAD, linear_cross_entropy, linear_scores

LossOutput: TypeAlias = Weighted | tuple[Weighted, dict[str, Array]]
"""A loss, with metrics if the model has any."""


def next_token_loss(model: Callable[[Array], Array], batch: Mapping[str, Array]) -> LossOutput:
    """Sums `-log p(token[t+1] | tokens[..t])` over the tokens that count.

    The logits of a large vocabulary need not all be in memory. If the model has a method
    `before_head(tokens)` that returns the inputs of `linear_cross_entropy` other than labels and
    weights, `{"hidden": [B, T, D], "kernel": [D, V]}`, the loss is computed one chunk of positions
    at a time. If there is no such method, or it returns None, all logits are computed at once.

    If the model has a method `auxiliary()` that returns a scalar and a dict of metrics, it is
    called after the model, and the scalar is added to the mean loss. Mixtures of experts use this
    for their balance term. It is also called in evaluation: a method that reads what the model
    stores only in training must return None after `model.eval()`, or an evaluation adds a term of
    the last training batch.

    Args:
        model: maps tokens `[B, T]` to logits `[B, T, V]`.
        batch: `"tokens"`, integer `[B, T + 1]`; optionally `"mask"`, `[B, T + 1]`, zero for padding
            or prompt tokens that must not count as targets (the first column never does);
            `"weight"`, `[B]`, the weight of each sample; and `"segments"`, integer `[B, T + 1]`,
            the document of each token if a row has several, 0 for padding. Segments are passed to
            the model, and neither padding nor the first token of a document counts as a target.

    Returns:
        The sum of the losses in nats, float32 or wider, and the number of tokens that count; with
        metrics if the model has any.

    Raises:
        ConfigError: the shape of the mask or the segments is not that of the tokens, the model
            takes no segments, or `before_head` or `auxiliary` returns a value of the wrong form.

    Example:
        >>> uniform = lambda tokens: jnp.zeros((*tokens.shape, 4))
        >>> loss = jax.jit(next_token_loss, static_argnums=0)(
        ...     uniform, {"tokens": jnp.zeros((2, 4), jnp.int32)}
        ... )
        >>> float(loss.weight), round(float(loss.mean), 4)
        (6.0, 1.3863)
    """
    _check_batch(batch, "tokens")
    labels = batch["tokens"][:, 1:]
    counts = _counts(batch)
    if (head := _before_head(model, batch)) is not None:
        return _with_auxiliary(model, linear_cross_entropy(labels=labels, weights=counts, **head))
    losses = cross_entropy(_predict(model, batch), labels)
    return _with_auxiliary(model, Weighted(jnp.sum(losses * counts), jnp.sum(counts)))


def next_token_scores(
    model: Callable[[Array], Array], batch: Mapping[str, Array]
) -> tuple[Weighted, dict[str, Array | Weighted]]:
    """Computes the `next_token_loss`, and the accuracy of the likeliest token.

    Finding the likeliest token needs another pass over all logits, so this is for evaluation.

    Args:
        model: as for `next_token_loss`.
        batch: as for `next_token_loss`.

    Returns:
        The loss, and `accuracy` with the number of tokens that count as its weight; with further
        metrics if the model has any, of which one named `accuracy` takes the place of this one.

    Example:
        >>> sure = lambda tokens: 9.0 * jax.nn.one_hot(tokens + 1, 4)
        >>> score = jax.jit(next_token_scores, static_argnums=0)
        >>> loss, metrics = score(sure, {"tokens": jnp.array([[0, 1, 2, 2]])})
        >>> round(float(metrics["accuracy"].mean), 4)
        0.6667
    """
    _check_batch(batch, "tokens")
    labels = batch["tokens"][:, 1:]
    counts = _counts(batch)
    if (head := _before_head(model, batch)) is not None:
        loss, scores = linear_scores(labels=labels, weights=counts, **head)
    else:
        logits = _predict(model, batch)
        losses = cross_entropy(logits, labels)
        hits = is_likeliest(logits, labels)
        weight = jnp.sum(counts)
        loss = Weighted(jnp.sum(losses * counts), weight)
        scores = {"accuracy": Weighted(jnp.sum(hits * counts), weight)}
    output = _with_auxiliary(model, loss)
    total, metrics = output if isinstance(output, tuple) else (output, {})
    return total, {**scores, **metrics}


def classification_loss(
    model: Callable[[Array], Array], batch: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Computes the mean cross-entropy of `model(batch["x"])` and the labels `batch["y"]`.

    Args:
        model: maps inputs `[B, ...]` to logits `[B, C]`.
        batch: `"x"`, the inputs, and `"y"`, integer labels `[B]`.

    Returns:
        A float32 scalar in nats; and `accuracy`, the share of samples whose likeliest class is the
        label.

    Example:
        >>> batch = {"x": jnp.array([[2.0, 1.0], [0.0, 1.0]]), "y": jnp.array([0, 0])}
        >>> loss, metrics = jax.jit(lambda batch: classification_loss(lambda x: x, batch))(batch)
        >>> float(metrics["accuracy"])
        0.5
    """
    _check_batch(batch, "x", "y")
    logits = model(batch["x"])
    hits = is_likeliest(logits, batch["y"])
    return jnp.mean(cross_entropy(logits, batch["y"])), {"accuracy": jnp.mean(hits)}


def is_likeliest(logits: Array, labels: Array) -> Array:
    """Whether `argmax(logits)` is the label, as 1 or 0; ties go to the first class.

    The code uses a maximum and a minimum, which XLA can partition if classes are sharded over
    devices; for an argmax, XLA would gather the logits.

    Args:
        logits: `[..., C]`.
        labels: integers `[...]` in `[0, C)`.

    Returns:
        float32 `[...]`.
    """
    logits = jax.lax.stop_gradient(logits)
    labels = wide_ids(labels)
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    is_largest = logits == logits.max(axis=-1, keepdims=True)
    first = jnp.where(is_largest, classes, logits.shape[-1]).min(axis=-1)
    return (first == labels).astype(jnp.float32)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Computes `logsumexp(logits) - logits[label]` in at least float32.

    The label's logit is selected by comparison with an iota instead of indexing: XLA fuses this,
    its gradient needs no scatter, and XLA can partition it if classes are sharded over devices.

    Args:
        logits: `[..., C]`.
        labels: integers `[...]` in `[0, C)`.

    Returns:
        Losses `[...]` in nats, float32; float64 for float64 logits.
    """
    if labels.shape != logits.shape[:-1]:
        raise ConfigError(
            f"got logits of shape {list(logits.shape)} and labels of shape {list(labels.shape)}; "
            f"there must be a label for each vector of logits: {list(logits.shape[:-1])}"
        )
    logits = wide(logits)
    labels = wide_ids(labels)
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    label_logits = jnp.where(classes == labels[..., None], logits, 0.0).sum(axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - label_logits


def _check_batch(batch: object, *names: str) -> None:
    """Raises unless a batch is a dict with these arrays."""
    has = sorted(map(str, batch)) if isinstance(batch, Mapping) else None
    if has is None or not set(names) <= set(has):
        kind = f"a {type(batch).__name__}" if has is None else f"a dict of {', '.join(has)}"
        raise ConfigError(
            f"the loss got {kind} as its batch, but needs {' and '.join(map(repr, names))}; use "
            "data with these names, or a loss that reads the names of the data",
            code="batch-names",
        )


def _with_auxiliary(model: Callable[..., Array], loss: Weighted) -> LossOutput:
    """Adds the model's auxiliary loss to the mean loss; also returns its metrics, if any."""
    method = getattr(model, AUXILIARY, None)
    auxiliary = None if method is None else method()
    if auxiliary is None:
        return loss
    is_pair = isinstance(auxiliary, tuple) and len(auxiliary) == 2
    if not is_pair or np.shape(auxiliary[0]) or not isinstance(auxiliary[1], Mapping):
        raise ConfigError(
            f"{type(model).__name__}.{AUXILIARY} returned {_described(auxiliary)}; it must return "
            "a pair of a scalar, which the loss adds, and a dict of metrics, or None for no term. "
            "Return these, or rename the method",
            code="auxiliary-result",
        )
    more, metrics = auxiliary
    total = loss.total + more * loss.weight
    return WithTerm(total, loss.weight, more, tuple(sorted(metrics))), metrics


def _before_head(
    model: Callable[..., Array], batch: Mapping[str, Array]
) -> Mapping[str, Any] | None:
    """Returns a model's inputs for `linear_cross_entropy`, or None to compute its logits.

    Raises:
        UnsupportedError: when the logits of the model's call differ from those of `before_head`.
    """
    method = getattr(model, BEFORE_HEAD, None)
    head = None if method is None else _predict(model, batch, method)
    if head is None:
        return None
    if not isinstance(head, Mapping) or not {"hidden", "kernel"} <= set(head):
        raise ConfigError(
            f"{type(model).__name__}.{BEFORE_HEAD} returned {_described(head)}; it must return a "
            "dict with 'hidden' and 'kernel', or None to use the logits of a call. Return these, "
            "or rename the method",
            code="before-head-result",
        )
    if not isinstance(model, nnx.Module):
        return head
    kind = type(model)
    if all(is_from(getattr(kind, name), _MODELS) for name in _LOGITS if hasattr(kind, name)):
        return head
    compared = _compare_with_call(model)
    if compared.is_equal:
        return head
    name = f"{kind.__name__}.{BEFORE_HEAD}"
    if compared.was_run and not is_from(getattr(kind, BEFORE_HEAD), _MODELS):
        raise UnsupportedError(
            f"the logits from {name} are not those of a call of the model: the product with the "
            f"head {compared.why}. The loss uses {BEFORE_HEAD} instead of the call: make both "
            f"compute the same logits, or remove {BEFORE_HEAD}",
            code="before-head-differs",
        )
    # The call defines the logits of a model, so do not use an inherited `before_head` that differs.
    warn(
        f"the loss makes all logits of {kind.__name__} at once, as its call does, instead of one "
        f"chunk of positions at a time: the product of {name} with the head {compared.why}. Make "
        f"both compute the same to save that memory, or let {BEFORE_HEAD} return None"
    )
    return None


def _described(value: object) -> str:
    """Describes the type of a value, with the keys of a dict and the types in a tuple."""
    if isinstance(value, Mapping):
        return f"a dict of {sorted(map(str, value))}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(x).__name__ for x in value) or 'nothing'}"
    return f"a {type(value).__name__}"


_MODELS = "axon_dist.models."
_LOGITS = (BEFORE_HEAD, "__call__", "head")
"""The methods of a model that define its logits."""

_OF_LOSS = ("num_chunks", "z_loss", "label_smoothing")
"""The options of `linear_cross_entropy` that do not change logits."""


def _compare_with_call(model: nnx.Module) -> Comparison:
    """Compares `hidden @ kernel` of `before_head` with the logits of a call."""
    graph, state = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)

    def called(tokens: Array) -> Array:
        return wide(nnx.merge(graph, state, copy=True)(tokens))

    def product(tokens: Array) -> Array:
        head = getattr(nnx.merge(graph, state, copy=True), BEFORE_HEAD)(tokens)
        head = {name: x for name, x in head.items() if name not in _OF_LOSS}
        hidden, kernel = head["hidden"], head["kernel"]
        dtype = jnp.promote_types(jnp.result_type(hidden, kernel), jnp.float32)
        logits = jnp.matmul(hidden, kernel, preferred_element_type=dtype)
        if head.get("bias") is not None:
            logits = logits + head["bias"].astype(dtype)
        cap = head.get("soft_cap")
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    return compare(product, called, (tokens,))


def _predict(
    model: Callable[..., Array],
    batch: Mapping[str, Array],
    method: Callable[..., Any] | None = None,
) -> Any:
    """Runs a model or one of its methods on the input tokens, with segments if there are any."""
    tokens = batch["tokens"]
    segments = batch.get("segments")
    run = model if method is None else method
    if segments is None:
        return run(tokens[:, :-1])
    if not _takes_segments(model):
        raise ConfigError(
            f"the batch has segments, several documents in a row, but {type(model).__name__} does "
            "not take them: make it accept model(tokens, segments=...), and attend only within "
            "equal segments",
            code="model-without-segments",
        )
    return run(tokens[:, :-1], segments=segments[:, :-1])


def _takes_segments(model: Callable[..., Array]) -> bool:
    call = type(model).__call__ if isinstance(model, nnx.Module) else model
    parameters = inspect.signature(call).parameters
    return "segments" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _counts(batch: Mapping[str, Array]) -> Array:
    """Returns the weight of each target token, `[B, T]`, float32 or wider if `weight` is."""
    tokens = batch["tokens"]
    mask = batch.get("mask", jnp.ones(tokens.shape, jnp.float32))
    if mask.shape != tokens.shape:
        raise ConfigError(
            f"got a mask of shape {mask.shape} for tokens of shape {tokens.shape}: "
            "give one mask entry per token, the first column included.",
            code="mask-shape",
        )
    counts = mask[:, 1:].astype(jnp.float32)
    if (segments := batch.get("segments")) is not None:
        if segments.shape != tokens.shape:
            raise ConfigError(
                f"got segments of shape {segments.shape} for tokens of shape {tokens.shape}: give "
                "one for every token, the last column included.",
                code="segments-shape",
            )
        is_inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        counts = counts * is_inside.astype(jnp.float32)
    if "weight" not in batch:
        return counts
    weight = jnp.asarray(batch["weight"])
    is_float = jnp.issubdtype(weight.dtype, jnp.floating)
    dtype = jnp.promote_types(weight.dtype, jnp.float32) if is_float else jnp.float32
    return counts.astype(dtype) * weight.astype(dtype)[:, None]
