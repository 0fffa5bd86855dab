"""The options of a step other than its strategy."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_type_hints

from flax import nnx
from jax.sharding import Mesh

from ..core.checks import OPTIMIZER, check_fields, is_wrapper
from ..core.errors import ConfigError, GroupError, NamedChoice, did_you_mean
from ..core.typing import LossFn, OptionValue
from ..core.words import AUTO
from ..mesh import ProcessGroup, World
from ..nn import ActivationCheckpointing
from ..ops.precision import GradScaler
from ..parallel import HasStrategy, Strategy, as_strategy

FLAG = "nonfinite"
"""The metric that is true when the nonfinite guard kept parameters and moments unchanged."""


class Nonfinite(NamedChoice):
    """The reaction of a run to a loss or a gradient that is not finite.

    A step built with one of these policies then leaves parameters and moments unchanged. The
    devices decide it; the host learns of it only from the metrics. Gradients that overflow under a
    loss scale do not count as nonfinite while the scale can still decrease.
    """

    STOP = "stop"
    """The run ends with an error; its last state is the one before the batch."""
    SKIP = "skip"
    """The run continues with the next batch; the skipped step counts as a step."""
    ROLLBACK = "rollback"
    """The run continues from its newest checkpoint, with batches that it has not seen yet."""

    @property
    def holds(self) -> bool:
        """Whether later steps, also those already in flight, leave the state unchanged too."""
        return self is not Nonfinite.SKIP


class StepKeywords(TypedDict, total=False):
    """The options of a step: the keywords of `build_train_step`, and the fields of `StepOptions`.

    `StepOptions` says what they mean. Those without a default in `_DEFAULTS` are None by default.
    """

    accumulate: int
    clip_norm: float | None
    metrics: tuple[str, ...]
    scaler: GradScaler | None
    nonfinite: Nonfinite | str | None
    deterministic: bool | Literal["elastic"]
    logical_shards: int | None
    pad: str | None
    compiler_options: Mapping[str, OptionValue | None] | None
    separable: bool | None
    eval_kwargs: Mapping[str, Any] | None
    ema: float | None
    unroll: int | None
    axis_names: Mapping[str, str | Sequence[str]] | None
    scan_layers: bool | Literal["auto"]


_DEFAULTS: StepKeywords = {
    "accumulate": 1,
    "metrics": ("loss",),
    "deterministic": False,
    "scan_layers": AUTO,
}


def options_of(options: StepOptions | None, keywords: StepKeywords, scales: bool) -> StepOptions:
    """Merges the options of a step, given as a value, as keywords, or as both.

    Args:
        options: the value; None for the defaults.
        keywords: fields by name; they take precedence over those of the value.
        scales: whether the precision needs a loss scale, and so has one by default.

    Raises:
        ConfigError: if the value is not a `StepOptions`, or a keyword is not one of its fields.

    Example:
        >>> options_of(StepOptions(accumulate=4), {"ema": 0.999}, scales=False).ema
        0.999
    """
    check_kind("options", options, StepOptions, "such as StepOptions(accumulate=4)")
    names = [field.name for field in dataclasses.fields(StepOptions)]
    for name in keywords:
        if name not in names:
            raise ConfigError(
                f"build_train_step has no argument {name!r}.{did_you_mean(name, names)}"
            )
    resolved = dataclasses.replace(options or StepOptions(), **keywords)
    scaler = resolved.scaler or (GradScaler() if scales else None)
    nonfinite = None if resolved.nonfinite is None else Nonfinite(resolved.nonfinite)
    return dataclasses.replace(resolved, scaler=scaler, nonfinite=nonfinite)


def check_arguments(
    optimizer: Any,
    loss_fn: LossFn,
    world: Any,
    remat: Any = None,
    strategy: Any = None,
    model: Any = None,
) -> None:
    """Checks the types of the arguments that are not plain values.

    Args:
        optimizer: must have `init` and `update`, as optax transformations do.
        loss_fn: must be callable.
        world: must be a `World`.
        remat: must be an `ActivationCheckpointing` or None.
        strategy: a wrapper must be over a group of this world, and around an equal model.
        model: the model, or a function that makes it.

    Raises:
        ConfigError: naming what was given and what to give instead.
        GroupError: when a wrapper belongs to another world.

    Example:
        >>> check_arguments(None, len, None)
        Traceback (most recent call last):
            ...
        axon_dist.core.errors.ConfigError: optimizer is a NoneType; give an optax transformation...
    """
    if isinstance(optimizer, nnx.Optimizer):
        raise ConfigError(
            "optimizer is an nnx.Optimizer, which keeps its own state; give the optax "
            "transformation it was made of: the step keeps its state in TrainState.opt_state",
            code="nnx-optimizer",
        )
    if inspect.isclass(optimizer) or not OPTIMIZER.holds(optimizer):
        of_class = f"the class {getattr(optimizer, '__name__', '')}"
        what = of_class if inspect.isclass(optimizer) else f"a {type(optimizer).__name__}"
        raise ConfigError(
            f"optimizer is {what}; give an optax transformation, such as optax.adamw(1e-3)"
        )
    if inspect.isclass(loss_fn):
        raise ConfigError(
            f"loss_fn is the class {loss_fn.__name__}; give a function loss_fn(model, batch), or "
            "an instance that can be called so"
        )
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is a {type(loss_fn).__name__}; give a function loss_fn(model, batch) that "
            "returns a scalar mean or Weighted(total, weight)"
        )
    if hasattr(loss_fn, "cache_info"):
        raise ConfigError(
            "loss_fn is cached by functools, which cannot look up models and batches, and would "
            "return values of another trace; give the function itself, loss_fn.__wrapped__",
            code="cached-loss",
        )
    _check_arity(loss_fn)
    if not isinstance(world, World):
        raise ConfigError(
            f"world is a {type(world).__name__}; give a World, made by World.init(...) or "
            "World.emulate(8)"
        )
    check_kind("remat", remat, ActivationCheckpointing, "such as ActivationCheckpointing()")
    group = getattr(strategy, "group", None)
    if isinstance(group, ProcessGroup) and group.mesh != world.mesh:
        raise GroupError(
            f"the {type(strategy).__name__} is over a group of a mesh {_axes(group.mesh)}, but the "
            f"step is for a world of {_axes(world.mesh)}, or of other devices; give it "
            f"world.group({', '.join(map(repr, group.axes))}) of this world"
        )
    wrapped: Any = getattr(strategy, "module", None)
    both = isinstance(wrapped, nnx.Module) and isinstance(model, nnx.Module)
    # Another, equal model is accepted: a strategy depends on names and shapes alone.
    if both and wrapped is not model and _weights(wrapped) != _weights(model):
        raise ConfigError(
            f"the {type(strategy).__name__} wraps a {type(wrapped).__name__}, but the model passed "
            f"to build_train_step is a {type(model).__name__} whose weights have other paths or "
            "shapes; pass its .module as the model, or its .strategy as the strategy",
            code="wrapper-of-another-model",
        )


def unwrapped_model(model: Any, strategy: Strategy | HasStrategy) -> Any:
    """Returns the module of a wrapper that is passed as the model too, as PyTorch's users do.

    Args:
        model: the model, a function that makes it, or a wrapper such as `DDP`.
        strategy: that of the step. A wrapper with another one stays wrapped, and `split_model`
            refuses it: its own strategy would have no effect.
    """
    if not is_wrapper(model) or model.strategy != as_strategy(strategy):
        return model
    return model.module


def _weights(model: Any) -> dict[Any, Any]:
    """Returns the shape of every weight by path."""
    flat: Any = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {path: getattr(variable.get_value(), "shape", None) for path, variable in flat}


def _axes(mesh: Mesh) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def _check_arity(loss_fn: LossFn) -> None:
    """Raises unless a loss can be called as `loss_fn(model, batch)`, perhaps with `step=` too."""
    if (signature := _signature(loss_fn)) is None:
        return
    try:
        signature.bind(None, None, **({"step": None} if takes_step(loss_fn) else {}))
    except TypeError as error:
        raise ConfigError(
            f"loss_fn takes {signature}, but is called as loss_fn(model, batch): {error}; let it "
            "take these two, and bind the others with functools.partial. Draw random numbers "
            "from an nnx.Rngs that the model keeps, as in model.rngs.noise(), since a bound key is "
            "the same in every step"
        ) from error


def takes_step(loss_fn: LossFn) -> bool:
    """Whether a loss function has a required parameter `step`.

    Example:
        >>> takes_step(lambda model, batch, *, step: 0.0), takes_step(lambda model, batch: 0.0)
        (True, False)
    """
    signature = _signature(loss_fn)
    step = None if signature is None else signature.parameters.get("step")
    positional = inspect.Parameter.POSITIONAL_ONLY
    return step is not None and step.default is step.empty and step.kind is not positional


def _signature(function: LossFn) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # Python cannot tell the signature of every callable.
        return None


def check_kind(name: str, value: object, kind: type, example: str) -> None:
    """Raises `ConfigError` unless an option is None or of the given type.

    Example:
        >>> check_kind("pad", None, str, "the path of a leaf")
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r}; it must be None or {example}")


NORMS_BY_LAYER = "norms_by_layer"
"""The metrics `grad_norm/L`, `param_norm/L` and `update_norm/L` of every layer L."""

METRICS = ("loss", "grad_norm", "param_norm", NORMS_BY_LAYER)
"""The metrics that a step can report."""

ELASTIC = "elastic"
"""The `deterministic` whose bits do not depend on the number of ranks."""

LOSS_SCALE = "loss_scale"
"""The metric in which a step with a `GradScaler` reports its scale."""

OVERFLOW = "gradient_overflow"
"""The metric that is true when a `GradScaler` kept the state because a gradient overflowed."""


def _check_types(options: Any) -> None:
    check_fields(options, "build_train_step")


# Type checkers read the keywords of a function from a TypedDict alone, so the fields of the value
# are made from it.
_Fields: Any = dataclasses.make_dataclass(
    "_Fields",
    [
        (name, hint, dataclasses.field(default=_DEFAULTS.get(name)))
        for name, hint in get_type_hints(StepKeywords).items()
    ],
    namespace={"__post_init__": _check_types},
    frozen=True,
)


class StepOptions(_Fields):
    """The options of a step other than its strategy.

    Args:
        accumulate: K, the number of microbatches per step, whose gradients are added up before the
            optimizer runs; a pipeline has its own number.
        clip_norm: the largest global norm of the gradient. None: no clipping.
        metrics: which norms a step reports in addition to `loss` and the metrics of the loss
            function: `"grad_norm"`, which `clip_norm` and `watched(spikes=...)` report in any
            case; `"param_norm"`, that of the parameters after the update; and `"norms_by_layer"`,
            which reports `grad_norm/L` before clipping, `param_norm/L` before the update, and
            `update_norm/L` of every layer L: a block such as `blocks/0`, or else the first part of
            a path. The update of a step that `watched(spikes=...)` skips is 0, and so are its
            norms. `"loss"` may be listed too.
        scaler: the loss scale; float16 compute has one by default. A step then reports the metrics
            `loss_scale` and `gradient_overflow`.
        nonfinite: with `"stop"`, `"skip"` or `"rollback"`, a step whose loss or gradient is not
            finite leaves parameters and moments unchanged and sets the metric `nonfinite`. A
            `Trainer` then stops, continues with the next batch, or goes back to the last
            checkpoint. None applies every update, as plain JAX does.
        deterministic: True compiles for the same bits in every run, which may be slower on GPUs;
            see `deterministic_options`. With `"elastic"`, results are also bitwise equal for any
            power of two of ranks, up to `logical_shards`. CPUs only; data parallelism, ZeRO and
            FSDP only. All sums follow one balanced binary tree over `logical_shards`. A rank
            evaluates its shards one after another, whatever `accumulate` is, so `accumulate`
            changes no result.
        logical_shards: V, the number of equal parts of successive samples into which a batch is cut
            under `deterministic="elastic"`; a power of two, and a multiple of the number of ranks
            times `accumulate`, in every run that should have the same bits.
        pad: the name of the batch leaf with one weight per sample. A batch that does not divide is
            padded with copies of its last sample, of weight 0 (`BatchPadding`). Raises if the
            traced program does not show that they leave loss, metrics and buffers unchanged. None:
            such batches raise. Several processes each pad their own rows, so that numbers drawn per
            sample, as by dropout, depend on the number of processes.
        compiler_options: options for XLA in addition to those of the chip, which they override.
            `hardware.HARDWARE` lists the options of the chips, which combine collectives and
            overlap them with compute; the value None removes one of them. Every program of the
            step is compiled with these options, and `lower(batch).compile()` shows the program
            that runs.
        separable: whether the loss of a batch can be computed from the losses of its parts: the
            microbatches, and the samples of each rank. With None, the step proves it. With True or
            False a loss that couples samples is not refused: it is the mean over the parts. A loss
            that is proven to be a sum is summed. A metric that follows from sums over the samples,
            such as the perplexity `exp(mean)`, is that of the whole batch in any case; that of
            replicas that train on their own is their mean.
            In a microbatch, with True each rank computes the loss of its own samples, and these are
            averaged; with False all ranks compute the loss of the microbatch together.

            - None (default): the step reads it off the traced loss. A mean, a sum, a `Weighted` or
              a function of sums over the samples can be computed from parts. Any other loss
              couples samples: it is computed over the samples of all ranks, in global view, and
              refused with several microbatches. A metric that couples samples is refused with
              microbatches too. So is a buffer that depends on the samples, unless it is a mean
              over them, such as a decaying average of means, or only adds a sum over them.
            - True: it can, even if the step cannot prove it. Where the step computes per rank,
              each rank computes the loss of its own samples; the result is the mean over all parts.
              A quotient `sum / count` is NaN for a part with count 0; return `Weighted(sum, count)`
              instead.
            - False: it cannot. All ranks compute the loss of a microbatch together, in global
              view, and the result is the mean over the microbatches, which may differ from the
              loss of the whole batch. Refused are a sum of terms that grow differently with the
              number of samples, and an option that needs each rank to compute its own loss.
        eval_kwargs: keyword arguments that `evaluate` passes to the call of the model, in place of
            those that the loss passes, such as `{"deterministic": True}`. NNX modules are put into
            eval mode by `eval()`; in bridged Linen modules the layers are switched, and the
            module's own flag is set. Pass any other argument that evaluation needs.
        ema: the decay of a moving average of the trained parameters, which the state then keeps:
            `ema = decay * ema + (1 - decay) * params` after every update, starting from the first
            parameters. `evaluate` and `merge` use it with `ema=True`, and a `Trainer` validates
            it.
        unroll: the largest number of blocks that are unrolled, where `scan_layers` is `"auto"` and
            the strategy splits or recomputes blocks; longer chains run as one loop. None leaves it
            to `scan_layers`. It changes the results by rounding at most.
        scan_layers: whether equal blocks that are called one after another run as one loop, a
            `lax.scan`, or are unrolled. A loop is compiled once, gathers and recomputes one block
            at a time, and stacks what each block keeps for its backward pass; unrolled, each block
            is compiled separately. True loops all equal blocks. `"auto"` and False concern blocks
            that the strategy splits or recomputes; False unrolls them. `"auto"` unrolls up to four
            blocks, and on GPUs more if the stacks of a loop would cost more time in 10,000 steps
            than compiling the blocks; but recomputed blocks, blocks that contain a loop, and more
            than 16 that gather their weights run as a loop. On other devices, and under tensor,
            context and expert parallelism, more than four run as a loop. `print(step)` says what it
            chose and why, once a batch was traced. Blocks that the model keeps stacked run in the
            model's own loop. It changes the results by rounding at most.
        axis_names: which mesh axes the axis names in the model's code refer to, such as
            `{"data": ("dp", "fsdp"), "heads": "tp"}`: in `with_sharding_constraint`, in
            `reshard`, and in the annotations of `nnx.with_partitioning`. Mesh axes are known by
            their own names, and in constraints also by common other names, such as `"data"` and
            `"model"`. An empty list means no axis. It does not change the results.

    Example:
        >>> StepOptions(accumulate=4, clip_norm=1.0).accumulate
        4
    """

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[StepKeywords]) -> None: ...

    @property
    def is_elastic(self) -> bool:
        """Whether the bits do not depend on the number of ranks."""
        return self.deterministic == ELASTIC

    def validate(self) -> None:
        """Raises `ConfigError` unless every option has a valid value."""
        if self.accumulate < 1:
            raise ConfigError(
                f"accumulate is {self.accumulate!r}; it must be a whole number of microbatches, "
                "at least 1",
                code="accumulate-range",
            )
        if self.unroll is not None and self.unroll < 1:
            raise ConfigError(
                f"unroll is {self.unroll!r}; it must be None or an integer of at least 1, the "
                "largest number of blocks to unroll; 1 runs every chain as a loop",
                code="unroll-range",
            )
        if self.unroll is not None and self.scan_layers != AUTO:
            raise ConfigError(
                f"unroll is {self.unroll}, and scan_layers is {self.scan_layers}: both say which "
                "blocks run as a loop; leave one of the two out",
                code="unroll-and-scan-layers",
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"clip_norm is {self.clip_norm}; it must be positive, or None not to clip",
                code="clip-norm-range",
            )
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ConfigError(
                f"ema is {self.ema}; it must be the decay of the average, at least 0 and below 1, "
                "such as 0.999, or None not to average",
                code="ema-range",
            )
        for name in self.metrics:
            if name not in METRICS:
                hint = did_you_mean(name, METRICS)
                raise ConfigError(f"unknown metric {name!r}.{hint}", code="unknown-metric")
        shards = self.logical_shards
        is_power = shards is not None and shards > 0 and not shards & (shards - 1)
        if not (is_power if self.is_elastic else shards is None):
            raise ConfigError(
                f"logical_shards is {shards!r}, but deterministic is {self.deterministic!r}; "
                f"set logical_shards to a power of two, such as 8, with deterministic={ELASTIC!r}, "
                "and leave it None otherwise",
                code="logical-shards",
            )
