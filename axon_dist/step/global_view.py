"""Gradients and evaluation in global view: the user's program, laid out by the compiler."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from ..core.errors import ConfigError, did_you_mean
from ..core.modules import wrap_calls
from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import Array, Batch, Function, Path, PyTree
from ..core.weighted import Weighted
from ..ir.pieces import read_in_loops
from ..ops.linear_loss import BEFORE_HEAD
from .gather import global_gather
from .microbatches import accumulate, draws_of
from .model_changes import rewritten
from .objective import (
    Forward,
    GradientArguments,
    GradientResult,
    Outcome,
    Prepare,
    with_frozen,
    forward_of,
    gradient_means,
    gradient_sums,
    is_one,
    mean_loss,
    weighed_metrics,
)
from .spec import StepSpec


def global_gradients(spec: StepSpec, arguments: GradientArguments) -> GradientResult:
    """Gradients that the compiler partitions, with the sharding of their moments.

    Args:
        spec: the step; the policies of its strategy give the shardings of weights and moments.
        arguments: parameters, buffers, batch and scale.
    """
    params, frozen, buffers, batch, scale = arguments
    count, once, owners = spec.num_microbatches, spec.strategy.gathers_once, spec.stored.owners
    looped: frozenset[Path] = frozenset()
    if spec.strategy.splits:
        # As recurrent layers read their weights: in every turn.
        samples, shapes = spec.microbatch(batch)
        jaxpr = spec.separator.program(shapes, samples).jaxpr
        looped = read_in_loops(jaxpr, [p for p, _ in leaves_with_paths(spec.parts.weights)])
    forward = global_forward(spec, spec.change_layers, once, looped)
    if frozen:
        forward = with_frozen(forward, frozen)
    if once:
        params = map_with_path(
            lambda path, weight: global_gather(spec, path).forward(weight),
            spec.changes.cast(params),
        )
    if count == 1:
        means = gradient_means(forward, params, buffers, batch, scale)
        grads = jax.lax.with_sharding_constraint(means.grads, owners)
        return means._replace(grads=grads)
    sums, buffers = accumulate(
        gradient_sums(forward, scale=scale, parts=count),
        params,
        buffers,
        batch,
        count,
        constrain=lambda grads: jax.lax.with_sharding_constraint(grads, owners),
        drawing=draws_of(spec, batch),
    )
    grads, metrics = sums.means()
    return GradientResult(jax.lax.with_sharding_constraint(grads, owners), metrics, buffers)


def global_forward(
    spec: StepSpec,
    also: Prepare,
    is_whole: bool = False,
    looped: frozenset[Path] = frozenset(),
) -> Forward:
    """The forward pass in global view: units gather their weights, in the compute dtype.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        also: changes the merged model first.
        is_whole: whether the parameters given are whole already, and only gradients move.
        looped: the weights that a loop reads in every turn.

    Returns:
        A function (params, buffers, batch) -> `Outcome`.
    """
    gather = functools.partial(global_gather, spec, is_whole=is_whole, looped=looped)
    prepare = spec.changes.prepare(gather if spec.strategy.splits else None, also)
    forward = forward_of(spec.parts, spec.loss_fn, prepare)
    return spec.changes.with_layer_scan(rewritten(forward, spec.strategy, spec.mesh))


AT_REST: MappingProxyType[type[nn.Module], str] = MappingProxyType(
    {
        nn.Dropout: "deterministic",
        nn.MultiHeadDotProductAttention: "deterministic",
        nn.BatchNorm: "use_running_average",
    }
)
"""Layers of Linen that behave otherwise in training, and what is true when they do not."""

SWITCHES: MappingProxyType[str, bool] = MappingProxyType(
    {"deterministic": True, "train": False, "training": False, "is_training": False}
)
"""What Linen models call the argument that switches to evaluation, and its value then."""


@dataclasses.dataclass(frozen=True)
class WithArguments:
    """Calls a module with some arguments in place of those it is given.

    Args:
        names: of the parameters of the method, in order, without the module.
        arguments: by name.
    """

    names: tuple[str, ...]
    arguments: tuple[tuple[str, Any], ...]

    def __call__(
        self, call: Function, module: nnx.Module | nn.Module, *args: object, **kwargs: object
    ) -> Any:
        """Runs the method; a bridged module called with another method runs that as it is."""
        if kwargs.get("method") is not None:
            return call(module, *args, **kwargs)
        arguments = dict(self.arguments)
        names = [*self.names[: len(args)], *[""] * (len(args) - len(self.names))]
        placed = [arguments.pop(name, x) for name, x in zip(names, args, strict=True)]
        return call(module, *placed, **{**kwargs, **arguments})


def at_rest(call: Function, module: nnx.Module, *args: object, **kwargs: object) -> Any:
    """Calls a bridged Linen module with the layers in it as `nnx.Module.eval` would set them."""
    with nn.intercept_methods(_rest):
        return call(module, *args, **kwargs)


def evaluation(
    spec: StepSpec, params: PyTree, buffers: PyTree, batch: Batch
) -> dict[str, Weighted]:
    """The loss and metrics of a batch with the model in eval mode, computed as in training.

    Modules of NNX are switched by `eval()`. A bridged Linen module has no switch: its layers are
    set at rest while it runs, and so is the argument that it has for it, one of `SWITCHES`.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        params: of the model, trained and frozen.
        buffers: of the model.
        batch: placed.

    Returns:
        `loss` and the metrics of the loss function, each the sum over the samples and its weight:
        that which it has, else that of the loss, which is the number of samples where it is a plain
        number.
    """
    rest = in_eval_mode(spec)

    def adapt(model: nnx.Module) -> None:
        rest(model)
        spec.change_layers(model)

    return summed(global_forward(spec, adapt)(params, buffers, batch), batch)


def in_eval_mode(spec: StepSpec) -> Prepare:
    """What switches a merged model to evaluation, in place; see `evaluation`."""
    kwargs = dict(spec.options.eval_kwargs or {})

    def adapt(model: nnx.Module) -> None:
        model.eval()
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.bridge.ToNNX):
                set_at_rest(module)
        for method in ("__call__", BEFORE_HEAD):
            if kwargs and hasattr(model, method):
                wrap_calls(model, {method: _with_arguments(model, method, kwargs)})

    return adapt


def summed(outcome: Outcome, batch: Batch) -> dict[str, Weighted]:
    """The loss and metrics of a batch as sums over its samples and weights.

    Args:
        outcome: of the loss function for the batch.
        batch: leaves of shape [B, ...].
    """
    if is_one(outcome.loss.weight):
        # A mean over samples; what is 1 within a batch is not alike in batches of two sizes.
        size = jnp.float32(jax.tree.leaves(batch)[0].shape[0])
        outcome = dataclasses.replace(outcome, loss=Weighted(outcome.loss.total * size, size))
    loss = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), outcome.loss)
    return {"loss": loss} | {
        name: x if isinstance(x, Weighted) else Weighted(x, loss.weight)
        for name, x in weighed_metrics(outcome).items()
    }


def set_at_rest(module: nnx.bridge.ToNNX) -> None:
    """Makes the calls of one bridged Linen module those of evaluation, in place."""
    names = _names(module)
    switches = tuple((name, value) for name, value in SWITCHES.items() if name in names)
    wrap_calls(module, {"__call__": at_rest})
    if switches:
        wrap_calls(module, {"__call__": WithArguments(names, switches)})


def check_eval_kwargs(model: nnx.Module, kwargs: Mapping[str, Any]) -> None:
    """Raises unless the model's call takes these arguments.

    Args:
        model: any; its leaves may be shapes.
        kwargs: by name, values that compare.

    Raises:
        ConfigError: naming the argument and those there are.
    """
    parameters = _parameters(model)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in kwargs:
        if name not in parameters:
            kind = type(_called(model)).__name__
            raise ConfigError(
                f"eval_kwargs has {name!r}, and the call of {kind} takes "
                f"{', '.join(parameters) or 'no arguments'}.{did_you_mean(name, parameters)}"
            )


def _called(module: nnx.Module) -> Any:
    return module.to_nnx__module if isinstance(module, nnx.bridge.ToNNX) else module


def means(sums: Mapping[str, Weighted]) -> dict[str, Array]:
    """What sums over samples come to.

    Args:
        sums: by name, from an `evaluation`; those of several batches added up.

    Returns:
        total / weight, by name.
    """
    return {name: mean_loss(x) for name, x in sums.items()}


def _with_arguments(module: nnx.Module, method: str, kwargs: Mapping[str, Any]) -> WithArguments:
    """A method with those of the arguments that it takes; a call takes all, as was checked."""
    parameters = _parameters(module, method)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = tuple((name, x) for name, x in kwargs.items() if takes_any or name in parameters)
    return WithArguments(_names(module, method), accepted)


def _parameters(module: nnx.Module, method: str = "__call__") -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(getattr(type(_called(module)), method)).parameters
    return {name: parameters[name] for name in list(parameters)[1:]}


def _names(module: nnx.Module, method: str = "__call__") -> tuple[str, ...]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = _parameters(module, method)
    return tuple(name for name, p in parameters.items() if p.kind in positional)


def _rest(call: Function, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """Runs one method of a Linen module, a layer that has a training mode without it."""
    name = next((n for kind, n in AT_REST.items() if isinstance(context.module, kind)), None)
    if name is None or context.method_name != "__call__":
        return call(*args, **kwargs)
    names = tuple(inspect.signature(type(context.module).__call__).parameters)[1:]
    with _unsaid(context.module, name):
        run = WithArguments(names, ((name, True),))
        return run(lambda _, *a, **k: call(*a, **k), context.module, *args, **kwargs)


@contextmanager
def _unsaid(module: nn.Module, name: str) -> Iterator[None]:
    """Takes an attribute of a bound module away: a layer refuses a value given twice."""
    before = getattr(module, name)
    object.__setattr__(module, name, None)
    try:
        yield
    finally:
        object.__setattr__(module, name, before)
