"""`MixedPrecision`: which dtype parameters, compute, reductions, buffers and outputs have."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from ..core.errors import ConfigError, did_you_mean
from ..core.told import MODULE, Kind, told
from ..core.tree import has_64_bits
from ..core.typing import Array, PyTree
from ..program import wrap_calls

NAMES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a training step; whatever is not named keeps float32.

    The parameters stay in `param`, which the optimizer updates; the model computes with copies in
    `compute`; gradients cross the wire in `reduce`. Statistics of norms, softmax and the loss are
    float32 whatever is chosen.

    Args:
        param: dtype in which parameters and optimizer state live.
        compute: dtype of the forward and backward passes.
        reduce: dtype of gradients while they are reduced; None is `compute`.
        buffer: dtype of statistics such as BatchNorm's; None leaves them alone.
        output: dtype of what the model returns to the loss function.
        products: `"fp8"` computes the dense layers within blocks as `Fp8Dot` does; None leaves them
            in the compute dtype.
        skip: regular expressions of the paths of dense layers that stay in the compute dtype.
        gather: `"fp8"` has the weights of the products in fp8 travel as they are multiplied, a byte
            each, where units gather weights; None has them travel in the compute dtype. No number
            depends on it.

    Raises:
        ConfigError: for a dtype that is not floating-point, unknown products, or layers to skip or
            weights to gather in fp8 where there are no such products.

    Example:
        >>> MixedPrecision.bf16().compute
        dtype(bfloat16)
        >>> MixedPrecision(compute="float16").needs_scaling
        True

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740.
    """

    param: Any = "float32"
    compute: Any = "float32"
    reduce: Any = None
    buffer: Any = None
    output: Any = "float32"
    products: str | None = None
    skip: tuple[str, ...] = ()
    gather: str | None = None

    def __post_init__(self) -> None:
        for name in ("param", "compute", "reduce", "buffer", "output"):
            value = getattr(self, name)
            dtype = None if value is None else floating_dtype(value, name)
            object.__setattr__(self, name, dtype)
        object.__setattr__(self, "skip", tuple(self.skip))
        if self.products not in (None, "fp8"):
            raise ConfigError(f"products is {self.products!r}; it must be 'fp8', or None")
        if self.skip and self.products is None:
            raise ConfigError(
                f"skip={self.skip} names layers that fp8 leaves out, and products is None; say "
                "products='fp8', or leave skip out"
            )
        if self.gather not in (None, "fp8"):
            raise ConfigError(f"gather is {self.gather!r}; it must be 'fp8', or None")
        if self.gather is not None and self.products is None:
            raise ConfigError(
                "gather='fp8' has weights travel as products in fp8 read them, and products is "
                "None; say products='fp8', or leave gather out"
            )

    @classmethod
    def bf16(cls) -> MixedPrecision:
        """bfloat16 compute and reductions, float32 parameters."""
        return cls(compute="bfloat16")

    @classmethod
    def fp8(cls, skip: tuple[str, ...] = (), gather: str | None = None) -> MixedPrecision:
        """bfloat16, with the dense layers within blocks in fp8.

        Args:
            skip: regular expressions of the paths of layers that stay in bfloat16.
            gather: `"fp8"` has their weights travel as a byte each, where units gather weights.
        """
        return cls(compute="bfloat16", products="fp8", skip=skip, gather=gather)

    @classmethod
    def fp16(cls) -> MixedPrecision:
        """float16 compute with float32 reductions; to be used with a `GradScaler`."""
        return cls(compute="float16", reduce="float32")

    @classmethod
    def of(cls, choice: MixedPrecision | str | bool | None) -> MixedPrecision:
        """Reads a policy, a preset's name, or `mixed_precision=True`.

        `True` is bfloat16 compute with float32 reductions, the careful choice.

        Raises:
            ConfigError: for an unknown name.
        """
        if isinstance(choice, MixedPrecision):
            return choice
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
            raise ConfigError(f"unknown precision {choice!r}.{did_you_mean(str(choice), names)}")
        return presets[choice]

    @property
    def reduce_dtype(self) -> Any:
        """The dtype in which gradients are reduced."""
        return self.reduce or self.compute

    @property
    def gather_itemsize(self) -> int:
        """The bytes of a weight of a dense layer within a block, where units gather it."""
        return self.compute.itemsize if self.gather is None else 1

    @property
    def needs_scaling(self) -> bool:
        """Whether small gradients vanish in the compute dtype, so that the loss is scaled."""
        return self.compute == jnp.float16

    @property
    def is_mixed(self) -> bool:
        """Whether compute differs from how parameters are kept."""
        return self.compute != self.param


def without_gathers(
    choice: MixedPrecision | str | bool | None,
) -> MixedPrecision | str | bool | None:
    """The same numbers where no unit gathers weights, as on one device.

    Example:
        >>> without_gathers(MixedPrecision.fp8(gather="fp8")) == MixedPrecision.fp8()
        True
    """
    if not isinstance(choice, MixedPrecision):
        return choice
    return dataclasses.replace(choice, gather=None)


def floating_dtype(value: Any, what: str) -> Any:
    """Reads a floating-point dtype or its name.

    Raises:
        ConfigError: naming what it was for, what was got and what is valid.
    """
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    # Dtypes of 8 bits hold products with scales of their own, as `products="fp8"` has them.
    if dtype is None or dtype.name not in NAMES:
        raise ConfigError(
            f"{what} dtype is {value!r}; it must be a floating-point dtype."
            f"{did_you_mean(str(value), NAMES)}"
        )
    if dtype.itemsize > 4 and not has_64_bits():
        raise ConfigError(
            f"{what} dtype is {dtype.name}, of which JAX keeps 32 bits; take float32, or set "
            "JAX_ENABLE_X64=1"
        )
    return dtype


def cast_floating(tree: PyTree, dtype: Any) -> PyTree:
    """Casts the floating-point leaves of a tree; integers, keys and flags stay.

    Example:
        >>> tree = cast_floating({"w": jnp.ones(2), "n": jnp.arange(2)}, "bfloat16")
        >>> tree["w"].dtype, tree["n"].dtype
        (dtype(bfloat16), dtype('int32'))
    """
    return jax.tree.map(lambda x: _cast(x, dtype), tree)


_POLICY = Kind(
    "a MixedPrecision, such as MixedPrecision.bf16()", lambda x: isinstance(x, MixedPrecision)
)


@told(model=MODULE, policy=_POLICY)
def autocast(model: nnx.Module, policy: MixedPrecision) -> nnx.Module:
    """Makes a model compute in the policy's dtype, in place.

    Modules that promote their arguments (every layer of Flax, and the modules of a bridged Linen
    model that have a dtype) are told the compute dtype, the
    model's inputs are cast to it, and its outputs to the output dtype. The statistics of Flax's
    norms are computed in float32 all the same.

    Args:
        model: any NNX module; its parameters are cast by whoever owns them.
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

    Args:
        policy: param, compute, reduce and output dtype.
    """

    policy: MixedPrecision

    def __call__(self, method: Any, module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        args, kwargs = cast_floating((args, kwargs), self.policy.compute)
        return cast_floating(method(module, *args, **kwargs), self.policy.output)


@dataclasses.dataclass(frozen=True)
class LinenCasting:
    """Runs a bridged Linen module whose modules are told the compute dtype.

    They exist only while it runs: each is told as its first method is called, which is `setup` for
    those that hand their dtype on. One that has none is left to promote what it is given, unless it
    has one for its parameters, as the layers of Flax do.

    Args:
        policy: param, compute, reduce and output dtype.
    """

    policy: MixedPrecision

    def __call__(self, method: Any, bridge: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        with nn.intercept_methods(self.tell):
            return method(bridge, *args, **kwargs)

    def tell(self, call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """Runs one method of a module that has been told."""
        module = context.module
        fields = {field.name for field in dataclasses.fields(module)}
        said = getattr(module, "dtype", None)
        is_float = "param_dtype" in fields if said is None else jnp.issubdtype(said, jnp.floating)
        if "dtype" in fields and is_float:
            object.__setattr__(module, "dtype", self.policy.compute)
        return call(*args, **kwargs)


def _cast(leaf: Any, dtype: Any) -> Array:
    is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(dtype) if is_float else leaf
