"""The mesh context of this library: programs are traced under it, whatever a caller has in context.

`jax.set_mesh` puts a mesh in context for all code of a thread. Its axes are explicit by default:
every array then has a type with a sharding, and operations refuse operands of another mesh. A step
has a mesh of its own, over which the compiler shards, and is traced, compiled and called without
the caller's. The doors of the library enter this context; what runs inside knows nothing of it.

Models name axes, too: `with_sharding_constraint(x, P("data", None))`. These are names of the mesh
that their author had in mind. `AxisNames` says which axes of the step's mesh they mean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .compat import OwnContext, current_reader, is_in_trace, read_shardings
from .errors import ConfigError, UnsupportedError, did_you_mean
from .typing import Array

_P = ParamSpec("_P")
_R = TypeVar("_R")

FREE = PartitionSpec.UNCONSTRAINED

_DATA = ("nodes", "dp", "fsdp")
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("data", "batch", "replica", "data_parallel", "dp", "x"), _DATA),
    **dict.fromkeys(("fsdp", "shard", "sharded"), ("fsdp",)),
    **dict.fromkeys(("model", "tensor", "mp", "mdl", "model_parallel", "tp", "y"), ("tp",)),
    **dict.fromkeys(("seq", "sequence", "context", "sp", "cp"), ("cp",)),
    **dict.fromkeys(("expert", "experts", "ep"), ("ep",)),
    **dict.fromkeys(("pipe", "pipeline", "stage", "stages", "pp"), ("pp",)),
}
"""Names of mesh axes that others use, and the axes of this library that they mean."""


@dataclasses.dataclass(frozen=True)
class AxisNames:
    """Which axes of a mesh are meant by the names that a model gives them.

    A name of the mesh is itself. Other names are looked up in the table, then among `SYNONYMS`; of
    what they mean, axes that the mesh lacks are left out.

    Args:
        mesh: that of the step; None where there is none, and then every name means nothing.
        table: pairs of a name and the axes that it means.

    Raises:
        ConfigError: when the table names an axis that the mesh lacks.

    Example:
        >>> mesh = AbstractMesh((2, 4), ("dp", "tp"))
        >>> names = AxisNames(mesh, (("rows", ("dp",)),))
        >>> names.meant("rows"), names.meant("model"), names.meant("expert")
        (('dp',), ('tp',), ())
    """

    mesh: Mesh | AbstractMesh | None
    table: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def of(
        cls, mesh: Mesh | AbstractMesh, given: Mapping[str, str | Sequence[str]] | None
    ) -> AxisNames:
        """The names of a mesh, and those that a user gives.

        Args:
            mesh: that of the step.
            given: from a name to one axis, several axes, or none.

        Raises:
            ConfigError: when it names an axis that the mesh lacks.
        """
        pairs = {
            name: (axes,) if isinstance(axes, str) else tuple(axes)
            for name, axes in (given or {}).items()
        }
        for name, axes in pairs.items():
            for axis in axes:
                if axis not in mesh.axis_names:
                    raise ConfigError(
                        f"axis_names maps {name!r} to the axis {axis!r}, which the mesh "
                        f"{_sizes(mesh)} lacks.{did_you_mean(axis, mesh.axis_names)} An empty "
                        "list means no axis"
                    )
        return cls(mesh, tuple(sorted(pairs.items())))

    def meant(self, name: str) -> tuple[str, ...] | None:
        """The axes of the mesh that a name means; None for a name that nobody knows."""
        if self.mesh is None:
            return ()
        axes = self.mesh.axis_names
        given = dict(self.table).get(name)
        if given is not None:
            return given
        if name in axes:
            return (name,)
        known = SYNONYMS.get(name)
        return None if known is None else tuple(axis for axis in known if axis in axes)

    def of_annotation(self, spec: PartitionSpec) -> PartitionSpec:
        """The spec that an author wrote on a parameter, in axes of the mesh as the table says.

        Synonyms are not looked up: how parameters are split is a matter of the strategy, and names
        that neither the mesh nor the table has split none.
        """
        table = dict(self.table)

        def axes_of(entry: Any) -> tuple[str, ...] | None:
            listed = [axis for name in _names(entry) for axis in table.get(name, (name,))]
            return tuple(dict.fromkeys(listed)) or None

        return PartitionSpec(*map(axes_of, spec))

    def stated(self, sharding: NamedSharding | PartitionSpec) -> NamedSharding:
        """A sharding that a model states, over a mesh of the names in it.

        Such a mesh stands for the author's until the array is known: see `constrain`.
        """
        if isinstance(sharding, NamedSharding):
            if self.is_stated(sharding) or not self.is_foreign(sharding.mesh):
                return sharding
            sharding = sharding.spec
        names = tuple(dict.fromkeys(name for entry in sharding for name in _names(entry)))
        return NamedSharding(_stand_in((STATED, *names)), sharding)

    def is_stated(self, sharding: NamedSharding) -> bool:
        """Whether a sharding is one that `stated` made."""
        return STATED in sharding.mesh.axis_names

    def is_foreign(self, mesh: Mesh | AbstractMesh) -> bool:
        """Whether a mesh is neither that of the step nor what a `shard_map` makes of it."""
        is_other = self.mesh is not None and mesh.shape_tuple != self.mesh.shape_tuple
        return is_other or bool(mesh.explicit_axes)

    def constrain(
        self, x: Array, sharding: NamedSharding, bind: Callable[[Array, NamedSharding], Array]
    ) -> Array:
        """An array constrained as the model states, as far as it can be where the caller is.

        Dims of which the model says nothing, or whose axes the mesh lacks, are left to the
        compiler. Axes that a `shard_map` has made manual split the array already.

        Args:
            x: the array.
            sharding: what `stated` gave, or one over the mesh of the step.
            bind: adds a constraint.

        Raises:
            UnsupportedError: for a name that nobody knows.
        """
        is_stated = self.is_stated(sharding)
        here = jax.sharding.get_abstract_mesh()
        if not is_stated and (not here.manual_axes or sharding.mesh == here):
            return bind(x, sharding)
        if self.mesh is None:
            return x
        spec = self._translated(x, sharding.spec) if is_stated else sharding.spec
        mesh = here if here.manual_axes else self.mesh
        left = tuple(axis for axis in mesh.axis_names if axis not in here.manual_axes)
        kept = PartitionSpec(*(_only(entry, left) for entry in spec))
        if all(entry is FREE for entry in kept):
            return x
        return bind(x, NamedSharding(mesh, kept))

    def _translated(self, x: Array, stated: PartitionSpec) -> PartitionSpec:
        """The axes that a stated spec means for an array; `FREE` where it means none."""
        mesh: Any = self.mesh
        entries: list[Any] = [FREE] * x.ndim
        used = set[str]()
        for dim, entry in enumerate(stated):
            axes: list[str] = []
            for name in _names(entry):
                meant = self.meant(name)
                if meant is None:
                    raise UnsupportedError(self._unknown(name, x, stated))
                axes += [axis for axis in meant if axis not in used and axis not in axes]
            # What does not divide by its axes is left to the compiler; of the rows of a batch that
            # would depend on how many there are.
            size = math.prod(mesh.shape[axis] for axis in axes)
            if axes and (dim == 0 or x.shape[dim] % size == 0):
                used.update(axes)
                entries[dim] = tuple(axes)
        return PartitionSpec(*entries)

    def _unknown(self, name: str, x: Array, stated: PartitionSpec) -> str:
        axes = () if self.mesh is None else self.mesh.axis_names
        meant = axes[0] if axes else "dp"
        return (
            f"the model shards an array {x.dtype}{list(x.shape)} as {stated}, and neither the mesh "
            f"{_sizes(self.mesh)} nor a known other name is called {name!r}."
            f"{did_you_mean(name, axes)} Say which axes are meant: "
            f"build_train_step(axis_names={{{name!r}: {meant!r}}}), or {{{name!r}: ()}} for none"
        )


STATED = "named by the model"
"""The axis by which a mesh is known that only stands for the one that a model's author had."""


@functools.lru_cache(maxsize=256)
def _stand_in(names: tuple[str, ...]) -> AbstractMesh:
    return AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is FREE:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _only(entry: Any, axes: tuple[str, ...]) -> Any:
    """An entry of a spec with the axes that may be named; `FREE` where none is left of several."""
    if entry is None or entry is FREE:
        return entry
    kept = tuple(name for name in _names(entry) if name in axes)
    return kept or FREE


def _sizes(mesh: Any) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items()) if mesh else "(none)"


_NO_NAMES = AxisNames(None)


def own_context(names: AxisNames | None = None) -> contextlib.AbstractContextManager[None]:
    """The context in which this library traces, compiles and calls; see the module's docstring.

    Args:
        names: what the axes that a model names mean; None keeps what they mean already, or leaves
            every constraint of the model out.
    """
    read_shardings()
    if names is None:
        names = current_reader() or _NO_NAMES
    return OwnContext(names)


def in_own_context(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Has a function run in the library's own mesh context, where it is not traced by a caller.

    Example:
        >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        ...     in_own_context(lambda: jax.sharding.get_abstract_mesh().empty)()
        True
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_in_trace():
            return function(*args, **kwargs)
        with own_context():
            return function(*args, **kwargs)

    return run


def in_context_of_step(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Has a method run in the context of its step, whose names of axes `self.axis_names` are."""

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        step: Any = args[0]
        with own_context(step.axis_names):
            return method(*args, **kwargs)

    return run


def readable_by_caller(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Has a method give its metrics on the explicit mesh that its caller has in context.

    JAX refuses operations of an array on one mesh while explicit axes of another are in context,
    and metrics are there to be computed with. Every device has them, so that nothing is sent.

    Args:
        method: returns metrics, or a pair of something else and metrics.
    """

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        result: Any = method(*args, **kwargs)
        if is_in_trace() or not jax.sharding.get_abstract_mesh().explicit_axes:
            return result
        place = NamedSharding(jax.sharding.get_mesh(), PartitionSpec())
        if isinstance(result, tuple):
            first, metrics = result
            moved: Any = first, jax.tree.map(lambda x: _replicated(x, place), metrics)
            return moved
        return jax.tree.map(lambda x: _replicated(x, place), result)

    return run


def _replicated(x: Array, place: NamedSharding) -> Array:
    """An array that every device holds, in another place; sent only to devices without it."""
    held = {shard.device: shard.data for shard in x.addressable_shards}
    shards = [held[device] for device in place.addressable_devices if device in held]
    if len(shards) < len(place.addressable_devices):
        return jax.device_put(x, place)
    return jax.make_array_from_single_device_arrays(x.shape, place, shards)
