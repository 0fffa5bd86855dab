"""`deterministic="elastic"`: gradients bitwise equal for 1, 2, 4, ... ranks.

A batch is V consecutive logical shards of B/V samples. The same program computes the sums of each
shard, whichever rank runs it. These sums are the leaves of a balanced binary tree. Each of R ranks
has V/R consecutive shards, which form a subtree, and adds that subtree up in a loop. The ranks then
add up the rest of the tree. For any number of ranks that is a power of two, up to V,

    total = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)),    V = 8

XLA may compile the same operations differently depending on the code around them. So the shard's
program is the body of a loop, isolated from the rest. The compiler knows neither the number of
iterations nor the number of the shard, so it unrolls nothing. The sums are added in another loop,
so that no addition is fused with a shard's program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from ..collectives.reduce import tree_sum
from ..core.compat import eval_jaxpr
from ..core.errors import UnsupportedError
from ..core.tree import leaves_with_paths
from ..core.typing import Array, Batch, PyTree
from ..ir.results import changed_results
from ..optim.wrappers import layer_norms
from ..sharding import axes_of, optimizer_shardings
from ..sharding.padding import cut_like, for_region
from .gather import even_rows
from .local_view import RankProgram, local_gradients
from .microbatches import SumsFn
from .objective import (
    GradientArguments,
    GradientResult,
    Sums,
    forward_of,
    gradient_sums,
    with_frozen,
)
from .optimizer import updated
from .plan import StepPlan
from .spec import StepSpec

T = TypeVar("T")


def elastic_gradients(plan: StepPlan, arguments: GradientArguments) -> GradientResult:
    """Returns gradients summed in one tree over the logical shards, sharded like their moments.

    Weights stay whole for the whole step, and a rank holds log2(V/R) + 2 whole gradients.

    Args:
        plan: the plan of the step.
        arguments: parameters, buffers, batch and scale.

    Raises:
        UnsupportedError: for a buffer that depends on the samples of a shard.
    """
    return local_gradients(plan, arguments, ElasticProgram)


@dataclasses.dataclass(frozen=True, eq=False)
class ElasticProgram(RankProgram):
    """The program of one rank: it adds up its subtree, and then its share of the rest."""

    def run(
        self, params: PyTree, frozen: PyTree, buffers: PyTree, batch: Batch, scale: Array | None
    ) -> tuple[PyTree, Any, PyTree]:
        """Runs on one rank: takes shards, returns the sums of the tree and new buffers."""
        spec = self.spec
        changes = self.plan.changes
        shards = spec.num_ranks
        gathered = self._unsharded(params, self.param_specs, spec.model_spec.params)
        whole_frozen = self._unsharded(frozen, self.frozen_specs, spec.model_spec.stored_frozen)
        forward = forward_of(spec.model_spec, spec.loss_fn, changes.change_with(None))
        forward = with_frozen(changes.with_layer_scan(forward), whole_frozen)
        sums_of = gradient_sums(forward, shards, scale)
        count = shards // spec.mesh.size
        sums, buffers = self._subtree_sums(sums_of, gathered, buffers, batch, count)

        def total(x: Array, owner: PartitionSpec) -> Array:
            split = {axis: dim for dim in range(len(owner)) for axis in axes_of(owner, dim)}
            for dim in range(len(owner)):
                x = even_rows(x, axes_of(owner, dim), dim)
            return tree_sum(x, self.axes, split)

        grads = jax.tree.map(total, sums.grads, self.owner_specs)
        scalars = jax.tree.map(lambda x: total(x, PartitionSpec()), (sums.loss, sums.metrics))
        return grads, scalars, buffers

    def _subtree_sums(
        self, sums_of: SumsFn, weights: PyTree, first: PyTree, batch: Batch, count: int
    ) -> tuple[Sums, PyTree]:
        """Adds up the sums of this rank's shards, merging subtrees like a binary counter.

        After shard k, level l of the stack holds the sum of a complete subtree of 2^l shards if bit
        l of k + 1 is set.
        """
        # The random numbers of a shard depend on its number alone, not on the rank it runs on.
        by_rank = self.part_buffers
        part_buffers = None if by_rank is None else dataclasses.replace(by_rank, axes=(), ranks=1)
        batch = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        start = jax.lax.axis_index(self.axes) * count

        def before(number: Any) -> PyTree:
            return first if part_buffers is None else part_buffers.before(first, first, number)

        trace = jax.make_jaxpr(sums_of, return_shape=True)
        program, shapes = trace(weights, before(0), jax.tree.map(lambda x: x[0], batch))
        self._check_buffers(program, first)
        structure = jax.tree.structure(shapes)
        stack = jax.tree.map(
            lambda x: jnp.zeros((count.bit_length(), *x.shape), x.dtype), shapes[0]
        )

        def body(carry: tuple[Array, PyTree, PyTree]) -> tuple[Array, PyTree, PyTree]:
            number, stack, _ = carry
            index = number - start
            shard = jax.tree.map(lambda x: _row(x, index), batch)
            with jax.named_scope("logical_shard"):
                leaves = jax.tree.leaves((weights, before(number), shard))
                new, buffers = structure.unflatten(eval_jaxpr(program, leaves))

            def merge(carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
                level, new = carry
                return level + 1, jax.tree.map(lambda s, x: _row(s, level) + x, stack, new)

            level, new = jax.lax.while_loop(
                lambda carry: (index >> carry[0]) & 1 == 1, merge, (jnp.zeros_like(index), new)
            )
            put = jax.lax.dynamic_update_index_in_dim
            stack = jax.tree.map(lambda s, x: put(s, x, level, 0), stack, new)
            if part_buffers is not None:
                buffers = part_buffers.without_part(buffers, first)
            return number + 1, stack, buffers

        _, stack, buffers = jax.lax.while_loop(
            lambda carry: carry[0] < start + count, body, (start, stack, first)
        )
        return jax.tree.map(lambda x: x[-1], stack), buffers

    def _check_buffers(self, program: ClosedJaxpr, buffers: PyTree) -> None:
        """Raises if a buffer depends on the samples of a shard."""
        paths = [path for path, _ in leaves_with_paths(buffers)]
        once = frozenset() if self.part_buffers is None else self.part_buffers.once_per_step
        weights = len(jax.tree.leaves(self.spec.model_spec.params))
        for number in changed_results(program, weights, len(paths)):
            if (path := paths[number]) not in once:
                raise UnsupportedError(
                    f"the buffer {path!r} depends on the samples, as the statistics of BatchNorm "
                    'do, and with deterministic="elastic" would only see one logical shard. '
                    "Use a per-sample normalisation such as nnx.LayerNorm, freeze statistics "
                    "with use_running_average=True, or use deterministic=True",
                    code="buffer-depends-on-samples",
                )


def whole_norm(spec: StepSpec, tree: PyTree) -> Array:
    """Returns the norm of all elements of a tree, added up in the same order on every rank.

    Args:
        spec: the step.
        tree: arrays in global view, split or whole.
    """
    return _isolated(spec, optax.tree.norm, (PartitionSpec(),), PartitionSpec())(tree)


def whole_layer_norms(spec: StepSpec, tree: PyTree) -> dict[str, Array]:
    """Returns the norm of each layer of a tree, added up in the same order on every rank.

    Args:
        spec: the step.
        tree: arrays in global view, split or whole.
    """
    return _isolated(spec, layer_norms, (PartitionSpec(),), PartitionSpec())(tree)


def elastic_update(
    plan: StepPlan,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    extra_args: dict[str, Array],
    keeps_updates: bool,
) -> tuple[PyTree, PyTree, PyTree]:
    """Runs the optimizer's update: each rank updates the shards whose moments it has.

    Args:
        plan: the plan of the step.
        grads: mean gradients, sharded like their moments.
        state: of the optimizer.
        params: as stored.
        extra_args: the scalars that `Update.extra_args` names.
        keeps_updates: whether to return the updates too.

    Returns:
        The next parameters, sharded like their moments; the next optimizer state; and the updates,
        or None if they are not kept.
    """
    spec = plan.spec
    mesh = spec.mesh
    policy = plan.state_plan.storage.strategy.opt_state
    shardings = (
        plan.state_plan.grad_shardings,
        optimizer_shardings(policy, plan.state_plan.params, state, mesh),
    )
    grad_specs, moments = jax.tree.map(lambda sharding: sharding.spec, shardings)

    optimizer = plan.state_plan.update.traced.optimizer
    isolated = _isolated(
        spec,
        functools.partial(updated, optimizer.update, keeps_updates),
        (grad_specs, moments, grad_specs, PartitionSpec()),
        (grad_specs, moments, grad_specs if keeps_updates else None),
    )
    # The update is elementwise (a rule checks it): zeros that pad a shard affect no other element.
    arguments = [
        for_region(grads, grad_specs, mesh),
        for_region(state, moments, mesh),
        for_region(params, grad_specs, mesh),
    ]
    new_params, new_state, updates = isolated(*arguments, extra_args)
    updates = cut_like(updates, params) if keeps_updates else None
    return cut_like(new_params, params), cut_like(new_state, state), updates


def _isolated(
    spec: StepSpec, function: Callable[..., T], in_specs: Any, out_specs: Any
) -> Callable[..., T]:
    """Maps a function over each rank's shards, compiled independently of the code around it."""

    def run(*args: Any) -> T:
        # XLA would inline a loop that it knows to have one iteration. It cannot know this bound,
        # which is 2 if a number is infinite; a second iteration computes the same again.
        iterations = 1 + jnp.isinf(jax.tree.leaves(args)[0].ravel()[0]).astype(jnp.int32)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))
        return jax.lax.while_loop(
            lambda carry: carry[0] < iterations,
            lambda carry: (carry[0] + 1, function(*args)),
            (jnp.zeros_like(iterations), zeros),
        )[1]

    return jax.shard_map(
        run, mesh=spec.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _row(x: Array, number: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False)
