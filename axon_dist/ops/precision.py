"""`MixedPrecision`: the dtypes of parameters, compute, reductions, buffers and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike

from ..core.checks import MODULE, NUMBER, check_fields, checked, instance_of
from ..core.errors import ConfigError, DTypeError, did_you_mean
from ..core.modules import is_node, wrap_calls
from ..core.tree import (
    floating_dtype,
    is_number_format,
    leaves_with_paths,
    spelled_dtype,
    wide,
)
from ..core.typing import Array, ArrayTree, PyTree

DTypeField: TypeAlias = Any
"""A dtype or its name as an argument of a policy; always a dtype as an attribute."""

Result = TypeVar("Result")
Choice = TypeVar("Choice", bound="MixedPrecision | str | bool | None")


@dataclasses.dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a training step; float32 by default.

    Parameters are stored in `param`, and the optimizer updates them in it. The model computes with
    copies in `compute`, and gradients are reduced in `reduce`. The loss function gets outputs in
    `output`. Flax's norms compute their statistics in float32, and the attention of this library
    its softmax.

    Args:
        param: dtype of parameters and optimizer state.
        compute: dtype of the forward and backward passes.
        reduce: dtype of gradients while they are reduced; None means `compute`.
        buffer: dtype of statistics such as BatchNorm's; None leaves them unchanged.
        output: dtype of the outputs that the model passes to the loss function.
        products: `"fp8"` computes the dense layers within blocks with `Fp8Dot`; None leaves them
            in the compute dtype.
        skip: regular expressions of the paths of dense layers that stay in the compute dtype.
        gather: `"fp8"` gathers the weights of fp8 products in fp8, one byte per element, where
            units gather weights; None gathers them in the compute dtype. It does not change any
            result.

    Raises:
        ConfigError: for a dtype that is not floating-point, unknown products, or `skip` or `gather`
            without fp8 products.

    Example:
        >>> MixedPrecision.bf16().compute
        dtype(bfloat16)
        >>> MixedPrecision(compute="float16").needs_scaling
        True

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740.
    """

    param: DTypeField = "float32"
    compute: DTypeField = "float32"
    reduce: DTypeField = None
    buffer: DTypeField = None
    output: DTypeField = "float32"
    products: str | None = None
    skip: tuple[str, ...] = ()
    gather: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("param", "compute", "reduce", "buffer", "output"):
            value = getattr(self, name)
            dtype = None if value is None else floating_dtype(value, name)
            object.__setattr__(self, name, dtype)
        object.__setattr__(self, "skip", tuple(self.skip))
        if self.products not in (None, "fp8"):
            raise ConfigError(f"products is {self.products!r:.80}; it must be 'fp8', or None")
        if self.skip and self.products is None:
            raise ConfigError(
                f"skip={self.skip!s:.80} excludes layers from fp8 products, but products is None; "
                "set products='fp8', or remove skip",
                code="skip-without-products",
            )
        if self.gather not in (None, "fp8"):
            raise ConfigError(f"gather is {self.gather!r:.80}; it must be 'fp8', or None")
        if self.gather is not None and self.products is None:
            raise ConfigError(
                "gather='fp8' gathers the weights of fp8 products, but products is None; "
                "set products='fp8', or remove gather",
                code="gather-without-products",
            )

    @classmethod
    def bf16(cls) -> MixedPrecision:
        """bfloat16 compute and reductions, float32 parameters."""
        return cls(compute="bfloat16")

    @classmethod
    def fp8(cls, skip: tuple[str, ...] = (), gather: str | None = None) -> MixedPrecision:
        """bfloat16 compute, with the dense layers within blocks in fp8.

        Args:
            skip: regular expressions of the paths of layers that stay in bfloat16.
            gather: `"fp8"` gathers their weights in fp8, where units gather weights.
        """
        return cls(compute="bfloat16", products="fp8", skip=skip, gather=gather)

    @classmethod
    def fp16(cls) -> MixedPrecision:
        """float16 compute with float32 reductions; use it with a `GradScaler`."""
        return cls(compute="float16", reduce="float32")

    @classmethod
    def of(cls, choice: MixedPrecision | str | bool | None) -> MixedPrecision:
        """Reads a policy, a preset's name, a dtype, or `mixed_precision=True`.

        `True` means bfloat16 compute with float32 reductions, the safer choice.

        Args:
            choice: names as `preset_name` reads them, in upper or lower case.

        Raises:
            ConfigError: for an unknown name.

        Example:
            >>> MixedPrecision.of("bfloat16") == MixedPrecision.of(jnp.bfloat16)
            True
            >>> MixedPrecision.of("FP32") == MixedPrecision()
            True
        """
        if isinstance(choice, MixedPrecision):
            return choice
        given, choice = choice, preset_name(choice)
        presets = {
            None: cls(),
            False: cls(),
            True: cls(compute="bfloat16", reduce="float32"),
            "float32": cls(),
            "bf16": cls.bf16(),
            "fp16": cls.fp16(),
            "fp8": cls.fp8(),
        }
        if not isinstance(choice, Hashable) or choice not in presets:
            names = [name for name in presets if isinstance(name, str)]
            hint = did_you_mean(str(choice), names, guesses=not is_number_format(str(choice)))
            raise ConfigError(f"precision: got {given!r:.80}.{hint}")
        return presets[choice]

    @property
    def reduce_dtype(self) -> np.dtype:
        """The dtype in which gradients are reduced."""
        return self.reduce or self.compute

    @property
    def needs_scaling(self) -> bool:
        """Whether small gradients underflow in the compute dtype, so that the loss is scaled."""
        return self.compute == jnp.float16

    @property
    def is_mixed(self) -> bool:
        """Whether the compute dtype differs from that of parameters."""
        return self.compute != self.param


_OF_DTYPES = MappingProxyType({"float32": "float32", "bfloat16": "bf16", "float16": "fp16"})
"""The preset that computes in each dtype."""


def preset_name(choice: Any) -> Any:
    """Returns the canonical name of a preset for another spelling of it; other values unchanged.

    Args:
        choice: such as `"bfloat16"`, `"BF16"`, `"half"`, `jnp.bfloat16` or a policy.

    Example:
        >>> preset_name("bfloat16"), preset_name("F32"), preset_name(jnp.float16)
        ('bf16', 'float32', 'fp16')
        >>> preset_name("bf61"), preset_name(None)
        ('bf61', None)
    """
    try:
        spelled = spelled_dtype(choice)
    except (TypeError, ValueError):
        # The types of NumPy that stand for several dtypes, such as np.floating, have no dtype.
        return choice
    if not isinstance(spelled, str):
        return choice
    return _OF_DTYPES.get(spelled, "fp8" if spelled.lower() == "fp8" else choice)


def without_gathers(choice: Choice) -> Choice | MixedPrecision:
    """Returns a policy with the same results for a step that gathers no weights, as on one device.

    Example:
        >>> without_gathers(MixedPrecision.fp8(gather="fp8")) == MixedPrecision.fp8()
        True
    """
    if not isinstance(choice, MixedPrecision):
        return choice
    return dataclasses.replace(choice, gather=None)


@checked()
def cast_floating(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Casts the floating-point leaves of a tree; integers, keys and booleans stay unchanged.

    Example:
        >>> tree = cast_floating({"w": jnp.ones(2), "n": jnp.arange(2)}, "bfloat16")
        >>> tree["w"].dtype, tree["n"].dtype
        (dtype(bfloat16), dtype('int32'))
    """
    return jax.tree.map(lambda x: _cast(x, dtype), tree)


_POLICY = instance_of(MixedPrecision, "a MixedPrecision, such as MixedPrecision.bf16()")


@checked(model=MODULE, policy=_POLICY)
def autocast(model: nnx.Module, policy: MixedPrecision) -> nnx.Module:
    """Makes a model compute in the policy's dtype, in place.

    Modules that promote their arguments get the compute dtype: every Flax layer, and the modules of
    a bridged Linen model that have a dtype. The model's inputs are cast to the compute dtype, its
    outputs to the output dtype. Flax's norms still compute their statistics in float32.

    Args:
        model: any NNX module; the caller casts its parameters.
        policy: param, compute, reduce and output dtype.

    Returns:
        The model.
    """
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, nnx.bridge.ToNNX):
            wrap_calls(module, {"__call__": LinenCasting(policy)})
        elif hasattr(module, "param_dtype") and hasattr(module, "dtype"):
            setattr(module, "dtype", policy.compute)  # noqa: B010
    wrap_calls(model, {"__call__": Casting(policy)})
    return model


@dataclasses.dataclass(frozen=True)
class Casting:
    """Runs a call with its inputs in the compute dtype and its outputs in the output dtype.

    NNX modules, variables and `nnx.Rngs` pass as they are in both directions, and a cache that
    holds floats keeps its dtype: the call changes the caller's own object. The model gets copies of
    lists and dicts, with cast arrays; what it changes in them is put into the caller's own.

    Args:
        policy: param, compute, reduce and output dtype.
    """

    policy: MixedPrecision

    def __call__(
        self, method: Callable[..., Result], module: nnx.Module, *args: object, **kwargs: object
    ) -> Result:
        """Runs the call with casts."""
        copies = _Copies(self.policy.compute)
        named = {name: copies.of(x) for name, x in kwargs.items()}
        output = method(module, *map(copies.of, args), **named)
        copies.write_back()
        return _Copies(self.policy.output, copies).of(output)


@dataclasses.dataclass(frozen=True)
class LinenCasting:
    """Runs a bridged Linen module, and sets the compute dtype on the modules inside it.

    These modules exist only while the bridge runs. Each gets the dtype when its first method is
    called; that is `setup` for modules that pass their dtype on to others. A module with dtype None
    is left alone, except one with a `param_dtype` field, as Flax layers have.

    Args:
        policy: param, compute, reduce and output dtype.
    """

    policy: MixedPrecision

    def __call__(
        self, method: Callable[..., Result], bridge: nnx.Module, *args: object, **kwargs: object
    ) -> Result:
        """Runs the call with the compute dtype set on each module."""
        with nn.intercept_methods(self.set_dtype):
            return method(bridge, *args, **kwargs)

    def set_dtype(
        self,
        call: Callable[..., Result],
        args: tuple,
        kwargs: Mapping[str, object],
        context: nn.module.InterceptorContext,
    ) -> Result:
        """Sets the compute dtype on a module, and runs one of its methods."""
        module = context.module
        fields = {field.name for field in dataclasses.fields(module)}
        dtype = getattr(module, "dtype", None)
        is_float = "param_dtype" in fields if dtype is None else jnp.issubdtype(dtype, jnp.floating)
        if "dtype" in fields and is_float:
            object.__setattr__(module, "dtype", self.policy.compute)
        return call(*args, **kwargs)


class _Copies:
    """Copies of values with cast arrays, and the caller's own values behind the copies.

    Args:
        dtype: the dtype of floating-point arrays in the copies.
        earlier: the copies that a call got. What it returns of them becomes the caller's own.
    """

    def __init__(self, dtype: DTypeLike, earlier: _Copies | None = None):
        self._dtype = dtype
        # By the id of the copy, which is kept, so that no other value gets its id.
        self._own: dict[int, tuple[Any, Any]] = {}
        self._earlier = earlier

    def of(self, value: Any) -> Any:
        """Returns a copy: of every list and dict, and of other nodes with arrays to cast."""
        if self._earlier is not None and isinstance(value, (list, dict)):
            own = self._earlier.own(value)
            if own is not value:
                return own
        if is_node(value) and not _is_data(value):
            return value
        if type(value) is dict:
            copy: Any = {key: self.of(x) for key, x in value.items()}
        elif type(value) is list:
            copy = list(map(self.of, value))
        else:
            # The children of this node alone; a leaf is its only child.
            children, structure = jax.tree.flatten(value, is_leaf=lambda x: x is not value)
            if jax.tree_util.treedef_is_leaf(structure):
                copy = _cast(value, self._dtype)
            else:
                copies = list(map(self.of, children))
                copy = value if _are_same(copies, children) else structure.unflatten(copies)
        self._own[id(copy)] = copy, value
        return copy

    def own(self, value: Any) -> Any:
        """Returns the caller's own value behind a copy; any other value as it is."""
        return self._own.get(id(value), (value, value))[1]

    def write_back(self) -> None:
        """Puts what a call has changed in the copies of lists and dicts into the caller's own."""
        for copy, own in self._own.values():
            if type(own) is list and not _are_same(found := list(map(self.own, copy)), own):
                own[:] = found
            elif type(own) is dict:
                entries = {key: self.own(x) for key, x in copy.items()}
                if list(entries) != list(own) or not _are_same(entries.values(), own.values()):
                    own.clear()
                    own.update(entries)


def _are_same(one: Collection[object], other: Collection[object]) -> bool:
    return len(one) == len(other) and all(x is y for x, y in zip(one, other, strict=True))


def _is_data(node: object) -> bool:
    """Whether an NNX object is only a container of arrays, such as an `nnx.Dict` of a batch.

    If it has arrays to cast, it is copied, and what a call changes in the copy is lost to the
    caller.
    """
    if not isinstance(node, nnx.Pytree) or (
        isinstance(node, nnx.Module) and type(node) not in _DATA
    ):
        return False
    return not any(isinstance(x, nnx.Variable) for _, x in nnx.iter_graph(node))


_DATA = (nnx.List, nnx.Dict)


def _cast(leaf: PyTree, dtype: DTypeLike) -> PyTree:
    is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(dtype) if is_float else leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScalerState:
    """The state of a loss scale between steps; part of the training state.

    Args:
        scale: float32 scalar, the factor of the loss.
        good_steps: int32 scalar, finite steps since the scale last changed.
        skipped: int32 scalar, overflows so far; a `Trainer` reports them as `overflowed_steps`, and
            its `skipped_steps` are other steps.
    """

    scale: Array
    good_steps: Array
    skipped: Array


@dataclasses.dataclass(frozen=True)
class GradScaler:
    """Scales the loss up before the backward pass, and gradients down after it.

    If a gradient is not finite on any device, all devices skip the step, and the scale is
    multiplied by `backoff_factor`. After `growth_interval` finite steps in a row it is multiplied
    by `growth_factor`, unless the product overflows float32. The state stays on the devices.

    Args:
        init_scale: the initial scale.
        growth_factor: the scale is multiplied by this after enough finite steps.
        backoff_factor: the scale is multiplied by this after an overflow.
        growth_interval: how many finite steps in a row make the scale grow.
        min_scale: the smallest scale.

    Raises:
        ConfigError: for a factor on the wrong side of one, or a size that is not positive.

    Example:
        >>> scaler = GradScaler(init_scale=1000.0)
        >>> state = scaler.update(scaler.init(), finite=jnp.array(False))
        >>> float(state.scale), int(state.skipped)
        (500.0, 1)

    Source: Micikevicius et al., arXiv:1710.03740; the defaults are PyTorch's.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless every number is in its range."""
        for field in dataclasses.fields(self):
            NUMBER.check("GradScaler", field.name, getattr(self, field.name))
        checks = {
            "init_scale must be at least min_scale": self.init_scale >= self.min_scale,
            "min_scale must be positive": self.min_scale > 0,
            "init_scale must be below 3e38, which float32 holds": self.init_scale < 3e38,
            "growth_factor must be above 1, and below 3e38": 1 < self.growth_factor < 3e38,
            "backoff_factor must lie between 0 and 1": 0 < self.backoff_factor < 1,
            "growth_interval must be at least 1": self.growth_interval >= 1,
        }
        for rule, holds in checks.items():
            if not holds:
                raise ConfigError(f"{rule}; got {self}")

    def init(self) -> ScalerState:
        """Returns the state for the first step of a run."""
        zero = jnp.zeros((), jnp.int32)
        return ScalerState(jnp.asarray(self.init_scale, jnp.float32), zero, zero)

    def scale(self, loss: Array, state: ScalerState) -> Array:
        """Multiplies a loss by the scale, in float32: float16 cannot hold the initial scale."""
        return wide(jnp.asarray(loss)) * state.scale

    def unscale(self, grads: ArrayTree, state: ScalerState) -> PyTree:
        """Divides gradients by the scale, in float32 or wider."""
        return jax.tree.map(lambda g: wide(jnp.asarray(g)) / state.scale, grads)

    def update(self, state: ScalerState, finite: Array) -> ScalerState:
        """Returns the state after a step.

        Args:
            state: the state before.
            finite: boolean scalar, whether every gradient was finite.

        Returns:
            The next state.
        """
        grown = state.good_steps + 1 >= self.growth_interval
        # A restored scale may be infinite, and no factor makes it finite again.
        scale = jnp.where(jnp.isfinite(state.scale), state.scale, self.init_scale)
        product = scale * self.growth_factor
        larger = jnp.where(grown & jnp.isfinite(product), product, scale)
        smaller = jnp.maximum(scale * self.backoff_factor, self.min_scale)
        good = jnp.where(grown, 0, state.good_steps + 1)
        return ScalerState(
            scale=jnp.where(finite, larger, smaller),
            good_steps=jnp.where(finite, good, 0),
            skipped=state.skipped + jnp.where(finite, 0, 1),
        )

    def state_dict(self, state: ScalerState) -> dict[str, int | float]:
        """Returns the state as plain numbers."""
        return {name: value.item() for name, value in vars(state).items()}

    def load_state_dict(self, numbers: Mapping[str, int | float]) -> ScalerState:
        """Restores a state from plain numbers; the inverse of `state_dict`."""
        if missing := {"scale", "good_steps"}.difference(numbers):
            raise ConfigError(
                f"the state of a loss scale lacks {', '.join(sorted(missing))}; give a result of "
                "state_dict()"
            )
        return ScalerState(
            scale=jnp.asarray(numbers["scale"], jnp.float32),
            good_steps=jnp.asarray(numbers["good_steps"], jnp.int32),
            skipped=jnp.asarray(numbers.get("skipped", 0), jnp.int32),
        )


def all_finite(tree: PyTree) -> Array:
    """Whether every element of every leaf is finite.

    It sums counts of nonfinite elements: XLA's `max` over devices drops NaN on some platforms.

    Example:
        >>> bool(all_finite({"a": jnp.array([1.0, jnp.inf])}))
        False
    """
    bad = [jnp.sum(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return sum(bad, start=jnp.zeros((), jnp.int32)) == 0


def keep_if(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Selects a whole tree by one flag, on the device."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


_EPSILON = 1e-6
"""PyTorch's `clip_grad_norm_` adds this to the norm."""


NormOf: TypeAlias = Callable[[PyTree], Array]
"""(a tree of arrays in float32 or wider) -> the norm of all their elements."""


def clip_by_global_norm(
    grads: ArrayTree, max_norm: float | None, norm_of: NormOf = optax.tree.norm
) -> tuple[PyTree, Array]:
    """Scales gradients whose norm is above `max_norm` by `max_norm / (norm + 1e-6)`.

    Other gradients keep their bits; PyTorch would also scale those less than 1e-6 below the limit.
    In global view every element counts once, whatever its sharding. The norm is summed, and the
    elements are scaled, in at least float32.

    Args:
        grads: arrays of any floating dtypes, in global view, sharded or replicated.
        max_norm: the largest norm, at least 0; None leaves the gradients unchanged.
        norm_of: computes the norm.

    Returns:
        The clipped gradients with their dtypes and shardings, and the norm before clipping.

    Raises:
        ConfigError: when `max_norm` is below 0 or NaN.
        DTypeError: when integers or booleans are to be clipped.

    Example:
        >>> grads, norm = clip_by_global_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
        >>> float(norm), [round(float(x), 3) for x in grads["w"]]
        (5.0, [0.6, 0.8])
    """

    # Squares of bfloat16 must not be added up in bfloat16.
    norm = norm_of(jax.tree.map(wide, grads))
    if max_norm is None:
        return grads, norm
    # JAX would convert a Python integer to 32 bits, where a large one overflows.
    max_norm = float(max_norm) if isinstance(max_norm, int) else max_norm
    _check_clipping(grads, max_norm)
    factor = jnp.where(norm > max_norm, max_norm / (norm + _EPSILON), 1.0)

    def scaled(g: Array) -> Array:
        # float16 has no factors below 6e-8, and bfloat16 would round them to three digits.
        x = wide(g)
        return (x * factor.astype(x.dtype)).astype(g.dtype)

    return jax.tree.map(scaled, grads), norm


def _check_clipping(grads: ArrayTree, max_norm: Any) -> None:
    """Raises unless gradients can be scaled down to a norm."""
    if isinstance(max_norm, (float, np.number)) and not max_norm >= 0:
        raise ConfigError(
            f"max_norm is {max_norm}; it must be at least 0, or None not to clip: a negative one "
            "would turn the gradients around",
            code="clip-norm-range",
        )
    for path, leaf in leaves_with_paths(grads):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise DTypeError(
                f"cannot clip the gradient {path!r} of dtype {dtype}, which cannot hold the scaled "
                "numbers; give gradients of a floating dtype, x.astype(jnp.float32)"
            )
