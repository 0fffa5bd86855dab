"""Inspects and wraps a model's modules: method wrappers, stacked layers, bridged Linen modules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
from flax import nnx
from flax.errors import TraceContextError

from .compat import is_computed
from .errors import ConfigError, UnsupportedError
from .typing import Function, Keys, Path, PyTree

Around: TypeAlias = Function
"""`around(method, module, *args, **kwargs)` runs in place of `method(module, *args, **kwargs)`."""

# Bridged Linen modules treat an attribute as a variable unless its name starts with `_pytree__`.
WRAPPERS = "_pytree__around"
"""The attribute of a module that holds the wrappers of its methods."""


def traceable(make: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that can be traced, and makes in every call what `make` would make next.

    Flax lets no trace change an `nnx.Rngs` that was made outside of it. The arguments of a
    `functools.partial` can be seen, so each call gets copies of the `Rngs` among them. The caller's
    own `Rngs` do not change.

    Args:
        make: a function of no arguments that makes a model.

    Raises:
        ConfigError: from the returned function, when a trace of it changes another outer object.

    Example:
        >>> make = traceable(functools.partial(nnx.Linear, 2, 3, rngs=nnx.Rngs(0)))
        >>> nnx.eval_shape(make).kernel.shape
        (2, 3)
    """
    is_partial = isinstance(make, functools.partial)
    given = {**dict(enumerate(make.args)), **make.keywords} if is_partial else {}
    outer = {str(k): x for k, x in given.items() if isinstance(x, (nnx.Rngs, nnx.RngStream))}
    # The caller may draw from the originals between two calls.
    kept = nnx.clone(outer)

    def run() -> Any:
        # All are copied at once, so that a stream that is bound twice stays one stream.
        own = nnx.clone(kept)
        try:
            if not isinstance(make, functools.partial):
                return make()
            args = [own.get(str(k), x) for k, x in enumerate(make.args)]
            return make.func(*args, **{k: own.get(k, x) for k, x in make.keywords.items()})
        except TraceContextError as error:
            raise ConfigError(
                f"the function that makes the model changes an object from outside of it, and it "
                f"is traced ({str(error).partition(' (')[0]}); make the Rngs inside the function, "
                "as in lambda: Model(rngs=nnx.Rngs(0)), or bind them with functools.partial",
                code="model-changes-outer-object",
            ) from error

    return run


@dataclasses.dataclass(frozen=True)
class Layers:
    """The wrappers of one module's methods, as a static part of the module.

    Args:
        layers: (method name, wrapper) pairs, innermost first.
    """

    layers: tuple[tuple[str, Around], ...] = ()


@dataclasses.dataclass(frozen=True)
class WrappedMethod:
    """A method with the innermost `depth` of its wrappers; compares by value.

    Args:
        module_type: the original class.
        name: the name of the method.
        depth: how many wrappers run; with 0 only the method itself runs.
    """

    module_type: type[nnx.Module]
    name: str
    depth: int

    @property
    def __wrapped__(self) -> Function:
        """The unwrapped method, so that `inspect` finds its signature."""
        return getattr(self.module_type, self.name)

    def __call__(self, module: nnx.Module, *args: object, **kwargs: object) -> PyTree:
        """Runs the outermost of these wrappers, or the method itself."""
        if not self.depth:
            return getattr(self.module_type, self.name)(module, *args, **kwargs)
        around = around_of(module, self.name)[self.depth - 1]
        return around(dataclasses.replace(self, depth=self.depth - 1), module, *args, **kwargs)


def wrap_calls(module: nnx.Module, around: Mapping[str, Around]) -> None:
    """Wraps methods of one module in place; its class and other instances do not change.

    The wrappers are part of the module's structure, so equal modules with equal wrappers hit the
    same entries of JAX's caches. Pass functions that compare by value. A method may be wrapped
    several times; the last wrapper is the outermost.

    Args:
        module: a model merged inside a trace, or a part of one.
        around: wrappers by method name.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        >>> wrap_calls(layer, {"__call__": lambda call, self, x: call(self, x) * 0})
        >>> float(layer(jnp.ones((1, 2))).sum()), isinstance(layer, nnx.Linear)
        (0.0, True)
    """
    before = getattr(module, WRAPPERS, Layers())
    after = Layers((*before.layers, *sorted(around.items(), key=lambda item: item[0])))
    original = type(module).__mro__[1] if before.layers else type(module)
    names = tuple(sorted({name for name, _ in after.layers}))
    object.__setattr__(module, "__class__", _open(original, names))
    setattr(module, WRAPPERS, after)


def around_of(module: nnx.Module, name: str) -> tuple[Around, ...]:
    """The wrappers of a method, innermost first."""
    layers = getattr(module, WRAPPERS, Layers()).layers
    return tuple(function for method, function in layers if method == name)


# Flax and JAX keep every module class for ever, so wrapping must not make a new class each time.
# The cache is unbounded for this reason. Its keys are the original class and the method names.
@functools.cache
def _open(module_type: type[nnx.Module], names: tuple[str, ...]) -> type[nnx.Module]:
    """A subclass whose methods look up their wrappers in the module."""

    def member(name: str) -> Function:
        # Keeps the signature, because attention modules are recognized by it.
        @functools.wraps(getattr(module_type, name))
        def call(self: nnx.Module, *args: object, **kwargs: object) -> PyTree:
            depth = len(around_of(self, name))
            return WrappedMethod(module_type, name, depth)(self, *args, **kwargs)

        return call

    members = {name: member(name) for name in names}
    return type(module_type.__name__, (module_type,), {**members, "__doc__": module_type.__doc__})


DIMS: MappingProxyType[type[nnx.Module], Callable[[Any], dict[str, int]]] = MappingProxyType(
    {
        nnx.Linear: lambda _: {"kernel": 2, "bias": 1},
        nnx.LinearGeneral: lambda layer: {
            "kernel": len(layer.in_features) + len(layer.out_features) + len(layer.batch_axis)
        },
        nnx.Einsum: lambda layer: {"kernel": len(layer.kernel_shape)},
        nnx.Conv: lambda layer: {"kernel": len(layer.kernel_shape)},
        nnx.ConvTranspose: lambda layer: {"kernel": len(layer.kernel_shape)},
        nnx.Embed: lambda _: {"embedding": 2},
        nnx.LayerNorm: lambda _: {"scale": 1, "bias": 1},
        nnx.RMSNorm: lambda _: {"scale": 1},
        nnx.GroupNorm: lambda _: {"scale": 1, "bias": 1},
        nnx.BatchNorm: lambda _: {"scale": 1, "bias": 1},
    }
)
"""Returns how many dims each parameter of a single, unstacked Flax layer has."""


def num_stacked(module: nnx.Module) -> int | None:
    """How many layers are stacked in a module by `nnx.vmap`; None for a single layer.

    A stacked module has the class and attributes of one layer, but its leaves have one more dim.
    It is recognized by its Flax layers: their parameters have one dim more than such a layer
    needs, and all parameters of the module have the same leading size.

    Args:
        module: any module; its leaves may be shapes.

    Returns:
        The size of the leading dim, or None.

    Example:
        >>> make = lambda rngs: nnx.Linear(2, 3, rngs=rngs)
        >>> num_stacked(nnx.eval_shape(lambda: nnx.vmap(make)(nnx.Rngs(0).split(5))))
        5
        >>> num_stacked(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    """
    leaves = jax.tree.leaves(nnx.state(module, nnx.Param))
    sizes = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        return None
    extra: set[int] = set()
    for _, layer in nnx.iter_modules(module):
        extra |= _extra_dims(layer)
    return sizes.pop() if extra == {1} else None


def _extra_dims(layer: nnx.Module) -> set[int]:
    """How many extra dims the parameters of a Flax layer have; empty for other modules."""
    dims = next((find(layer) for kind, find in DIMS.items() if isinstance(layer, kind)), {})
    attributes = {name: getattr(layer, name, None) for name in dims}
    params = {name: value for name, value in attributes.items() if isinstance(value, nnx.Param)}
    return {len(x.get_value().shape) - dims[name] for name, x in params.items()}


def stacks_of(model: nnx.Module) -> dict[Path, int]:
    """The outermost stacked modules of a model, and the number of layers in each."""
    counts: dict[tuple, int] = {}
    modules = sorted(nnx.iter_modules(model), key=lambda item: len(item[0]))
    if 1 not in {dims for _, module in modules for dims in _extra_dims(module)}:
        return {}
    for keys, module in modules:
        inside = not keys or any(keys[: len(outer)] == outer for outer in counts)
        if not inside and (count := num_stacked(module)) is not None:
            counts[keys] = count
    return {"/".join(map(str, keys)): count for keys, count in counts.items()}


def bridges_of(model: nnx.Module) -> Iterator[tuple[Keys, nnx.bridge.ToNNX]]:
    """Yields the bridged Linen modules of a model with their keys."""
    for keys, module in nnx.iter_modules(model):
        if isinstance(module, nnx.bridge.ToNNX):
            yield tuple(keys), module


def variables_in(modules: Iterable[nnx.Module]) -> frozenset[int]:
    """Returns the ids of the variables in modules.

    Identity finds a variable that is shared; its path leads through only one of its owners.

    Example:
        >>> head, body = (nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(i)) for i in range(2))
        >>> body.kernel = head.kernel
        >>> variables_in([body]) == variables_in([head])
        True
    """
    nodes = (node for module in modules for _, node in nnx.iter_graph(module))
    return frozenset(id(node) for node in nodes if isinstance(node, nnx.Variable))


def normed_in(module: nnx.Module) -> frozenset[int]:
    """Returns the ids of the parameters to which norms in a module write normalised weights.

    `nnx.SpectralNorm` normalises matrices, `nnx.WeightNorm` what its `variable_filter` selects.

    Example:
        >>> make = lambda rngs: nnx.SpectralNorm(nnx.Linear(2, 2, rngs=rngs), rngs=rngs)
        >>> norm = make(nnx.Rngs(0))
        >>> normed_in(norm) == {id(norm.layer_instance.kernel)}
        True
        >>> norm = nnx.eval_shape(lambda: nnx.vmap(make)(nnx.Rngs(0).split(3)))
        >>> normed_in(norm) == {id(norm.layer_instance.kernel)}
        True
    """
    found: set[int] = set()
    for _, norm in nnx.iter_modules(module):
        if not isinstance(norm, (nnx.SpectralNorm, nnx.WeightNorm)):
            continue
        # A stack of layers has one dim more.
        dims_of_vector = 1 if num_stacked(norm.layer_instance) is None else 2
        for path, part in nnx.iter_graph(norm.layer_instance):
            if not isinstance(part, nnx.Param):
                continue
            if isinstance(norm, nnx.WeightNorm):
                is_normed = norm.variable_filter(path, part)
            else:
                is_normed = norm.n_steps >= 1 and len(part.shape) > dims_of_vector
            if is_normed:
                found.add(id(part))
    return frozenset(found)


def paths_of(model: nnx.Module, ids: Container[int]) -> frozenset[Path]:
    """Returns the paths, in a model, of the variables with the ids.

    The layer that a norm wraps may also be an attribute of the model: its parameters then have the
    path of either.
    """
    paths = (path for path, part in nnx.iter_graph(model) if id(part) in ids)
    return frozenset("/".join(map(str, path)) for path in paths)


def check_parameters(
    model: nnx.Module,
    before: Mapping[Path, object],
    after: Iterable[tuple[Path, object]],
    owner: str = "",
) -> None:
    """Raises if a call has changed a parameter, other than to normalise it.

    `nnx.SpectralNorm` and `nnx.WeightNorm` write the normalised weight into the layer, for one pass
    only. The weight before normalisation is trained, as in the papers (arXiv:1802.05957,
    arXiv:1602.07868).

    Args:
        model: the model, or the module that was called.
        before: the values of its parameters before the call, by path.
        after: the paths and values after it.
        owner: whose parameters they are, for the message: " of Block"; or "".

    Raises:
        UnsupportedError: naming the parameter.
    """
    changed = [path for path, new in after if new is not before.get(path, new) and is_computed(new)]
    if not changed:
        return
    normed = paths_of(model, normed_in(model))
    for path in changed:
        if path not in normed:
            raise UnsupportedError(
                f"the forward pass changes the parameter {path!r}{owner}, but only the "
                "optimizer may change parameters: the change would be lost. If it is trained, "
                "compute a changed copy and leave the parameter as it is. If it is not, make it a "
                "variable of another type, which a step keeps and does not train: with class "
                "Average(nnx.Variable), write layer.kernel = Average(layer.kernel[...])",
                code="parameter-changed-in-forward",
            )


def is_node(leaf: object) -> bool:
    """Whether a value is an NNX module, an `nnx.Rngs` or another NNX object, or a variable.

    JAX counts these as trees, and a mapped tree is a copy: what a call changes in a copy, such as
    the count of random draws, is lost to the caller. So trees of a user's arguments are mapped with
    `is_leaf=is_node`, and their nodes pass as they are.
    """
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))
