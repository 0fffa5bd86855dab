"""A model taken apart once, outside the step: its structure, its parameters, everything else."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeAlias

import flax.linen as nn
import jax
from flax import nnx

from ..core.errors import ConfigError
from ..core.tree import is_key, leaves_with_paths, map_with_path
from ..core.typing import Path, PyTree, Shape
from ..precision import MixedPrecision, cast_floating

ModelLike: TypeAlias = nnx.Module | Callable[[], nnx.Module]
"""A module, or a function of no arguments that makes one (its arrays are then born sharded)."""


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """The structure of a model and the shapes of its arrays.

    Args:
        graphdef: the structure; hashable, without arrays.
        params: nested dict of `ShapeDtypeStruct`, what the optimizer trains.
        buffers: nested dict of `ShapeDtypeStruct`: statistics, random keys and their counts.
    """

    graphdef: nnx.GraphDef
    params: PyTree
    buffers: PyTree

    @property
    def dtype(self) -> Any:
        """The dtype that the parameters promote to; of complex numbers that of their parts."""
        found = jax.numpy.result_type(*(leaf.dtype for leaf in jax.tree.leaves(self.params)))
        return jax.numpy.finfo(found).dtype if found.kind == "c" else found

    def shape_of(self, path: Path) -> Shape:
        """The global shape of a parameter."""
        return self._shapes[path]

    @cached_property
    def _shapes(self) -> dict[Path, Shape]:
        return {path: leaf.shape for path, leaf in leaves_with_paths(self.params)}

    @cached_property
    def abstract(self) -> nnx.Module:
        """The model with shapes in place of arrays, to look at and not to change."""
        return nnx.merge(self.graphdef, self.params, self.buffers)

    def merge(self, params: PyTree, buffers: PyTree) -> nnx.Module:
        """Puts a model together around given arrays; changing it leaves them as they are."""
        return nnx.merge(self.graphdef, params, buffers, copy=True)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the first values of a model come from: arrays of a module, or a function to run.

    Args:
        arrays: (params, buffers) of a module that exists.
        make: returns (params, buffers) of a new one; to be jitted with the shardings that they
            shall be born with.
    """

    arrays: tuple[PyTree, PyTree] | None = None
    make: Callable[[], tuple[PyTree, PyTree]] | None = None


def take_apart(model: ModelLike) -> tuple[ModelParts, Source]:
    """Splits a model into structure and arrays, without making any array of a factory's model.

    Args:
        model: an NNX module, or a zero-argument function that returns one.

    Returns:
        The parts, and where the first values come from.

    Raises:
        ConfigError: when `model` is neither, or has no parameter, or one without a gradient.

    Example:
        >>> parts, source = take_apart(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> parts.params["kernel"].shape
        (2, 3)
    """
    if isinstance(model, nnx.Module):
        graphdef, params, buffers = _split(model)
        arrays = jax.tree.map(jax.numpy.asarray, (params, buffers))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        return _checked(ModelParts(graphdef, *shapes)), Source(arrays=arrays)
    if not callable(model) or isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}; give an nnx.Module, or a function of no "
            "arguments that returns one (a Linen module goes through nnx.bridge.ToNNX)"
        )
    _check_takes_nothing(model)
    found: list[nnx.GraphDef] = []

    def values_of_new() -> tuple[PyTree, PyTree]:
        # Annotated models would ask for a mesh in context; the strategy decides instead.
        with nnx.use_eager_sharding(False):
            graphdef, params, buffers = _split(model())
        found.append(graphdef)
        return params, buffers

    abstract = jax.eval_shape(values_of_new)
    return _checked(ModelParts(found[0], *abstract)), Source(make=values_of_new)


def buffers_like(before: PyTree, model: nnx.Module) -> PyTree:
    """The buffers of a model after a forward pass, those and in the dtypes that it had before.

    What the pass left behind beside them, such as what a module has sown, lives for one call; and
    a statistic does not grow wider because its inputs are.
    """
    after = dict(leaves_with_paths(nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))))
    keep = lambda new, old: new if is_key(old) else new.astype(old.dtype)
    return map_with_path(lambda path, old: keep(after[path], old), before)


def stored_as(
    parts: ModelParts, source: Source, dtypes: MixedPrecision
) -> tuple[ModelParts, Source]:
    """Parts and first values of a model in the dtypes that a policy keeps between steps.

    Args:
        parts: the model's structure, and the shapes of its parameters and buffers.
        source: where its first values come from.
        dtypes: `param` is for parameters, `buffer` for statistics.

    Returns:
        Both, recast; a factory's values are cast where they are made.
    """

    def recast(params: PyTree, buffers: PyTree) -> tuple[PyTree, PyTree]:
        kept = buffers if dtypes.buffer is None else cast_floating(buffers, dtypes.buffer)
        return cast_floating(params, dtypes.param), kept

    params, buffers = jax.eval_shape(recast, parts.params, parts.buffers)
    stored = dataclasses.replace(parts, params=params, buffers=buffers)
    if source.make is not None:
        make = source.make
        return stored, Source(make=lambda: recast(*make()))
    return stored, Source(arrays=recast(*(source.arrays or ({}, {}))))


def _split(model: nnx.Module) -> tuple[nnx.GraphDef, PyTree, PyTree]:
    graphdef, params, buffers = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)


def _check_takes_nothing(make: Callable[..., Any]) -> None:
    # The metaclass of modules hides what a class takes.
    run, given = (make.__init__, (None,)) if isinstance(make, type) else (make, ())
    try:
        inspect.signature(run).bind(*given)
    except TypeError as error:
        raise ConfigError(
            f"the function that makes the model cannot be called without arguments ({error}); give "
            "one that can, such as lambda: Model(rngs=nnx.Rngs(0))"
        ) from None


def _checked(parts: ModelParts) -> ModelParts:
    if not jax.tree.leaves(parts.params):
        raise ConfigError(
            "the model has no nnx.Param, so there is nothing to train; a bridged Linen module "
            "needs lazy_init(x) first"
        )
    for path, leaf in leaves_with_paths(parts.params):
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            raise ConfigError(
                f"the parameter {path!r} has dtype {leaf.dtype}, of which there is no gradient; "
                "keep it in an nnx.Variable instead of an nnx.Param"
            )
    return parts
