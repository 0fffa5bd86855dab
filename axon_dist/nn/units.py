"""Units: modules of an unmodified model whose calls become visible in the traced program.

FSDP gathers the weights of one unit at a time, rematerialisation recomputes one, and a pipeline
cuts between two. All three need to know where a block of somebody else's model begins and ends. A
marked module runs its own `__call__` inside a named `jax.jit`, so that in the jaxpr of the model
every block is one equation, and equal blocks have the same inner program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx

from ..core.errors import UnsupportedError
from ..core.tree import path_str
from ..core.typing import Path

UNIT_NAME = "axon_unit"
"""The name of the equation that a marked call becomes."""

GATHER = "axon_gather"
"""The metadata of a parameter that holds how a unit gathers it."""

IsUnit: TypeAlias = Callable[[Path, nnx.Module], bool]
"""(path, module) -> whether calls of the module are a unit."""

RematPolicy: TypeAlias = Callable[..., Any]
"""A policy of `jax.checkpoint`: which intermediate results are kept for the backward pass."""


def units_of(model: nnx.Module, is_unit: IsUnit) -> Iterator[tuple[Path, nnx.Module]]:
    """The outermost modules that are units, with their paths; nothing inside a unit is one."""
    found: list[str] = []
    paths = sorted(
        ((_path(keys), module) for keys, module in nnx.iter_modules(model)),
        key=lambda item: item[0].count("/") if item[0] else -1,
    )
    for path, module in paths:
        if not any(is_inside(path, outer) for outer in found) and is_unit(path, module):
            found.append(path)
            yield path, module


def is_inside(path: Path, unit: Path) -> bool:
    """Whether a path is that of a unit or of something in it; the whole model has the path ""."""
    return path == unit or not unit or path.startswith(unit + "/")


def mark_units(model: nnx.Module, is_unit: IsUnit, remat: RematPolicy | None = None) -> list[Path]:
    """Makes every unit of a model a named equation of the traced program, in place.

    Args:
        model: a model merged inside a trace; it is changed.
        is_unit: which modules are units; the outermost win.
        remat: when given, each unit is under `jax.checkpoint` with this policy.

    Returns:
        The paths of the units.

    Example:
        >>> model = nnx.Sequential(*(nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(3)))
        >>> mark_units(model, lambda path, module: isinstance(module, nnx.Linear))
        ['layers/0', 'layers/1', 'layers/2']
        >>> jaxpr = jax.make_jaxpr(model)(jax.numpy.ones((1, 2)))
        >>> [equation.params["name"] for equation in jaxpr.eqns]
        ['axon_unit', 'axon_unit', 'axon_unit']
    """
    units = list(units_of(model, is_unit))
    for _, module in units:
        object.__setattr__(module, "__class__", _marked(type(module), remat))
    return [path for path, _ in units]


@functools.cache
def _marked(module_type: type[nnx.Module], remat: RematPolicy | None) -> type[nnx.Module]:
    """A type like `module_type` whose call goes through the named equation."""
    if hasattr(module_type, "_axon_original"):
        return module_type

    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        graphdef, params, rest = nnx.split(self, nnx.Param, ...)
        leaves, structure = jax.tree.flatten((args, kwargs))
        static = tuple(None if _is_array(leaf) else Static(leaf) for leaf in leaves)
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        output, rest = axon_unit(graphdef, (structure, static, remat), params, rest, arrays)
        nnx.update(self, rest)
        return output

    members = {"__call__": call, "__doc__": module_type.__doc__, "_axon_original": module_type}
    return type(module_type.__name__, (module_type,), members)


@dataclasses.dataclass(frozen=True)
class Static:
    """A flag among the arguments of a unit, which is part of its program.

    Args:
        value: anything hashable that is not an array.
    """

    value: Any


@functools.partial(jax.jit, static_argnums=(0, 1))
def axon_unit(graphdef: Any, how: Any, params: Any, rest: Any, arrays: list[Any]) -> Any:
    """Runs a unit: gathers its parameters, calls the module, returns output and changed state."""
    structure, static, remat = how
    run = functools.partial(_run, graphdef, structure, static)
    return (run if remat is None else jax.checkpoint(run, policy=remat))(params, rest, arrays)


def _run(graphdef: Any, structure: Any, static: tuple, params: Any, rest: Any, arrays: Any) -> Any:
    module = nnx.merge(graphdef, gathered(params), rest, copy=True)
    source = iter(arrays)
    leaves = [next(source) if flag is None else flag.value for flag in static]
    args, kwargs = jax.tree.unflatten(structure, leaves)
    output = type(module)._axon_original.__call__(module, *args, **kwargs)
    return output, nnx.state(module, nnx.Not(nnx.Param))


def gathered(params: Any) -> Any:
    """Gathers every parameter that says how; the others stay as they are."""

    def one(variable: Any) -> Any:
        gather = variable.get_metadata().get(GATHER)
        return variable if gather is None else variable.replace(gather(variable[...]))

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def check_some(paths: list[Path], what: str, model: nnx.Module) -> None:
    """Raises unless a model has units.

    Raises:
        UnsupportedError: naming what was looked for and the classes that the model has.
    """
    if not paths:
        classes = sorted({type(module).__name__ for _, module in nnx.iter_modules(model)})
        raise UnsupportedError(
            f"{what} matches no module of the model; it has modules of the classes "
            f"{', '.join(classes)}. Name one of them"
        )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def _path(keys: tuple[Any, ...]) -> Path:
    return path_str(tuple(keys))
