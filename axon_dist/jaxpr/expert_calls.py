"""Calls of modules that a model keeps in a list, made visible: which stands for which of them.

A model that has experts in a list calls each of them by itself. Marked, every call is one equation
of the traced program that says which expert of how many it is, and can be run again, on other
values, where others of the program's equations run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Literal

from ..core.compat import inner_programs
from ..core.errors import UnsupportedError
from ..core.modules import wrap_calls
from ..core.typing import Path
from .affine import Meeting, find_meeting
from .rewrite import Rewriting
from .units import AsUnit, Call, Structure, run_call
from .walk import Known, Run, same_params

NAME = re.compile(r"axon_expert_(\d+)_of_(\d+)_call_(\d+)")
"""The name of the equation of a call: which expert, of how many, and which entry of `Calls`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """What it takes to run a call again.

    Args:
        module: the structure of the expert.
        how: all of the call that is no array.
        form: the structure of the operands.
        path: of the list; "" where calls of several lists are to be alike.
    """

    module: Structure
    how: Call
    form: Any
    path: Path

    def __call__(self, *operands: Any) -> Any:
        """What the expert returns, of the operands of the equation."""
        params, rest, given = jax.tree.unflatten(self.form, operands)
        output, _, _ = run_call(self.module.graphdef, self.how, params, rest, given)
        return output

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many operands are parameters, are other state, and are arguments."""
        params, rest, given = jax.tree.unflatten(self.form, range(self.form.num_leaves))
        return len(jax.tree.leaves(params)), len(jax.tree.leaves(rest)), len(jax.tree.leaves(given))


@dataclasses.dataclass(frozen=True, eq=False)
class Calls:
    """The calls of experts that some programs have, each kind once.

    Args:
        entries: in the order in which they were first met.
    """

    entries: list[Entry] = dataclasses.field(default_factory=list)

    def number(self, module: Structure, how: Call, form: Any, path: Path) -> int:
        """The number of an entry, which is new or is known."""
        for number, entry in enumerate(self.entries):
            same = entry.form == form and entry.path == path
            if same and entry.module == module and entry.how == how:
                return number
        self.entries.append(Entry(module, how, form, path))
        return len(self.entries) - 1

    def is_one(self, equation: Any) -> bool:
        """Whether an equation is a marked call."""
        name = equation.params.get("name")
        return isinstance(name, str) and NAME.fullmatch(name) is not None

    def of(self, jaxpr: Any, path: Path = "") -> list[Mixture]:
        """The mixtures of a program, in order, without those of the programs that it runs.

        Args:
            jaxpr: an open jaxpr.
            path: of the list whose mixtures they are, as it was marked.

        Raises:
            UnsupportedError: when experts are called otherwise than each once, with the same
                arguments, for results that are added up.
        """
        found: list[Mixture] = []
        open_: dict[int, int] = {}
        for position, equation in enumerate(jaxpr.eqns):
            if not self.is_one(equation):
                continue
            match: Any = NAME.fullmatch(equation.params["name"])
            index, count, number = map(int, match.groups())
            entry = self.entries[number]
            if entry.path != path:
                continue
            if index in open_:
                raise UnsupportedError(
                    f"{_named(entry)} calls expert {index} again before all {count} were called"
                )
            open_[index] = position
            if len(open_) == count:
                found.append(self._mixture(jaxpr, open_))
                open_ = {}
        if open_:
            entry = self._entry(jaxpr, next(iter(open_.values())))
            raise UnsupportedError(
                f"{_named(entry)} calls only the experts {', '.join(map(str, sorted(open_)))}"
            )
        return found

    def _entry(self, jaxpr: Any, position: int) -> Entry:
        match: Any = NAME.fullmatch(jaxpr.eqns[position].params["name"])
        return self.entries[int(match.group(3))]

    def _mixture(self, jaxpr: Any, positions: dict[int, int]) -> Mixture:
        of_index = [positions[index] for index in sorted(positions)]
        entries = [self._entry(jaxpr, position) for position in of_index]
        who, (params, rest, _) = _named(entries[0]), entries[0].counts
        if rest:
            raise UnsupportedError(f"{who} calls experts that have state beside parameters")
        calls = [jaxpr.eqns[position] for position in of_index]
        if any(len(call.outvars) != 1 for call in calls):
            raise UnsupportedError(f"{who} calls experts that return more than one array")
        first = _inputs(jaxpr, calls[0].invars[params:])
        for index, call in enumerate(calls):
            if not _same(first, _inputs(jaxpr, call.invars[params:])):
                raise UnsupportedError(f"{who} calls expert {index} with other arguments")
        try:
            meeting = find_meeting(jaxpr, sorted(of_index))
        except UnsupportedError as error:
            raise UnsupportedError(f"{who} calls experts whose {error}") from None
        return Mixture(jaxpr, tuple(entries), tuple(of_index), meeting)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """One use of all experts of a list in a program.

    Args:
        jaxpr: the program.
        entries: of the experts, in the order of the list.
        calls: the positions of their equations, likewise.
        meeting: where their results meet.
    """

    jaxpr: Any
    entries: tuple[Entry, ...]
    calls: tuple[int, ...]
    meeting: Meeting

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self.entries)

    def weights(self, known: Known, index: int) -> list[Any]:
        """The operands that are parameters of an expert."""
        operands = self.jaxpr.eqns[self.calls[index]].invars
        return known.read(operands[: self.entries[index].counts[0]])

    def arguments(self, known: Known) -> list[Any]:
        """The operands that all experts have in common."""
        return known.read(self.jaxpr.eqns[self.calls[0]].invars[self.entries[0].counts[0] :])

    def sources(self, known: Known) -> list[Any]:
        """What is read beside the results of the experts."""
        return known.read(self.meeting.sources)

    def constant(self, known: Known) -> Any:
        """The part of what becomes of the results that these do not move; None where it is zero."""
        return self.meeting.constant(self.jaxpr, known)

    def linear(self, sources: Sequence[Any], results: Sequence[Any]) -> Any:
        """The part that is linear in the results.

        Args:
            sources: as `sources` gives them.
            results: of the experts, in the order of the list.
        """
        of_call = dict(zip(self.calls, results, strict=True))
        values = [of_call[position] for position in self.meeting.calls]
        return self.meeting.linear(self.jaxpr, sources, values)

    @property
    def last(self) -> int:
        """The position of the last equation that it takes the place of."""
        return self.meeting.between[-1]

    @property
    def equations(self) -> frozenset[int]:
        """The positions of the equations that it takes the place of."""
        return frozenset((*self.calls, *self.meeting.between))


@dataclasses.dataclass(frozen=True, eq=False)
class Mixtures(Rewriting):
    """Computes mixtures in another way, wherever they stand in a program.

    Args:
        calls: of their experts.
        compute: (mixture, values known so far) -> what becomes of its results.
    """

    calls: Calls
    compute: Callable[[Mixture, Known], Any]

    def replaces(self, equation: Any) -> bool:
        """Whether an equation is the call of an expert."""
        return self.calls.is_one(equation)

    def run(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], one: Run) -> list[Any]:
        """Runs a program; what a mixture takes the place of is run where the last of it stands."""
        mixtures = {mixture.last: mixture for mixture in self.calls.of(jaxpr)}
        replaced = {position for mixture in mixtures.values() for position in mixture.equations}
        known = Known(zip(jaxpr.constvars, consts, strict=True))
        known.write(jaxpr.invars, values)
        for position, equation in enumerate(jaxpr.eqns):
            if position in mixtures:
                mixture = mixtures[position]
                known[mixture.meeting.result] = self.compute(mixture, known)
            elif position not in replaced:
                known.write(equation.outvars, one(equation, known.read(equation.invars)))
        return known.read(jaxpr.outvars)


@dataclasses.dataclass(frozen=True)
class AsCall:
    """Runs a call as one equation that says which expert it is of.

    Args:
        calls: notes how it is run again.
        index: of the expert.
        count: of the experts of the list.
        path: of the list, where calls of several lists are not to be alike.
    """

    calls: Calls
    index: int
    count: int
    path: Path = ""

    def __call__(self, module: Structure, how: Call, params: Any, rest: Any, given: Any) -> Any:
        """As the function that `AsUnit` jits."""
        form = jax.tree.structure((params, rest, given))
        number = self.calls.number(module, how, form, self.path)

        def run(params: Any, rest: Any, given: Any) -> Any:
            return run_call(module.graphdef, how, params, rest, given)

        run.__name__ = f"axon_expert_{self.index}_of_{self.count}_call_{number}"
        return jax.jit(run)(params, rest, given)


@dataclasses.dataclass(frozen=True)
class AsExpert(AsUnit):
    """Runs the call of an expert as one equation; `run` is its `AsCall`."""

    def check(self, module: nnx.Module) -> None:
        """Never: the parameters of an expert may be rows, of which its call takes one."""


def mark_experts(experts: Sequence[nnx.Module], calls: Calls, path: Path = "") -> None:
    """Makes the calls of the modules of a list equations of the traced program, in place.

    Args:
        experts: of one list of a model merged inside a trace.
        calls: notes how they are run again.
        path: of the list, for messages; "" where calls of several lists are to be alike.
    """
    for index, expert in enumerate(experts):
        how = AsExpert(AsCall(calls, index, len(experts), path), None)
        wrap_calls(expert, {"__call__": how})


def mixtures_in(jaxpr: Any, calls: Calls, path: Path) -> Iterator[Mixture]:
    """The mixtures of a list in a program and in all programs that it runs.

    Args:
        jaxpr: an open jaxpr.
        calls: of the experts.
        path: of the list.

    Raises:
        UnsupportedError: as `Calls.of`, and when experts of a mixture run different programs.
    """
    for mixture in calls.of(jaxpr, path):
        programs = [jaxpr.eqns[position].params for position in mixture.calls]
        for index, other in enumerate(programs):
            if not same_params({"": programs[0]["jaxpr"]}, {"": other["jaxpr"]}):
                raise UnsupportedError(
                    f"{_named(mixture.entries[0])} has experts 0 and {index}, which compute "
                    "different things"
                )
        yield mixture
    for equation in jaxpr.eqns:
        for inner in inner_programs(equation):
            yield from mixtures_in(inner, calls, path)


def _named(entry: Entry) -> str:
    return f"the list {entry.path!r}" if entry.path else "a list of experts"


def _inputs(jaxpr: Any, atoms: Sequence[Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    """What operands are made of, where that is another dtype or form of the same array."""
    made = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    return [_origin(made, atom) for atom in atoms]


def _origin(made: dict[Any, Any], atom: Any) -> tuple[Any, tuple[Any, ...]]:
    way: list[Any] = []
    while not isinstance(atom, Literal) and (equation := made.get(atom)) is not None:
        if equation.primitive.name not in ("convert_element_type", "reshape", "stop_gradient"):
            break
        way.append(equation)
        atom = equation.invars[0]
    return atom, tuple(way)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        a is b
        and len(mine) == len(theirs)
        and all(
            x.primitive is y.primitive and same_params(x.params, y.params)
            for x, y in zip(mine, theirs, strict=True)
        )
        for (a, mine), (b, theirs) in zip(one, other, strict=True)
    )
