"""The list of a program's collectives, with totals by kind, by mesh axis and by exposure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.table import Table

from ..core.errors import ConfigError, MeshError, did_you_mean
from ..core.words import byte_size
from ..hlo.transfers import KINDS
from .collective import Collective


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Every collective of one step, on one device.

    Args:
        rows: the collectives, in the order of the program.
        mesh_axes: the axes of the mesh the program was compiled for; empty without a mesh.

    Example:
        >>> ledger = Ledger((), mesh_axes=("dp",))
        >>> ledger.total_wire_bytes(kind="all-reduce", axis="dp")
        0
    """

    rows: tuple[Collective, ...]
    mesh_axes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, kind: str | None = None, axis: str | tuple[str, ...] | None = None) -> Ledger:
        """Returns the part of the ledger of one kind, over one axis, or both.

        Args:
            kind: one of `KINDS`, or None for all.
            axis: a mesh axis, a tuple of axes that a collective spans together, or None for all.

        Raises:
            ConfigError: no collective is called so.
            MeshError: the mesh has no such axis, or the ledger was read without a mesh.
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
        """Bytes that one device sends in a step, with trip counts; see `select` for arguments."""
        return sum(row.total_bytes for row in self.select(kind, axis))

    def exposed_bytes(self) -> int:
        """Bytes per step that nothing hides: synchronous, or awaited with no compute between."""
        return self.by_exposure().get("exposed", 0)

    def by_kind(self) -> dict[str, int]:
        """Wire bytes per step for each kind that occurs."""
        return self._totals(lambda row: row.kind)

    def by_axis(self) -> dict[str, int]:
        """Wire bytes per step for each mesh axis, or comma-joined axes, that occurs."""
        return self._totals(lambda row: row.axis)

    def by_exposure(self) -> dict[str, int]:
        """Wire bytes per step that are exposed, lightly covered and overlapped."""
        return self._totals(lambda row: row.exposure)

    def num_executions(self) -> int:
        """How many collectives one step executes, with trip counts."""
        return sum(row.count for row in self.rows)

    def lint(self) -> list[str]:
        """Says what in the program may hang or be counted wrong.

        A collective-permute names its pairs for all devices at once; when devices take different
        branches, some never arrive and the program waits for them without end.

        Returns:
            One sentence per finding.
        """
        findings = []
        for row in self.rows:
            where = f"{row.name} ({row.source or row.op_name or 'no source known'})"
            if row.kind == "collective-permute" and row.in_conditional:
                findings.append(
                    f"{where} is a collective-permute inside a conditional: it hangs when devices "
                    "take different branches; move it out of the branch or mask with jnp.where"
                )
            if row.unknown_trip:
                findings.append(
                    f"{where} is inside a loop whose trip count only the data decide: it is "
                    "counted once; use lax.scan or fori_loop with static bounds to have it counted"
                )
        return findings

    def to_rows(self) -> list[dict[str, Any]]:
        """The ledger as plain dictionaries, ready for JSON."""
        return [
            {**dataclasses.asdict(row), "axis": row.axis, "total_bytes": row.total_bytes}
            for row in self.rows
        ]

    def table(self, exposure: bool = True) -> Table:
        """The ledger as a table for a terminal, equal collectives joined, the heaviest first.

        Args:
            exposure: whether to tell what hides each; on CPUs, which send nothing, it says nothing.
        """
        table = Table(title="collectives per device and step", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("kind", "axis", "dtype", "count", "each", "total"):
            right = column in ("each", "total")
            table.add_column(column, justify="right" if right else "left", no_wrap=True)
        if exposure:
            table.add_column("hidden", no_wrap=True)
        table.add_column("source", overflow="fold")
        for (*labels, each, hidden, source), count in self._joined():
            kind, axis, dtypes, flags = labels
            sizes = (byte_size(each), byte_size(each * count))
            last = (hidden, source) if exposure else (source,)
            table.add_row(kind, axis, dtypes, f"{count}{flags}", *sizes, *last)
        table.add_section()
        for name, total in self.by_exposure().items() if exposure else ():
            table.add_row(name, "", "", "", "", byte_size(total))
        table.add_row("total", "", "", "", "", byte_size(self.total_wire_bytes()))
        return table

    def _joined(self) -> list[tuple[tuple, int]]:
        joined: Counter[tuple] = Counter()
        for row in self.rows:
            flags = ("+" if row.unknown_trip else "") + (" (branch)" if row.in_conditional else "")
            labels = (row.kind, row.axis, ",".join(row.dtypes), flags)
            joined[(*labels, row.wire_bytes, row.exposure, row.source)] += row.count
        return sorted(joined.items(), key=lambda item: -item[0][4] * item[1])

    def _totals(self, label: Callable[[Collective], str]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[label(row)] += row.total_bytes
        return dict(totals)

    def _no_axis(self, name: str) -> str:
        if not self.mesh_axes:
            return f"axis {name!r} cannot be told: read the ledger with collectives(program, mesh)"
        return f"the mesh has no axis {name!r}.{did_you_mean(name, self.mesh_axes)}"
