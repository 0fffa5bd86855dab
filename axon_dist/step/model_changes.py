"""What a step changes in the model: dtypes, units, gathers of weights, statistics over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from ..core.errors import warn
from ..core.tree import is_key, wide
from ..core.typing import Function, Path, PyTree
from ..ir.layer_scan import scan_over_layers
from ..ir.loop_rule import LoopRule
from ..ir.rewrite import CONVOLUTION, SHIFTS, ByRank, Replace, Rewriting, keep_whole, refuse
from ..ir.units import GATHER, RematPolicy, is_in_any, is_inside, mark_units
from ..ops.fp8 import Fp8Dot, Fp8Layers, fp8_layers
from ..ops.int8 import Int8
from ..ops.precision import autocast, cast_floating
from ..parallel import (
    SUM_SAMPLES,
    LossOverMesh,
    Reduction,
    Strategy,
    has_experts,
    ring_products,
    sends_pieces,
    sum_over_ranks,
)
from .gather import GlobalGather, Int8Gather, save_all_but_gathers_policy, save_products_policy
from .objective import Forward, Prepare
from .parts import ModelSpec, split_inputs

MakeGather: TypeAlias = Callable[[Path], Any]
"""Path of a parameter -> the function that gathers it; None if it is whole."""

Bundle: TypeAlias = Callable[[Path, Any], Any]
"""(path of a parameter, its value) -> what its gather takes."""


@dataclasses.dataclass(frozen=True)
class ModelChanges:
    """The changes that a strategy makes to a merged model before it runs.

    Args:
        strategy: its precision, activation checkpointing, layers and policies.
        parts: the model's structure, and the shapes of its parameters and buffers.
        units: the paths of the modules that are gathered, freed and recomputed as one.
        loops: which chains of consecutive units run as a loop.
        looped: the paths of units whose parameters are stacked over the layers of a loop.

    Attributes:
        dtype: the compute dtype of floating-point parameters; None is their own.
        fp8: the layers that compute in fp8; None if there are none.

    Raises:
        UnsupportedError: when the precision asks for fp8, and no layer of the model supports it.
    """

    strategy: Strategy
    parts: ModelSpec
    units: frozenset[Path]
    loops: LoopRule = LoopRule()
    looped: frozenset[Path] = frozenset()
    dtype: Any = dataclasses.field(init=False)
    fp8: Fp8Layers | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        precision = self.strategy.precision
        fp8 = None
        if precision is not None and precision.products is not None:
            paths = fp8_layers(self.parts.abstract, precision.skip)
            dot = Fp8Dot(self.strategy.batch_axes)
            fp8 = Fp8Layers(dot, paths, gathers=precision.gather is not None)
        object.__setattr__(self, "fp8", fp8)
        object.__setattr__(self, "dtype", None if precision is None else precision.compute)

    def cast(self, params: PyTree) -> PyTree:
        """Casts parameters to the compute dtype."""
        return params if self.dtype is None else cast_floating(params, self.dtype)

    def prepare(
        self,
        make_gather: MakeGather | None,
        before: Prepare | None = None,
        remat: RematPolicy | None = None,
        bundle: Bundle = lambda _, weight: weight,
        by_units: Callable[[Path], bool] = lambda _: True,
    ) -> Prepare:
        """Returns a function that applies the changes to a merged model, in place.

        Args:
            make_gather: gives the gather of each weight, which runs within its unit; None if all
                weights are whole already.
            before: a further change, made first.
            remat: which residuals each unit saves; None if the scan over units decides.
            bundle: wraps a weight together with what its gather also needs.
            by_units: whether a weight may be gathered within its unit; otherwise it is gathered
                before all units.

        Returns:
            The function.
        """

        def adapt(model: nnx.Module) -> None:
            if before is not None:
                before(model)
            shapes = self.parts.shapes
            variables = {
                "/".join(map(str, keys)): variable
                for keys, variable in nnx.iter_graph(model)
                if isinstance(variable, nnx.Variable)
            }
            units = (
                mark_units(model, lambda path, _: path in self.units, remat, self.looped)
                if self.units
                else []
            )
            layers = () if self.fp8 is None else self.fp8.layers(model)
            fp8_gathers: dict[int, Any] = {id(layer.kernel): None for layer in layers}
            for path, variable in ((p, v) for p, v in variables.items() if p in shapes):
                gather: Any = None if make_gather is None else make_gather(path)
                value = variable.get_value()
                if not isinstance(value, Int8):
                    variable.set_value(bundle(path, self.cast(value)))
                elif any(is_inside(path, bridge) for bridge in self.parts.bridges):
                    wider = self.parts.int8[path].widen(value.numbers, value.scale, self.dtype)
                    variable.set_value(bundle(path, wider))
                else:
                    gather = Int8Gather(gather, self.parts.int8[path], self.dtype)
                if gather is None:
                    continue
                if id(variable) in fp8_gathers and self._gathers_in_fp8(gather):
                    fp8_gathers[id(variable)] = gather
                    continue
                # Set our metadata only on weights that a unit will gather: Linen takes a Variable
                # with extra metadata for a boxed value.
                if by_units(path) and is_in_any(path, units):
                    variable.set_metadata(**{GATHER: gather})
                else:
                    variable.set_value(gather(variable.get_value()))
            precision = self.strategy.precision
            if precision is not None and precision.buffer is not None:
                _widen_statistics(v for path, v in variables.items() if path not in shapes)
            if precision is not None and precision.is_mixed:
                autocast(model, precision)
            if self.fp8 is not None:
                self.fp8(model, lambda kernel: fp8_gathers.get(id(kernel)))

        return adapt

    def _gathers_in_fp8(self, gather: Any) -> bool:
        """Whether the product that reads a weight gathers it in fp8.

        Not an int8 weight, nor one that a loop reads in every iteration: that one is gathered
        before the loop.
        """
        has_fp8_gathers = self.fp8 is not None and self.fp8.gathers
        return has_fp8_gathers and isinstance(gather, GlobalGather) and not gather.in_loop

    def with_layer_scan(self, forward: Forward) -> Forward:
        """Returns the forward pass with chains of units run as scans."""
        if not self.units:
            return forward
        strategy = self.strategy
        loops = self.loops
        # A unit never saves gathered weights for its backward pass, with or without remat.
        remat: RematPolicy | None = save_products_policy
        if strategy.layers:
            # The residual stream must be saved after a sum over tensor ranks is added, not before.
            gathers = strategy.params.split_axes and not strategy.gathers_once
            remat = save_all_but_gathers_policy if gathers or self.parts.int8 else None
        group = 1
        if strategy.remat is not None:
            remat = strategy.remat.remat
            group = strategy.remat.group_size
            if loops.most is None:
                why = "each saves only its input, and is recomputed in the backward pass"
                loops = dataclasses.replace(loops, most=1, why=why)
        # The compiler does not prefetch pieces that are sent around a ring.
        prefetch = all(map(sends_pieces, strategy.layers))
        return scan_over_layers(forward, group, remat, prefetch=prefetch, rule=loops)


def rewritten(
    forward: Function, strategy: Strategy, mesh: Mesh, memory_bytes: int | None = None
) -> Function:
    """Rewrites the operations that the SPMD partitioner gets wrong or gathers operands for.

    Args:
        forward: a function of arrays.
        strategy: its batch axes say which ranks have which samples. In stages of a pipeline,
            slices are rewritten too.
        mesh: names and sizes of its axes, over all devices.
        memory_bytes: the memory of a device; None if the chip is unknown.

    Returns:
        A function with the same arguments and results.
    """
    layout = strategy.layout(mesh)
    for rings in ring_products(strategy, layout) if strategy.layers else ():
        forward = rings.of(forward)
    # A loss inside a custom_vjp is not replaced: it stays correct, but is slower.
    replace: dict[str, Replace] = {LossOverMesh.replaces: LossOverMesh(layout, memory_bytes)}
    if sum(size > 1 for size in mesh.shape.values()) > 1:
        replace[CONVOLUTION] = ByRank(mesh, strategy.batch_axes)
    if mesh.size > 1:
        forward = Rewriting(replace, {CONVOLUTION: refuse}).of(forward)
    slices = Rewriting(dict.fromkeys(SHIFTS, keep_whole))
    return forward if strategy.pipeline is None else slices.of(forward)


def _widen_statistics(variables: Iterable[nnx.Variable]) -> None:
    """Casts floating-point buffers to float32 or wider for their update; their storage stays."""
    for variable in variables:
        value = variable.get_value()
        if jnp.issubdtype(value.dtype, jnp.floating):
            variable.set_value(wide(value))


def batch_spec(axes: tuple[str, ...], num_microbatches: int) -> PartitionSpec:
    """Returns the spec of a batch: samples over the batch axes, after the dim of microbatches."""
    return PartitionSpec(axes) if num_microbatches == 1 else PartitionSpec(None, axes)


def buffer_partition(buffers: PyTree, reduction: Reduction, axes: tuple[str, ...]) -> PyTree:
    """Returns the specs of buffers: replicated, or with one copy of the statistics per rank."""
    replicated = PartitionSpec()
    if reduction.sync_buffers:
        return jax.tree.map(lambda _: replicated, buffers)
    return _map_statistics(reduction, lambda _: PartitionSpec(axes), buffers, lambda _: replicated)


def stack_buffers(buffers: PyTree, reduction: Reduction, num_ranks: int) -> PyTree:
    """Gives every rank its own copy of the statistics, if they are not synchronised."""
    return _map_statistics(reduction, lambda x: jnp.broadcast_to(x, (num_ranks, *x.shape)), buffers)


def mean_buffers(buffers: PyTree, reduction: Reduction) -> PyTree:
    """Averages the ranks' own statistics, for evaluation."""
    return _map_statistics(reduction, lambda x: x.mean(0), buffers)


def _map_statistics(
    reduction: Reduction,
    function: Callable[[Any], Any],
    buffers: PyTree,
    otherwise: Callable[[Any], Any] = lambda leaf: leaf,
) -> PyTree:
    """Maps a function over the floating-point buffers that each rank has its own copy of."""
    buffers, inputs = split_inputs(buffers)

    def one(leaf: Any) -> Any:
        is_statistic = not is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        is_own = is_statistic and not reduction.sync_buffers
        return (function if is_own else otherwise)(leaf)

    return jax.tree.map(one, buffers) | jax.tree.map(otherwise, inputs)


def rank_buffers(buffers: PyTree, reduction: Reduction) -> PyTree:
    """Returns the statistics of this rank, inside `shard_map`."""
    return _map_statistics(reduction, lambda x: x[0], buffers)


def synchronise_statistics(model: nnx.Module, axes: tuple[str, ...]) -> None:
    """Makes statistics of the samples span all ranks, in place.

    BatchNorm then equals BatchNorm on the whole batch on one device (PyTorch's SyncBatchNorm), and
    a mixture of experts counts the tokens of the whole batch.

    Args:
        model: a model merged inside `shard_map`.
        axes: the mesh axes that split the batch.
    """
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, nnx.BatchNorm):
            module.axis_name = axes  # type: ignore[assignment]
        elif hasattr(module, SUM_SAMPLES) and has_experts(module):
            sum_over_ranks(module, axes)


def has_statistics(model: nnx.Module) -> bool:
    """Whether `synchronise_statistics` would change a model, of arrays or shapes."""
    return any(
        isinstance(module, nnx.BatchNorm) or (hasattr(module, SUM_SAMPLES) and has_experts(module))
        for _, module in nnx.iter_modules(model)
    )


def warn_of_statistics(model: nnx.Module, num_microbatches: int) -> None:
    """Warns of BatchNorm modules that see one microbatch at a time instead of the whole batch.

    Args:
        model: a model, of arrays or shapes.
        num_microbatches: how many microbatches a batch is cut into.
    """
    paths = {id(module): keys for keys, module in nnx.iter_modules(model)}
    norms = [paths[id(m)] for m in _batch_norms(model) if not m.use_running_average]
    if norms:
        warn_of_parts("/".join(map(str, norms[0])) or type(model).__name__, num_microbatches)


def warn_of_parts(path: Path, num_microbatches: int, place: str = "") -> None:
    """Warns that the statistics at a path are of one microbatch, not of the whole batch."""
    warn(
        f"BatchNorm at {path!r}{place} computes its statistics from each of "
        f"{num_microbatches} microbatches, where one device would use the whole batch: losses and "
        "weights differ from one device's. Use one microbatch, a per-sample normalisation such as "
        "nnx.LayerNorm, or freeze the statistics with use_running_average=True"
    )


def own_statistics(model: nnx.Module) -> list[Path]:
    """Returns the paths of the batch statistics in modules other than BatchNorm.

    Args:
        model: a model, of arrays or shapes.
    """
    owned = {id(variable) for norm in _batch_norms(model) for variable in (norm.mean, norm.var)}
    # The statistics of SpectralNorm depend on its weights only.
    spectral = (m for _, m in nnx.iter_modules(model) if isinstance(m, nnx.SpectralNorm))
    owned |= {id(variable) for module in spectral for _, variable in nnx.iter_graph(module)}
    return [
        "/".join(map(str, path))
        for path, variable in nnx.iter_graph(model)
        if isinstance(variable, nnx.BatchStat) and id(variable) not in owned
    ]


def _batch_norms(model: nnx.Module) -> Iterator[nnx.BatchNorm]:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            yield module
