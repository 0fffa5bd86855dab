"""How losses depend on their samples: a table of losses with the expected results."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive

from axon_dist.core.weighted import per_sample
from axon_dist.ir import factors
from axon_dist.ops.linear_loss import linear_cross_entropy
from axon_dist.separability import interpret as samples
from axon_dist.separability.abstract_values import Dependence, Kind, Value, dependence_of, nonlinear
from axon_dist.separability.interpret import follow_samples
from axon_dist.separability.operation import Operation

KEY = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
PARAMS = {
    "w": jax.ShapeDtypeStruct((6, 3), jnp.float32),
    "table": jax.ShapeDtypeStruct((11, 6), jnp.float32),
    "kernel": jax.ShapeDtypeStruct((3, 3, 2, 4), jnp.float32),
    "key": KEY,
}


def batch_of(count):
    """Shapes of a batch with something of every sort."""
    made = {
        "x": ((6,), jnp.float32),
        "y": ((3,), jnp.float32),
        "half": ((6,), jnp.bfloat16),
        "label": ((), jnp.int32),
        "mask": ((), jnp.float32),
        "tokens": ((5,), jnp.int32),
        "image": ((8, 8, 2), jnp.float32),
        "pair": ((2, 6), jnp.float32),
    }
    return {k: jax.ShapeDtypeStruct((count, *shape), dtype) for k, (shape, dtype) in made.items()}


def find(loss_fn, sizes=(4, 12)):
    """How a loss depends on the samples; it is (params, batch) -> total, weight and metrics."""
    names = []

    def run(params, batch):
        found = loss_fn(params, batch)
        (total, weight), metrics = found if isinstance(found, tuple) else ((found, 1.0), {})
        names[:] = sorted(metrics)
        return [jnp.asarray(x) for x in (total, weight, *(metrics[name] for name in names))]

    trace = lambda count: jax.make_jaxpr(run)(PARAMS, batch_of(count))
    values = follow_samples(trace, sizes, num_batch=8)
    one = follow_samples(lambda count: jax.make_jaxpr(lambda x: 1.0)(1.0), sizes, 0)[0]
    metrics = {name: (value, one) for name, value in zip(names, values[2:], strict=True)}
    return dependence_of(values[0], values[1], metrics, {}, num_parts=sizes[1] / sizes[0])


def weighted(total, weight, **metrics):
    """The return value of a loss that knows its weight."""
    return (total, weight), metrics


def error(p, b):
    """Each sample's."""
    return jnp.sum((b["x"] @ p["w"] - b["y"]) ** 2, -1)


def logits(p, b):
    """Each sample's scores."""
    return b["x"] @ p["w"]


def attention(p, b):
    """Positions of a sequence look at each other, samples do not."""
    h = p["table"][b["tokens"]]
    scores = jnp.einsum("btd,bsd->bts", h, h) / 6**0.5
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), scores, -jnp.inf)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), h)


def over_time(p, b):
    """A recurrence over positions."""
    h = p["table"][b["tokens"]]
    step = lambda c, x: (jnp.tanh(c + x), c)
    last, _ = jax.lax.scan(step, jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1))
    return last


def convolution(p, b):
    """An image classifier's layers."""
    h = jax.lax.conv_general_dilated(
        b["image"], p["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    pooled = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return pooled.reshape(len(h), -1)


def per_sample_keys(p, b):
    """Stochastic depth as JAX users write it."""
    keys = jax.random.split(p["key"], len(b["x"]))
    return jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(keys)


def with_backward(forward, backward):
    """A function of one array with a custom backward pass."""
    f = jax.custom_vjp(forward)
    f.defvjp(lambda x: (forward(x), x), lambda x, g: (backward(x, g),))
    return f


def biased(x, bias):
    """A kernel in bfloat16 that gives its second array, which all samples share, no gradient."""
    f = jax.custom_vjp(lambda x, bias: x + bias)
    f.defvjp(lambda x, bias: (x + bias, None), lambda _, g: (g, None))
    return f(x.astype(jnp.bfloat16), bias.astype(jnp.bfloat16)).astype(jnp.float32)


def clipped_vjp(x):
    """The identity, whose gradient is divided by its norm over the batch."""
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))
    return f(x)


BANK = np.arange(16.0, dtype=np.float32)
"""A table with one entry for each place in a batch of up to 16 samples."""


def repeated(p, b):
    """Weights of features, repeated for every sample and flattened."""
    return jnp.broadcast_to(p["w"][:, 0], b["x"].shape).reshape(-1)


def in_reverse(p, b):
    """Each sample times the one with the number of the iteration, from the end."""
    y = error(p, b)
    return jnp.mean(jax.lax.scan(lambda i, r: (i + 1, r * y[i]), 0, y, reverse=True)[1])


SEPARABLE = {
    "mean": (lambda p, b: jnp.mean(error(p, b)), Dependence.MEAN),
    "mean over all dims": (lambda p, b: jnp.mean((logits(p, b) - b["y"]) ** 2), Dependence.MEAN),
    "mean by the size": (lambda p, b: error(p, b).sum() / len(b["x"]), Dependence.MEAN),
    "mean by a reciprocal": (lambda p, b: error(p, b).sum() * (1 / b["x"].size), Dependence.MEAN),
    "mean of means": (
        lambda p, b: jnp.mean(jnp.mean(b["pair"] @ p["w"], -1), 0).sum(),
        Dependence.MEAN,
    ),
    "sum": (lambda p, b: jnp.sum(error(p, b)), Dependence.SUM),
    "sum by dot": (lambda p, b: error(p, b) @ b["mask"], Dependence.SUM),
    "sum times a number": (lambda p, b: 0.5 * jnp.sum(error(p, b)) / 7.0, Dependence.SUM),
    "weighted": (
        lambda p, b: weighted((error(p, b) * b["mask"]).sum(), b["mask"].sum()),
        Dependence.WEIGHTED,
    ),
    "weighted by the size": (
        lambda p, b: weighted(error(p, b).sum(), float(len(b["x"]))),
        Dependence.WEIGHTED,
    ),
    "weighted by a number": (lambda p, b: weighted(error(p, b).sum(), 0.125), Dependence.SUM),
    "mean over the root of the size": (
        lambda p, b: error(p, b).sum() / len(b["x"]) ** 0.5,
        Dependence.SCALED,
    ),
    "by another size": (lambda p, b: error(p, b).sum() / (len(b["x"]) + 1), Dependence.SCALED),
    "times the logarithm of the size": (
        lambda p, b: jnp.mean(error(p, b)) * jnp.log(jnp.float32(len(b["x"]))),
        Dependence.SCALED,
    ),
    "divided by at most two": (
        lambda p, b: error(p, b).sum() / min(len(b["x"]), 2),
        Dependence.SUM,
    ),
    "cross entropy": (
        lambda p, b: optax.softmax_cross_entropy_with_integer_labels(
            logits(p, b), b["label"]
        ).mean(),
        Dependence.MEAN,
    ),
    "cross entropy by one-hot": (
        lambda p, b: optax.softmax_cross_entropy(
            logits(p, b), jax.nn.one_hot(b["label"], 3)
        ).mean(),
        Dependence.MEAN,
    ),
    "cross entropy by indexing": (
        lambda p, b: -jax.nn.log_softmax(logits(p, b))[jnp.arange(len(b["x"])), b["label"]].mean(),
        Dependence.MEAN,
    ),
    "targets by writing": (
        lambda p, b: jnp.mean(
            jnp.zeros((len(b["x"]), 3)).at[jnp.arange(len(b["x"])), b["label"]].set(1.0)
            * logits(p, b)
        ),
        Dependence.MEAN,
    ),
    "norm of each": (lambda p, b: jnp.linalg.norm(logits(p, b), axis=-1).mean(), Dependence.MEAN),
    "layer norm": (
        lambda p, b: jnp.mean(jax.nn.standardize(b["x"], axis=-1) @ p["w"]),
        Dependence.MEAN,
    ),
    "attention": (lambda p, b: jnp.mean(attention(p, b)), Dependence.MEAN),
    "tokens flattened": (
        lambda p, b: jnp.mean((p["table"][b["tokens"]].reshape(-1, 6) @ p["w"]) ** 2),
        Dependence.MEAN,
    ),
    "time first": (
        lambda p, b: jnp.mean(p["table"][b["tokens"]].swapaxes(0, 1).reshape(-1, 6).max(-1)),
        Dependence.MEAN,
    ),
    "recurrence": (lambda p, b: jnp.mean(over_time(p, b)), Dependence.MEAN),
    "convolution": (lambda p, b: jnp.mean(convolution(p, b)), Dependence.MEAN),
    "bfloat16": (lambda p, b: jnp.mean(jnp.square(b["half"])), Dependence.MEAN),
    "dropout": (
        lambda p, b: jnp.mean(b["x"] * jax.random.bernoulli(p["key"], 0.8, b["x"].shape)),
        Dependence.MEAN,
    ),
    "dropout of features": (
        lambda p, b: jnp.mean(b["x"] * jax.random.bernoulli(p["key"], 0.8, (6,))),
        Dependence.MEAN,
    ),
    "keys of each sample": (
        lambda p, b: jnp.mean(error(p, b) * per_sample_keys(p, b)),
        Dependence.MEAN,
    ),
    "vmap of a loss": (
        lambda p, b: jax.vmap(lambda x, y: jnp.sqrt(jnp.sum((x @ p["w"] - y) ** 2)))(
            b["x"], b["y"]
        ).mean(),
        Dependence.MEAN,
    ),
    "map over samples": (
        lambda p, b: jax.lax.map(lambda x: jnp.linalg.norm(x @ p["w"]), b["x"]).mean(),
        Dependence.MEAN,
    ),
    "sum by a loop": (
        lambda p, b: jax.lax.scan(lambda c, x: (c + jnp.sum(x**2), None), 0.0, b["x"])[0],
        Dependence.SUM,
    ),
    "remat, jit and a branch": (
        lambda p, b: jax.lax.cond(
            p["w"][0, 0] > 0,
            lambda: jnp.mean(jax.checkpoint(jax.jit(error))(p, b)),
            lambda: 2 * jnp.mean(error(p, b)),
        ),
        Dependence.MEAN,
    ),
    "a loop over parameters": (
        lambda p, b: jax.lax.fori_loop(0, 3, lambda i, x: x @ p["w"] @ p["w"].T, b["x"]).mean(),
        Dependence.MEAN,
    ),
    "mean and weight decay": (
        lambda p, b: jnp.mean(error(p, b)) + 0.1 * jnp.sum(p["w"] ** 2),
        Dependence.MEAN,
    ),
    "mean of both halves of a pair": (
        lambda p, b: jnp.mean(jnp.concatenate([b["x"], 2 * b["x"]]).reshape(2, -1, 6)[1] @ p["w"]),
        Dependence.MEAN,
    ),
    "real and made": (
        lambda p, b: jnp.mean(
            (jnp.concatenate([error(p, b), 2 * error(p, b)])
             - jnp.concatenate([jnp.ones(len(b["x"])), jnp.zeros(len(b["x"]))])) ** 2
        ),
        Dependence.MEAN,
    ),
    "neighbours in twos": (
        lambda p, b: jnp.mean((error(p, b)[0::2] - error(p, b)[1::2]) ** 2),
        Dependence.MEAN,
    ),
    "penalty of the gradient at each sample": (
        lambda p, b: jnp.mean(
            jax.vmap(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["w"]))))(b["x"]) ** 2
        ),
        Dependence.MEAN,
    ),
    "gradient of a sum": (
        lambda p, b: jnp.mean(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["w"])))(b["x"]) ** 2),
        Dependence.MEAN,
    ),
    "own backward pass, no gradient of what is shared": (
        lambda p, b: jnp.mean(biased(b["x"], p["w"][:, 0])), Dependence.MEAN,
    ),
    "a backward pass of each sample": (
        lambda p, b: jnp.mean(with_backward(jnp.tanh, lambda x, g: g * jnp.clip(x, -1, 1))(b["x"])),
        Dependence.MEAN,
    ),
    "a sum with a backward pass": (
        lambda p, b: with_backward(lambda x: jnp.sum(x), lambda x, g: g * jnp.ones_like(x))(
            error(p, b)
        ),
        Dependence.SUM,
    ),
    "a mean with a backward pass": (
        lambda p, b: with_backward(lambda x: x.mean(), lambda x, g: jnp.full_like(x, g / x.size))(
            error(p, b)
        ),
        Dependence.MEAN,
    ),
    "counts of labels": (
        lambda p, b: jnp.bincount(b["label"], length=3) @ p["w"][0],
        Dependence.SUM,
    ),
    "weights that are repeated for every sample": (
        lambda p, b: jnp.mean(b["x"].reshape(-1) * repeated(p, b)),
        Dependence.MEAN,
    ),
    "a mean weighted by repeated weights": (
        lambda p, b: (b["x"].reshape(-1) * repeated(p, b)).sum() / (2 * repeated(p, b)).sum(),
        Dependence.MEAN,
    ),
    "a mean weighted by the squares of repeated weights": (
        lambda p, b: b["x"].reshape(-1) @ repeated(p, b) / (repeated(p, b) @ repeated(p, b)),
        Dependence.MEAN,
    ),
    "the largest of repeated weights": (
        lambda p, b: jnp.mean(error(p, b)) / jnp.max(repeated(p, b)),
        Dependence.MEAN,
    ),
    "one number that is repeated": (
        lambda p, b: jnp.mean(error(p, b) * jnp.repeat(jnp.ones(2), len(b["x"]) // 2)),
        Dependence.MEAN,
    ),
    "each half of a pair has its weight": (
        lambda p, b: jnp.mean(
            jnp.concatenate([error(p, b), 2 * error(p, b)])
            * jnp.repeat(jnp.array([1.0, 0.5]), len(b["x"]))
        ),
        Dependence.MEAN,
    ),
    "positions of a sequence": (
        lambda p, b: jnp.mean(
            p["table"][b["tokens"]] * BANK[: b["tokens"].shape[1], None] * p["table"][:5]
        ),
        Dependence.MEAN,
    ),
    "some of equal numbers": (
        lambda p, b: jnp.mean(error(p, b) * jnp.ones(16)[: len(b["x"])]),
        Dependence.MEAN,
    ),
    "a loop over the samples in reverse": (
        lambda p, b: jax.lax.scan(
            lambda c, r: (c + r, r), 0.0, error(p, b), reverse=True
        )[1].mean(),
        Dependence.MEAN,
    ),
    "whole quotients of each sample": (
        lambda p, b: jnp.mean((b["label"] // 2) * error(p, b)),
        Dependence.MEAN,
    ),
    "a kernel that is promised": (
        lambda p, b: jnp.mean(per_sample(lambda x: jnp.cumsum(x, 0))(b["x"])),
        Dependence.MEAN,
    ),
}  # fmt: skip

COUPLED = {
    "root of a mean": (lambda p, b: jnp.sqrt(jnp.mean(error(p, b))), "takes `sqrt` of a total"),
    "log of a mean": (lambda p, b: jnp.log(jnp.mean(error(p, b))), "takes `log` of a total"),
    "masked mean": (
        lambda p, b: (error(p, b) * b["mask"]).sum() / b["mask"].sum(),
        r"return Weighted\(total, weight\) instead",
    ),
    "masked mean with a floor": (
        lambda p, b: (error(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1),
        "takes `max` of a total",
    ),
    "mean of a mask": (
        lambda p, b: jnp.mean(error(p, b), where=b["mask"] > 0),
        r"return Weighted\(total, weight\) instead",
    ),
    "product of means": (
        lambda p, b: jnp.mean(error(p, b)) * jnp.mean(b["mask"]),
        "multiplies or divides totals",
    ),
    "balance of experts": (
        lambda p, b: jnp.sum(jax.nn.softmax(logits(p, b)).mean(0) ** 2),
        "takes `(square|integer_pow)` of a total",
    ),
    "variance": (lambda p, b: jnp.var(logits(p, b), 0).sum(), "over the samples with individual"),
    "batch norm": (
        lambda p, b: jnp.mean(jax.nn.standardize(logits(p, b), axis=0) ** 3),
        "over the samples",
    ),
    "contrastive": (
        lambda p, b: optax.softmax_cross_entropy_with_integer_labels(
            logits(p, b) @ b["y"].T, jnp.arange(len(b["x"]))
        ).mean(),
        "every sample with every other",
    ),
    "distances of all pairs": (
        lambda p, b: jnp.mean(jnp.abs(logits(p, b)[:, None] - logits(p, b)[None])),
        "every other|more than one dim|with other samples",
    ),
    "mixup": (
        lambda p, b: jnp.mean(b["x"] + b["x"][jax.random.permutation(p["key"], len(b["x"]))]),
        "takes `sort` along the samples",
    ),
    "roll": (lambda p, b: jnp.mean(b["x"] * jnp.roll(b["x"], 1, 0)), "takes some of the samples"),
    "flip": (lambda p, b: jnp.mean(b["x"] * b["x"][::-1]), "reverses the order"),
    "the first": (lambda p, b: jnp.mean(error(p, b) - error(p, b)[0]), "samples"),
    "largest": (lambda p, b: jnp.max(error(p, b)), "takes `reduce_max` over the samples"),
    "hardest half": (
        lambda p, b: jnp.mean(jnp.sort(error(p, b))[len(b["x"]) // 2 :]),
        "takes `sort` along the samples",
    ),
    "top": (lambda p, b: jnp.sum(jax.lax.top_k(error(p, b), 2)[0]), "`top_k` along the samples"),
    "places in the queue of an expert": (
        lambda p, b: jnp.mean(jnp.cumsum(jax.nn.one_hot(b["label"], 3), 0) < 2),
        "takes `cumsum` along the samples",
    ),
    "softmax over samples": (
        lambda p, b: jnp.sum(jax.nn.softmax(error(p, b)) * error(p, b)),
        "over the samples|back to each",
    ),
    "numbered samples": (
        lambda p, b: jnp.mean(error(p, b) * jnp.arange(len(b["x"]))),
        "depends on a sample's position in the batch",
    ),
    "a table sliced by the number of samples": (
        lambda p, b: jnp.mean(error(p, b) * jnp.asarray(BANK)[: len(b["x"])]),
        "depends on a sample's position in the batch",
    ),
    "a table split by the number of samples": (
        lambda p, b: jnp.mean(error(p, b) * jnp.split(jnp.asarray(BANK), [len(b["x"])])[0]),
        "depends on a sample's position in the batch",
    ),
    "a table sliced at a computed place": (
        lambda p, b: jnp.mean(
            error(p, b) * jax.lax.dynamic_slice(jnp.asarray(BANK), (0,), (len(b["x"]),))
        ),
        "depends on a sample's position in the batch",
    ),
    "the entry of a table at the number of samples": (
        lambda p, b: jnp.mean(error(p, b)) * jnp.asarray(BANK)[len(b["x"]) - 1],
        "depends on the number of samples",
    ),
    "the feature at the number of samples": (
        lambda p, b: jnp.mean(jnp.outer(error(p, b), jnp.asarray(BANK))[:, len(b["x"]) - 1]),
        "depends on a sample's position in the batch",
    ),
    "halves of the batch": (
        lambda p, b: jnp.mean(error(p, b) * jnp.repeat(jnp.array([1.0, 0.0]), len(b["x"]) // 2)),
        "with other samples",
    ),
    "weights of features, repeated in another order": (
        lambda p, b: jnp.mean(
            b["x"].reshape(-1) * jnp.repeat(p["w"][:, 0], len(b["x"]))
        ),
        "with other samples",
    ),
    "rows at the first places of more rows": (
        lambda p, b: jnp.mean(b["pair"].reshape(-1, 6)[jnp.arange(len(b["x"]))]),
        "picks samples by an index",
    ),
    "every other position": (
        lambda p, b: jnp.mean(b["x"][jnp.arange(2 * len(b["x"])).reshape(-1, 2)[:, 0]]),
        "depends on a sample's position in the batch",
    ),
    "positions as booleans": (
        lambda p, b: jnp.mean(b["x"][jnp.arange(len(b["x"])).astype(bool).astype(int)]),
        "depends on a sample's position in the batch",
    ),
    "written at the first places of more rows": (
        lambda p, b: jnp.mean(
            b["pair"][:, :, 0].reshape(-1)
            * jnp.zeros(2 * len(b["x"])).at[jnp.arange(len(b["x"]))].set(1.0)
        ),
        "writes to samples by an index",
    ),
    "written to a window": (
        lambda p, b: jnp.zeros(16).at[: len(b["x"])].add(error(p, b)) @ BANK,
        "is written where several samples may write",
    ),
    "counts of pairs": (
        lambda p, b: jnp.mean(error(p, b))
        * jnp.zeros(3).at[jnp.zeros((len(b["x"]),) * 2, int)].add(p["w"][0, 0])[0],
        "is written where several samples may write",
    ),
    "a loop that reorders its running sum": (
        lambda p, b: jax.lax.scan(
            lambda c, x: (c[::-1] + x, None), jnp.zeros(b["x"].shape[1:]), b["x"]
        )[0].sum(),
        "loop over the samples that does more",
    ),
    "a loop that adds up its running sum": (
        lambda p, b: jax.lax.scan(
            lambda c, x: (jnp.cumsum(c) + x, None), jnp.zeros(b["x"].shape[1:]), b["x"]
        )[0].sum(),
        "loop over the samples that does more",
    ),
    "a loop in reverse with a counter": (in_reverse, "loop over the samples that does more"),
    "a whole quotient of a count": (
        lambda p, b: (b["mask"] > 0).astype(jnp.uint32).sum() // 2,
        "takes `div` of a total",
    ),
    "whether two masks overlap": (
        lambda p, b: ((b["mask"] > 0) @ (b["label"] > 0)).astype(float),
        "of booleans over the samples",
    ),
    "a convolution with as many ones as samples": (
        lambda p, b: jnp.mean(error(p, b))
        * jax.lax.conv(
            jnp.ones((1, 1, len(b["x"]))), jnp.ones((1, 1, len(b["x"]))), (1,), "VALID"
        ).sum(),
        "convolution along the samples",
    ),
    "the root of a number that becomes positive": (
        lambda p, b: jnp.mean(error(p, b)) * jnp.sqrt(p["w"][0, 0] * (len(b["x"]) - 5)),
        "depends on the number of samples",
    ),
    "numbers from outside": (
        lambda p, b: jnp.mean(error(p, b) * np.arange(len(b["x"]))),
        "an entry of its own for every sample",
    ),
    "keys by number": (
        lambda p, b: jnp.mean(
            jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(p["key"], i)))(
                jnp.arange(len(b["x"]))
            )
        ),
        "depends on a sample's position in the batch",
    ),
    "a key made on the way": (
        lambda p, b: jnp.mean(b["x"] * jax.random.normal(jax.random.key(0), b["x"].shape)),
        "from a key that the loss creates itself",
    ),
    "another program": (
        lambda p, b: error(p, b).mean() * (2.0 if len(b["x"]) > 4 else jnp.mean(p["w"])),
        "a different program|how many samples",
    ),
    "average that forgets": (
        lambda p, b: jax.lax.scan(lambda c, x: (0.9 * c + x.sum(), None), 0.0, b["x"])[0],
        "loop over the samples that does more",
    ),
    "until all are done": (
        lambda p, b: jax.lax.while_loop(
            lambda x: jnp.mean(x) > 1, lambda x: x / 2, b["x"]
        ).mean(),
        "of a total|number of iterations depends",
    ),
    "a branch by the batch": (
        lambda p, b: jax.lax.cond(
            jnp.any(b["mask"] > 0), lambda: jnp.mean(error(p, b)), lambda: 0.0
        ),
        "over the samples",
    ),
    "a call that cannot be read": (
        lambda p, b: jnp.mean(
            jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(b["x"].shape, jnp.float32), b["x"])
        ),
        "goes through `pure_callback`, whose effect on samples is",
    ),
    "a gradient by the size of the batch": (
        lambda p, b: jnp.mean(
            with_backward(lambda x: x, lambda x, g: g / len(x))(error(p, b))
        ),
        "custom backward pass that mixes the samples, or is not linear in its cotangent",
    ),
    "a gradient that is clipped": (
        lambda p, b: jnp.mean(with_backward(jnp.tanh, lambda x, g: jnp.clip(g, -1, 1))(b["x"])),
        "custom backward pass that mixes the samples, or is not linear in its cotangent",
    ),
    "a gradient by the norm of the batch": (
        lambda p, b: jnp.mean(clipped_vjp(error(p, b))),
        "backward pass",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEPARABLE)
def test_what_the_parts_of_a_batch_give(name):
    loss_fn, kind = SEPARABLE[name]
    dependence = find(loss_fn)
    assert dependence.loss.kind is kind, str(dependence)
    assert dependence.why_coupled == ""


@pytest.mark.parametrize("name", COUPLED)
def test_the_operation_and_line_that_couple_samples_are_named(name):
    loss_fn, why = COUPLED[name]
    dependence = find(loss_fn)
    assert dependence.loss.kind is Dependence.COUPLED, str(dependence)
    assert re.search(why, dependence.loss.why), str(dependence)
    if "entry of its own" not in why:
        assert dependence.loss.line.startswith("test_samples.py:"), str(dependence)


def test_a_foreign_call_has_a_rule_of_its_own(monkeypatch):
    """An equation that only states shapes does not differ between a part and the whole."""
    rules = {**samples.SAMPLE_RULES, "pure_callback": lambda op, values: nonlinear(op.name, values)}
    monkeypatch.setattr(samples, "SAMPLE_RULES", rules)
    kept = lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    assert find(lambda p, b: jnp.mean(kept(b["x"]))).loss.kind is Dependence.MEAN


def test_a_sort_that_calls_its_dim_otherwise_is_not_known(monkeypatch):
    sort = Primitive("my_sort")
    sort.def_abstract_eval(lambda x, dim: x)
    rules = {**samples.SAMPLE_RULES, "my_sort": samples.SAMPLE_RULES["sort"]}
    monkeypatch.setattr(samples, "SAMPLE_RULES", rules)
    monkeypatch.setattr(factors, "FACTORS", {**factors.FACTORS, "my_sort": factors.FACTORS["sort"]})
    dependence = find(lambda p, b: jnp.mean(sort.bind(b["x"], dim=0)))
    assert dependence.loss.kind is Dependence.COUPLED
    assert dependence.loss.why.startswith("goes through `my_sort`, whose effect on samples is")


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_mean_is_one_for_any_sizes(size):
    assert find(SEPARABLE["mean"][0], (4, 4 * size)).loss.kind is Dependence.MEAN
    assert find(SEPARABLE["mean by a reciprocal"][0], (6, 6 * size)).loss.kind is Dependence.MEAN


def test_a_sum_and_a_term_that_counts_once():
    """The parts of a batch would count it once each."""
    dependence = find(lambda p, b: jnp.sum(error(p, b)) + 0.1 * jnp.sum(p["w"] ** 2))
    assert dependence.loss.kind is Dependence.MIXED
    assert "multiply the other term by their number" in dependence.why_coupled
    both = lambda p, b: jnp.sum(error(p, b)) + len(b["x"]) * 0.1 * jnp.sum(p["w"] ** 2)
    assert find(both).loss.kind is Dependence.SUM


def test_metrics_each_have_a_use_of_their_own():
    def loss_fn(p, b):
        count = b["mask"].sum()
        right = (jnp.argmax(logits(p, b), -1) == b["label"]) * b["mask"]
        return weighted(
            (error(p, b) * b["mask"]).sum(),
            count,
            accuracy=right.sum() / count,
            again=right.sum() / b["mask"].sum(),
            other=right.sum() / (2 * b["mask"]).sum(),
            mean=jnp.mean(error(p, b)),
            count=count,
            largest=jnp.max(error(p, b)),
            norm=jnp.linalg.norm(p["w"]),
        )

    dependence = find(loss_fn)
    assert dependence.loss.kind is Dependence.WEIGHTED
    assert {name: found.kind for name, found in dependence.metrics.items()} == {
        "accuracy": Dependence.WEIGHTED,
        "again": Dependence.WEIGHTED,
        "other": Dependence.COUPLED,
        "mean": Dependence.MEAN,
        "count": Dependence.SUM,
        "largest": Dependence.COUPLED,
        "norm": Dependence.CONSTANT,
    }
    assert dependence.why_coupled.startswith(
        "the metric 'largest' takes `reduce_max` over the samples (test_"
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_fused_attention_on_gpus_does_not_mix_samples(monkeypatch, dtype):
    """Forwards and backwards; traced here as where there is a GPU, for it runs nowhere else."""
    kernel = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{kernel}.check_cudnn_version", lambda: 92000)
    monkeypatch.setattr(f"{kernel}.is_cuda_compute_capability_equal", lambda capability: False)
    monkeypatch.setattr(f"{kernel}.check_compute_capability", lambda capability: True)

    def loss(w, x):
        heads = (x @ w).reshape(*x.shape[:2], 2, 64).astype(dtype)
        found = jax.nn.dot_product_attention(
            heads, heads, heads, is_causal=True, implementation="cudnn"
        )
        return jnp.mean(found.astype(jnp.float32) ** 2)

    of = lambda count: jax.ShapeDtypeStruct((count, 256, 8), jnp.float32)
    trace = lambda count: jax.make_jaxpr(loss)(jnp.ones((8, 128)), of(count))
    assert "dot_product_attention" in str(trace(2))
    (found,) = follow_samples(trace, (2, 4), num_batch=1)
    assert (found.kind.value, found.scale) == ("total", 1.0), found.why


def test_attention_in_eight_bits_is_linear_in_its_cotangent_and_takes_largest_values():
    """A mean over the samples gives each of them a cotangent that shrinks with their number."""
    heads = (2, 8, 2, 64), (4, 8, 2, 64)
    weights = (2, 2, 8), (4, 2, 8)
    largest = ((1, 1, 1, 1),) * 2
    rows = Value(Kind.ROWS, dim=0)
    name = "dot_product_attention_fp8_bwd_wrapper"
    operands = (*[heads] * 5, weights, *[largest] * 12)
    op = Operation(name, {}, {}, operands, (*[heads] * 3, *[largest] * 4), ("f", "f"))
    values = [*[rows] * 4, dataclasses.replace(rows, scale=0.5), rows, *[Value()] * 12]
    queries, *_, last = samples.SAMPLE_RULES[name](op, values)
    assert (queries.kind, queries.dim, queries.scale) == (Kind.ROWS, 0, 0.5)
    assert (last.kind, last.why) == (Kind.COUPLED, "takes the largest value over the samples")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda w: w.sum(), lambda w: w.astype(bool).sum()),
        (lambda w: w.sum(), lambda w: w.astype(int).sum()),
        (lambda w: w.sum(0), lambda w: w.reshape(-1).sum(0)),
        (
            lambda w: jnp.broadcast_to(w[:, :, None], (len(w), 3, 3))[:, 0].sum(),
            lambda w: jnp.broadcast_to(w[:, None], (len(w), 3, 3))[:, 0].sum(),
        ),
    ],
)
def test_other_sums_are_no_divisors_of_one_another(one, other):
    def trace(count):
        shape = jax.ShapeDtypeStruct((count, 3), jnp.float32)
        return jax.make_jaxpr(lambda w: (one(w), other(w), one(w.astype(jnp.float32))))(shape)

    first, second, again = follow_samples(trace, (4, 8), num_batch=1)
    assert first.value_number == again.value_number != second.value_number


def test_a_loop_that_a_part_never_enters_is_coupled():
    def total(x):
        y = x**2
        return jax.lax.fori_loop(0, len(x) - 1, lambda i, c: c + y[0], 0.0)

    trace = lambda count: jax.make_jaxpr(total)(jax.ShapeDtypeStruct((count,), jnp.float32))
    assert follow_samples(trace, (1, 4), 1)[0].kind.value == "coupled"


TURNED = np.array([1, 0])


def last_row_repeated(c, x):
    """Gives every row of a sum what its last row is, by loops over rows alone."""

    def rows(_, row):
        return jax.lax.scan(lambda row, _: (row, row), row, None, length=2)[1], None

    return jax.lax.scan(rows, c, c)[0] + x


CARRIES = {
    "added to": (lambda c, x: c + x, True),
    "added to row by row": (
        lambda c, x: jax.lax.scan(lambda _, row: (0, row[0] + row[1]), 0, (c, x))[1],
        True,
    ),
    "added to by some": (lambda c, x: jnp.where(x > 0, c + x, c), True),
    "transposed": (lambda c, x: c.T + x, False),
    "transposed by a reshape": (lambda c, x: jax.lax.reshape(c, (2, 2), (1, 0)) + x, False),
    "reversed": (lambda c, x: c[::-1] + x, False),
    "picked from": (lambda c, x: c[TURNED] + x, False),
    "joined and picked from": (lambda c, x: jnp.concatenate([c, c])[TURNED] + x, False),
    "rows by rows": (last_row_repeated, False),
}


@pytest.mark.parametrize("name", CARRIES)
def test_sums_in_a_loop_over_samples_stay_in_place(name):
    step, is_sum = CARRIES[name]
    weights = np.arange(1.0, 5.0, dtype=np.float32).reshape(2, 2)

    def total(x):
        start = jnp.zeros((2, 2))
        return jnp.sum(weights * jax.lax.scan(lambda c, x: (step(c, x), None), start, x)[0])

    def trace(count):
        return jax.make_jaxpr(total)(jax.ShapeDtypeStruct((count, 2, 2), jnp.float32))

    (found,) = follow_samples(trace, (2, 4), 1)
    assert found.kind.value == ("total" if is_sum else "coupled"), found


def test_sums_that_change_places_in_a_loop_over_samples_are_coupled():
    def total(x):
        step = lambda c, x: ((c[1] + x, c[0] + 2 * x), None)
        return jax.lax.scan(step, (0.0, 0.0), x)[0][0]

    trace = lambda count: jax.make_jaxpr(total)(jax.ShapeDtypeStruct((count,), jnp.float32))
    assert "more than add them up" in follow_samples(trace, (2, 4), 1)[0].why


def test_a_reshape_that_turns_samples_is_seen():
    def mean(x):
        return jnp.mean(jnp.max(jax.lax.reshape(x, x.shape, (1, 0)), -1))

    trace = lambda count: jax.make_jaxpr(mean)(jax.ShapeDtypeStruct((count, 4), jnp.float32))
    for sizes in ((4, 8), (1, 4)):
        (found,) = follow_samples(trace, sizes, 1)
        assert found.kind.value == "coupled", found


def test_the_weights_of_a_loss_without_logits_are_seen():
    def dependence(weigh):
        def loss_fn(params, batch):
            weights = weigh(batch["mask"])
            return linear_cross_entropy(batch["x"], params["w"], batch["label"], weights).total

        return find(loss_fn).loss.kind

    assert dependence(lambda mask: mask) is Dependence.SUM
    assert dependence(lambda mask: mask / len(mask)) is Dependence.MEAN
    assert (
        dependence(lambda mask: jnp.broadcast_to(jnp.sum(mask), mask.shape)) is Dependence.COUPLED
    )
