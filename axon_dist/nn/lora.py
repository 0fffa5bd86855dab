"""Low-rank adapters: a trained product of two narrow matrices beside a frozen kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..core.checks import COUNT, FLOATS, MODULE, RNGS, checked
from ..core.errors import ConfigError
from ..core.own_context import in_own_context
from ..core.tree import wide
from ..core.typing import Array, Path
from ..core.words import pattern_error
from ..ops.fp8 import size_of


class LoRALinearGeneral(nnx.LinearGeneral):
    """An `nnx.LinearGeneral`, as in attention, with an `nnx.LoRA` of its dims, taken as one.

    What `nnx.LoRALinear` is for `nnx.Linear`; `lora` makes it of a layer that exists.
    """

    lora: nnx.LoRA

    def __call__(
        self, inputs: Array, out_sharding: NamedSharding | PartitionSpec | None = None
    ) -> Array:
        """The layer's output plus that of the adapter.

        Args:
            inputs: as the layer takes them.
            out_sharding: likewise.
        """
        y = super().__call__(inputs, out_sharding=out_sharding)
        axes = (self.axis,) if isinstance(self.axis, int) else tuple(self.axis)
        last = jnp.moveaxis(inputs, axes, range(-len(axes), 0))
        joined = last.reshape(*last.shape[: -len(axes)], -1)
        return y + self.lora(joined).reshape(y.shape)


ADAPTED: Mapping[type[nnx.Module], type[nnx.Module]] = MappingProxyType(
    {nnx.Linear: nnx.LoRALinear, nnx.LinearGeneral: LoRALinearGeneral}
)
"""The layers that take an adapter, and what they become: the same layer with a `lora`."""


@in_own_context
@checked(model=MODULE, rank=COUNT, rngs=RNGS)
def lora(
    model: nnx.Module,
    rank: int,
    paths: str | tuple[str, ...] = "",
    *,
    rngs: nnx.Rngs,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
) -> nnx.Module:
    """Puts low-rank adapters beside linear layers of a model, which computes the same at first.

        y = x @ kernel + bias   ->   y = x @ kernel + bias + (x @ lora_a) @ lora_b

    `lora_b` starts at zero. The kernel keeps its path; `lora/lora_a` and `lora/lora_b` beside it
    are `nnx.LoRAParam`s, which `build_train_step(..., trainable=nnx.LoRAParam)` trains alone. A
    scale of the product, as papers have it, is one of the learning rate and of `lora_b`.

    Args:
        model: any; it stays as it is.
        rank: columns of `lora_a` and rows of `lora_b`.
        paths: regular expressions, searched for in the paths of `nnx.Linear` and
            `nnx.LinearGeneral` layers; "" finds them all.
        rngs: of `lora_a`.
        dtype: what the adapters compute in; None takes that of each layer.
        param_dtype: of the arrays of the adapters.

    Returns:
        A model like the one given.

    Raises:
        ConfigError: for a rank below one, or a path that finds no such layer.

    Example:
        >>> model = lora(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(1))
        >>> {name: leaf.shape for name, leaf in nnx.to_pure_dict(nnx.state(model.lora)).items()}
        {'lora_a': (4, 2), 'lora_b': (2, 3)}

    Source: Hu et al., LoRA, arXiv:2106.09685.
    """
    for name, option in (("dtype", dtype), ("param_dtype", param_dtype)):
        FLOATS.or_none().check("lora", name, option)
    adapted = nnx.clone(model)
    layers = dict(_layers(adapted))
    paths = (paths,) if isinstance(paths, str) else paths
    for path in paths:
        if why := pattern_error(path):
            raise ConfigError(
                f"lora got the path {path!r}, which {why}; give one that is found in the paths of "
                "layers, such as 'attention'"
            )
        if not any(re.search(path, name) for name in layers):
            raise ConfigError(
                f"lora got the path {path!r}, which finds none of the model's nnx.Linear and "
                f"nnx.LinearGeneral layers: {', '.join(sorted(layers)) or 'it has none'}"
            )
    for name in sorted(layers):
        if not paths or any(re.search(path, name) for path in paths):
            layer = layers[name]
            _check_alone(name, layer)
            adapter = nnx.LoRA(
                size_of(layer.in_features),
                rank,
                size_of(layer.out_features),
                dtype=layer.dtype if dtype is None else dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )
            setattr(layer, "lora", adapter)  # noqa: B010
            _become(layer, ADAPTED[type(layer)])
    return adapted


@in_own_context
@checked(model=MODULE)
def merge_lora(model: nnx.Module, dtype: DTypeLike | None = None) -> nnx.Module:
    """The plain model that a model with adapters computes: their products added to the kernels.

        kernel  <-  kernel + lora_a @ lora_b

    Args:
        model: from `lora`, or with `nnx.LoRALinear` layers; such as `step.merge(state)` gives. It
            stays as it is.
        dtype: of the kernels that have adapters; None keeps theirs, and rounds the sums to it.

    Returns:
        A model of `nnx.Linear` and `nnx.LinearGeneral` layers.

    Raises:
        ConfigError: when the model has no adapters, or one that is not beside a kernel.

    Example:
        >>> model = lora(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(1))
        >>> type(merge_lora(model)).__name__, hasattr(merge_lora(model), "lora")
        ('Linear', False)
    """
    FLOATS.or_none().check("merge_lora", "dtype", dtype)
    plain = nnx.clone(model)
    known = {after: before for before, after in ADAPTED.items()}
    merged: set[int] = set()
    modules = list(nnx.iter_modules(plain))
    for _, layer in modules:
        if not isinstance(layer, nnx.LoRALinear | LoRALinearGeneral) or type(layer) not in known:
            continue
        adapter, kernel = layer.lora, layer.kernel
        a, b = wide(adapter.lora_a[...]), wide(adapter.lora_b[...])
        product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        merged_kernel = wide(kernel[...]) + product.reshape(kernel.shape)
        kernel.set_value(merged_kernel.astype(dtype or kernel.dtype))
        merged.add(id(adapter))
        delattr(layer, "lora")
        _become(layer, known[type(layer)])
    others = [
        "/".join(map(str, keys))
        for keys, module in modules
        if isinstance(module, nnx.LoRA) and id(module) not in merged
    ]
    if others:
        raise ConfigError(
            f"merge_lora found nnx.LoRA at {', '.join(others)}, beside no kernel that it could be "
            "added to; put adapters beside layers by lora(model, rank, paths)"
        )
    if not merged:
        raise ConfigError(
            "merge_lora found no adapters in the model; lora(model, rank, paths) puts them there"
        )
    return plain


def _layers(model: nnx.Module) -> Iterator[tuple[Path, nnx.Linear | nnx.LinearGeneral]]:
    for keys, module in nnx.iter_modules(model):
        # Their subclasses, which take other adapters or have one, are none of them.
        if not isinstance(module, nnx.Linear | nnx.LinearGeneral) or type(module) not in ADAPTED:
            continue
        if not getattr(module, "batch_axis", None):
            yield "/".join(map(str, keys)), module


def _check_alone(name: Path, layer: nnx.Linear | nnx.LinearGeneral) -> None:
    """Raises when the arrays of a layer are those of many, stacked by `nnx.vmap`."""
    if layer.kernel.size != size_of(layer.in_features) * size_of(layer.out_features):
        raise ConfigError(
            f"lora got {name!r}, a layer of {layer.in_features} to {layer.out_features} features "
            f"whose kernel has the shape {layer.kernel.shape}: many layers stacked in one. Put the "
            "adapters into the function that nnx.vmap stacks, where each layer is one"
        )


def _become(layer: nnx.Module, kind: type[nnx.Module]) -> None:
    """Makes a layer one of another class, in place."""
    # Modules of Flax before 0.12.12 would count the class among their attributes.
    object.__setattr__(layer, "__class__", kind)
