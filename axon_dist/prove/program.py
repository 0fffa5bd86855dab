"""A traced program as a flat list of operations, whose values can be recorded and changed.

Calls are inlined, so that each operation is where it runs. A `shard_map`, a loop and a branch keep
their programs as regions. A recorded value has a leading dim for each loop around it, with its
value in every turn, and then one for each manual mesh axis, with its value on every rank.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from ..core.compat import called, eval_equation, map_axes
from ..core.reduction import varying
from ..core.typing import Array, Shape
from ..ir.factors import KEEPS, MOVES
from ..ir.walk import OPENED, Inner, dtype_of, inners

DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})
"""Primitives that draw random bits."""

EXACT = MOVES | KEEPS
EXACT |= {"select_n", "dynamic_slice", "dynamic_update_slice", "gather", "copy", "copy_p", "neg"}
EXACT |= {"abs", "max", "min", "sign", "reduce_max", "reduce_min", "sort", "real", "imag", "clamp"}
EXACT |= {"floor", "ceil", "round", "bitcast_convert_type", "copy_to_host_async", "name"}
EXACT |= {"all_gather", "all_gather_invariant", "all_to_all", "ppermute", "pmax", "pmin"}
"""Primitives whose results are not rounded."""

COMPILER_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""A program runs a few times, so compiling it takes longer than running it."""

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

    def num_turns(self, recorded: np.ndarray) -> int:
        """Returns how many leading dims of its recorded numbers are turns of loops."""
        return recorded.ndim - len(self.axes) - len(self.shape) - is_key(self.aval)


Read: TypeAlias = Value | Literal
"""An operand of an operation."""


@dataclasses.dataclass(eq=False)
class Region:
    """A program, or a program within a program.

    Args:
        axes: the manual mesh axes around it, the outermost first.
        inputs: its inputs.
        form: which operands of the operation that runs it are its inputs; None for the whole
            program.
        constants: its constants.
        operations: its operations, in order.
        outputs: its outputs.
    """

    axes: tuple[str, ...]
    inputs: list[Value]
    form: Inner | None = None
    constants: list[Value] = dataclasses.field(default_factory=list)
    operations: list[Operation] = dataclasses.field(default_factory=list)
    outputs: list[Read] = dataclasses.field(default_factory=list)

    def walk(self) -> Iterator[Operation]:
        """Yields all operations at any depth, each followed by those of its regions."""
        for operation in self.operations:
            yield operation
            for region in operation.regions:
                yield from region.walk()

    def values(self) -> Iterator[Value]:
        """Yields the results of all operations at any depth."""
        for operation in self.walk():
            yield from operation.results


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

    @property
    def turn(self) -> Region | None:
        """The body of a loop; None for other operations."""
        return self.regions[-1] if self.name in ("scan", "while") else None


def flatten(closed: ClosedJaxpr) -> Region:
    """Inlines the calls of a program and numbers its operations."""
    return _region(closed, (), itertools.count(), ())


def _region(
    closed: ClosedJaxpr,
    axes: tuple[str, ...],
    numbers: Iterator[int],
    callers: tuple[JaxprEqn, ...],
    form: Inner | None = None,
) -> Region:
    region = Region(axes, [Value(variable.aval, axes) for variable in closed.jaxpr.invars], form)
    known = dict(zip(closed.jaxpr.invars, region.inputs, strict=True))
    region.outputs = _open(closed, known, region, numbers, callers)
    return region


def _open(
    closed: ClosedJaxpr,
    known: dict[Var, Any],
    region: Region,
    numbers: Iterator[int],
    callers: tuple[JaxprEqn, ...],
) -> list[Read]:
    """Adds the operations of a program to a region; returns the program's outputs."""
    axes = region.axes
    for variable, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        known[variable] = Value(variable.aval, axes, constant=_unplaced(constant))
        region.constants.append(known[variable])

    def read(atom: Any) -> Read:
        return atom if isinstance(atom, Literal) else known[atom]

    for equation in closed.jaxpr.eqns:
        reads = [read(atom) for atom in equation.invars]
        inner = called(equation) if equation.primitive.name in OPENED else None
        if inner is not None:
            taken = reads[len(reads) - len(inner.jaxpr.invars) :]
            within: dict[Var, Any] = dict(zip(inner.jaxpr.invars, taken, strict=True))
            results: list[Any] = _open(inner, within, region, numbers, (*callers, equation))
        else:
            operation = Operation(next(numbers), equation, reads, [], [], callers)
            region.operations.append(operation)
            operation.results = [Value(v.aval, axes, operation) for v in equation.outvars]
            inside = (*axes, *map_axes(equation)) if operation.is_map else axes
            at = callers if operation.is_map else (*callers, equation)
            forms = inners(equation) if operation.name in _WITH_REGIONS else []
            operation.regions = [_region(f.program, inside, numbers, at, f) for f in forms]
            results = list(operation.results)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _unplaced(constant: Any) -> Any:
    """Returns a constant that is placed on the devices of a mesh as a NumPy array."""
    is_placed = isinstance(constant, jax.Array) and len(constant.sharding.device_set) > 1
    return np.asarray(constant) if is_placed and not is_key(constant) else constant


_WITH_REGIONS = frozenset({"shard_map", "scan", "while", "cond"})


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
        pieces: loops and maps that are compiled by themselves, by the number of the operation and
            of the injected draws; None where the whole program is compiled.
    """

    wanted: frozenset[Value]
    noise: tuple[Array, Array] | None
    injected: Mapping[int, Injected]
    pieces: dict[tuple[int, ...], tuple[Callable[..., Any], list[Value]]] | None = None

    def run(self, program: Region, values: Sequence[Array]) -> tuple[list[Array], dict]:
        """Computes the outputs and the recorded values by `Value`.

        All turns of a `scan` are recorded, the first turn of a `while`, and no branch of a `cond`.
        """
        record: dict[Value, Array] = {}
        with_noise = [self._moved(value, 977 + number, 1.0) for number, value in enumerate(values)]
        return self._region(program, with_noise, record), record

    def _region(self, region: Region, values: Sequence[Array], record: dict) -> list[Array]:
        known: dict[Value, Any] = dict(zip(region.inputs, values, strict=True))
        known.update((value, value.constant) for value in region.constants)

        def read(atom: Read) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for operation in region.operations:
            operands = [read(atom) for atom in operation.reads]
            results = self._operation(operation, operands, record)
            known.update(zip(operation.results, results, strict=True))
            wanted = [value for value in operation.results if value in self.wanted]
            record.update((value, plain(known[value])) for value in wanted)
        return [
            jnp.asarray(atom.val, dtype_of(atom)) if isinstance(atom, Literal) else known[atom]
            for atom in region.outputs
        ]

    def _operation(self, operation: Operation, operands: list, record: dict) -> list[Array]:
        if operation.number in self.injected:
            return [_block(self.injected[operation.number], operation.results[0])]
        here = _branch_of_platform(operation)
        if here is not None:
            return self._region(here, operands[1:], record)
        if operation.regions and self.pieces is not None:
            return self._piece(operation, operands, record)
        if operation.is_map:
            return self._map(operation, operands, record)
        if operation.regions and self._opens(operation):
            return _OPENED[operation.name](self, operation, operands, record)
        results = eval_equation(operation.equation, operands)
        if self.noise is None or operation.name in EXACT:
            return results
        size = 1.0
        if operation.name in _SUMS:
            terms = sum(math.prod(jnp.shape(x)) for x in operands)
            size = min(math.sqrt(max(1.0, terms / max(1, math.prod(results[0].shape)))), 64.0)
        return [self._moved(x, operation.number, size) for x in results]

    def _piece(self, operation: Operation, operands: list, record: dict) -> list[Array]:
        """Runs a loop, branch or map in a compiled program of its own."""
        assert self.pieces is not None
        key = operation.number, *self.injected
        if key not in self.pieces:
            names: list[Value] = []

            @functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
            def compute(operands: list, noise: Any, bits: dict) -> tuple[list, list]:
                given = {n: Injected(bits[n], self.injected[n].splits) for n in bits}
                within: dict[Value, Array] = {}
                inner = Evaluation(self.wanted, noise, given)
                results = inner._operation(operation, operands, within)
                names[:] = within
                return results, list(within.values())

            self.pieces[key] = compute, names
        compute, names = self.pieces[key]
        bits = {n: one.bits for n, one in self.injected.items()}
        results, recorded = compute(operands, self.noise, bits)
        record.update(zip(names, recorded, strict=True))
        return results

    def _opens(self, operation: Operation) -> bool:
        """Whether something inside a loop or branch is to be recorded or changed."""
        if self.noise is not None or self.injected:
            return True
        return any(not self.wanted.isdisjoint(region.values()) for region in operation.regions)

    def _moved(self, x: Any, number: int, size: float) -> Any:
        """Perturbs a value up or down in its last place, by a hash of its own bits."""
        if self.noise is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        step = np.uint32(number * 7919 % 2**32), np.float32(size)
        return _moved(x, *self.noise, *step)

    def _map(self, operation: Operation, operands: list, record: dict) -> list[Array]:
        """Runs a `shard_map`, and also returns the values recorded on all of its ranks."""
        region = operation.regions[0]
        params = operation.equation.params
        axes = map_axes(operation.equation)
        names: list[Value] = []

        def body(operands: list, noise: Any, bits: dict) -> tuple[list, list]:
            given = {n: Injected(bits[n], self.injected[n].splits) for n in bits}
            inner = dataclasses.replace(self, noise=noise, injected=given)
            within: dict[Value, Array] = {}
            outputs = inner._region(region, operands, within)
            names[:] = within
            return outputs, [varying(x, axes)[(None,) * len(axes)] for x in within.values()]

        run = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=(list(params["in_specs"]), PartitionSpec(), PartitionSpec()),
            out_specs=(list(params["out_specs"]), PartitionSpec(*axes)),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )
        bits = {n: one.bits for n, one in self.injected.items()}
        outputs, stacked = run(list(operands), self.noise, bits)
        outside = len(region.axes) - len(axes)
        for value, x in zip(names, stacked, strict=True):
            # Turns of loops inside the map come before the ranks.
            turns = value.num_turns(x) + outside
            record[value] = jnp.moveaxis(x, range(len(axes)), range(turns, turns + len(axes)))
        return outputs

    def _scan(self, operation: Operation, operands: list, record: dict) -> list[Array]:
        """Runs a loop, and records the values of all turns in their order."""
        region = operation.regions[0]
        params = operation.equation.params
        form = region.form
        assert form is not None
        shared, start, rows = form.split_operands(operands)
        names: list[Value] = []

        def turn(carried: list, rows: list) -> tuple[list, tuple[list, list]]:
            within: dict[Value, Array] = {}
            outputs = self._region(region, [*shared, *carried, *rows], within)
            names[:] = within
            carried, stacked = form.outputs(outputs)
            return carried, (stacked, list(within.values()))

        ends = {"length": params["length"], "reverse": params["reverse"]}
        carried, (stacked, recorded) = jax.lax.scan(turn, start, rows, **ends)
        order = slice(None, None, -1 if params["reverse"] else 1)
        record.update((v, x[order]) for v, x in zip(names, recorded, strict=True))
        return [*carried, *stacked]

    def _while(self, operation: Operation, operands: list, record: dict) -> list[Array]:
        """Runs a loop, and records its first turn; how many there are is not known before."""
        test, body = operation.regions
        assert test.form is not None
        assert body.form is not None
        for_test, start, _ = test.form.split_operands(operands)
        for_body, _, _ = body.form.split_operands(operands)
        self._region(body, [*for_body, *start], record)
        return jax.lax.while_loop(
            lambda carry: self._region(test, [*for_test, *carry], {})[0],
            lambda carry: self._region(body, [*for_body, *carry], {}),
            start,
        )

    def _cond(self, operation: Operation, operands: list, record: dict) -> list[Array]:
        def branch(region: Region) -> Callable[..., list[Array]]:
            return lambda *values: self._region(region, values, {})

        which, *values = operands
        return jax.lax.switch(which, [branch(r) for r in operation.regions], *values)


_OPENED: Mapping[str, Callable[..., list[Array]]] = {
    "scan": Evaluation._scan,
    "while": Evaluation._while,
    "cond": Evaluation._cond,
}


@jax.jit
def _moved(x: Array, seed: Array, scale: Array, number: Array, size: Array) -> Array:
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
    for dim, axes in enumerate(injected.splits):
        size = result.shape[dim]
        if axes:
            start = jax.lax.axis_index(axes) * size
            block = jax.lax.dynamic_slice_in_dim(block, start, size, dim)
    return varying(block, tuple(result.aval.mat.varying))


def reads_of(values: Iterable[Read]) -> list[Value]:
    """Returns the reads that are values rather than literals."""
    return [value for value in values if not isinstance(value, Literal)]
