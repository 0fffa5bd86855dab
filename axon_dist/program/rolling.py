"""Rolling: equal units called one after another become one `lax.scan` over stacked weights.

A model that loops over its layers in Python compiles every layer anew, and lets the compiler keep
or move what should live for one layer only. Rolling works on the jaxpr, where the flow of data is
explicit: a chain of calls of the same inner program, each fed by the one before, is the loop

    for weights in stacked: x = unit(weights, x)

whatever the Python code looked like. Values that the model uses from between two layers come out
of the scan as well. Where the flow is not such a chain, the calls are left as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ..core.compat import eval_equation, eval_jaxpr
from .units import UNIT_NAME, RealOnly, RematPolicy

SHARED, STACKED = "shared", "stacked"

Protect: TypeAlias = Callable[[Callable[..., Any], int], Callable[..., Any]]
"""Puts what runs so many times under `jax.checkpoint`, or leaves it as it is."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """Calls of one unit program that feed each other.

    Args:
        calls: positions of the equations, in order.
        roles: for each operand of a call, `"shared"` by all calls, `"stacked"` (each has its own),
            or the index of the result of the call before that it is.
    """

    calls: tuple[int, ...]
    roles: tuple[str | int, ...]

    @property
    def carried(self) -> tuple[int, ...]:
        """The results that feed the next call, in the order of the operands they become."""
        return tuple(role for role in self.roles if isinstance(role, int))


def roll(
    function: Callable[..., Any],
    group: int = 1,
    remat: RematPolicy | None = None,
    *,
    prefetch: bool = False,
) -> Callable[..., Any]:
    """Makes a function whose chains of units run as scans.

    Args:
        function: calls a model with marked units; traced once more here.
        group: how many units one iteration runs; the last iteration may run fewer.
        remat: when given, each iteration is under `jax.checkpoint` with this policy, and so is
            each unit that is in no chain.
        prefetch: whether the backward pass may gather the weights of an iteration in the one
            before. Only where units move nothing but weights: the compiler would prefetch gathered
            activations too, with all the compute that leads up to them, and do it twice.

    Returns:
        A function of the same arguments with the same results.
    """

    def rolled(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        protect = functools.partial(_protect, remat=remat, prefetch=prefetch)
        results = _evaluate(closed, jax.tree.leaves(args), group, protect)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return rolled


def is_unit(equation: Any) -> bool:
    """Whether an equation of a jaxpr is the call of a marked unit."""
    return equation.params.get("name") == UNIT_NAME and "jaxpr" in equation.params


def find_chains(jaxpr: Any) -> list[Chain]:
    """Finds the chains of at least two units in a jaxpr, each as long as it can be."""
    calls = [index for index, equation in enumerate(jaxpr.eqns) if is_unit(equation)]
    chains: list[Chain] = []
    current: list[int] = calls[:1]
    roles: tuple[str | int, ...] | None = None
    for call in calls[1:]:
        link = _link(jaxpr, current, call)
        if link is not None and roles in (None, link):
            current, roles = [*current, call], link
            continue
        chains += [Chain(tuple(current), roles)] if roles else []
        current, roles = [call], None
    return chains + ([Chain(tuple(current), roles)] if roles else [])


def _link(jaxpr: Any, chain: list[int], call: int) -> tuple[str | int, ...] | None:
    """The roles of the operands of `call` as the next of a chain, or None where it is not."""
    before, after = jaxpr.eqns[chain[-1]], jaxpr.eqns[call]
    if before.params["jaxpr"] is not after.params["jaxpr"]:
        return None
    tainted = tainted_by(jaxpr, chain, call)
    roles: list[str | int] = []
    for old, new in zip(before.invars, after.invars, strict=True):
        if _same(old, new):
            roles.append(SHARED)
        elif not isinstance(new, Literal) and new in before.outvars:
            roles.append(before.outvars.index(new))
            if old.aval != new.aval:
                return None
        elif not isinstance(new, Literal) and new in tainted:
            return None
        else:
            roles.append(STACKED)
    return tuple(roles) if any(isinstance(role, int) for role in roles) else None


def tainted_by(jaxpr: Any, calls: Sequence[int], stop: int) -> set[Any]:
    """The variables before equation `stop` that depend on results of the calls."""
    tainted: set[Any] = set()
    for index, equation in enumerate(jaxpr.eqns[:stop]):
        reads = any(not isinstance(v, Literal) and v in tainted for v in equation.invars)
        if index in calls or reads:
            tainted.update(equation.outvars)
    return tainted


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Literal) or isinstance(new, Literal):
        return isinstance(old, Literal) and isinstance(new, Literal) and bool(old.val == new.val)
    return old is new


def _evaluate(closed: Any, values: list[Any], group: int, protect: Protect) -> list[Any]:
    jaxpr = closed.jaxpr
    chains = {chain.calls[0]: chain for chain in find_chains(jaxpr)}
    inside = {call for chain in chains.values() for call in chain.calls}
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))
    done: set[int] = set()

    def run(index: int) -> None:
        equation = jaxpr.eqns[index]
        evaluate = functools.partial(eval_equation, equation)
        if is_unit(equation):
            evaluate = protect(evaluate, 1)
        results = evaluate([_read(env, v) for v in equation.invars])
        env.update(zip(equation.outvars, results, strict=True))
        done.add(index)

    for index in range(len(jaxpr.eqns)):
        if index in chains:
            chain = chains[index]
            tainted = tainted_by(jaxpr, chain.calls, chain.calls[-1])
            for other in range(index, chain.calls[-1]):
                if other not in inside and not tainted & set(jaxpr.eqns[other].outvars):
                    run(other)
            env.update(_scan(jaxpr, chain, env, group, protect))
        elif index not in inside and index not in done:
            run(index)
    return [_read(env, v) for v in jaxpr.outvars]


def _read(env: dict[Any, Any], variable: Any) -> Any:
    return variable.val if isinstance(variable, Literal) else env[variable]


def _scan(
    jaxpr: Any, chain: Chain, env: dict[Any, Any], group: int, protect: Protect
) -> dict[Any, Any]:
    """Runs a chain and returns the values of all results that something else reads."""
    calls = [jaxpr.eqns[index] for index in chain.calls]
    inner = calls[0].params["jaxpr"]
    read = lambda v: _read(env, v)
    first = [read(v) for v in calls[0].invars]
    own = [index for index, role in enumerate(chain.roles) if role is STACKED]
    stacked = [jnp.stack([jnp.asarray(read(call.invars[i])) for call in calls]) for i in own]
    kept = _read_elsewhere(jaxpr, chain)

    def unit(carry: tuple[Any, ...], mine: list[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        operands, fed, each = [], iter(carry), iter(mine)
        for role, shared in zip(chain.roles, first, strict=True):
            source = {SHARED: None, STACKED: each}.get(role, fed)  # type: ignore[call-overload]
            operands.append(shared if source is None else next(source))
        results = eval_jaxpr(inner, operands)
        return tuple(results[role] for role in chain.carried), [results[i] for i in kept]

    start = tuple(
        jnp.asarray(value)
        for value, role in zip(first, chain.roles, strict=True)
        if isinstance(role, int)
    )
    carry, between = grouped_scan(unit, start, stacked, len(calls), group, protect)
    last = [calls[-1].outvars[i] for i in chain.carried]
    found: dict[Any, Any] = dict(zip(last, carry, strict=True))
    for position, rows in zip(kept, between, strict=True):
        for row, call in enumerate(calls):
            found[call.outvars[position]] = rows[row]
    return found


def grouped_scan(
    body: Callable[..., Any],
    carry: Any,
    stacked: list[Any],
    length: int,
    group: int,
    protect: Protect,
) -> tuple[Any, list[Any]]:
    """`lax.scan` whose iterations run `group` steps each, under one `jax.checkpoint` each.

    Args:
        body: (carry, row) -> (carry, outputs).
        carry: what the first step gets.
        stacked: leaves with a leading dim of `length`.
        length: how many steps.
        group: steps per iteration; `length` need not divide by it.
        protect: puts the body of a loop of so many iterations under `jax.checkpoint`.

    Returns:
        The last carry, and the stacked outputs of all steps.
    """
    if group == 1:
        return jax.lax.scan(protect(body, length), carry, stacked, length=length)
    several = lambda carry, rows: jax.lax.scan(body, carry, rows)
    whole = length // group * group
    parts: list[Any] = []
    if whole:
        rows = [x[:whole].reshape(-1, group, *x.shape[1:]) for x in stacked]
        carry, outputs = jax.lax.scan(protect(several, whole // group), carry, rows)
        parts.append([y.reshape(whole, *y.shape[2:]) for y in outputs])
    if whole < length:
        carry, outputs = protect(several, 1)(carry, [x[whole:] for x in stacked])
        parts.append(outputs)
    return carry, [jnp.concatenate(pieces) for pieces in zip(*parts, strict=True)]


def _protect(
    body: Callable[..., Any], times: int, *, remat: RematPolicy | None, prefetch: bool
) -> Callable[..., Any]:
    """What runs so many times, under `jax.checkpoint`.

    Its barrier keeps recomputed values apart from those of the forward pass, and holds the gathers
    of a backward iteration back until it starts. A loop keeps the two passes apart by itself; what
    runs once, or in a loop of one iteration, which is inlined, needs the barrier.
    """
    if remat is None:
        return body
    return jax.checkpoint(body, policy=RealOnly(remat), prevent_cse=not prefetch or times == 1)


def _read_elsewhere(jaxpr: Any, chain: Chain) -> list[int]:
    """Which results of the calls something reads besides the next call of the chain."""
    last = chain.calls[-1]
    readers = [e for i, e in enumerate(jaxpr.eqns) if i not in chain.calls]
    used = {v for e in readers for v in e.invars if not isinstance(v, Literal)}
    used |= {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    positions = []
    for position in range(len(jaxpr.eqns[last].outvars)):
        carried = position in chain.carried
        producers = chain.calls[:-1] if carried else chain.calls
        if any(jaxpr.eqns[i].outvars[position] in used for i in producers):
            positions.append(position)
    return positions
