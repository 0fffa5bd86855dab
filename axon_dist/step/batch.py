"""Preparing batches for the devices: padding, cutting into microbatches, sharding.

Whether padded samples drop out of a loss is read from the loss's program: each output must be a sum
over the samples (`Traces.dependence`), in which a sample of weight 0 contributes 0
(`uniform_values`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.batch_rows import rows_of_parts
from ..core.errors import ConfigError, DivisibilityError, DTypeError, UnsupportedError, warn
from ..core.tree import (
    check_32_bits,
    combine,
    is_key,
    leaves_with_paths,
    partition,
    path_str,
    problem_of,
    shape_key,
    shapes_of,
)
from ..core.typing import Batch, LossFn, PyTree
from ..core.weighted import Shared, Weighted
from ..ir.randomness import find_rows
from ..ir.uniform import UNKNOWN, ZERO, UniformValue, uniform_values
from ..mesh import World
from ..separability.abstract_values import Dependence, OutputDependence
from .model_spec import ModelSpec
from .objective import evaluate
from .sample_traces import Traces, scalars
from .spec import StepSpec


def batch_spec(axes: tuple[str, ...], num_microbatches: int) -> PartitionSpec:
    """Returns the spec of a batch: samples over the batch axes, after the dim of microbatches."""
    return PartitionSpec(axes) if num_microbatches == 1 else PartitionSpec(None, axes)


class BatchPadding:
    """Pads batches, after checking that the loss ignores the padding.

    The last sample is repeated at the end, with weight 0 in one leaf. On one process each real
    sample keeps its place, and so draws the same random numbers as on one device. Several processes
    each pad the end of their own rows, which moves the samples of later processes: if the model
    draws numbers for each sample, they get others, with the warning `pad-moves-samples`.

    A loss that sums `weight * loss` and returns `Weighted(that, sum of weight)` has the value and
    the gradient of the real samples.

    Args:
        weight: the name of the leaf of sample weights, of shape [B, ...]. A batch without it gets
            ones of shape [B] in float32.
        spec: model, loss, optimizer, strategy, devices and options of the step.
    """

    def __init__(self, weight: str, spec: StepSpec):
        self._weight = weight
        self._spec = spec
        self._checked: set[Any] = set()

    def fill(
        self, batch: Batch, multiple: int, shared: PyTree = None, num_processes: int = 1
    ) -> Batch:
        """Appends samples of weight 0 until the batch size is a multiple of `multiple`.

        Args:
            batch: a dict of leaves of shape [B, ...], arrays or shapes.
            multiple: what B must be a multiple of.
            shared: nested dict of the leaves that all samples share; None for nothing.
            num_processes: how many processes pad a batch of this size, each its own rows.

        Returns:
            The batch with its sample weights, padded to the next multiple.

        Raises:
            ConfigError: when the batch is not a dict, the loss returns no weight, or the loss or a
                metric ignores the sample weights.
            UnsupportedError: when the model keeps statistics of the batch.
        """
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"got a batch of type {type(batch).__name__} with pad={self._weight!r}; padding "
                f"needs a dict whose leaf {self._weight!r} holds the weights of the samples",
                code="pad-needs-dict",
            )
        leaves = jax.tree.leaves(batch)
        rows = leaves[0].shape[0]
        is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        if is_abstract:
            ones = jax.ShapeDtypeStruct((rows,), jnp.float32)
        else:
            ones = self._ones(rows, leaves)
        padded = {self._weight: ones, **batch}
        if more := -rows % multiple:
            padded = {
                name: jax.tree.map(lambda x, n=name: _pad_rows(x, more, n == self._weight), part)
                for name, part in padded.items()
            }
        self._check(padded, shared or {}, more > 0 and num_processes > 1)
        return padded

    def _ones(self, rows: int, leaves: list[Any]) -> np.ndarray | jax.Array:
        """Returns weights for a batch without weights: spread over processes if its leaves are."""
        ones = np.ones(rows, np.float32)
        replicated = NamedSharding(self._spec.mesh, PartitionSpec())
        if replicated.is_fully_addressable or not any(map(_is_global, leaves)):
            return ones
        return jax.make_array_from_callback(ones.shape, replicated, lambda at: ones[at])

    def _check(self, batch: dict, shared: PyTree, moves: bool) -> None:
        """Checks each shape of a batch once, also for draws if the padding moves samples."""
        key = shape_key((batch, shared)), moves
        if key in self._checked:
            return
        model_spec = dataclasses.replace(self._spec.model_spec, shared=shapes_of(shared))
        check_padding(model_spec, self._spec.loss_fn, shapes_of(batch), self._weight)
        if moves and _draws_per_sample(model_spec, self._spec.loss_fn, shapes_of(batch)):
            warn(
                f"each process pads its own rows with pad={self._weight!r}, so that samples are at "
                "other places than on one process, and the model, which draws random numbers for "
                "each sample as dropout does, draws others for them. The results are as good, but "
                "depend on the number of processes; give batches that divide to avoid that",
                code="pad-moves-samples",
            )
        self._checked.add(key)


def _draws_per_sample(model_spec: ModelSpec, loss_fn: LossFn, batch: Batch) -> bool:
    """Whether a loss draws random numbers for each sample."""
    traces = Traces(model_spec, loss_fn, over_all=False)
    try:
        rows = find_rows(lambda samples: traces.of(batch, samples).program, samples_of(batch), 2)
    except UnsupportedError:
        # `find_rows` raises only for draws that it cannot split.
        return True
    return bool(rows)


def _pad_rows(leaf: Any, more: int, is_weight: bool) -> Any:
    """Appends `more` copies of the last row, or rows of zeros, to an array or a shape."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((leaf.shape[0] + more, *leaf.shape[1:]), leaf.dtype)
    numpy = jnp if isinstance(leaf, jax.Array) else np
    last = numpy.zeros_like(leaf[-1:]) if is_weight else leaf[-1:]
    return numpy.concatenate([leaf, *[last] * more])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placed:
    """A batch on the devices, with the shardings that the step takes.

    Args:
        arrays: leaves of shape [B, ...], or [K, B/K, ...] with K microbatches.
        shared: nested dict of the leaves that all samples share, replicated on every device.
    """

    arrays: Batch
    shared: PyTree = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """How a global batch is cut: microbatch k is rows k*B/K to (k+1)*B/K, as on one device.

    Replicas that train independently come first: replica r has rows r*B/R to (r+1)*B/R, whatever
    K is, and each cuts its own rows into K. Microbatch k then holds the k-th part of every replica.

    Args:
        mesh: names and sizes of its axes, over all devices.
        axes: the mesh axes that split the samples of each microbatch.
        num_microbatches: K.
        num_processes: how many processes load different rows. Processes that load the same rows
            count once.
        padding: pads batches that do not divide; None refuses them.
        logical_shards: a number that B must also be a multiple of.
        replica_axis: the axis between replicas that train independently; None if there are none.
        own_ranks: the ranks along `axes` that this process owns; None for all.
        is_evaluated: whether it cuts batches of an evaluation, in which models draw nothing.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    num_microbatches: int
    num_processes: int = 1
    padding: BatchPadding | None = None
    logical_shards: int = 1
    replica_axis: str | None = None
    own_ranks: tuple[int, ...] | None = None
    is_evaluated: bool = False

    @classmethod
    def of(cls, spec: StepSpec) -> BatchLayout:
        """Returns the layout of the batches of a step."""
        axes = spec.strategy.batch_axes
        pad = spec.options.pad
        padding = None if pad is None else BatchPadding(pad, spec)
        has_others = spec.world.num_processes > 1
        loop = spec.strategy.outer_loop
        return cls(
            spec.mesh,
            axes,
            spec.num_microbatches,
            spec.world.num_batch_shares(axes) if has_others else 1,
            padding,
            spec.options.logical_shards or 1,
            None if loop is None else loop.axis,
            (spec.world.own_batch_ranks(axes) or None) if has_others else None,
        )

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of every leaf of the placed batch."""
        return NamedSharding(self.mesh, batch_spec(self.axes, self.num_microbatches))

    @property
    def num_ranks(self) -> int:
        """The number of ranks that split the samples."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def num_replicas(self) -> int:
        """The number of consecutive parts of a batch that are each cut into K microbatches."""
        if self.replica_axis is None:
            return 1
        last = self.axes.index(self.replica_axis)
        return math.prod(self.mesh.shape[axis] for axis in self.axes[: last + 1])

    @property
    def divisor(self) -> int:
        """The number that the size of the global batch must be a multiple of."""
        return math.lcm(self.num_microbatches * self.num_ranks, self.logical_shards)

    def check(self, batch: Batch, num_processes: int = 1) -> None:
        """Raises unless all leaves have the same number of samples, a multiple of `divisor`.

        Args:
            batch: leaves of shape [B, ...]. A global array, which other processes have parts of,
                has the samples of all processes.
            num_processes: how many processes load a batch of this size.

        Raises:
            DivisibilityError: naming the batch size and what it must be a multiple of.
        """
        total = _samples_of_all(batch, num_processes)
        if total % self.divisor or not total:
            split = "×".join(f"{axis}={self.mesh.shape[axis]}" for axis in self.axes) or "1 rank"
            if self.logical_shards > 1:
                parts = f"{self.logical_shards} logical shards"
                advice = ""
            else:
                parts = f"{self.num_microbatches} microbatches"
                advice = ", or have it padded: build_train_step(pad=...)"
            raise DivisibilityError(
                f"a batch of {total} samples does not divide over {split} and {parts}; make it a "
                f"positive multiple of {self.divisor}{advice}",
                code="batch-not-divisible",
            )

    def split(self, leaf: Any, *, is_local: bool = False) -> Any:
        """Cuts [B, ...] into [K, B/K, ...] when K > 1.

        Args:
            leaf: an array of the rows of all ranks, or of this process's.
            is_local: whether it has the rows of this process alone.
        """
        count = self.num_microbatches
        if count == 1:
            return leaf
        sizes = self._ranks_by_replica(self.own_ranks if is_local else None)
        numpy = jnp if isinstance(leaf, jax.Array) else np
        ends = np.cumsum(sizes[:-1]) * (leaf.shape[0] // sum(sizes))
        parts = numpy.split(leaf, ends) if len(ends) else [leaf]
        parts = [part.reshape(count, part.shape[0] // count, *part.shape[1:]) for part in parts]
        return numpy.concatenate(parts, axis=1) if len(ends) else parts[0]

    def _ranks_by_replica(self, ranks: tuple[int, ...] | None) -> list[int]:
        """Returns how many of some ranks each replica has, without replicas that have none."""
        numbers = range(self.num_ranks) if ranks is None else ranks
        each = self.num_ranks // self.num_replicas
        return [len(list(own)) for _, own in itertools.groupby(numbers, lambda rank: rank // each)]

    def place(self, batch: Batch) -> Placed:
        """Puts a batch of this process's rows on the devices.

        Args:
            batch: leaves of shape [B, ...], NumPy or JAX arrays. A JAX array that is spread over
                the devices of several processes is the global one, with the rows of all.

        Returns:
            The placed batch.

        Raises:
            DivisibilityError: when it cannot be cut evenly.
        """
        batch, shared = self._padded(batch, self.num_processes)
        return Placed(jax.tree.map(self._place_leaf, batch), self._replicate(shared))

    def place_whole(self, batch: Batch) -> Placed:
        """Replicates a whole batch of any size on every device.

        Args:
            batch: leaves of shape [B, ...], the same on every process.
        """
        samples, shared = split_shared(batch)
        return Placed(self._replicate(samples), self._replicate(shared))

    def _replicate(self, tree: PyTree) -> PyTree:
        replicated = NamedSharding(self.mesh, PartitionSpec())
        if replicated.is_fully_addressable:
            return jax.device_put(tree, replicated)
        return jax.tree.map(lambda leaf: _spread(leaf, replicated), tree)

    def over_ranks(self, arrays: Batch) -> Batch:
        """Shards samples over the ranks unevenly, when their number does not divide.

        Returns the arrays unchanged when it divides, or when there are fewer samples than ranks.
        """
        samples = jax.tree.leaves(arrays)[0].shape[0]
        if samples % self.num_ranks == 0 or samples < self.num_ranks:
            return arrays
        sharding = NamedSharding(self.mesh, batch_spec(self.axes, 1))
        return jax.lax.with_sharding_constraint(arrays, sharding)

    def rows_of(self, global_batch: int, world: World) -> np.ndarray:
        """Returns which rows of a global batch this process gives, in order: those of its ranks.

        Raises:
            DivisibilityError: when the batch cannot be cut evenly.
        """
        if self.num_processes == 1:
            return np.arange(global_batch)
        parts, count = world.parts_of_batch(self.axes)
        if self.padding is not None and global_batch % self.divisor:
            # Each process pads its rows before they are cut into microbatches.
            return rows_of_parts(global_batch, parts, count)
        return rows_of_parts(global_batch, parts, count, self.num_microbatches, self.num_replicas)

    def abstract(self, batch: Batch, num_processes: int = 1) -> Placed:
        """Returns the shapes of a placed global batch, for lowering without data.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes.
            num_processes: how many processes load a batch of this size.

        Returns:
            The batch of all processes together.

        Raises:
            DivisibilityError: when it cannot be cut evenly.
        """
        batch, shared = self._padded(batch, num_processes)
        loads = jax.tree.map(lambda x: 1 if _is_global(x) else num_processes, batch)
        placed = jax.eval_shape(
            lambda rows: jax.tree.map(
                lambda x, count: self.split(jnp.concatenate([jnp.asarray(x)] * count)), rows, loads
            ),
            batch,
        )
        replicated = NamedSharding(self.mesh, PartitionSpec())
        return Placed(
            _with_sharding(placed, self.sharding),
            _with_sharding(shared, replicated),
        )

    def _padded(self, batch: Batch, num_processes: int) -> tuple[Batch, PyTree]:
        """Splits off the shared leaves, and pads this process's samples if the layout pads."""
        batch, shared = split_shared(batch)
        if self.padding is not None:
            loaded = 1 if _are_global(batch, num_processes) else num_processes
            multiple = math.lcm(self.divisor, loaded) // loaded
            if samples_of(batch):
                moved = 1 if self.is_evaluated else loaded
                batch = self.padding.fill(batch, multiple, shared, moved)
        self.check(batch, num_processes)
        return batch, shared

    def _place_leaf(self, leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ConfigError(
                f"the batch contains a shape, {leaf.dtype}{list(leaf.shape)}, instead of an array; "
                "a step can be built, compiled and lowered with shapes, but only runs on arrays: "
                "give arrays",
                code="batch-has-shapes",
            )
        # Processes of one share of the batch, as in tensor parallelism, each have all of its rows.
        is_alone = self.sharding.is_fully_addressable
        if isinstance(leaf, jax.Array) and (is_alone or _is_global(leaf)):
            return jax.device_put(self.split(leaf), self.sharding)
        if is_key(leaf):
            data = self._place_leaf(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        rows = self.split(np.asarray(leaf), is_local=not is_alone)
        if is_alone:
            return jax.device_put(rows, self.sharding)
        return jax.make_array_from_process_local_data(self.sharding, rows)


def _spread(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Puts a leaf, the same on every process, on the devices of several processes."""
    if _is_global(leaf):
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        data = _spread(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    # JAX puts NumPy arrays on the devices of other processes, but not arrays of its own.
    return jax.device_put(np.asarray(leaf), sharding)


def _is_global(leaf: Any) -> bool:
    """Whether a leaf has the rows of all processes: an array in a trace, or one that is spread.

    A JAX array whose devices are all of this process has this process's rows, as NumPy's have.
    """
    if not isinstance(leaf, jax.Array):
        return False
    return isinstance(leaf, Tracer) or not leaf.is_fully_addressable


def _are_global(batch: Batch, num_processes: int) -> bool:
    """Whether a batch that is to be padded has the rows of all processes.

    Raises:
        ConfigError: when only some leaves do: a sample would be at different places in them.
    """
    paths: dict[bool, list[str]] = {True: [], False: []}
    for path, leaf in leaves_with_paths(batch):
        paths[_is_global(leaf)].append(path)
    if paths[True] and paths[False] and num_processes > 1:
        raise ConfigError(
            f"pad=... got the leaves {paths[True][:_SHOWN]} of the batch with the rows of all "
            f"{num_processes} processes, and {paths[False][:_SHOWN]} with those of this process, "
            "and each kind would be padded at other places; give all leaves as arrays of this "
            "process, or all as JAX arrays that are spread over the processes",
            code="pad-mixed-leaves",
        )
    return not paths[False]


def _samples_of_all(batch: Batch, num_processes: int) -> int:
    """Returns the number of samples of all processes; global arrays count once."""
    if num_processes == 1 or not any(map(_is_global, jax.tree.leaves(batch))):
        return samples_of(batch) * num_processes

    def of_all(leaf: Any) -> Any:
        if _is_global(leaf) or not np.ndim(leaf):
            return leaf
        rows, *shape = leaf.shape
        return jax.ShapeDtypeStruct((rows * num_processes, *shape), leaf.dtype)

    return samples_of(jax.tree.map(of_all, batch))


def _with_sharding(tree: PyTree, sharding: NamedSharding) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def split_shared(batch: Batch) -> tuple[Batch, PyTree]:
    """Splits a batch into its samples and the values of its `Shared` leaves.

    Args:
        batch: leaves of shape [B, ...], or `Shared`.

    Raises:
        ConfigError: when a `Shared` leaf is not in a nested dict.

    Example:
        >>> split_shared({"x": np.ones((4, 2)), "scale": Shared(np.float32(3))})[1]
        {'scale': array(3., dtype=float32)}
    """
    check_leaves(batch)
    shared_keys = [
        keys
        for keys, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if isinstance(leaf, Shared)
    ]
    if not shared_keys:
        return batch, {}
    if not all(isinstance(key, jax.tree_util.DictKey) for keys in shared_keys for key in keys):
        raise ConfigError(
            f"the batch is a {type(batch).__name__} that has Shared(...) at "
            f"{path_str(shared_keys[0])!r}; Shared leaves are found by name: put it in a "
            "dict, or in nested dicts",
            code="shared-not-in-dict",
        )
    rows, shared = partition(batch, {path_str(keys) for keys in shared_keys})
    return rows, jax.tree.map(lambda one: _canonical(one.value), shared)


def unwrapped(batch: Batch) -> Batch:
    """Returns a batch as the loss function sees it, with `Shared` leaves unwrapped."""
    samples, shared = split_shared(batch)
    return combine(samples, shared) if shared else samples


def _canonical(value: Any) -> Any:
    """Converts a value to an array of a dtype that JAX has; a Python number becomes a scalar."""
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return value
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


_SHOWN = 8
"""How many leaves an error message names."""


def check_leaves(batch: Batch) -> None:
    """Checks the leaves of a batch.

    Raises:
        ConfigError: when it is not a pytree of arrays.
        DTypeError: when a leaf holds numbers that JAX would cut to 32 bits.
    """
    if isinstance(batch, Iterator):
        raise ConfigError(
            f"the batch is a {type(batch).__name__}; give numpy or JAX arrays of shape [B, ...]: "
            "one batch, such as next(batches), and not the iterator",
            code="batch-is-iterator",
        )
    try:
        leaves = leaves_with_paths(batch)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the keys of the batch are of several kinds and cannot be sorted: {error}; use only "
            'strings as keys, as in {"x": ..., "y": ...}',
            code="batch-keys-unsortable",
        ) from error
    if not leaves:
        what = "None" if batch is None else f"an empty {type(batch).__name__}"
        raise ConfigError(f"the batch is {what}; give arrays, as in " + '{"x": ..., "y": ...}')
    for path, leaf in leaves:
        label = f"leaf {path!r} of the batch" if path else "the batch"
        if isinstance(leaf, Shared):
            _check_numbers(label, leaf.value)
            check_32_bits(label, leaf.value)
            continue
        _check_numbers(label, leaf)
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, int, float, complex, bool)):
            continue
        if not hasattr(leaf, "__array__"):
            raise ConfigError(
                f"{label} is a {type(leaf).__name__}; give numpy or JAX arrays of shape [B, ...]: "
                "one batch, and not a loader or an iterator",
                code="batch-leaf-not-array",
            )
        if isinstance(leaf, np.ndarray) and leaf.dtype.itemsize >= 8:
            check_32_bits(label, leaf)


def _check_numbers(label: str, leaf: object) -> None:
    """Raises if an array holds something else than numbers and booleans, or JAX cannot use it."""
    if (problem := problem_of(leaf)) is not None:
        raise DTypeError(f"{label} {problem}")
    if not isinstance(leaf, np.ndarray):
        return
    # bfloat16, float8 and int4 of NumPy have kind "V", as structured arrays do.
    kind = leaf.dtype.kind
    is_narrow = kind == "V" and jnp.issubdtype(leaf.dtype, jnp.number)
    if kind not in "biufc" and not is_narrow:
        raise ConfigError(
            f"{label} is a numpy array of {leaf.dtype}; give numbers or booleans, and text "
            "as token ids",
            code="batch-leaf-not-numeric",
        )


def samples_of(batch: Batch) -> int:
    """Returns the number of samples, which must be the same in every leaf.

    Raises:
        DivisibilityError: when leaves differ, or a leaf is a scalar.
    """
    rows = {path: np.shape(leaf)[:1] for path, leaf in leaves_with_paths(batch)}
    sizes = set(rows.values())
    if len(sizes) != 1 or () in sizes:
        shown = dict(list(rows.items())[:_SHOWN])
        more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        list_advice = "; a list is as many leaves as it has entries: give np.asarray(list)"
        raise DivisibilityError(
            f"the leaves of the batch have {shown}{more} samples in dim 0; every leaf needs the "
            f"same{list_advice if more else ''}; wrap an array that all samples share, such as a "
            "temperature, as Shared(array)",
            code="batch-sizes-differ",
        )
    return sizes.pop()[0]


_HOW = (
    "Multiply each sample's contribution by its weight, and return Weighted(sum of weight * loss, "
    "sum of weight), or metrics that are such sums"
)


def check_padding(model_spec: ModelSpec, loss_fn: LossFn, batch: Batch, weight: str) -> None:
    """Raises unless samples of weight 0 change nothing.

    Args:
        model_spec: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        batch: a dict of the shapes of a padded batch.
        weight: the name of the leaf of sample weights.

    Raises:
        ConfigError: naming the output that counts padded samples, how it does, and the remedy.
        UnsupportedError: when a buffer of the model depends on the batch.
    """
    of_zeros = _with_zero_weights(model_spec, loss_fn, batch, weight)
    rows = max(jax.tree.leaves(batch)[0].shape[0], 2)
    dependence = Traces(model_spec, loss_fn, over_all=False).dependence(batch, (rows, 2 * rows))
    if dependence.failure:
        raise ConfigError(f"the loss, for pad={weight!r}, {dependence.loss.why}")
    for path, buffer in dependence.buffers.items():
        if buffer.kind is not Dependence.CONSTANT:
            raise UnsupportedError(
                f"the buffer {path!r} depends on the batch, as the statistics of BatchNorm do: it "
                f"{buffer.why}{buffer.place}, and would count the samples that pad={weight!r} "
                "adds. Use a normalisation without statistics, or batches that divide"
            )
    for name, output in dependence.outputs().items():
        if name in of_zeros and (problem := _problem(output, *of_zeros[name])):
            raise ConfigError(
                f"the {name} of loss_fn {problem}{output.place}, so that the samples that "
                f"pad={weight!r} adds would count. {_HOW}, with the weights of "
                f"batch[{weight!r}]"
            )


def _problem(
    dependence: OutputDependence, total: UniformValue, weight: UniformValue, is_plain: bool
) -> str:
    """Says how an output depends on samples of weight 0; "" if it does not."""
    if is_plain and dependence.kind is Dependence.CONSTANT:
        return ""
    if not dependence.is_separable:
        return dependence.why
    if not total.is_zero:
        return (
            "has a term that is not 0 for samples of weight 0"
            if total.is_finite
            else "divides by the sample weights, or takes a logarithm of them, sample by sample"
        )
    if not is_plain and not weight.is_zero:
        return "has a weight that is not 0 for samples of weight 0"
    if dependence.kind is not Dependence.WEIGHTED and not (
        is_plain and dependence.kind is Dependence.SUM
    ):
        return "depends on the number of samples, including those of weight 0"
    return ""


def _with_zero_weights(
    model_spec: ModelSpec, loss_fn: LossFn, batch: Batch, weight: str
) -> dict[str, tuple[UniformValue, UniformValue, bool]]:
    """Evaluates each output with sample weights 0: (total, weight, whether it has no weight)."""
    names: list[tuple[str, bool]] = []

    def run(params: Any, buffers: Any, batch: Any) -> Any:
        outcome = evaluate(model_spec, loss_fn, params, buffers, batch)
        if isinstance(outcome.loss.weight, (int, float)):
            raise ConfigError(
                f"loss_fn returned a number without its weight, from which the samples that "
                f"pad={weight!r} adds cannot be removed; return Weighted(sum of weight * loss, sum "
                f"of weight) with the weights of batch[{weight!r}], also for a weighted mean",
                code="pad-needs-weighted",
            )
        pairs = {"loss": outcome.loss}
        pairs |= {f"metric {name!r}": value for name, value in outcome.metrics.items()}
        names[:] = [(name, not isinstance(value, Weighted)) for name, value in pairs.items()]
        return scalars(pairs.values(), 0.0)

    closed = jax.make_jaxpr(run)(*model_spec.arguments, batch)
    inputs = [UNKNOWN] * len(jax.tree.leaves(model_spec.arguments))
    top_names = [path.split("/")[0] for path, _ in leaves_with_paths(batch)]
    inputs += [ZERO if name == weight else UNKNOWN for name in top_names]
    values = iter(uniform_values(closed.jaxpr, closed.consts, inputs))
    return {name: (next(values), next(values), is_plain) for name, is_plain in names}
