"""LoRA: a trained product of two narrow matrices, added to a frozen kernel."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from ..core.checks import COUNT, FLOATS, MODULE, RNGS, checked, is_number
from ..core.errors import ConfigError, warn
from ..core.own_context import in_own_context
from ..core.tree import wide
from ..core.typing import Array, Path
from ..core.words import pattern_error
from ..ops.fp8 import size_of


class ScaledLoRA(nnx.LoRA):
    """An `nnx.LoRA` scaled by `alpha / rank` or by `alpha / sqrt(rank)`.

    Args:
        in_features: input features of the layer.
        lora_rank: the rank.
        out_features: output features of the layer.
        alpha: the numerator of the scale.
        rslora: whether the scale is `alpha / sqrt(rank)` (arXiv:2312.03732).
        **options: further arguments of `nnx.LoRA`.
    """

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        alpha: float,
        rslora: bool = False,
        **options: Any,
    ):
        super().__init__(in_features, lora_rank, out_features, **options)
        self.alpha = alpha
        self.rslora = rslora
        self.scale = alpha / (math.sqrt(lora_rank) if rslora else lora_rank)

    def __call__(self, x: Array, **options: Any) -> Array:
        """Returns the scaled product for an input."""
        y = super().__call__(x, **options)
        return y * jnp.asarray(self.scale, y.dtype)


def scale_of(adapter: nnx.LoRA) -> float:
    """Returns the scale of an adapter; 1 if it has none."""
    return adapter.scale if isinstance(adapter, ScaledLoRA) else 1.0


class LoRAEmbed(nnx.Embed):
    """An `nnx.Embed` with an adapter: each row of the table has a row of `lora_a`.

    The adapter changes the vectors that are looked up. `attend`, which a tied head uses to multiply
    by the table, ignores it, as in peft.
    """

    lora: nnx.LoRA

    def __call__(
        self, inputs: Array, out_sharding: NamedSharding | PartitionSpec | None = None
    ) -> Array:
        """Returns the vectors of token ids plus those of the adapter.

        Args:
            inputs: integers.
            out_sharding: see `nnx.Embed`.
        """
        y = super().__call__(inputs, out_sharding=out_sharding)
        a, b = self.promote_dtype(
            (self.lora.lora_a[...], self.lora.lora_b[...]), dtype=self.lora.dtype
        )
        product = jnp.take(a, inputs, axis=0) @ b
        scale = scale_of(self.lora)
        return y + (product if scale == 1 else product * jnp.asarray(scale, product.dtype))


class LoRALinearGeneral(nnx.LinearGeneral):
    """An `nnx.LinearGeneral`, as in attention, with an `nnx.LoRA` over its flattened dims.

    The counterpart of `nnx.LoRALinear` for `nnx.Linear`; `lora` converts an existing layer.
    """

    lora: nnx.LoRA

    def __call__(
        self, inputs: Array, out_sharding: NamedSharding | PartitionSpec | None = None
    ) -> Array:
        """Returns the layer's output plus that of the adapter.

        Args:
            inputs: see `nnx.LinearGeneral`.
            out_sharding: see `nnx.LinearGeneral`.
        """
        y = super().__call__(inputs, out_sharding=out_sharding)
        axes = tuple(self.axis) if isinstance(self.axis, Iterable) else (self.axis,)
        last = jnp.moveaxis(inputs, axes, range(-len(axes), 0))
        flat = last.reshape(*last.shape[: -len(axes)], -1)
        return y + self.lora(flat).reshape(y.shape)


ADAPTED: Mapping[type[nnx.Module], type[nnx.Module]] = MappingProxyType(
    {nnx.Linear: nnx.LoRALinear, nnx.LinearGeneral: LoRALinearGeneral, nnx.Embed: LoRAEmbed}
)
"""Maps each class that can be adapted to its class with a `lora`."""


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
    alpha: float | None = None,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] = MappingProxyType({}),
    alpha_pattern: Mapping[str, float] = MappingProxyType({}),
) -> nnx.Module:
    """Adds low-rank adapters to linear layers of a model, without changing its initial outputs.

        y = x @ kernel + bias   ->   y = x @ kernel + bias + scale * (x @ lora_a) @ lora_b

    `lora_b` starts at zero. The kernel keeps its path. The new `lora/lora_a` and `lora/lora_b` in
    each layer are `nnx.LoRAParam`s; `build_train_step(..., trainable=nnx.LoRAParam)` trains only
    them.

    Args:
        model: any model; it is not changed.
        rank: columns of `lora_a` and rows of `lora_b`.
        paths: regular expressions, searched for in the paths of `nnx.Linear` and
            `nnx.LinearGeneral` layers; "" matches them all. A pattern that matches none of them is
            searched for in the paths of `nnx.Embed` layers.
        rngs: source of the initial `lora_a`.
        dtype: the dtype that the adapters compute in; None for that of each layer.
        param_dtype: the dtype of the adapters' parameters.
        alpha: scales the product by `alpha / rank`, as papers and peft do; None for a scale of 1.
        rslora: scales by `alpha / sqrt(rank)` (arXiv:2312.03732).
        rank_pattern: other ranks, by a regular expression that is searched for in the path of a
            layer; the first match counts.
        alpha_pattern: other alphas, matched in the same way.

    Returns:
        A copy of the model with adapters.

    Raises:
        ConfigError: for a rank below one, a pattern that matches no layer, or an invalid scale.

    Example:
        >>> model = lora(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(1))
        >>> {name: leaf.shape for name, leaf in nnx.to_pure_dict(nnx.state(model.lora)).items()}
        {'lora_a': (4, 2), 'lora_b': (2, 3)}

    Source: Hu et al., LoRA, arXiv:2106.09685; Kalajdzievski, arXiv:2312.03732.
    """
    for name, option in (("dtype", dtype), ("param_dtype", param_dtype)):
        FLOATS.or_none().check("lora", name, option)
    adapted = nnx.clone(model)
    paths = (paths,) if isinstance(paths, str) else paths
    chosen = _chosen(adapted, paths)
    sizes = _Sizes(rank, alpha, rslora, rank_pattern, alpha_pattern)
    sizes.validate(chosen)
    for name in sorted(chosen):
        layer = chosen[name]
        _check_alone(name, layer)
        options = {
            "dtype": layer.dtype if dtype is None else dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        setattr(layer, "lora", sizes.adapter(name, *_features(layer), **options))  # noqa: B010
        _become(layer, ADAPTED[type(layer)])
    return adapted


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Chooses the rank and scale of each adapter; the arguments are those of `lora`."""

    rank: int
    alpha: float | None
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def validate(self, names: Iterable[str]) -> None:
        """Raises `ConfigError` for a number out of range, or a pattern that finds no layer."""
        for option in ("rank_pattern", "alpha_pattern"):
            for pattern, value in getattr(self, option).items():
                if why := pattern_error(pattern):
                    raise ConfigError(
                        f"lora got {option} with {pattern!r}, which {why}; correct it"
                    )
                if not any(re.search(pattern, name) for name in names):
                    raise ConfigError(
                        f"lora got {option} with {pattern!r}, which finds none of the adapted "
                        f"layers {', '.join(sorted(names))}; correct it, or leave it out"
                    )
                if option == "rank_pattern":
                    COUNT.check("lora", f"rank_pattern[{pattern!r}]", value)
        alphas = {"alpha": self.alpha, **self.alpha_pattern}
        for name, value in alphas.items():
            if value is not None and not (is_number(value) and value > 0):
                raise ConfigError(f"lora got {name}={value!r}; give a finite number above 0")
        if self.alpha is None and (self.rslora or self.alpha_pattern):
            raise ConfigError(
                "lora got rslora or alpha_pattern without alpha, which they modify; set alpha",
                code="lora-without-alpha",
            )

    def adapter(self, name: Path, size_in: int, size_out: int, **options: Any) -> nnx.LoRA:
        """Makes the adapter of a layer."""
        rank = _first_found(self.rank_pattern, name, self.rank)
        if self.alpha is None:
            return nnx.LoRA(size_in, rank, size_out, **options)
        alpha = _first_found(self.alpha_pattern, name, self.alpha)
        return ScaledLoRA(size_in, rank, size_out, alpha=alpha, rslora=self.rslora, **options)


def _first_found(patterns: Mapping[str, Any], name: Path, default: Any) -> Any:
    """Returns the value of the first pattern that matches a path."""
    hits = (value for pattern, value in patterns.items() if re.search(pattern, name))
    return next(hits, default)


def _chosen(model: nnx.Module, paths: tuple[str, ...]) -> dict[Path, _Layer]:
    """Returns the layers that `paths` match; embeddings only for paths that match no linear."""
    layers: dict[Path, _Layer] = dict(_layers(model))
    tables: dict[Path, _Layer] = dict(_tables(model))
    if not paths:
        return layers
    chosen: dict[Path, _Layer] = {}
    for path in paths:
        if why := pattern_error(path):
            raise ConfigError(
                f"lora got the path {path!r}, which {why}; give one that is found in the paths of "
                "layers, such as 'attention'"
            )
        found = [name for name in layers if re.search(path, name)]
        found_tables = [name for name in tables if re.search(path, name)]
        if not found and not found_tables:
            raise ConfigError(
                f"lora got the path {path!r}, which finds none of the model's nnx.Linear and "
                f"nnx.LinearGeneral layers: {', '.join(sorted(layers)) or 'it has none'}; nor an "
                f"nnx.Embed: {', '.join(sorted(tables)) or 'it has none'}. Correct the path"
            )
        chosen |= {name: layers[name] for name in found} or {n: tables[n] for n in found_tables}
    return chosen


@in_own_context
@checked(model=MODULE)
def merge_lora(model: nnx.Module, dtype: DTypeLike | None = None) -> nnx.Module:
    """Merges adapters into kernels; returns a plain model.

        kernel  <-  kernel + scale * lora_a @ lora_b

    Args:
        model: a result of `lora` or `step.merge(state)`, or another model with `nnx.LoRALinear`
            layers. It is not changed.
        dtype: the dtype of merged kernels; None keeps theirs and rounds the sums to it.

    Returns:
        A model in which the adapted layers are `nnx.Linear`, `nnx.LinearGeneral` and `nnx.Embed`.

    Raises:
        ConfigError: when the model has no adapters, or one that belongs to no kernel.

    Example:
        >>> model = lora(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(1))
        >>> type(merge_lora(model)).__name__, hasattr(merge_lora(model), "lora")
        ('Linear', False)
    """
    FLOATS.or_none().check("merge_lora", "dtype", dtype)
    plain = nnx.clone(model)
    known = {after: before for before, after in ADAPTED.items()}
    merged: set[int] = set()
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(plain))
    for _, layer in modules:
        if type(layer) not in known:
            continue
        adapter = layer.lora
        kernel = layer.embedding if isinstance(layer, LoRAEmbed) else layer.kernel
        if isinstance(layer, LoRAEmbed):
            _check_not_tied(plain)
        _check_not_shared(kernel, modules)
        a = wide(adapter.lora_a[...])
        b = wide(adapter.lora_b[...])
        product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        if (scale := scale_of(adapter)) != 1:
            product = product * scale
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
            f"merge_lora found nnx.LoRA at {', '.join(others)}, which belongs to no kernel to "
            "merge into; add adapters to layers by lora(model, rank, paths)",
            code="adapter-without-kernel",
        )
    if not merged:
        raise ConfigError(
            "merge_lora found no adapters in the model; lora(model, rank, paths) adds them"
        )
    return plain


_Layer: TypeAlias = nnx.Linear | nnx.LinearGeneral | nnx.Embed


def _check_not_tied(model: nnx.Module) -> None:
    """Raises if the head is tied to the embeddings: the adapter does not apply to the head."""
    if is_tied(model):
        raise ConfigError(
            "merge_lora got a model whose head is tied to its embeddings, and an adapter that "
            "applies only to the embeddings: merged into the table it would change the head. Save "
            "the adapters with save_adapters, or train a model with tied_head=False"
        )
    configs = (getattr(module, "config", None) for _, module in nnx.iter_modules(model))
    if not any(hasattr(config, "tied_head") for config in configs):
        warn(
            "merge_lora merges an adapter into a table of embeddings: if the model multiplies by "
            "the table too, as nnx.Embed.attend does, the merged model computes something else",
            code="adapter-of-table",
        )


def is_tied(model: nnx.Module) -> bool:
    """Whether a model of this library, or one within it, has a head tied to its embeddings."""
    configs = (getattr(module, "config", None) for _, module in nnx.iter_modules(model))
    return any(getattr(config, "tied_head", False) for config in configs)


def _check_not_shared(kernel: nnx.Variable, modules: Iterable[tuple[KeyPath, Any]]) -> None:
    """Raises if several layers have the kernel: the adapter applies to one of them."""
    owners = [
        "/".join(map(str, keys))
        for keys, module in modules
        if any(value is kernel for value in vars(module).values())
    ]
    if len(owners) > 1:
        raise ConfigError(
            f"merge_lora got {', '.join(owners)}, which share one kernel, and an adapter of one of "
            "them: merged into the kernel it would change the others. Save the adapters with "
            "save_adapters, or give each layer a kernel of its own",
            code="adapter-of-shared-kernel",
        )


def _tables(model: nnx.Module) -> Iterator[tuple[Path, nnx.Embed]]:
    for keys, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Embed) and type(module) in ADAPTED:
            yield "/".join(map(str, keys)), module


def _features(layer: _Layer) -> tuple[int, int]:
    """Returns the input and output features of a layer; the inputs of a table are its rows."""
    if isinstance(layer, nnx.Embed):
        return layer.num_embeddings, layer.features
    return size_of(layer.in_features), size_of(layer.out_features)


def _layers(model: nnx.Module) -> Iterator[tuple[Path, nnx.Linear | nnx.LinearGeneral]]:
    for keys, module in nnx.iter_modules(model):
        # Subclasses are skipped: they take other adapters, or already have one.
        if not isinstance(module, nnx.Linear | nnx.LinearGeneral) or type(module) not in ADAPTED:
            continue
        if not getattr(module, "batch_axis", None):
            yield "/".join(map(str, keys)), module


def _check_alone(name: Path, layer: _Layer) -> None:
    """Raises if the arrays of a layer are a stack of many layers, made by `nnx.vmap`."""
    size_in, size_out = _features(layer)
    array = layer.embedding if isinstance(layer, nnx.Embed) else layer.kernel
    if array.size != size_in * size_out:
        raise ConfigError(
            f"lora got {name!r}, a layer of {size_in} to {size_out} features "
            f"whose kernel has the shape {array.shape}: many layers stacked in one. Add the "
            "adapters in the function that nnx.vmap maps, where it is a single layer"
        )


def _become(layer: nnx.Module, kind: type[nnx.Module]) -> None:
    """Changes the class of a layer in place."""
    # Before 0.12.12, Flax's `__setattr__` would record the class as an attribute.
    object.__setattr__(layer, "__class__", kind)
