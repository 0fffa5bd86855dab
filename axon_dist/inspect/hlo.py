"""The collectives of a compiled program: the independent witness of what a strategy claims."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from ..mesh import SLOW_AXES
from ..mesh.chips import Hardware, machine_of
from ..mesh.replica_groups import permuted_axes, spanned_axes
from .computations import Visit, visits
from .ledger import Collective, Ledger
from .overlap import WireModel
from .parse import ProgramLike, as_module, origin


def collectives(
    program: ProgramLike,
    mesh: jax.sharding.Mesh | None = None,
    machine: Hardware | None = None,
) -> Ledger:
    """Lists the collectives that one step of a compiled program executes.

    Nothing the strategies declare enters: the rows are read from the optimised program that will
    run. On CPU XLA widens bf16 collectives to f32 (`AllReducePromotion`), so bytes there are those
    of the emulation; compile for the real target to see its bytes.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.
        mesh: the mesh it was compiled for; names the axes of every row.
        machine: the rates that decide whether a transfer is hidden; looked up from the mesh's
            devices unless given.

    Returns:
        A row for every collective and every way the control flow leads to it.

    Example:
        >>> ledger = collectives('''HloModule step, num_partitions=8
        ... ENTRY %main (x: f32[100]) -> f32[100] {
        ...   %x = f32[100]{0} parameter(0)
        ...   ROOT %sum = f32[100]{0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
        ... }''')
        >>> [(row.kind, row.group_size, row.wire_bytes) for row in ledger]
        [('all-reduce', 4, 600)]
    """
    module = as_module(program)
    machine = machine or machine_of(mesh)
    wires = WireModel(module, machine)
    rows = (row for visit in visits(module) for row in _rows(wires, visit, mesh))
    axes = mesh.axis_names if mesh is not None else ()
    return Ledger(tuple(rows), axes, wires.step_seconds(module.entry))


def _rows(wires: WireModel, visit: Visit, mesh: jax.sharding.Mesh | None) -> Iterator[Collective]:
    sent, judged = wires.sent(visit.computation), wires.judged(visit.computation)
    for one, judgement in zip(sent, judged, strict=True):
        instruction, kind = one.transfer.instruction, one.transfer.kind
        operands = one.transfer.owner.operand_shapes(instruction)
        find_axes = permuted_axes if kind == "collective-permute" else spanned_axes
        op_name, source = origin(instruction.attributes, wires.module.sources)
        axes = find_axes(one.groups, mesh)
        yield Collective(
            name=instruction.name,
            kind=kind,
            dtypes=tuple(sorted({shape.dtype for shape in operands})),
            num_arrays=len(operands),
            bytes_in=one.bytes_in,
            bytes_out=one.bytes_out,
            group_size=one.group_size,
            wire_bytes=one.wire_bytes,
            count=visit.count,
            unknown_trip=visit.unknown_trip,
            in_conditional=visit.in_conditional,
            axes=axes,
            is_async=one.transfer.is_async,
            exposure=judgement.exposure,
            seconds=judgement.seconds,
            waited=judgement.waited,
            op_name=op_name,
            source=source,
            is_slow=one.wire_bytes > 0
            and (not set(SLOW_AXES).isdisjoint(axes or ()) or wires.leaves_node(one)),
        )
