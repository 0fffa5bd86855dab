"""A step's changes to the model: dtypes, units, gathers of weights, statistics over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ..core.modules import bridges_of, variables_in
from ..core.tree import wide
from ..core.typing import Function, Path, PyTree
from ..ir.layer_scan import scan_over_layers
from ..ir.loop_rule import LoopRule
from ..ir.rewrite import CONVOLUTION, SHIFTS, ByRank, Replace, Rewriting, keep_whole, refuse
from ..ir.units import GATHER, RematPolicy, is_in_any, mark_units
from ..ops.fp8 import Fp8Dot, Fp8Layers, fp8_layers
from ..ops.int8 import Int8
from ..ops.precision import autocast, cast_floating
from ..parallel import (
    MIX,
    LossOverMesh,
    Strategy,
    map_experts,
    map_kernels,
    ring_products,
    sends_pieces,
)
from .gather import GlobalGather, Int8Gather, save_all_but_gathers_policy, save_products_policy
from .model_spec import ModelSpec
from .objective import Forward, ModelChange

MakeGather: TypeAlias = Callable[[Path], Any]
"""Path of a parameter -> the function that gathers it; None if it is whole."""

Bundle: TypeAlias = Callable[[Path, Any], Any]
"""(path of a parameter, its value) -> what its gather takes."""


@dataclasses.dataclass(frozen=True)
class ModelChanges:
    """The changes that a strategy makes to a merged model before it runs.

    Args:
        strategy: its precision, activation checkpointing, layers and policies.
        model_spec: the model's structure, and the shapes of its parameters and buffers.
        units: the paths of the modules that are gathered, freed and recomputed as one.
        loops: which chains of consecutive units run as a loop.
        stacked_units: the paths of units whose parameters are stacked over the layers of a loop.

    Attributes:
        dtype: the compute dtype of floating-point parameters; None is their own.
        fp8: the layers that compute in fp8; None if there are none.

    Raises:
        UnsupportedError: when the precision asks for fp8, and no layer of the model supports it.
    """

    strategy: Strategy
    model_spec: ModelSpec
    units: frozenset[Path]
    loops: LoopRule = LoopRule()
    stacked_units: frozenset[Path] = frozenset()
    dtype: Any = dataclasses.field(init=False)
    fp8: Fp8Layers | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        precision = self.strategy.precision
        fp8 = None
        if precision is not None and precision.products is not None:
            paths = fp8_layers(self.model_spec.abstract, precision.skip)
            dot = Fp8Dot(self.strategy.batch_axes)
            fp8 = Fp8Layers(dot, paths, gathers=precision.gather is not None)
        object.__setattr__(self, "fp8", fp8)
        object.__setattr__(self, "dtype", None if precision is None else precision.compute)

    def cast(self, params: PyTree) -> PyTree:
        """Casts parameters to the compute dtype."""
        return params if self.dtype is None else cast_floating(params, self.dtype)

    def change_with(
        self,
        make_gather: MakeGather | None,
        before: ModelChange | None = None,
        remat: RematPolicy | None = None,
        bundle: Bundle = lambda _, weight: weight,
        by_units: Callable[[Path], bool] = lambda _: True,
    ) -> ModelChange:
        """Returns a function that makes the changes to a merged model, in place.

        Args:
            make_gather: gives the gather of each weight, which runs within its unit; None if all
                weights are whole already.
            before: a further change, made before the others.
            remat: which residuals each unit saves; None if the scan over units decides.
            bundle: wraps a weight together with what its gather also needs.
            by_units: whether a weight may be gathered within its unit; otherwise it is gathered
                before all units.

        Returns:
            The function.
        """

        def apply_changes(model: nnx.Module) -> None:
            if before is not None:
                before(model)
            shapes = self.model_spec.shapes
            variables = {
                "/".join(map(str, keys)): variable
                for keys, variable in nnx.iter_graph(model)
                if isinstance(variable, nnx.Variable)
            }
            bridged = variables_in(bridge for _, bridge in bridges_of(model))
            units = (
                mark_units(model, lambda path, _: path in self.units, remat, self.stacked_units)
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
                elif id(variable) in bridged:
                    wider = self.model_spec.int8[path].widen(value.numbers, value.scale, self.dtype)
                    variable.set_value(bundle(path, wider))
                else:
                    gather = Int8Gather(gather, self.model_spec.int8[path], self.dtype)
                    # The loss may also read it outside the unit that gathers it.
                    variable.set_value(dataclasses.replace(value, widen=gather))
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

        return apply_changes

    def _gathers_in_fp8(self, gather: Any) -> bool:
        """Whether the product that reads a weight gathers it in fp8.

        It does not gather int8 weights, or weights that a loop reads in every iteration: these are
        gathered before the loop.
        """
        has_fp8_gathers = self.fp8 is not None and self.fp8.gathers
        return has_fp8_gathers and isinstance(gather, GlobalGather) and not gather.in_loop

    def with_layer_scan(self, forward: Forward) -> Forward:
        """Returns the forward pass with chains of units run as scans."""
        if not self.units:
            return forward
        strategy = self.strategy
        loops = self.loops
        # A unit saves no gathered weights for its backward pass, with or without remat, unless the
        # user's policy is `everything`.
        remat: RematPolicy | None = save_products_policy
        if strategy.layers:
            # `save_products_policy` would save the partial product of a row-parallel layer and
            # repeat its sum over the ranks in the backward pass. Saving every value but gathered
            # weights also saves the sum.
            gathers = strategy.params.split_axes and not strategy.gathers_once
            remat = save_all_but_gathers_policy if gathers or self.model_spec.int8 else None
        group = 1
        if strategy.remat is not None:
            remat = strategy.remat.remat
            group = strategy.remat.group_size
            if loops.most is None:
                why = "each saves only its input, and is recomputed in the backward pass"
                loops = dataclasses.replace(loops, most=1, why=why)
        # Weights are prefetched only if no layer gathers whole activations, because the compiler
        # would prefetch those gathers, too. It does not prefetch pieces that move around a ring.
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
    # A `linear_cross_entropy` inside a custom_vjp is not replaced: it stays correct, but is slower.
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


def change_layers(strategy: Strategy, mesh: Mesh, model: nnx.Module) -> None:
    """Replaces the calls of a merged model's layers by those of the strategy, in place.

    Args:
        strategy: its layers, experts and kernels.
        mesh: names and sizes of its axes, over all devices.
        model: a merged model.
    """
    layout = strategy.layout(mesh)
    # Kernels first: once a layer has mapped attention over all axes, no axis is left for the
    # kernels to split.
    modules = [module for _, module in nnx.iter_modules(model)]
    if any(hasattr(module, "attend") for module in modules):
        map_kernels(model, layout)
    if any(hasattr(module, MIX) for module in modules):
        map_experts(model, layout)
    for layers in strategy.layers:
        layers(model, layout)
