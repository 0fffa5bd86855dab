"""Gradients and evaluation in global view: the compiler partitions the user's program."""

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
    forward_of,
    gradient_means,
    gradient_sums,
    is_one,
    mean_loss,
    weighed_metrics,
    with_frozen,
)
from .spec import StepSpec


def global_gradients(spec: StepSpec, arguments: GradientArguments) -> GradientResult:
    """Computes gradients, sharded like their moments, in a program that the compiler partitions.

    Args:
        spec: the step. The policies of its strategy give the shardings of weights and moments.
        arguments: parameters, buffers, batch and scale.
    """
    params, frozen, buffers, batch, scale = arguments
    count = spec.num_microbatches
    gathers_once = spec.strategy.gathers_once
    owners = spec.stored.owners
    looped: frozenset[Path] = frozenset()
    if spec.strategy.splits:
        # Recurrent layers read their weights in every iteration of a loop.
        samples, shapes = spec.microbatch(batch)
        jaxpr = spec.separator.program(shapes, samples).jaxpr
        looped = read_in_loops(jaxpr, [p for p, _ in leaves_with_paths(spec.parts.weights)])
    forward = global_forward(spec, spec.change_layers, gathers_once, looped)
    if frozen:
        forward = with_frozen(forward, frozen)
    if gathers_once:
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
    """Returns the forward pass in global view: units gather weights in the compute dtype.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        also: changes the merged model first.
        is_whole: whether the parameters are whole already, and only gradients are reduced.
        looped: the weights that a loop reads in every iteration.

    Returns:
        A function (params, buffers, batch) -> `Outcome`.
    """
    gather = functools.partial(global_gather, spec, is_whole=is_whole, looped=looped)
    prepare = spec.changes.prepare(gather if spec.strategy.splits else None, also)
    forward = forward_of(spec.parts, spec.loss_fn, prepare)
    return spec.changes.with_layer_scan(
        rewritten(forward, spec.strategy, spec.mesh, spec.memory_bytes)
    )


LINEN_EVAL_ATTRIBUTES: MappingProxyType[type[nn.Module], str] = MappingProxyType(
    {
        nn.Dropout: "deterministic",
        nn.MultiHeadDotProductAttention: "deterministic",
        nn.BatchNorm: "use_running_average",
    }
)
"""Linen layers that behave differently in training -> the attribute that is True in eval mode."""

MODEL_EVAL_ARGUMENTS: MappingProxyType[str, bool] = MappingProxyType(
    {"deterministic": True, "train": False, "training": False, "is_training": False}
)
"""Argument that Linen models switch to evaluation with -> its value in evaluation."""


@dataclasses.dataclass(frozen=True)
class WithArguments:
    """Wraps calls of a module, replacing some of the arguments.

    Args:
        names: the positional parameters of the method in order, without the module.
        arguments: the new values, by name.
    """

    names: tuple[str, ...]
    arguments: tuple[tuple[str, Any], ...]

    def __call__(
        self, call: Function, module: nnx.Module | nn.Module, *args: object, **kwargs: object
    ) -> Any:
        """Runs the method; a call of another method of a bridged module is left unchanged."""
        if kwargs.get("method") is not None:
            return call(module, *args, **kwargs)
        arguments = dict(self.arguments)
        names = [*self.names[: len(args)], *[""] * (len(args) - len(self.names))]
        placed = [arguments.pop(name, x) for name, x in zip(names, args, strict=True)]
        return call(module, *placed, **{**kwargs, **arguments})


def _call_in_eval_mode(call: Function, module: nnx.Module, *args: object, **kwargs: object) -> Any:
    """Calls a bridged Linen module with its layers in eval mode, as `nnx.Module.eval` would."""
    with nn.intercept_methods(_intercept_eval_mode):
        return call(module, *args, **kwargs)


def evaluation(
    spec: StepSpec, params: PyTree, buffers: PyTree, batch: Batch
) -> dict[str, Weighted]:
    """Computes the loss and metrics of a batch in eval mode, with the program of training.

    NNX modules are switched by `eval()`, which a bridged Linen module lacks. Calls of its Linen
    layers are intercepted and run in eval mode. If its call takes one of `MODEL_EVAL_ARGUMENTS`,
    that argument is set to its value in evaluation.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        params: of the model, trained and frozen.
        buffers: of the model.
        batch: placed.

    Returns:
        `loss` and the metrics of the loss function, each as its sum over the samples and its
        weight. A metric without a weight has that of the loss. A plain scalar loss has the number
        of samples as its weight.
    """
    set_eval_mode = in_eval_mode(spec)

    def adapt(model: nnx.Module) -> None:
        set_eval_mode(model)
        spec.change_layers(model)

    return summed(global_forward(spec, adapt)(params, buffers, batch), batch)


def in_eval_mode(spec: StepSpec) -> Prepare:
    """Returns a function that sets a merged model to eval mode in place; see `evaluation`."""
    kwargs = dict(spec.options.eval_kwargs or {})

    def adapt(model: nnx.Module) -> None:
        model.eval()
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.bridge.ToNNX):
                _set_linen_eval_mode(module)
        for method in ("__call__", BEFORE_HEAD):
            if kwargs and hasattr(model, method):
                wrap_calls(model, {method: _with_arguments(model, method, kwargs)})

    return adapt


def summed(outcome: Outcome, batch: Batch) -> dict[str, Weighted]:
    """Returns the loss and metrics of a batch as weighted sums over its samples.

    Args:
        outcome: of the loss function for the batch.
        batch: leaves of shape [B, ...].
    """
    if is_one(outcome.loss.weight):
        # The loss is a mean over samples. Weigh it by their number, so that batches of different
        # sizes add up.
        size = jnp.float32(jax.tree.leaves(batch)[0].shape[0])
        outcome = dataclasses.replace(outcome, loss=Weighted(outcome.loss.total * size, size))
    loss = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), outcome.loss)
    return {"loss": loss} | {
        name: x if isinstance(x, Weighted) else Weighted(x, loss.weight)
        for name, x in weighed_metrics(outcome).items()
    }


def _set_linen_eval_mode(module: nnx.bridge.ToNNX) -> None:
    """Sets one bridged Linen module to eval mode, in place."""
    names = _names(module)
    switches = tuple((name, value) for name, value in MODEL_EVAL_ARGUMENTS.items() if name in names)
    wrap_calls(module, {"__call__": _call_in_eval_mode})
    if switches:
        wrap_calls(module, {"__call__": WithArguments(names, switches)})


def check_eval_kwargs(model: nnx.Module, kwargs: Mapping[str, Any]) -> None:
    """Raises unless the model's call takes these arguments.

    Args:
        model: any; its leaves may be shapes.
        kwargs: the arguments, by name.

    Raises:
        ConfigError: naming the unknown argument and those that the call takes.
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
    """Divides sums over samples by their weights.

    Args:
        sums: by name, from `evaluation`; those of several batches can be added up.

    Returns:
        total / weight, by name.
    """
    return {name: mean_loss(x) for name, x in sums.items()}


def _with_arguments(module: nnx.Module, method: str, kwargs: Mapping[str, Any]) -> WithArguments:
    """Wraps a method with the arguments that it accepts; `check_eval_kwargs` checked `__call__`."""
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


def _intercept_eval_mode(
    call: Function, args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """Runs one method of a Linen module, with eval mode set if the module has a training mode."""
    name = next(
        (n for kind, n in LINEN_EVAL_ATTRIBUTES.items() if isinstance(context.module, kind)), None
    )
    if name is None or context.method_name != "__call__":
        return call(*args, **kwargs)
    names = tuple(inspect.signature(type(context.module).__call__).parameters)[1:]
    with _attribute_unset(context.module, name):
        run = WithArguments(names, ((name, True),))
        return run(lambda _, *a, **k: call(*a, **k), context.module, *args, **kwargs)


@contextmanager
def _attribute_unset(module: nn.Module, name: str) -> Iterator[None]:
    """Sets an attribute to None for a while: Linen refuses it as attribute and argument at once."""
    before = getattr(module, name)
    object.__setattr__(module, name, None)
    try:
        yield
    finally:
        object.__setattr__(module, name, before)
