"""Where the time of a step goes, compared with the peak of its chip.

At the peak of its matrix units, a step would take only the time of its products at that rate.
`waterfall` attributes the rest of the measured step by kind and by source line. Nothing is
modelled: times are those of the trace, and products are counted in the compiled program.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from ..core.compat import RUN_TWICE
from ..core.errors import ConfigError, UnsupportedError
from ..core.typing import JsonDict
from ..core.words import duration, plural, si
from .calls import ATTENTION
from .flops import CostModel, flops, target_of
from .ledger import KINDS as COLLECTIVES
from .ledger import as_text
from .model_time import MOVES
from .parse import Computation, Instruction, Module, ProgramLike, as_module, origin
from .timeline import PRIORITY, Event, Spent, spent
from .transfers import collective_kind

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "products": "matrix products below the peak",
        "attention": "attention",
        "recomputed": "computed again for the backward pass",
        "kernels": "memory-bound kernels",
        "copies": "copies and zeroing",
        "wire": "waiting for collectives",
        "gaps": "gaps between kernels",
        "host": "waiting for the host",
    }
)
"""The kinds of lost time, with their labels in tables, in table order."""

AGREED = 0.01
"""The share of the step by which the rows of a waterfall may miss it."""

_LOOPS = frozenset({"while", "conditional"})
_CONTAINERS = frozenset({*_LOOPS, "call", "async-start", "call-start"})
_RECOMPUTED = ("rematted_computation", RUN_TWICE)
"""Parts of the names of operations that count as recomputed: `jax.checkpoint` adds the first, and a
pipeline, whose backward pass runs a stage again, the other."""
_KERNELS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "wire": re.compile(r"nccl|nvshmem", re.IGNORECASE),
        "attention": re.compile(r"fmha|flash|splash|sdpa", re.IGNORECASE),
        "copies": re.compile(r"^mem(cpy|set)", re.IGNORECASE),
        "products": re.compile(r"gemm|cutlass|nvjet|cublas|xmma|matmul", re.IGNORECASE),
    }
)
"""The kinds of kernels that the trace attributes to no instruction, by their names."""


@dataclasses.dataclass(frozen=True)
class LostLine:
    """A line of the program, and the time that a step loses there.

    Args:
        source: `file.py:line`; "" if the compiler kept none.
        operation: the most expensive operation of that line, by its name in the HLO text.
        seconds: seconds lost per step.
        count: executions per step on one device, of all its operations of that kind.
    """

    source: str
    operation: str
    seconds: float
    count: float


@dataclasses.dataclass(frozen=True)
class LostTime:
    """One row of a waterfall.

    Args:
        kind: a key of `KINDS`.
        seconds: seconds lost per step, beyond the time of products at the peak.
        places: the lines where it is lost, largest first; their seconds add up to `seconds`.
        advice: the option that would recover some of it; "" if none is known.
    """

    kind: str
    seconds: float
    places: tuple[LostLine, ...] = ()
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Waterfall:
    """A breakdown of the time of a step; prints as a table whose percents add up to 100.

    Args:
        device: the kind of device.
        num_devices: how many devices were traced; all figures are the mean over them.
        num_steps: how many steps were measured.
        step_seconds: the seconds of one step.
        peak_flops: the peak matrix operations per second of a device.
        peak_source: the source of that number, in words.
        flops: matrix operations that a device executes in a step, without recomputation.
        useful_seconds: the time of these operations at the peak.
        losses: a row for each of `KINDS`.
        notes: further remarks, one sentence each.
    """

    device: str
    num_devices: int
    num_steps: int
    step_seconds: float
    peak_flops: float
    peak_source: str
    flops: float
    useful_seconds: float
    losses: tuple[LostTime, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless the rows are all there and add up to the step."""
        kinds = [loss.kind for loss in self.losses]
        if kinds != list(KINDS):
            raise ConfigError(f"a waterfall got rows {kinds}; it must have {list(KINDS)}")
        parts = [self.useful_seconds, *(loss.seconds for loss in self.losses)]
        if not all(math.isfinite(x) and x >= 0 for x in parts):
            raise ConfigError(f"a waterfall got seconds {parts}; they must be 0 or more")
        total = sum(parts)
        if not (self.step_seconds > 0 and abs(total / self.step_seconds - 1) <= AGREED):
            raise ConfigError(
                f"the rows of a waterfall add up to {total:.6g} s, and the step took "
                f"{self.step_seconds:.6g} s; they must agree within {AGREED:.0%}"
            )
        for loss in self.losses:
            own = sum(place.seconds for place in loss.places)
            if loss.places and abs(own - loss.seconds) > AGREED * self.step_seconds:
                raise ConfigError(
                    f"the lines of row {loss.kind!r} add up to {own:.6g} s, and the row is "
                    f"{loss.seconds:.6g} s; they must agree"
                )

    @property
    def utilization(self) -> float:
        """The share of the peak that the step reaches, without counting recomputation."""
        return self.useful_seconds / self.step_seconds

    def percent(self, seconds: float) -> float:
        """Returns a time as a percentage of the step."""
        return 100 * seconds / self.step_seconds

    def with_advice(self, advice: Mapping[str, str]) -> Waterfall:
        """Returns a copy with advice for some kinds of loss."""
        losses = (dataclasses.replace(x, advice=advice.get(x.kind, "")) for x in self.losses)
        return dataclasses.replace(self, losses=tuple(losses))

    def to_dict(self) -> JsonDict:
        """Returns the figures as plain values, in seconds and in percent."""
        plain = dataclasses.asdict(self)
        plain["utilization"] = self.utilization
        for row in plain["losses"]:
            row["percent"] = self.percent(row["seconds"])
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Waterfall:
        """Reads the result of `to_dict`.

        Raises:
            ConfigError: if `plain` is not such a result, or its rows do not add up.
        """
        try:
            losses = tuple(
                LostTime(
                    kind=row["kind"],
                    seconds=float(row["seconds"]),
                    places=tuple(LostLine(**place) for place in row["places"]),
                    advice=str(row["advice"]),
                )
                for row in plain["losses"]
            )
            fields = {field.name: plain[field.name] for field in dataclasses.fields(Waterfall)}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is not a waterfall ({type(error).__name__}: {error}); write one with "
                "axon profile"
            ) from error
        fields["losses"] = losses
        fields["notes"] = tuple(fields["notes"])
        return Waterfall(**fields)

    def rows(self) -> list[tuple[str, float, float, str, str]]:
        """Returns a row for each kind that took time: label, percent, seconds, lines, advice."""
        useful = ("products at the peak", self.percent(self.useful_seconds))
        found: list[tuple[str, float, float, str, str]] = [(*useful, self.useful_seconds, "", "")]
        for loss in self.losses:
            if loss.seconds > 0:
                percent = self.percent(loss.seconds)
                lines = ", ".join(
                    f"{place.source or place.operation} {self.percent(place.seconds):.1f}%"
                    for place in loss.places[:_LINES]
                )
                found.append((KINDS[loss.kind], percent, loss.seconds, lines, loss.advice))
        return found

    def summary(self) -> list[str]:
        """Returns the step and the peak in words, then the notes."""
        steps = plural(self.num_steps, "step")
        return [
            f"{duration(self.step_seconds)} a step, of {steps} on "
            f"{plural(self.num_devices, 'device')} ({self.device}); "
            f"{si(self.flops)} matrix FLOPs a step and device, recomputed ones not counted",
            f"peak: {si(self.peak_flops)} FLOP/s, {self.peak_source}",
            *self.notes,
        ]

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title="from the peak to the step")
        table.add_column("the step's time")
        table.add_column("%", justify="right", no_wrap=True)
        table.add_column("ms", justify="right", no_wrap=True)
        is_wide = options.max_width >= _WIDE
        if is_wide:
            table.add_column("lines", overflow="fold")
            table.add_column("what gives it back", overflow="fold")
        for label, percent, seconds, *texts in self.rows():
            cells = texts if is_wide else ()
            table.add_row(label, f"{percent:.1f}", _milliseconds(seconds), *cells)
        table.add_section()
        total = self.useful_seconds + sum(loss.seconds for loss in self.losses)
        table.add_row("step", f"{self.percent(total):.1f}", _milliseconds(self.step_seconds))
        yield table
        if not is_wide:
            for label, _, _, *texts in self.rows():
                if any(texts):
                    yield f"{label}: {'; '.join(filter(None, texts))}"
        yield from self.summary()


def _milliseconds(seconds: float) -> str:
    """Three digits, or all that are before the point: 1,234 instead of 1.23e+03."""
    return f"{1e3 * seconds:.3g}" if seconds < 0.9995 else f"{1e3 * seconds:,.0f}"


_LINES = 3
"""How many lines of a row are shown."""

_WIDE = 90
"""On a narrower terminal the texts of the rows follow the table, which has numbers alone."""


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An operation of the program: its kind, its source line, and its FLOPs."""

    kind: str
    source: str
    flops: int
    is_container: bool = False


def waterfall(
    events: Sequence[Event],
    program: ProgramLike,
    num_runs: int,
    peak_flops: float,
    peak_source: str,
    device: str = "",
) -> Waterfall:
    """Adds up a trace of some steps to one step.

    Args:
        events: the result of `read_trace`, of `num_runs` consecutive steps.
        program: the compiled step, its text, or a `Module`.
        num_runs: the number of traced steps; the first and the last are not measured.
        peak_flops: the peak matrix operations per second of a device.
        peak_source: the source of that number, in words.
        device: the kind of device.

    Returns:
        The waterfall.

    Raises:
        ConfigError: if the peak is not positive.
        UnsupportedError: if fewer than three steps can be distinguished.
    """
    if not peak_flops > 0:
        raise ConfigError(f"got peak_flops={peak_flops}; it must be FLOP/s, above 0")
    module = as_module(program)
    known = _operations(module)
    own = [_own(event, module, known) for event in events]
    kinds = {event.name: _kind(event.name, known) for event in own}

    def priority(event: Event) -> int:
        operation = known.get(event.name)
        is_container = operation is not None and operation.is_container
        return PRIORITY["gaps"] + 1 if is_container else PRIORITY[kinds[event.name]]

    if not any(event.name in known for event in own):
        raise UnsupportedError(
            f"no operation of the trace belongs to the compiled step ({len(known)} instructions of "
            f"{module.name!r}); pass the trace and the program of the same step",
            code="other-program",
        )
    time = spent(own, num_runs, priority)
    return _broken_down(time, known, kinds, module, peak_flops, peak_source, device)


def _own(event: Event, module: Module, known: Mapping[str, _Operation]) -> Event:
    """Renames an event to its instruction, or prefixes it with the name of another program."""
    if event.program and event.program != module.name:
        return dataclasses.replace(event, name=f"{event.program}/{event.name}")
    if event.name not in known and (name := _plain(event.name)) in known:
        # A GPU kernel has the name of its fusion, without dots and dashes.
        return dataclasses.replace(event, name=name)
    return event


def _plain(name: str) -> str:
    return "kernel:" + re.sub(r"\W", "_", name)


def _operations(module: Module) -> dict[str, _Operation]:
    costs = CostModel(module)
    known: dict[str, _Operation] = {}
    for computation in module.computations.values():
        is_again = _only_recomputes(module, computation, costs)
        for instruction in computation.instructions:
            kind = _kind_of(module, computation, instruction, costs, is_again)
            is_loop = instruction.opcode in _LOOPS
            known[instruction.name] = _Operation(
                kind=kind,
                source=_source(module, instruction),
                flops=0 if is_loop else costs.instruction(computation, instruction).high,
                is_container=instruction.opcode in _CONTAINERS,
            )
    return known | {_plain(name): operation for name, operation in known.items()}


def _source(module: Module, instruction: Instruction) -> str:
    """Returns the line of an instruction, or the first line found within its fusion."""
    _, source = origin(instruction.attributes, module.own_lines)
    if source or instruction.opcode != "fusion":
        return source
    inner = (i for called in module.called(instruction) for i in called.instructions)
    found = (origin(i.attributes, module.own_lines)[1] for i in inner)
    return next(filter(None, found), "")


def _only_recomputes(module: Module, computation: Computation, costs: CostModel) -> bool:
    """Whether all products of a computation whose names the compiler kept are recomputed."""
    products = (i for i in computation.instructions if costs.instruction(computation, i).high)
    names = [origin(i.attributes, module.own_lines)[0] for i in products if i.opcode not in _LOOPS]
    return any(names) and all(_is_recomputed(name) for name in names if name)


def _is_recomputed(op_name: str) -> bool:
    return any(scope in op_name for scope in _RECOMPUTED)


def _kind_of(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    costs: CostModel,
    is_again: bool,
) -> str:
    """Returns the key of `KINDS` for the time of an instruction.

    Args:
        module: the program.
        computation: the computation that holds it.
        instruction: the instruction.
        costs: the costs of the program.
        is_again: whether it is recomputed if the compiler dropped its name, as XLA:CPU does when it
            rewrites a product over two batch dims.
    """
    if instruction.opcode in _LOOPS:
        return "gaps"
    called = module.called(instruction)
    inner = [i for one in called for i in one.instructions]
    if any(collective_kind(i) or _ends_transfer(i) for i in (instruction, *inner)):
        return "wire"
    op_name, _ = origin(instruction.attributes, module.own_lines)
    if _is_recomputed(op_name) or (is_again and not op_name):
        return "recomputed"
    kernel = target_of(instruction) if instruction.opcode == "custom-call" else ""
    file = _source(module, instruction).partition(":")[0]
    if ATTENTION.search(file) or any(ATTENTION.search(x) for x in (kernel, kernel and op_name)):
        return "attention"
    if costs.instruction(computation, instruction).high:
        return "products"
    moved = {i.opcode for i in inner} if instruction.opcode == "fusion" else {instruction.opcode}
    return "copies" if moved <= MOVES else "kernels"


def _ends_transfer(instruction: Instruction) -> bool:
    """Whether an instruction waits for a collective that another has started."""
    started = instruction.opcode.removesuffix("-done")
    if started == instruction.opcode:
        return False
    return started in ("send", "recv", *COLLECTIVES)


def _kind(name: str, known: Mapping[str, _Operation]) -> str:
    if name in known:
        return known[name].kind
    return next((kind for kind, pattern in _KERNELS.items() if pattern.search(name)), "kernels")


def _broken_down(
    time: Spent,
    known: Mapping[str, _Operation],
    kinds: Mapping[str, str],
    module: Module,
    peak_flops: float,
    peak_source: str,
    device: str,
) -> Waterfall:
    """Makes the waterfall from the time of every operation."""
    lost: dict[str, list[tuple[str, str, float, float]]] = {kind: [] for kind in KINDS}
    at_peak = _at_peak(time, known, kinds, module, peak_flops)
    useful = above = 0.0
    for name, seconds in time.by_name.items():
        kind = kinds[name]
        ideal = 0.0 if kind == "recomputed" else at_peak.get(name, 0.0)
        above += max(0.0, ideal - seconds)
        useful += min(ideal, seconds)
        rest = max(0.0, seconds - ideal)
        source = known[name].source if name in known else ""
        lost[kind].append((source, name, rest, time.counts.get(name, 0.0)))
    for name, seconds in time.gaps.items():
        source = known[name].source if name in known else ""
        lost["gaps"].append((source, f"before {name}", seconds, 0.0))
    if time.between > 0:
        lost["host"].append(("", "between two steps", time.between, 1.0))
    total = flops(module)
    notes = []
    if above > AGREED * time.step:
        notes.append(
            f"some products ran faster than the peak, by {duration(above)} a step: they count as "
            "at the peak"
        )
    if total.unknown_trip or total.opaque:
        notes.append("some work is not counted: loops or kernels whose length the text lacks")
    return Waterfall(
        device=device,
        num_devices=time.num_devices,
        num_steps=time.num_steps,
        step_seconds=time.step,
        peak_flops=peak_flops,
        peak_source=peak_source,
        flops=peak_flops * sum(at_peak[name] for name in at_peak if kinds[name] != "recomputed"),
        useful_seconds=useful,
        losses=tuple(_lost(kind, rows) for kind, rows in lost.items()),
        notes=tuple(notes),
    )


def _at_peak(
    time: Spent,
    known: Mapping[str, _Operation],
    kinds: Mapping[str, str],
    module: Module,
    peak_flops: float,
) -> dict[str, float]:
    """Returns the seconds that the products of each operation take at the peak."""
    done = {
        name: known[name].flops * time.counts.get(name, 0.0)
        for name in time.by_name
        if name in known and not known[name].is_container
    }
    # Products that the trace attributes to no instruction share the program's remaining FLOPs. If
    # the branches of a conditional differ, the program does not say which of them ran: only what
    # all of them need is certain, and `high` takes the costliest in every tick of a pipeline.
    remaining = max(0.0, flops(module).low - sum(done.values()))
    unnamed = {
        name: seconds
        for name, seconds in time.by_name.items()
        if name not in known and kinds[name] in ("products", "attention")
    }
    total = sum(unnamed.values())
    done |= {name: remaining * seconds / total for name, seconds in unnamed.items()}
    return {name: count / peak_flops for name, count in done.items()}


def _lost(kind: str, rows: Iterable[tuple[str, str, float, float]]) -> LostTime:
    """Groups the lost time of one kind by source line."""
    by_source: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for source, name, seconds, count in rows:
        if seconds > 0:
            by_source[source or name].append((name, seconds, count))
    places = []
    for place, parts in by_source.items():
        heaviest = max(parts, key=lambda part: part[1])[0]
        seconds = sum(part[1] for part in parts)
        count = sum(part[2] for part in parts)
        source = "" if place in (part[0] for part in parts) else place
        places.append(LostLine(source, heaviest, seconds, count))
    places.sort(key=lambda place: -place.seconds)
    return LostTime(kind, sum(place.seconds for place in places), tuple(places))
