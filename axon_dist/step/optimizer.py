"""The optimizer of a step: what it is shown of the model, and the form that its state has."""

from __future__ import annotations

import dataclasses
import functools
import operator
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec

from ..core.errors import AxonDistError, ConfigError
from ..core.tree import paths_of
from ..core.typing import Array, PyTree
from ..jaxpr.rows import has_matrices, hidden_in
from ..optim import Distribution, Distributor
from ..pipeline import UnstackedOptimizer
from ..pipeline.optimizer import StagedOptimizer
from ..sharding import Policy, optimizer_shardings, shardings
from .parts import ModelParts
from .storage import Storage


def optimizer_for(
    optimizer: optax.GradientTransformation, parts: ModelParts, storage: Storage, mesh: Mesh
) -> tuple[Any, Storage]:
    """The optimizer for the stored form of a model's parameters.

    Args:
        optimizer: as the user gives it.
        parts: the model's structure, and the shapes of its parameters and buffers.
        storage: the stored form of its parameters.
        mesh: names and sizes of its axes, over all devices.

    Returns:
        The optimizer, and the storage, which knows the rows of the optimizer's state.

    Raises:
        ConfigError: when the optimizer cannot work on the parameters, with its reason.
        UnsupportedError: when a pipeline cannot run it, naming the leaf and the operation.
    """
    fitting = _fitting(optax.with_extra_args_support(optimizer), parts)
    if storage.rows is None:
        return fitting, storage
    if storage.stacks.depths:
        fitting = UnstackedOptimizer(fitting, storage.stacks, parts.params)
    staged = StagedOptimizer(fitting, storage.rows.trained, mesh, storage.axis)
    return staged, storage.with_state_rows(staged.state_form.row_paths)


def _fitting(
    optimizer: optax.GradientTransformationExtraArgs, parts: ModelParts
) -> optax.GradientTransformationExtraArgs:
    """The optimizer itself, if it takes nested dicts, or one that shows it an `nnx.State`.

    Masks and labels may be trees instead of functions, and then have the structure that
    `nnx.state(model, nnx.Param)` has, or that of the nested dict that it is made of; with another
    choice of what is trained, `nnx.state(model, choice)`.
    """
    if (refused := _refusal(optimizer, parts.params)) is None:
        return optimizer
    if isinstance(refused, TypeError) and "'value'" in str(refused):
        # Some take further arguments, and not this one: they are not told the loss.
        inner = optimizer

        def update(
            updates: PyTree, state: PyTree, params: PyTree = None, *, value=None, **extra: Any
        ) -> PyTree:
            return inner.update(updates, state, params, **extra)

        optimizer = optax.GradientTransformationExtraArgs(inner.init, update)
        refused = _refusal(optimizer, parts.params)
        if refused is None:
            return optimizer
    as_state = _as_state(optimizer, parts)
    if _refusal(as_state, parts.params) is None:
        return as_state
    raise ConfigError(
        f"the optimizer cannot work on the parameters of the model: {_first_line(refused)} "
        f"({type(refused).__name__}). It is given the parameters as a nested dict, "
        "nnx.to_pure_dict(nnx.state(model, nnx.Param)), or as that nnx.State; give a mask or "
        "labels as a function, such as mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, "
        "params), or as a tree of one of these structures"
    ) from refused


def _refusal(optimizer: Any, params: PyTree) -> Exception | None:
    """What the optimizer says when it is tried on shapes."""
    try:
        jax.eval_shape(functools.partial(_updated, optimizer), params)
    except AxonDistError:
        raise
    except Exception as error:
        return error
    return None


def _updated(optimizer: Any, params: PyTree) -> PyTree:
    """What an update returns, if that can be added to the parameters and be given back to it."""
    state = optimizer.init(params)
    changes = optimizer.update(params, state, params, value=jnp.zeros(()))
    if not isinstance(changes, tuple) or len(changes) != 2:
        raise ConfigError(
            f"the optimizer's update returned a {type(changes).__name__}; it must return a tuple "
            "(updates, state), as optax transformations do"
        )
    for what, got, wanted in (("updates", changes[0], params), ("a state", changes[1], state)):
        if (found := jax.tree.structure(got)) != (expected := jax.tree.structure(wanted)):
            raise ConfigError(
                f"the optimizer's update returned {what} of {found!s:.300}, where it was given "
                f"{expected!s:.300}; it must return a tree of the same structure"
            )
    for new, old in zip(jax.tree.leaves(changes[0]), jax.tree.leaves(params), strict=True):
        if jnp.shape(new) != jnp.shape(old):
            raise ConfigError(
                f"the optimizer's update returned an update of shape {jnp.shape(new)} for a "
                f"parameter of shape {jnp.shape(old)}; it must return one of the same shape"
            )
    return changes


def _as_state(
    optimizer: optax.GradientTransformationExtraArgs, parts: ModelParts
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of nested dicts that shows another one an `nnx.State`, as nnx users have it."""
    trained = paths_of(parts.params)
    found = nnx.state(parts.abstract, lambda keys, _: "/".join(map(str, keys)) in trained)
    structure = jax.tree.structure(found)
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
        own = jax.tree.structure(shapes)
        places = jax.tree.leaves(hide(own.unflatten(range(own.num_leaves))))
        return own.unflatten(_sorted(places, state))

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
    """What an optimizer does to parameters as the state holds them.

    Args:
        optimizer: the transformation as it runs on them.
        params: their shapes.
        state: the shapes of the optimizer's first state.
        param_policy: where parameters lie.
        state_policy: where their gradients and moments lie.
        mesh: the devices.
    """

    optimizer: optax.GradientTransformationExtraArgs
    params: PyTree
    state: PyTree
    param_policy: Policy
    state_policy: Policy
    mesh: Mesh

    @cached_property
    def _traced(self) -> tuple[ClosedJaxpr, PyTree]:
        """The update as a program, and the shapes that it returns."""
        trace = jax.make_jaxpr(
            lambda grads, state, params, loss: self.optimizer.update(
                grads, state, params, value=loss
            ),
            return_shape=True,
        )
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        return trace(self.params, self.state, self.params, loss)

    @property
    def program(self) -> ClosedJaxpr:
        """The update as a program of gradients, state, parameters and loss."""
        return self._traced[0]

    @property
    def next_state(self) -> PyTree:
        """The shapes of the optimizer's state after an update."""
        return self._traced[1][1]

    @cached_property
    def distributor(self) -> Distributor | None:
        """Distributes the matrices that the optimizer needs whole; None where it needs none."""
        if not has_matrices(self._traced[0]):
            return None
        owners = shardings(self.state_policy, self.params, self.mesh)
        moments = optimizer_shardings(self.state_policy, self.params, self.state, self.mesh)
        params = shardings(self.param_policy, self.params, self.mesh)
        places = jax.tree.leaves((owners, moments, params))
        return Distributor(self.mesh, (*(place.spec for place in places), PartitionSpec()))

    @property
    def hidden(self) -> str | None:
        """The operation of the optimizer that hides matrices which it needs whole."""
        return hidden_in(self._traced[0])

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        """How the matrices that the optimizer needs whole are distributed."""
        return () if self.distributor is None else self.distributor.distributions(self._traced[0])

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
        if self.distributor is None or self.mesh.size == 1:
            return self.optimizer.update(grads, state, params, value=value)
        program, shapes = self._traced
        leaves = jax.tree.leaves((grads, state, params, value.astype(jnp.float32)))
        return jax.tree.unflatten(jax.tree.structure(shapes), self.distributor.run(program, leaves))
