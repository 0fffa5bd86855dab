"""How a step sees the model: the dtypes it computes in, its units, and how weights are gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ..core.errors import StrategyConflictError
from ..core.tree import leaves_with_paths
from ..core.typing import Array, Path, PyTree
from ..jaxpr.layer_scan import scan_over_layers
from ..jaxpr.linen import bridges_of
from ..jaxpr.rewrite import ByRank, whole_slices
from ..jaxpr.units import GATHER, RematPolicy, check_some, is_in_any, is_inside, mark_units
from ..nn import ActivationCheckpointing, Layout
from ..ops.fp8 import Fp8Dot, Fp8Layers, fp8_layers
from ..ops.int8 import Int8, Int8Form
from ..ops.precision import MixedPrecision, autocast, cast_floating
from ..parallel import (
    LossOverMesh,
    Strategy,
    TransformerAutoWrapPolicy,
    map_experts,
    map_kernels,
    ring_products,
    sends_pieces,
)
from ..parallel.gather import GlobalGather, Int8Gather, regather_in_backward, remake_in_backward
from .objective import Forward, Prepare
from .parts import ModelParts

MakeGather: TypeAlias = Callable[[Path], Any]
"""The path of a parameter -> the function that gathers it; None where it is whole."""

Bundle: TypeAlias = Callable[[Path, Any], Any]
"""(path of a parameter, its value) -> what it is gathered from."""


@dataclasses.dataclass(frozen=True)
class View:
    """The changes that a strategy makes to a merged model before it runs.

    Args:
        precision: the dtypes; None leaves the model's own.
        units: the paths of the modules that are gathered, freed and recomputed as one.
        remat: activation checkpointing, or None.
        frees_weights: whether gathered or widened weights are freed after use.
        moves_activations: whether units send activations between ranks, as tensor and context
            parallelism do.
        weights: the paths of the parameters, trained and frozen.
        int8: how those are kept that come in eight bits, by path.
        fp8: the layers that compute in fp8; None where there are none.
        sends_pieces: whether the activations that move are pieces that go round a ring, of which
            the compiler fetches none before its time.
        unroll: up to how many units that call each other are written out; None leaves it to the
            scan where they keep what their backward pass reads, and is else 1.
        looped: the paths of units that stack the parameters of the layers that a loop calls.
    """

    precision: MixedPrecision | None
    units: frozenset[Path]
    remat: ActivationCheckpointing | None
    frees_weights: bool
    moves_activations: bool
    weights: frozenset[Path]
    int8: Mapping[Path, Int8Form] = dataclasses.field(default_factory=dict)
    fp8: Fp8Layers | None = None
    sends_pieces: bool = False
    unroll: int | None = None
    looped: frozenset[Path] = frozenset()

    def cast(self, params: PyTree) -> PyTree:
        """The parameters in the compute dtype."""
        return params if self.precision is None else cast_floating(params, self.precision.compute)

    @property
    def dtype(self) -> Any:
        """The dtype of floating-point parameters in use; None is their own."""
        return None if self.precision is None else self.precision.compute

    def read(self, path: Path, value: Any) -> Array:
        """The value of a parameter in the compute dtype."""
        if isinstance(value, Int8):
            return self.int8[path].widen(value.numbers, value.scale, self.dtype)
        return self.cast(value)

    def prepare(
        self,
        make_gather: MakeGather | None,
        also: Prepare | None = None,
        remat: RematPolicy | None = None,
        bundle: Bundle = lambda _, weight: weight,
        by_units: Callable[[Path], bool] = lambda _: True,
    ) -> Prepare:
        """Makes the function that adapts a merged model.

        Args:
            make_gather: how weights are gathered, each within its unit; None where they are
                whole already.
            also: a further change, made first.
            remat: what each unit keeps for its backward pass; None where the scan does.
            bundle: what a weight is gathered from beside itself.
            by_units: whether the unit that has a weight may gather it; else it is gathered in
                front of all units.

        Returns:
            The function.
        """

        def adapt(model: nnx.Module) -> None:
            if also is not None:
                also(model)
            params = _variables(model, self.weights)
            units = mark_units(model, lambda path, _: path in self.units, remat, self.looped)
            found = {*units}
            linen = [_path(keys) for keys, _ in bridges_of(model)]
            layers = () if self.fp8 is None else self.fp8.layers(model)
            by_products: dict[int, Any] = {id(layer.kernel): None for layer in layers}
            for path, variable in params.items():
                gather: Any = None if make_gather is None else make_gather(path)
                is_linen = any(is_inside(path, bridge) for bridge in linen)
                if isinstance(variable.get_value(), Int8) and not is_linen:
                    gather = Int8Gather(gather, self.int8[path], self.dtype)
                else:
                    variable.set_value(bundle(path, self.read(path, variable.get_value())))
                if gather is None:
                    continue
                if id(variable) in by_products and self._travels_rounded(gather):
                    by_products[id(variable)] = gather
                    continue
                # Only what a unit will gather carries the way to do it: Linen takes a Variable with
                # metadata of ours for a boxed value.
                if by_units(path) and is_in_any(path, found):
                    variable.set_metadata(**{GATHER: gather})
                else:
                    variable.set_value(gather(variable.get_value()))
            if self.precision is not None and self.precision.buffer is not None:
                _widen_statistics(model, self.weights)
            if self.precision is not None and self.precision.is_mixed:
                autocast(model, self.precision)
            if self.fp8 is not None:
                self.fp8(model, lambda kernel: by_products.get(id(kernel)))

        return adapt

    def _travels_rounded(self, gather: Any) -> bool:
        """Whether the product that reads a weight gathers it, in fp8.

        Not what comes in eight bits, and not what a loop reads in every turn, which is whole in
        front of the loop.
        """
        asked = self.fp8 is not None and self.fp8.gathers
        return asked and isinstance(gather, GlobalGather) and not gather.in_loop

    @property
    def _cheap(self) -> RematPolicy | None:
        """What units keep that are not to be recomputed."""
        if not self.moves_activations:
            return remake_in_backward
        # What a sum over tensor ranks is added to must be kept behind the sum, not before it.
        return regather_in_backward if self.frees_weights else None

    def with_layer_scan(self, forward: Forward) -> Forward:
        """The forward pass with chains of units as scans, where there are units."""
        if not self.units:
            return forward
        remat = self.remat.remat if self.remat else self._cheap
        group = self.remat.group_size if self.remat else 1
        prefetch = self.sends_pieces or not self.moves_activations
        unroll = self.unroll or (1 if self.remat else None)
        return scan_over_layers(forward, group, remat, prefetch=prefetch, unroll=unroll)


def spelled(forward: Callable[..., Any], strategy: Strategy, mesh: Mesh) -> Callable[..., Any]:
    """A forward pass with its operations spelled so that the compiler gets them right on a mesh.

    Args:
        forward: of arrays.
        strategy: its batch axes say which ranks have which samples; in stages of a pipeline
            slices are spelled too.
        mesh: names and sizes of its axes, over all devices.

    Returns:
        A function of the same arguments and results.
    """
    layout = layout_of(strategy, mesh)
    for rings in ring_products(strategy, layout):
        forward = rings.of(forward)
    losses = LossOverMesh.rewriting(layout)
    if losses is not None:
        forward = losses.beside(ByRank.rewriting(mesh, strategy.batch_axes)).of(forward)
    return forward if strategy.pipeline is None else whole_slices().of(forward)


def layout_of(strategy: Strategy, mesh: Mesh) -> Layout:
    """Where a strategy has the activations of all layers lie."""
    layout = Layout(mesh, strategy.batch_axes, may_ring=strategy.pipeline is None)
    for layers in strategy.layers:
        layout = layers.extend(layout)
    return layout


def layers_of(strategy: Strategy, mesh: Mesh) -> Prepare:
    """What a strategy changes about the calls of a model's layers."""
    layout = layout_of(strategy, mesh)

    def adapt(model: nnx.Module) -> None:
        # Kernels first: where a layer has mapped attention over all axes already, nothing is left
        # for them to split.
        map_kernels(model, layout)
        map_experts(model, layout)
        for layers in strategy.layers:
            layers(model, layout)

    return adapt


def view_of(strategy: Strategy, parts: ModelParts, unroll: int | None = None) -> View:
    """The view of a strategy on a model.

    Args:
        strategy: its `wrap`, `precision`, `remat` and policies.
        parts: the model's structure, and the shapes of its parameters and buffers.
        unroll: up to how many units are written out; None says so by itself.

    Returns:
        The view.

    Raises:
        StrategyConflictError: when wrapping and checkpointing name different classes.
        UnsupportedError: when the classes named for units or checkpointing do not exist, or fp8
            finds no layer.
    """
    splits = bool(strategy.params.split_axes or strategy.opt_state.split_axes)
    units: frozenset[Path] = frozenset()
    if splits or strategy.remat is not None or parts.int8:
        units = _units(strategy, parts)
    return View(
        precision=strategy.precision,
        units=units,
        remat=strategy.remat,
        frees_weights=bool(
            (strategy.params.split_axes and not strategy.gathers_once) or parts.int8
        ),
        moves_activations=bool(strategy.layers),
        weights=paths_of(parts.weights),
        int8=parts.int8,
        fp8=fp8_of(strategy, parts),
        sends_pieces=all(map(sends_pieces, strategy.layers)),
        unroll=unroll,
    )


def fp8_of(strategy: Strategy, parts: ModelParts) -> Fp8Layers | None:
    """The layers that compute in fp8 under a strategy, where its precision asks for it.

    Raises:
        UnsupportedError: when the model has no such layer.
    """
    precision = strategy.precision
    if precision is None or precision.products is None:
        return None
    dot = Fp8Dot(strategy.batch_axes)
    paths = fp8_layers(parts.abstract, precision.skip)
    return Fp8Layers(dot, paths, gathers=precision.gather is not None)


def _units(strategy: Strategy, parts: ModelParts) -> frozenset[Path]:
    model = parts.abstract
    named = strategy.remat.classes if strategy.remat is not None else None
    wrap = strategy.wrap or TransformerAutoWrapPolicy()
    policy = TransformerAutoWrapPolicy(*named) if named else wrap
    units = frozenset(policy.units(model))
    if wrap not in (policy, TransformerAutoWrapPolicy()):
        raise StrategyConflictError(
            f"{wrap} says which modules are gathered as one, and activation checkpointing of "
            f"{named} which are recomputed as one; they are the same modules, so say it once"
        )
    asked = getattr(policy, "classes", ()) or (strategy.remat is not None)
    if asked and not units:
        what = f"activation checkpointing of {named or 'repeated blocks'}"
        check_some([], f"{policy}" if not strategy.remat else what, model)
    return units


def paths_of(weights: PyTree) -> frozenset[Path]:
    """The paths of the leaves of a nested dict."""
    return frozenset(path for path, _ in leaves_with_paths(weights))


def _widen_statistics(model: nnx.Module, weights: frozenset[Path]) -> None:
    """Statistics are stored in a dtype of their own, and updated in float32 or wider."""
    for keys, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable) and _path(keys) not in weights:
            value = variable.get_value()
            if jnp.issubdtype(value.dtype, jnp.floating):
                variable.set_value(value.astype(jnp.promote_types(value.dtype, jnp.float32)))


def _variables(model: nnx.Module, paths: frozenset[Path]) -> dict[Path, nnx.Variable]:
    return {
        _path(keys): variable
        for keys, variable in nnx.iter_graph(model)
        if isinstance(variable, nnx.Variable) and _path(keys) in paths
    }


def _path(keys: Iterable[Any]) -> Path:
    return "/".join(map(str, keys))
