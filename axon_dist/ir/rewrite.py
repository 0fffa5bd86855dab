"""Rewrites a traced program: computes some of its equations in another way, at any depth.

The compiler gets some operations wrong, or must not see them. Such an operation may occur anywhere
in a user's model: within loops, branches, calls and rematerialised parts. Rewriting therefore works
on the jaxpr, before it is differentiated.

Convolutions: XLA's partitioner (jax 0.10 to 0.12) computes wrong gradients on meshes with two or
more axes, without an error. The kernel gradient of a grouped or depthwise convolution is too large
by the size of the axis that does not split the batch. The kernel gradient of any convolution is
wrong if a spatial dim is split over one of two axes. A mesh with a single axis is correct. So on
meshes with two or more axes, each rank convolves its own samples with the whole kernel.

Slices: if the compiler has split a dim, it implements a slice of it as a permutation between
devices. In a branch that other pipeline stages do not take, that permutation waits for them
forever. If the dim is constrained to be whole, the compiler gathers instead, and a gather involves
only the ranks of one stage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.compat import CALLS, REMATS, eval_equation, eval_jaxpr, in_place_of, inner_programs
from ..core.errors import UnsupportedError
from ..core.typing import Array, Function, PyTree
from .factors import Role, factors
from .walk import LOOPS, Params, equations, interpret

Replace: TypeAlias = Callable[[JaxprEqn, Sequence[Array]], Sequence[Array] | None]
"""(equation, operands) -> its results, or None to leave the equation unchanged."""

REWRITABLE = CALLS | REMATS | LOOPS | {"cond"}
"""Primitives whose inner programs are all in their parameters, so that these can be replaced."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rewriting:
    """Which equations are computed in another way.

    Args:
        replace: the replacement of each primitive, by its name.
        hidden: functions that raise, by the name of a replaced primitive. One is called with an
            equation that runs the primitive where it cannot be replaced, such as inside a function
            with a custom derivative. Without an entry here, such an equation stays as it is.
    """

    replace: Mapping[str, Replace]
    hidden: Mapping[str, Callable[[JaxprEqn], None]] = dataclasses.field(default_factory=dict)

    def of(self, function: Function) -> Function:
        """Makes a function whose program is rewritten; traces it again.

        Args:
            function: a function of arrays; Python numbers among its results stay Python numbers.
                It is called once for arguments of the same shapes on the same mesh.

        Returns:
            A function with the same arguments and results.
        """
        traces: dict[object, tuple[ClosedJaxpr, PyTree, list[float | None]]] = {}

        def rewritten(*args: object) -> PyTree:
            leaves, structure = jax.tree.flatten(args)
            key = structure, *map(jax.typeof, leaves), jax.sharding.get_abstract_mesh()
            recorded = traces.get(key)
            if recorded is None:
                scalars: list[float | None] = []

                def traced(*args: object) -> PyTree:
                    results = function(*args)
                    leaves = jax.tree.leaves(results)
                    scalars[:] = [x if isinstance(x, (bool, int, float)) else None for x in leaves]
                    return results

                recorded = *jax.make_jaxpr(traced, return_shape=True)(*args), scalars
            closed, shapes, numbers = recorded
            if not any(isinstance(const, Tracer) for const in closed.consts):
                # Cache only programs without outer tracers: those are invalid in the next call.
                traces[key] = recorded
            if self.concerns(closed.jaxpr):
                results = _Run(self, {}).program(closed.jaxpr, closed.consts, leaves)
            else:
                results = eval_jaxpr(closed, leaves)
            pairs = zip(results, numbers, strict=True)
            leaves = [result if number is None else number for result, number in pairs]
            return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

        return rewritten

    def concerns(self, jaxpr: Jaxpr) -> bool:
        """Whether a program contains an equation that may be replaced, at any depth."""
        return any(equation.primitive.name in self.replace for equation in equations(jaxpr))


def for_platform(jaxpr: Jaxpr, branch_of: Callable[[Any], int]) -> Jaxpr:
    """Replaces every branch of a choice by platform with the branch of one platform.

    Values that only other platforms need are then unused, within loops over layers too. An example
    is the scores that attention without a kernel saves for its backward pass.

    Args:
        jaxpr: an open jaxpr.
        branch_of: (the platforms that `platform_index` names) -> the number of the branch.

    Returns:
        The program; its equations keep their operands and results.
    """
    return _pruned(jaxpr, branch_of, {})


def _pruned(jaxpr: Jaxpr, branch_of: Callable[[Any], int], done: dict[int, tuple[Any, Any]]) -> Any:
    numbers: dict[Var, int] = {}

    def inner(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(inner, value))
        program = getattr(value, "jaxpr", value)
        if not hasattr(program, "eqns"):
            return value
        if id(value) not in done:
            new = _pruned(program, branch_of, done)
            # Keep a reference to the old program, so that Python does not reuse its id.
            done[id(value)] = value, new if program is value else ClosedJaxpr(new, value.consts)
        return done[id(value)][1]

    def number_of(equation: JaxprEqn) -> int | None:
        if (platforms := equation.params.get("branches_platforms")) is not None:
            return branch_of(platforms)
        which = equation.invars[0]
        return numbers.get(which) if isinstance(which, Var) else None

    def changed(equation: JaxprEqn) -> JaxprEqn:
        name = equation.primitive.name
        params = equation.params
        if name == "platform_index":
            numbers[equation.outvars[0]] = branch_of(params["platforms"])
        elif name == "cond" and (number := number_of(equation)) is not None:
            branches = params["branches"]
            params = {**params, "branches": (branches[number],) * len(branches)}
        return equation.replace(params={key: inner(value) for key, value in params.items()})

    return jaxpr.replace(eqns=[changed(equation) for equation in jaxpr.eqns])


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """One pass over one program.

    Args:
        rewriting: which equations are replaced.
        done: inner programs by identity, each with its new form, so that equal calls stay equal.
    """

    rewriting: Rewriting
    done: dict[int, tuple[Any, Any]]

    def program(
        self, jaxpr: Jaxpr, consts: Sequence[Array], values: Sequence[Array]
    ) -> list[Array]:
        return interpret(jaxpr, consts, values, self.equation)

    def equation(self, equation: JaxprEqn, operands: Sequence[Array]) -> Sequence[Array]:
        name = equation.primitive.name
        hidden = self.rewriting.hidden
        if name in self.rewriting.replace:
            with in_place_of(equation):
                results = self.rewriting.replace[name](equation, operands)
            if results is not None:
                return results
        elif name in REWRITABLE:
            if any(map(self.rewriting.concerns, inner_programs(equation))):
                equation = equation.replace(params=self._opened(equation.params))
        else:
            inside = (e.primitive.name for one in inner_programs(equation) for e in equations(one))
            for primitive in {*inside} & self.rewriting.replace.keys() & hidden.keys():
                hidden[primitive](equation)
        return eval_equation(equation, operands)

    def _opened(self, params: Params) -> Params:
        return {
            name: type(value)(map(self._inner, value))
            if type(value) in (tuple, list)
            else self._inner(value)
            for name, value in params.items()
        }

    def _inner(self, value: Any) -> Any:
        jaxpr = getattr(value, "jaxpr", value)
        if not hasattr(jaxpr, "eqns") or not self.rewriting.concerns(jaxpr):
            return value
        if id(value) not in self.done:
            consts = value.consts if isinstance(value, ClosedJaxpr) else ()
            shapes = [
                jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
                if hasattr(v.aval, "weak_type")
                else v.aval
                for v in jaxpr.invars
            ]
            closed = jax.make_jaxpr(lambda *xs: self.program(jaxpr, consts, xs))(*shapes)
            # Keep a reference to the old program, so that Python does not reuse its id.
            is_open = not isinstance(value, ClosedJaxpr)
            self.done[id(value)] = value, closed.jaxpr if is_open else closed
        return self.done[id(value)][1]


CONVOLUTION = "conv_general_dilated"
"""The primitive of all convolutions."""


@dataclasses.dataclass(frozen=True)
class ByRank:
    """Computes the convolutions of a traced program on each rank's own samples.

    Args:
        mesh: the mesh over all devices.
        batch: the axes that split samples.
    """

    mesh: Mesh
    batch: tuple[str, ...]

    def __call__(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
        """Computes one convolution; returns None if there is no automatic axis of size > 1."""
        here = jax.sharding.get_abstract_mesh()
        manual = () if here.empty else tuple(here.manual_axes)
        automatic = tuple(axis for axis in self.mesh.axis_names if axis not in manual)
        if all(self.mesh.shape[axis] == 1 for axis in automatic):
            return None
        dims = equation.params["dimension_numbers"]
        batch = self._splitting(equation, operands[0].shape[dims.lhs_spec[0]], manual)
        samples = _at(dims.lhs_spec[0], batch)
        results = _at(dims.out_spec[0], batch)
        whole = PartitionSpec()
        mesh = here if manual else self.mesh

        def mapped(function, ins, outs):
            return jax.shard_map(
                function,
                mesh=mesh,
                axis_names={*automatic},
                in_specs=ins,
                out_specs=outs,
                check_vma=False,
            )

        def run(x: Array, k: Array) -> Array:
            return equation.primitive.bind(x, k, **equation.params)

        def backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
            def local(x: Array, k: Array, cotangent: Array) -> tuple[Array, Array]:
                _, pull = jax.vjp(run, x, k)
                of_samples, of_kernel = pull(cotangent)
                return of_samples, of_kernel[None]

            pull = mapped(local, (samples, whole, results), (samples, _at(0, batch)))
            of_samples, of_kernel = pull(*saved, cotangent)
            # Leave the sum over ranks to the compiler: it reduce-scatters to the shards.
            return of_samples, jax.lax.reduce_sum(of_kernel, (0,))

        forward = mapped(run, (samples, whole), results)
        convolve = jax.custom_vjp(forward)
        convolve.defvjp(lambda x, k: (forward(x, k), (x, k)), backward)
        return [convolve(*operands)]

    def _splitting(
        self, equation: JaxprEqn, samples: int, manual: Sequence[str]
    ) -> tuple[str, ...]:
        """The axes that split the samples of a convolution."""
        batch = tuple(axis for axis in self.batch if axis not in manual)
        ways = math.prod(self.mesh.shape[axis] for axis in batch)
        divides = samples % ways == 0 and equation.params["batch_group_count"] == 1
        return batch if divides else ()


def refuse(equation: JaxprEqn) -> None:
    """Raises for a convolution inside a program that cannot be rewritten.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"the model convolves inside {equation.primitive.name!r}, which has a custom derivative, "
        "on a mesh with two or more axes. There the compiler can get the gradients of convolutions "
        "wrong, and this library cannot rewrite the inside of such a function. Call the "
        "convolution outside of it, or use a mesh with one axis, such as dp=8"
    )


def _at(dim: int, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(None,) * dim, axes or None)


SHIFTS = frozenset(
    {"slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate", "split", "rev"}
)
"""The primitives that move elements along a dim."""


def keep_whole(equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
    """Computes one of `SHIFTS` with the dims unsharded that it slices, pads or concatenates."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.manual_axes) >= set(mesh.axis_names):
        return None
    known = factors(equation)
    rank = operands[0].ndim
    # Dims along which elements move.
    dims = [dim for dim in range(rank) if known and known.role(0, dim) not in (Role.PASSES, None)]
    if not dims:
        return None

    def pinned(x: Array) -> Array:
        if x.ndim <= max(dims):
            return x
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(None if dim in dims else free for dim in range(x.ndim)))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return [pinned(x) for x in eval_equation(equation, [pinned(x) for x in operands])]
