"""Expert parallelism: experts are split over a mesh axis, and tokens are sent to them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from ..core.checks import TEXT, ArgumentKind, checked, is_whole
from ..core.errors import ConfigError, NamedChoice, UnsupportedError
from ..core.modules import wrap_calls
from ..core.reduction import all_gather_dim, all_sum, sum_scatter
from ..core.same_function import Comparison, compare, is_from
from ..core.tree import leaves_with_paths
from ..core.typing import Array, Function, Path, PyTree, Shape
from ..core.weighted import per_sample
from ..nn import Axes, Layout, manual_axes
from ..ops.dropless import in_fitting_slots
from ..ops.routing import Choice, in_order, in_slots, slots_for
from ..sharding import Decision, HasShape, Policy
from ..sharding.policy import axes_of, check_divides
from .strategy import AdaptLayers, Strategy
from .tensor_plan import check_pattern

EXPERTS = ((r"(^|/)mlp/(gate|up|down)$", -3),)
"""The experts of this library's mixtures: a pattern of the path, and the dim from the end."""

MIX = "mix_experts"
"""The method of a module that sends tokens through experts, as `Experts.mix_experts` does."""

SUM_SAMPLES = "sum_samples"
"""The method of a module that sums statistics over the samples, as `Experts.sum_samples` does."""


class ExpertForm(NamedChoice):
    """How tokens are sent to experts of other ranks."""

    AUTO = "auto"
    """The form that moves fewer bytes."""
    RING = "ring"
    """Every rank gets all tokens, and the results are reduce-scattered to the tokens' owners."""
    ALL_TO_ALL = "all_to_all"
    """Every rank sends each expert a fixed number of slots, set by `capacity`."""


_PAIR = ArgumentKind(
    "a pair of a regular expression of paths and the dim of the experts from the end, such as "
    "('(^|/)experts/up$', -3)",
    lambda x: isinstance(x, (tuple, list)) and len(x) == 2 and TEXT.holds(x[0]) and is_whole(x[1]),
)


@checked(experts=_PAIR.several())
def expert_parallel(
    form: ExpertForm | str = ExpertForm.AUTO,
    capacity: float | None = None,
    axis: str = "ep",
    experts: Iterable[tuple[str, int]] = EXPERTS,
) -> Strategy:
    """Splits the experts of a model over a mesh axis that also splits the batch.

    Each of the c ranks holds E/c experts and computes only with these: they are never gathered,
    and their gradients are complete without a reduction over the axis. With A bytes of tokens on a
    rank, a layer sends in both passes together

        ring         4 (c - 1) A
        all_to_all   4 (c - 1)/c k f A       k experts per token, f the capacity factor

    Modules with the methods `mix_experts` and `feed`, as `models.Experts` has, run in `shard_map`
    and send as above. For the stacked experts of other models the compiler sends the tokens, guided
    by the sharding of the experts.

    Args:
        form: how tokens are sent; `"auto"` chooses the ring where k f >= c, and always
            without a capacity.
        capacity: the factor f. Of the N tokens of a rank (ring: of the axis) each expert takes at
            most the first f N k / E. **It changes the numbers where an expert gets more**: the
            excess tokens skip that expert, and the metric `dropped` is their share. None drops no
            token and equals one device; all_to_all then has slots for all tokens at each expert.
        axis: the mesh axis, of size c.
        experts: patterns of the paths of stacked kernels, and the dim of their experts from the
            end. `suggest_plan(model).experts` finds them for a model.

    Returns:
        The strategy; it splits the batch over the axis. Compose it with `ddp` or `fsdp` over other
        axes, with `tensor_parallel`, `context_parallel` and `pipelined`, whose stages send tokens
        among the ranks of the stage.

    Raises:
        ConfigError: for an unknown form, a capacity that is not above 0, or an invalid pattern.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> strategy = expert_parallel()
        >>> strategy.params("blocks/0/mlp/up", (8, 64, 256), MeshSpec(ep=4))
        P('ep', None, None)
        >>> strategy.batch_axes, strategy.ungathered_axes
        (('ep',), ('ep',))

    Source: Lepikhin et al., GShard, arXiv:2006.16668; Fedus et al., Switch Transformers,
    arXiv:2101.03961.
    """
    if capacity is not None and not 0 < capacity <= 1e6:
        raise ConfigError(
            f"capacity={capacity} must be above 0 and at most 1e6, such as 1.25; or None"
        )
    policy = ByExperts(tuple(experts), axis)
    return Strategy(
        "expert",
        batch_axes=(axis,),
        params=policy,
        opt_state=policy,
        layers=(ExpertLayers(ExpertForm(form), capacity, policy),),
        ungathered_axes=(axis,),
    )


@dataclasses.dataclass(frozen=True)
class ByExperts(Policy):
    """Splits stacked kernels by experts.

    Args:
        experts: pairs of a regular expression of paths, and the dim from the end.
        axis: the mesh axis.
        label: the name that tables and conflicts show.

    Raises:
        ConfigError: when a pattern is not a regular expression, or a dim is not negative.
        DivisibilityError: when the experts do not divide.
    """

    experts: tuple[tuple[str, int], ...]
    axis: str
    label: str = "expert"  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        for pattern, dim in self.experts:
            check_pattern(pattern, dim)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axis."""
        return (self.axis,)

    def dim_of(self, path: Path, shape: Shape) -> int | None:
        """Returns the expert dim of a parameter; None where it has none."""
        from_end = next((dim for pattern, dim in self.experts if re.search(pattern, path)), None)
        return None if from_end is None or -from_end > len(shape) else len(shape) + from_end

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides by the first pattern that matches in the path."""
        dim = self.dim_of(path, shape)
        if dim is None:
            return Decision(PartitionSpec(), self.name, "has no experts")
        spec = PartitionSpec(*(self.axis if d == dim else None for d in range(len(shape))))
        check_divides(path, shape, spec, mesh)
        return Decision(spec, self.name, f"{shape[dim]} experts")


@dataclasses.dataclass(frozen=True)
class ExpertLayers(AdaptLayers):
    """Sends tokens to the experts of a model.

    Args:
        form: how tokens are sent.
        capacity: the capacity factor; None for as many slots as there are tokens.
        policy: which parameters are experts, and the axis.
    """

    form: ExpertForm
    capacity: float | None
    policy: ByExperts

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes it needs."""
        return (self.policy.axis,)

    def check(self, model: nnx.Module, layout: Layout) -> None:
        """Raises unless the model has experts to which tokens can be sent in this form.

        Raises:
            UnsupportedError: when it has none, or when a form or capacity was given and only the
                compiler can send tokens to them.
        """
        leaves = leaves_with_paths(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        stacked = any(self.policy.dim_of(path, leaf.shape) is not None for path, leaf in leaves)
        if not stacked:
            patterns = ", ".join(repr(pattern) for pattern, _ in self.policy.experts)
            raise UnsupportedError(
                f"expert parallelism found no stacked experts: patterns {patterns or 'none'}; the "
                f"parameters are {', '.join(path for path, _ in leaves)}. Stack the experts of a "
                "layer in one module, self.experts = nnx.vmap(Expert)(rngs.split(count)), and give "
                "the patterns and dims of suggest_plan(model).experts; or leave it out",
                code="no-stacked-experts",
            )
        is_configured = self.form is not ExpertForm.AUTO or self.capacity is not None
        replaceable = (has_experts(module) for _, module in nnx.iter_modules(model))
        if is_configured and not any(replaceable):
            raise UnsupportedError(
                f"form={self.form.value!r} and capacity={self.capacity} are for modules with the "
                "methods mix_experts and feed, as models.Experts has; the model has none: the "
                "compiler sends the tokens to its experts. Leave both out",
                code="experts-by-compiler",
            )

    def __call__(self, model: nnx.Module, layout: Layout) -> None:
        """Changes the calls of a merged model's layers, in place."""
        map_experts(model, layout, self.policy.axis, self.form, self.capacity)


def map_experts(
    model: nnx.Module,
    layout: Layout,
    axis: str | None = None,
    form: ExpertForm = ExpertForm.AUTO,
    capacity: float | None = None,
) -> None:
    """Changes a model's experts, in place, so that each rank sorts its own tokens by expert.

    Left to itself the compiler would gather the tokens of all ranks to sort them.

    Args:
        model: its modules with experts are changed.
        layout: which axes split samples and positions.
        axis: the mesh axis that splits the experts; None where every rank has all experts.
        form: how tokens are sent.
        capacity: the capacity factor, or None.
    """
    split = SplitExperts(layout, axis, form, capacity)
    for _, module in list(nnx.iter_modules(model)):
        if has_experts(module):
            wrap_calls(module, {MIX: split})


def sum_over_ranks(module: nnx.Module, axes: Axes) -> None:
    """Changes a module with experts, in place, to sum its statistics over all ranks.

    Args:
        module: a module merged in a region where the axes are manual.
        axes: the mesh axes that split the samples.
    """
    wrap_calls(module, {SUM_SAMPLES: SumOverRanks(axes)})


@dataclasses.dataclass(frozen=True)
class SumOverRanks:
    """Runs in place of a module's `sum_samples`, where each rank has some of the samples.

    Args:
        axes: the manual mesh axes that split the samples.
    """

    axes: Axes

    def __call__(self, add: Function, module: nnx.Module, x: Array) -> tuple[Array, int]:
        """Computes `Experts.sum_samples` over the samples of all ranks.

        Raises:
            UnsupportedError: when a user's own method does not compute a sum over samples.
        """
        if not is_from(add, _OURS):
            _check_sum(add, module, x)
        total, samples = add(module, x)
        return all_sum(total, self.axes), samples * num_ranks(self.axes)


def mark_experts_per_sample(model: nnx.Module) -> None:
    """Marks a model's experts, in place, as computing each sample independently.

    Experts sort the tokens of all samples to process those of one expert together, and put each
    result back in its place, so their trace seems to mix samples.

    Args:
        model: a model that is about to be traced, to find how it treats its samples.
    """
    for _, module in list(nnx.iter_modules(model)):
        if hasattr(module, SUM_SAMPLES) and has_experts(module):
            wrap_calls(module, {MIX: _one_by_one})


def _one_by_one(mix: Function, module: nnx.Module, *arrays: Array) -> tuple[Array, Array]:
    """Runs a module's `mix_experts`, marked as per sample where it is known to be."""
    if not compare_with_tokens(mix, module, *arrays).is_equal:
        return mix(module, *arrays)
    return per_sample(lambda *arrays: mix(module, *arrays))(*arrays)


def num_ranks(axes: Iterable[str]) -> int:
    """Returns the product of the sizes of some manual axes."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def has_experts(module: object) -> bool:
    """Whether a module sends tokens through experts by a method that can be replaced."""
    return all(hasattr(module, name) for name in (MIX, "feed", "hidden_dims"))


class HasExperts(Protocol):
    """A module that sends tokens through experts, such as `models.Experts`."""

    hidden_dims: Mapping[str, int]

    def feed(self, product: Function, rows: Array, kernels: PyTree) -> Array:
        """Returns the experts' outputs for rows; multiplies by `product(rows, kernel)`."""
        ...


@dataclasses.dataclass(frozen=True)
class SplitExperts:
    """Runs in place of a module's `mix_experts`, in `shard_map`.

    Args:
        layout: the layout of the activations.
        axis: the mesh axis that splits the experts; None where every rank has all experts.
        form: how tokens are sent.
        capacity: the capacity factor, or None.
    """

    layout: Layout
    axis: str | None = None
    form: ExpertForm = ExpertForm.AUTO
    capacity: float | None = None

    def __call__(
        self,
        mix: Function,
        module: HasExperts,
        tokens: Array,
        gates: Array,
        expert_ids: Array,
        kernels: dict[str, Array],
    ) -> tuple[Array, Array]:
        """Computes `Experts.mix_experts` on each rank's tokens.

        A user's own method that computes something else is left to the compiler where every rank
        has all experts.

        Raises:
            UnsupportedError: when it computes something else and the experts are split.
        """
        compared = compare_with_tokens(mix, module, tokens, gates, expert_ids, kernels)
        if self.axis is None:
            name = f"{type(module).__name__}.{MIX}"
            if not compared.equal_or_warn(
                name, "is left to the compiler, which may gather all tokens"
            ):
                return mix(module, tokens, gates, expert_ids, kernels)
        elif not compared.is_equal:
            raise UnsupportedError(
                f"{type(module).__name__}.{MIX} must return, for each token, the sum over its "
                f"experts of `feed`, weighted by its gates, but {compared.why}. Expert parallelism "
                f"computes this sum itself: move any other computation out of {MIX} or into "
                "`feed`, or leave expert_parallel out",
                code="experts-not-a-weighted-sum",
            )
        manual = manual_axes()
        lead = self.layout.spec(tokens.shape)
        spec = PartitionSpec(*(e if isinstance(e, (str, tuple)) else None for e in lead))
        split = tuple(axis for dim in range(len(spec)) for axis in axes_of(spec, dim))
        # Tensor parallelism splits the hidden features, where all kernels divide.
        sizes = [kernel.shape[module.hidden_dims[name]] for name, kernel in kernels.items()]
        features = self.layout.heads
        num_shards = self.layout.size(features)
        if any(n % num_shards for n in sizes) or not _adds_up(module, tokens, kernels, num_shards):
            features = ()
        places = {
            name: _place(kernel.ndim, self.axis, module.hidden_dims[name], features)
            for name, kernel in kernels.items()
        }

        def local(tokens: Array, gates: Array, expert_ids: Array, kernels: PyTree) -> PyTree:
            def rows(x):
                return x.reshape(-1, x.shape[-1])

            choice = Choice(rows(expert_ids), rows(gates))
            mixed, dropped = self._mix(module.feed, rows(tokens), choice, kernels, split)
            if features:
                mixed = all_sum(mixed, features)
            dropped = all_sum(dropped, split) if split else dropped
            return mixed.reshape(tokens.shape), dropped

        run = self.layout.mapped(local, (spec, spec, spec, places), (spec, PartitionSpec()))
        mixed, dropped = run(tokens, gates, expert_ids, kernels)
        if self.capacity is None:
            # Without a capacity nothing is dropped, so no sum over ranks is needed.
            return mixed, jnp.zeros((), jnp.float32)
        return mixed, dropped / (expert_ids.size * num_ranks(a for a in split if a in manual))

    def _mix(
        self, feed: Function, tokens: Array, choice: Choice, kernels: PyTree, split: Axes
    ) -> tuple[Array, Array]:
        """Returns, on one rank, the outputs for its tokens and how many assignments had no slot."""
        axis = self.axis
        if axis is None:
            return self._here(feed, tokens, choice, kernels, 0, 1)
        size = jax.lax.axis_size(axis)
        local = jax.tree.leaves(kernels)[0].shape[0]
        first = jax.lax.axis_index(axis) * local
        if axis not in split:
            # Too few samples to split: all ranks have the same tokens.
            mixed, dropped = self._here(feed, tokens, choice, kernels, first, size)
            return all_sum(mixed, axis), all_sum(dropped, axis)
        # AUTO sends slots if those for all experts are fewer than the tokens of all ranks.
        slots = local * size * self._slots(tokens.shape[0], choice.experts.shape[1], local * size)
        sends_slots = self.form is ExpertForm.ALL_TO_ALL
        if self.form is ExpertForm.AUTO:
            sends_slots = slots < size * tokens.shape[0]
        if sends_slots:
            return self._exchange(feed, tokens, choice, kernels, size)

        def gather(x):
            return all_gather_dim(x, axis, 0)

        everyone = Choice(gather(choice.experts), gather(choice.gates))
        mixed, dropped = self._here(feed, gather(tokens), everyone, kernels, first, size)
        return sum_scatter(mixed, axis, 0), dropped

    def _slots(self, tokens: int, per_token: int, experts: int) -> int:
        if self.capacity is None:
            return tokens
        return slots_for(tokens, per_token, experts, self.capacity)

    def _here(
        self,
        feed: Function,
        tokens: Array,
        choice: Choice,
        kernels: PyTree,
        first: Array | int,
        size: int,
    ) -> tuple[Array, Array]:
        """Returns the outputs of this rank's experts for tokens; `size` ranks share the experts."""
        local = jax.tree.leaves(kernels)[0].shape[0]
        none = (choice.gates[0, 0] * 0).astype("float32")
        if self.capacity is None and not self._lacks_groups:
            return in_order(feed, tokens, choice, kernels, first), none
        if self.capacity is None:
            return in_fitting_slots(feed, tokens, choice, kernels, local * size, first), none
        slots = self._slots(tokens.shape[0], choice.experts.shape[1], local * size)
        return in_slots(feed, tokens, choice, kernels, local, slots, first)

    @property
    def _lacks_groups(self) -> bool:
        """Whether a grouped product costs as much as if every row were in all groups.

        XLA for GPUs turns a `ragged_dot` of M rows into one product of `[M, E D]` (jax 0.10 to
        0.12).
        """
        return self.layout.mesh.devices.flat[0].platform in ("gpu", "cuda")

    def _exchange(
        self, feed: Function, tokens: Array, choice: Choice, kernels: PyTree, size: int
    ) -> tuple[Array, Array]:
        """Sends slots to the ranks of their experts by all-to-all, and receives the results."""
        axis = self.axis
        experts = size * jax.tree.leaves(kernels)[0].shape[0]

        def swap(x):
            return jax.lax.all_to_all(x, axis, 0, 0, tiled=True)

        slots = self._slots(tokens.shape[0], choice.experts.shape[1], experts)

        def there(x: Array) -> Array:
            # [E, C, D] -> [E/c, c C, D]: the slots of every rank for this rank's experts.
            pieces = swap(x).reshape(size, -1, *x.shape[1:])
            return pieces.swapaxes(0, 1).reshape(-1, size * slots, x.shape[-1])

        def back(x: Array) -> Array:
            pieces = x.reshape(-1, size, slots, x.shape[-1]).swapaxes(0, 1)
            return swap(pieces.reshape(-1, slots, x.shape[-1]))

        return in_slots(feed, tokens, choice, kernels, experts, slots, there=there, back=back)


_OURS = "axon_dist.models."


def compare_with_tokens(
    mix: Function,
    module: Any,
    tokens: Array,
    gates: Array,
    expert_ids: Array,
    kernels: PyTree,
) -> Comparison:
    """Compares a module's `mix_experts` with a per-token sum over the token's experts.

    Args:
        mix: the method, or the function that runs in its place.
        module: the module that has it.
        tokens: the tokens of a call, arrays or shapes.
        gates: the gates of the call, arrays or shapes.
        expert_ids: the experts of the call, arrays or shapes.
        kernels: the kernels of the call, arrays or shapes.

    Returns:
        The comparison. This library's own methods are taken to be equal without one.
    """
    if is_from(mix, _OURS) and is_from(type(module).feed, _OURS):
        return Comparison(True)
    count = jax.tree.leaves(kernels)[0].shape[0]
    per_token = gates.shape[-1]
    ids = np.stack([np.roll(np.arange(count), -i)[:per_token] for i in range(6)])

    def by_token(tokens: Array, gates: Array, ids: Array, kernels: PyTree) -> tuple[Array, Array]:
        def of_one(token: Array, gates: Array, ids: Array) -> Array:
            def of_expert(kernels: PyTree) -> Array:
                return module.feed(jnp.matmul, token[None], kernels)[0]

            return jnp.einsum("k,kd->d", gates, jax.vmap(of_expert)(kernels)[ids])

        return jax.vmap(jax.vmap(of_one))(tokens, gates, ids), jnp.zeros((), jnp.float32)

    def mixed(*arrays: PyTree) -> tuple[Array, Array]:
        return mix(module, *arrays)

    def shapes(most: int) -> list[Any]:
        cut = {}
        for name, kernel in kernels.items():
            size = list(kernel.shape)
            size[module.hidden_dims[name]] = min(most, size[module.hidden_dims[name]])
            cut[name] = jax.ShapeDtypeStruct(tuple(size), kernel.dtype)
        few = jax.ShapeDtypeStruct((2, 3, tokens.shape[-1]), tokens.dtype)
        weights = jax.ShapeDtypeStruct((2, 3, per_token), gates.dtype)
        return [few, weights, ids.reshape(2, 3, -1).astype(expert_ids.dtype), cut]

    # A reduced hidden size is cheaper; the full one is used only if that cannot be compared.
    found = compare(mixed, by_token, shapes(8))
    return found if found.was_run else compare(mixed, by_token, shapes(2**31))


def _adds_up(module: Any, tokens: Array, kernels: PyTree, num_shards: int) -> bool:
    """Whether a module's `feed` is the sum of its results for parts of the hidden features."""
    if num_shards == 1 or is_from(type(module).feed, _OURS):
        return True
    rows = jax.ShapeDtypeStruct((2, tokens.shape[-1]), tokens.dtype)
    of_one = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in kernels.items()}

    def fed(rows: Array, kernels: PyTree) -> Array:
        return module.feed(jnp.matmul, rows, kernels)

    def fed_in_parts(rows: Array, kernels: PyTree) -> Array:
        cut = {n: jnp.split(x, num_shards, module.hidden_dims[n]) for n, x in kernels.items()}
        parts = ({name: x[i] for name, x in cut.items()} for i in range(num_shards))
        return jnp.sum(jnp.stack([fed(rows, part) for part in parts]), axis=0)

    name = f"{type(module).__name__}.feed"
    compared = compare(fed_in_parts, fed, (rows, of_one))
    return compared.equal_or_warn(name, "runs with whole kernels, which the ranks gather")


def _check_sum(add: Function, module: nnx.Module, x: Array) -> None:
    """Raises unless a module's `sum_samples` adds up over samples."""
    few = jax.ShapeDtypeStruct((3, *x.shape[1:]), x.dtype)

    def added(x: Array) -> tuple[Array, Array]:
        total, samples = add(module, x)
        return total, jnp.asarray(samples, jnp.int32)

    def expected(x: Array) -> tuple[Array, Array]:
        return jnp.sum(x, axis=0, dtype=x.dtype), jnp.asarray(3, jnp.int32)

    compared = compare(added, expected, (few,))
    if not compared.is_equal:
        raise UnsupportedError(
            f"{type(module).__name__}.{SUM_SAMPLES} must return the sum over the samples of a "
            f"batch and their number, but {compared.why}: ranks with different samples add up "
            "their sums. Return these two, and move any other computation after the call",
            code="not-a-sum-of-samples",
        )


def _place(ndim: int, axis: str | None, hidden: int, features: Axes) -> PartitionSpec:
    """Returns the spec of a kernel in `shard_map`: experts in dim 0, features in their dim."""
    entries: list[Axes | str | None] = [axis, *[None] * (ndim - 1)]
    if features:
        entries[ndim + hidden] = features
    return PartitionSpec(*entries)
