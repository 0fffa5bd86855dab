"""The update of an optimizer that needs some matrices whole, each on one of the devices."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec

from ..core.typing import Array, PyTree
from ..optim import Distribution, Distributor
from ..program.matrices import has_matrices, hidden_in
from ..sharding import Policy, optimizer_shardings, shardings


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
        update = lambda grads, state, params, loss: self.optimizer.update(
            grads, state, params, value=loss
        )
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        trace = jax.make_jaxpr(update, return_shape=True)
        return trace(self.params, self.state, self.params, loss)

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
