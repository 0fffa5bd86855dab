"""Runs an optimizer of the model's own tree on the parameters that a pipeline stores.

Three engines run its update, and `StagedOptimizer` takes the first that fits:

- `on_whole_vectors`: stages differ, so they are stored as vectors, and the update is elementwise.
- `RowProgram`: stages or blocks are equal, so no leaf lies in a packed vector.
- `RankBranches`: all other updates, with one branch per rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.compat import eval_equation
from ..core.errors import UnsupportedError
from ..core.typing import Array, Function, Keys, Path, PyTree
from ..ir.rows import Stacked, by_rows, whole
from .layout import ParamLike, Stacks, Stages
from .owners import OwnedOperation, OwnedProgram, ValueId, as_array, owned
from .row_update import RowProgram
from .storage import StageStorage
from .tables import Packing
from .tree_storage import (
    Ends,
    LeafPlace,
    Run,
    StoredKey,
    TreeStorage,
    VectorLayout,
    on_whole_vectors,
)


class _Form(ParamLike):
    """A tree whose parts of the form of the parameters can be unstacked."""

    def __init__(self, stacks: Stacks, params: PyTree, shapes: PyTree):
        super().__init__(params, shapes)
        self._stacks = stacks
        self._shapes = [part for part, _ in self.split(shapes)]
        # A subtree emptied by a mask stays an empty dict, so the part remains recognizable.
        self._empty: dict[Any, Any] = {key: {} for key in params}

    def unstack(self, tree: PyTree) -> PyTree:
        """Returns the tree with stacked leaves split into one per block."""
        return self.outer.unflatten(
            self._empty | self._stacks.unstack(part, shapes) if is_like else whole(part)
            for (part, is_like), shapes in zip(self.split(tree), self._shapes, strict=True)
        )

    def restack(self, unstacked: PyTree, stack: Callable[[list[Any]], Any] = jnp.stack) -> PyTree:
        """Inverts `unstack`."""
        parts = zip(self.outer.flatten_up_to(unstacked), self._like, self._shapes, strict=True)
        return self.join(
            [
                self._stacks.restack(part, stack, shapes) if is_like else part
                for part, is_like, shapes in parts
            ]
        )


class UnstackedOptimizer:
    """Turns an optimizer of a model with stacked leaves into one of unstacked leaves.

    The optimizer is traced on the model's own tree, so that a norm of a stacked leaf is one number.
    The update is computed row by row.

    Args:
        optimizer: the optimizer of the model.
        stacks: the stacked modules of the model.
        params: shapes of the model's parameters.

    Attributes:
        state_form: restacks a state to the form that the optimizer has for the model, and unstacks
            it again.
    """

    def __init__(
        self, optimizer: optax.GradientTransformationExtraArgs, stacks: Stacks, params: PyTree
    ):
        self._optimizer = optimizer
        self._params = _Form(stacks, params, params)
        self.state_form = _Form(stacks, params, jax.eval_shape(optimizer.init, params))

    def init(self, params: PyTree) -> PyTree:
        """Returns the initial state."""
        return self.state_form.unstack(
            by_rows(self._optimizer.init)(self._params.restack(params, Stacked))
        )

    def update(self, updates: PyTree, state: PyTree, params: PyTree, **extra: Any) -> Any:
        """Returns the updates and the next state."""
        form = self._params
        run = by_rows(lambda u, s, p, extra: self._optimizer.update(u, s, p, **extra))
        updates, state = run(
            form.restack(updates, Stacked),
            self.state_form.restack(state, Stacked),
            form.restack(params, Stacked),
            extra,
        )
        return form.unstack(updates), self.state_form.unstack(state)


class StagedOptimizer:
    """Applies an optimizer of the model to the model's stored form.

    The optimizer's `init` and `update` are traced on the model's own tree, so that masks, norms of
    leaves, factored moments and the like are the same as on one device. They run on the ranks that
    store the blocks. An optimizer that cannot run like this is refused here, before a state exists.

    Args:
        optimizer: any optax transformation of the model's parameters, or the `UnstackedOptimizer`
            of a model with stacked leaves.
        storage: the stored form of the parameters.
        mesh: the mesh of all devices.
        axis: the axis of the pipeline.
        extra_args: the names of the extra arguments of an update, which are scalars.

    Raises:
        UnsupportedError: naming the leaf and the operation that would need blocks of several stages
            on one rank.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformationExtraArgs | UnstackedOptimizer,
        storage: StageStorage,
        mesh: Mesh,
        axis: str,
        extra_args: Sequence[str] = ("value",),
    ):
        self._optimizer = optimizer
        self._extra_args = tuple(extra_args)
        self._storage = storage
        self._mesh = mesh
        self._axis = axis
        is_unstacked = isinstance(optimizer, UnstackedOptimizer)
        self._unstacked: _Form | None = optimizer.state_form if is_unstacked else None
        params = TreeStorage(storage, storage.shapes)
        self.state_form: TreeStorage = TreeStorage(
            storage, jax.eval_shape(self._optimizer.init, params.shapes)
        )
        self._init = self._staged(self._optimizer.init, {"params": params}, ("opt_state",))
        arguments = {
            "grads": params,
            "opt_state": self.state_form,
            "params": params,
        }
        scalar = TreeStorage(storage, jax.ShapeDtypeStruct((), jnp.float32))
        arguments |= dict.fromkeys(self._extra_args, scalar)
        self._update = self._staged(self._updates, arguments, ("updates", "opt_state"))

    def init(self, params: PyTree) -> PyTree:
        """Returns the initial state in stored form, for parameters in stored form."""
        return self._init(params)[0]

    def update(
        self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Array
    ) -> tuple[PyTree, PyTree]:
        """Returns the updates and the next state, all in stored form.

        Args:
            grads: gradients, like the stored parameters.
            state: the state from `init` or the previous update.
            params: parameters in stored form.
            extra_args: scalars for optimizers that use them, such as `value`, the loss.
        """
        scalars = [extra_args[name].astype(jnp.float32) for name in self._extra_args]
        updates, state = self._update(grads, state, params, *scalars)
        return updates, state

    def state_to_model(self, stored: PyTree) -> PyTree:
        """Converts a state in stored form to the form that the optimizer has for the model."""
        state = self.state_form.to_model(stored)
        return state if self._unstacked is None else self._unstacked.restack(state)

    def state_from_model(self, state: PyTree) -> PyTree:
        """Inverts `state_to_model` exactly."""
        if self._unstacked is not None:
            state = self._unstacked.unstack(state)
        return self.state_form.from_model(state)

    def _updates(self, grads: PyTree, state: PyTree, params: PyTree, *scalars: Array) -> Any:
        extra_args = dict(zip(self._extra_args, scalars, strict=True))
        return self._optimizer.update(grads, state, params, **extra_args)

    def _staged(
        self, function: Function, arguments: dict[str, TreeStorage], results: Sequence[str]
    ) -> Callable[..., list[PyTree]]:
        """Turns a function of trees in the model's form into one of trees in stored form."""
        shapes = [form.shapes for form in arguments.values()]
        closed, trees = jax.make_jaxpr(function, return_shape=True)(*shapes)
        trees = trees if len(results) > 1 else (trees,)
        targets = {
            name: TreeStorage(self._storage, tree)
            for name, tree in zip(results, trees, strict=True)
        }
        sources, source_names = _places(arguments)
        ends, end_names = _places(targets)
        forms = list(arguments.values()), list(targets.values())

        def program(owner_of: Callable[[LeafPlace], Any], **options: Any) -> OwnedProgram:
            owners = list(map(owner_of, sources))
            destinations = list(map(owner_of, ends))
            return owned(closed, owners, source_names, destinations, end_names, **options)

        run = None
        if self._storage.vectors:
            run = self._on_whole_vectors(program, sources, ends, forms)
        if run is None:
            by_rank_row = program(lambda place: place.rank_row)
            stages = self._storage.stages
            if all(place.stored_leaf is not None for place in (*sources, *ends)):
                run = RowProgram(by_rank_row, sources, ends, self._mesh, stages.num_devices).run
            else:
                run = RankBranches(
                    by_rank_row, sources, ends, *forms, stages, self._mesh, self._axis
                ).run
        return functools.partial(_run, run, *forms)

    def _on_whole_vectors(
        self,
        program: Callable[..., OwnedProgram],
        sources: Ends,
        targets: Ends,
        forms: tuple[list[TreeStorage], list[TreeStorage]],
    ) -> Run | None:
        """Returns a function that runs the program on whole vectors; None if not elementwise."""
        if (layout := VectorLayout.of(self._storage, forms)) is None:
            return None
        try:
            by_leaf = program(lambda place: layout.owners.get(place.keys), small=1)
        except UnsupportedError:
            # One leaf reads a large value of another, which may still be possible within a stage.
            return None
        return on_whole_vectors(by_leaf, sources, targets, layout)


def _run(
    run: Function, sources: list[TreeStorage], targets: list[TreeStorage], *trees: PyTree
) -> list[PyTree]:
    stored = {
        (number, *key): leaf
        for number, (form, tree) in enumerate(zip(sources, trees, strict=True))
        for key, leaf in form.stored_leaves(tree).items()
    }
    results: list[Any] = [{} for _ in targets]
    for (number, part, keys), leaf in run(stored).items():
        results[number][part, keys] = leaf
    return [form.of_stored_leaves(leaves) for form, leaves in zip(targets, results, strict=True)]


def _places(forms: dict[str, TreeStorage]) -> tuple[list[LeafPlace], list[Path]]:
    """Returns the places of all leaves of several trees, and their paths."""
    places = [
        dataclasses.replace(place, tree=tree)
        for tree, form in enumerate(forms.values())
        for place in form.places
    ]
    names = [*forms]
    return places, [f"{names[p.tree]}/{p.path}" if p.path else names[p.tree] for p in places]


class RankBranches:
    """Runs an update with one branch per rank and level, if the ranks' stages differ.

    Args:
        program: a program of the model's leaves; owners are `RankRow`s.
        sources: the place of each input among the leaves of the arguments.
        targets: the place of each output among the leaves of the results.
        arguments: the stored forms of the arguments.
        results: the stored forms of the results.
        stages: the assignment of blocks to ranks.
        mesh: the mesh of all devices.
        axis: the axis of the pipeline.
    """

    def __init__(
        self,
        program: OwnedProgram,
        sources: Ends,
        targets: Ends,
        arguments: Sequence[TreeStorage],
        results: Sequence[TreeStorage],
        stages: Stages,
        mesh: Mesh,
        axis: str,
    ):
        self._program = program
        self._stages = stages
        self._arguments = arguments
        self._results = results
        self._sources = list(zip(program.inputs, sources, strict=True))
        self._targets = list(zip(program.outputs, targets, strict=True))
        self._ranks = range(stages.num_devices)
        self._mesh = mesh
        self._axis = axis
        self._last = program.num_levels - 1
        reads = [(a, _rank(op.owner)) for op in program.operations for a in op.inputs]
        reads += [
            (a, _rank(by)) for a, by in zip(program.outputs, program.destinations, strict=True)
        ]
        # By level and rank, the values that other ranks read.
        self._sent: list[list[list[int]]] = [
            [[] for _ in self._ranks] for _ in range(program.num_levels)
        ]
        sent = [a for a, reader in reads if _rank(program.owners[a]) not in (None, reader)]
        for value in dict.fromkeys(sent):
            rank = _rank(program.owners[value])
            if rank is not None:
                self._sent[program.levels[value]][rank].append(value)

    def run(self, stored: Mapping[StoredKey, Array]) -> dict[StoredKey, Array]:
        """Runs the program.

        Args:
            stored: the stored leaves of all arguments.

        Returns:
            The stored leaves of all results.
        """
        inputs = {
            v: stored[place.stored_key] for v, place in self._sources if place.rank_row is None
        }
        known: dict[ValueId, Array] = {**self._program.constants, **inputs}
        vectors = [stored[key] for key in _vectors_of(self._arguments)]
        outputs: dict[StoredKey, Array] = {}
        for level in range(self._program.num_levels):
            for op in self._program.by_owner.get(None, ()):
                if op.level == level:
                    results = eval_equation(op.equation, [known[a] for a in op.inputs])
                    known.update(zip(op.outputs, results, strict=True))
            if any(self._sent[level]) or level == self._last:
                results = self._on_ranks(level, vectors, known)
                packing = self._packing(level)
                # A value that one rank sends to others is replicated for the next level.
                sent = self._placed(PartitionSpec(), results[: len(packing.packed)])
                for rank, values in enumerate(self._sent[level]):
                    unpacked = packing.unpack(rank, [x[rank] for x in sent]) if values else ()
                    known.update(zip(values, unpacked, strict=True))
                outputs.update(zip(_vectors_of(self._results), results[len(sent) :], strict=False))
        for atom, place in self._targets:
            if place.rank_row is None:
                outputs[place.stored_key] = as_array(known[atom], self._program.avals[atom])
        return outputs

    def _on_ranks(
        self, level: int, vectors: Sequence[Array], known: Mapping[ValueId, Array]
    ) -> list[Array]:
        """Returns the packed values that ranks send at a level.

        At the last level, the vectors of the results follow.
        """
        reads = sorted({v for rank in self._ranks for v in self._part(rank, level)[1]})
        branches = [functools.partial(self._branch, level, reads, rank) for rank in self._ranks]

        def run(rank: Array, rows: list[Array], values: list[Array]) -> list[Array]:
            operands = [*(x[0] for x in rows), *values]
            return [x[None] for x in jax.lax.switch(rank[0], branches, operands)]

        split = PartitionSpec(self._axis)
        replicated = PartitionSpec()
        mapped = jax.shard_map(
            run,
            mesh=self._mesh,
            axis_names=frozenset({self._axis}),
            in_specs=(split, split, replicated),
            out_specs=split,
            check_vma=False,
        )
        # The rows are split over the pipeline axis only. If other axes split them too, they would
        # be moved within branches, where permutes hang.
        (ranks,) = self._placed(split, [jnp.arange(len(self._ranks))])
        shared = self._placed(replicated, [known[v] for v in reads])
        return self._placed(split, mapped(ranks, self._placed(split, vectors), shared))

    def _placed(self, spec: PartitionSpec, values: Sequence[Array]) -> list[Array]:
        sharding = NamedSharding(self._mesh, spec)
        return [jax.lax.with_sharding_constraint(jnp.asarray(x), sharding) for x in values]

    def _branch(
        self, level: int, reads: list[int], rank: int, operands: Sequence[Array]
    ) -> list[Array]:
        """Computes the results of a rank up to a level, from its vectors and the shared values."""
        stored_keys = _vectors_of(self._arguments)
        leaves = self._unpacked(rank, dict(zip(stored_keys, operands, strict=False)))
        inputs = dict(zip(reads, operands[len(stored_keys) :], strict=True))
        values: dict[ValueId, Array] = {**self._program.constants, **inputs}
        for value, place in self._sources:
            if place.rank_row is not None and place.rank_row[0] == rank:
                values[value] = leaves[place.tree, place.part, place.keys]
        for op in self._part(rank, level)[0]:
            results = eval_equation(op.equation, [values[a] for a in op.inputs])
            values.update(zip(op.outputs, results, strict=True))
        sent = [values[v] for v in self._sent[level][rank]]
        packed = self._packed(rank, values) if level == self._last else []
        return [*self._packing(level).pack(sent), *packed]

    def _unpacked(
        self, rank: int, stored: Mapping[StoredKey, Array]
    ) -> dict[tuple[int, int, Keys], Array]:
        """Returns the leaves of a rank's blocks, for all arguments."""
        leaves = {}
        for tree, part, storage in _storages(self._arguments):
            for stage in (s for s, home in enumerate(self._stages.placement) if home == rank):
                names = storage.row_names[self._stages.chunk_of(stage)]
                vectors = [stored[tree, part, name] for name in names]
                of_stage = storage.block_weights(stage, [vectors])
                leaves.update({(tree, part, keys): x for keys, x in of_stage.items()})
        return leaves

    def _packed(self, rank: int, values: Mapping[ValueId, Array]) -> list[Array]:
        """Returns the vectors of a rank, for all results."""
        flat: dict[tuple[int, int], dict[Keys, Array]] = {}
        for atom, place in self._targets:
            if place.rank_row is not None and place.rank_row[0] == rank:
                leaf = as_array(values[atom], self._program.avals[atom])
                flat.setdefault((place.tree, place.part), {})[place.keys] = leaf
        vectors: list[Array] = []
        for tree, part, storage in _storages(self._results):
            for chunk in range(len(storage.row_names)):
                vectors += storage.packed(flat.get((tree, part), {}), chunk, rank)
        return vectors

    def _packing(self, level: int) -> Packing:
        """Returns the packing of the values sent at a level; shapes are equal on all ranks."""
        avals = self._program.avals
        return Packing([[avals[v] for v in values] for values in self._sent[level]])

    def _part(self, rank: int, level: int) -> tuple[list[OwnedOperation], list[int]]:
        """Returns the operations of a rank up to a level, and the values of others they read.

        A value of an earlier level that was not sent is recomputed, because saving it would need as
        much memory as the leaves.
        """
        needed = {v for v in self._sent[level][rank]}
        if level == self._last:
            needed |= {atom for atom, p in self._targets if p.rank_row and p.rank_row[0] == rank}
        operations = []
        for op in reversed(self._program.operations):
            if _rank(op.owner) == rank and op.level <= level and needed & {*op.outputs}:
                operations.append(op)
                needed.update(op.inputs)
        needed -= self._program.constants.keys()
        reads = [v for v in needed if _rank(self._program.owners[v]) != rank]
        return operations[::-1], reads


def _storages(forms: Sequence[TreeStorage]) -> Iterator[tuple[int, int, StageStorage]]:
    for tree, form in enumerate(forms):
        for part, storage in enumerate(form.storages):
            if storage is not None:
                yield tree, part, storage


def _vectors_of(forms: Sequence[TreeStorage]) -> list[StoredKey]:
    """Returns the keys of the stored vectors of several trees."""
    return [
        (tree, part, keys) for tree, part, storage in _storages(forms) for keys in storage.row_keys
    ]


def _rank(owner: object) -> int | None:
    return owner[0] if isinstance(owner, tuple) else None
