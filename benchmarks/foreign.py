"""Models of other people on many devices against one: `python -m benchmarks.foreign`.

Every cell is a model (`foreign_models.py`) trained two steps under a strategy on emulated devices.
It has to be equal to plain JAX on one device, or refused by the build with a reason; where it is
further off than the tolerance, no further than ten times what a change of the first parameters in
their last digit makes of one device. Needs the extra `foreign`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
import traceback
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from axon_dist import (
    ActivationCheckpointing,
    World,
    build_train_step,
    compose,
    ddp,
    fsdp,
    pipelined,
    tensor_parallel,
)
from axon_dist.core.errors import AxonDistError
from axon_dist.parallel import suggest_plan

from .foreign_models import MODELS, Foreign

STEPS = 2
"""Steps of training in every cell."""

TOLERANCE, LOW = 5e-5, 5e-2
"""Relative errors that are allowed in float32, and where the compute is in bfloat16."""


NUDGES = 4
"""How often one device is tried again from parameters that differ by a rounding."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model is trained on many devices.

    Args:
        mesh: its axes.
        strategy: a model -> the strategy.
        options: of `build_train_step`.
        microbatches: how many the step has, as one device then has too.
        tolerance: the largest relative error.
    """

    mesh: str
    strategy: Callable[[Foreign], Any]
    options: MappingProxyType[str, Any] = MappingProxyType({})
    microbatches: int = 1
    tolerance: float = TOLERANCE


def _plan(model: Foreign) -> Any:
    args, kwargs = model.example
    return suggest_plan(model.make, *args, **kwargs)


_REMAT = MappingProxyType({"remat": ActivationCheckpointing()})

WAYS: MappingProxyType[str, Way] = MappingProxyType(
    {
        "ddp": Way("dp=2", lambda _: ddp()),
        "fsdp": Way("fsdp=2", lambda _: fsdp(min_elements=8)),
        "hybrid": Way(
            "dp=2,fsdp=2", lambda _: fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=8)
        ),
        "fsdp remat": Way("fsdp=2", lambda _: fsdp(min_elements=8), _REMAT),
        "bf16": Way(
            "fsdp=2",
            lambda _: fsdp(min_elements=8),
            MappingProxyType({"precision": "bf16"}),
            tolerance=LOW,
        ),
        "tp": Way("tp=2", lambda model: tensor_parallel(_plan(model))),
        "dp tp": Way("dp=2,tp=2", lambda model: compose(ddp(), tensor_parallel(_plan(model)))),
        "pp": Way("pp=2", lambda _: pipelined(2, 2), microbatches=2),
        "accumulate": Way(
            "dp=2", lambda _: ddp(), MappingProxyType({"accumulate": 2}), microbatches=2
        ),
    }
)
"""The strategies by name."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a cell ended.

    Args:
        kind: `"equal"`, `"refused"` by the build or by the first trace, `"wrong"`, or `"error"`
            for an exception that is not ours; `"fails"` where the model does on one device.
        text: the message, or the traceback.
    """

    kind: str
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of a training run.

    Args:
        losses: of every step.
        params: nested dict of arrays.
    """

    losses: list[float]
    params: Any


@functools.cache
def load(name: str) -> Foreign:
    """A model of the table; raises ImportError where its package is missing."""
    return MODELS[name].load()


@functools.cache
def on_one_device(name: str, microbatches: int, nudge: int = 0) -> Run:
    """Trains a model in plain JAX.

    Args:
        name: of the model.
        microbatches: of every step.
        nudge: other than 0, the first parameters are up to two units in the last place off, drawn
            from this seed.
    """
    model = load(name)
    graphdef, params, rest = nnx.split(model.make(), nnx.Param, ...)
    params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
    if nudge:
        draw = np.random.default_rng(nudge)
        off = lambda x: x * (1 + draw.uniform(-1, 1, x.shape) * 2**-22).astype(np.float32)
        params = jax.tree.map(lambda x: jnp.asarray(off(np.asarray(x))).astype(x.dtype), params)
    optimizer = _optimizer()
    moments = optimizer.init(params)

    @jax.jit
    def gradient(params: Any, rest: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            merged = nnx.merge(graphdef, params, rest, copy=True)
            value = model.loss_fn(merged, batch)
            return value, nnx.to_pure_dict(nnx.state(merged, nnx.Not(nnx.Param)))

        return jax.value_and_grad(loss, has_aux=True)(params)

    losses = []
    for step in range(STEPS):
        pieces = {k: np.split(v, microbatches) for k, v in model.batch(step).items()}
        total, sums = 0.0, jax.tree.map(jnp.zeros_like, params)
        for index in range(microbatches):
            piece = {name: leaf[index] for name, leaf in pieces.items()}
            (loss, rest), grads = gradient(params, rest, piece)
            total, sums = total + float(loss), jax.tree.map(jnp.add, sums, grads)
        grads = jax.tree.map(lambda g: g / microbatches, sums)
        updates, moments = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        losses.append(total / microbatches)
    return Run(losses, params)


def run(name: str, way: str) -> Outcome:
    """Trains a model in one way, and compares."""
    how = WAYS[way]
    try:
        model, want = load(name), on_one_device(name, how.microbatches)
    except Exception:
        return Outcome("fails", traceback.format_exc())
    world = World.emulate(_size(how.mesh), how.mesh)
    try:
        strategy = how.strategy(model)
        step = build_train_step(
            model.make, _optimizer(), model.loss_fn, strategy, world, **how.options
        )
        step.lower(model.batch(0))
    except AxonDistError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception:
        return Outcome("error", traceback.format_exc())
    try:
        state, losses = step.init(), []
        for number in range(STEPS):
            state, metrics = step(state, model.batch(number))
            losses.append(float(metrics["loss"]))
        params = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    except Exception:
        return Outcome("error", traceback.format_exc())
    found = Run(losses, jax.tree.map(np.asarray, params))
    distance = _distance if how.tolerance < LOW else _rough_distance
    worst, where = distance(found, want)
    text = f"{worst:.1e} at {where}"
    if worst <= how.tolerance:
        return Outcome("equal", text)
    # An activation next to the kink of a ReLU is switched by rounding, on one device too.
    nudged = (on_one_device(name, how.microbatches, nudge) for nudge in range(1, NUDGES + 1))
    moved = max(distance(run, want)[0] for run in nudged)
    text = f"{text}; rounding moves one device by {moved:.1e}"
    return Outcome("equal" if worst <= 10 * moved else "wrong", text)


def _optimizer() -> optax.GradientTransformation:
    return optax.sgd(0.05, momentum=0.9)


def _size(mesh: str) -> int:
    return int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))


def _distance(got: Run, want: Run) -> tuple[float, str]:
    """The largest relative error, and where it is."""
    errors = {
        f"the loss of step {i}": abs(a - b) / abs(b)
        for i, (a, b) in enumerate(zip(got.losses, want.losses, strict=True))
    }
    leaves = jax.tree_util.tree_leaves_with_path(want.params)
    for (path, leaf), mine in zip(leaves, jax.tree.leaves(got.params), strict=True):
        wide, other = np.asarray(leaf, np.float64), np.asarray(mine, np.float64)
        scale = max(np.abs(wide).max(initial=0), 1e-2)
        errors[jax.tree_util.keystr(path)] = np.abs(wide - other).max(initial=0) / scale
    where = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return float(np.nan_to_num(errors[where], nan=np.inf)), where


def _rough_distance(got: Run, want: Run) -> tuple[float, str]:
    """As `_distance`, of all parameters as one: in a low precision small ones are mostly noise."""
    wide = lambda tree: np.concatenate(
        [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    )
    mine, others = wide(got.params), wide(want.params)
    error = np.linalg.norm(mine - others) / np.linalg.norm(others)
    loss, where = _distance(Run(got.losses, {}), Run(want.losses, {}))
    return (loss, where) if loss > error else (float(error), "all parameters")


def main(arguments: list[str] | None = None) -> int:
    """Runs cells, and shows how they ended; 1 if any was neither equal nor refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    given = parser.parse_args(arguments)
    World.emulate(8)
    console = Console(width=160)
    table = Table("model", *given.ways, title="foreign models")
    notes: list[str] = []
    bad = 0
    for name in given.models:
        row, start = [], time.monotonic()
        for way in given.ways:
            outcome = run(name, way)
            row.append(outcome.kind if outcome.kind != "equal" else f"equal {outcome.text[:7]}")
            if outcome.kind != "equal" or "rounding" in outcome.text:
                notes.append(f"{name}, {way}: {outcome.kind}: {outcome.text[-1500:]}")
            bad += outcome.kind in ("wrong", "error")
        table.add_row(name, *row)
        console.print(f"{name}: {', '.join(row)} ({time.monotonic() - start:.0f} s)")
        for note in notes:
            console.print(note, markup=False, highlight=False)
        notes.clear()
        jax.clear_caches()
    console.print(table)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
