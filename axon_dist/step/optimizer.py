"""The optimizer of a step: what it is shown of the model, and how its matrices are distributed.

Momenta are split as the strategy splits parameters, and a product of a matrix with itself needs all
of it. Gathering every matrix on every device would cost all of the work N times. Instead matrices
of the same shape are stacked, and one all-to-all turns

    every device holds 1/N of each matrix   into   every device holds each of 1/N of the matrices

and another one turns it back. In between nothing is communicated: it is a `shard_map` in which the
stack is local. Axes over which the matrices are whole already divide the work too, where that
leaves less of it; then the results are gathered over them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec

from ..core.errors import AxonDistError, ConfigError
from ..core.tree import leaves_with_paths
from ..core.typing import Array, PyTree, Shape
from ..ir.rows import MATRIXWISE, RowCall, hidden_in, input_shapes, run_with_calls
from ..ir.walk import equations
from ..pipeline import UnstackedOptimizer
from ..pipeline.optimizer import StagedOptimizer
from ..sharding import Policy, axes_of, optimizer_shardings, shardings, spec_axes
from ..sharding.padding import cut, for_region, like, padded
from .parts import ModelSpec
from .storage import Storage


def optimizer_for(
    optimizer: optax.GradientTransformation, parts: ModelSpec, storage: Storage, mesh: Mesh
) -> tuple[Any, Storage, Update | None]:
    """The optimizer for the stored form of a model's parameters.

    Args:
        optimizer: as the user gives it.
        parts: the model's structure, and the shapes of its parameters and buffers.
        storage: the stored form of its parameters.
        mesh: names and sizes of its axes, over all devices.

    Returns:
        The optimizer; the storage, which knows the rows of the optimizer's state; and the update
        of the model's own parameters, where these are stored as they are.

    Raises:
        ConfigError: when the optimizer cannot work on the parameters, with its reason.
        UnsupportedError: when a pipeline cannot run it, naming the leaf and the operation.
    """
    update = _fitting(optax.with_extra_args_support(optimizer), parts)
    fitting, pipeline = update.optimizer, storage.strategy.pipeline
    if storage.rows is None or pipeline is None:
        return fitting, storage, update
    if storage.stacks.depths:
        fitting = UnstackedOptimizer(fitting, storage.stacks, parts.params)
    staged = StagedOptimizer(fitting, storage.rows.trained, mesh, pipeline.axis)
    # Which leaves of the optimizer's state are rows.
    policy: Any = storage.strategy.opt_state
    policy = dataclasses.replace(policy, state_rows=staged.state_form.row_paths)
    strategy = dataclasses.replace(storage.strategy, opt_state=policy)
    return staged, dataclasses.replace(storage, strategy=strategy), None


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """What an optimizer does to parameters, traced.

    Args:
        optimizer: the transformation.
        params: the shapes of the parameters.
        state: those of its first state.
        program: a program of gradients, state, parameters and loss.
        results: the shapes of the updates, and of the next state.
    """

    optimizer: optax.GradientTransformationExtraArgs
    params: PyTree
    state: PyTree
    program: ClosedJaxpr
    results: PyTree

    @classmethod
    def of(
        cls,
        optimizer: optax.GradientTransformationExtraArgs,
        params: PyTree,
        check: Callable[..., None] | None = None,
    ) -> Update:
        """Traces an optimizer.

        Args:
            optimizer: the transformation.
            params: the shapes of the parameters.
            check: raises for what the update returns, given that, parameters and state.
        """
        state = jax.eval_shape(optimizer.init, params)

        def update(grads: PyTree, state: PyTree, params: PyTree, loss: Array) -> PyTree:
            changes = optimizer.update(grads, state, params, value=loss)
            if check is not None:
                check(changes, params, state)
            return changes

        loss = jax.ShapeDtypeStruct((), jnp.float32)
        trace = jax.make_jaxpr(update, return_shape=True)
        return cls(optimizer, params, state, *trace(params, state, params, loss))


def _fitting(optimizer: optax.GradientTransformationExtraArgs, parts: ModelSpec) -> Update:
    """That of the optimizer itself, if it takes nested dicts, or shown an `nnx.State`.

    Masks and labels may be trees instead of functions, and then have the structure that
    `nnx.state(model, nnx.Param)` has, or that of the nested dict that it is made of; with another
    choice of what is trained, `nnx.state(model, choice)`.
    """
    refused = _tried(optimizer, parts.params)
    if isinstance(refused, Update):
        return refused
    if isinstance(refused, TypeError) and "'value'" in str(refused):
        # Some take further arguments, and not this one: they do not get the loss.
        inner = optimizer

        def update(
            updates: PyTree, state: PyTree, params: PyTree = None, *, value=None, **extra: Any
        ) -> PyTree:
            return inner.update(updates, state, params, **extra)

        optimizer = optax.GradientTransformationExtraArgs(inner.init, update)
        refused = _tried(optimizer, parts.params)
        if isinstance(refused, Update):
            return refused
    shown = _tried(_as_state(optimizer, parts), parts.params)
    if isinstance(shown, Update):
        return shown
    if "obj_fn" in str(refused) or "value_fn" in str(refused):
        raise ConfigError(
            f"the optimizer calls the loss itself: {_first_line(refused)} "
            f"({type(refused).__name__}). An update is given gradients, state, parameters and "
            "value=, the loss; take one that needs no more, such as optax.adamw"
        ) from refused
    raise ConfigError(
        f"the optimizer cannot work on the parameters of the model: {_first_line(refused)} "
        f"({type(refused).__name__}). It is given the parameters as a nested dict, "
        "nnx.to_pure_dict(nnx.state(model, nnx.Param)), or as that nnx.State; give a mask or "
        "labels as a function, such as mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, "
        "params), or as a tree of one of these structures"
    ) from refused


def _tried(optimizer: Any, params: PyTree) -> Update | Exception:
    """The update of parameters of such shapes, or what the optimizer raises."""
    try:
        return Update.of(optimizer, params, _check_changes)
    except AxonDistError:
        raise
    except Exception as error:
        return error


def _check_changes(changes: object, params: PyTree, state: PyTree) -> None:
    """Raises unless changes can be added to the parameters, and the state be given back."""
    if not isinstance(changes, tuple) or len(changes) != 2:
        raise ConfigError(
            f"the optimizer's update returned a {type(changes).__name__}; it must return a tuple "
            "(updates, state), as optax transformations do"
        )
    for what, got, wanted in (("updates", changes[0], params), ("a state", changes[1], state)):
        if (structure := jax.tree.structure(got)) != (expected := jax.tree.structure(wanted)):
            raise ConfigError(
                f"the optimizer's update returned {what} of {structure!s:.300}, where it was given "
                f"{expected!s:.300}; it must return a tree of the same structure"
            )
    for new, old in zip(jax.tree.leaves(changes[0]), jax.tree.leaves(params), strict=True):
        if jnp.shape(new) != jnp.shape(old):
            raise ConfigError(
                f"the optimizer's update returned an update of shape {jnp.shape(new)} for a "
                f"parameter of shape {jnp.shape(old)}; it must return one of the same shape"
            )


def updated(
    update: Callable[..., tuple[PyTree, PyTree]],
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    loss: Array,
) -> tuple[PyTree, PyTree]:
    """The next parameters, and the next state of the optimizer whose update is given."""
    updates, state = update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state


def _as_state(
    optimizer: optax.GradientTransformationExtraArgs, parts: ModelSpec
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of nested dicts that shows another one an `nnx.State`, as nnx users have it."""
    trained = {path for path, _ in leaves_with_paths(parts.params)}
    shown = nnx.state(parts.abstract, lambda keys, _: "/".join(map(str, keys)) in trained)
    structure = jax.tree.structure(shown)
    # The leaves of the two forms may be ordered differently: numbers among names.
    numbered = nnx.to_pure_dict(structure.unflatten(range(structure.num_leaves)))
    order = jax.tree.leaves(numbered)

    def show(params: PyTree) -> nnx.State:
        return structure.unflatten(_sorted(order, params))

    def hide(tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x,
            tree,
            is_leaf=lambda x: isinstance(x, nnx.State),
        )

    def inside(state: PyTree) -> PyTree:
        """The state as the optimizer itself has it."""
        shapes = jax.eval_shape(lambda params: optimizer.init(show(params)), parts.params)
        form = jax.tree.structure(shapes)
        places = jax.tree.leaves(hide(form.unflatten(range(form.num_leaves))))
        return form.unflatten(_sorted(places, state))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> PyTree:
        updates, state = optimizer.update(show(updates), inside(state), show(params), **extra)
        return hide(updates), hide(state)

    return optax.GradientTransformationExtraArgs(
        lambda params: hide(optimizer.init(show(params))), update
    )


def _sorted(places: list[int], tree: PyTree) -> list[Any]:
    """The leaves of a tree, each at its place."""
    pairs = zip(places, jax.tree.leaves(tree), strict=True)
    return [leaf for _, leaf in sorted(pairs, key=operator.itemgetter(0))]


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@dataclasses.dataclass(frozen=True, eq=False)
class DistributedUpdate:
    """What an optimizer does to parameters as the state holds them, its matrices distributed.

    Args:
        traced: what the optimizer does to them, as it runs.
        param_policy: the shardings of parameters.
        state_policy: those of their gradients and moments.
        mesh: the devices.

    Attributes:
        needs_matrices: whether the optimizer needs matrices whole, which are then distributed.
    """

    traced: Update
    param_policy: Policy
    state_policy: Policy
    mesh: Mesh
    needs_matrices: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        names = {equation.primitive.name for equation in equations(self.traced.program.jaxpr)}
        object.__setattr__(self, "needs_matrices", MATRIXWISE in names)

    @cached_property
    def _places(self) -> tuple[PartitionSpec, ...]:
        """The sharding of each input of the update."""
        owners = shardings(self.state_policy, self.traced.params, self.mesh)
        moments = optimizer_shardings(
            self.state_policy, self.traced.params, self.traced.state, self.mesh
        )
        params = shardings(self.param_policy, self.traced.params, self.mesh)
        places = jax.tree.leaves((owners, moments, params))
        return (*(place.spec for place in places), PartitionSpec())

    @property
    def hidden(self) -> str | None:
        """The operation of the optimizer that hides matrices which it needs whole."""
        return hidden_in(self.traced.program)

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        """How the matrices that the optimizer needs whole are distributed, stack by stack."""
        plans: list[Distribution] = []

        def note(calls: Sequence[RowCall]) -> list[Array]:
            plans.extend(plan for plan, _ in self._stacks(calls))
            return [call.x for call in calls]

        if self.needs_matrices:
            run = functools.partial(run_with_calls, self.traced.program)
            jax.eval_shape(lambda *values: run(values, note), *input_shapes(self.traced.program))
        return tuple(plans)

    def __call__(
        self, grads: PyTree, state: PyTree, params: PyTree, *, value: Array
    ) -> tuple[PyTree, PyTree]:
        """Updates.

        Args:
            grads: like the stored parameters, laid out as their moments.
            state: of the optimizer.
            params: as stored.
            value: the loss.

        Returns:
            The updates, and the next state.
        """
        if not self.needs_matrices or self.mesh.size == 1:
            return self.traced.optimizer.update(grads, state, params, value=value)
        leaves = jax.tree.leaves((grads, state, params, value.astype(jnp.float32)))
        results = run_with_calls(self.traced.program, leaves, self._run)
        return jax.tree.unflatten(jax.tree.structure(self.traced.results), results)

    def _run(self, calls: Sequence[RowCall]) -> list[Array]:
        results: dict[int, Array] = {}
        for plan, members in self._stacks(calls):
            made = self._together(plan, [calls[number] for number in members])
            results.update(zip(members, made, strict=True))
        return [results[number] for number in range(len(calls))]

    def _stacks(self, calls: Sequence[RowCall]) -> list[tuple[Distribution, list[int]]]:
        """Which calls go together, and how their stack is distributed."""
        groups: dict[Any, list[int]] = {}
        for number, call in enumerate(calls):
            lead, spec = self._specs(call)
            more = tuple(map(id, call.more))
            shape = call.x.shape[call.lead :]
            key = (call.function, shape, call.x.dtype, spec, spec_axes(lead), more)
            groups.setdefault(key, []).append(number)
        return [
            (self._distribution(key, [calls[number] for number in members]), members)
            for key, members in groups.items()
        ]

    def _distribution(self, key: tuple[Any, ...], calls: Sequence[RowCall]) -> Distribution:
        function, shape, _, spec, apart, _ = key
        size = self.mesh.shape
        ranks = math.prod(size[axis] for axis in apart)
        count = sum(math.prod(call.x.shape[: call.lead]) for call in calls) // ranks
        moved = spec_axes(spec)
        num_ranks, extra = math.prod(size[axis] for axis in moved), []
        for axis in self.mesh.axis_names:
            more = num_ranks * size[axis]
            if axis not in (*apart, *moved) and -(-count // more) < -(-count // num_ranks):
                extra.append(axis)
                num_ranks = more
        return Distribution(function, shape, count, spec, apart, moved, tuple(extra), num_ranks)

    def _specs(self, call: RowCall) -> tuple[PartitionSpec, PartitionSpec]:
        """The specs of the dims that count matrices, and of those of a matrix."""
        if call.origin is None:
            return PartitionSpec(), PartitionSpec()
        number, dims = call.origin
        entries = [axes_of(self._places[number], dim) for dim in dims]
        return PartitionSpec(*entries[: call.lead]), PartitionSpec(*entries[call.lead :])

    def _together(self, plan: Distribution, calls: Sequence[RowCall]) -> list[Array]:
        """Runs the calls of one stack."""
        inner = (*plan.spec, *[None] * (len(plan.shape) - len(plan.spec)))
        leads = [(self._specs(call)[0], call.lead) for call in calls]
        places = [PartitionSpec(*lead, *[None] * (n - len(lead)), *inner) for lead, n in leads]
        more = calls[0].more
        padded = [for_region(call.x, at, self.mesh) for call, at in zip(calls, places, strict=True)]
        run = jax.shard_map(
            functools.partial(_on_device, plan, [call.lead for call in calls]),
            mesh=self.mesh,
            in_specs=(places, PartitionSpec()),
            out_specs=places,
            check_vma=False,
        )
        return like(run(padded, more), [call.x for call in calls])


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How the matrices of one stack are distributed.

    Args:
        function: what is done to each; equal for all.
        shape: of each.
        count: how many there are, on each rank of the axes `apart`.
        spec: the sharding of each before and after.
        apart: the axes that count matrices already, such as that of a pipeline.
        moved: the axes that split them, which an all-to-all moves to the dim that counts.
        extra: the axes over which they are whole, and which divide the work all the same.
        num_ranks: how many devices share the stack.

    Example:
        >>> spec = PartitionSpec(None, "fsdp")
        >>> plan = Distribution(jnp.sin, (8, 32), 6, spec, (), ("fsdp",), (), 4)
        >>> plan.padding, plan.per_device
        (2, 2)
        >>> print(plan)
        6 of 8×32 distributed over fsdp: 2 on each of 4 devices, 2 of them padding
    """

    function: Callable[..., Array]
    shape: Shape
    count: int
    spec: PartitionSpec
    apart: tuple[str, ...]
    moved: tuple[str, ...]
    extra: tuple[str, ...]
    num_ranks: int

    @property
    def per_device(self) -> int:
        """How many matrices a device works on, padding among them."""
        return -(-self.count // self.num_ranks)

    @property
    def padding(self) -> int:
        """How many matrices of zeros make the stack divide."""
        return self.per_device * self.num_ranks - self.count

    def __str__(self) -> str:
        size = "×".join(map(str, self.shape))
        over = "×".join((*self.moved, *self.extra)) or "nothing"
        return (
            f"{self.count} of {size} distributed over {over}: {self.per_device} on each of "
            f"{self.num_ranks} devices, {self.padding} of them padding"
        )


def _on_device(
    plan: Distribution, leads: Sequence[int], arrays: Sequence[Array], more: Sequence[Array]
) -> list[Array]:
    """What one device does: its parts of all matrices come, its matrices go."""
    flat = [x.reshape(-1, *x.shape[lead:]) for x, lead in zip(arrays, leads, strict=True)]
    stack = jnp.concatenate(flat)
    zeros = jnp.zeros((plan.padding, *stack.shape[1:]), stack.dtype)
    stack = jnp.concatenate([stack, zeros]) if plan.padding else stack
    # XLA:CPU slices the parts out again for its all-to-all, and gives them different layouts.
    stack = jax.lax.optimization_barrier(stack)
    results = _exchanged(plan, stack, jax.vmap(lambda x: plan.function(x, *more)))
    ends, made = 0, []
    for part, x in zip(flat, arrays, strict=True):
        made.append(results[ends : ends + part.shape[0]].reshape(x.shape))
        ends += part.shape[0]
    return made


def _exchanged(plan: Distribution, stack: Array, work: Callable[[Array], Array]) -> Array:
    """There, the work on whole matrices, and back."""
    moves = [(axes_of(plan.spec, dim), 1 + dim) for dim in range(len(plan.spec))]
    moves = [move for move in moves if move[0]]
    if plan.extra:
        share = stack.shape[0] // math.prod(jax.lax.axis_size(axis) for axis in plan.extra)
        first = jax.lax.axis_index(plan.extra) * share
        stack = jax.lax.dynamic_slice_in_dim(stack, first, share)
    for axes, dim in moves:
        stack = jax.lax.all_to_all(stack, axes, split_axis=0, concat_axis=dim, tiled=True)
    # The work is on matrices as the model has them, without the zeros that pad their shards.
    stack = padded(work(cut(stack, (stack.shape[0], *plan.shape))), stack.shape)
    for axes, dim in reversed(moves):
        stack = jax.lax.all_to_all(stack, axes, split_axis=dim, concat_axis=0, tiled=True)
    if plan.extra:
        stack = jax.lax.all_gather(stack, plan.extra, tiled=True)
    return stack
