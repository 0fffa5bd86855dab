"""A guard against compiled pipelines that would wait forever."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ..core.compat import inner_programs
from ..core.errors import UnsupportedError
from .spec import StepSpec

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"\bbranch_computations=\{([^}]*)\}|\b(?:true|false)_computation=%?([\w.\-]+)"
)
_PERMUTE = re.compile(r" collective-permute(?:-start)?\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class WithoutDivergence:
    """A jitted function whose compiled program is looked through before it runs for the first time.

    The stages of a pipeline take different branches. Sums and gathers over the ranks of one stage
    are safe there, but a permutation waits for all devices, also those that never come: it would
    stop the process without a word. Nobody writes one into a stage on purpose: it comes from
    layers that hand values round a ring, or from the compiler, when it shifts an array whose
    shifted dim it has split.

    Args:
        jitted: the function; its second argument is the one whose shapes change between calls.
    """

    def __init__(self, jitted: Any):
        self._jitted = jitted
        self._compiled: dict[Any, Any] = {}

    def __call__(self, state: Any, *others: Any) -> Any:
        """Runs the function.

        Raises:
            UnsupportedError: when a branch of the compiled program has a permutation.
        """
        leaves, structure = jax.tree.flatten(others)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._compiled:
            compiled = self.lower(state, *others).compile()
            check_branches(compiled.as_text() or "")
            self._compiled[key] = compiled
        return self._compiled[key](state, *others)

    def trace(self, *args: Any) -> jax.stages.Traced:
        """Traces the function.

        Raises:
            UnsupportedError: when a branch of the traced program has a permutation.
        """
        traced = self._jitted.trace(*args)
        _refuse(sorted(set(_permutes_of(traced.jaxpr.jaxpr, False))))
        return traced

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function.

        Raises:
            UnsupportedError: as `trace`.
        """
        return self.trace(*args).lower()


def jit_of(spec: StepSpec) -> Callable[..., Any]:
    """`jax.jit`, guarded where the compiler partitions code that only one stage's devices run."""
    if spec.strategy.pipeline is None:
        return jax.jit
    by_hand = {spec.strategy.pipeline.axis, *spec.strategy.batch_axes}
    left = [axis for axis, size in spec.mesh.shape.items() if size > 1 and axis not in by_hand]
    guarded = lambda *args, **options: WithoutDivergence(jax.jit(*args, **options))
    return guarded if left else jax.jit


def check_branches(text: str) -> None:
    """Looks for permutations in the branches of a compiled program.

    Args:
        text: the program as HLO.

    Raises:
        UnsupportedError: naming the operations that they come from.

    Example:
        >>> check_branches("ENTRY %main (x: f32[]) -> f32[] {\\n}")
    """
    _refuse(sorted(set(_permutes_in_branches(text))))


def _permutes_of(jaxpr: Any, in_branch: bool) -> Iterator[str]:
    """The permutations that a model itself asks for in a branch."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if in_branch and name == "ppermute":
            yield f"ppermute over {equation.params['axis_name']}"
        for inner in inner_programs(equation):
            yield from _permutes_of(inner, in_branch or name == "cond")


def _refuse(found: list[str]) -> None:
    if found:
        raise UnsupportedError(
            "stages of this pipeline would permute values between devices in a branch that the "
            f"other stages do not take, and wait for them forever: {', '.join(found[:4])}. A call "
            "of jax.lax.ppermute does so, and the compiler where a model shifts or slices an array "
            "along a dim that a strategy splits, such as the positions under sequence=True. Leave "
            "that strategy out, or compute such a slice before the model, in the batch"
        )


def _permutes_in_branches(text: str) -> Iterator[str]:
    bodies = _bodies(text)
    waiting = [name for lines in bodies.values() for line in lines for name in _branches(line)]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        for line in bodies[name]:
            waiting += _CALLED.findall(line)
            if _PERMUTE.search(line):
                origin = _OP_NAME.search(line)
                yield origin.group(1) if origin else line.strip().split(" ")[0]


def _branches(line: str) -> list[str]:
    found = []
    for names, name in _BRANCHES.findall(line):
        found += [part.strip().lstrip("%") for part in names.split(",")] if names else [name]
    return found


def _bodies(text: str) -> dict[str, list[str]]:
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = bodies.setdefault(header.group(1), [])
        else:
            lines.append(line)
    return bodies
