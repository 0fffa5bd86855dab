"""The ledger of a program's collectives, with totals by kind, by mesh axis and by exposure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias, get_args

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from ..core.errors import ConfigError, MeshError, did_you_mean
from ..core.typing import JsonDict
from ..core.words import byte_size

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""The collectives of HLO."""

Exposure: TypeAlias = Literal["hidden", "light", "exposed"]
"""How much of a transfer's time compute covers: all of it, a part, or none."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: its bytes, count and devices, and whether compute hides it.

    Args:
        name: the instruction's name in the HLO text.
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `ragged-all-to-all`,
            `collective-permute` or `collective-broadcast`.
        dtypes: XLA's names of the distinct element types sent.
        num_arrays: arrays in it; more than one if the compiler combined several.
        bytes_in: bytes of its operands on one device.
        bytes_out: bytes of its results on one device.
        group_size: devices that take part together; 2 for a collective-permute.
        wire_bytes: bytes that one device sends in one execution, by the ring algorithm.
        count: executions per step: the product of the trip counts of the loops around it.
        unknown_trip: whether a loop around it has a data-dependent length and was counted once.
        in_conditional: whether it is reached through a branch of a conditional.
        axes: the mesh axes that its groups span; None if no set of axes matches.
        is_async: whether it is started and awaited at different places of the schedule.
        exposure: `exposed` if it is synchronous, or if the compute scheduled before it is awaited
            hides almost none of it; `light` if that compute takes less time than the transfer;
            `hidden` otherwise.
        seconds: seconds of one execution without other traffic on the links; None if no rates are
            known.
        waited: exposed seconds of one execution, while the compute units are idle; None if no rates
            are known.
        op_name: the traced operation it comes from, if the compiler kept it.
        source: `file.py:line` of the user's program, if the compiler kept it.
        is_slow: whether it leaves a node: it spans an axis of `SLOW_AXES`, or devices of several
            nodes according to the table of chips.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...]
    num_arrays: int
    bytes_in: int
    bytes_out: int
    group_size: int
    wire_bytes: int
    count: int
    unknown_trip: bool
    in_conditional: bool
    axes: tuple[str, ...] | None
    is_async: bool
    exposure: Exposure
    seconds: float | None
    waited: float | None
    op_name: str
    source: str
    is_slow: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends for it in one step."""
        return self.wire_bytes * self.count

    @property
    def axis(self) -> str:
        """Its axes as one label, such as `fsdp`, `dp,tp` or `none`; `?` if no axes match."""
        if self.axes is None:
            return "?"
        return ",".join(self.axes) or "none"


def ring_bytes(kind: str, bytes_in: int, bytes_out: int, group_size: int) -> int:
    """Returns the bytes that each device sends if the collective runs as a ring.

    With n devices an all-gather sends (n-1)/n of its result, a reduce-scatter and an all-to-all
    (n-1)/n of their operand, and an all-reduce, being a reduce-scatter and an all-gather, twice
    that (Patarasuk and Yuan, 2009). No algorithm sends less. A ragged all-to-all counts as one that
    sends all rows of its operand, evenly: how many it really sends depends on the data.

    Args:
        kind: the kind of collective, as in `Collective`.
        bytes_in: bytes of the operands on one device.
        bytes_out: bytes of the results on one device.
        group_size: the number of devices, n.

    Returns:
        The bytes, rounded down.

    Example:
        >>> [ring_bytes(kind, 800, 800, 8) for kind in ("all-reduce", "collective-permute")]
        [1400, 800]
        >>> ring_bytes("all-gather", 100, 800, 8), ring_bytes("reduce-scatter", 800, 100, 8)
        (700, 700)
    """
    if group_size < 2:
        return 0
    if kind == "collective-permute":
        return bytes_in
    full_bytes = bytes_out if kind == "all-gather" else bytes_in
    passes = 2 if kind == "all-reduce" else 1
    return passes * full_bytes * (group_size - 1) // group_size


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Every collective of one step, on one device.

    Args:
        rows: the collectives, in the order of the program.
        mesh_axes: the axes of the mesh the program was compiled for; empty without a mesh.
        step_seconds: the time of the program at the rates of the machine, including exposed
            transfers; 0 if no rates are known.

    Example:
        >>> ledger = Ledger((), mesh_axes=("dp",))
        >>> ledger.total_wire_bytes(kind="all-reduce", axis="dp")
        0
    """

    rows: tuple[Collective, ...]
    mesh_axes: tuple[str, ...] = ()
    step_seconds: float = 0.0

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, kind: str | None = None, axis: str | tuple[str, ...] | None = None) -> Ledger:
        """Returns the rows of one kind, over one axis, or both.

        Args:
            kind: one of `KINDS`, or None for all.
            axis: a mesh axis, a tuple of axes that a collective spans together, or None for all.

        Raises:
            ConfigError: if there is no such kind of collective.
            MeshError: if the mesh has no such axis, or the ledger was read without a mesh.
        """
        if kind is not None and kind not in KINDS:
            raise ConfigError(f"no collective is called {kind!r}.{did_you_mean(kind, KINDS)}")
        axes = (axis,) if isinstance(axis, str) else axis
        for name in axes or ():
            if name not in self.mesh_axes:
                raise MeshError(self._no_axis(name))
        rows = (
            row
            for row in self.rows
            if (kind is None or row.kind == kind)
            and (axes is None or (row.axes is not None and set(row.axes) == set(axes)))
        )
        return dataclasses.replace(self, rows=tuple(rows))

    def total_wire_bytes(
        self, kind: str | None = None, axis: str | tuple[str, ...] | None = None
    ) -> int:
        """Returns the bytes one device sends per step, with trip counts; arguments as `select`."""
        return sum(row.total_bytes for row in self.select(kind, axis))

    def exposed_bytes(self) -> int:
        """Returns the bytes per step of transfers with no compute to hide them."""
        return self.by_exposure().get("exposed", 0)

    def light_bytes(self) -> int:
        """Returns the bytes per step of transfers that compute hides in part."""
        return self.by_exposure().get("light", 0)

    def seconds(self, exposure: Exposure | None = None) -> float:
        """Returns the transfer time per step at the machine's rates, without contention.

        Args:
            exposure: count only transfers of this exposure; None for all.

        Returns:
            The seconds; 0 without a machine.
        """
        rows = (row for row in self.rows if exposure in (None, row.exposure))
        return sum((row.seconds or 0.0) * row.count for row in rows)

    def waited(self, exposure: Exposure | None = None) -> float:
        """Returns the time per step that the compute units wait for transfers; see `seconds`."""
        rows = (row for row in self.rows if exposure in (None, row.exposure))
        return sum((row.waited or 0.0) * row.count for row in rows)

    def waited_share(self) -> float:
        """Returns the share of a step spent waiting for transfers; 0 without rates."""
        return self.waited() / self.step_seconds if self.step_seconds else 0.0

    def by_kind(self) -> dict[str, int]:
        """Returns the wire bytes per step of each kind that occurs."""
        return self._totals(lambda row: row.kind)

    def by_axis(self) -> dict[str, int]:
        """Returns the wire bytes per step of each mesh axis, or comma-joined axes, that occurs."""
        return self._totals(lambda row: row.axis)

    def by_link(self) -> dict[str, int]:
        """Returns the wire bytes per step of `fast` links (in a node) and `slow` ones (between)."""
        return self._totals(lambda row: "slow" if row.is_slow else "fast")

    def by_exposure(self) -> dict[str, int]:
        """Returns the wire bytes per step by exposure: hidden, `light` (in part) and exposed."""
        return self._totals(lambda row: row.exposure)

    def num_executions(self) -> int:
        """Returns how many collectives one step executes, with trip counts."""
        return sum(row.count for row in self.rows)

    def lint(self) -> list[str]:
        """Lists collectives that may hang or are counted wrong.

        A collective-permute names its pairs for all devices at once. If devices take different
        branches, some never send, and the program waits for them forever.

        Returns:
            One sentence per finding.
        """
        findings = []
        for row in self.rows:
            name = f"{row.name} ({row.source or row.op_name or 'no source known'})"
            if row.kind == "collective-permute" and row.in_conditional:
                findings.append(
                    f"{name} is a collective-permute inside a conditional: it hangs when devices "
                    "take different branches; move it out of the branch or mask with jnp.where"
                )
            if row.unknown_trip:
                findings.append(
                    f"{name} is inside a loop whose trip count only the data decide: it is "
                    "counted once; use lax.scan or fori_loop with static bounds to have it counted"
                )
        return findings

    def to_rows(self) -> list[JsonDict]:
        """Returns the rows as plain dictionaries, ready for JSON."""
        return [
            {**dataclasses.asdict(row), "axis": row.axis, "total_bytes": row.total_bytes}
            for row in self.rows
        ]

    def table(self, exposure: bool = True, narrow: bool = False) -> Table:
        """Returns the ledger as a table for a terminal: equal collectives grouped, largest first.

        Args:
            exposure: whether to show how much of each is hidden; on CPUs, which have no links, this
                has no meaning.
            narrow: whether to fit 60 columns: the source is below the kind, and the bytes of each
                are left out.
        """
        title = "collectives per device and step"
        tight = (0, 1, 0, 0)
        table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=tight)
        names = ["kind", "axis", "dtype", "count", "each", "total"]
        names += ["covered"] * exposure + ["source"]
        if narrow:
            names = [name for name in names if name not in ("dtype", "each", "source")]
        for name in names:
            justify: Literal["right", "left"] = "right" if name in ("each", "total") else "left"
            is_source = name == "source"
            overflow: Literal["fold", "ellipsis"] = "fold" if is_source else "ellipsis"
            table.add_column(name, justify=justify, no_wrap=not is_source, overflow=overflow)

        def add(**cells: str) -> None:
            table.add_row(*(cells.get(name, "") for name in names))

        for (*labels, each, coverage, source), rows in self._grouped():
            kind, axis, dtypes, flags = labels
            count = rows.num_executions()
            add(
                kind=f"{kind} {dtypes}\n{source}" if narrow else kind,
                axis=axis,
                dtype=dtypes,
                count=f"{count}{flags}",
                each=byte_size(each),
                total=byte_size(each * count),
                covered=coverage if coverage == "hidden" else f"{coverage} {rows._times(None)}",
                source=source,
            )
        table.add_section()
        totals = self.by_exposure() if exposure else {}
        for name in (each for each in get_args(Exposure) if each in totals):
            add(kind=name, total=byte_size(totals[name]), covered=self._times(name))
        add(kind="total", total=byte_size(self.total_wire_bytes()), covered=self._times(None))
        return table

    def _times(self, exposure: Exposure | None) -> str:
        """Formats how many milliseconds of the transfers compute hides; "" without a machine."""
        total = self.seconds(exposure)
        waited = self.waited(exposure)
        return f"{_ms(max(total - waited, 0.0))} of {_ms(total)} ms" if total else ""

    def _grouped(self) -> list[tuple[tuple, Ledger]]:
        groups: dict[tuple, list[Collective]] = {}
        for row in self.rows:
            flags = ("+" if row.unknown_trip else "") + (" (branch)" if row.in_conditional else "")
            labels = (row.kind, row.axis, ",".join(row.dtypes), flags)
            groups.setdefault((*labels, row.wire_bytes, row.exposure, row.source), []).append(row)
        ledgers = [(key, dataclasses.replace(self, rows=tuple(x))) for key, x in groups.items()]
        return sorted(ledgers, key=lambda item: -item[1].total_wire_bytes())

    def _totals(self, label: Callable[[Collective], str]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[label(row)] += row.total_bytes
        return dict(totals)

    def _no_axis(self, name: str) -> str:
        if not self.mesh_axes:
            return f"axis {name!r} is not known: read the ledger with collectives(program, mesh)"
        return f"the mesh has no axis {name!r}.{did_you_mean(name, self.mesh_axes)}"


def as_text(shown: RenderableType) -> str:
    """Renders something with `rich` as plain text, for logs and errors."""
    console = Console(width=120, color_system=None)
    with console.capture() as text:
        console.print(shown)
    return text.get()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds >= 1e-4 else f"{seconds * 1e3:,.3f}"
