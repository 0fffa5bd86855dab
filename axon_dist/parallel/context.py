"""Context parallelism: the positions of a long sequence split over a mesh axis."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..core.by_position import is_by_position
from ..core.checks import checked
from ..core.errors import DivisibilityError, NamedChoice, UnsupportedError
from ..core.modules import WRAPPERS, Layers, wrap_calls
from ..core.same_function import is_from
from ..core.typing import Array, Function
from ..nn import (
    AttentionKind,
    Layout,
    Ring,
    Unread,
    attended,
    call_attend,
    check_attend,
    differs_by_heads,
    has_residual_method,
    kind_of,
    mixes,
    ring_attention,
    ulysses_attention,
)
from .strategy import AdaptLayers, Strategy


class ContextMode(NamedChoice):
    """How attention reads positions of other ranks."""

    RING = "ring"
    """Keys and values are sent around the ring of ranks."""
    ULYSSES = "ulysses"
    """All-to-all: whole sequences of some heads."""


@checked()
def context_parallel(mode: ContextMode | str = ContextMode.RING, axis: str = "cp") -> Strategy:
    """Splits the positions of every sequence over a mesh axis, attention included.

    Sequence parallelism splits positions between the layers of tensor parallelism and gathers them
    in each. Here layers keep them split: in a ring no rank holds a whole sequence; with Ulysses
    attention alone sees whole sequences, of some heads. Every layer except attention must work on
    each position independently. Attention is replaced in `nnx.MultiHeadAttention` and in every
    module with a method `attend(query, key, value)`, as the attention of this library has, or
    with the names q, k, v, or queries, keys, values. The method may also take `segments`, integers
    `[B, T]`: a position attends only to its segment.

    Under a causal mask a ring reorders the positions, so that all ranks have the same work. It does
    so once for all layers of a `Transformer` that draws no random numbers, and otherwise in each
    attention.

    A ring computes softmax attention: causal or unmasked, with any scale, optionally in a window
    and with capped scores (the attention of a `Transformer` only without these two). For a method
    of your own, the variant is read from its program and checked against it on random inputs; any
    other attention is refused. Ulysses calls the method itself with a subset of the heads, so its
    result for a head must not depend on the other heads.

    Args:
        mode: `"ring"` sends keys and values around, c - 1 times 1/c of them, and its memory is
            linear in the positions of a rank; `"ulysses"` sends queries, keys, values and results
            once by all-to-all and needs heads that divide.
        axis: the mesh axis, of size c.

    Returns:
        The strategy; it splits no batch: compose it with `ddp`, `zero`, `fsdp` or
        `tensor_parallel`, and with `pipelined` in the mode `"ulysses"`.

    Raises:
        ConfigError: for an unknown mode.

    Example:
        >>> context_parallel("ulysses").layers[0].axes
        ('cp',)

    Source: Liu et al., arXiv:2310.01889; Jacobs et al., arXiv:2309.14509.
    """
    return Strategy("context", layers=(ContextLayers(ContextMode(mode), axis),))


@dataclasses.dataclass(frozen=True)
class ContextLayers(AdaptLayers):
    """Replaces the attention of a model by one over split positions.

    Args:
        mode: ring or Ulysses.
        axis: the mesh axis.
    """

    mode: ContextMode
    axis: str

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes it needs."""
        return (self.axis,)

    @property
    def sends_around(self) -> bool:
        """True in ring mode."""
        return self.mode is ContextMode.RING

    @property
    def splits_positions(self) -> bool:
        """Always True."""
        return True

    def extend(self, layout: Layout) -> Layout:
        """Splits the positions of every layer."""
        return dataclasses.replace(layout, sequence=(*layout.sequence, self.axis))

    def check(self, model: nnx.Module, layout: Layout) -> None:
        """Raises unless the model has attention whose heads divide.

        Raises:
            UnsupportedError: when the model has no attention that can be replaced, or has attention
                that needs more than queries, keys and values.
            DivisibilityError: when heads do not divide.
        """
        attention = SplitAttention(self.mode, self.axis, layout)
        layers = [m for _, m in nnx.iter_modules(model) if _is_multi_head(m) or mixes(m)]
        for module in layers:
            if not _is_multi_head(module):
                check_attend(module)
            if isinstance(heads := getattr(module, "num_heads", None), int):
                attention.check_heads(heads)
            if self.sends_around and getattr(module, "is_special", False):
                raise UnsupportedError(
                    f"{type(module).__name__} has a window or caps its scores, which a ring of "
                    "keys and values does not support for this class; take "
                    "context_parallel('ulysses'), whose "
                    "ranks see whole sequences",
                    code="ring-of-special-attention",
                )
        if not layers:
            classes = sorted({type(module).__name__ for _, module in nnx.iter_modules(model)})
            raise UnsupportedError(
                "context parallelism found no attention to replace among the classes "
                f"{', '.join(classes)}; give the attention of the model a method "
                "attend(query, key, value), or use nnx.MultiHeadAttention",
                code="no-attention",
            )

    def __call__(self, model: nnx.Module, layout: Layout) -> None:
        """Changes the attention of a merged model, in place."""
        attention = SplitAttention(self.mode, self.axis, layout)
        modules = [module for _, module in nnx.iter_modules(model)]
        for module in modules:
            if isinstance(module, nnx.MultiHeadAttention):
                module.attention_fn = AttentionFunction(attention, module.attention_fn)
            elif mixes(module):
                wrap_calls(module, {"attend": attention})
        for module in filter(has_residual_method, modules if self.sends_around else []):
            # A user's own `residual` may depend on the order of the tokens, so it is left alone.
            if is_own(getattr(type(module), "residual")):  # noqa: B009
                wrap_calls(module, {"residual": DistributedOnce(attention)})


def _is_multi_head(module: nnx.Module) -> bool:
    """Whether a module is Flax's multi-head attention, whose inner function is replaced."""
    return isinstance(module, nnx.MultiHeadAttention)


@dataclasses.dataclass(frozen=True)
class SplitAttention:
    """Attention on arrays whose positions are split; runs in place of a module's `attend`.

    Args:
        mode: ring or Ulysses.
        axis: the mesh axis that splits the positions.
        layout: the layout of the activations.
        is_distributed: whether a rank holds positions in the balanced order of `Ring.distribute`,
            rather than consecutive ones.
    """

    mode: ContextMode
    axis: str
    layout: Layout
    is_distributed: bool = False

    def __call__(self, attend: Function, module: Any, *args: object, **kwargs: object) -> Array:
        """Attends over the whole sequence; Ulysses calls the module's own method.

        Args:
            attend: the method that is replaced.
            module: the module; causal unless its `causal` is False.
            *args: queries `[B, T, H, K]`, keys `[B, T, N, K]`, values shaped like the keys, and
                optionally segments, integers `[B, T]`.
            **kwargs: the same arguments, where they are passed by name.

        Raises:
            DivisibilityError: when positions or heads do not divide.
            UnsupportedError: when the call has other arguments.
        """
        query, key, value, segments = attended(attend, module, args, kwargs)
        arrays = query, key, value
        if any(jnp.ndim(x) != 4 for x in arrays):
            shapes = ", ".join(str([*jnp.shape(x)]) for x in arrays)
            raise UnsupportedError(
                f"{type(module).__name__}.attend is called with arrays of the shapes {shapes}; "
                "context parallelism takes a method of this name for attention, and gives it "
                "query, key and value [B, T, H, K]. Reshape them, or give a method that does "
                "something else another name",
                code="attend-of-other-arrays",
            )
        kind = self._kind(attend, module, arrays, segments is not None)
        heads = self.check_heads(query.shape[2])
        lead = self.layout.spec(query.shape)
        spec = PartitionSpec(lead[0], lead[1], self.layout.heads or None)
        key, value = (self._shared(x, query.shape[2], heads) for x in (key, value))
        for what, x in (("positions", query), ("positions of the keys", key)):
            self._check_positions(x.shape[1], kind is not None and kind.causal, what)
        factor = 1.0 if kind is None else kind.scale * query.shape[-1] ** 0.5

        def local(query: Array, key: Array, value: Array, *segments: Array) -> Array:
            if kind is not None:
                # ring_attention divides scores by sqrt(K), so only the rest of the scale is left.
                if abs(factor - 1) > 1e-6:
                    query = query * jnp.asarray(factor, query.dtype)
                return ring_attention(
                    query,
                    key,
                    value,
                    self.axis,
                    kind.causal,
                    *segments,
                    form=getattr(module, "form", "auto"),
                    is_distributed=self.is_distributed,
                    window=kind.window,
                    softcap=kind.softcap,
                )

            def attend_all(*x):
                return call_attend(attend, module, *x)

            return ulysses_attention(query, key, value, self.axis, attend_all, *segments)

        more = () if segments is None else (segments,)
        specs = (spec,) * 3 + (PartitionSpec(*spec[:2]),) * len(more)
        # Kernels do not declare over which mesh axes their results vary, so the check is off.
        run = self.layout.mapped(local, specs, spec, check_vma=False)
        return run(query, key, value, *more)

    def _kind(
        self,
        attend: Function,
        module: Any,
        arrays: tuple[Array, Array, Array],
        has_segments: bool,
    ) -> AttentionKind | None:
        """Returns the attention that a ring computes in place of a method; None for Ulysses.

        Raises:
            UnsupportedError: when a ring cannot compute what the method computes, or when under
                Ulysses the method treats a subset of the heads differently.
        """
        query, key, value = arrays
        is_ring = self.mode is ContextMode.RING
        name = f"{type(module).__name__}.attend"
        if isinstance(module, AttentionFunction):
            name = "the attention_fn of nnx.MultiHeadAttention"
        if is_own(attend):
            causal = getattr(module, "causal", True)
            return AttentionKind(causal, query.shape[-1] ** -0.5) if is_ring else None

        def called(query: Array, key: Array, value: Array, *segments: Array) -> Array:
            return call_attend(attend, module, query, key, value, *segments)

        if not is_ring:
            num_heads = query.shape[2]
            num_groups = self.check_heads(num_heads)
            key, value = (self._shared(x, num_heads, num_groups) for x in (key, value))
            why = differs_by_heads(called, (query, key, value), num_groups, has_segments)
            if num_groups > 1 and why:
                raise UnsupportedError(
                    f"{name} {why}; the ranks of Ulysses call it with {num_heads // num_groups} of "
                    f"{num_heads} heads each. Make its result for a head independent of the "
                    "other heads, or use another strategy, such as fsdp()",
                    code="heads-not-independent",
                )
            return None
        found = kind_of(called, query, key, value, has_segments)
        if isinstance(found, Unread):
            raise UnsupportedError(
                f"{name} {found.why}. A ring computes softmax(scale * q k^T) v, where a position "
                "sees all positions, or those up to its own, maybe in a window, with scores that "
                "tanh may cap. Take context_parallel('ulysses'), whose ranks call the method "
                "itself with whole sequences of some heads, or write it as one of these"
            )
        return found

    @property
    def size(self) -> int:
        """How many ranks share a sequence."""
        return self.layout.mesh.shape[self.axis]

    def check_heads(self, total: int) -> int:
        """Returns the number of groups that the heads are divided into.

        Raises:
            DivisibilityError: when `total` heads do not divide by it.
        """
        exchanged = self.size if self.mode is ContextMode.ULYSSES else 1
        split = self.layout.size(self.layout.heads)
        if total % (split * exchanged):
            names = "×".join((*self.layout.heads, self.axis)[-2 if split > 1 else -1 :])
            valid = [n for n in range(1, total + 1) if total % (n * split) == 0]
            ring = ", or context mode 'ring'" if self.layout.may_ring else ""
            raise DivisibilityError(
                f"{total} heads do not divide over {names}={split * exchanged}; choose "
                f"{f'a size of {self.axis} among {valid}' if valid else 'more heads'}{ring}"
            )
        return split * exchanged

    @staticmethod
    def _shared(heads: Array, num_queries: int, num_groups: int) -> Array:
        """Repeats key heads once per query head where they are too few to divide."""
        repeat = 1 if heads.shape[2] % num_groups == 0 else num_queries // heads.shape[2]
        return jnp.repeat(heads, repeat, axis=2) if repeat > 1 else heads

    def _check_positions(self, length: int, causal: bool, what: str) -> None:
        pieces = 2 if causal and self.mode is ContextMode.RING else 1
        if length % (self.size * pieces):
            raise DivisibilityError(
                f"a sequence of {length} {what} does not divide over {self.axis}={self.size}"
                f"{', in two pieces per rank' if pieces == 2 else ''}; make it a multiple of "
                f"{self.size * pieces}"
            )


@dataclasses.dataclass(frozen=True)
class DistributedOnce:
    """Reorders positions once before all layers, rather than inside the attention of each.

    Args:
        attention: the attention that runs in the layers.
    """

    attention: SplitAttention

    def __call__(
        self,
        residual: Function,
        module: nnx.Module,
        tokens: Array,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Runs `residual`, a method of the form of `has_residual_method`, on balanced tokens.

        Args:
            residual: the method that is replaced.
            module: the module that has it.
            tokens: integers `[B, T]`.
            segments: integers `[B, T]`, or None.
            positions: integers `[B, T]`; None for 0 to T - 1.

        Returns:
            `[B, T, D]`, in the original order.
        """
        layout = self.attention.layout
        length = tokens.shape[1]
        inner = self._inner(module)
        unknown = positions is None and segments is not None
        if not inner or unknown or length % (2 * self.attention.size):
            return residual(module, tokens, segments, positions)
        ring = Ring(self.attention.axis, self.attention.size, causal=True)

        def distribute(*arrays):
            return tuple(map(ring.distribute, arrays))

        given = {"tokens": tokens, "segments": segments, "positions": positions}
        given = {name: x for name, x in given.items() if x is not None}
        specs = tuple(PartitionSpec(*layout.spec((*x.shape, 1))[:2]) for x in given.values())
        arrays = layout.mapped(distribute, specs, specs, check_vma=False)(*given.values())
        moved = dict(zip(given, arrays, strict=True))
        tokens, segments = moved["tokens"], moved.get("segments")
        positions = moved.get("positions")
        positions = ring.positions(length)[None] if positions is None else positions
        before = [(one, getattr(one, WRAPPERS, Layers())) for one in inner]
        distributed = dataclasses.replace(self.attention, is_distributed=True)
        try:
            for one, layers in before:
                pairs = ((n, distributed if a == self.attention else a) for n, a in layers.layers)
                setattr(one, WRAPPERS, Layers(tuple(pairs)))
            out = residual(module, tokens, segments, positions)
        finally:
            for one, layers in before:
                setattr(one, WRAPPERS, layers)
        spec = layout.spec(out.shape)
        return layout.mapped(ring.restore, (spec,), spec, check_vma=False)(out)

    def _inner(self, module: nnx.Module) -> list[nnx.Module]:
        """Returns the attention modules inside; none where reordering tokens may change results.

        It may in a user's own layer and where attention is not causal. It does where random numbers
        are drawn: a token's draw depends on its place in the row, as on one device.
        """
        inner = [one for _, one in nnx.iter_modules(module) if _is_multi_head(one) or mixes(one)]
        draws = any(isinstance(x, nnx.RngState) for _, x in nnx.iter_graph(module))
        causal = all(mixes(one) and getattr(one, "causal", True) for one in inner)
        is_known = all(is_by_position(one) for _, one in nnx.iter_modules(module))
        return inner if causal and is_known and not draws else []


@dataclasses.dataclass(frozen=True)
class AttentionFunction:
    """Adapts `SplitAttention` to `nnx.MultiHeadAttention.attention_fn`, without a mask.

    Args:
        attention: the attention that runs.
        function: the module's original attention function.
    """

    attention: SplitAttention
    function: Function

    def __call__(
        self, query: Array, key: Array, value: Array, mask: Any = None, **options: Any
    ) -> Array:
        """Attends over the whole sequence.

        Raises:
            UnsupportedError: for a mask or dropout of the attention weights.
        """
        if mask is not None or (options.get("dropout_rate") and not options.get("deterministic")):
            raise UnsupportedError(
                "context parallelism of nnx.MultiHeadAttention takes no mask and no dropout of the "
                "attention weights: make it with dropout_rate=0.0, and for causal attention call "
                "it with is_causal=True, or write a module with a method attend(query, key, value)"
            )

        def attend(_: Any, query: Array, key: Array, value: Array) -> Array:
            return self.function(query, key, value, **options)

        return self.attention(attend, self, query, key, value)


def is_own(method: Function) -> bool:
    """Whether a method belongs to this library, so that its attributes describe its attention."""
    return is_from(method, "axon_dist.models.", "axon_dist.nn.")
