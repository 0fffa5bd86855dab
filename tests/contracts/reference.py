"""The oracle: the same model on one device, in plain JAX, with none of our code in the way."""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist.core.weighted import Weighted, WithTerm

METRICS = ("loss", "grad_norm", "param_norm")
"""Every number that a step can be asked to report."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """The record of a training run: numbers per step, and the arrays at its end."""

    metrics: list
    grads: list
    params: dict
    buffers: dict

    @property
    def losses(self) -> list:
        """The loss of every step."""
        return [metrics["loss"] for metrics in self.metrics]


def split(leaf, count: int) -> list:
    """Consecutive microbatches of an array."""
    return np.split(np.asarray(leaf), count)


def train(case, optimizer, num_steps: int, accumulate: int = 1, clip_norm=None) -> Trace:
    """Trains on one device: microbatches in a Python loop, sums divided by the total weight.

    Each draws the rows that the whole batch would draw for its samples, and counts of random
    streams advance once per step. A term that is added to the mean of a microbatch counts by its
    samples.
    """
    graphdef, params, buffers = nnx.split(case.make(), nnx.Param, ...)
    counts = {k for k, _ in nnx.to_flat_state(nnx.filter_state(buffers, nnx.RngCount))}
    params, buffers = nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)
    opt_state, update = jax.jit(optimizer.init)(params), compiled_update(optimizer)

    def total_of(params, buffers, batch, index, mean_weight):
        model = nnx.merge(graphdef, params, buffers, copy=True)
        with drawn_as_whole(index, accumulate):
            value = case.loss_fn(model, batch)
        loss, extra = value if isinstance(value, tuple) else (value, {})
        loss = loss if isinstance(loss, Weighted) else Weighted(loss, 1.0)
        total = loss.total
        if isinstance(loss, WithTerm) and mean_weight is not None:
            samples = len(jax.tree.leaves(batch)[0])
            total = total + loss.term * (mean_weight * samples - loss.weight)
            of_samples.update(loss.metrics)
        buffers = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        return total, (loss.weight, extra, buffers)

    of_samples = set()
    gradient = jax.jit(jax.value_and_grad(total_of, has_aux=True))
    all_metrics, all_grads = [], []
    for step in range(num_steps):
        pieces = {name: split(leaf, accumulate) for name, leaf in case.batch(step).items()}
        totals, weights, extras = [], [], []
        grads, first = jax.tree.map(np.zeros_like, params), buffers
        mean_weight = None
        if accumulate > 1:
            cut = [{name: leaf[i] for name, leaf in pieces.items()} for i in range(accumulate)]
            # The weight of a microbatch does not depend on the mean weight, which is not known yet:
            # a program of its own for it would take longer to compile.
            whole = sum(float(gradient(params, buffers, piece, 0, 0.0)[0][1][0]) for piece in cut)
            mean_weight = whole / sum(len(jax.tree.leaves(piece)[0]) for piece in cut)
        for index in range(accumulate):
            piece = {name: leaf[index] for name, leaf in pieces.items()}
            given = {**nnx.traversals.flatten_mapping(buffers)}
            given |= {k: v for k, v in nnx.traversals.flatten_mapping(first).items() if k in counts}
            given = nnx.traversals.unflatten_mapping(given)
            outputs, grad = gradient(params, given, piece, index, mean_weight)
            total, (weight, extra, buffers) = outputs
            grads = jax.tree.map(np.add, grads, grad)
            totals.append(float(total)), weights.append(float(weight)), extras.append(extra)
        total_weight = sum(weights)
        grads = jax.tree.map(lambda g, w=total_weight: np.asarray(g / w, g.dtype), grads)
        all_grads.append(grads)
        grad_norm = norm_of(grads)
        if clip_norm is not None:
            factor = min(1.0, clip_norm / (grad_norm + 1e-6))
            grads = jax.tree.map(lambda g, factor=factor: g * factor, grads)
        params, opt_state = update(grads, opt_state, params)
        equal = [1.0] * accumulate
        metrics = {
            name: weighted_mean([e[name] for e in extras], equal if name in of_samples else weights)
            for name in extras[0]
        }
        metrics |= {"loss": sum(totals) / total_weight, "grad_norm": grad_norm}
        all_metrics.append(metrics | {"param_norm": norm_of(params)})
    return Trace(all_metrics, all_grads, params, buffers)


def compiled_update(optimizer):
    """An update of optax as one program: its operations one by one would each be compiled."""

    @jax.jit
    def update(grads, opt_state, params):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return update


@contextlib.contextmanager
def drawn_as_whole(index: int | jax.Array, count: int):
    """Masks of dropout are rows of those of the whole batch, of which one part of `count` is here.

    What is drawn for all samples at once, with a first dim of 1, is drawn as it is.
    """
    usual = jax.random.bernoulli

    def rows(key, p=0.5, shape=None, **options):
        if count == 1 or not shape or shape[0] == 1:
            return usual(key, p, shape, **options)
        whole = usual(key, p, (count * shape[0], *shape[1:]), **options)
        return jax.lax.dynamic_slice_in_dim(whole, index * shape[0], shape[0])

    with mock.patch.object(jax.random, "bernoulli", rows):
        yield


def norm_of(tree) -> float:
    """The root of the sum of all squares, in float64."""
    # A norm in float64 of float32 numbers: the absolute value of complex ones is real already.
    leaves = [np.abs(np.asarray(leaf)).astype(np.float64) for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum(np.sum(leaf**2) for leaf in leaves)))


def weighted_mean(values: list, weights: list) -> float:
    """The mean of what microbatches report; one that weighs nothing has nothing to report."""
    counted = [(float(v), w) for v, w in zip(values, weights, strict=True) if w]
    return sum(value * weight for value, weight in counted) / sum(weights)


def of_loss(metrics: dict) -> dict:
    """Those that the loss function makes; norms are measured by the whole step."""
    return {name: value for name, value in metrics.items() if not name.endswith("_norm")}


def assert_metrics(actual: dict, expected: dict, what: str, tolerance: float = 1e-5) -> None:
    """Compares every metric of a step, and that there is none more and none less."""
    assert sorted(actual) == sorted(expected), f"{what} has other metrics than one device"
    for name, want in expected.items():
        got = float(actual[name])
        assert abs(got - want) <= tolerance * abs(want), f"{name} of {what} is {got}, not {want}"


def assert_close(actual, expected, tolerance: float, what: str) -> None:
    """Compares trees leaf by leaf, relative to the largest element of each expected leaf."""
    expected_leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), got in zip(expected_leaves, jax.tree.leaves(actual), strict=True):
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            want, got = jax.random.key_data(want), jax.random.key_data(got)
        want, got = np.asarray(want), np.asarray(got)
        wide = np.complex128 if np.iscomplexobj(want) else np.float64
        scale = max(np.abs(want.astype(wide)).max(initial=0), 1e-3)
        worst = np.abs(got.astype(wide) - want).max(initial=0) / scale
        where = jax.tree_util.keystr(path)
        assert worst <= tolerance, (
            f"{what}{where} differs by {worst:.2e}, more than {tolerance:.0e}"
        )


def distance(actual, expected) -> float:
    """How far trees of floats are from each other, as `assert_close` measures it."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    worst = 0.0
    for got, want in pairs:
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        scale = max(np.abs(want).max(initial=0), 1e-3)
        worst = max(worst, float(np.abs(got - want).max(initial=0) / scale))
    return worst


def in_float64(case):
    """A case whose parameters are float64; to be trained under `jax.enable_x64(True)`."""

    def make():
        graphdef, state = nnx.split(case.make())
        is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
        wide = lambda x: x.astype(jnp.float64) if is_float(x) else x
        return nnx.merge(graphdef, jax.tree.map(wide, state))

    return dataclasses.replace(case, make=make)


def assert_same_training(
    step, case, want: Trace, gradients_of: tuple[int, ...] = (), tolerance: float = 1e-5
) -> None:
    """Takes every step of the reference, and compares metrics always, and the end.

    Gradients are a second program to compile: the default run compares them in one row of a
    table, and the norm of what a step applies, which `METRICS` has, in all.

    Args:
        step: a built step that reports `METRICS`.
        case: what the reference was trained on.
        want: what the reference did.
        gradients_of: the numbers of the steps before which gradients are compared.
        tolerance: of the trained parameters.
    """
    state = step.init()
    for number, metrics_of in enumerate(want.metrics):
        if number in gradients_of:
            grads, metrics = step.gradients(state, case.batch(number))
            grads = step.storage.to_model(grads)
            assert_close(grads, want.grads[number], 2e-5, f"gradient of step {number}")
            assert_metrics(metrics, of_loss(metrics_of), f"gradients of step {number}")
        state, metrics = step(state, case.batch(number))
        assert_metrics(metrics, metrics_of, f"step {number}")
    to_model = step.storage.to_model
    # One program splits all rows of a pipeline, instead of one for each shape.
    trained = (to_model if step.storage.stage_storage is None else jax.jit(to_model))(state.params)
    assert_close(trained, want.params, tolerance, "parameter")
    assert_close(state.buffers, want.buffers, 1e-5, "buffer")
