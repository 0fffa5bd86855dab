"""The library's own mesh context, in which it traces programs whatever mesh the caller has set.

`jax.set_mesh` puts a mesh in context for all code of a thread. Its axes are explicit by default:
array types then include a sharding, and operations refuse operands of another mesh. A step has its
own mesh, over which the compiler shards, so it is traced, compiled and called without the caller's.
The library's public functions enter this context; the code inside does not depend on it.

Models name axes too: `with_sharding_constraint(x, P("data", None))`. These are axes of the mesh
that their author had in mind. `AxisNames` maps them to axes of the step's mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .compat import OwnContext, current_reader, is_in_trace, read_shardings
from .errors import AXIS_SYNONYMS, ConfigError, UnsupportedError, did_you_mean
from .typing import Array

_P = ParamSpec("_P")
_R = TypeVar("_R")

FREE = PartitionSpec.UNCONSTRAINED

# These are `SLOW_AXES` and `DATA_AXES`. The packages that define them import this one.
_DATA = ("pods", "nodes", "dp", "fsdp")
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    name: _DATA if axis == "dp" else (axis,)
    for axis, names in AXIS_SYNONYMS.items()
    if axis != "nodes"
    for name in (axis, *names)
}
"""Axis names of this library and of other code, and the mesh axes that they mean in a model."""


@dataclasses.dataclass(frozen=True)
class AxisNames:
    """Maps the axis names in a model to axes of the step's mesh.

    The table is looked up first, then the mesh's own axes, then `SYNONYMS`. Axes of a synonym that
    the mesh lacks are dropped.

    Args:
        mesh: the step's mesh; None for no mesh, and then every name maps to no axis.
        table: pairs of a name and the axes that it means.

    Raises:
        ConfigError: if the table names an axis that the mesh lacks.

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
        """Builds the map from the names that a user gives.

        Args:
            mesh: the step's mesh.
            given: maps a name to one axis, several axes, or none.

        Raises:
            ConfigError: if `given` maps a name to an axis that the mesh lacks.
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
        """The mesh axes that a name means; None for an unknown name."""
        if self.mesh is None:
            return ()
        axes = self.mesh.axis_names
        listed = dict(self.table).get(name)
        if listed is not None:
            return listed
        if name in axes:
            return (name,)
        known = SYNONYMS.get(name)
        return None if known is None else tuple(axis for axis in known if axis in axes)

    def of_annotation(self, spec: PartitionSpec) -> PartitionSpec:
        """Translates a parameter's annotated spec to mesh axes, by the table alone.

        Synonyms are not looked up, because the strategy decides how parameters are split. A name
        that is in neither the mesh nor the table splits nothing.
        """
        table = dict(self.table)

        def axes_of(entry: Any) -> tuple[str, ...] | None:
            listed = [axis for name in _names(entry) for axis in table.get(name, (name,))]
            return tuple(dict.fromkeys(listed)) or None

        return PartitionSpec(*map(axes_of, spec))

    def placeholder(self, sharding: NamedSharding | PartitionSpec) -> NamedSharding:
        """A placeholder for a sharding that a model names.

        Its mesh is a stand-in with the axis names of the spec. `constrain` replaces it by the
        step's mesh when the array is known.
        """
        if isinstance(sharding, NamedSharding):
            if self.is_placeholder(sharding) or not self.is_foreign(sharding.mesh):
                return sharding
            sharding = sharding.spec
        names = tuple(dict.fromkeys(name for entry in sharding for name in _names(entry)))
        return NamedSharding(_stand_in((PLACEHOLDER, *names)), sharding)

    def is_placeholder(self, sharding: NamedSharding) -> bool:
        """Whether a sharding was made by `placeholder`."""
        return PLACEHOLDER in sharding.mesh.axis_names

    def is_foreign(self, mesh: Mesh | AbstractMesh) -> bool:
        """Whether a mesh is neither the step's nor the step's inside a `shard_map`."""
        is_other = self.mesh is not None and mesh.shape_tuple != self.mesh.shape_tuple
        return is_other or bool(mesh.explicit_axes)

    def constrain(
        self, x: Array, sharding: NamedSharding, bind: Callable[[Array, NamedSharding], Array]
    ) -> Array:
        """Constrains an array as the model asks, as far as the current context allows.

        Dims that the model does not mention, or whose axes the mesh lacks, are left to the
        compiler. Axes that are manual in a `shard_map` are dropped: they split the array already.

        Args:
            x: the array.
            sharding: a result of `placeholder`, or a sharding over the step's mesh.
            bind: adds a constraint.

        Raises:
            UnsupportedError: for an unknown name.
        """
        is_placeholder = self.is_placeholder(sharding)
        here = jax.sharding.get_abstract_mesh()
        if not is_placeholder and (not here.manual_axes or sharding.mesh == here):
            return bind(x, sharding)
        if self.mesh is None:
            return x
        spec = self._translated(x, sharding.spec) if is_placeholder else sharding.spec
        mesh = here if here.manual_axes else self.mesh
        auto = tuple(axis for axis in mesh.axis_names if axis not in here.manual_axes)
        auto_spec = PartitionSpec(*(_only(entry, auto) for entry in spec))
        if all(entry is FREE for entry in auto_spec):
            return x
        return bind(x, NamedSharding(mesh, auto_spec))

    def _translated(self, x: Array, spec: PartitionSpec) -> PartitionSpec:
        """Translates a placeholder spec to mesh axes; `FREE` for dims without any."""
        mesh: Any = self.mesh
        entries: list[Any] = [FREE] * x.ndim
        used = set[str]()
        for dim, entry in enumerate(spec):
            axes: list[str] = []
            for name in _names(entry):
                meant = self.meant(name)
                if meant is None:
                    raise UnsupportedError(self._unknown(name, x, spec))
                axes += [axis for axis in meant if axis not in used and axis not in axes]
            # Dims that do not divide by their axes are left to the compiler. Not dim 0: the result
            # would then depend on the number of rows in the batch.
            size = math.prod(mesh.shape[axis] for axis in axes)
            if axes and (dim == 0 or x.shape[dim] % size == 0):
                used.update(axes)
                entries[dim] = tuple(axes)
        return PartitionSpec(*entries)

    def _unknown(self, name: str, x: Array, spec: PartitionSpec) -> str:
        axes = () if self.mesh is None else self.mesh.axis_names
        meant = axes[0] if axes else "dp"
        return (
            f"the model shards an array {x.dtype}{list(x.shape)} as {spec}, but {name!r} is "
            f"neither an axis of the mesh {_sizes(self.mesh)} nor a known name of one."
            f"{did_you_mean(name, axes)} Map it to axes: "
            f"build_train_step(axis_names={{{name!r}: {meant!r}}}), or {{{name!r}: ()}} for none"
        )


PLACEHOLDER = "named by the model"
"""The axis name that marks a stand-in mesh made by `AxisNames.placeholder`."""


@functools.lru_cache(maxsize=256)
def _stand_in(names: tuple[str, ...]) -> AbstractMesh:
    return AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is FREE:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _only(entry: Any, axes: tuple[str, ...]) -> Any:
    """Drops all but the given axes from an entry of a spec; `FREE` if none remains."""
    if entry is None or entry is FREE:
        return entry
    return tuple(name for name in _names(entry) if name in axes) or FREE


def _sizes(mesh: Any) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items()) if mesh else "(none)"


_NO_NAMES = AxisNames(None)


def own_context(names: AxisNames | None = None) -> contextlib.AbstractContextManager[None]:
    """The context in which this library traces, compiles and calls; see the module docstring.

    Args:
        names: maps the axis names in a model. None keeps the map of an enclosing context; without
            one, all constraints of the model are dropped.
    """
    read_shardings()
    if names is None:
        names = current_reader() or _NO_NAMES
    return OwnContext(names)


def in_own_context(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function to run in the library's own mesh context, unless it is being traced.

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
    """Decorates a method of a step, or a function of one, to run in the context of that step.

    Args:
        method: its first argument is the step, whose `axis_names` are used.
    """

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        step: Any = args[0]
        with own_context(step.axis_names):
            return method(*args, **kwargs)

    return run


def readable_by_caller(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a method to return its metrics on the caller's mesh, if there is one.

    JAX refuses operations on an array of other devices than those of the mesh in context, and on
    an array of another mesh while explicit axes are in context. Callers compute with metrics.

    Args:
        method: returns metrics, or a pair of something else and metrics.
    """

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        result: Any = method(*args, **kwargs)
        if is_in_trace() or jax.sharding.get_abstract_mesh().empty:
            return result
        if isinstance(result, tuple):
            first, metrics = result
            moved: Any = first, jax.tree.map(_on_callers_mesh, metrics)
            return moved
        return jax.tree.map(_on_callers_mesh, result)

    return run


def _on_callers_mesh(x: Array) -> Array:
    """Moves a replicated array to the mesh in context if JAX would refuse it there."""
    abstract = jax.sharding.get_abstract_mesh()
    mesh = jax.sharding.get_mesh()
    devices = x.sharding.device_set
    if mesh.empty:
        # `use_abstract_mesh` names no devices. An array of another number of them is refused.
        if not abstract.explicit_axes or abstract.size != len(devices):
            return x
        ordered = np.array(sorted(devices, key=lambda device: device.id))
        arranged = ordered.reshape(abstract.axis_sizes)
        mesh = Mesh(arranged, abstract.axis_names, axis_types=abstract.axis_types)
    sharding = NamedSharding(mesh, PartitionSpec())
    # JAX sends to the devices of another process only from a mesh that has all of them, and reading
    # a metric needs no move.
    may_stay = sharding.device_set == devices or not sharding.is_fully_addressable
    if may_stay and not abstract.explicit_axes:
        return x
    return _replicated(x, sharding)


def _replicated(x: Array, sharding: NamedSharding) -> Array:
    """Moves a replicated array to another sharding; sends it only to devices that lack it."""
    shard_on = {shard.device: shard.data for shard in x.addressable_shards}
    shards = [shard_on[device] for device in sharding.addressable_devices if device in shard_on]
    if len(shards) < len(sharding.addressable_devices):
        return jax.device_put(x, sharding)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)
