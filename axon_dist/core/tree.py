"""Paths, dtypes and sizes of the leaves of a pytree."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from .errors import ConfigError, DTypeError, did_you_mean
from .typing import Array, Function, Leaf, Path, PyTree

Where: TypeAlias = Literal["device", "host"]
"""A device's own memory, or that of its host."""

_HOST_KINDS = ("pinned_host", "unpinned_host")


def path_str(key_path: KeyPath) -> Path:
    """Spells a JAX key path as names joined by slashes.

    Args:
        key_path: from `jax.tree_util.tree_leaves_with_path`.

    Returns:
        A path such as `"blocks/0/kernel"`.

    Example:
        >>> [(path, leaf)] = leaves_with_paths({"blocks": [{"kernel": 1.0}]})
        >>> path
        'blocks/0/kernel'
    """
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def leaves_with_paths(tree: PyTree) -> list[tuple[Path, PyTree]]:
    """Lists the leaves of a tree with their paths, in the order of `jax.tree.leaves`.

    Raises:
        ConfigError: for keys that cannot be sorted, and for a tree that contains itself.
    """
    check_depth(tree)
    try:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
    except ValueError as error:
        raise ConfigError(
            f"a tree has keys that cannot be sorted ({error}); use strings"
        ) from error
    return [(path_str(path), leaf) for path, leaf in leaves]


def leaves_by_path(*trees: PyTree) -> dict[Path, PyTree]:
    """Returns the leaves of trees by path.

    Raises:
        ConfigError: if two leaves have the same path, as have `{"a/b": 1, "a": {"b": 1}}`.

    Example:
        >>> leaves_by_path({"a": {"b": 1.0}}, {"c": 2.0})
        {'a/b': 1.0, 'c': 2.0}
    """
    found: dict[Path, PyTree] = {}
    for path, leaf in (pair for tree in trees for pair in leaves_with_paths(tree)):
        if path in found:
            raise ConfigError(
                f"two arrays have the path {path!r}, and a dict of arrays by path keeps only one; "
                "rename the key with a slash",
                code="two-arrays-of-a-path",
            )
        found[path] = leaf
    return found


_DEEPEST = 200


def check_depth(
    tree: PyTree, keys: tuple[object, ...] = (), seen: dict[int, int] | None = None
) -> None:
    """Raises if dicts, lists and tuples are nested too deep, as in one that contains itself.

    JAX flattens trees by recursion in C++. Once that exhausts the stack, the process does not
    recover: in JAX 0.12 every later trace raises a `RecursionError`.

    Args:
        tree: any tree.
        keys: the position of this node in the whole tree.
        seen: the greatest depth at which each node was visited; None at the root.

    Raises:
        ConfigError: with the depth limit.

    Example:
        >>> endless = {}
        >>> endless["me"] = endless
        >>> check_depth(endless)
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: a tree has dicts, lists or tuples more than 200 deep in
        each other, at me/me/me/...; a tree must not contain itself: remove the cycle
    """
    if not isinstance(tree, (dict, list, tuple)):
        return
    if len(keys) > _DEEPEST:
        raise ConfigError(
            f"a tree has dicts, lists or tuples more than {_DEEPEST} deep in each other, at "
            f"{'/'.join(map(str, keys[:3]))}/...; a tree must not contain itself: remove the cycle"
        )
    seen = {} if seen is None else seen
    # A shared node is visited again only at a greater depth, so DAGs take no exponential time.
    if seen.get(id(tree), -1) >= len(keys):
        return
    seen[id(tree)] = len(keys)
    for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(inner, (dict, list, tuple)):
            check_depth(inner, (*keys, key), seen)


def map_with_path(function: Function, tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps `function(path, leaf, *rest_leaves)` over a tree; paths are joined by slashes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(path_str(path), *leaves), tree, *rest
    )


def partition(tree: PyTree, paths: Collection[Path]) -> tuple[PyTree, PyTree]:
    """Splits nested dicts in two by the paths of their leaves.

    Args:
        tree: nested dicts; any other node in them, such as a tuple, counts as one leaf.
        paths: paths of leaves; some may be missing in the tree.

    Returns:
        The leaves not in `paths`, and those in `paths`, as nested dicts.

    Example:
        >>> partition({"a": 1, "b": {"c": 2, "d": 3}}, {"b/c"})
        ({'a': 1, 'b': {'d': 3}}, {'b': {'c': 2}})
    """
    if not paths:
        return tree, {}
    others: dict[str, PyTree] = {}
    named: dict[str, PyTree] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_no_dict):
        node = named if path_str(keys) in paths else others
        *outer, last = (entry.key for entry in keys)
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = leaf
    return others, named


def _is_no_dict(node: object) -> bool:
    return not isinstance(node, Mapping)


def combine(tree: PyTree, other: PyTree) -> PyTree:
    """Merges nested dicts without common leaves; the inverse of `partition`.

    Example:
        >>> combine({"a": 1, "b": {"d": 3}}, {"b": {"c": 2}})
        {'a': 1, 'b': {'d': 3, 'c': 2}}
    """
    if not (isinstance(tree, dict) and isinstance(other, dict)):
        raise ValueError("both trees have a leaf at the same path")
    shared = {key: combine(tree[key], other[key]) for key in tree.keys() & other.keys()}
    return {**tree, **other, **shared}


def is_key(leaf: object) -> bool:
    """Whether a leaf is, or describes, an array of typed random keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def num_params(tree: PyTree) -> int:
    """Counts the elements of all leaves."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: PyTree) -> int:
    """Counts the bytes of all leaves, ignoring shardings.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> num_bytes(jax.ShapeDtypeStruct((10, 5), jnp.float32))
        200
    """
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_of(leaf: Leaf) -> Where:
    """The memory of an array, or of a shape with a sharding."""
    return "host" if leaf.sharding.memory_kind in _HOST_KINDS else "device"


def device_bytes(tree: PyTree, where: Where | None = "device") -> dict[Any, int]:
    """The bytes that the shards of a tree occupy on each device of this process.

    Args:
        tree: arrays; other leaves are ignored.
        where: `device` for device memory, `host` for shards in host memory, None for both.

    Returns:
        Measured bytes by device; a replicated array counts in full on each device.

    Example:
        >>> import jax.numpy as jnp
        >>> list(device_bytes({"w": jnp.ones((4, 4)), "b": jnp.ones(4)}).values())
        [80]
    """
    totals: Counter[Any] = Counter()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and where in (None, memory_of(leaf)):
            for shard in leaf.addressable_shards:
                totals[shard.device] += shard.data.nbytes
    return dict(totals)


def bytes_per_device(tree: PyTree, where: Where | None = "device") -> int:
    """The bytes of a tree on the device that holds the most.

    Args:
        tree: arrays, which are measured, or `jax.ShapeDtypeStruct`s with shardings, whose bytes
            are computed.
        where: as in `device_bytes`.

    Returns:
        The largest sum of any device.
    """
    leaves = jax.tree.leaves(tree)
    planned = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    measured = max(device_bytes(leaves, where).values(), default=0)
    return measured + sum(shard_bytes(x) for x in planned if where in (None, memory_of(x)))


def own_bytes(tree: PyTree, is_cpu: bool) -> int:
    """The bytes of a tree that fill a device's own memory, on the device that holds the most.

    Args:
        tree: as in `bytes_per_device`.
        is_cpu: whether the devices are CPUs. Their memory is the host's, so arrays in host memory
            count too.
    """
    return bytes_per_device(tree, None if is_cpu else "device")


def shard_bytes(leaf: Leaf) -> int:
    """The bytes of one array on the device that holds the most; computed for a shape."""
    if isinstance(leaf, jax.Array):
        return max((shard.data.nbytes for shard in leaf.addressable_shards), default=0)
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def shapes_of(tree: PyTree, lead: int = 0) -> PyTree:
    """The shapes of a tree's arrays, without the first `lead` dims.

    Example:
        >>> shapes_of({"x": np.ones((4, 2), np.float32)}, lead=1)
        {'x': ShapeDtypeStruct(shape=(2,), dtype=float32)}
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype), tree)


def shape_key(tree: PyTree) -> tuple[Hashable, ...]:
    """A dict key that is equal for trees with the same structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((x.shape, x.dtype) for x in leaves)


def problem_of(leaf: object) -> str | None:
    """Why JAX cannot use an array, as the end of a sentence; None if it can.

    Example:
        >>> print(problem_of(np.ones(3, ">f4")))
        is a numpy array of >f4, which JAX lacks; give array.astype('float32') or another dtype
    """
    if isinstance(leaf, jax.Array):
        if isinstance(leaf, Tracer) or not leaf.is_deleted():
            return None
        return "was deleted, or donated to a function; create it again"
    if isinstance(leaf, np.ma.MaskedArray):
        return (
            "is a masked array, and JAX ignores the mask; give the numbers and the mask as two "
            "arrays, and weight by the mask"
        )
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iufc":
        return None
    dtype: np.dtype = leaf.dtype
    if dtype.isnative and dtype not in _WIDER:
        return None
    return (
        f"is a numpy array of {dtype.str}, which JAX lacks; give array.astype('float32') "
        "or another dtype"
    )


_WIDER: tuple[type[np.generic], ...] = (np.longdouble, np.clongdouble)


def has_64_bits() -> bool:
    """Whether JAX uses 64-bit dtypes; otherwise it casts float64 to float32, with a warning."""
    return bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]


_FLOATS = ("float32", "bfloat16", "float16", "float64")

_SPELLINGS: MappingProxyType[str, str] = MappingProxyType(
    {
        **{name: name for name in _FLOATS},
        **dict.fromkeys(("fp32", "f32"), "float32"),
        "bf16": "bfloat16",
        **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    }
)
"""The dtypes by the names that configs and other libraries give them, in lower case."""


def spelled_dtype(value: object) -> object:
    """Returns the name of a floating-point dtype for any of its spellings; other values unchanged.

    Example:
        >>> spelled_dtype("BF16"), spelled_dtype(jax.numpy.float32), spelled_dtype("fp8")
        ('bfloat16', 'float32', 'fp8')
    """
    if isinstance(value, str):
        return _SPELLINGS.get(value.lower(), value)
    # The scalar types of JAX have a dtype; those of NumPy and of ml_dtypes are subclasses.
    dtype = getattr(value, "dtype", None) if isinstance(value, type) else value
    if isinstance(value, type) and issubclass(value, np.generic):
        dtype = np.dtype(value)
    return dtype.name if isinstance(dtype, np.dtype) else value


_BITS = "2|4|6|8|16|32|64|80|128"
_FORMAT = re.compile(
    rf"double|single|tf32|(fp|f|float|nf|mxfp|u?int|i)({_BITS})?(_?e[0-9]+m[0-9]+.*)?"
)


def is_number_format(text: str) -> bool:
    """Whether a text names a format of numbers exactly, so that it is no misspelling of another.

    Example:
        >>> is_number_format("float64"), is_number_format("fp4"), is_number_format("fp61")
        (True, True, False)
    """
    return _FORMAT.fullmatch(text.lower()) is not None


def floating_dtype(value: DTypeLike, what: str) -> np.dtype:
    """Reads a floating-point dtype or its name.

    Raises:
        ConfigError: if it is not a floating-point dtype, or is one that JAX narrows.
    """
    try:
        dtype = jax.numpy.dtype(cast(DTypeLike, spelled_dtype(value)))
    except (TypeError, ValueError):
        dtype = None
    # 8-bit dtypes are refused: they need scales, as with `products="fp8"`.
    if dtype is None or dtype.name not in _FLOATS:
        raise ConfigError(
            f"{what} dtype is {value!r:.80}; it must be a floating-point dtype."
            f"{did_you_mean(str(value), _FLOATS, guesses=not is_number_format(str(value)))}"
        )
    if dtype.itemsize > 4 and not has_64_bits():
        raise ConfigError(
            f"{what} dtype is {dtype.name}, which JAX narrows to 32 bits; use float32, or set "
            "JAX_ENABLE_X64=1",
            code="needs-x64",
        )
    return dtype


def wide(x: Array) -> Array:
    """Casts to float32, unless the dtype is wider."""
    return x.astype(jax.numpy.promote_types(x.dtype, jax.numpy.float32))


_NARROW = {
    "i": np.iinfo(np.int32),
    "u": np.iinfo(np.uint32),
    "f": np.finfo(np.float32),
    "c": np.finfo(np.float32),
}
"""The 32-bit limits to which JAX narrows 64-bit numbers, or both parts of them, by dtype kind."""


def check_32_bits(what: str, leaf: object) -> None:
    """Raises if a numpy array has a number that does not fit in the 32 bits that JAX keeps.

    Args:
        what: names the array; starts the message.
        leaf: any value; JAX arrays pass, because they were narrowed when they were made.

    Raises:
        DTypeError: about the first such number.

    Example:
        >>> check_32_bits("leaf x", np.array([2**40]))
        Traceback (most recent call last):
        axon_dist.core.errors.DTypeError: leaf x has the number 1099511627776, which needs more than
        the 32 bits that JAX keeps of int64; make it smaller, or set jax_enable_x64
    """
    if isinstance(leaf, jax.Array) or has_64_bits():
        return
    array = np.asarray(leaf)
    kind = array.dtype.kind
    if kind not in _NARROW or np.real(array).dtype.itemsize < 8 or not array.size:
        return
    low, high = int(_NARROW[kind].min), int(_NARROW[kind].max)
    for part in (np.real(array), np.imag(array)) if kind == "c" else (array,):
        for number in _extremes(part):
            if not low <= number <= high:
                raise DTypeError(
                    f"{what} has the number {number}, which needs more than the 32 bits that JAX "
                    f"keeps of {array.dtype}; make it smaller, or set jax_enable_x64"
                )


def _extremes(numbers: np.ndarray) -> tuple[float, float]:
    """The least and the greatest number, without NaN and infinity, which would hide others."""
    if numbers.dtype.kind != "f":
        return numbers.min().item(), numbers.max().item()
    finite = np.isfinite(numbers)
    least = np.min(numbers, where=finite, initial=0).item()
    return least, np.max(numbers, where=finite, initial=0).item()
