"""A traced program as a flat list of operations, whose values can be recorded and changed.

Calls are inlined, so that each operation is where it runs. A `shard_map`, a loop and a branch keep
their programs as regions. Values inside are recorded rank by rank, and those of a loop in its first
turn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from ..core.compat import called, eval_equation, map_axes, scan_counts
from ..core.reduction import varying
from ..core.typing import Array, Shape
from ..ir.walk import OPENED, dtype_of

DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})
"""Primitives that draw random bits."""

EXACT = frozenset(
    {
        "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "select_n",
        "dynamic_slice", "dynamic_update_slice", "gather", "concatenate", "pad", "rev", "copy",
        "copy_p", "pvary", "pcast", "stop_gradient", "neg", "abs", "max", "min", "sign",
        "reduce_max", "reduce_min", "all_gather", "all_gather_invariant", "all_to_all", "ppermute",
        "pmax", "pmin", "sharding_constraint", "optimization_barrier", "iota", "device_put",
        "reshard", "split", "sort", "real", "imag", "clamp", "floor", "ceil", "round",
        "bitcast_convert_type", "copy_to_host_async", "name",
    }
)  # fmt: skip
"""Primitives whose results are not rounded."""

_SUMS = frozenset({"reduce_sum", "dot_general", "conv_general_dilated", "cumsum", "cumlogsumexp"})


@dataclasses.dataclass(eq=False)
class Value:
    """A value of a program.

    Args:
        aval: its abstract value; inside a `shard_map` that of one rank.
        axes: the manual mesh axes around it, the outermost first.
        maker: the operation that computes it; None for an input or a constant.
        constant: the value of a constant.
    """

    aval: Any
    axes: tuple[str, ...]
    maker: Operation | None = None
    constant: Any = None

    @property
    def shape(self) -> Shape:
        """The shape on one rank."""
        return tuple(getattr(self.aval, "shape", ()))


Read: TypeAlias = Value | Literal
"""An operand of an operation."""


@dataclasses.dataclass(eq=False)
class Region:
    """A program within a program."""

    inputs: list[Value]
    constants: list[Value]
    operations: list[Operation]
    outputs: list[Read]


@dataclasses.dataclass(eq=False)
class Operation:
    """An equation of the inlined program.

    Args:
        number: its number in program order.
        equation: the equation of the jaxpr.
        reads: its operands.
        results: its results.
        regions: the programs that it runs: one for a `shard_map` or `scan`, test and body for a
            `while`, and the branches of a `cond`.
        callers: the calls and loops around it, the outermost first.
    """

    number: int
    equation: JaxprEqn
    reads: list[Read]
    results: list[Value]
    regions: list[Region]
    callers: tuple[JaxprEqn, ...] = ()

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name

    @property
    def is_map(self) -> bool:
        """Whether it runs its region rank by rank."""
        return self.name == "shard_map"

    def first_turn(self, operands: Sequence[Any], row: Callable[[Any], Any]) -> list[Any] | None:
        """Returns the inputs of a loop's region in its first turn; None if it is not a loop.

        Args:
            operands: the operands of the loop.
            row: takes the row of the first turn from a stacked operand.
        """
        params = self.equation.params
        if self.name == "scan":
            consts, carry = scan_counts(self.equation)
            return [*operands[: consts + carry], *map(row, operands[consts + carry :])]
        if self.name == "while":
            tests = params["cond_nconsts"]
            return list(operands[tests:])
        return None

    @property
    def turn(self) -> Region | None:
        """The body of a loop; None for other operations."""
        return self.regions[-1] if self.name in ("scan", "while") else None


@dataclasses.dataclass(eq=False)
class Program:
    """A traced function, flat.

    Args:
        region: the whole program.
        operations: all operations at any depth, in order.
    """

    region: Region
    operations: list[Operation]

    def values(self) -> Iterator[Value]:
        """The results of all operations."""
        for operation in self.operations:
            yield from operation.results


def flatten(closed: ClosedJaxpr) -> Program:
    """Inlines the calls of a program and numbers its operations."""
    operations: list[Operation] = []
    region = _region(closed, (), operations, ())
    return Program(region, operations)


def _region(
    closed: ClosedJaxpr,
    axes: tuple[str, ...],
    found: list[Operation],
    callers: tuple[JaxprEqn, ...],
) -> Region:
    jaxpr = closed.jaxpr
    inputs = [Value(variable.aval, axes) for variable in jaxpr.invars]
    constants = [
        Value(variable.aval, axes, constant=value)
        for variable, value in zip(jaxpr.constvars, closed.consts, strict=True)
    ]
    region = Region(inputs, constants, [], [])
    known = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*inputs, *constants], strict=True))
    region.outputs = _open(jaxpr, known, axes, region, found, callers)
    return region


def _open(
    jaxpr: Jaxpr,
    known: dict[Var, Value],
    axes: tuple[str, ...],
    region: Region,
    found: list[Operation],
    callers: tuple[JaxprEqn, ...],
) -> list[Read]:
    """Adds the operations of a jaxpr to a region; returns the jaxpr's outputs."""

    def read(atom: Any) -> Read:
        return atom if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        reads = [read(atom) for atom in equation.invars]
        inner = called(equation) if equation.primitive.name in OPENED else None
        if inner is not None:
            taken = reads[len(reads) - len(inner.jaxpr.invars) :]
            within: dict[Var, Any] = dict(zip(inner.jaxpr.invars, taken, strict=True))
            for variable, constant in zip(inner.jaxpr.constvars, inner.consts, strict=True):
                within[variable] = Value(variable.aval, axes, constant=constant)
                region.constants.append(within[variable])
            at = (*callers, equation)
            results: list[Any] = _open(inner.jaxpr, within, axes, region, found, at)
        else:
            operation = Operation(len(found), equation, reads, [], [], callers)
            found.append(operation)
            region.operations.append(operation)
            operation.results = [Value(v.aval, axes, operation) for v in equation.outvars]
            inside = (*axes, *map_axes(equation)) if operation.is_map else axes
            # Operations of a map have its call's lines, but those of a loop's body may have none.
            at = callers if operation.is_map else (*callers, equation)
            operation.regions = [_region(p, inside, found, at) for p in _programs(equation)]
            results = list(operation.results)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _programs(equation: JaxprEqn) -> list[ClosedJaxpr]:
    name = equation.primitive.name
    params = equation.params
    if name in ("scan", "shard_map"):
        found = [params["jaxpr"]]
    elif name == "while":
        found = [params["cond_jaxpr"], params["body_jaxpr"]]
    else:
        found = params["branches"] if name == "cond" else []
    return [one if isinstance(one, ClosedJaxpr) else ClosedJaxpr(one, ()) for one in found]


@dataclasses.dataclass(frozen=True)
class Injected:
    """Random bits that replace a draw.

    Args:
        bits: the bits of the whole array.
        splits: for each dim the mesh axes that split it, the slowest first.
    """

    bits: Any
    splits: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How a program is evaluated, with all traced inputs of the evaluation itself.

    Args:
        wanted: the values to record.
        noise: a seed and a scale: results of arithmetic are perturbed by this many units in the
            last place, up or down. None for no noise.
        injected: bits for draws, by the number of the operation.
        turns: the turn of a loop whose values are recorded, by the loop's number; 0 for others.
        all_turns: whether the values of all turns of a `scan` are recorded, in leading dims.
    """

    wanted: frozenset[Value] = frozenset()
    noise: tuple[Array, Array] | None = None
    injected: Mapping[int, Injected] = dataclasses.field(default_factory=dict)
    turns: Mapping[int, int] = dataclasses.field(default_factory=dict)
    all_turns: bool = False

    def run(self, program: Program, values: Sequence[Array]) -> tuple[list[Array], dict]:
        """Computes the outputs and the recorded values by `Value`, with ranks as leading dims."""
        record: dict[Value, Array] = {}
        with_noise = [self._moved(value, 977 + number, 1.0) for number, value in enumerate(values)]
        return self._region(program.region, with_noise, record), record

    @property
    def _opens(self) -> bool:
        return self.noise is not None or bool(self.injected)

    def _region(self, region: Region, values: Sequence[Array], record: dict | None) -> list[Array]:
        known: dict[Value, Any] = dict(zip(region.inputs, values, strict=True))
        known.update((value, value.constant) for value in region.constants)

        def read(atom: Read) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for operation in region.operations:
            operands = [read(atom) for atom in operation.reads]
            results = self._operation(operation, operands, record)
            known.update(zip(operation.results, results, strict=True))
            if record is not None:
                record.update((v, known[v]) for v in operation.results if v in self.wanted)
        return [
            jnp.asarray(atom.val, dtype_of(atom)) if isinstance(atom, Literal) else known[atom]
            for atom in region.outputs
        ]

    def _operation(self, operation: Operation, operands: list, record: dict | None) -> list[Array]:
        if operation.number in self.injected:
            return [_block(self.injected[operation.number], operation.results[0])]
        if operation.is_map:
            return self._map(operation, operands, record)
        here = _branch_of_platform(operation)
        if here is not None:
            return self._region(here, operands[1:], record)
        if self.all_turns and operation.name == "scan":
            return self._scan(operation, operands, record=record)
        self._first_turn(operation, operands, record)
        if self._opens and operation.name in _LOOPED:
            return _LOOPED[operation.name](self, operation, operands)
        results = eval_equation(operation.equation, operands)
        if self.noise is None or operation.name in EXACT:
            return results
        size = 1.0
        if operation.name in _SUMS:
            terms = sum(math.prod(jnp.shape(x)) for x in operands)
            size = min(math.sqrt(max(1.0, terms / max(1, math.prod(results[0].shape)))), 64.0)
        return [self._moved(x, operation.number, size) for x in results]

    def _moved(self, x: Any, number: int, size: float) -> Any:
        """Perturbs a value up or down in its last place, by a hash of its own bits."""
        if self.noise is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        seed, scale = self.noise
        return _moved(x, seed, np.uint32(number * 7919 % 2**32), scale, np.float32(size))

    def _map(self, operation: Operation, operands: list, record: dict | None) -> list[Array]:
        """Runs a `shard_map`, and also returns the values recorded on all of its ranks."""
        equation = operation.equation
        region = operation.regions[0]
        params = equation.params
        axes = map_axes(equation)
        names: list[Value] = []

        def body(operands: list, noise: Any, bits: dict) -> tuple[list, list]:
            given = {n: Injected(bits[n], self.injected[n].splits) for n in bits}
            inner = dataclasses.replace(self, noise=noise, injected=given)
            within: dict[Value, Array] | None = None if record is None else {}
            outputs = inner._region(region, operands, within)
            names[:] = within or ()
            stacked = [jnp.asarray(plain(x)) for x in (within or {}).values()]
            return outputs, [varying(x, axes)[(None,) * len(axes)] for x in stacked]

        specs = (list(params["in_specs"]), PartitionSpec(), PartitionSpec())
        run = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=specs,
            out_specs=(list(params["out_specs"]), PartitionSpec(*axes)),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )
        bits = {n: one.bits for n, one in self.injected.items()}
        outputs, stacked = run(list(operands), self.noise, bits)
        if record is not None:
            record.update(zip(names, stacked, strict=True))
        return outputs

    def _first_turn(self, operation: Operation, operands: list, record: dict | None) -> None:
        turn = operation.turn
        if record is None or turn is None or not _holds(turn, self.wanted):
            return
        number = self.turns.get(operation.number, 0)
        reverse = operation.equation.params.get("reverse")
        if number and operation.name == "scan":
            consts, carry = scan_counts(operation.equation)
            rows = operands[consts + carry :]
            before = [x[-number:] if reverse else x[:number] for x in rows]
            given = [*operands[: consts + carry], *before]
            carried = self._scan(operation, given, number)[:carry]
            operands = [*operands[:consts], *carried, *rows]
        at = -1 - number if reverse else number
        self._region(turn, operation.first_turn(operands, lambda x: x[at]) or [], record)

    def _scan(
        self,
        operation: Operation,
        operands: list,
        length: int | None = None,
        record: dict | None = None,
    ) -> list[Array]:
        """Runs a loop; a record gets the values of each turn, in the order of turns."""
        consts, carry = scan_counts(operation.equation)
        shared, start = operands[:consts], operands[consts : consts + carry]
        params = operation.equation.params
        names: list[Value] = []

        def turn(carried: list, rows: list) -> tuple[list, tuple[list, list]]:
            within: dict[Value, Array] | None = None if record is None else {}
            outputs = self._region(operation.regions[0], [*shared, *carried, *rows], within)
            names[:] = within or ()
            return outputs[:carry], (outputs[carry:], [plain(x) for x in (within or {}).values()])

        rows = operands[consts + carry :]
        ends = {"length": length or params["length"], "reverse": params["reverse"]}
        carried, (stacked, recorded) = jax.lax.scan(turn, start, rows, **ends)
        if record is not None:
            order = slice(None, None, -1 if params["reverse"] else 1)
            record.update((v, x[order]) for v, x in zip(names, recorded, strict=True))
        return [*carried, *stacked]

    def _while(self, operation: Operation, operands: list) -> list[Array]:
        params = operation.equation.params
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        for_test, for_body = operands[:tests], operands[tests : tests + consts]
        test, body = operation.regions

        def runs(carry: list) -> Array:
            return self._region(test, [*for_test, *carry], None)[0]

        def turn(carry: list) -> list[Array]:
            return self._region(body, [*for_body, *carry], None)

        return jax.lax.while_loop(runs, turn, operands[tests + consts :])

    def _cond(self, operation: Operation, operands: list) -> list[Array]:
        def branch(region: Region) -> Callable[..., list[Array]]:
            return lambda *values: self._region(region, values, None)

        which, *values = operands
        return jax.lax.switch(which, [branch(r) for r in operation.regions], *values)


_LOOPED: Mapping[str, Callable[..., list[Array]]] = {
    "scan": Evaluation._scan,
    "while": Evaluation._while,
    "cond": Evaluation._cond,
}


@jax.jit
def _moved(x: Array, seed: Array, number: Array, scale: Array, size: Array) -> Array:
    """Perturbs each number by some units in its last place, up or down by a hash of its bits."""
    # Few operations: this follows nearly every operation of a program, and compiling it is most of
    # the time of a proof.
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    is_up = jax.lax.lt((bits ^ (seed + number)) * jnp.uint32(2654435761), jnp.uint32(2**31))
    kind = x.dtype if jnp.finfo(x.dtype).bits >= 32 else jnp.float32
    step = (float(jnp.finfo(x.dtype).eps) * scale * size).astype(kind)
    return (x.astype(kind) * jnp.where(is_up, 1 + step, 1 - step)).astype(x.dtype)


def _branch_of_platform(operation: Operation) -> Region | None:
    """Returns the branch that `jax.lax.platform_dependent` takes here; None for other operations.

    Only as long as it is a choice by platform are branches left out that do not compile here.
    """
    platforms = operation.equation.params.get("branches_platforms")
    if platforms is None:
        return None
    here = jax.default_backend()
    return operation.regions[next(n for n, p in enumerate(platforms) if p is None or here in p)]


def _holds(region: Region, wanted: frozenset[Value]) -> bool:
    """Whether a region computes one of the values, at any depth."""
    for operation in region.operations:
        if not wanted.isdisjoint(operation.results):
            return True
        if any(_holds(inner, wanted) for inner in operation.regions):
            return True
    return False


def is_key(x: Any) -> bool:
    """Whether an array holds random keys."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def plain(x: Any) -> Any:
    """Returns an array as numbers; random keys as their key data."""
    return jax.random.key_data(x) if is_key(x) else x


def _block(injected: Injected, result: Value) -> Array:
    """Returns the part of injected bits that this rank would draw."""
    block = injected.bits
    varies = set()
    for dim, axes in enumerate(injected.splits):
        size = result.shape[dim]
        index = 0
        for axis in axes:
            index = index * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
            varies.add(axis)
        if axes:
            block = jax.lax.dynamic_slice_in_dim(block, index * size, size, dim)
    return varying(block, tuple(a for a in varying_axes(result.aval) if a not in varies))


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the mesh axes over which a value's type varies; none if `check_vma` is off."""
    kinds = getattr(aval, "mat", None)
    return frozenset(kinds.varying if kinds is not None else getattr(aval, "vma", ()))


def reads_of(values: Iterable[Read]) -> list[Value]:
    """Returns the reads that are values rather than literals."""
    return [value for value in values if not isinstance(value, Literal)]


def same_operations(one: Program, other: Program) -> bool:
    """Whether two programs are the same except for where their arrays are placed.

    A program with a `shard_map` never is, because its ranks compute on parts.
    """
    if len(one.operations) != len(other.operations):
        return False
    names: dict[Value, Value] = {}
    for operation, counterpart in zip(one.operations, other.operations, strict=True):
        if (
            operation.is_map
            or operation.name != counterpart.name
            or _plan(operation) != _plan(counterpart)
        ):
            return False
        if len(operation.reads) != len(counterpart.reads):
            return False
        if not all(
            _same_read(a, b, names) for a, b in zip(operation.reads, counterpart.reads, strict=True)
        ):
            return False
        if [v.shape for v in operation.results] != [v.shape for v in counterpart.results]:
            return False
        names.update(zip(operation.results, counterpart.results, strict=True))
    return True


def _plan(operation: Operation) -> dict[str, str]:
    """Returns the parameters of an operation that determine its results."""
    if operation.name in ("sharding_constraint", "reshard", "device_put"):
        return {}
    return {
        key: str(value)
        for key, value in operation.equation.params.items()
        if "sharding" not in key and key not in ("jaxpr", "branches", "cond_jaxpr", "body_jaxpr")
    }


def _same_read(one: Read, other: Read, names: dict[Value, Value]) -> bool:
    if isinstance(one, Literal) or isinstance(other, Literal):
        if not (isinstance(one, Literal) and isinstance(other, Literal)):
            return False
        return bool(np.array_equal(one.val, other.val))
    if one.maker is None or other.maker is None:
        # Inputs or constants; constants must hold the same numbers.
        constants = one.constant, other.constant
        if one.maker is not other.maker or (constants[0] is None) != (constants[1] is None):
            return False
        first, second = (np.asarray(plain(x)) for x in constants)
        is_same = constants[0] is None or np.array_equal(first, second)
        return bool(is_same) and names.setdefault(one, other) is other
    return names.get(one) is other
