"""Where the inputs of a program are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Literal

from ..core.compat import inner_programs
from .layer_scan import has_units, is_unit


def read_outside_units(jaxpr: Any, names: Sequence[str]) -> Iterator[str]:
    """The inputs that are computed with elsewhere than in the units they are handed to.

    Args:
        jaxpr: whose first inputs have names; units in it are marked.
        names: of these inputs.

    Returns:
        The names, each as often as it is read; a change of dtype reads nothing.
    """
    return _read(jaxpr, dict(zip(jaxpr.invars, names, strict=False)))


def _read(jaxpr: Any, names: dict[Any, str]) -> Iterator[str]:
    for equation in jaxpr.eqns:
        read = {v: names[v] for v in equation.invars if not isinstance(v, Literal) and v in names}
        if not read or is_unit(equation):
            continue
        if equation.primitive.name == "convert_element_type":
            names[equation.outvars[0]] = next(iter(read.values()))
        elif has_units(equation):
            for inner in inner_programs(equation):
                # Branches have an index before their operands.
                outer = equation.invars[len(equation.invars) - len(inner.invars) :]
                pairs = zip(inner.invars, outer, strict=True)
                named = [
                    (new, read[old])
                    for new, old in pairs
                    if not isinstance(old, Literal) and old in read
                ]
                yield from _read(inner, dict(named))
        else:
            yield from read.values()
