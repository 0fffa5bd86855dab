"""Rebinds a function to another mesh: finds the meshes in its closure and replaces them."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from ..core.errors import ConfigError, MeshError, reworded
from ..mesh.world import available_devices

Sizes: TypeAlias = Mapping[str, int]
"""The size of each axis of a mesh."""


def sizes_of(mesh: Any) -> dict[str, int]:
    """Reads the sizes of a mesh: `Mesh`, a dict, or text such as `"dp=4,tp=2"`."""
    if isinstance(mesh, Mesh):
        return {str(name): size for name, size in mesh.shape.items()}
    if not isinstance(mesh, (str, Mapping)):
        raise MeshError(
            f"got {mesh!r:.80} for a mesh; it must be a jax.sharding.Mesh, a dict of sizes, or "
            "text such as 'dp=4,tp=2'"
        )
    if isinstance(mesh, str):
        pairs = [part.partition("=")[::2] for part in mesh.split(",")]
        found = {name.strip(): int(size) if size.strip().isdecimal() else 0 for name, size in pairs}
    else:
        found = {str(name): int(size) for name, size in mesh.items()}
    if not found or not all(name and size >= 1 for name, size in found.items()):
        raise MeshError(
            f"got {mesh!r:.80} for a mesh; each axis must have a name and a size of at least 1, as "
            "in 'dp=4,tp=2'"
        )
    return found


def family(sizes: Sizes) -> list[dict[str, int]]:
    """Returns the meshes that a proof compares: all ones, each axis alone, and the full sizes.

    Example:
        >>> family({"dp": 4, "tp": 2})
        [{'dp': 1, 'tp': 1}, {'dp': 4, 'tp': 1}, {'dp': 1, 'tp': 2}, {'dp': 4, 'tp': 2}]
    """
    ones = dict.fromkeys(sizes, 1)
    alone = [{**ones, name: size} for name, size in sizes.items()]
    found: list[dict[str, int]] = []
    for one in (ones, *alone, dict(sizes)):
        if one not in found:
            found.append(one)
    return found


def build_mesh(sizes: Sizes, like: Mesh | None = None) -> Mesh:
    """Builds a mesh of some sizes over the first devices, with the axis types of another mesh.

    Raises:
        MeshError: when there are too few devices.
    """
    devices = available_devices()
    count = math.prod(sizes.values())
    if count > len(devices):
        wanted = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise MeshError(
            f"[PROVE001] the mesh {wanted} needs {count} devices, and JAX has {len(devices)}; call "
            f"axon_dist.World.emulate({count}) before anything asks JAX for a device, or set "
            f"JAX_NUM_CPU_DEVICES={count}"
        )
    types_ = (jax.sharding.AxisType.Auto,) * len(sizes) if like is None else like.axis_types
    grid = np.array(devices[:count]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=types_)


def find_mesh(function: Any) -> Mesh | None:
    """Returns the largest mesh in a function's closure, or None.

    Meshes of `NamedSharding`s, and of arrays placed by one, count too.
    """
    return max(_Closure(function).meshes, key=lambda mesh: mesh.size, default=None)


def rebind(function: Any, sizes: Sizes) -> Any:
    """Returns a copy of a function with each mesh in its closure replaced by one of other sizes.

    The search follows module globals, closure cells, defaults, arguments of `functools.partial`,
    object attributes and decorators. Existing objects are copied, not changed.

    Args:
        function: any callable.
        sizes: the new size of each axis; a mesh with other axes is left as it is.
    """

    def replace(mesh: Mesh) -> Mesh:
        if not set(mesh.axis_names) <= set(sizes):
            return mesh
        return build_mesh({str(name): sizes[name] for name in mesh.axis_names}, mesh)

    return _Closure(function).copy(function, replace)


_LIBRARIES = frozenset(
    {"jax", "jaxlib", "flax", "optax", "numpy", "axon_dist", "chex", *sys.stdlib_module_names}
)
_DERIVATIVES = frozenset({"custom_vjp", "custom_jvp", "custom_gradient"})


def _is_users(module: object) -> bool:
    return str(module).partition(".")[0] not in _LIBRARIES


def _is_compiled(thing: Any) -> bool:
    """Whether it is wrapped by `jax.jit`, `nnx.jit` or a cache; a trace does not need these."""
    kind = type(thing).__name__.lower()
    return hasattr(thing, "__wrapped__") and ("jit" in kind or "cache" in kind)


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _content(cell: types.CellType) -> Any:
    with contextlib.suppress(ValueError):
        return cell.cell_contents
    return None


def _fields(thing: Any) -> dict[str, Any]:
    """Returns the fields of a user-defined object, or of a function with a custom derivative."""
    fields = getattr(thing, "__dict__", None)
    if isinstance(thing, (type, types.ModuleType)) or not isinstance(fields, dict):
        return {}
    kind = type(thing)
    return fields if _is_users(kind.__module__) or kind.__name__ in _DERIVATIVES else {}


def _used_names(function: types.FunctionType) -> dict[str, Any]:
    """Returns the module globals that a user's function reads."""
    names = function.__globals__
    if not _is_users(names.get("__name__")):
        return {}
    return {name: names[name] for name in _names_in(function.__code__) if name in names}


def _parts(thing: Any) -> list[Any]:
    """Returns the parts of an object that may contain a mesh."""
    if isinstance(thing, (NamedSharding, Mesh)):
        return [] if isinstance(thing, Mesh) else [thing.mesh]
    if isinstance(thing, jax.Array):
        is_placed = not isinstance(thing, Tracer)
        return [thing.sharding] if is_placed and isinstance(thing.sharding, NamedSharding) else []
    if isinstance(thing, types.FunctionType):
        cells = [_content(cell) for cell in thing.__closure__ or ()]
        given = [thing.__defaults__, thing.__kwdefaults__]
        return [*cells, *given, *_used_names(thing).values()]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, (tuple, list, dict)):
        return list(thing.values()) if isinstance(thing, dict) else list(thing)
    if _is_compiled(thing):
        return [thing.__wrapped__]
    return list(_fields(thing).values())


class _Closure:
    """All objects reachable from a function's closure, and those that hold a mesh."""

    def __init__(self, root: Any) -> None:
        self._things: dict[int, Any] = {}
        users: dict[int, list[int]] = {}
        waiting = [root]
        while waiting:
            thing = waiting.pop()
            if id(thing) in self._things:
                continue
            self._things[id(thing)] = thing
            for part in _parts(thing):
                # An id is only valid while its object lives; `waiting` keeps it alive.
                users.setdefault(id(part), []).append(id(thing))
                waiting.append(part)
        self.meshes = [thing for thing in self._things.values() if isinstance(thing, Mesh)]
        self._holders: set[int] = set()
        following = [id(mesh) for mesh in self.meshes]
        while following:
            one = following.pop()
            if one not in self._holders:
                self._holders.add(one)
                following += users.get(one, [])
        self._copies: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}

    def copy(self, thing: Any, replace: Callable[[Mesh], Mesh]) -> Any:
        """Returns a copy of an object with each mesh in it replaced, and the rest unchanged."""
        if id(thing) not in self._holders:
            return thing
        if id(thing) not in self._copies:
            self._copies[id(thing)] = self._copy(
                thing, lambda part: self.copy(part, replace), replace
            )
        return self._copies[id(thing)]

    def _copy(self, thing: Any, of: Callable[[Any], Any], replace: Callable[[Mesh], Mesh]) -> Any:
        if isinstance(thing, Mesh):
            return replace(thing)
        if isinstance(thing, NamedSharding):
            return NamedSharding(of(thing.mesh), thing.spec, memory_kind=thing.memory_kind)
        if isinstance(thing, jax.Array):
            return jax.device_put(np.asarray(thing), of(thing.sharding))
        if isinstance(thing, types.FunctionType):
            return self._function(thing, of)
        if isinstance(thing, types.MethodType):
            return types.MethodType(of(thing.__func__), of(thing.__self__))
        if isinstance(thing, functools.partial):
            return functools.partial(of(thing.func), *of(thing.args), **of(thing.keywords))
        if isinstance(thing, dict):
            return {name: of(value) for name, value in thing.items()}
        if isinstance(thing, (tuple, list)):
            values = [of(value) for value in thing]
            remade = getattr(thing, "_make", type(thing))
            return remade(values)
        if _is_compiled(thing):
            return of(thing.__wrapped__)
        other = copy.copy(thing)
        self._copies[id(thing)] = other
        for name, value in _fields(thing).items():
            if id(value) in self._holders:
                object.__setattr__(other, name, of(value))
        return other

    def _function(self, function: types.FunctionType, of: Callable[[Any], Any]) -> Any:
        used = _used_names(function)
        names = function.__globals__
        is_own = any(id(value) in self._holders for value in used.values())
        if is_own:
            names = self._globals.setdefault(id(names), dict(names))
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        code = function.__code__
        defaults = of(function.__defaults__)
        other = types.FunctionType(code, names, function.__name__, defaults, cells or None)
        other.__kwdefaults__ = of(function.__kwdefaults__)
        other.__dict__.update(function.__dict__)
        other.__qualname__ = function.__qualname__
        # Functions may be recursive, so the copy is registered before its cells are filled.
        self._copies[id(function)] = other
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):
                cell.cell_contents = of(old.cell_contents)
        for cell, name in zip(cells, code.co_freevars, strict=True):
            if _CHECKS and name == "check_vma":
                cell.cell_contents = False
        if is_own:
            names.update({name: of(value) for name, value in used.items()})
        return other


_CHECKS: list[bool] = []
"""Not empty while the `check_vma` of all `shard_map`s is off."""


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Traces each `shard_map` with `check_vma=False`.

    Where that check refuses a program, JAX says what it could not infer, but not what is wrong.
    """
    make = jax.shard_map

    def without(*arguments: Any, **options: Any) -> Any:
        return make(*arguments, **{**options, "check_vma": False})

    with mock.patch.object(jax, "shard_map", without):
        _CHECKS.append(False)
        try:
            yield
        finally:
            _CHECKS.pop()


class _MeshKind(type(Mesh)):
    """The metaclass of the substitute for `Mesh`, so that `isinstance` works with real meshes."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Mesh)


@contextlib.contextmanager
def substituted(sizes: Sizes) -> Iterator[None]:
    """Patches `jax.make_mesh` and `Mesh` to make meshes of the given sizes.

    For a file that is imported anew, in a process of `axon prove`. A mesh with other axes than
    those of the proof is left as written.
    """
    make = jax.make_mesh
    devices = available_devices

    def make_mesh(shape: Sequence[int], names: Sequence[str], **options: Any) -> Mesh:
        if not set(names) <= set(sizes):
            return make(shape, names, **options)
        options.pop("devices", None)
        own = [sizes[name] for name in names]
        return make(own, names, devices=devices()[: math.prod(own)], **options)

    class Substitute(Mesh, metaclass=_MeshKind):
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            names = options.get("axis_names", arguments[1] if len(arguments) > 1 else ())
            names = (names,) if isinstance(names, str) else tuple(names)
            grid = options.get("devices", arguments[0] if arguments else None)
            if not set(names) <= set(sizes):
                return Mesh(*arguments, **options)
            given = options.get("axis_types")
            grid = np.asarray(devices()[: math.prod(sizes[n] for n in names)])
            return Mesh(grid.reshape([sizes[n] for n in names]), names, axis_types=given)

    with (
        mock.patch.object(jax, "make_mesh", make_mesh),
        mock.patch.object(jax.sharding, "Mesh", Substitute),
    ):
        yield


def load_file(path: Path, sizes: Sizes | None = None) -> types.ModuleType:
    """Imports a file anew; if sizes are given, its meshes are replaced by meshes of these sizes.

    Raises:
        ConfigError: when it cannot be imported.
    """
    if not path.is_file():
        raise ConfigError(
            f"[PROVE002] there is no file {str(path)!r}; give one as file.py:function"
        )
    name = f"axon_proved_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"[PROVE002] {str(path)!r} is not a Python file; give one as file.py:function"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent.resolve())
    within = contextlib.nullcontext() if sizes is None else substituted(sizes)
    wording = (f"[PROVE003] {path} cannot be imported", "run it alone first")
    search = mock.patch.object(sys, "path", [folder, *sys.path])
    # JAX has started here, with enough devices; files that make their own would fail.
    devices = mock.patch.object(jax.config, "update", _update_but_devices)
    with search, devices, within, reworded(*wording, of=Exception):
        spec.loader.exec_module(module)
    return module


def _update_but_devices(name: str, value: Any) -> None:
    if name != "jax_num_cpu_devices":
        type(jax.config).update(jax.config, name, value)
