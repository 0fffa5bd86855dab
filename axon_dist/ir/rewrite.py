"""A traced program with some of its equations computed in another way, wherever they stand.

What the compiler gets wrong, or must not do, is an operation and not a layer: it may stand in
anybody's model, within loops, branches, calls and rematerialised parts. Rewriting therefore works
on the jaxpr, before it is differentiated.

XLA's partitioner (jax 0.10 to 0.12) makes the gradient of the kernel of a grouped or depthwise
convolution as many times too large as the axis is long that does not split the batch, and gets
that of any convolution wrong where a spatial dim is split over one axis of two. It says nothing,
and a mesh with a single axis is right. So where a mesh has two, the compiler is not asked: each
rank convolves its own samples with the whole kernel.

What the compiler makes of a slice of a dim that it has split is a permutation between devices, and
a permutation in a branch that other stages do not take waits for them forever. Told that the dim is
whole there, it gathers instead, which the ranks of one stage do among themselves.
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
"""(equation, operands) -> its results, or None where it may stay as it is."""

OPENED = CALLS | REMATS | LOOPS | {"cond"}
"""The primitives that run inner programs, which are all in their parameters."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rewriting:
    """Which equations are computed in another way.

    Args:
        replace: what is computed in place of a primitive, by its name.
        hidden: what is called for some of these with an equation that runs one where it cannot be
            reached, as functions with derivatives of their own do, and raises; for the others such
            an equation stays as it is.
    """

    replace: Mapping[str, Replace]
    hidden: Mapping[str, Callable[[JaxprEqn], None]] = dataclasses.field(default_factory=dict)

    def of(self, function: Function) -> Function:
        """Makes a function whose program is rewritten; traced once more here.

        Args:
            function: of arrays; Python numbers among its results stay what they are. It is called
                once for arguments of the same shapes on the same mesh.

        Returns:
            A function of the same arguments with the same results.
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
                # It closes over no tracer, whose trace would have ended by the next call.
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
        """Whether a program holds an equation that may be replaced, at any depth."""
        return any(equation.primitive.name in self.replace for equation in equations(jaxpr))


def for_platform(jaxpr: Jaxpr, branch_of: Callable[[Any], int]) -> Jaxpr:
    """The program in which every branch of a choice by platform is the one of that platform.

    What only the others need, as the scores that attention without a kernel keeps for its backward
    pass, is then needed by nothing, loops over layers included.

    Args:
        jaxpr: an open jaxpr.
        branch_of: the number of the branch, by the platforms that `platform_index` names.

    Returns:
        The program; its equations have the operands and results that they had.
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
            # A reference to the old program is kept, so that its id is not used again.
            done[id(value)] = value, new if program is value else ClosedJaxpr(new, value.consts)
        return done[id(value)][1]

    def number_of(equation: JaxprEqn) -> int | None:
        if (platforms := equation.params.get("branches_platforms")) is not None:
            return branch_of(platforms)
        which = equation.invars[0]
        return numbers.get(which) if isinstance(which, Var) else None

    def changed(equation: JaxprEqn) -> JaxprEqn:
        name, params = equation.primitive.name, equation.params
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
        rewriting: what is replaced.
        done: inner programs by identity, each with its new form: equal calls stay equal.
    """

    rewriting: Rewriting
    done: dict[int, tuple[Any, Any]]

    def program(
        self, jaxpr: Jaxpr, consts: Sequence[Array], values: Sequence[Array]
    ) -> list[Array]:
        return interpret(jaxpr, consts, values, self.equation)

    def equation(self, equation: JaxprEqn, operands: Sequence[Array]) -> Sequence[Array]:
        name, hidden = equation.primitive.name, self.rewriting.hidden
        if name in self.rewriting.replace:
            with in_place_of(equation):
                results = self.rewriting.replace[name](equation, operands)
            if results is not None:
                return results
        elif name in OPENED:
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
            # The old one is held beside the new, for an id is of one object while that lives.
            is_open = not isinstance(value, ClosedJaxpr)
            self.done[id(value)] = value, closed.jaxpr if is_open else closed
        return self.done[id(value)][1]


CONVOLUTION = "conv_general_dilated"
"""The primitive that every convolution is."""


@dataclasses.dataclass(frozen=True)
class ByRank:
    """Computes convolutions of a traced program on each rank's samples alone.

    Args:
        mesh: names and sizes of its axes, over all devices.
        batch: the axes that split samples.
    """

    mesh: Mesh
    batch: tuple[str, ...]

    def __call__(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
        """Computes one convolution; None where no axis is left to the compiler."""
        here = jax.sharding.get_abstract_mesh()
        manual = () if here.empty else tuple(here.manual_axes)
        left = tuple(axis for axis in self.mesh.axis_names if axis not in manual)
        if all(self.mesh.shape[axis] == 1 for axis in left):
            return None
        dims = equation.params["dimension_numbers"]
        batch = self._splitting(equation, operands[0].shape[dims.lhs_spec[0]], manual)
        samples, results = _at(dims.lhs_spec[0], batch), _at(dims.out_spec[0], batch)
        mesh = here if manual else self.mesh

        def mapped(function, ins, outs):
            return jax.shard_map(
                function,
                mesh=mesh,
                axis_names={*left},
                in_specs=ins,
                out_specs=outs,
                check_vma=False,
            )

        whole, run = PartitionSpec(), lambda x, k: equation.primitive.bind(x, k, **equation.params)

        def backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
            def local(x: Array, k: Array, cotangent: Array) -> tuple[Array, Array]:
                _, pull = jax.vjp(run, x, k)
                of_samples, of_kernel = pull(cotangent)
                return of_samples, of_kernel[None]

            ins, addends = (samples, whole, results), _at(0, batch)
            pull = mapped(local, ins, (samples, addends))
            of_samples, of_kernel = pull(*saved, cotangent)
            # Summed by the compiler, which reduce-scatters it to the shards.
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
        f"the model convolves inside {equation.primitive.name!r}, whose derivative is its own, on "
        "a mesh with two or more axes, where the compiler can get the gradients of convolutions "
        "wrong and cannot be told better in there. Call the convolution outside of such a "
        "function, or use a mesh with one axis, such as dp=8"
    )


def _at(dim: int, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(None,) * dim, axes or None)


SHIFTS = frozenset(
    {"slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate", "split", "rev"}
)
"""The primitives that move elements along a dim."""


def keep_whole(equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
    """Computes one of `SHIFTS` with the dims whole that are cut, padded or joined."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.manual_axes) >= set(mesh.axis_names):
        return None
    known, rank = factors(equation), operands[0].ndim
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
