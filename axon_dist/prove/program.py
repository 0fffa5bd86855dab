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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ..ir.walk import OPENED, Inner, inners

DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})
"""Primitives that draw random bits."""

COPIES = KEEPS | {"copy", "copy_p", "name", "stop_gradient"}
"""Primitives that pass each element on."""

RANK_SUMS = frozenset({"psum", "psum2", "psum_invariant", "reduce_scatter", "psum_scatter"})
"""Collectives that sum over ranks."""

EXACT = MOVES | COPIES | {"select_n", "dynamic_slice", "dynamic_update_slice", "gather", "neg"}
EXACT |= {"abs", "max", "min", "sign", "reduce_max", "reduce_min", "sort", "real", "imag", "clamp"}
EXACT |= {"floor", "ceil", "round", "bitcast_convert_type", "copy_to_host_async"}
EXACT |= {"all_gather", "all_gather_invariant", "all_to_all", "ppermute", "pmax", "pmin"}
"""Primitives whose results are not rounded."""

_COMPILER_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""A program runs a few times, so compiling it takes longer than running it."""

_SUMS = frozenset({"reduce_sum", "dot_general", "conv_general_dilated", "cumsum", "cumlogsumexp"})


@dataclasses.dataclass(eq=False, repr=False)
class Value:
    """A value of a program.

    Args:
        aval: its abstract value; inside a `shard_map` that of one rank.
        axes: the manual mesh axes around it, the outermost first.
        maker: the operation that computes it; None for an input or a constant.
        constant: the array or number, if it is a constant of the program.
        number: orders the values, so that a dict of them is a pytree.
    """

    aval: Any
    axes: tuple[str, ...]
    maker: Operation | None = None
    constant: Any = None
    number: int = dataclasses.field(default_factory=itertools.count().__next__)

    def __lt__(self, other: Value) -> bool:
        """Whether it was made before another one."""
        return self.number < other.number

    def __repr__(self) -> str:
        """Names it by its number, without operands: JAX writes down the keys of dicts."""
        return f"value {self.number}"

    @property
    def shape(self) -> Shape:
        """The shape on one rank."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def is_inexact(self) -> bool:
        """Whether it holds floating-point or complex numbers."""
        return jnp.issubdtype(getattr(self.aval, "dtype", bool), jnp.inexact)

    def num_turns(self, recorded: Array | np.ndarray) -> int:
        """Returns how many leading dims of its recorded numbers are turns of loops."""
        return recorded.ndim - len(self.axes) - len(self.shape) - is_key(self.aval)


@dataclasses.dataclass(eq=False)
class Region:
    """A program, or a program within a program.

    Args:
        axes: the manual mesh axes around it, the outermost first.
        inputs: its inputs.
        form: which operands of the operation that runs it are its inputs; None for the whole
            program.
        operations: its operations, in order.
        outputs: its outputs.
    """

    axes: tuple[str, ...]
    inputs: list[Value]
    form: Inner | None = None
    operations: list[Operation] = dataclasses.field(default_factory=list)
    outputs: list[Value] = dataclasses.field(default_factory=list)

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
    reads: list[Value]
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
    region.outputs = _open(closed, region.inputs, region, numbers, callers)
    return region


def _open(
    closed: ClosedJaxpr,
    inputs: Sequence[Value],
    region: Region,
    numbers: Iterator[int],
    callers: tuple[JaxprEqn, ...],
) -> list[Value]:
    """Adds the operations of a program to a region; returns the program's outputs."""
    axes = region.axes
    known: dict[Var, Value] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    for variable, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        known[variable] = Value(variable.aval, axes, constant=_unplaced(constant))

    def read(atom: Any) -> Value:
        is_literal = isinstance(atom, Literal)
        return Value(atom.aval, axes, constant=atom.val) if is_literal else known[atom]

    for equation in closed.jaxpr.eqns:
        reads = [read(atom) for atom in equation.invars]
        inner = _inlined(equation)
        if inner is not None:
            taken = reads[len(reads) - len(inner.jaxpr.invars) :]
            results = _open(inner, taken, region, numbers, (*callers, equation))
        else:
            operation = Operation(next(numbers), equation, reads, [], [], callers)
            region.operations.append(operation)
            operation.results = [Value(v.aval, axes, operation) for v in equation.outvars]
            inside = (*axes, *map_axes(equation)) if operation.is_map else axes
            at = callers if operation.is_map else (*callers, equation)
            forms = inners(equation) if operation.name in _WITH_REGIONS else []
            operation.regions = [_region(f.program, inside, numbers, at, f) for f in forms]
            results = operation.results
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _inlined(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the program that an equation calls once; None if it does not call one.

    A choice by `jax.lax.platform_dependent` calls the branch of this platform. The other branches
    may not even compile here.
    """
    platforms = equation.params.get("branches_platforms")
    if platforms is None:
        return called(equation) if equation.primitive.name in OPENED else None
    here = jax.default_backend()
    number = next(n for n, names in enumerate(platforms) if names is None or here in names)
    return equation.params["branches"][number]


def _unplaced(constant: Any) -> Any:
    """Returns a constant that is placed on the devices of a mesh as a NumPy array."""
    is_placed = isinstance(constant, jax.Array) and len(constant.sharding.device_set) > 1
    return np.asarray(constant) if is_placed and not is_key(constant) else constant


_WITH_REGIONS = frozenset({"shard_map", "scan", "while", "cond"})


@functools.partial(jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["splits"])
@dataclasses.dataclass(frozen=True)
class Injected:
    """Random bits that replace a draw.

    Args:
        bits: the bits of the whole array.
        splits: for each dim the mesh axes that split it, the slowest first.
    """

    bits: Any
    splits: tuple[tuple[str, ...], ...]


Env: TypeAlias = dict[Value, Array]
"""Recorded values, with leading dims for the turns of loops, then for the ranks of a mesh."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["noise", "injected"],
    meta_fields=["wanted"],
)
@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How a program is evaluated. As a pytree it is passed into compiled programs, loops and maps.

    Args:
        wanted: the values to keep in the `Env` that `run` returns.
        noise: a seed and a scale: results of arithmetic are perturbed by this many units in the
            last place, up or down. None for no noise.
        injected: bits for draws, by the number of the operation.
    """

    wanted: frozenset[Value]
    noise: tuple[Any, Any] | None
    injected: Mapping[int, Injected]

    def run(self, program: Region, values: Sequence[Any]) -> tuple[list[Array], Env]:
        """Computes the outputs and the recorded values.

        All turns of a `scan` are recorded, the first turn of a `while`, and no branch of a `cond`.
        """
        known = dict(zip(program.inputs, values, strict=True))
        env: Env = {}

        def read(value: Value) -> Any:
            return known[value] if value.constant is None else value.constant

        for operation in program.operations:
            results = self._operation(operation, list(map(read, operation.reads)), env)
            known.update(zip(operation.results, results, strict=True))
            env |= {v: plain(known[v]) for v in operation.results if v in self.wanted}
        return [_as_array(read(value), value) for value in program.outputs], env

    def _operation(self, operation: Operation, operands: list, env: Env) -> list[Array]:
        if operation.number in self.injected:
            return [_block(self.injected[operation.number], operation.results[0])]
        if operation.is_map or (operation.regions and self._opens(operation)):
            return _OPENED[operation.name](self, operation, operands, env)
        results = eval_equation(operation.equation, operands)
        if self.noise is None or operation.name in EXACT:
            return results
        size = 1.0
        if operation.name in _SUMS:
            terms = sum(math.prod(jnp.shape(x)) for x in operands)
            size = min(math.sqrt(max(1.0, terms / max(1, math.prod(results[0].shape)))), 64.0)
        return [self.moved(x, operation.number, size) for x in results]

    def _opens(self, operation: Operation) -> bool:
        """Whether something inside a loop or branch is to be recorded or changed."""
        if self.noise is not None or self.injected:
            return True
        return any(not self.wanted.isdisjoint(region.values()) for region in operation.regions)

    def moved(self, x: Any, number: int, size: float = 1.0) -> Any:
        """Perturbs a value up or down in its last place, by a hash of its own bits."""
        if self.noise is None:
            return x
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return jax.lax.complex(*(self.moved(part, number, size) for part in (x.real, x.imag)))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return _moved(x, *self.noise, np.uint32(number * 7919 % 2**32), np.float32(size))

    def _map(self, operation: Operation, operands: list, env: Env) -> list[Array]:
        """Runs a `shard_map`, and also returns the values recorded on all of its ranks."""
        region = operation.regions[0]
        params = operation.equation.params
        axes = map_axes(operation.equation)

        def body(evaluation: Evaluation, operands: list) -> tuple[list, Env]:
            outputs, inner = evaluation.run(region, operands)
            return outputs, {v: varying(x, axes)[(None,) * len(axes)] for v, x in inner.items()}

        run = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=(PartitionSpec(), list(params["in_specs"])),
            out_specs=(list(params["out_specs"]), PartitionSpec(*axes)),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )
        outputs, inner = run(self, operands)
        outside = len(region.axes) - len(axes)
        for value, x in inner.items():
            # Turns of loops inside the map come before the ranks.
            turns = value.num_turns(x) + outside
            env[value] = jnp.moveaxis(x, range(len(axes)), range(turns, turns + len(axes)))
        return outputs

    def _scan(self, operation: Operation, operands: list, env: Env) -> list[Array]:
        """Runs a loop, and records the values of all turns in their order."""
        region = operation.regions[0]
        params = operation.equation.params
        form = region.form
        assert form is not None
        shared, start, rows = form.split_operands(operands)

        def turn(carried: list, rows: list) -> tuple[list, tuple[list, Env]]:
            outputs, inner = self.run(region, [*shared, *carried, *rows])
            carried, stacked = form.outputs(outputs)
            return carried, (stacked, inner)

        ends = {"length": params["length"], "reverse": params["reverse"]}
        carried, (stacked, inner) = jax.lax.scan(turn, start, rows, **ends)
        order = slice(None, None, -1 if params["reverse"] else 1)
        env |= {value: x[order] for value, x in inner.items()}
        return [*carried, *stacked]

    def _while(self, operation: Operation, operands: list, env: Env) -> list[Array]:
        """Runs a loop, and records its first turn; how many there are is not known before."""
        test, body = operation.regions
        assert test.form is not None
        assert body.form is not None
        for_test, start, _ = test.form.split_operands(operands)
        for_body, _, _ = body.form.split_operands(operands)
        env |= self.run(body, [*for_body, *start])[1]
        return jax.lax.while_loop(
            lambda carry: self.run(test, [*for_test, *carry])[0][0],
            lambda carry: self.run(body, [*for_body, *carry])[0],
            start,
        )

    def _cond(self, operation: Operation, operands: list, env: Env) -> list[Array]:
        def branch(region: Region) -> Callable[..., list[Array]]:
            return lambda *values: self.run(region, values)[0]

        which, *values = operands
        return jax.lax.switch(which, [branch(r) for r in operation.regions], *values)


_OPENED: Mapping[str, Callable[..., list[Array]]] = {
    "shard_map": Evaluation._map,
    "scan": Evaluation._scan,
    "while": Evaluation._while,
    "cond": Evaluation._cond,
}


def compiler() -> Callable[..., tuple[list[Array], Env]]:
    """Returns a function from (evaluation, program, values) to outputs and recorded values.

    It compiles each program once. JAX frees the compiled programs with the function.
    """

    def run(how: Evaluation, program: Region, values: list) -> tuple[list[Array], Env]:
        return how.run(program, values)

    return jax.jit(run, static_argnums=1, compiler_options=_COMPILER_OPTIONS)


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


def is_key(x: Any) -> bool:
    """Whether an array holds random keys."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def plain(x: Any) -> Any:
    """Returns an array as numbers; random keys as their key data."""
    return jax.random.key_data(x) if is_key(x) else x


def _as_array(x: Any, value: Value) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x, value.aval.dtype)


def _block(injected: Injected, result: Value) -> Array:
    """Returns the part of injected bits that this rank would draw."""
    block = injected.bits
    for dim, axes in enumerate(injected.splits):
        size = result.shape[dim]
        if axes:
            start = jax.lax.axis_index(axes) * size
            block = jax.lax.dynamic_slice_in_dim(block, start, size, dim)
    return varying(block, tuple(result.aval.mat.varying))
