"""The collectives of a compiled program: the independent witness of what a strategy claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax

from ..hardware import Hardware, machine_of
from ..hlo.groups import Groups, permuted_axes, replica_groups, source_target_pairs, spanned_axes
from ..hlo.parse import Module, Program, as_module
from ..hlo.shapes import Shape, total_bytes
from ..hlo.sources import origin
from ..hlo.transfers import Transfer, transfers
from ..hlo.walk import Visit, visits
from .collective import Collective, ring_bytes
from .cost import CostModel
from .ledger import Ledger
from .overlap import Wire, exposures


def collectives(
    program: Program,
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
    costs = CostModel(module)
    machine = machine or machine_of(mesh)
    rows = (row for visit in visits(module) for row in _rows(costs, module, visit, mesh, machine))
    return Ledger(tuple(rows), mesh_axes=mesh.axis_names if mesh is not None else ())


def _rows(
    costs: CostModel,
    module: Module,
    visit: Visit,
    mesh: jax.sharding.Mesh | None,
    machine: Hardware | None,
) -> Iterator[Collective]:
    wires, rows = [], []
    for transfer in transfers(module, visit.computation):
        groups = _groups(module, transfer)
        row = _describe(module, visit, transfer, groups, mesh)
        seconds = machine.wire_seconds(row.wire_bytes, groups) if machine else 0.0
        wires.append(Wire(transfer, seconds))
        rows.append(row)
    judged = exposures(costs, visit.computation, wires, machine)
    for row, exposure in zip(rows, judged, strict=True):
        yield dataclasses.replace(row, exposure=exposure)


def _describe(
    module: Module,
    visit: Visit,
    transfer: Transfer,
    groups: Groups,
    mesh: jax.sharding.Mesh | None,
) -> Collective:
    instruction, kind = transfer.instruction, transfer.kind
    operands = transfer.owner.operand_shapes(instruction)
    bytes_in, bytes_out = total_bytes(operands), total_bytes(_results(transfer))
    group_size = max((len(set(group)) for group in groups), default=1)
    find_axes = permuted_axes if kind == "collective-permute" else spanned_axes
    op_name, source = origin(instruction.attributes, module.sources)
    return Collective(
        name=instruction.name,
        kind=kind,
        dtypes=tuple(sorted({shape.dtype for shape in operands})),
        num_arrays=len(operands),
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        group_size=group_size,
        wire_bytes=ring_bytes(kind, bytes_in, bytes_out, group_size),
        count=visit.count,
        unknown_trip=visit.unknown_trip,
        in_conditional=visit.in_conditional,
        axes=find_axes(groups, mesh),
        is_async=transfer.is_async,
        exposure="exposed",
        op_name=op_name,
        source=source,
    )


def _groups(module: Module, transfer: Transfer) -> Groups:
    attributes = transfer.instruction.attributes
    if transfer.kind == "collective-permute":
        return source_target_pairs(attributes)
    return replica_groups(attributes, module.num_devices)


def _results(transfer: Transfer) -> tuple[Shape, ...]:
    """The arrays that come out; a `-start` may carry its operands and contexts beside them."""
    instruction, owner = transfer.instruction, transfer.owner
    if transfer.kind == "collective-permute":
        return owner.operand_shapes(instruction)
    if not instruction.opcode.endswith("-start"):
        return instruction.shapes
    for later in owner.instructions:
        if instruction.name in later.operands and later.opcode.endswith("-done"):
            return later.shapes
    return instruction.shapes
