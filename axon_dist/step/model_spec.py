"""A model split once, outside the step, into structure, parameters and buffers."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeAlias, Union, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ..core.checks import is_wrapper, takes
from ..core.compat import eval_jaxpr
from ..core.errors import ConfigError
from ..core.modules import bridges_of, stacks_of, traceable
from ..core.tree import (
    combine,
    floating_dtype,
    leaves_with_paths,
    partition,
    problem_of,
    shapes_of,
)
from ..core.typing import Function, Path, PyTree, Shape, Trainable
from ..core.words import pattern_error
from ..ops.int8 import Int8Form, as_values, int8_form, narrowed
from ..ops.precision import MixedPrecision, cast_floating

INT8 = "int8"
"""The `frozen_dtype` that quantises matrices, as `int8_form` says, instead of casting them."""

FORWARD_STATE = (nnx.BatchStat, nnx.RngState, nnx.Cache, nnx.Intermediate)
"""Variables that a forward pass changes itself, so an optimizer must not."""


def trainable_filter(trainable: Trainable) -> Callable[[Any, Any], bool]:
    """Turns a choice of trained parameters into an nnx filter.

    Args:
        trainable: a type of Variable, such as `nnx.LoRAParam`; a regular expression, which is
            searched for anywhere in the paths of the model's `nnx.Param`s (a string as an nnx
            filter would be a tag); a predicate `(keys, variable)` or another nnx filter, such as
            `nnx.All(nnx.Param, nnx.Not(nnx.PathContains("embedding")))`; or a tuple of these, any
            of which may match.

    Returns:
        `(keys, variable)` -> whether it is trained. This is an nnx filter, such as
        `nnx.Optimizer(model, tx, wrt=...)` takes.

    Raises:
        ConfigError: when it is none of these, or a string is not a regular expression.

    Example:
        >>> is_trained = trainable_filter(("head", nnx.LoRAParam))
        >>> is_trained(("head", "kernel"), nnx.Param(0.0)), is_trained(("kernel",), nnx.Param(0.0))
        (True, False)
        >>> is_trained(("kernel", "lora_a"), nnx.LoRAParam(0.0))
        True
    """
    if isinstance(trainable, (tuple, list)):
        filters = [trainable_filter(one) for one in trainable]
        return lambda keys, variable: any(one(keys, variable) for one in filters)
    if isinstance(trainable, str):
        if why := pattern_error(trainable):
            raise ConfigError(
                f"trainable={trainable!r} {why}; give one that matches the paths of the trained "
                "parameters, such as 'blocks/.*/kernel'"
            )
        pattern = re.compile(trainable)
        return lambda keys, variable: (
            isinstance(variable, nnx.Param) and pattern.search("/".join(map(str, keys))) is not None
        )
    if isinstance(trainable, type):
        is_filter = issubclass(trainable, nnx.Variable)
    else:
        is_predicate = callable(trainable) and takes(trainable, "keys", "variable")
        is_filter = is_predicate or trainable is ... or isinstance(trainable, bool)
    if not is_filter:
        raise ConfigError(
            f"trainable={trainable!r}; give a type of Variable such as nnx.LoRAParam, a regular "
            "expression of paths such as 'head', a predicate (keys, variable), or a tuple of these"
        )
    return nnx.filterlib.to_predicate(cast(Any, trainable))


def check_trainable(trainable: Trainable, model: nnx.Module) -> None:
    """Raises unless a choice matches Variables of a model, all of which an optimizer may change.

    Args:
        trainable: as for `trainable_filter`; each part of a tuple must match something.
        model: any model; its leaves may be tracers.

    Raises:
        ConfigError: naming the choice and what the model has, or the Variable.
    """
    flat = nnx.to_flat_state(nnx.state(model))
    for one in trainable if isinstance(trainable, (tuple, list)) else (trainable,):
        is_trained = trainable_filter(one)
        matches = [(keys, variable) for keys, variable in flat if is_trained(keys, variable)]
        if not matches:
            kinds = sorted({type(variable).__name__ for _, variable in flat})
            paths = ["/".join(map(str, k)) for k, v in flat if isinstance(v, nnx.Param)]
            more = f", ... ({len(paths)} in all)" if len(paths) > 8 else ""
            raise ConfigError(
                f"trainable={_words(one)} finds nothing in the model, which has Variables of the "
                f"types {', '.join(kinds) or 'none'} and parameters at the paths "
                f"{', '.join(paths[:8]) or 'none'}{more}; name one of these"
            )
        for keys, variable in matches:
            if isinstance(variable, FORWARD_STATE):
                remedy = f"leave such state out: nnx.All({_words(one)}, nnx.Param)"
                if isinstance(one, type):
                    remedy = "name a type of parameter, such as nnx.Param"
                raise ConfigError(
                    f"trainable={_words(one)} takes in {'/'.join(map(str, keys))!r}, an "
                    f"nnx.{type(variable).__name__} that the forward pass changes itself; {remedy}"
                )


def frozen_as(dtype: DTypeLike, frozen: PyTree) -> Any:
    """Reads the dtype in which the state keeps frozen parameters.

    Args:
        dtype: a floating-point dtype or its name, or int8.
        frozen: the frozen parameters.

    Raises:
        ConfigError: when it is another dtype, or nothing is frozen.
    """
    if not jax.tree.leaves(frozen):
        raise ConfigError(
            f"frozen_dtype={dtype!r}, but the model has no frozen parameters; say what is trained, "
            "such as trainable=nnx.LoRAParam, or leave the dtype out",
            code="nothing-frozen",
        )
    try:
        is_int8 = jnp.dtype(dtype) == jnp.int8
    except (TypeError, ValueError):
        is_int8 = False
    return INT8 if is_int8 else floating_dtype(dtype, "frozen")


def _words(trainable: Any) -> str:
    if isinstance(trainable, type):
        inside = issubclass(trainable, nnx.Variable) and trainable.__module__.startswith("flax.nnx")
        return f"nnx.{trainable.__name__}" if inside else trainable.__name__
    name = getattr(trainable, "__name__", None)
    return name if isinstance(name, str) and not isinstance(trainable, str) else repr(trainable)


# The metaclass of modules hides `|` from type checkers.
ModelLike: TypeAlias = Union[nnx.Module, Callable[[], nnx.Module]]  # noqa: UP007
"""A module, or a zero-argument function that makes one; the function's arrays are made sharded."""

LINEN_BOX = "linen_meta_type"
"""The metadata in which `nnx.bridge` records how Linen boxes a value with axes."""

STEP = "axon_step"
"""The key among the buffers under which a loss gets the number of the step."""
SHARED = "axon_shared"
"""The key among the buffers under which a loss gets what all samples share."""
MEAN_WEIGHT = "axon_mean_weight"
"""The key in `SHARED` of the mean weight of a sample, by which a `WithTerm` counts its term."""


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The structure of a model and the shapes of its arrays.

    Args:
        graphdef: the structure; hashable, without arrays.
        params: nested dict of `ShapeDtypeStruct`: the trained parameters.
        buffers: nested dict of `ShapeDtypeStruct`: every Variable that is neither trained nor an
            `nnx.Param`: BatchStat, RngState, Cache, your own types.
        frozen: nested dict of `ShapeDtypeStruct`: the parameters that the optimizer does not train.
        reads_step: whether the loss takes the number of the step.
        shared: nested dict of `ShapeDtypeStruct`: the `Shared` leaves of a batch.
        outside_forward_state: the paths of all Variables whose types are not in `FORWARD_STATE`:
            parameters, and buffers of other types, which may be of any size.
        int8: the frozen parameters that the state keeps in eight bits, by path; `frozen` and
            `weights` describe them as the model reads them.

    Attributes:
        weights: nested dict of `ShapeDtypeStruct`: trained and frozen parameters, in the model's
            form. The forward pass reads these; policies and units work on these alone.
        shapes: their global shapes by path.
        frozen_paths: the paths of the frozen parameters.

    Raises:
        ConfigError: when nothing is trained, or a trained parameter has no gradient.
    """

    graphdef: nnx.GraphDef
    params: PyTree
    buffers: PyTree
    frozen: PyTree = dataclasses.field(default_factory=dict)
    reads_step: bool = False
    outside_forward_state: frozenset[Path] = frozenset()
    shared: PyTree = dataclasses.field(default_factory=dict)
    int8: Mapping[Path, Int8Form] = dataclasses.field(default_factory=dict)
    weights: PyTree = dataclasses.field(init=False, repr=False)
    shapes: Mapping[Path, Shape] = dataclasses.field(init=False, repr=False)
    frozen_paths: frozenset[Path] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not jax.tree.leaves(self.params):
            # A choice that matches nothing has raised already.
            raise ConfigError(
                "the model has no nnx.Param, so there is nothing to train; a bridged Linen module "
                "needs lazy_init(x) first"
            )
        for path, leaf in leaves_with_paths(self.params):
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise ConfigError(
                    f"the parameter {path!r} has dtype {leaf.dtype}, which has no gradient; keep "
                    "it in an nnx.Variable instead of an nnx.Param",
                    code="param-dtype",
                )
        weights = combine(self.params, self.frozen) if self.frozen else self.params
        object.__setattr__(self, "weights", weights)
        shapes = {path: leaf.shape for path, leaf in leaves_with_paths(weights)}
        object.__setattr__(self, "shapes", shapes)
        frozen = frozenset(path for path, _ in leaves_with_paths(self.frozen))
        object.__setattr__(self, "frozen_paths", frozen)

    @property
    def arguments(self) -> tuple[PyTree, PyTree]:
        """The arguments of a forward pass other than the samples, as shapes: weights, buffers."""
        step = jax.ShapeDtypeStruct((), jnp.int32)
        return self.weights, self.with_inputs(self.buffers, step, self.shared)

    def with_inputs(self, buffers: PyTree, step: Any, shared: PyTree) -> PyTree:
        """Adds to the buffers the other inputs of the loss that belong to no sample.

        They are passed with the buffers because these belong to no sample either. They come out
        unchanged, like a key from which nothing is drawn.

        Args:
            buffers: the model's own.
            step: how many steps have been taken; omitted if the loss does not take it.
            shared: nested dict, the `Shared` leaves of the batch.
        """
        number = {STEP: step} if self.reads_step else {}
        return {**buffers, **number, **({SHARED: shared} if shared else {})}

    @cached_property
    def stored_frozen(self) -> PyTree:
        """Nested dict of `ShapeDtypeStruct`: the frozen parameters as the state keeps them."""
        return jax.eval_shape(lambda frozen: narrowed(frozen, self.int8), self.frozen)

    @property
    def dtype(self) -> Any:
        """The dtype that the parameters promote to; for complex numbers that of their parts."""
        dtype = jnp.result_type(*(leaf.dtype for leaf in jax.tree.leaves(self.params)))
        return jnp.finfo(dtype).dtype if dtype.kind == "c" else dtype

    @cached_property
    def counts(self) -> frozenset[Path]:
        """The paths of the counts of random streams."""
        return self._paths_of(nnx.RngCount)

    @cached_property
    def random_state(self) -> frozenset[Path]:
        """The paths of the keys and counts of random streams."""
        return self._paths_of(nnx.RngState)

    def _paths_of(self, kind: type[nnx.Variable]) -> frozenset[Path]:
        flat = nnx.to_flat_state(nnx.state(self.abstract, kind))
        return frozenset("/".join(map(str, keys)) for keys, _ in flat)

    @cached_property
    def abstract(self) -> nnx.Module:
        """The model with shapes in place of arrays; do not modify it."""
        return nnx.merge(self.graphdef, self.weights, self.buffers)

    @cached_property
    def stacks(self) -> Mapping[Path, int]:
        """The outermost modules that stack layers, and the number of layers in each."""
        return stacks_of(self.abstract)

    @cached_property
    def bridges(self) -> frozenset[Path]:
        """The paths of the bridged Linen modules."""
        return frozenset("/".join(map(str, keys)) for keys, _ in bridges_of(self.abstract))

    def merge(self, weights: PyTree, buffers: PyTree) -> nnx.Module:
        """Builds a model from arrays; changing the model does not change the trees given.

        A parameter in eight bits becomes an `Int8` value of its Variable.
        """
        values = as_values(weights, self.int8) if self.int8 else weights
        return nnx.merge(self._unboxed, values, split_inputs(buffers)[0], copy=True)

    @cached_property
    def _unboxed(self) -> nnx.GraphDef:
        """The structure without Linen's boxes, so Linen finds plain arrays behind annotations.

        Unboxing such a value would lay it out over the annotated axes if a mesh is in context, even
        over a mesh without these axes. The strategy has read the annotations and decides instead.
        """
        model = nnx.merge(self.graphdef, self.weights, self.buffers)
        variables = (v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable))
        boxed = [v for v in variables if LINEN_BOX in v.get_metadata()]
        for variable in boxed:
            variable.del_metadata(LINEN_BOX)
        return nnx.graphdef(model) if boxed else self.graphdef


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the first values of a model come from: arrays of a module, or a function to run.

    Args:
        arrays: (weights, buffers) of an existing module; the weights are its trained and frozen
            parameters.
        make: returns (weights, buffers) of a new module. Jit it with `out_shardings` to create the
            arrays sharded.
    """

    arrays: tuple[PyTree, PyTree] | None = None
    make: Callable[[], tuple[PyTree, PyTree]] | None = None


def split_model(model: ModelLike, trainable: Trainable = nnx.Param) -> tuple[ModelSpec, Source]:
    """Splits a model into structure and arrays; a factory's model is only traced.

    Args:
        model: an NNX module, or a zero-argument function that returns one.
        trainable: which of its Variables are trained; see `trainable_filter`. Every other
            `nnx.Param` is frozen.

    Returns:
        The model's structure and shapes, and where its first values come from.

    Raises:
        ConfigError: when `model` is neither, or nothing in it is trained, or a trained parameter
            has no gradient.

    Example:
        >>> model_spec, source = split_model(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> model_spec.params["kernel"].shape
        (2, 3)
    """
    is_trained = trainable_filter(trainable)
    if isinstance(model, nnx.Module):
        if trainable is not nnx.Param:
            check_trainable(trainable, model)
        (graphdef, outside), trees = _split(model, is_trained)
        for path, leaf in leaves_with_paths(trees):
            name = path.partition("/")[2]
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ConfigError(
                    f"{name!r} of the model is a shape and not an array, as nnx.eval_shape returns "
                    "it; give the function that makes the model, and the step creates every array "
                    "with its sharding",
                    code="model-of-shapes",
                )
            if isinstance(leaf, jax.Array) and (problem := problem_of(leaf)) is not None:
                raise ConfigError(f"{name!r} of the model {problem}")
        params, buffers, frozen = jax.tree.map(jnp.asarray, trees)
        model_spec = ModelSpec(
            graphdef, *shapes_of((params, buffers, frozen)), outside_forward_state=outside
        )
        return model_spec, Source(arrays=(combine(params, frozen), buffers))
    _check_makes_model(model)
    make = traceable(model)
    structure: list[Any] = []

    def new() -> tuple[PyTree, PyTree, PyTree]:
        # Annotated models would require a mesh in context; the strategy decides instead.
        with nnx.use_eager_sharding(False):
            made = make()
        if not isinstance(made, nnx.Module):
            raise ConfigError(
                f"the function that makes the model returned a {type(made).__name__}; let it "
                "return an nnx.Module, such as nnx.Linear(2, 3, rngs=nnx.Rngs(0))"
            )
        if trainable is not nnx.Param:
            check_trainable(trainable, made)
        structure[:], trees = _split(made, is_trained)
        return trees

    closed, shapes = jax.make_jaxpr(new, return_shape=True)()
    graphdef, outside = structure
    model_spec = ModelSpec(graphdef, *shapes, outside_forward_state=outside)
    return model_spec, Source(make=_values(new, closed, shapes))


def _values(new: Function, closed: Any, shapes: PyTree) -> Function:
    """Returns a function that makes the weights and buffers; it reuses the trace if it is small."""
    layout = jax.tree.structure(shapes)
    consts = closed.consts
    is_small = sum(getattr(x, "nbytes", _MOST_KEPT + 1) for x in consts) <= _MOST_KEPT

    def traced() -> PyTree:
        return jax.tree.unflatten(layout, eval_jaxpr(closed, ()))

    # Do not keep large constants alive in the closure.
    make = traced if is_small else new

    def values() -> tuple[PyTree, PyTree]:
        params, buffers, frozen = make()
        return combine(params, frozen), buffers

    return values


_MOST_KEPT = 2**16
"""The most bytes of constants to keep with a factory's trace; it lives as long as the step."""


def split_inputs(buffers: PyTree) -> tuple[PyTree, PyTree]:
    """Separates the buffers of the model from the inputs of the loss that are passed with them."""
    inputs = {key: buffers[key] for key in (STEP, SHARED) if key in buffers}
    return {key: value for key, value in buffers.items() if key not in inputs}, inputs


def stored_as(
    model_spec: ModelSpec, source: Source, dtypes: MixedPrecision | None, frozen: Any = None
) -> tuple[ModelSpec, Source]:
    """Casts a model to the dtypes in which a policy keeps it between steps.

    Args:
        model_spec: the model's structure, and the shapes of its parameters and buffers.
        source: where its first values come from.
        dtypes: `param` is for trained parameters, `buffer` for statistics; None leaves them.
        frozen: the dtype of frozen parameters, or its name; None leaves them. `"int8"` does not
            cast the values here: the returned `ModelSpec.int8` lists those that the state
            keeps in eight bits.

    Returns:
        The structure and the source, recast; a factory's values are cast where they are made.

    Raises:
        ConfigError: when the dtype is neither floating-point nor int8, or nothing is frozen.
    """
    frozen = None if frozen is None else frozen_as(frozen, model_spec.frozen)
    if frozen == INT8:
        model_spec = dataclasses.replace(model_spec, int8=_forms(model_spec))
        frozen = None
    if dtypes is None and frozen is None:
        return model_spec, source

    def cast(tree, dtype):
        return tree if dtype is None else cast_floating(tree, dtype)

    param, buffer = (None, None) if dtypes is None else (dtypes.param, dtypes.buffer)

    def recast(weights: PyTree, buffers: PyTree) -> tuple[PyTree, PyTree]:
        trained, others = partition(weights, model_spec.frozen_paths)
        return combine(cast(trained, param), cast(others, frozen)), cast(buffers, buffer)

    weights, buffers = jax.eval_shape(recast, model_spec.weights, model_spec.buffers)
    params, others = partition(weights, model_spec.frozen_paths)
    stored = dataclasses.replace(model_spec, params=params, buffers=buffers, frozen=others)
    if source.make is not None:
        make = source.make
        return stored, Source(make=lambda: recast(*make()))
    return stored, Source(arrays=recast(*(source.arrays or ({}, {}))))


def _forms(model_spec: ModelSpec) -> dict[Path, Int8Form]:
    stacks = tuple(f"{stack}/" for stack in model_spec.stacks)
    candidates = {
        path: int8_form(path, leaf, stacked=int(path.startswith(stacks)))
        for path, leaf in leaves_with_paths(model_spec.frozen)
    }
    forms = {path: form for path, form in candidates.items() if form is not None}
    if not forms:
        raise ConfigError(
            "frozen_dtype='int8', but no frozen parameter is a matrix whose columns are long "
            f"enough to share a scale: {', '.join(candidates)}; leave the dtype out"
        )
    return forms


def _split(
    model: nnx.Module, trained: Any
) -> tuple[tuple[nnx.GraphDef, frozenset[Path]], tuple[PyTree, PyTree, PyTree]]:
    """Splits a model.

    Returns:
        The structure, with the paths of `ModelSpec.outside_forward_state`; and (trained, buffers,
        frozen).
    """
    graphdef, params, frozen, buffers = nnx.split(model, trained, nnx.Param, ...)
    states = (params, buffers, frozen)
    leaves = [pair for state in states for pair in nnx.to_flat_state(state)]
    for keys, leaf in leaves:
        value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        # The leaves of a tree inside a Variable have no path of their own.
        if isinstance(value, (dict, list, tuple, nnx.State)):
            path = "/".join(map(str, keys))
            raise ConfigError(
                f"the {type(leaf).__name__} {path!r} holds a {type(value).__name__} of "
                f"{len(jax.tree.leaves(value))} arrays; a Variable of a trained model holds one "
                f"array: keep each in a {type(leaf).__name__} of its own, in an nnx.Dict or "
                "nnx.List"
            )
    kinds = nnx.to_flat_state(nnx.state(model))
    outside = frozenset(
        "/".join(map(str, keys)) for keys, kind in kinds if not isinstance(kind, FORWARD_STATE)
    )
    params, buffers, frozen = map(nnx.to_pure_dict, states)
    return (graphdef, outside), (params, buffers, frozen)


def _check_makes_model(model: Any) -> None:
    if is_wrapper(model):
        raise ConfigError(
            f"model is a {type(model).__name__}, a wrapper; give its .module as the model, and the "
            "wrapper as the strategy",
            code="wrapper-as-model",
        )
    if not callable(model) or isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}; give an nnx.Module, or a function of no "
            "arguments that returns one (a Linen module goes through nnx.bridge.ToNNX)"
        )
    if hasattr(model, "cache_info"):
        raise ConfigError(
            "the function that makes the model is cached by functools, and would return values of "
            "another trace; give the function itself, such as lambda: Model(rngs=nnx.Rngs(0))",
            code="cached-model",
        )
    # The metaclass of modules hides the signature of the class.
    run, args = (model.__init__, (None,)) if isinstance(model, type) else (model, ())
    try:
        inspect.signature(run).bind(*args)
    except TypeError as error:
        raise ConfigError(
            f"the function that makes the model cannot be called without arguments ({error}); give "
            "one that can, such as lambda: Model(rngs=nnx.Rngs(0))"
        ) from None
