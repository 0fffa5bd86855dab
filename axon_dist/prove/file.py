"""Proves a function of a file, imported anew for each mesh, for `axon prove file.py:function`."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..core.errors import ConfigError, did_you_mean
from .check import prove_subject
from .meshes import find_mesh, load_file, mesh_of_other, sizes_of, substituted
from .parting import ONE_DEVICE, Parting, bisect_subjects
from .recording import Recording, record
from .report import Report
from .trace import Subject, subject_of

_DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32",
    "i8": "int8", "u32": "uint32", "u8": "uint8", "bool": "bool", "key": "key",
}  # fmt: skip


def prove_file(
    target: str,
    meshes: Sequence[str] = (),
    shapes: Sequence[str] = (),
    arguments: str | None = None,
    draws: int = 2,
    tell: Callable[[str], None] = lambda title: None,
) -> Report:
    """Proves a function of a file on several meshes.

    The file is imported once for each mesh, with `jax.make_mesh` and `jax.sharding.Mesh` patched to
    make the mesh under test. Everything that the file builds when it is imported, or when the
    function is called, is therefore built for that mesh.

    Args:
        target: `file.py:function`.
        meshes: the real sizes, as `"dp=4,tp=2"`; by default those of the mesh in the file.
        shapes: the shapes of the arguments, as `"f32[16,8]"`, to draw at random.
        arguments: the alternative to `shapes`: the name of a function in the file that takes no
            parameters and returns the arguments as a tuple. By default `arguments`, if there is
            one.
        draws: how often shapes are drawn.
        tell: is called with the title of each mesh before it is tried.

    Returns:
        The report.

    Raises:
        ConfigError: when the file, a name in it or a shape is invalid.
        MeshError: when no mesh is found, or there are too few devices.
    """
    subject, own = file_subject(target, shapes, arguments)
    return prove_subject(subject, own, meshes, draws, tell=tell)


def bisect_files(
    one: str,
    other: str,
    mesh: str | None = None,
    other_mesh: str | None = None,
    shapes: Sequence[str] = (),
    arguments: str | None = None,
    steps: int = 1,
) -> Parting:
    """Finds where functions of two files, or one function on two meshes, diverge.

    Args:
        one: `file.py:function`.
        other: another function, or the same one.
        mesh: the mesh of the first, as `"dp=4"`; by default the mesh of its file.
        other_mesh: the mesh of the other; by default `mesh`, unless that lacks axes of the mesh of
            its file; without `mesh` the mesh of its file, or of the first.
        shapes: the shapes of the arguments, to draw at random.
        arguments: the alternative to `shapes`: the name of a function of the first file that
            returns the arguments.
        steps: how many steps are compared.

    Returns:
        Where they diverge.

    Raises:
        ConfigError: when a file, a name or a shape is invalid.
    """
    subject, own_mesh = file_subject(one, shapes, arguments)
    other_subject, others_mesh = file_subject(other, shapes, arguments, one)
    meshes = mesh or own_mesh, other_mesh or mesh_of_other(mesh, others_mesh)
    return bisect_subjects(subject, other_subject, *meshes, steps)


def record_file(
    target: str,
    mesh: str | None = None,
    shapes: Sequence[str] = (),
    arguments: str | None = None,
    steps: int = 1,
) -> Recording:
    """Records the fingerprints of a function's values, to compare them in another environment.

    Args:
        target: `file.py:function`.
        mesh: the mesh, as `"dp=4"`; by default the mesh of its file.
        shapes: as for `bisect_files`.
        arguments: as for `bisect_files`.
        steps: the number of steps.

    Returns:
        The recording.
    """
    subject, own_mesh = file_subject(target, shapes, arguments)
    return record(subject, mesh or own_mesh or ONE_DEVICE, steps)


def file_subject(
    target: str, shapes: Sequence[str], arguments: str | None, given_by: str | None = None
) -> tuple[Subject, Mesh | None]:
    """Returns a function of a file as a subject for each mesh, and the mesh that the file makes."""
    path, name = _target(target)
    at = path if given_by is None else _target(given_by)[0]
    module = load_file(path)
    meshes = [value for value in vars(module).values() if isinstance(value, Mesh)]
    own = find_mesh(_named(module, name, path)) or max(meshes, key=lambda m: m.size, default=None)
    structs = tuple(struct_of(text) for text in shapes)
    has_own = hasattr(module if at == path else load_file(at), "arguments")
    source = arguments or ("arguments" if has_own and not shapes else None)

    def make(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        sizes = sizes_of(mesh)
        fresh = load_file(path, sizes)
        giver = fresh if at == path else load_file(at, sizes)
        with substituted(sizes):
            given = structs if source is None else tuple(_named(giver, source, at)())
            function, given = subject_of(_named(fresh, name, path), given, name).make(mesh)
        # Meshes that the function makes when it is called are substituted, too.
        return substituted(sizes)(function), given

    return Subject(make, name), own


def _target(target: str) -> tuple[Path, str]:
    file, separator, name = target.rpartition(":")
    if not separator or not name.isidentifier():
        raise ConfigError(f"[PROVE002] got {target!r:.80}; say which function, as file.py:function")
    return Path(file), name


def _named(module: types.ModuleType, name: str, path: Path) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    raise ConfigError(f"[PROVE002] {path} has no {name!r}.{did_you_mean(name, names)}")


def struct_of(text: str) -> jax.ShapeDtypeStruct:
    """Reads a shape as JAX prints it.

    Raises:
        ConfigError: for any other text.

    Example:
        >>> struct_of("bf16[2,8]")
        ShapeDtypeStruct(shape=(2, 8), dtype=bfloat16)
    """
    match = re.fullmatch(r"(\w+)\[([0-9, ]*)\]", text.strip())
    if match is None or match[1] not in _DTYPES:
        raise ConfigError(
            f"[PROVE008] got {text!r:.60} for a shape; write it as JAX does, f32[16,8]."
            f"{did_you_mean(match[1] if match else '', _DTYPES)}"
        )
    shape = tuple(int(size) for size in match[2].split(",") if size.strip())
    if match[1] == "key":
        return jax.ShapeDtypeStruct(shape, jax.eval_shape(jax.random.key, 0).dtype)
    return jax.ShapeDtypeStruct(shape, np.dtype(jax.numpy.dtype(_DTYPES[match[1]])))
