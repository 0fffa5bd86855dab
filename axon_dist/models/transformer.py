"""A decoder-only transformer in plain Flax NNX."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axon_dist.core.checks import RNGS, checked, instance_of
from axon_dist.core.errors import ConfigError
from axon_dist.core.same_function import is_from
from axon_dist.core.tree import wide
from axon_dist.core.typing import Array, PyTree

from .attention import capped
from .config import numerics
from .experts import Experts, Findings
from .layers import (
    Cache,
    GatedMLP,
    Past,
    Place,
    PlainMLP,
    SelfAttention,
    dropout_layer,
    init_std,
    linear,
    rms_norm,
)
from .transformer_config import TransformerConfig


class Block(nnx.Module):
    """One layer: `x += attention(norm(x))`, then `x += mlp(norm(x))`.

    `config.norms` places the norms before, after, or both before and after each branch.

    Args:
        config: sizes and numerics.
        window: the attention window, as for `SelfAttention`.
        rngs: source of the initial weights and of dropout.
    """

    def __init__(self, config: TransformerConfig, window: Array | None = None, *, rngs: nnx.Rngs):
        before = config.norms != "after"
        after = config.norms != "before"
        if before:
            self.attention_norm = _norm(config, rngs)
        self.attention: SelfAttention = SelfAttention(config, window, rngs=rngs)
        if after:
            self.attention_after_norm = _norm(config, rngs)
        if before:
            self.mlp_norm = _norm(config, rngs)
        if after:
            self.mlp_after_norm = _norm(config, rngs)
        kind = GatedMLP if config.gated else PlainMLP
        self.mlp = (Experts if config.experts else kind)(config, rngs=rngs)
        self.dropout = dropout_layer(config.dropout, rngs)

    def __call__(
        self, x: Array, segments: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Maps the residual stream `[B, T, D]` to `[B, T, D]`; arguments as for `SelfAttention`."""
        mixed = self.attention(self._normed("attention_norm", x), segments, positions)
        return self._after_attention(x, mixed)

    def decode(self, x: Array, past: Past, place: Place) -> tuple[Array, Past]:
        """Maps further positions `[B, T, D]`, which see cached ones; returns the extended cache."""
        mixed, past = self.attention.decode(self._normed("attention_norm", x), past, place)
        return self._after_attention(x, mixed), past

    def _after_attention(self, x: Array, mixed: Array) -> Array:
        """Computes the part of the block after attention."""
        x = x + self.dropout(self._normed("attention_after_norm", mixed))
        fed = self.mlp(self._normed("mlp_norm", x))
        return x + self.dropout(self._normed("mlp_after_norm", fed))

    def _normed(self, name: str, x: Array) -> Array:
        return getattr(self, name)(x) if hasattr(self, name) else x


_CONFIG = instance_of(
    TransformerConfig, "a TransformerConfig, such as TransformerConfig.preset('tiny')"
)


class Transformer(nnx.Module):
    """A decoder-only language model: RMSNorm, RoPE, grouped-query attention, SwiGLU by default.

    The config can change norms, positions and feed-forward to those of GPT-2 (preset `"gpt2"`).

    `logits = head(blocks(embed(tokens)))`. The three parts are separate methods, so that a model
    can be cut between any two blocks. Without segments, positions come from the sequence index, so
    that a block needs only the residual stream.

    Args:
        config: the sizes; validated here.
        rngs: source of the initial weights (`params`) and of dropout.

    Raises:
        ConfigError: the sizes are inconsistent.
        DTypeError: a dtype of the config is not floating-point.

    Example:
        >>> def logits(tokens):
        ...     return Transformer(TransformerConfig.preset("tiny"), rngs=nnx.Rngs(0))(tokens)
        >>> nnx.eval_shape(logits, jnp.zeros((2, 8), jnp.int32)).shape
        (2, 8, 256)
    """

    @checked("Transformer", config=_CONFIG, rngs=RNGS)
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        config.validate()
        self.config = config
        self.token_embedding = _embedding(config, config.vocab_size, rngs)
        self.blocks = _blocks(config, rngs)
        self.final_norm = _norm(config, rngs)
        if not config.tied_head:
            self.lm_head = linear(config, config.width, config.vocab_size, bias=False, rngs=rngs)
        if config.positions == "learned":
            self.position_embedding = _embedding(config, config.max_length, rngs)
        # Made last, so that the initial weights do not depend on the dropout rate.
        self.dropout = dropout_layer(config.dropout, rngs)

    def __call__(self, tokens: Array, segments: Array | None = None) -> Array:
        """Predicts every next token.

        Args:
            tokens: integer `[B, T]`, T at most `config.max_length`.
            segments: integers `[B, T]`, the document of each token, if a row has several: tokens
                see only their own document, and positions restart in each. None for one document
                per row.

        Returns:
            Logits `[B, T, vocab_size]`, float32; row t predicts token t + 1.

        Raises:
            ConfigError: the sequence is longer than `config.max_length`.
        """
        return self.head(self.residual(tokens, *_with_positions(segments)))

    def attention_flops(self, length: int) -> int:
        """Returns the attention FLOPs per token, forward and backward; `6 L H Q T` without windows.

        Scores and weighted sums are two products of `2 H Q T` FLOPs in each of L layers, for H
        heads of size Q. The backward pass costs twice as much, and a causal mask leaves half of the
        total (arXiv:2204.02311, appendix B, counts both halves).

        Args:
            length: the number of tokens of a sequence, T.
        """
        config = self.config
        spans = (2 * w - w * w / length if 0 < w < length else length for w in config.layer_windows)
        return round(6 * config.num_heads * config.key_size * sum(spans))

    def residual(
        self, tokens: Array, segments: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Returns the residual stream after the last block.

        The order of tokens in a row determines only which tokens attention sees; their positions
        come from `positions`.

        Args:
            tokens: integers `[B, T]`.
            segments: integers `[B, T]`, the document of each token; None for one per row.
            positions: integers, `[B, T]` or `[1, T]`; None for the sequence index.

        Returns:
            `[B, T, D]`.
        """
        more = () if positions is None else (segments, positions)
        x = self.embed(tokens, positions)
        if self.config.scan_layers:
            return scan_layers(self.blocks, x, *more)
        for block in self.blocks:
            x = block(x, *more)
        return x

    def before_head(self, tokens: Array, segments: Array | None = None) -> dict[str, Any] | None:
        """Returns arguments of `linear_cross_entropy`, which never makes all logits at once.

        Args:
            tokens: as for a call.
            segments: as for a call.

        Returns:
            `hidden`, `[B, T, D]`, and `kernel`, `[D, V]`, with `logits = hidden @ kernel`, and
            options of the loss. None if the config selects whole logits, or if the head is not a
            plain product, for example because it has an adapter.
        """
        if not self.config.chunks_logits:
            return None
        layer: Any = self.token_embedding if self.config.tied_head else self.lm_head
        kernel = _plain_kernel(layer)
        if kernel is None:
            return None
        x = self.final_norm(self.residual(tokens, *_with_positions(segments)))
        dtype = layer.dtype or jnp.promote_types(x.dtype, kernel.dtype)
        return {
            "hidden": x.astype(dtype),
            "kernel": kernel.astype(dtype),
            "logits_dtype": self.config.logits_dtype,
        }

    def auxiliary(self) -> tuple[Array, dict[str, Array]] | None:
        """Returns the auxiliary loss of the experts in the last call, and their metrics.

        Returns:
            A scalar, the sum over layers of their weighted terms; and as metrics, the means of
            `Findings` over layers. None without experts, and in eval mode: the terms are for
            training only, so that a validation loss is the loss of the language model.
        """
        experts = self.config.experts
        if experts is None:
            return None
        blocks = [self.blocks] if self.config.scan_layers else list(self.blocks)
        # In eval mode a layer stores no report, so its report is that of an earlier training pass.
        blocks = [block for block in blocks if not block.mlp.deterministic]
        if not blocks:
            return None
        rows = [block.mlp.report[...].reshape(-1, len(Findings._fields)) for block in blocks]
        findings = Findings(*jnp.concatenate(rows).T)
        terms = experts.balance * findings.balance + experts.z_loss * findings.router_z
        return jnp.sum(terms), {name: jnp.mean(x) for name, x in findings._asdict().items()}

    def start_cache(self, padding: Array, length: int) -> Cache:
        """Makes an empty cache.

        Args:
            padding: the number of padding positions at the start of each row, int32 `[B]`.
            length: the capacity in positions, including padding.

        Returns:
            The cache, of zeros in the compute dtype of the model.
        """
        config = self.config
        shape = (padding.shape[0], length, config.kv_heads, config.key_size)
        dtype = config.dtype or _table_dtype(self.token_embedding)

        def empty(*lead):
            return Past(*(jnp.zeros((*lead, *shape), dtype) for _ in range(2)))

        layers = range(config.num_layers)
        past = empty(config.num_layers) if config.scan_layers else tuple(empty() for _ in layers)
        return Cache(past, Place(jnp.zeros((), jnp.int32), padding))

    def decode(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Predicts the token after further tokens, without recomputing earlier ones.

        Equals `self(all tokens so far)[:, -1]` for each row without its padding.

        Args:
            tokens: integers `[B, T]`: a whole prompt, or the token that was drawn last.
            cache: the cache of earlier tokens.

        Returns:
            Logits `[B, vocab_size]`, float32, and the cache with these tokens in it.
        """
        place = cache.place
        x = self.embed(tokens, place.positions(tokens.shape[1]))
        if self.config.scan_layers:
            x, past = decode_layers(self.blocks, x, cache.past, place)
        else:
            updated = []
            for block, past in zip(self.blocks, cache.past, strict=True):
                x, past = block.decode(x, past, place)
                updated.append(past)
            past = tuple(updated)
        return self.head(x[:, -1:])[:, 0], cache.after(past, tokens.shape[1])

    def embed(self, tokens: Array, positions: Array | None = None) -> Array:
        """Looks up tokens and returns the residual stream.

        Args:
            tokens: integers `[B, T]`.
            positions: integers `[B, T]`; None for the sequence index.

        Returns:
            `[B, T, D]`.

        Raises:
            ConfigError: the sequence is longer than `config.max_length`.
        """
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ConfigError(
                f"got tokens of {tokens.dtype}{list(tokens.shape)}; a Transformer takes token ids, "
                "integers of shape [B, T]"
            )
        if tokens.shape[1] > self.config.max_length:
            raise ConfigError(
                f"a sequence of {tokens.shape[1]} tokens is longer than "
                f"max_length={self.config.max_length}: shorten it, or raise max_length."
            )
        x = self.token_embedding(tokens)
        if self.config.embedding_scale != 1:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.config.positions == "learned":
            at = jnp.arange(tokens.shape[1])[None] if positions is None else positions
            x = x + self.position_embedding(at)
        return self.dropout(x)

    def head(self, x: Array) -> Array:
        """Maps the residual stream `[B, T, D]` to logits `[B, T, vocab_size]`, at least float32."""
        x = self.final_norm(x)
        logits = self.token_embedding.attend(x) if self.config.tied_head else self.lm_head(x)
        return capped(wide(logits), self.config.logit_softcap)


def positions_in(segments: Array) -> Array:
    """Returns positions that count from 0 in every document.

    Args:
        segments: integers `[B, T]`, equal within a document and different in adjacent documents.

    Returns:
        int32 `[B, T]`.

    Example:
        >>> positions_in(jnp.array([[1, 1, 1, 2, 2, 0]])).tolist()
        [[0, 1, 2, 0, 1, 0]]
    """
    index = jax.lax.broadcasted_iota(jnp.int32, segments.shape, 1)
    is_same = segments[:, 1:] == segments[:, :-1]
    is_first = jnp.pad(~is_same, ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)


def _with_positions(segments: Array | None) -> tuple[Array, ...]:
    """Returns segments and positions; nothing for one document per row."""
    return () if segments is None else (segments, positions_in(segments))


def scan_layers(stacked: nnx.Module, x: Array, *more: Array | None) -> Array:
    """Applies the layers of a stacked module one after another in one `lax.scan`.

    Equals `for i in range(L): x = layer_i(x)`, where layer i has row i of every leaf. State that
    a layer updates, such as the counter of its dropout stream, is written back.

    Args:
        stacked: a module that maps `x` to an array of the same shape; leaves have a leading dim L.
        x: the first input.
        more: further arguments of every layer.

    Returns:
        The output of the last layer.
    """
    graph, params, rest = nnx.split(stacked, nnx.Param, ...)

    def apply_one(x, layer):
        module = nnx.merge(graph, *layer, copy=True)
        y = module(x, *more)
        return y, nnx.state(module, nnx.Not(nnx.Param))

    x, rest = jax.lax.scan(apply_one, x, (params, rest))
    nnx.update(stacked, rest)
    return x


def decode_layers(stacked: Block, x: Array, past: Past, place: Place) -> tuple[Array, Past]:
    """Applies the `decode` of stacked layers in eval mode, one after another in one `lax.scan`.

    Args:
        stacked: a block whose leaves have a leading dim L.
        x: further positions `[B, T, D]`.
        past: the cache, whose arrays have a leading dim L.
        place: the positions of `x` in their sequences.

    Returns:
        The output of the last layer, and the new cache.
    """
    graph, leaves = nnx.split(stacked)

    def decode_one(x: Array, layer: tuple[PyTree, Past]) -> tuple[Array, Past]:
        return nnx.merge(graph, layer[0], copy=True).decode(x, layer[1], place)

    return jax.lax.scan(decode_one, x, (leaves, past))


def _table_dtype(table: nnx.Module) -> Any:
    """Returns the dtype of the parameters of a token embedding, which may be a user's own layer."""
    embedding = getattr(table, "embedding", None)
    leaves = [embedding] if embedding is not None else jax.tree.leaves(nnx.state(table, nnx.Param))
    dtypes = [leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    # Kernels in 8 bits are scaled to a wider type before they are used.
    wide = [dtype for dtype in dtypes if dtype.itemsize > 1]
    return jnp.result_type(*wide or [jnp.float32])


def _plain_kernel(layer: nnx.Module) -> Array | None:
    """Returns the kernel `[D, V]` of a head that is a plain product; else None."""
    # A head of another class, such as `nnx.Sequential`, need not have a kernel or a bias.
    if not isinstance(layer, (nnx.Linear, nnx.Embed)):
        return None
    if isinstance(layer, nnx.Embed):
        weight = layer.embedding
        method = type(layer).attend
        plain = nnx.Embed.attend
    else:
        weight = layer.kernel
        method = type(layer).__call__
        plain = nnx.Linear.__call__
        if getattr(layer, "bias", None) is not None:
            return None
    # With a custom product or dtype promotion, the head is not a plain product either.
    hooks = (getattr(layer, name, None) for name in ("dot_general", "promote_dtype"))
    if not all(hook is None or is_from(hook, "jax.", "flax.", "axon_dist.") for hook in hooks):
        return None
    # Metadata may have a hook that runs on reads, such as an all-gather. Then only the layer itself
    # may read the kernel.
    if inspect.unwrap(method) is not inspect.unwrap(plain) or any(
        callable(value) for value in weight.get_metadata().values()
    ):
        return None
    return weight[...].T if isinstance(layer, nnx.Embed) else weight[...]


def _blocks(config: TransformerConfig, rngs: nnx.Rngs) -> Any:
    layers = rngs.split(config.num_layers)
    data = config.layer_data
    windows = None if data is None else jnp.asarray(data, jnp.int32)

    def make(rngs: nnx.Rngs, window: Array | None) -> Block:
        return Block(config, window, rngs=rngs)

    if config.scan_layers:
        return nnx.vmap(make)(layers, windows)
    per_layer = (
        jax.tree.map(lambda leaf, i=i: leaf[i], (layers, windows)) for i in range(config.num_layers)
    )
    return nnx.List(make(*arguments) for arguments in per_layer)


def _embedding(config: TransformerConfig, num_rows: int, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(
        num_rows,
        config.width,
        **numerics(config),
        embedding_init=nnx.initializers.normal(init_std(config)),
        rngs=rngs,
    )


def _norm(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
    match config.norm:
        case "rms" | "rms_plus_one":
            return rms_norm(config, config.width)
        case "layer":
            # The fast variance, E[x^2] - E[x]^2, loses digits if features are far from zero.
            return nnx.LayerNorm(
                config.width,
                epsilon=config.norm_eps,
                use_fast_variance=False,
                **numerics(config),
                rngs=rngs,
            )
    raise ConfigError(
        f"norm={config.norm!r} is in NORMS, but has no layer in transformer.py",
        code="norm-without-layer",
    )
