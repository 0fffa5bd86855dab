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
"""A tree of which each leaf has a shape, which no number of Python has."""

Path: TypeAlias = str
"""Where a leaf lives in its tree, as in `"blocks/0/attn/kernel"`."""

Keys: TypeAlias = tuple[Any, ...]
"""The keys of nested dicts on the way to a leaf or a module."""

Shape: TypeAlias = tuple[int, ...]
"""Sizes of the dims of an array."""

Leaf: TypeAlias = jax.Array | jax.ShapeDtypeStruct
"""An array of a tree, or its shape and dtype."""

Batch: TypeAlias = PyTree
"""Arrays whose dim 0 counts samples; the same number in every leaf."""

LossFn: TypeAlias = Callable[..., PyTree]
"""`loss_fn(model, batch)`: a scalar mean or a `Weighted`, or `(either, dict of metrics)`."""

OptionValue: TypeAlias = str | bool | int | float
"""What an option of the compiler is set to."""

Trainable: TypeAlias = Any
"""What of a model is trained: a Variable type, a pattern of paths, a filter of nnx, or several."""

Function: TypeAlias = Callable[..., PyTree]
"""A function of arrays, in whatever they are nested."""

Metrics: TypeAlias = dict[str, PyTree]
"""What a step or an evaluation says, by name: scalars, and groups of them where a loss nests."""

JsonDict: TypeAlias = dict[str, Any]
"""An object as JSON and YAML write it: texts, numbers, lists and further objects by name."""
