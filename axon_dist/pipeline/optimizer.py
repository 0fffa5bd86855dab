"""An optimizer of the model's own tree, working on the parameters that a pipeline stores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from ..core.errors import UnsupportedError
from ..core.tree import leaves_with_paths
from ..core.typing import Array, Path, PyTree
from ..program.owners import OwnedProgram, owned
from .elementwise import Layout, elementwise
from .form import Place, StoredForm
from .rowwise import RowProgram
from .stacks import UnstackedOptimizer
from .storage import FlatStorage, ModelStorage
from .vectorwise import VectorProgram


class StagedOptimizer:
    """What an optimizer does to a model, done to the model's stored form.

    `init` and `update` of the optimizer are traced on the model's own tree, so that masks, norms
    of leaves, factored moments and the like are what they are on one device, and are run where
    the blocks live. Everything that cannot be is refused here, before a state exists.

    Args:
        optimizer: any optax transformation of the parameters that the storage holds.
        storage: the stored form of the parameters.
        mesh: names and sizes of its axes, over all devices.
        axis: the axis of the pipeline.

    Raises:
        UnsupportedError: naming the leaf and the operation that would need whole blocks of several
            stages in one place.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformationExtraArgs | UnstackedOptimizer,
        storage: ModelStorage,
        mesh: Mesh,
        axis: str,
    ):
        self._optimizer = optimizer
        self._storage, self._mesh, self._axis = storage, mesh, axis
        params = StoredForm(storage, storage.shapes)
        self.state_form: StoredForm = StoredForm(
            storage, jax.eval_shape(self._optimizer.init, params.shapes)
        )
        self._init = self._staged(self._optimizer.init, {"params": params}, ("opt_state",))
        arguments = {
            "grads": params,
            "opt_state": self.state_form,
            "params": params,
            "value": StoredForm(storage, jax.ShapeDtypeStruct((), jnp.float32)),
        }
        self._update = self._staged(self._updates, arguments, ("updates", "opt_state"))

    def init(self, params: PyTree) -> PyTree:
        """The first state, in stored form, of parameters in stored form."""
        return self._init(params)[0]

    def update(
        self, grads: PyTree, state: PyTree, params: PyTree, *, value: Array
    ) -> tuple[PyTree, PyTree]:
        """The updates and the next state, all in stored form.

        Args:
            grads: like the stored parameters.
            state: from `init` or the update before.
            params: in stored form.
            value: the loss, a scalar, for optimizers that look at it.
        """
        updates, state = self._update(grads, state, params, value.astype(jnp.float32))
        return updates, state

    def state_to_model(self, stored: PyTree) -> PyTree:
        """A state in stored form as the optimizer has it for the model."""
        apart = self.state_form.to_model(stored)
        if isinstance(self._optimizer, UnstackedOptimizer):
            return self._optimizer.state_together(apart)
        return apart

    def state_from_model(self, state: PyTree) -> PyTree:
        """The inverse of `state_to_model`, exactly."""
        if isinstance(self._optimizer, UnstackedOptimizer):
            state = self._optimizer.state_apart(state)
        return self.state_form.from_model(state)

    def _updates(self, grads: PyTree, state: PyTree, params: PyTree, value: Array) -> Any:
        return self._optimizer.update(grads, state, params, value=value)

    def _staged(
        self, function: Callable[..., Any], arguments: dict[str, StoredForm], results: Sequence[str]
    ) -> Callable[..., list[PyTree]]:
        """A function of trees in the model's form, made one of trees in stored form."""
        shapes = [form.shapes for form in arguments.values()]
        closed, found = jax.make_jaxpr(function, return_shape=True)(*shapes)
        found = found if len(results) > 1 else (found,)
        targets = {
            name: StoredForm(self._storage, tree) for name, tree in zip(results, found, strict=True)
        }
        sources, names = _places(arguments)
        ends, named = _places(targets)
        forms = list(arguments.values()), list(targets.values())

        def program(owner_of: Callable[[Place], Any], **options: Any) -> OwnedProgram:
            owners, homes = ([owner_of(place) for _, place in side] for side in (sources, ends))
            return owned(closed, owners, names, homes, named, **options)

        run = self._on_vectors(program, sources, ends, forms)
        if run is None:
            by_cell = program(lambda place: place.cell)
            stages = self._storage.stages
            if all(place.slot is not None for _, place in (*sources, *ends)):
                run = RowProgram(by_cell, sources, ends, self._mesh, stages.num_devices).run
            else:
                where = stages, self._mesh, self._axis
                run = VectorProgram(by_cell, sources, ends, *forms, *where).run
        return functools.partial(_run, run, *forms)

    def _on_vectors(
        self,
        program: Callable[..., OwnedProgram],
        sources: Sequence[tuple[int, Place]],
        ends: Sequence[tuple[int, Place]],
        forms: tuple[list[StoredForm], list[StoredForm]],
    ) -> Callable[..., Any] | None:
        """How to run it on whole vectors, where there are some and it works element by element."""
        if not isinstance(self._storage, FlatStorage) or not self._storage.vectors:
            return None
        if (layout := Layout.find(self._storage, forms)) is None:
            return None
        by_leaf = lambda owners: program(lambda place: owners.get(place.keys), small=1)
        try:
            found = elementwise(by_leaf, sources, ends, layout)
        except UnsupportedError:  # what leaves cannot hand to each other, they may within a stage
            return None
        return None if found is None else found.run


def _run(
    run: Callable[..., Any], sources: list[StoredForm], targets: list[StoredForm], *trees: PyTree
) -> list[PyTree]:
    stored = {
        (number, *slot): leaf
        for number, (form, tree) in enumerate(zip(sources, trees, strict=True))
        for slot, leaf in form.slots(tree).items()
    }
    results: list[Any] = [{} for _ in targets]
    for (number, part, keys), leaf in run(stored).items():
        results[number][part, keys] = leaf
    return [form.of_slots(found) for form, found in zip(targets, results, strict=True)]


def _places(forms: dict[str, StoredForm]) -> tuple[list[tuple[int, Place]], list[Path]]:
    """The places of all leaves of several trees, with the number of the tree; and their paths."""
    places = [(number, p) for number, form in enumerate(forms.values()) for p in form.places]
    names = [
        f"{name}/{path}" if path else name
        for name, form in forms.items()
        for path, _ in leaves_with_paths(form.shapes)
    ]
    return places, names
