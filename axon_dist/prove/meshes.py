"""Rebinds a function to another mesh: finds the meshes in its closure and replaces them."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import math
import re
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
from ..core.words import plural
from ..mesh.world import available_devices

Sizes: TypeAlias = Mapping[str, int]
"""The size of each axis of a mesh."""


def sizes_of(mesh: Any) -> dict[str, int]:
    """Reads the sizes of a mesh: `Mesh`, a dict, or text such as `"dp=4,tp=2"`."""
    if isinstance(mesh, Mesh):
        return {str(name): size for name, size in mesh.shape.items()}
    found: dict[str, int] = {}
    if isinstance(mesh, str):
        pairs = [part.partition("=")[::2] for part in mesh.split(",")]
        found = {name.strip(): int(size) if size.strip().isdecimal() else 0 for name, size in pairs}
    elif isinstance(mesh, Mapping):
        found = {str(name): int(size) for name, size in mesh.items()}
    if not found or not all(name and size >= 1 for name, size in found.items()):
        raise MeshError(
            f"got {mesh!r:.80} for a mesh; give a jax.sharding.Mesh, or a dict or text in which "
            "each axis has a name and a size of at least 1, as in 'dp=4,tp=2'"
        )
    return found


def title_of(sizes: Sizes) -> str:
    """Returns the sizes of a mesh as text, such as `dp=4,tp=2`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def family(sizes: Sizes) -> list[dict[str, int]]:
    """Returns the meshes that a proof compares: all ones, each axis alone, and the full sizes.

    Example:
        >>> family({"dp": 4, "tp": 2})
        [{'dp': 1, 'tp': 1}, {'dp': 4, 'tp': 1}, {'dp': 1, 'tp': 2}, {'dp': 4, 'tp': 2}]
    """
    ones = dict.fromkeys(sizes, 1)
    alone = [{**ones, name: size} for name, size in sizes.items()]
    several = [ones, *alone, dict(sizes)]
    return [one for number, one in enumerate(several) if one not in several[:number]]


def build_mesh(sizes: Sizes, like: Any = None) -> Mesh:
    """Builds a mesh of some sizes over the first devices, with the axis types of `like`, if a mesh.

    Raises:
        MeshError: when there are too few devices.
    """
    devices = available_devices()
    count = math.prod(sizes.values())
    if count > len(devices):
        raise MeshError(
            f"[PROVE001] the mesh {title_of(sizes)} needs {count} devices, and JAX has "
            f"{len(devices)}; call axon_dist.World.emulate({count}) before anything asks JAX for a "
            f"device, or set JAX_NUM_CPU_DEVICES={count}"
        )
    types_ = like.axis_types if isinstance(like, Mesh) else None
    grid = np.array(devices[:count]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=types_)


def find_mesh(function: Any) -> Mesh | None:
    """Returns the largest mesh in a function's closure, or None.

    Meshes of `NamedSharding`s, and of arrays placed by one, count too.
    """
    return max(_Closure(function).meshes, key=lambda mesh: mesh.size, default=None)


def mesh_of_other(mesh: Any, own: Any) -> Any:
    """Returns the mesh of a second function: the first's, unless that lacks axes of its own.

    Args:
        mesh: the mesh that was given for the first function; None if none was.
        own: the second function's own mesh; None if it has none.
    """
    if not mesh or own is None:
        return mesh or own
    return mesh if set(sizes_of(own)) <= set(sizes_of(mesh)) else own


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


def _fields(thing: Any) -> dict[str, Any]:
    """Returns the fields of a user-defined object, or of a function with a custom derivative."""
    fields = getattr(thing, "__dict__", None)
    if isinstance(thing, (type, types.ModuleType)) or not isinstance(fields, dict):
        return {}
    kind = type(thing)
    return fields if _is_users(kind.__module__) or kind.__name__ in _DERIVATIVES else {}


def _closed_over(function: types.FunctionType) -> dict[str, Any]:
    """Returns what is in the cells of a function; a cell may be empty."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _used_names(function: types.FunctionType) -> dict[str, Any]:
    """Returns the module globals that a user's function reads."""
    names = function.__globals__
    if not _is_users(names.get("__name__")):
        return {}
    return {name: names[name] for name in _names_in(function.__code__) if name in names}


def _opened(thing: Any) -> tuple[list[Any], Callable[..., Any] | None]:
    """Returns the parts of an object that may contain a mesh, and how it is made from them.

    Functions and user-defined objects may refer to themselves, so these are copied, then filled.
    """
    if isinstance(thing, NamedSharding):
        options = {"memory_kind": thing.memory_kind}
        return [thing.mesh], lambda mesh: NamedSharding(mesh, thing.spec, **options)
    if isinstance(thing, jax.Array):
        is_placed = not isinstance(thing, Tracer) and isinstance(thing.sharding, NamedSharding)
        parts = [thing.sharding] if is_placed else []
        return parts, lambda sharding: jax.device_put(np.asarray(thing), sharding)
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__], types.MethodType
    if isinstance(thing, functools.partial):
        return (
            [thing.func, thing.args, thing.keywords],
            lambda function, args, keywords: functools.partial(function, *args, **keywords),
        )
    if isinstance(thing, dict):
        return [*thing.values()], lambda *values: dict(zip(thing, values, strict=True))
    if isinstance(thing, (tuple, list)):
        remade = getattr(thing, "_make", type(thing))
        return [*thing], lambda *values: remade(values)
    if _is_compiled(thing):
        return [thing.__wrapped__], lambda function: function
    if isinstance(thing, types.FunctionType):
        given = [thing.__defaults__, thing.__kwdefaults__]
        return [*_closed_over(thing).values(), *given, *_used_names(thing).values()], None
    return list(_fields(thing).values()), None


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
            for part in [] if isinstance(thing, Mesh) else _opened(thing)[0]:
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

        def of(part: Any) -> Any:
            return self.copy(part, replace)

        if id(thing) not in self._holders or id(thing) in self._copies:
            return self._copies.get(id(thing), thing)
        if isinstance(thing, Mesh):
            return replace(thing)
        if isinstance(thing, types.FunctionType):
            return self._function(thing, of)
        parts, remade = _opened(thing)
        if remade is None:
            self._copies[id(thing)] = other = copy.copy(thing)
            for name, value in _fields(thing).items():
                if id(value) in self._holders:
                    object.__setattr__(other, name, of(value))
        else:
            self._copies[id(thing)] = remade(*map(of, parts))
        return self._copies[id(thing)]

    def _function(self, function: types.FunctionType, of: Callable[[Any], Any]) -> Any:
        used = _used_names(function)
        names = function.__globals__
        is_own = any(id(value) in self._holders for value in used.values())
        if is_own:
            names = self._globals.setdefault(id(names), dict(names))
        code = function.__code__
        cells = {name: types.CellType() for name in code.co_freevars}
        defaults = of(function.__defaults__)
        closure = tuple(cells.values()) or None
        other = types.FunctionType(code, names, function.__name__, defaults, closure)
        other.__kwdefaults__ = of(function.__kwdefaults__)
        other.__dict__.update(function.__dict__)
        other.__qualname__ = function.__qualname__
        self._copies[id(function)] = other
        for name, content in _closed_over(function).items():
            is_off = name == "check_vma" and bool(_CHECKS)
            cells[name].cell_contents = False if is_off else of(content)
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
        options["check_vma"] = False
        return make(*arguments, **options)

    with mock.patch.object(jax, "shard_map", without):
        _CHECKS.append(False)
        try:
            yield
        finally:
            _CHECKS.pop()


@contextlib.contextmanager
def substituted(sizes: Sizes) -> Iterator[None]:
    """Has `jax.make_mesh` and `Mesh` make meshes of the given sizes.

    For a file that is imported anew, in a process of `axon prove`. A mesh with other axes than
    those of the proof is left as written.
    """
    make = jax.make_mesh
    new = Mesh.__new__

    def grid_of(names: Sequence[str]) -> np.ndarray:
        shape = [sizes[name] for name in names]
        return np.asarray(available_devices()[: math.prod(shape)]).reshape(shape)

    def make_mesh(shape: Any, names: Sequence[str], *arguments: Any, **options: Any) -> Mesh:
        # More devices may be written than there are here, which `make_mesh` would refuse.
        if set(names) <= set(sizes):
            grid = grid_of(names)
            shape, options["devices"] = grid.shape, list(grid.flat)
        return make(shape, names, *arguments, **options)

    def new_mesh(cls: type, devices: Any, axis_names: Any, *more: Any, **options: Any) -> Any:
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        is_known = names and set(names) <= set(sizes)
        return new(cls, grid_of(names) if is_known else devices, names, *more, **options)

    with (
        mock.patch.object(jax, "make_mesh", make_mesh),
        mock.patch.object(Mesh, "__new__", new_mesh),
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
    failed = f"[PROVE003] {path} cannot be imported"
    search = mock.patch.object(sys, "path", [folder, *sys.path])
    # JAX has started here, with enough devices; files that make their own would fail.
    devices = mock.patch.object(jax.config, "update", _update_but_devices)
    with (
        search, devices, within,
        reworded(failed, "run it alone first", of=Exception), _naming_devices(failed),
    ):  # fmt: skip
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _naming_devices(failed: str) -> Iterator[None]:
    """Rewords the error of a file whose mesh has more devices than there are."""
    try:
        yield
    except ValueError as error:
        count = len(available_devices())
        text = " ".join(str(error).split())
        # `jax.make_mesh` says the former. An array of all devices says the latter, as any may.
        if re.search(rf"Number of devices {count}\b|cannot reshape array of size {count}\b", text):
            raise ConfigError(
                f"{failed}: {text:.400}; JAX has {plural(count, 'device')} here. If that is about "
                "the file's mesh, give its sizes, as in --mesh dp=16, or set JAX_NUM_CPU_DEVICES=16"
            ) from error
        raise


def _update_but_devices(name: str, value: Any) -> None:
    if name != "jax_num_cpu_devices":
        type(jax.config).update(jax.config, name, value)
