"""The weights of a step by the paths of its model: what a file of weights holds, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..core.errors import ConfigError, did_you_mean
from ..core.told import ArgumentKind
from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import Array, Path, PyTree
from ..ops.int8 import NUMBERS
from ..sharding import LargestDim, shardings
from .parts import ModelParts
from .spec import StepSpec


def weight_shapes(parts: ModelParts) -> dict[Path, jax.ShapeDtypeStruct]:
    """Every array of a model but those of random streams, by path.

    Args:
        parts: the model's structure, and the shapes of its arrays.
    """
    drawn, _ = nnx.split_state(nnx.state(parts.abstract), nnx.RngState, ...)
    streams = {path for path, _ in leaves_with_paths(nnx.to_pure_dict(drawn))}
    both = [*leaves_with_paths(parts.weights), *leaves_with_paths(parts.buffers)]
    return {path: leaf for path, leaf in both if path not in streams}


def weight_targets(spec: StepSpec, places: PyTree) -> dict[Path, jax.ShapeDtypeStruct]:
    """The weights of a step's model, each with the sharding that it is to be brought on.

    The state's own, but for a pipeline, whose rows are put together from arrays that are split over
    all axes of the mesh.

    Args:
        spec: the step.
        places: the shardings of the parameters, trained and frozen, as the state holds them.
    """
    if spec.storage.rows is not None:
        policy = LargestDim(tuple(spec.mesh.axis_names))
        places = shardings(policy, spec.parts.weights, spec.mesh)
    where: dict[Path, Any] = dict(leaves_with_paths(places))
    where |= {path: where[f"{path}/{NUMBERS}"] for path in spec.parts.int8}
    whole = NamedSharding(spec.mesh, PartitionSpec())
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where.get(path, whole))
        for path, leaf in weight_shapes(spec.parts).items()
    }


def replaced(tree: PyTree, weights: Mapping[Path, Array]) -> PyTree:
    """A tree of a model's arrays with those of some paths in place of its own."""
    return map_with_path(lambda path, leaf: weights.get(path, leaf), tree)


WEIGHTS = ArgumentKind(
    "arrays by path, as step.weight_targets names them, or nothing: first values, and their seed, "
    "are those of the model",
    lambda x: isinstance(x, Mapping) and all(hasattr(one, "shape") for one in x.values()),
)


def placed_weights(
    weights: Mapping[Path, Any], targets: Mapping[Path, jax.ShapeDtypeStruct]
) -> dict[Path, Array]:
    """Weights where their targets say; those that lie there already are not copied.

    Raises:
        ConfigError: when there is no such array in the model, or it has another shape or dtype.
    """
    for path, array in weights.items():
        if path not in targets:
            raise ConfigError(f"the model has no array {path!r}.{did_you_mean(path, targets)}")
        got, wanted = (f"{x.dtype}{list(x.shape)}" for x in (array, targets[path]))
        if got != wanted:
            raise ConfigError(f"{path!r} is {wanted} in the model; got {got}; convert it first")
    return {path: jax.device_put(x, targets[path].sharding) for path, x in weights.items()}


def kept_weights(
    arrays: tuple[PyTree, PyTree] | None,
    weights: Mapping[Path, Array],
    targets: Mapping[Path, jax.ShapeDtypeStruct],
) -> dict[Path, Array]:
    """Copies of a module's own arrays, where their targets say, for what no weights are given."""
    return {
        path: jax.device_put(x, targets[path].sharding, may_alias=False)
        for tree in arrays or ()
        for path, x in leaves_with_paths(tree)
        if path in targets and path not in weights
    }
