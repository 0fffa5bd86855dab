"""Records the fingerprints of a config's steps, for `axon bisect`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from axon_dist.core.errors import ConfigError
from axon_dist.core.modules import wrap_calls
from axon_dist.core.own_context import in_own_context
from axon_dist.core.tree import is_key, leaves_with_paths
from axon_dist.core.typing import Batch, LossFn, PyTree
from axon_dist.data import LocalBatch
from axon_dist.mesh import World
from axon_dist.ops.precision import MixedPrecision
from axon_dist.prove.recording import (
    LAYER,
    Fingerprint,
    RecordedStep,
    Recording,
    described,
    fingerprint,
    read,
    versions,
)
from axon_dist.prove.trace import Subject, Traced
from axon_dist.step import TrainState, TrainStep

from ..config import RunConfig, with_own_precision
from .steps import build_step, build_world, check_memory, model_of
from .verify import COMPARED, drawn_batches, one_device_step


@in_own_context
def record_config(config: RunConfig, steps: int = 3) -> Recording:
    """Records a config's steps: their results on its mesh, and all values on one device.

    The programs of two strategies differ, so their operations cannot be compared, but their results
    can: metrics, and parameters by path. The recorded values of operations come from the same
    model, loss and optimizer on one device, without microbatches; they locate the module and the
    operation that differ. Batches are drawn as in `verify`.

    Args:
        config: a checked run, as YAML describes it.
        steps: the number of steps.

    Raises:
        ConfigError: when there are several processes, or the values do not fit in memory.
    """
    config = with_own_precision(config)
    world = build_world(config)
    if world.num_processes > 1:
        raise ConfigError(
            f"bisect records in one process, but there are {world.num_processes}; run it in one "
            "process, on a mesh of its devices",
            code="several-processes",
        )
    step = build_step(config, world, metrics=COMPARED)
    check_memory(config, step)
    batches = list(drawn_batches(config, world, steps))
    # By default, accelerators multiply float32 with fewer bits.
    with jax.default_matmul_precision("highest"):
        first, results = _on_mesh(step, batches)
        traced, state, names = _on_one_device(config, world, batches[0])
        readings = list(read(traced, state, map(_leaves, batches)))
    recorded = []
    for number, (batch, (prints, values)) in enumerate(zip(batches, readings, strict=True)):
        single = dict(zip(names, prints, strict=True))
        single = {name: print_ for name, print_ in single.items() if name in results[number]}
        outputs = {
            name: dataclasses.replace(print_, bound=single[name].bound if name in single else 0.0)
            for name, print_ in results[number].items()
        }
        inputs = fingerprints({f"batch {name}": leaf for name, leaf in batch.items()})
        inputs |= {} if number else first
        recorded.append(RecordedStep(inputs, outputs, single, values))
    return Recording(
        config.name, _title(config, step), versions(), *described(traced.program), tuple(recorded)
    )


def _title(config: RunConfig, step: TrainStep) -> str:
    count = step.batch_layout.num_microbatches
    microbatches = f", {count} microbatches" if count > 1 else ""
    given = config.precision
    short = given if isinstance(given, str) else f"{MixedPrecision.of(given).compute}"
    precision = "" if given is None else f", {short}"
    return f"{step.strategy.name} on {step.world.spec}{precision}{microbatches}"


def _on_mesh(
    step: TrainStep, batches: Sequence[LocalBatch]
) -> tuple[dict[str, Fingerprint], list[dict[str, Fingerprint]]]:
    """Returns the fingerprints of the first parameters, and of the results of each step."""
    state = step.init()
    first = fingerprints(dict(step.weights(state)))
    results = []
    for batch in batches:
        state, metrics = step(state, batch)
        chosen = {name: metrics[name] for name in COMPARED}
        results.append(fingerprints({**chosen, **step.weights(state)}))
    return first, results


def fingerprints(arrays: Mapping[str, Any]) -> dict[str, Fingerprint]:
    """Returns fingerprints of arrays, with a bound for the rounding errors of initializers."""
    found = {}
    for name, x in arrays.items():
        array = np.asarray(jax.device_get(x))
        numbers = fingerprint(array)
        # A bound that is not a number would explain every difference.
        sizes = np.abs(numbers[np.isfinite(numbers)])
        bound = 0.0 if array.dtype.kind in "iub" else 1e-6 * float(sizes.max(initial=0.0))
        found[name] = Fingerprint(numbers.tolist(), bound)
    return found


def _leaves(tree: PyTree) -> list[Any]:
    return [leaf if is_key(leaf) else np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _on_one_device(
    config: RunConfig, world: World, batch: LocalBatch
) -> tuple[Traced, list[Any], list[str]]:
    """Traces the step on one device; also returns the first state and the names of the outputs."""
    optimizer = config.optimizer.build(config.train.steps, functools.partial(model_of, config))
    step = one_device_step(config, world, 1, optimizer, _Named)
    state = step.init()

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        after, metrics = step.programs.step(state, step.batch_layout.place(batch), None)
        return after, {name: metrics[name] for name in COMPARED}

    def make(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
        return run, (state, batch)

    traced = Subject(make, config.name).on({"dp": 1}, None)
    paths = [path for path, _ in leaves_with_paths(state)]
    names = [path.removeprefix("params/").removeprefix("frozen/") for path in paths]
    return traced, _leaves(state), [*names, *sorted(COMPARED)]


@dataclasses.dataclass(frozen=True)
class _Named:
    """Wraps a loss so that each module of the model computes in a scope named by its path."""

    loss_fn: LossFn

    def __call__(self, model: nnx.Module, *arguments: Any, **options: Any) -> Any:
        """Names the modules, and computes the loss."""
        for path, module in list(nnx.iter_modules(model)):
            name = ".".join(map(str, path))
            if name and callable(module):
                wrap_calls(module, {"__call__": _InScope(f"{LAYER}{name}")})
        return self.loss_fn(model, *arguments, **options)


@dataclasses.dataclass(frozen=True)
class _InScope:
    """Runs a method in a named scope."""

    name: str

    def __call__(self, call: Any, module: nnx.Module, *arguments: Any, **options: Any) -> Any:
        with jax.named_scope(self.name):
            return call(module, *arguments, **options)
