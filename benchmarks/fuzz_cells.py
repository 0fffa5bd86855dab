"""Random cells: programs that combine what nobody tried together, each against plain JAX.

A cell is a choice from every column below, and a cell is a program: pieces of source that are put
together, run, and printed as they are when something is wrong with them.
"""

from __future__ import annotations

import dataclasses
import math
import random
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from axon_dist.core.errors import AxonDistError

STEPS, SAMPLES = 3, 16
_TOLERANCE, _LOW = 1e-4, 5e-2
"""The largest allowed error, relative to the largest number of its array; with bfloat16."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with a strategy.

    Args:
        mesh: axis sizes.
        strategy: its source.
        microbatches: those of a pipeline; 0 without one.
        replicas: how many train on their own.
        every: after how many steps these meet.
    """

    mesh: str
    strategy: str
    microbatches: int = 0
    replicas: int = 1
    every: int = 1

    @property
    def num_ranks(self) -> int:
        """Into how many parts the samples of a microbatch are cut."""
        sizes = dict(axis.split("=") for axis in self.mesh.split(","))
        return math.prod(int(n) for axis, n in sizes.items() if axis not in ("tp", "pp", "cp"))


@dataclasses.dataclass(frozen=True)
class Model:
    """A model.

    Args:
        source: defines `Net`, a module of no arguments.
        tokens: whether it takes tokens; else 8 features.
    """

    source: str
    tokens: bool = False


LAYOUTS: tuple[Layout, ...] = (
    Layout("dp=2", "ddp()"),
    Layout("dp=4", "ddp(per='microbatch')"),
    Layout("dp=4", "ddp(bucket_capacity=100)"),
    Layout("dp=2", "ddp(sync='overlapped')"),
    Layout("dp=2", "ddp(reduce_dtype='bfloat16')"),
    Layout("dp=4", "zero(1, min_elements=8)"),
    Layout("dp=2", "zero(2, min_elements=8)"),
    Layout("dp=4", "zero(3, min_elements=8)"),
    Layout("fsdp=4", "fsdp(min_elements=8)"),
    Layout("fsdp=2", "fsdp(min_elements=8, reduction=Reduction(manual=True))"),
    Layout("fsdp=4", "fsdp(min_elements=8, reduction=Reduction(per='step'))"),
    Layout("fsdp=2", "fsdp(min_elements=8, cpu_offload='params')"),
    Layout("dp=2,fsdp=2", "fsdp('hybrid_shard', ('dp', 'fsdp'), min_elements=8)"),
    Layout("dp=2,fsdp=2", "compose(ddp(), fsdp(min_elements=8))"),
    Layout("dp=2,fsdp=2", "compose(zero(1, min_elements=8), fsdp(min_elements=8))"),
    Layout("tp=2", "tensor_parallel(PLAN)"),
    Layout("dp=2,tp=2", "compose(ddp(), tensor_parallel(PLAN))"),
    Layout("dp=2,tp=2", "compose(ddp(bucket_capacity=100), tensor_parallel(PLAN))"),
    Layout("tp=2,dp=2", "compose(zero(2, min_elements=8), tensor_parallel(PLAN))"),
    Layout("fsdp=2,tp=2", "compose(fsdp(min_elements=8), tensor_parallel(PLAN))"),
    Layout("dp=2,cp=2", "compose(ddp(), context_parallel('ulysses'))"),
    Layout("dp=2,cp=2", "compose(ddp(), context_parallel('ring'))"),
    Layout("pp=2", "pipelined(2, 2)", 2),
    Layout("pp=2", "pipelined(2, 4, 'gpipe')", 4),
    Layout("pp=2", "pipelined(2, 4, 'zero_bubble_h1')", 4),
    Layout("pp=2", "pipelined(2, 4, backward='residuals')", 4),
    Layout("pp=2", "pipelined(2, 2, 'interleaved_1f1b', chunks=2)", 2),
    Layout("pp=2,dp=2", "compose(pipelined(2, 2), ddp())", 2),
    Layout("pp=2,dp=2", "compose(pipelined(2, 2), zero(1, min_elements=8))", 2),
    Layout("pp=2,fsdp=2", "compose(pipelined(2, 4), fsdp(min_elements=8))", 4),
    Layout("pp=2,tp=2", "compose(pipelined(2, 2), tensor_parallel(PLAN))", 2),
    Layout("pp=2,dp=2,tp=2", "compose(pipelined(2, 2), ddp(), tensor_parallel(PLAN))", 2),
    Layout("ep=4", "expert_parallel('ring')"),
    Layout("dp=2,ep=2", "compose(ddp(), expert_parallel('all_to_all'))"),
    Layout("fsdp=2,ep=2", "compose(fsdp(min_elements=8), expert_parallel())"),
    Layout("pp=2,ep=2", "compose(pipelined(2, 4, 'gpipe'), expert_parallel('ring'))", 4),
    Layout("pp=2,ep=2", "compose(pipelined(2, 4, '1f1b'), expert_parallel('all_to_all'))", 4),
    Layout("pp=2,dp=2,ep=2", "compose(pipelined(2, 2), ddp(), expert_parallel())", 2),
    Layout(
        "pp=2,fsdp=2,ep=2",
        "compose(pipelined(2, 4, 'zero_bubble_v'), fsdp(min_elements=8), expert_parallel())",
        4,
    ),
    Layout(
        "pp=2,ep=2,tp=2", "compose(pipelined(2, 2), expert_parallel(), tensor_parallel(PLAN))", 2
    ),
    Layout("nodes=2", "diloco(every=1)", 0, 2, 1),
    Layout("nodes=2,dp=2", "compose(diloco(every=2), ddp())", 0, 2, 2),
    Layout("nodes=2,fsdp=2", "compose(diloco(every=2), fsdp(min_elements=8))", 0, 2, 2),
    Layout("nodes=2,dp=2", "compose(diloco(every=1), zero(1, min_elements=8))", 0, 2, 1),
    Layout("nodes=2,tp=2", "compose(diloco(every=2), tensor_parallel(PLAN))", 0, 2, 2),
    # Counts of devices that divide no dim of the models.
    Layout("dp=1", "ddp()"),
    Layout("fsdp=1", "fsdp(min_elements=8)"),
    Layout("dp=3", "ddp()"),
    Layout("dp=5", "ddp(per='microbatch')"),
    Layout("dp=7", "zero(1, min_elements=8)"),
    Layout("dp=5", "zero(2, min_elements=8)"),
    Layout("dp=6", "zero(3, min_elements=8)"),
    Layout("fsdp=3", "fsdp(min_elements=8)"),
    Layout("fsdp=5", "fsdp(min_elements=8)"),
    Layout("fsdp=7", "fsdp(min_elements=8)"),
    Layout("fsdp=8", "fsdp(min_elements=8)"),
    Layout("fsdp=6", "fsdp(min_elements=8, reduction=Reduction(manual=True))"),
    Layout("fsdp=5", "fsdp(min_elements=8, reduction=Reduction(per='step'))"),
    Layout("fsdp=3", "fsdp(min_elements=8, cpu_offload='params')"),
    Layout("fsdp=5", "fsdp(min_elements=8, cpu_offload='full')"),
    Layout("dp=2,fsdp=3", "fsdp('hybrid_shard', ('dp', 'fsdp'), min_elements=8)"),
    Layout("dp=3,fsdp=2", "compose(zero(1, min_elements=8), fsdp(min_elements=8))"),
    Layout("fsdp=3,tp=2", "compose(fsdp(min_elements=8), tensor_parallel(PLAN))"),
    Layout("dp=3,tp=2", "compose(zero(1, min_elements=8), tensor_parallel(PLAN))"),
    Layout("fsdp=3,cp=2", "compose(fsdp(min_elements=8), context_parallel('ring'))"),
    Layout("cp=4", "context_parallel('ring')"),
    Layout("cp=4", "context_parallel('ulysses')"),
    Layout("pp=2,dp=3", "compose(pipelined(2, 2), ddp())", 2),
    Layout("pp=2,fsdp=3", "compose(pipelined(2, 2), fsdp(min_elements=8))", 2),
    Layout("pp=3", "pipelined(3, 3)", 3),
    Layout("fsdp=3,ep=2", "compose(fsdp(min_elements=8), expert_parallel())"),
    Layout("nodes=3", "diloco(every=1)", 0, 3, 1),
    Layout("nodes=2,fsdp=3", "compose(diloco(every=2), fsdp(min_elements=8))", 0, 2, 2),
)

CONTEXTS: MappingProxyType[str, str] = MappingProxyType(
    {
        "none": "contextlib.nullcontext()",
        "explicit": "jax.set_mesh(mesh_of(jax.sharding.AxisType.Explicit))",
        "auto": "jax.set_mesh(mesh_of(jax.sharding.AxisType.Auto))",
        "with mesh": "legacy(mesh_of(jax.sharding.AxisType.Auto))",
    }
)
"""The contexts of a program around ours, and the source that opens each."""

CONTEXT_SHAPES = ((1, 1), (2, 2), (3, 1), (4, 2))
"""Sizes of the axes `data` and `model` of a mesh in context."""

_BLOCKS = """
class Block(nnx.Module):
    def __init__(self, rngs):
        {layers}

    def __call__(self, x):
        return x + {call}


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.enter = nnx.Linear(8, 16, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(4))
        self.leave = nnx.Linear(16, 4, rngs=rngs)
        {more}

    def __call__(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        {then}
        return self.leave(x)
"""
_UP_DOWN = "self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)"


def _blocks(layers: str, call: str, more: str = "pass", then: str = "pass") -> str:
    return _BLOCKS.format(layers=layers, call=call, more=more, then=then)


_ATTENTION = """
class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        # Softmax is blind to a key's bias: its gradient is rounding alone, and what divides a
        # gradient by its size (adafactor, lamb) would take steps of the full size from that.
        self.attention = nnx.MultiHeadAttention(
            4, 16, rngs=rngs, decode=False, use_bias=False
        )
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(x)))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.embed = nnx.Embed(16, 16, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range({count}))
        {more}

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return {leave}
"""

_STACKED = """
class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.enter = nnx.Linear(8, 16, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: Block(rngs))(nnx.Rngs(1).split(4))
        self.leave = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.leave(run(self.enter(x), self.blocks))
"""

_BRIDGED = """
import flax.linen as nn


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.LayerNorm()(x + nn.Dense(8)(nn.gelu(nn.Dense(16)(x))))
        return nn.Dense(4)(x)


def Net():
    return nnx.bridge.ToNNX(Inner(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 8)))
"""

_EXPERTS = """
from axon_dist.models import ExpertConfig, Transformer, TransformerConfig


def Net():
    config = TransformerConfig(
        vocab_size=16, width=16, num_layers=4, num_heads=2, max_length=8, {more}
        experts=ExpertConfig(count=4, width=16, per_token=2, shared=1, bias_rate=0.01),
    )
    return Transformer(config, rngs=nnx.Rngs(0, dropout=1))
"""

_CONVOLUTION = """
class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List(
            nnx.Conv(4, 4, (3, 3), feature_group_count=groups, rngs=rngs) for groups in (1, 4)
        )
        self.norm = nnx.GroupNorm(4, num_groups=2, rngs=rngs)
        self.leave = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = jnp.outer(x.reshape(-1), jnp.linspace(-1, 1, 8)).reshape(len(x), 4, 4, 4)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.leave(self.norm(x).mean((1, 2)))
"""

# Equal blocks that compute other things: by the type of a flag, by a global, by a context variable,
# by an object that is changed between their calls.
_PYTHON = """
import contextvars
import types

DEPTHS, REFERENCE = [], contextvars.ContextVar("reference", default=False)
CONFIG = types.SimpleNamespace(scale=1)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x, flag):
        scale = {{bool: 0.5, int: 0.25}}.get(type(flag), 1.0) + 0.1 * (len(DEPTHS) % 5)
        scale = scale * CONFIG.scale * (0.3 if REFERENCE.get() else 1.0)
        return x + scale * self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.enter, self.leave = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(4))

    def __call__(self, x):
        DEPTHS.clear()
        REFERENCE.set(False)
        CONFIG.scale = 1
        x = self.enter(x)
        for i, block in enumerate(self.blocks):
            flag = {flag}
            x = block(x, flag)
        return self.leave(x)
"""

# Constraints and annotations name the axes of the mesh that the author of a model has.
_CONSTRAINED = """
class Block(nnx.Module):
    def __init__(self, rngs):
        kernel = nnx.initializers.lecun_normal()
        up = {up}
        self.up, self.down = nnx.Linear(16, 32, kernel_init=up, rngs=rngs), nnx.Linear(
            32, 16, rngs=rngs
        )

    def __call__(self, x):
        hidden = {hidden}
        return constrain(x + self.down(jnp.tanh(hidden)), P("data", None))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.enter, self.leave = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(4))

    def __call__(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)
"""

# Attention that a model writes itself, as context parallelism may find and replace it.
_OWN_ATTENTION = """
class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.query, self.key, self.value, self.out = (
            nnx.Linear(16, 16, use_bias=False, rngs=rngs) for _ in range(4)
        )

    def attend(self, query, key, value):
        distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * {scale}
        scores = {scores}
        weights = jax.nn.softmax(jnp.where({mask}, scores, -1e9), -1)
        return jnp.einsum("bhts,bshd->bthd", weights, value)

    def __call__(self, x):
        y = self.norm(x)
        heads = (f(y).reshape(*x.shape[:2], 4, 4) for f in (self.query, self.key, self.value))
        return x + self.out(self.attend(*heads).reshape(x.shape))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, 16, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(2))
        self.leave = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)
"""
_CAUSAL = "distance >= 0"


def _own_attention(mask: str = _CAUSAL, scale: str = "0.5", scores: str = "scores") -> Model:
    return Model(_OWN_ATTENTION.format(mask=mask, scale=scale, scores=scores), tokens=True)


STATEFUL = frozenset(
    ("batch norm", "batch norms of blocks", "running mean", "counter", "experts",
     "experts, stacked")
)  # fmt: skip
"""Models of which a whole batch and its microbatches are two runs."""

DRAWING = frozenset(("keys of samples",))
"""Models that draw in evaluation, too."""

VALIDATED = (((8,), (3,)), ((5,), (8, 2), (1,)), ((7, 1),), ((16, 3), (4,)))
"""Sizes of the batches of several validation sets."""

AS_WHOLE = frozenset(("dropout", "keys of samples", "running mean"))
"""Models that draw and average as for the whole batch, however it is cut into microbatches."""

MODELS: MappingProxyType[str, Model] = MappingProxyType(
    {
        "blocks": Model(_blocks(_UP_DOWN, "self.down(jnp.tanh(self.up(x)))")),
        "norms": Model(
            _blocks(
                f"self.norm = nnx.LayerNorm(16, rngs=rngs)\n        {_UP_DOWN}",
                "self.down(nnx.gelu(self.up(self.norm(x))))",
            )
        ),
        "dropout": Model(
            _blocks(
                f"self.drop = nnx.Dropout(0.3, rngs=rngs)\n        {_UP_DOWN}",
                "self.drop(self.down(jnp.tanh(self.up(x))))",
            ),
        ),
        "keys of samples": Model(
            _blocks(
                f"self.rngs = rngs.dropout.fork()\n        {_UP_DOWN}",
                "jax.vmap(lambda key, y: y * jax.random.bernoulli(key, 0.7))("
                "jax.random.split(self.rngs(), len(x)), self.down(jnp.tanh(self.up(x))))",
            ),
        ),
        "batch norm": Model(
            _blocks(
                _UP_DOWN,
                "self.down(jnp.tanh(self.up(x)))",
                "self.norm = nnx.BatchNorm(16, rngs=rngs)",
                # The tanh: a constant before a BatchNorm has no gradient but rounding.
                "x = self.norm(jnp.tanh(x))",
            )
        ),
        "batch norms of blocks": Model(
            _blocks(
                f"self.norm = nnx.BatchNorm(32, rngs=rngs)\n        {_UP_DOWN}",
                "self.down(self.norm(jnp.tanh(self.up(x))))",
            )
        ),
        "running mean": Model(
            _blocks(
                _UP_DOWN,
                "self.down(jnp.tanh(self.up(x)))",
                "self.seen = nnx.Variable(jnp.zeros(16))",
                "self.seen[...] = 0.9 * self.seen[...] + 0.1 * x.mean(0)",
            )
        ),
        "counter": Model(
            _blocks(
                _UP_DOWN,
                "self.down(jnp.tanh(self.up(x)))",
                "self.calls = nnx.Variable(jnp.zeros((), jnp.int32))",
                "self.calls[...] += 1",
            )
        ),
        "attention": Model(
            _ATTENTION.format(
                count=2, more="self.leave = nnx.Linear(16, 16, rngs=rngs)", leave="self.leave(x)"
            ),
            tokens=True,
        ),
        "shared table": Model(
            _ATTENTION.format(count=4, more="pass", leave="self.embed.attend(x)"), tokens=True
        ),
        "stacked": Model(_STACKED),
        "experts": Model(_EXPERTS.format(more=""), tokens=True),
        "experts, stacked": Model(_EXPERTS.format(more="scan_layers=True,"), tokens=True),
        "bridged": Model(_BRIDGED),
        "convolutions": Model(_CONVOLUTION),
        "flags that are equal": Model(_PYTHON.format(flag="(0, False, 1, True)[i]")),
        "a global": Model(_PYTHON.format(flag="DEPTHS.append(i) or len(DEPTHS) % 5")),
        "a context variable": Model(_PYTHON.format(flag="REFERENCE.set(i > 1) and i")),
        "an object that changes": Model(_PYTHON.format(flag="setattr(CONFIG, 'scale', 1 + i)")),
        "constraints": Model(
            _CONSTRAINED.format(up="kernel", hidden="constrain(self.up(x), P('data', 'model'))")
        ),
        "annotated": Model(
            _CONSTRAINED.format(
                up="nnx.with_partitioning(kernel, (None, 'model'))", hidden="self.up(x)"
            )
        ),
        "stated results": Model(
            _CONSTRAINED.format(
                up="kernel",
                hidden="product('bi,ij->bj', x, self.up.kernel[...], P('data', None))",
            )
        ),
        "own attention": _own_attention(),
        "own attention, window": _own_attention("(distance >= 0) & (distance < 3)"),
        "own attention, both ways": _own_attention("distance > -99"),
        "own attention, near": _own_attention("jnp.abs(distance) < 2"),
        "own attention, scale": _own_attention(scale="0.3"),
        "own attention, cap": _own_attention(scores="2 * jnp.tanh(scores / 2)"),
        "own attention, slopes": _own_attention(scores="scores - 0.1 * distance"),
    }
)
"""Models by name."""

OWN_ATTENTION = tuple(name for name in MODELS if "attention" in name)

LOSSES: MappingProxyType[str, tuple[str, str]] = MappingProxyType(
    {
        "mean": ("mean", "jnp.mean(each)"),
        "sum": ("sum", "0.05 * jnp.sum(each)"),
        "weighted": (
            "weighted",
            "Weighted(jnp.sum(each * batch['weight']), jnp.sum(batch['weight']))",
        ),
        "mean with metrics": ("mean", "jnp.mean(each), {'largest': jnp.mean(each**2)}"),
        "mean and decay": (
            "mean",
            "jnp.mean(each) + 1e-2 * sum(jnp.sum(w**2) for w in jax.tree.leaves("
            "nnx.state(model, nnx.Param)))",
        ),
        "mean with a perplexity": (
            "whole",
            "jnp.mean(each), {'perplexity': jnp.exp(jnp.mean(each))}",
        ),
        "mean with a maximum": ("whole", "jnp.mean(each), {'largest': jnp.max(each)}"),
        "root of the mean": ("whole", "jnp.sqrt(jnp.mean(each) + 1e-3)"),
        "masked mean with a floor": (
            "whole",
            "jnp.sum(each * batch['weight']) / jnp.maximum(jnp.sum(batch['weight']), 1.0)",
        ),
        "contrast": ("whole", "jnp.mean(each) + 0.1 * jnp.mean((each[:, None] - each[None]) ** 2)"),
        "balance": ("whole", "jnp.mean(each) + 0.1 * jnp.var(each)"),
        "times log of the batch": ("whole", "jnp.mean(each) * jnp.log(1.0 + len(each))"),
        "over at most eight": ("whole", "jnp.sum(each) / min(len(each), 8)"),
        "every second sample": ("whole", "2 * jnp.sum(each[1::2]) / len(each)"),
        "interleaved pairs": ("whole", "jnp.mean(nnx.softplus(each[1::2] - each[:-1:2]))"),
        "one by one": ("whole", "sum(each[i] for i in range(len(each))) / len(each)"),
    }
)

OPTIMIZERS: MappingProxyType[str, str] = MappingProxyType(
    {
        "sgd": "optax.sgd(0.05)",
        "momentum": "optax.sgd(optax.linear_schedule(0.1, 0.01, 4), momentum=0.9)",
        "adamw": "optax.adamw(1e-2, eps=1e-3)",
        "adamw, matrices": (
            "optax.adamw(1e-2, eps=1e-3, weight_decay=0.1, "
            "mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))"
        ),
        "clipped": "optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3))",
        "lamb": "optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2, eps=1e-3))",
        "adafactor": "optax.adafactor(1e-2, min_dim_size_to_factor=4)",
        "multi steps": "optax.MultiSteps(optax.sgd(0.05, momentum=0.9), 2)",
        "if finite": "optax.apply_if_finite(optax.sgd(0.05), 2)",
    }
)

OPTIONS: MappingProxyType[str, Sequence[str]] = MappingProxyType(
    {
        "precision": ("", "", "", "precision='bf16'"),
        "remat": ("", "", "remat=ActivationCheckpointing()", "remat=ActivationCheckpointing(2)"),
        "clip_norm": ("", "", "clip_norm=0.3"),
        "nonfinite": ("", "", "nonfinite='skip'"),
        "metrics": ("", "metrics=('loss', 'grad_norm')"),
    }
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One choice of everything.

    Args:
        layout: mesh and strategy.
        model: a key of `MODELS`.
        loss: a key of `LOSSES`.
        optimizer: a key of `OPTIMIZERS`.
        accumulate: K; a pipeline's own where there is one.
        options: further arguments of `build_train_step`.
        factory: whether the model is made by the step.
        samples: of a batch.
        context: a key of `CONTEXTS`, in which the program calls the library.
        context_shape: of the mesh in context.
        validated: sizes of the batches of each validation set; none is validated where empty.
    """

    layout: Layout
    model: str
    loss: str
    optimizer: str
    accumulate: int
    options: tuple[str, ...]
    factory: bool
    samples: int = SAMPLES
    context: str = "none"
    context_shape: tuple[int, int] = (1, 1)
    validated: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def draw(cls, draw: random.Random) -> Cell:
        """A cell by chance; each column by itself."""
        layout = draw.choice(LAYOUTS)
        options = tuple(filter(None, (draw.choice(each) for each in OPTIONS.values())))
        # Strategies that split sequences split only those of attention.
        is_split = "cp=" in layout.mesh and draw.random() < 0.7
        model = draw.choice(sorted(OWN_ATTENTION if is_split else MODELS))
        loss = draw.choice(sorted(LOSSES))
        optimizer = draw.choice(sorted(OPTIMIZERS))
        count = layout.microbatches or draw.choice((1, 1, 2, 4))
        least = count * layout.num_ranks
        factory, samples = draw.random() < 0.5, least * max(1, SAMPLES // least)
        if LOSSES[loss][0] == "whole" and model in STATEFUL:
            model = "blocks"
        if draw.random() < 0.4:
            # One sample for each rank and microbatch.
            samples = least
        elif loss == "weighted" and model not in STATEFUL and layout.replicas == 1:
            options, samples = (*options, "pad='weight'"), SAMPLES - 3
        context = draw.choice(sorted(CONTEXTS))
        shape = (1, 1) if context == "none" else draw.choice(CONTEXT_SHAPES)
        validated = draw.choice(VALIDATED) if draw.random() < 0.3 else ()
        if model in DRAWING or layout.replicas > 1 or LOSSES[loss][0] == "sum":
            validated = ()
        return cls(
            layout, model, loss, optimizer, count, options, factory, samples, context, shape,
            validated,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The choices in a line."""
        made = ["factory"] if self.factory else []
        if self.context != "none":
            made.append(f"{self.context} {'x'.join(map(str, self.context_shape))}")
        made += [f"validated {list(map(list, self.validated))}"] if self.validated else []
        more = (f"K={self.accumulate}", f"B={self.samples}", *self.options, *made)
        return " | ".join(
            (self.layout.mesh, self.layout.strategy, self.model, self.loss, self.optimizer, *more)
        )

    @property
    def is_whole(self) -> bool:
        """Whether one device runs the whole batch: what a filled-up one has to equal as well."""
        is_padded = "pad='weight'" in self.options
        return is_padded or LOSSES[self.loss][0] == "whole" or self.model in AS_WHOLE

    @property
    def is_low(self) -> bool:
        """Whether something is computed or sent in bfloat16, so only losses can be compared."""
        return any("bf" in text for text in (*self.options, self.layout.strategy))

    @property
    def source(self) -> str:
        """The program."""
        model, (reduce, loss) = MODELS[self.model], LOSSES[self.loss]
        accumulate = [] if self.layout.microbatches else [f"accumulate={self.accumulate}"]
        return _PROGRAM.format(
            name=self.name,
            model=model.source.strip(),
            each=_TOKENS if model.tokens else _FEATURES,
            loss=loss,
            batch=_TOKEN_BATCH if model.tokens else _FEATURE_BATCH,
            optimizer=OPTIMIZERS[self.optimizer],
            mesh=self.layout.mesh,
            size=math.prod(int(axis.split("=")[1]) for axis in self.layout.mesh.split(",")),
            strategy=self.layout.strategy,
            options="".join(f", {text}" for text in (*accumulate, *self.options)),
            make="Net" if self.factory else "Net()",
            reduce=reduce,
            clip=next((o.split("=")[1] for o in self.options if o.startswith("clip")), None),
            count=1 if self.is_whole else self.accumulate,
            accumulate=self.accumulate,
            replicas=self.layout.replicas,
            every=self.layout.every,
            steps=STEPS,
            samples=self.samples,
            tolerance=_LOW if self.is_low else _TOLERANCE,
            changes=_LOW_CHANGES if self.is_low else _CHANGES,
            times=4 if self.is_low else 10,
            low=self.is_low,
            context=CONTEXTS[self.context],
            context_shape=self.context_shape,
            validated=self.validated,
            whole=self.accumulate == 1 or self.is_whole,
        )


_CHANGES = "[dict(nudge=seed) for seed in range(12)]"
"""One draw says little of a batch norm over two samples, of which three in twelve move a state by
a quarter and the others by a hundredth: as many as it takes."""

_LOW_CHANGES = "[dict(dtype=jnp.bfloat16, nudge=seed) for seed in range(4)]"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a cell.

    Args:
        kind: `"equal"`, `"refused"` by the build, `"late"` when it was refused after it, `"wrong"`
            or `"foreign"` for an exception of somebody else.
        text: the sentence, or the traceback.
    """

    kind: str
    text: str = ""


def run(cell: Cell) -> Outcome:
    """Runs the program of a cell in this process."""
    names: dict[str, Any] = {"__name__": "cell"}
    built = False
    try:
        exec(compile(cell.source, f"<cell {cell.name}>", "exec"), names)
        step = names["build"]()
        built = True
        names["compare"](step)
    except AxonDistError as error:
        return Outcome("late" if built else "refused", f"{type(error).__name__}: {error}")
    except AssertionError as error:
        return Outcome("wrong", str(error))
    except Exception:
        return Outcome("foreign", traceback.format_exc())
    return Outcome("equal")


def counts(outcomes: Mapping[Cell, Outcome]) -> dict[str, int]:
    """How many cells ended how."""
    kinds = [outcome.kind for outcome in outcomes.values()]
    return {kind: kinds.count(kind) for kind in ("equal", "refused", "late", "wrong", "foreign")}


_FEATURES = "jnp.sum(jnp.tanh(model(batch['x']) - batch['y']) ** 2, -1)"
_TOKENS = (
    "optax.softmax_cross_entropy_with_integer_labels("
    "model(batch['x']).astype(jnp.float32), batch['y']).mean(-1)"
)
_FEATURE_BATCH = "x=draw.normal(size=(samples, 8)), y=draw.normal(size=(samples, 4))"
_TOKEN_BATCH = "x=draw.integers(0, 16, (samples, 8)), y=draw.integers(0, 16, (samples, 8))"

_PROGRAM = '''"""{name}"""
import contextlib
import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from axon_dist import (
    ActivationCheckpointing, Reduction, Weighted, World, build_train_step, compose, ddp, diloco,
    fsdp, zero,
)
from axon_dist.parallel import (
    context_parallel, expert_parallel, pipelined, suggest_plan, tensor_parallel,
)

World.emulate(8)  # Before a mesh in context asks for devices.
IS_PLAIN = [False]
nnx.use_eager_sharding(False)


def constrain(x, spec):
    return x if IS_PLAIN[0] else jax.lax.with_sharding_constraint(x, spec)


def product(form, x, y, spec):
    return jnp.einsum(form, x, y, **({{}} if IS_PLAIN[0] else dict(out_sharding=spec)))


@contextlib.contextmanager
def plain():
    """On one device there is no mesh that a constraint could name."""
    IS_PLAIN[0] = True
    try:
        yield
    finally:
        IS_PLAIN[0] = False


def mesh_of(axis_type):
    shape = {context_shape}
    return jax.make_mesh(
        shape, ("data", "model"), axis_types=(axis_type,) * 2,
        devices=jax.devices()[: math.prod(shape)],
    )


@contextlib.contextmanager
def legacy(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


def context():
    return {context}


{model}


def loss_fn(model, batch):
    each = {each}
    return {loss}


def batch_of(number, samples={samples}):
    draw = np.random.default_rng(number)
    made = dict({batch}, weight=draw.integers(0, 3, samples) + (np.arange(samples) % 4 == 0))
    small = lambda x: x.astype(np.float32 if x.dtype == np.float64 else np.int32)
    made["weight"] = made["weight"].astype(np.float64)
    return {{k: small(v) for k, v in made.items()}}


def optimizer():
    return {optimizer}


def build():
    with context():
        return built()


def built():
    size = {size}
    world = World.emulate(size, "{mesh}")
    PLAN = suggest_plan(Net(), batch_of(0)["x"]) if "PLAN" in """{strategy}""" else None
    strategy = {strategy}
    return build_train_step(
        {make}, optimizer(), loss_fn, strategy, world, batch=batch_of(0){options}
    )


@functools.cache
def programs(clip, dtype):
    """The program of one device, compiled once for runs that only differ in rounding."""
    graphdef = nnx.split(Net(), nnx.Param, ...)[0]
    transform = optax.with_extra_args_support(optimizer())

    @jax.jit
    def part(params, rest, batch):
        def total(params):
            model = nnx.merge(graphdef, narrow(params, dtype), rest, copy=True)
            with plain():
                loss = loss_fn(model, narrow(batch, dtype))
            loss, more = loss if isinstance(loss, tuple) else (loss, {{}})
            loss = loss if isinstance(loss, Weighted) else Weighted(loss, 1.0)
            after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
            return loss.total, (loss.weight, after, more)

        return jax.value_and_grad(total, has_aux=True)(params)

    @jax.jit
    def update(grads, state, params, loss):
        if clip is not None:
            norm = optax.tree.norm(grads)
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / (norm + 1e-6)), grads)
        updates, state = transform.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    return transform, part, update


def one_device(count={count}, clip={clip}, reduce="{reduce}", nudge=None, dtype=None):
    _, params, rest = nnx.split(Net(), nnx.Param, ...)
    params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
    # At each step, for each rounds anew; each element by itself, for a batch norm does not see a
    # factor of all.
    moved = np.random.default_rng(nudge)
    unit = (2**-21 if dtype is None else 2**-9) * (nudge is not None)
    rounded = lambda p: p * np.float32(1 + unit * moved.uniform(-1, 1, p.shape))
    transform, part, update = programs(clip, dtype)
    state = transform.init(params)

    outer, whole = optax.sgd(0.7, momentum=0.9, nesterov=True), {replicas}
    agreed, outer_state = params, outer.init(params)
    own = [(params, state, fold(rest, replica)) for replica in range(whole)]
    for number in range({steps}):
        losses = []
        for replica, (params, state, rest) in enumerate(own):
            totals, weights, grads = 0.0, 0.0, None
            batch = {{k: of_replica(v, replica) for k, v in batch_of(number).items()}}
            for index in range(count):
                piece = {{k: np.split(v, count)[index] for k, v in batch.items()}}
                near = jax.tree.map(rounded, params)
                (total, (weight, rest, more)), grad = part(near, rest, piece)
                totals, weights = totals + total, weights + weight
                grads = grad if grads is None else jax.tree.map(jnp.add, grads, grad)
            # The samples of a replica may all weigh nothing: a loss of 0.
            divisor = 1.0 if reduce == "sum" or weights == 0 else weights
            grads = jax.tree.map(lambda g: g / divisor, grads)
            params, state = update(grads, state, params, totals / divisor)
            own[replica] = params, state, rest
            losses.append(totals / divisor)
        if whole == 1:
            agreed = params
        elif (number + 1) % {every} == 0:
            went = jax.tree.map(lambda a, *p: a - sum(p) / whole, agreed, *(p for p, *_ in own))
            updates, outer_state = outer.update(went, outer_state, agreed)
            agreed = optax.apply_updates(agreed, updates)
            own = [(agreed, *others) for _, *others in own]
        is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
        mean = lambda *x: sum(x) / whole if is_float(x[0]) else x[0]
        rest = jax.tree.map(mean, *(rest for *_, rest in own))
        # The metric of one part is not the metric of the whole.
        yield sum(losses) / whole, agreed, rest, more if count * whole == 1 else {{}}


def of_replica(x, replica):
    if {replicas} == 1:
        return x
    # Microbatch by microbatch, each replica has its part.
    return np.concatenate(np.split(x, {accumulate} * {replicas})[replica :: {replicas}])


def narrow(tree, dtype):
    is_wide = lambda x: dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if is_wide(x) else x, tree)


def fold(rest, replica):
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    one = lambda x: jax.random.fold_in(x, replica) if replica and is_key(x) else x
    return jax.tree.map(one, rest)


def compare(step):
    wanted, losses = list(one_device()), []
    with context():
        state = step.init()
        for number, (*_, more) in enumerate(wanted):
            state, metrics = step(state, batch_of(number))
            losses.append((metrics["loss"], {{name: metrics[name] for name in more}}))
        model, validated = step.merge(state), validation(step, state)
    compare_validation(validated, model)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    mine = losses, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
    off = distances(mine, wanted)
    if any(distance > {tolerance} for distance in off.values()):
        # What moves as far on one device is rounding's: by units in the last place of the
        # parameters, in the narrow dtype where the step computes in one.
        known = dict.fromkeys(off, 0.0)
        for change in {changes}:
            run = list(one_device(**change))
            moved = distances(([(loss, more) for loss, *_, more in run], *run[-1][1:3]), wanted)
            known |= {{name: max(known[name], far) for name, far in moved.items() if far < np.inf}}
            limits = {{name: max({tolerance}, {times} * known[name]) for name in off}}
            wrong = {{name: far for name, far in off.items() if far > limits[name]}}
            if not wrong:
                break
        assert not wrong, f"off by {{wrong}}, where rounding moves {{known}}"


VALIDATED = {validated}


def sets():
    """Batches of every validation set, each of its own size."""
    return [
        [batch_of(100 + 10 * i + j, size) for j, size in enumerate(sizes)]
        for i, sizes in enumerate(VALIDATED)
    ]


def validation(step, state):
    """The loss of each set as a `Trainer` sums it up."""
    means = []
    for batches in sets():
        sums = [step.evaluate_sums(state, batch)["loss"] for batch in batches]
        means.append(sum(float(s.total) for s in sums) / sum(float(s.weight) for s in sums))
    return means


def compare_validation(means, model):
    """Compares the losses of the sets with those of the trained model on one device."""
    graphdef, values = nnx.split(model)
    values = jax.tree.map(jnp.asarray, jax.device_get(values))
    for got, batches in zip(means, sets()):
        total = weight = 0.0
        for batch in batches:
            copied = nnx.merge(graphdef, values, copy=True)
            copied.eval()
            with plain():
                loss = loss_fn(copied, batch)
            loss = loss[0] if isinstance(loss, tuple) else loss
            size = len(batch["y"])
            loss = loss if isinstance(loss, Weighted) else Weighted(loss * size, size)
            total, weight = total + float(loss.total), weight + float(loss.weight)
        want = total / weight
        off = distance(got, want)
        sizes = [len(batch["y"]) for batch in batches]
        assert off <= {tolerance}, f"validation of {{sizes}}: {{got}} for {{want}}"


def distances(mine, wanted):
    losses, params, rest = mine
    pairs = {{}}
    for n, ((loss, more), want) in enumerate(zip(losses, wanted)):
        pairs |= {{f"loss of step {{n}}": (loss, want[0])}}
        pairs |= {{f"{{name}} of step {{n}}": (more[name], want[3][name]) for name in more}}
    for what, got, want in (("parameters", params, wanted[-1][1]), ("state", rest, wanted[-1][2])):
        got, want = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, want))
        assert [path for path, _ in got] == [path for path, _ in want], f"{{what}}: other leaves"
        is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
        pairs |= {{
            what + jax.tree_util.keystr(path): (x, y)
            for (path, x), (_, y) in zip(got, want)
            # Streams count one draw for a batch, and one device that cuts it one for each part.
            if not {low} and not is_key(y) and (is_float(y) or {whole})
        }}
    return {{name: distance(*pair) for name, pair in pairs.items()}}


def distance(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    # The mean of no pairs, as one sample has, is no number on one device either.
    both = np.isnan(got) & np.isnan(want)
    got, want = np.where(both, 0, got), np.where(both, 0, want)
    found = np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-2)
    return found if np.isfinite(found) else np.inf


if __name__ == "__main__":
    compare(build())
    print("equal to one device")
'''
