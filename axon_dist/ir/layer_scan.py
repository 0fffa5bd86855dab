"""Scan over layers: equal units called one after another become one `lax.scan` over weights.

A model that loops over its layers in Python compiles each layer separately, and lets the compiler
keep or move values that should live for one layer only. This module works on the jaxpr, where the
data flow is explicit: a chain of calls of the same inner program, each fed by the previous one, is
the loop

    for weights in stacked: x = unit(weights, x)

whatever the Python code looked like. The scan also returns the values between two layers that the
model uses elsewhere. Calls that do not form such a chain stay as they are. A model's own loop over
stacked layers stays that loop.

The remat policy applies to units wherever they are called: in chains, in loops, and in functions
that the model has jitted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ..core.compat import eval_equation, eval_jaxpr, inner_programs
from ..core.typing import Array, Function, PyTree
from .loop_rule import LoopChoice, LoopRule
from .units import RealOnly, RematPolicy, is_unit
from .walk import (
    CALLS,
    LOOPS,
    REMATS,
    Aval,
    called,
    depends_on,
    equations,
    inners,
    interpret,
    made_by,
    same_value,
    values_of,
    variables,
)

SHARED = "shared"
STACKED = "stacked"

Protect: TypeAlias = Callable[[Function, int], Function]
"""(function, how many times it runs) -> the function under `jax.checkpoint`, or unchanged."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """A chain of calls of one unit program, each of which reads results of the previous call.

    Args:
        calls: positions of the equations, in order.
        roles: for each operand of a call, `"shared"` (one value for all calls), `"stacked"` (each
            call has its own), or the index of the previous call's result that feeds it.
    """

    calls: tuple[int, ...]
    roles: tuple[str | int, ...]

    @property
    def carried(self) -> tuple[int, ...]:
        """The results that feed the next call, in operand order."""
        return tuple(role for role in self.roles if isinstance(role, int))


@dataclasses.dataclass(frozen=True)
class LayerScan:
    """How the units of a function run: as loops or one by one, and what they keep for later.

    Args:
        group: (length of a chain, or of the model's own loop) -> how many units each iteration
            runs, and recomputes together.
        remat: which intermediate values the backward pass keeps; None keeps all.
        prefetch: whether the backward pass may gather an iteration's weights one iteration ahead.
        rule: which chains run as a loop.
    """

    group: Callable[[int], int]
    remat: RematPolicy | None
    prefetch: bool
    rule: LoopRule

    def loops(self, jaxpr: Jaxpr, chain: Chain) -> bool:
        """Whether a chain runs as a loop; it always does if units are recomputed in groups."""
        length = len(chain.calls)
        if self.group(length) > 1:
            self.rule.tell(LoopChoice(length, True, "groups of them are recomputed together"))
            return True
        program = jaxpr.eqns[chain.calls[0]].params["jaxpr"]
        protect = functools.partial(self.protect, times=length)
        return self.rule.loops(program, chain.roles, length, protect)

    def protect(self, body: Function, times: int) -> Function:
        """Puts a function that runs `times` times under `jax.checkpoint`.

        The checkpoint's barrier (`prevent_cse`) stops XLA from merging recomputed values with those
        of the forward pass, and delays the gathers of a backward iteration until it starts. A loop
        separates the two passes by itself, so it keeps the barrier only to delay the gathers, and
        `prefetch` drops it. A function that runs once needs the barrier, and so does a loop of one
        iteration, because XLA inlines it.
        """
        if self.remat is None:
            return body
        barrier = not self.prefetch or times == 1
        return jax.checkpoint(body, policy=RealOnly(self.remat), prevent_cse=barrier)


def scan_over_layers(
    function: Function,
    group: int | Callable[[int], int] = 1,
    remat: RematPolicy | None = None,
    *,
    prefetch: bool = False,
    unroll: int | None = 1,
    rule: LoopRule | None = None,
) -> Function:
    """Makes a function whose chains of units run as scans.

    Args:
        function: calls a model with marked units; traced again here.
        group: how many units one iteration runs, or a function that returns this for a number of
            units; the last iteration may run fewer.
        remat: if given, each iteration is under `jax.checkpoint` with this policy. So is each unit
            outside a chain, and each iteration of a model's own loop that calls a unit.
        prefetch: whether the backward pass may gather an iteration's weights one iteration ahead.
            Set it only if units communicate nothing but weights: the compiler would also prefetch
            gathered activations, and compute everything that leads to them twice.
        unroll: chains of at most this many units stay separate calls: each is compiled separately,
            and the values it saves for the backward pass are not stacked. None unrolls up
            to `loop_rule.UNROLLED` units, and runs units that contain a loop as a loop.
        rule: which chains run as a loop; replaces `unroll`.

    Returns:
        A function with the same arguments and results.
    """

    loops = LoopRule(unroll, f"unroll={unroll}") if rule is None else rule

    def scanned(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)

        def size(length: int) -> int:
            return group if isinstance(group, int) else group(length)

        how = LayerScan(size, remat, prefetch, loops)
        results = _evaluate(closed, jax.tree.leaves(args), how)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return scanned


def find_chains(jaxpr: Jaxpr) -> list[Chain]:
    """Finds the chains of at least two units in a jaxpr, each as long as it can be."""
    calls = [index for index, equation in enumerate(jaxpr.eqns) if is_unit(equation)]
    chains: list[Chain] = []
    current: list[int] = calls[:1]
    roles: tuple[str | int, ...] | None = None
    dependent = made_by(jaxpr.eqns[call] for call in current)
    for call in calls[1:]:
        # `dependent` is complete up to the last call, so each equation is visited once.
        dependent = depends_on(jaxpr, dependent, call, start=current[-1] + 1)
        link = _link(jaxpr, current[-1], call, dependent)
        if link is not None and roles in (None, link):
            current.append(call)
            roles = link
            dependent.update(jaxpr.eqns[call].outvars)
            continue
        chains += [Chain(tuple(current), roles)] if roles else []
        current = [call]
        roles = None
        dependent = set(jaxpr.eqns[call].outvars)
    return chains + ([Chain(tuple(current), roles)] if roles else [])


def _link(jaxpr: Jaxpr, last: int, call: int, dependent: set[Var]) -> tuple[str | int, ...] | None:
    """Returns the operands' roles if `call` continues a chain after `last`; else None."""
    before = jaxpr.eqns[last]
    after = jaxpr.eqns[call]
    # `UnitPrograms` gives equal calls of one trace one program, so identity suffices here.
    if before.params["jaxpr"] is not after.params["jaxpr"]:
        return None
    roles: list[str | int] = []
    for old, new in zip(before.invars, after.invars, strict=True):
        # By their bits: 0.0 == -0.0, but a block may read the sign.
        is_equal = (
            isinstance(old, Literal) and isinstance(new, Literal) and same_value(old.val, new.val)
        )
        if old is new or is_equal:
            roles.append(SHARED)
        elif new in before.outvars:
            roles.append(before.outvars.index(new))
            # The carry of a scan keeps its dtype, so the input of the chain must have the dtype of
            # its results. The mesh of an aval is not compared: it is empty for an input that was
            # traced as a shape.
            if _kind(old.aval) != _kind(new.aval):
                return None
        elif not dependent.isdisjoint(variables([new])):
            return None
        else:
            roles.append(STACKED)
    return tuple(roles) if any(isinstance(role, int) for role in roles) else None


def _kind(aval: Aval) -> Hashable:
    """Returns the properties of a carry that must be the same in all iterations."""
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)


def _evaluate(closed: ClosedJaxpr, values: Sequence[Array], how: LayerScan | None) -> list[Array]:
    """Runs a program; if `how` is None, units run unchanged and without checkpoints."""
    jaxpr = closed.jaxpr
    if how is None:
        return interpret(jaxpr, closed.consts, values, eval_equation, enters=_calls_units)
    chains = {chain.calls[0]: chain for chain in find_chains(jaxpr) if how.loops(jaxpr, chain)}
    inside = {call for chain in chains.values() for call in chain.calls}
    env: dict[Var, Array] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))
    done: set[int] = set()

    def run(index: int) -> None:
        equation = jaxpr.eqns[index]
        results = _run(equation, values_of(env, equation.invars), how)
        env.update(zip(equation.outvars, results, strict=True))
        done.add(index)

    for index in range(len(jaxpr.eqns)):
        if index in chains:
            # The loop runs at the position of its first call. So equations that later calls may
            # need, and that depend on no call of the chain, run first, out of program order.
            chain = chains[index]
            last = chain.calls[-1]
            dependent = depends_on(jaxpr, made_by(jaxpr.eqns[call] for call in chain.calls), last)
            for other in range(index, last):
                if other not in inside | done and not dependent & set(jaxpr.eqns[other].outvars):
                    run(other)
            env.update(_scan(jaxpr, chain, env, how))
        elif index not in inside and index not in done:
            run(index)
    return values_of(env, jaxpr.outvars)


def _run(equation: JaxprEqn, operands: Sequence[Array], how: LayerScan) -> Sequence[Array]:
    """Runs an equation, with all units within it under a checkpoint."""
    evaluate = functools.partial(eval_equation, equation)
    if is_unit(equation):
        return how.protect(evaluate, 1)(operands)
    if not has_units(equation):
        return evaluate(operands)
    name = equation.primitive.name
    inner = called(equation)
    if inner is not None and name in CALLS:
        return _evaluate(ClosedJaxpr(inner.jaxpr, inner.consts), operands, how)
    if how.remat is None:
        return evaluate(operands)
    if name == "scan":
        return _scan_of_model(equation, operands, how)
    if name in REMATS and inner is not None:
        return _remat_of_model(equation, inner.jaxpr, operands, how)
    # A branch, a kernel or a function with a custom derivative is recomputed as a whole.
    return how.protect(evaluate, 1)(operands)


def _scan_of_model(equation: JaxprEqn, operands: Sequence[Array], how: LayerScan) -> list[Array]:
    """Runs a model's own scan with the body of each iteration under a checkpoint."""
    (loop,) = inners(equation)
    params = equation.params
    closed = params["jaxpr"]
    values = [_as_array(x, v.aval) for x, v in zip(operands, equation.invars, strict=True)]
    consts, carry, stacked = loop.split_operands(values)
    is_one = _runs_one_unit(closed.jaxpr)
    # The checkpoint wraps the iteration. The model's own checkpoint is dropped: with both, the unit
    # would be recomputed twice.
    compute = functools.partial(_evaluate, closed, how=None if is_one else how)

    def body(carry: Sequence[Array], rows: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        return loop.outputs(compute(values=[*consts, *carry, *rows]))

    both = dataclasses.replace(how, remat=_both(how.remat, *_policies(closed.jaxpr)))
    carry, rows = grouped_scan(
        body,
        carry,
        stacked,
        params["length"],
        how.group(params["length"]) if is_one else 1,
        both.protect if is_one else lambda body, _: body,
        reverse=params["reverse"],
        scan_unroll=params["unroll"],
    )
    return [*carry, *rows]


def _remat_of_model(
    equation: JaxprEqn, jaxpr: Jaxpr, operands: Sequence[Array], how: LayerScan
) -> Sequence[Array]:
    """Runs a model's own checkpoint; it saves the values that both its policy and ours save."""
    policy = equation.params["policy"] or jax.checkpoint_policies.nothing_saveable
    barrier = equation.params["prevent_cse"]
    is_one = _runs_one_unit(jaxpr)

    def run(*values: Array) -> list[Array]:
        return _evaluate(ClosedJaxpr(jaxpr, ()), values, None if is_one else how)

    policy = _both(how.remat, policy) if is_one else policy
    return jax.checkpoint(run, policy=policy, prevent_cse=barrier)(*operands)


def has_units(equation: JaxprEqn) -> bool:
    """Whether the inner programs of an equation call units."""
    return any(is_unit(e) for inner in inner_programs(equation) for e in equations(inner))


def _runs_one_unit(jaxpr: Jaxpr) -> bool:
    """Whether a program calls exactly one unit, once."""
    eqns = list(equations(jaxpr))
    loops = [e for e in eqns if e.primitive.name in LOOPS and has_units(e)]
    return sum(map(is_unit, eqns)) == 1 and not loops


def _calls_units(equation: JaxprEqn) -> bool:
    """Whether an equation is a call or checkpoint around units."""
    is_call = equation.primitive.name in CALLS | REMATS
    return is_call and not is_unit(equation) and has_units(equation)


def _policies(jaxpr: Jaxpr) -> list[RematPolicy]:
    """Returns the policies of the model's own checkpoints around units."""
    checkpoints = [e for e in equations(jaxpr) if e.primitive.name in REMATS and _calls_units(e)]
    return [e.params["policy"] or jax.checkpoint_policies.nothing_saveable for e in checkpoints]


def _both(*candidates: RematPolicy | None) -> RematPolicy:
    """Returns a policy that saves what all policies save; the first one that offloads decides."""
    policies = [policy for policy in candidates if policy is not None]
    if len(policies) == 1:
        return policies[0]

    def policy(*args: Any, **params: Any) -> object:
        answers = [one(*args, **params) for one in policies]
        # A policy returns a boolean, or an object for "recompute", "save" or "offload".
        dropped = [one for one in answers if not one or type(one).__name__ == "RecomputeType"]
        moved = [one for one in answers if hasattr(one, "src")]
        return (*dropped, *moved, True)[0]

    return policy


def _as_array(value: Array, aval: Aval) -> Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value, aval.dtype)


def _scan(jaxpr: Jaxpr, chain: Chain, env: Mapping[Var, Array], how: LayerScan) -> dict[Var, Array]:
    """Runs a chain; returns the values of all its results that other equations read."""
    calls = [jaxpr.eqns[index] for index in chain.calls]
    inner = calls[0].params["jaxpr"]
    first = values_of(env, calls[0].invars)
    stacked_at = [index for index, role in enumerate(chain.roles) if role is STACKED]
    rows = [values_of(env, [call.invars[i] for call in calls]) for i in stacked_at]
    stacked = [jnp.stack([jnp.asarray(row) for row in each]) for each in rows]
    used = _read_elsewhere(jaxpr, chain)

    def unit(carry: tuple[Array, ...], row: list[Array]) -> tuple[tuple[Array, ...], list[Array]]:
        operands = []
        carried = iter(carry)
        own = iter(row)
        for role, shared in zip(chain.roles, first, strict=True):
            if role == SHARED:
                operands.append(shared)
            else:
                operands.append(next(own if role == STACKED else carried))
        results = eval_jaxpr(inner, operands)
        return tuple(results[role] for role in chain.carried), [results[i] for i in used]

    start = tuple(
        jnp.asarray(value)
        for value, role in zip(first, chain.roles, strict=True)
        if isinstance(role, int)
    )
    length = len(calls)
    carry, between = grouped_scan(unit, start, stacked, length, how.group(length), how.protect)
    last = [calls[-1].outvars[i] for i in chain.carried]
    values: dict[Var, Array] = dict(zip(last, carry, strict=True))
    for position, results in zip(used, between, strict=True):
        for row, call in enumerate(calls):
            values[call.outvars[position]] = results[row]
    return values


def grouped_scan(
    body: Function,
    carry: PyTree,
    stacked: list[Array],
    length: int,
    group: int,
    protect: Protect,
    *,
    reverse: bool = False,
    scan_unroll: int | bool = 1,
) -> tuple[PyTree, list[Array]]:
    """`lax.scan` whose iterations run `group` steps each, under one `jax.checkpoint` each.

    Args:
        body: (carry, row) -> (carry, outputs).
        carry: the initial carry.
        stacked: leaves with a leading dim of `length`.
        length: how many steps.
        group: steps per iteration; `length` need not divide by it.
        protect: `protect(body, iterations)` puts the body of a loop under `jax.checkpoint`.
        reverse: whether to start with the last row.
        scan_unroll: the `unroll` of `lax.scan`, for groups of one.

    Returns:
        The last carry, and the stacked outputs of all steps.
    """
    if group == 1:
        return jax.lax.scan(
            protect(body, length), carry, stacked, length, reverse=reverse, unroll=scan_unroll
        )
    if reverse:

        def flipped(rows):
            return [jnp.flip(row, 0) for row in rows]

        carry, outputs = grouped_scan(body, carry, flipped(stacked), length, group, protect)
        return carry, flipped(outputs)

    def several(size):
        """Makes a body that runs `size` steps as an inner scan."""
        return lambda carry, rows: jax.lax.scan(body, carry, rows, size)

    grouped = length // group * group
    parts: list[list[Array]] = []
    if grouped:
        times = grouped // group
        rows = [x[:grouped].reshape(times, group, *x.shape[1:]) for x in stacked]
        carry, outputs = jax.lax.scan(protect(several(group), times), carry, rows, times)
        parts.append([y.reshape(grouped, *y.shape[2:]) for y in outputs])
    if grouped < length:
        rest = protect(several(length - grouped), 1)
        carry, outputs = rest(carry, [x[grouped:] for x in stacked])
        parts.append(outputs)
    return carry, [jnp.concatenate(pieces) for pieces in zip(*parts, strict=True)]


def _read_elsewhere(jaxpr: Jaxpr, chain: Chain) -> list[int]:
    """Returns the positions of results that are read by more than the chain's next call."""
    last = chain.calls[-1]
    readers = [e for i, e in enumerate(jaxpr.eqns) if i not in chain.calls]
    used = variables([*(v for e in readers for v in e.invars), *jaxpr.outvars])
    positions = []
    for position in range(len(jaxpr.eqns[last].outvars)):
        carried = position in chain.carried
        producers = chain.calls[:-1] if carried else chain.calls
        if any(jaxpr.eqns[i].outvars[position] in used for i in producers):
            positions.append(position)
    return positions
