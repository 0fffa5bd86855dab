"""The optimizer of a step: its traced update, and the distribution of its work on matrices.

Some optimizers, such as Muon, multiply a momentum matrix with itself and so need all of it, while
momenta are sharded as the strategy shards parameters. Gathering every matrix on every device would
repeat all of the work N times. Instead, matrices of the same shape are stacked, and one all-to-all
turns

    every device holds 1/N of each matrix   into   every device holds 1/N of the matrices, whole

and another all-to-all turns it back. The work in between communicates nothing: it runs in a
`shard_map` on the local part of the stack. Axes over which the matrices are replicated divide the
work too, if that reduces the number of matrices per device; the results are then gathered over
them.
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
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Mesh, PartitionSpec

from ..core.errors import AxonDistError, ConfigError
from ..core.tree import leaves_with_paths
from ..core.typing import Array, Path, PyTree, Shape
from ..ir.rows import MATRIXWISE, RowCall, hidden_in, input_shapes, run_with_calls
from ..ir.walk import called, equations, interpret
from ..optim.wrappers import takes_norm
from ..sharding import Policy, axes_of, optimizer_shardings, shardings, spec_axes
from ..sharding.padding import cut_like, for_region, padded, unpad
from .model_spec import ModelSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The traced update of an optimizer.

    Args:
        optimizer: the transformation.
        params: the shapes of the parameters.
        state: the shapes of its first state.
        program: the jaxpr of (gradients, state, parameters, extra arguments).
        results: the shapes of the updates, and of the next state.
        extra_args: the names of its extra arguments, which are scalars: `value`, the loss, and for
            a watched optimizer that looks for spikes `norm`, that of the gradient before it was
            clipped.
    """

    optimizer: optax.GradientTransformationExtraArgs
    params: PyTree
    state: PyTree
    program: ClosedJaxpr
    results: PyTree
    extra_args: tuple[str, ...] = ("value",)

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
            check: gets the result of the update, the parameters and the state, and raises if
                the result is not valid.
        """
        state = jax.eval_shape(optimizer.init, params)
        extra_args = ("value", "norm") if takes_norm(state) else ("value",)

        def update(grads: PyTree, state: PyTree, params: PyTree, *scalars: Array) -> PyTree:
            named: dict[str, Any] = dict(zip(extra_args, scalars, strict=True))
            changes = optimizer.update(grads, state, params, **named)
            if check is not None:
                check(changes, params, state)
            return changes

        scalars = [jax.ShapeDtypeStruct((), jnp.float32)] * len(extra_args)
        trace = jax.make_jaxpr(update, return_shape=True)
        return cls(optimizer, params, state, *trace(params, state, params, *scalars), extra_args)


def trace_update(optimizer: optax.GradientTransformationExtraArgs, model_spec: ModelSpec) -> Update:
    """Traces the optimizer on nested dicts, or on an `nnx.State` if it does not take dicts.

    Masks and labels may be trees instead of functions. They then have the structure of
    `nnx.state(model, nnx.Param)`, or of the nested dict that it is made of; with another
    `trainable`, that of `nnx.state(model, trainable)`.
    """
    result = _try_update(optimizer, model_spec.params)
    if isinstance(result, Update):
        return result
    if isinstance(result, TypeError) and "'value'" in str(result):
        # Some optimizers take extra arguments, but not `value`: they do not get the loss.
        inner = optimizer

        def update(
            updates: PyTree, state: PyTree, params: PyTree = None, *, value=None, **extra: Any
        ) -> PyTree:
            return inner.update(updates, state, params, **extra)

        optimizer = optax.GradientTransformationExtraArgs(inner.init, update)
        result = _try_update(optimizer, model_spec.params)
        if isinstance(result, Update):
            return result
    on_state = _try_update(_on_nnx_state(optimizer, model_spec), model_spec.params)
    if isinstance(on_state, Update):
        return on_state
    # The error on nested dicts is the one to report.
    error = result
    if any(name in str(error) for name in ("obj_fn", "value_fn", "grad_fn")):
        raise ConfigError(
            f"the optimizer calls the loss itself: {_shortened(error)} "
            f"({type(error).__name__}). An update is given gradients, state, parameters and "
            "value=, the loss; use one that needs only these, such as optax.adamw, or for "
            "optax.contrib.sam its opaque_mode=False"
        ) from error
    if isinstance(error, AttributeError) and error.name in ("fast", "slow"):
        raise ConfigError(
            f"the optimizer keeps two copies of the parameters: {_shortened(error)}. It wants "
            "optax.LookaheadParams(fast, slow), and a step has one copy; use the optimizer that "
            "optax.lookahead wraps, and ema=0.999 of build_train_step for averaged parameters"
        ) from error
    raise ConfigError(
        f"the optimizer cannot work on the parameters of the model: {_shortened(error)} "
        f"({type(error).__name__}). It is given the parameters as a nested dict, "
        "nnx.to_pure_dict(nnx.state(model, nnx.Param)), or as that nnx.State; if it has a mask or "
        "labels, give them as a function, such as mask=lambda params: jax.tree.map(lambda x: "
        "x.ndim > 1, params), or as a tree of one of these structures"
    ) from error


def _try_update(optimizer: Any, params: PyTree) -> Update | Exception:
    """Traces an update of parameters of these shapes; returns what the optimizer raises."""
    try:
        return Update.of(optimizer, params, _check_changes)
    except AxonDistError:
        raise
    except Exception as error:
        return error


def _check_changes(changes: object, params: PyTree, state: PyTree) -> None:
    """Raises unless the updates can be added to the parameters and the state passed back."""
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
    keeps_updates: bool,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    extra_args: dict[str, Array],
) -> tuple[PyTree, PyTree, PyTree]:
    """Applies an optimizer's update.

    Returns:
        The next parameters, the next state, and if they are to be kept the updates, else None.
    """
    updates, state = update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state, updates if keeps_updates else None


def _on_nnx_state(
    optimizer: optax.GradientTransformationExtraArgs, model_spec: ModelSpec
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer that works on an `nnx.State` so that it works on nested dicts."""
    trained = {path for path, _ in leaves_with_paths(model_spec.params)}
    nnx_state = nnx.state(model_spec.abstract, lambda keys, _: "/".join(map(str, keys)) in trained)
    structure = jax.tree.structure(nnx_state)
    # The leaves of the two forms may be ordered differently, where some keys are numbers.
    numbered = nnx.to_pure_dict(structure.unflatten(range(structure.num_leaves)))
    order = jax.tree.leaves(numbered)

    def to_nnx(params: PyTree) -> nnx.State:
        return structure.unflatten(_sorted(order, params))

    def to_dicts(tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x,
            tree,
            is_leaf=lambda x: isinstance(x, nnx.State),
        )

    def inner_state(state: PyTree) -> PyTree:
        """Returns the state in the form that the wrapped optimizer has."""
        shapes = jax.eval_shape(lambda params: optimizer.init(to_nnx(params)), model_spec.params)
        inner = jax.tree.structure(shapes)
        positions = jax.tree.leaves(to_dicts(inner.unflatten(range(inner.num_leaves))))
        return inner.unflatten(_sorted(positions, state))

    def init(params: PyTree) -> PyTree:
        return to_dicts(optimizer.init(to_nnx(params)))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> PyTree:
        updates, state = optimizer.update(
            to_nnx(updates), inner_state(state), to_nnx(params), **extra
        )
        return to_dicts(updates), to_dicts(state)

    return optax.GradientTransformationExtraArgs(init, update)


def _sorted(positions: list[int], tree: PyTree) -> list[Any]:
    """Sorts the leaves of a tree by the positions given for them."""
    pairs = zip(positions, jax.tree.leaves(tree), strict=True)
    return [leaf for _, leaf in sorted(pairs, key=operator.itemgetter(0))]


def _shortened(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def unconjugated(optimizer: optax.GradientTransformation, params: PyTree) -> tuple[Path, ...]:
    """Returns the complex parameters whose gradients an optimizer uses without conjugating them.

    The gradient that JAX gives for a real loss, with respect to z = x + iy, is dL/dx - i dL/dy. A
    step against it descends along x, but ascends along y; one against its conjugate descends along
    both. So each value of the update is marked as depending on the gradient, on its conjugate, or
    on neither, as the square of the absolute value does.

    Args:
        optimizer: any optax transformation that works on nested dicts.
        params: the shapes of the trained parameters.
    """
    leaves = leaves_with_paths(params)
    is_complex = [jnp.issubdtype(x.dtype, jnp.complexfloating) for _, x in leaves]
    if not any(is_complex):
        return ()
    update = _try_update(optax.with_extra_args_support(optimizer), params)
    if not isinstance(update, Update):
        return ()
    neither: frozenset[bool] = frozenset()
    num_others = len(update.program.jaxpr.invars) - len(leaves)
    inputs = [frozenset({False}) if x else neither for x in is_complex] + [neither] * num_others

    def run(equation: JaxprEqn, operands: Sequence[Any]) -> list[frozenset[bool]]:
        name = equation.primitive.name
        # A constant of a called program is an array, and depends on no gradient.
        marks = [x for x in operands if isinstance(x, frozenset)]
        # Only the imaginary part of a number changes its sign when the number is conjugated.
        found = neither if name in ("real", "abs") else neither.union(*marks)
        if name == "conj":
            found = frozenset(not is_conjugate for is_conjugate in found)
        return [found] * len(equation.outvars)

    outputs = interpret(
        update.program.jaxpr,
        [neither] * len(update.program.consts),
        inputs,
        run,
        literal=lambda _: neither,
        enters=lambda equation: called(equation) is not None,
    )
    pairs = zip(leaves, is_complex, outputs[: len(leaves)], strict=True)
    return tuple(path for (path, _), flag, found in pairs if flag and False in found)


@dataclasses.dataclass(frozen=True, eq=False)
class DistributedUpdate:
    """An optimizer's update of stored parameters, with the work on matrices distributed.

    Args:
        traced: the traced update.
        param_policy: the shardings of parameters.
        state_policy: the shardings of their gradients and moments.
        mesh: the devices.

    Attributes:
        needs_matrices: whether the optimizer needs whole matrices, which are then distributed.
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
    def _input_specs(self) -> tuple[PartitionSpec, ...]:
        """The spec of each input of the update."""
        grad_shardings = shardings(self.state_policy, self.traced.params, self.mesh)
        moments = optimizer_shardings(
            self.state_policy, self.traced.params, self.traced.state, self.mesh
        )
        params = shardings(self.param_policy, self.traced.params, self.mesh)
        places = jax.tree.leaves((grad_shardings, moments, params))
        return (*(place.spec for place in places), *[PartitionSpec()] * len(self.traced.extra_args))

    @property
    def hidden(self) -> str | None:
        """The operation, such as a branch, that hides work on whole matrices; None if none does."""
        return hidden_in(self.traced.program)

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        """How the matrices that the optimizer needs whole are distributed, stack by stack."""
        plans: list[Distribution] = []

        def record(calls: Sequence[RowCall]) -> list[Array]:
            plans.extend(each for each, _ in self._stacks(calls))
            return [call.x for call in calls]

        if self.needs_matrices:
            run = functools.partial(run_with_calls, self.traced.program)
            jax.eval_shape(lambda *values: run(values, record), *input_shapes(self.traced.program))
        return tuple(plans)

    def __call__(
        self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Array
    ) -> tuple[PyTree, PyTree]:
        """Computes the updates.

        Args:
            grads: the gradients of the stored parameters, sharded like their moments.
            state: the state of the optimizer.
            params: the stored parameters.
            extra_args: the scalars that `Update.extra_args` names.

        Returns:
            The updates, and the next state.
        """
        if not self.needs_matrices or self.mesh.size == 1:
            return self.traced.optimizer.update(grads, state, params, **extra_args)
        scalars = [extra_args[name].astype(jnp.float32) for name in self.traced.extra_args]
        leaves = jax.tree.leaves((grads, state, params, scalars))
        results = run_with_calls(self.traced.program, leaves, self._run)
        return jax.tree.unflatten(jax.tree.structure(self.traced.results), results)

    def _run(self, calls: Sequence[RowCall]) -> list[Array]:
        results: dict[int, Array] = {}
        for distribution, members in self._stacks(calls):
            outputs = self._run_stack(distribution, [calls[number] for number in members])
            results.update(zip(members, outputs, strict=True))
        return [results[number] for number in range(len(calls))]

    def _stacks(self, calls: Sequence[RowCall]) -> list[tuple[Distribution, list[int]]]:
        """Groups calls whose matrices can be stacked, and plans how each stack is distributed."""
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
        function, shape, _, spec, stack_axes, _ = key
        size = self.mesh.shape
        count = sum(map(self._local_count, calls))
        moved = spec_axes(spec)
        num_ranks = math.prod(size[axis] for axis in moved)
        extra = []
        for axis in self.mesh.axis_names:
            more = num_ranks * size[axis]
            reduces_work = -(-count // more) < -(-count // num_ranks)
            if axis not in (*stack_axes, *moved) and reduces_work:
                extra.append(axis)
                num_ranks = more
        return Distribution(
            function, shape, count, spec, stack_axes, moved, tuple(extra), num_ranks
        )

    def _local_count(self, call: RowCall) -> int:
        """Returns how many matrices of a call a rank holds, those of padding included."""
        lead = self._specs(call)[0]
        shards = [
            math.prod(self.mesh.shape[axis] for axis in axes_of(lead, dim))
            for dim in range(call.lead)
        ]
        return math.prod(-(-n // k) for n, k in zip(call.x.shape, shards, strict=False))

    def _specs(self, call: RowCall) -> tuple[PartitionSpec, PartitionSpec]:
        """Returns the spec of the leading dims, which count matrices, and that of a matrix."""
        if call.origin is None:
            return PartitionSpec(), PartitionSpec()
        number, dims = call.origin
        entries = [axes_of(self._input_specs[number], dim) for dim in dims]
        return PartitionSpec(*entries[: call.lead]), PartitionSpec(*entries[call.lead :])

    def _run_stack(self, distribution: Distribution, calls: Sequence[RowCall]) -> list[Array]:
        """Runs the calls of one stack."""
        inner = (*distribution.spec, *[None] * (len(distribution.shape) - len(distribution.spec)))
        leads = [(self._specs(call)[0], call.lead) for call in calls]
        places = [PartitionSpec(*lead, *[None] * (n - len(lead)), *inner) for lead, n in leads]
        more = calls[0].more
        padded = [for_region(call.x, at, self.mesh) for call, at in zip(calls, places, strict=True)]
        run = jax.shard_map(
            functools.partial(_on_device, distribution, [call.lead for call in calls]),
            mesh=self.mesh,
            in_specs=(places, PartitionSpec()),
            out_specs=places,
            check_vma=False,
        )
        return cut_like(run(padded, more), [call.x for call in calls])


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How the matrices of one stack are distributed.

    Args:
        function: the function that runs on each matrix; the same for all.
        shape: the shape of each matrix.
        count: the number of matrices, on each rank of `stack_axes`.
        spec: the sharding of each matrix before and after.
        stack_axes: the axes that split the stack already, such as that of a pipeline.
        moved: the axes that split each matrix, which an all-to-all moves to the stack dim.
        extra: the axes over which the matrices are replicated, and which divide the work as well.
        num_ranks: the number of devices that share the stack.

    Example:
        >>> spec = PartitionSpec(None, "fsdp")
        >>> distribution = Distribution(jnp.sin, (8, 32), 6, spec, (), ("fsdp",), (), 4)
        >>> distribution.padding, distribution.per_device
        (2, 2)
        >>> print(distribution)
        6 of 8×32 distributed over fsdp: 2 on each of 4 devices, 2 of them padding
    """

    function: Callable[..., Array]
    shape: Shape
    count: int
    spec: PartitionSpec
    stack_axes: tuple[str, ...]
    moved: tuple[str, ...]
    extra: tuple[str, ...]
    num_ranks: int

    @property
    def per_device(self) -> int:
        """The number of matrices per device, padding included."""
        return -(-self.count // self.num_ranks)

    @property
    def padding(self) -> int:
        """The number of zero matrices that make the stack divide by the devices."""
        return self.per_device * self.num_ranks - self.count

    def __str__(self) -> str:
        size = "×".join(map(str, self.shape))
        over = "×".join((*self.moved, *self.extra)) or "nothing"
        return (
            f"{self.count} of {size} distributed over {over}: {self.per_device} on each of "
            f"{self.num_ranks} devices, {self.padding} of them padding"
        )


def _on_device(
    distribution: Distribution, leads: Sequence[int], arrays: Sequence[Array], more: Sequence[Array]
) -> list[Array]:
    """Runs on one device: takes its shards of all matrices, returns its shards of the results."""
    flat = [x.reshape(-1, *x.shape[lead:]) for x, lead in zip(arrays, leads, strict=True)]
    stack = jnp.concatenate(flat)
    zeros = jnp.zeros((distribution.padding, *stack.shape[1:]), stack.dtype)
    stack = jnp.concatenate([stack, zeros]) if distribution.padding else stack
    # Without a barrier XLA:CPU slices the parts out again for its all-to-all, in other layouts.
    stack = jax.lax.optimization_barrier(stack)
    results = _on_whole_matrices(
        distribution, stack, jax.vmap(lambda x: distribution.function(x, *more))
    )
    start = 0
    outputs = []
    for part, x in zip(flat, arrays, strict=True):
        end = start + part.shape[0]
        outputs.append(results[start:end].reshape(x.shape))
        start = end
    return outputs


def _on_whole_matrices(
    distribution: Distribution, stack: Array, work: Callable[[Array], Array]
) -> Array:
    """Moves shards into whole matrices, runs the work on them, and moves the results back."""
    moves = [(axes_of(distribution.spec, dim), 1 + dim) for dim in range(len(distribution.spec))]
    moves = [move for move in moves if move[0]]
    if distribution.extra:
        share = stack.shape[0] // math.prod(jax.lax.axis_size(axis) for axis in distribution.extra)
        first = jax.lax.axis_index(distribution.extra) * share
        stack = jax.lax.dynamic_slice_in_dim(stack, first, share)
    for axes, dim in moves:
        stack = jax.lax.all_to_all(stack, axes, split_axis=0, concat_axis=dim, tiled=True)
    # The work runs on matrices in the model's shape, without the zeros that pad their shards.
    stack = padded(work(unpad(stack, (stack.shape[0], *distribution.shape))), stack.shape)
    for axes, dim in reversed(moves):
        stack = jax.lax.all_to_all(stack, axes, split_axis=dim, concat_axis=0, tiled=True)
    if distribution.extra:
        stack = jax.lax.all_gather(stack, distribution.extra, tiled=True)
    return stack
