"""Fused linear cross-entropy: the loss of a head `hidden @ kernel`, chunk by chunk of positions.

The logits of a language model are by far its largest array: `[B, T, V]` in float32, 13 GB for
64 x 1024 positions and 50 257 tokens. Here, the logits of one chunk are computed, their losses are
summed, and only the gradient is kept. The gradient of a weighted sum is known up to one factor, the
cotangent of the sum, so it is computed in the forward pass and scaled later. Logits are computed
once, as in the plain program, but never all at the same time. The derivative is written as a
forward rule, `d total = <dH, d hidden> + <dK, d kernel> + ...`, which is linear and which JAX
transposes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ..core.compat import Primitive, new_operation
from ..core.errors import ConfigError, DTypeError
from ..core.reduction import all_max, all_min, all_sum
from ..core.tree import wide
from ..core.typing import Array, PyTree
from ..core.weighted import Weighted
from .ids import wide_ids

LINEAR_CROSS_ENTROPY = "linear_cross_entropy"
"""The name of the primitive; a train step finds it by this name and rewrites it for its mesh."""

BEFORE_HEAD = "before_head"
"""The method of a model that returns the head's inputs for the loss, instead of logits."""

CHUNK_BYTES = 2**29
"""The default limit for the float32 logits of one chunk, in bytes.

The products are then large, and the logits small compared with a model.
"""

CHUNK_SHARE = 1 / 64
"""The largest limit for a chunk's logits, as a share of a device's memory.

It counts where it exceeds `CHUNK_BYTES`.
"""


@dataclasses.dataclass(frozen=True)
class HeadLoss:
    """How logits become losses; the options of `linear_cross_entropy` as one value.

    Args:
        z_loss: as in `linear_cross_entropy`.
        label_smoothing: as in `linear_cross_entropy`.
        soft_cap: as in `linear_cross_entropy`.
        logits_dtype: as in `linear_cross_entropy`.
        num_chunks: as in `linear_cross_entropy`.
        scores: whether to count the positions whose likeliest token is the label.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    soft_cap: float | None = None
    logits_dtype: str = "float32"
    num_chunks: int | None = None
    scores: bool = False

    def validate(self) -> None:
        """Raises `ConfigError` or `DTypeError` unless every option has a possible value."""
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}; it must be at least 0 and below 1"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ConfigError(f"soft_cap is {self.soft_cap}; it must be positive, or None")
        if self.num_chunks is not None and self.num_chunks < 1:
            raise ConfigError(f"num_chunks is {self.num_chunks}; it must be at least 1, or None")
        if self.logits_dtype not in ("float32", "bfloat16"):
            raise DTypeError(
                f"logits_dtype is {self.logits_dtype!r}; logits are 'float32', or 'bfloat16' for "
                "half the traffic and three digits"
            )


class Operands(NamedTuple):
    """The operands of the loss.

    Args:
        hidden: `[..., D]`.
        kernel: `[D, V]`.
        labels: integers `[...]`.
        weights: `[...]`, in the dtype of the loss.
        bias: `[V]`, or None.
    """

    hidden: Array
    kernel: Array
    labels: Array
    weights: Array
    bias: Array | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the loss and of all sums: that of the products, and at least float32."""
        return _loss_dtype(self.hidden, self.kernel)


class Tangents(NamedTuple):
    """The tangents of the operands; None for an operand that is constant."""

    hidden: Array | None
    kernel: Array | None
    labels: Array | None
    weights: Array | None
    bias: Array | None = None


Gradients: TypeAlias = tuple[Array | None, Array | None, Array | None]
"""Gradients with respect to hidden, kernel and bias; None for those not requested."""


class LossParts(NamedTuple):
    """The loss of some positions, and its gradients.

    Args:
        total: the weighted sum of the losses, float32 or wider.
        hits: the sum of the weights of the positions whose likeliest token is the label; 0 if not
            requested.
        losses: the loss of each position, `[...]` in the same dtype.
        grads: gradients of the total with respect to `hidden`, `kernel` and `bias`; None for those
            not requested.
    """

    total: Array
    hits: Array
    losses: Array
    grads: Gradients


Values: TypeAlias = tuple[tuple[Array, Array], tuple[Array, Array]]
"""Total and hits, and their tangents."""

Wants: TypeAlias = tuple[bool, bool, bool]
"""Whether the gradients with respect to hidden, kernel and bias are requested."""

Run: TypeAlias = Callable[[Operands, Wants], LossParts]
"""Computes a loss, on a mesh or on one device."""


def linear_cross_entropy(
    hidden: Array,
    kernel: Array,
    labels: Array,
    weights: Array | None = None,
    *,
    bias: Array | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    logits_dtype: str = "float32",
    num_chunks: int | None = None,
) -> Weighted:
    """Sums the cross-entropy of `hidden @ kernel + bias` without computing all logits at once.

    With `x = hidden @ kernel + bias` it equals the plain program

        losses = logsumexp(x) - x[label]
        Weighted(sum(weights * losses), sum(weights))

    with the same FLOPs, forward and backward, and with the gradient of one chunk of positions at a
    time. In a train step every rank computes its own positions, and its own part of the vocabulary
    if tensor parallelism splits it. The kernel is gathered once, and its gradient is reduced once.

    Args:
        hidden: `[..., D]`, the output of the last norm; samples in dim 0.
        kernel: `[D, V]`, the head; for a tied head, the transposed embedding table.
        labels: integers `[...]` in `[0, V)`.
        weights: the weight of each position, `[...]`; None weighs all positions equally.
        bias: `[V]`; None for no bias.
        z_loss: adds this times `logsumexp(x)**2`, which keeps the logits small (arXiv:2204.02311).
        label_smoothing: the share of each label that is spread evenly over all tokens.
        soft_cap: logits are `soft_cap * tanh(x / soft_cap)`; None leaves them uncapped.
        logits_dtype: the dtype in which the products are stored. `"bfloat16"` halves the memory
            traffic of the loss and **changes its numbers**: logits are rounded to three digits, as
            with a head in bfloat16. All sums are float32 in either case, or float64 for a float64
            model.
        num_chunks: into how many chunks each rank cuts its positions. None uses as many as keep
            the float32 logits of one within 512 MiB. If the kernel needs a gradient, a known chip
            raises this limit to the bytes of that gradient in float32, or to 1/64 of the chip's
            memory if that is less.

    Returns:
        The sum, in nats, and the sum of the weights, float32; float64 for a float64 model.

    Raises:
        ConfigError: if shapes do not fit, or an option has an impossible value.
        DTypeError: for another dtype of logits.

    Example:
        >>> hidden, labels = jnp.ones((2, 3, 8)), jnp.zeros((2, 3), int)
        >>> loss = linear_cross_entropy(hidden, jnp.zeros((8, 4)), labels)
        >>> round(float(loss.mean), 4), float(loss.weight)
        (1.3863, 6.0)
    """
    how = HeadLoss(z_loss, label_smoothing, soft_cap, logits_dtype, num_chunks)
    return _bound(how, hidden, kernel, labels, weights, bias)[0]


def linear_scores(
    hidden: Array,
    kernel: Array,
    labels: Array,
    weights: Array | None = None,
    **options: Any,
) -> tuple[Weighted, dict[str, Weighted]]:
    """Computes `linear_cross_entropy`, and how often the likeliest token is the label.

    Args:
        hidden: as in `linear_cross_entropy`.
        kernel: as in `linear_cross_entropy`.
        labels: as in `linear_cross_entropy`.
        weights: as in `linear_cross_entropy`.
        **options: the options of `linear_cross_entropy`, including `bias`.

    Returns:
        The loss, and `accuracy` with the same weight. Among equal logits, the first token counts as
        the likeliest.

    Example:
        >>> hidden, labels = jnp.ones((1, 2, 1)), jnp.array([[2, 0]])
        >>> _, metrics = linear_scores(hidden, jnp.arange(3.0)[None], labels)
        >>> float(metrics["accuracy"].mean)
        0.5
    """
    bias = options.pop("bias", None)
    how = HeadLoss(**options, scores=True)
    total, hits = _bound(how, hidden, kernel, labels, weights, bias)
    return total, {"accuracy": hits}


def _bound(
    how: HeadLoss,
    hidden: Array,
    kernel: Array,
    labels: Array,
    weights: Array | None,
    bias: Array | None,
) -> tuple[Weighted, Weighted]:
    """Binds the operation; returns the loss and the hits."""
    how.validate()
    weights = jnp.ones(jnp.shape(labels), jnp.float32) if weights is None else weights
    weights = jnp.asarray(weights, _loss_dtype(hidden, kernel))
    operands = {"hidden": hidden, "kernel": kernel, "labels": labels, "weights": weights}
    operands |= {} if bias is None else {"bias": bias}
    _check(operands)
    operands["labels"] = wide_ids(labels)
    total, hits = _operation().bind(*operands.values(), how=how)
    weight = jnp.sum(weights)
    return Weighted(total, weight), Weighted(hits, weight)


def _loss_dtype(hidden: Array, kernel: Array) -> jnp.dtype:
    return jnp.promote_types(jnp.result_type(hidden, kernel), jnp.float32)


def _check(operands: dict[str, Array]) -> None:
    shapes = {name: jnp.shape(x) for name, x in operands.items()}
    lead = shapes["hidden"][:-1]
    width = shapes["hidden"][-1:]
    fits = len(shapes["kernel"]) == 2 and shapes["kernel"][:1] == width
    fits = fits and shapes["labels"] == shapes["weights"] == lead
    if not fits or shapes.get("bias", shapes["kernel"][1:]) != shapes["kernel"][1:]:
        got = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ConfigError(
            f"linear_cross_entropy got {got}; it takes hidden [..., D], kernel [D, V], labels "
            "and weights [...], one for each position of hidden, and a bias [V]"
        )
    dtype = jnp.asarray(operands["labels"]).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ConfigError(
            f"linear_cross_entropy got labels of {dtype}; they must be the integer ids of tokens"
        )


def evaluate(
    how: HeadLoss,
    operands: Operands,
    wants: Wants,
    axes: str | tuple[str, ...] | None = None,
    memory_bytes: int | None = None,
) -> LossParts:
    """Computes the loss chunk by chunk.

    Args:
        how: the loss.
        operands: the operands of one device, or of one rank inside `shard_map`.
        wants: the gradients requested.
        axes: the mesh axis or axes whose ranks each have a part of the vocabulary, in order; kernel
            and bias are then this rank's part. None if they are whole.
        memory_bytes: the memory of a device; None if the chip is unknown.

    Returns:
        The values. With axes, all except the gradients of kernel and bias are totals over ranks.
    """
    shape = operands.labels.shape
    width, classes = operands.kernel.shape
    most = chunk_bytes(width, classes, memory_bytes) if wants[1] else CHUNK_BYTES
    count, size = _chunks(how, math.prod(shape), classes, most)

    def cut(x, *dims):
        return _padded(x.reshape(-1, *dims), count * size).reshape(count, size, *dims)

    dtype = operands.dtype
    weights = operands.weights.astype(dtype)
    pieces = (cut(operands.hidden, width), cut(operands.labels), cut(weights))
    rest = (operands.kernel, operands.bias)
    zero = jnp.zeros((), dtype)
    heads = zip(rest, wants[1:], strict=True)
    empty = (jnp.zeros(x.shape, dtype) if x is not None and w else None for x, w in heads)
    start = zero, zero, *empty

    def chunk(
        carry: PyTree, piece: tuple[Array, Array, Array]
    ) -> tuple[PyTree, tuple[Array, Array | None]]:
        hidden, labels, weights = piece
        values = _chunk(how, Operands(hidden, rest[0], labels, weights, rest[1]), wants, axes)
        sums = values.total, values.hits, *values.grads[1:]

        def add(a, b):
            return None if a is None else a + b

        return tuple(map(add, carry, sums)), (values.losses, values.grads[0])

    if count == 1:
        sums, results = chunk(start, jax.tree.map(lambda x: x[0], pieces))
    else:
        sums, results = jax.lax.scan(chunk, start, pieces)
    total, hits, d_kernel, d_bias = sums

    def restored(x, *dims):
        return x.reshape(-1, *dims)[: math.prod(shape)].reshape(*shape, *dims)

    d_hidden = None if results[1] is None else restored(results[1], width)
    if axes is not None and d_hidden is not None:
        d_hidden = all_sum(d_hidden, axes)
    return LossParts(total, hits, restored(results[0]), (d_hidden, d_kernel, d_bias))


def chunk_bytes(width: int, classes: int, memory_bytes: int | None) -> int:
    """Returns the size limit for the float32 logits of a chunk, in bytes.

    Every chunk reads and writes the gradient of the kernel, `4 width classes` bytes, to add its
    share. With at least as many bytes of logits, a chunk moves more logits than gradients.

    Args:
        width: the width of the hidden states.
        classes: the number of classes in this rank's kernel.
        memory_bytes: the memory of a device; None if the chip is unknown.

    Example:
        >>> chunk_bytes(768, 50304, 80 * 2**30) == CHUNK_BYTES
        True
        >>> [round(chunk_bytes(4096, 128256, x) / 2**30, 2) for x in (None, 16 * 2**30, 80 * 2**30)]
        [0.5, 0.5, 1.25]
    """
    share = int((memory_bytes or 0) * CHUNK_SHARE)
    return max(CHUNK_BYTES, min(4 * width * classes, share))


def _chunks(how: HeadLoss, positions: int, classes: int, most: int) -> tuple[int, int]:
    """Returns the number of chunks and of positions in each; the last chunk may be padded."""
    if how.num_chunks is not None:
        return how.num_chunks, -(-positions // how.num_chunks)
    least = max(1, -(-positions * classes * 4 // most))
    even = (n for n in range(least, 2 * least + 1) if positions % n == 0)
    count = next(even, least)
    return count, -(-positions // count)


def _padded(x: Array, length: int) -> Array:
    """Pads with zeros, so that the added positions have weight 0."""
    more = length - x.shape[0]
    return x if not more else jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)))


def _chunk(
    how: HeadLoss, at: Operands, wants: Wants, axes: str | tuple[str, ...] | None
) -> LossParts:
    """Computes the losses of N positions, and the gradients of their weighted sum."""

    def over(reduce, x):
        return x if axes is None else reduce(x, axes)

    classes = at.kernel.shape[1]
    start = 0 if axes is None else jax.lax.axis_index(axes) * classes
    num_classes = classes * (1 if axes is None else jax.lax.axis_size(axes))
    # JAX hoists loop-invariant values out of the loop and keeps them in memory. So `ids` is a
    # single row, and this function avoids `jnp.where(is_label, logits, 0.0)`: its zero would be
    # hoisted as an array as large as the logits.
    ids = jax.lax.broadcasted_iota(at.labels.dtype, (1, classes), 1) + start
    is_label = ids == at.labels[:, None]

    logits, slope = _logits(how, at)
    is_narrow = jnp.dtype(at.hidden.dtype).itemsize < 4
    largest, total = (_one_pass if is_narrow else _two_pass)(logits, over)
    log_total = jnp.log(total) + largest
    smooth = how.label_smoothing
    losses = log_total - (1 - smooth) * over(all_sum, _of_labels(logits, at.labels - start))
    if smooth:
        losses = losses - smooth / num_classes * over(all_sum, logits.sum(-1))
    if how.z_loss:
        losses = losses + how.z_loss * log_total**2
    hits = jnp.zeros((), at.weights.dtype)
    if how.scores:
        is_less = (logits != largest[:, None]).astype(jnp.int32)
        first = (ids.astype(jnp.int32) + num_classes * is_less).min(-1)
        hits = jnp.sum(jnp.where(over(all_min, first) == at.labels, at.weights, 0.0))
    grads: Gradients = (None, None, None)
    if any(wants):
        # Recompute the exponentials from the logits: cheaper than keeping them in memory.
        d_logits = jnp.exp(logits - log_total[:, None]) * (1 + 2 * how.z_loss * log_total)[:, None]
        d_logits = d_logits - (1 - smooth) * is_label.astype(logits.dtype) - smooth / num_classes
        d_logits = d_logits * at.weights[:, None] * (1.0 if slope is None else slope)
        grads = _gradients(at, d_logits, wants)
    return LossParts(jnp.sum(losses * at.weights), hits, losses, grads)


def _two_pass(logits: Array, over: Callable[..., Array]) -> tuple[Array, Array]:
    """Computes the maximum of each row and the sum of its exponentials, in two passes."""
    largest = over(all_max, jax.lax.stop_gradient(logits).max(-1))
    return largest, over(all_sum, jnp.exp(logits - largest[:, None]).sum(-1))


def _one_pass(logits: Array, over: Callable[..., Array]) -> tuple[Array, Array]:
    """Computes what `_two_pass` computes in one pass (Milakov and Gimelshein, arXiv:1805.02867).

    The results differ by rounding in float32, so float32 products use two passes. On a GPU, reading
    the logits from memory is most of the cost of the loss.
    """

    # These ones depend on the logits, so that JAX does not hoist them; see `_chunk`.
    ones = (logits == logits).astype(logits.dtype)
    least = jnp.asarray(jnp.finfo(logits.dtype).min), jnp.zeros((), logits.dtype)
    largest, total = jax.lax.reduce((logits, ones), least, _joined, (1,))
    all_largest = over(all_max, largest)
    return all_largest, over(all_sum, total * jnp.exp(largest - all_largest))


def _joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Joins the maxima of two parts of a row, each with the sum of its exponentials."""
    one, sum_one = a
    other, sum_other = b
    # The difference of two equal infinities is NaN: a part may consist of masked logits alone.
    difference = jnp.where(one == other, 0, one - other)
    scale = jnp.exp(-jnp.abs(difference))
    total = jnp.where(difference > 0, sum_one + sum_other * scale, sum_one * scale + sum_other)
    return jnp.maximum(one, other), total


def _of_labels(logits: Array, labels: Array) -> Array:
    """Returns the logit of each label, `[N]`; 0 if the label is not among these classes."""
    classes = logits.shape[1]
    at = jnp.clip(labels, 0, classes - 1)[:, None]
    chosen = jnp.take_along_axis(logits, at, axis=1)[:, 0]
    return jnp.where((labels >= 0) & (labels < classes), chosen, 0.0)


def _logits(how: HeadLoss, at: Operands) -> tuple[Array, Array | None]:
    """Computes the logits `[N, V]` in at least float32, and their slope if they are capped."""
    dtype = jnp.promote_types(at.hidden.dtype, at.kernel.dtype)
    logits = _product(at.hidden.astype(dtype), at.kernel.astype(dtype), (1, 0))
    if at.bias is not None:
        logits = logits + at.bias.astype(logits.dtype)
    if how.logits_dtype != "float32":
        logits = logits.astype(how.logits_dtype).astype(logits.dtype)
    if how.soft_cap is None:
        return logits, None
    capped = jnp.tanh(logits / how.soft_cap)
    return how.soft_cap * capped, 1 - capped**2


def _gradients(at: Operands, d_logits: Array, wants: Wants) -> Gradients:
    """Computes the gradients of hidden, kernel and bias from that of the logits, `[N, V]`.

    Products are in float32 instead of float16, which cannot represent probabilities before loss
    scaling.
    """
    dtype = jnp.promote_types(at.hidden.dtype, at.kernel.dtype)
    dtype = jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype
    narrow = d_logits.astype(dtype)
    d_hidden = d_kernel = d_bias = None
    if wants[0]:
        d_hidden = _product(narrow, at.kernel.astype(dtype), (1, 1)).astype(dtype)
    if wants[1]:
        d_kernel = _product(at.hidden.astype(dtype), narrow, (0, 0))
    if wants[2] and at.bias is not None:
        d_bias = d_logits.sum(0)
    return d_hidden, d_kernel, d_bias


def _product(left: Array, right: Array, dims: tuple[int, int]) -> Array:
    contracted = (((dims[0],), (dims[1],)), ((), ()))
    wide = jnp.promote_types(left.dtype, jnp.float32)
    return jax.lax.dot_general(left, right, contracted, preferred_element_type=wide)


def derivative(run: Run, operands: Operands, tangents: Tangents) -> Values:
    """Computes total and hits, and their tangents.

    Args:
        run: computes the loss.
        operands: the operands of the loss.
        tangents: the tangents of the operands; None for constant operands.

    Returns:
        The values, and their tangents.
    """
    differentiated = (tangents.hidden, tangents.kernel, tangents.bias)
    wants = tuple(tangent is not None for tangent in differentiated)
    values = run(operands, wants)  # type: ignore[arg-type]

    d_total = jnp.zeros((), values.total.dtype)
    for grad, tangent in zip(values.grads, differentiated, strict=True):
        if tangent is not None and grad is not None:
            # A bias may be wider than the loss.
            d_total = d_total + jnp.sum(wide(grad) * wide(tangent)).astype(d_total.dtype)
    if tangents.weights is not None:
        d_total = d_total + jnp.sum(values.losses * tangents.weights).astype(d_total.dtype)
    return (values.total, values.hits), (d_total, jnp.zeros((), values.hits.dtype))


def differentiable(run: Run) -> Callable[..., tuple[Array, Array]]:
    """Returns the loss as a differentiable function of the operands.

    Args:
        run: computes the loss.

    Returns:
        (hidden, kernel, labels, weights[, bias]) -> (total, hits); its JVP is `derivative`.
    """

    @jax.custom_jvp
    def loss(*operands: Array) -> tuple[Array, Array]:
        return run(Operands(*operands), (False, False, False))[:2]

    def jvp(operands: Sequence[Array], tangents: Sequence[Array]) -> Values:
        def is_zero(x):
            return isinstance(x, jax.custom_derivatives.SymbolicZero)

        nonzero = Tangents(*(None if is_zero(x) else x for x in tangents))
        return derivative(run, Operands(*operands), nonzero)

    loss.defjvp(jvp, symbolic_zeros=True)
    return loss


def _evaluate_whole(*operands: Array, how: HeadLoss) -> tuple[Array, Array]:
    return evaluate(how, Operands(*operands), (False, False, False))[:2]


def _jvp(operands: Sequence[Array], tangents: Sequence[Array | None], how: HeadLoss) -> Values:
    return derivative(functools.partial(evaluate, how), Operands(*operands), Tangents(*tangents))


@functools.cache
def _operation() -> Primitive:
    return new_operation(LINEAR_CROSS_ENTROPY, _evaluate_whole, jvp=_jvp)
