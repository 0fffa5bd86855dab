"""Experts in a list of modules: each rank has some of them, and computes these for all tokens.

A layer with experts in a list calls every one on every token, and adds their results up with gates:

    y = c + sum_e L_e(f_e(x))       L_e linear, such as the product with the gate of e

Rank r of c has the weights of E/c of them. It gets the tokens of all ranks, computes the terms of
its own experts, and what all ranks have is summed back to the owners of the tokens. Which equations
of the model's program are c and L_e is read from it, so that the layer may be anybody's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..core.errors import DivisibilityError, UnsupportedError
from ..core.modules import stacks_of, wrap_calls
from ..core.reduction import gathered, sum_scatter
from ..core.tree import leaves_with_paths
from ..core.typing import Array, Path
from ..jaxpr.expert_calls import Calls, Mixture, Mixtures, mark_experts, mixtures_in
from ..jaxpr.pieces import read_outside_units
from ..jaxpr.units import is_inside
from ..jaxpr.walk import Known
from ..nn import Layout

STACK = (
    "Stack them, so that one module holds all: self.experts = nnx.vmap(Expert)(rngs.split(count)), "
    "called by nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))(self.experts, x), and give "
    "expert_parallel suggest_plan(model).experts anew; or leave it out"
)
"""What to do about a list that cannot be split."""


@dataclasses.dataclass(frozen=True)
class ExpertList:
    """A list of experts in a model.

    Args:
        keys: of the list.
        count: how many experts it has.
    """

    keys: tuple[Any, ...]
    count: int

    @property
    def path(self) -> Path:
        """Its path."""
        return "/".join(map(str, self.keys))

    def modules(self, model: nnx.Module) -> list[nnx.Module]:
        """The experts in a model."""
        found: Any = model
        for key in self.keys:
            found = found[key] if isinstance(key, int) else getattr(found, key)
        return list(found)


def lists_in(model: nnx.Module, patterns: Sequence[str] | None = None) -> tuple[ExpertList, ...]:
    """The lists of a model whose paths some patterns are found in.

    Args:
        model: any; its leaves may be shapes.
        patterns: regular expressions; None takes the lists of at least two modules of one class.
    """
    found = []
    for keys, module in nnx.iter_modules(model):
        if not isinstance(module, nnx.List):
            continue
        kinds = [type(one) for one in module]
        one = ExpertList(tuple(keys), len(kinds))
        alike = len(kinds) > 1 and len(set(kinds)) == 1 and issubclass(kinds[0], nnx.Module)
        chosen = patterns is not None and any(re.search(p, one.path) for p in patterns)
        if chosen or (patterns is None and alike and callable(module[0])):
            found.append(one)
    return tuple(found)


def check_lists(lists: Sequence[ExpertList], model: nnx.Module, axis: str, size: int) -> None:
    """Raises unless the experts of lists can lie each on one of some ranks.

    Args:
        lists: of the model.
        model: of shapes.
        axis: the mesh axis.
        size: of the axis.

    Raises:
        DivisibilityError: when they do not divide.
        UnsupportedError: when they differ, share arrays with others, or have more than parameters.
    """
    shared = ["/".join(map(str, keys)) for many in nnx.find_duplicates(model) for keys in many]
    for one in lists:
        if one.count % size:
            ways = [n for n in range(1, one.count + 1) if one.count % n == 0]
            raise DivisibilityError(
                f"{one.path}: {one.count} experts in a list are split over {axis}={size} and do "
                f"not divide; use a size of {axis} among {ways}"
            )
        if (
            inside := next((p for p in stacks_of(model) if is_inside(one.path, p)), None)
        ) is not None:
            raise UnsupportedError(
                f"the list of experts {one.path!r} is in {inside!r}, which holds many layers in "
                f"each of its arrays. Keep the layers in an nnx.List, too. {STACK}"
            )
        if (
            outer := next((o for o in lists if one.path.startswith(f"{o.path}/")), None)
        ) is not None:
            raise UnsupportedError(
                f"the list of experts {one.path!r} is in an expert of {outer.path!r}; only one of "
                f"them can be split over {axis!r}: leave the other out of experts"
            )
        for index, expert in enumerate(modules := one.modules(model)):
            name = f"{one.path}/{index}"
            others = nnx.state(expert, nnx.Not(nnx.Param))
            if found := [path for path, _ in leaves_with_paths(nnx.to_pure_dict(others))]:
                raise UnsupportedError(
                    f"the expert {name!r} has {found[0]!r}, which is no parameter: statistics and "
                    f"random streams of experts cannot lie with them. {STACK}"
                )
            if _form(expert) != _form(modules[0]):
                raise UnsupportedError(
                    f"the experts {one.path}/0 and {name} have parameters of other names, shapes "
                    f"or dtypes, and those of a list split over {axis!r} must be alike. {STACK}"
                )
            if (twice := next((p for p in shared if is_inside(p, name)), None)) is not None:
                raise UnsupportedError(
                    f"{twice!r} is an expert's and has another place in the model, where other "
                    f"ranks would need it. {STACK}"
                )


def _form(expert: nnx.Module) -> list[Any]:
    state = leaves_with_paths(nnx.to_pure_dict(nnx.state(expert, nnx.Param)))
    return [(path, leaf.shape, leaf.dtype) for path, leaf in state]


def mixed(
    run: Callable[[Callable[[nnx.Module], None]], Any],
    lists: Sequence[ExpertList],
    params: Sequence[Path],
) -> Iterator[tuple[ExpertList, str | None]]:
    """Which lists of a model hold experts: all are called on the same, and their results added up.

    Args:
        run: (changes a model) -> the jaxpr of the model's program, its parameters first.
        lists: those in question.
        params: the paths of the parameters.

    Yields:
        Each list, and what its experts are not; None where they are.
    """
    calls = Calls()

    def mark(model: nnx.Module) -> None:
        for one in lists:
            mark_experts(one.modules(model), calls, one.path)

    jaxpr = run(mark)
    read = list(read_outside_units(jaxpr, params, calls.is_one))
    for one in lists:
        if (path := next((path for path in read if is_inside(path, one.path)), None)) is not None:
            yield one, f"{path!r} is read elsewhere than in a call of the expert"
            continue
        try:
            found = list(mixtures_in(jaxpr, calls, one.path))
        except UnsupportedError as error:
            yield one, str(error)
            continue
        yield one, None if found else f"the list {one.path!r} is never called"


@dataclasses.dataclass(frozen=True)
class OwnRow:
    """Calls an expert whose parameters are rows, one for each rank, with the row of this rank."""

    def __call__(self, call: Any, expert: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs it; an expert of which there is no row runs on zeros, for the form of the result."""
        for _, variable in nnx.iter_graph(expert):
            if isinstance(variable, nnx.Param):
                rows = variable.get_value()
                zeros = lambda rows=rows: jnp.zeros(rows.shape[1:], rows.dtype)
                variable.set_value(rows[0] if rows.shape[0] else zeros())
        return call(expert, *args, **kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class ListedExperts:
    """A model's lists of experts, computed where their weights lie.

    Args:
        layout: where activations lie.
        axis: the mesh axis that splits the experts.
        lists: of the model.
        calls: notes the calls of their experts.
    """

    layout: Layout
    axis: str
    lists: tuple[ExpertList, ...]
    calls: Calls = dataclasses.field(default_factory=Calls)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.layout.mesh.shape[self.axis]

    def mark(self, model: nnx.Module) -> None:
        """Makes the calls of the experts visible, in place.

        Args:
            model: merged inside a trace; the parameters of the first experts of each list are rows
                of those that ranks have, and those of the others are empty.
        """
        for one in self.lists:
            experts = one.modules(model)
            for expert in experts:
                wrap_calls(expert, {"__call__": OwnRow()})
            mark_experts(experts, self.calls)

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a function whose program is rewritten; traced once more here."""
        return Mixtures({}, self._hidden, self.calls, self.run).of(function)

    def _hidden(self, equation: Any) -> None:
        raise UnsupportedError(
            f"experts of a list are called within {equation.primitive.name!r}, a function with a "
            f"derivative of its own, where they cannot be split over {self.axis!r}. {STACK}"
        )

    def run(self, mixture: Mixture, known: Known) -> Any:
        """What becomes of a mixture, with the values known so far."""
        own = range(mixture.count // self.size)
        weights = [mixture.weights(known, index) for index in own]
        arguments, sources = mixture.arguments(known), mixture.sources(known)
        tokens = next((x.shape[0] for x in arguments if jnp.ndim(x) > 1), 0)
        split = PartitionSpec(self.axis)

        def local(rank: Array, weights: Any, arguments: Any, sources: Any) -> Array:
            rank, arguments, sources = jax.tree.map(lambda x: x[0], (rank, arguments, sources))
            made = [mixture.entries[i](*weights[i], *arguments) for i in own]
            # A result stands in the place of the same one of all ranks, as zero where it is not
            # of the expert that has the place.
            here = lambda n: jnp.where(n // len(own) == rank, made[n % len(own)], 0)
            part = mixture.linear(sources, [here(n) for n in range(mixture.count)])
            return part[None]

        # The other axes stay with the compiler, for which the program is one of all its ranks.
        each = jax.shard_map(
            local,
            mesh=self.layout.mesh,
            axis_names={self.axis},
            in_specs=split,
            out_specs=split,
            check_vma=False,
        )
        # What is read twice, as the tokens may be, travels once.
        found = {id(x): self._everywhere(x, tokens) for x in (*arguments, *sources)}
        enter = lambda values: [found[id(x)] for x in values]
        parts = each(jnp.arange(self.size), weights, enter(arguments), enter(sources))
        total = self._summed(parts, tokens)
        constant = mixture.constant(known)
        return total if constant is None else constant + total

    def _specs(self, shape: tuple[int, ...], tokens: int) -> tuple[Any, Any] | None:
        """Where the dims of an array of tokens lie, and where they do but for the axis; or None."""
        batch, sequence = self.layout.batch, self.layout.sequence
        is_split = len(shape) > 0 and shape[0] == tokens and batch[-1:] == (self.axis,)
        if not is_split or tokens % self.layout.size(batch):
            return None
        fits = len(shape) > 2 and sequence and shape[1] % self.layout.size(sequence) == 0
        more = (sequence,) if fits else ()
        return PartitionSpec(batch, *more), PartitionSpec(batch[:-1] or None, *more)

    def _everywhere(self, x: Any, tokens: int) -> Array:
        """An array for each rank of the axis: that of all of them."""
        x = jnp.asarray(x)
        if (specs := self._specs(x.shape, tokens)) is None:
            place = NamedSharding(self.layout.mesh, PartitionSpec(self.axis))
            return jax.lax.with_sharding_constraint(
                jnp.broadcast_to(x, (self.size, *x.shape)), place
            )
        own, others = specs
        gather = lambda x: gathered(x, self.axis, 0)[None]
        return self.layout.mapped(gather, (own,), PartitionSpec(self.axis, *others))(x)

    def _summed(self, parts: Array, tokens: int) -> Array:
        """The sum of what the ranks of the axis have, each with its own tokens."""
        if (specs := self._specs(parts.shape[1:], tokens)) is None:
            return jnp.sum(parts, axis=0)
        own, others = specs
        scatter = lambda part: sum_scatter(part[0], self.axis, 0)
        return self.layout.mapped(scatter, (PartitionSpec(self.axis, *others),), own)(parts)
