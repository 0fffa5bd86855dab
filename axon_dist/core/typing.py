"""Type aliases used at public boundaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

Array: TypeAlias = jax.Array
"""A JAX array, or a tracer of one."""

PyTree: TypeAlias = Any
"""Nested containers that `jax.tree` knows, with arrays at the leaves."""

ArrayTree: TypeAlias = Any
"""A tree whose leaves all have a shape; Python numbers are not allowed."""

Path: TypeAlias = str
"""The path of a leaf in its tree, such as `"blocks/0/attn/kernel"`."""

Keys: TypeAlias = tuple[Any, ...]
"""The keys of nested dicts that lead to a leaf or a module."""

Shape: TypeAlias = tuple[int, ...]
"""The sizes of an array's dims."""

Leaf: TypeAlias = jax.Array | jax.ShapeDtypeStruct
"""An array of a tree, or its shape and dtype."""

Batch: TypeAlias = PyTree
"""Arrays whose dim 0 counts samples; every leaf has the same number of them."""

LossFn: TypeAlias = Callable[..., PyTree]
"""`loss_fn(model, batch)`: a scalar mean or a `Weighted`, or `(either, dict of metrics)`."""

OptionValue: TypeAlias = str | bool | int | float
"""The value of a compiler option."""

Trainable: TypeAlias = Any
"""Selects what to train: a Variable type, a pattern of paths, an nnx filter, or several."""

Function: TypeAlias = Callable[..., PyTree]
"""A function of pytrees of arrays."""

Metrics: TypeAlias = dict[str, PyTree]
"""The metrics of a step or an evaluation by name: scalars, or nested dicts of them."""

JsonDict: TypeAlias = dict[str, Any]
"""A JSON or YAML object."""
