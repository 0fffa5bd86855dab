"""What the programs of a step are compiled with: the chip's options, and the user's over them."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..core.errors import ConfigError, did_you_mean
from ..core.typing import OptionValue
from ..mesh import World
from ..mesh.chips import machine_of, option_names
from .determinism import deterministic_options


def compiler_options(
    world: World,
    given: Mapping[str, OptionValue | None] | None = None,
    deterministic: bool = False,
    whole: bool = False,
    only_sums: bool = False,
) -> dict[str, OptionValue]:
    """Puts together what every program of a step is compiled with.

    The table of chips says what makes collectives fewer and hidden, by the kind of the devices;
    emulated devices, and chips that it does not know, have nothing set. `deterministic` adds to it,
    and what the user gives comes last.

    Args:
        world: the devices, and the mesh they form.
        given: names and values for the compiler; None as a value takes an option of the chip away.
        deterministic: whether every run has to give the same bits.
        whole: whether no loop of the step gathers weights.
        only_sums: whether nothing travels in the step but sums of gradients.

    Returns:
        Names and values for `jax.jit(..., compiler_options=...)`.

    Raises:
        ConfigError: for a value that is none, an option to take away that no chip has, one that
            contradicts `deterministic`, or one that the compiler refuses.
        UnsupportedError: for `deterministic` on devices of which nothing is known.

    Example:
        >>> compiler_options(World.emulate(8))
        {}
    """
    _check_values(given)
    given, chip = dict(given or {}), machine_of(world.mesh)
    fixed = deterministic_options(world) if deterministic else {}
    _check_conflicts(given, fixed)
    own = {}
    if chip is not None:
        own = dict(chip.options + chip.whole_options * whole + chip.sum_options * only_sums)
    every = {**own, **fixed, **given}
    chosen = {name: value for name, value in every.items() if value is not None}
    if chosen:
        _check_compiler(world, chosen)
    return chosen


def _check_values(given: Mapping[str, OptionValue | None] | None) -> None:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"compiler_options is {given!r}; it must be a mapping of names to values, such as "
            "{'xla_gpu_enable_latency_hiding_scheduler': True}"
        )
    known = option_names()
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not isinstance(value, OptionValue | None):
            raise ConfigError(
                f"compiler_options has {name!r}: {value!r}; names must be strings, and values "
                "strings, numbers, True or False, or None to leave an option of the chip out"
            )
        if value is None and name not in known:
            raise ConfigError(
                f"compiler_options takes {name!r} away, which is set for no chip."
                f"{did_you_mean(name, known)}"
            )


def _check_conflicts(given: Mapping[str, OptionValue | None], fixed: Mapping[str, bool]) -> None:
    for name, value in fixed.items():
        if name in given and str(given[name]).lower() != str(value).lower():
            raise ConfigError(
                f"deterministic=True compiles with {name}={value}, and compiler_options say "
                f"{given[name]!r}; leave one of the two out"
            )


def _check_compiler(world: World, chosen: Mapping[str, OptionValue]) -> None:
    """Compiles next to nothing: an unknown name would otherwise come up in the first step."""
    whole = NamedSharding(world.mesh, PartitionSpec())
    nothing = jax.jit(_nothing, out_shardings=whole, compiler_options=dict(chosen))
    try:
        nothing.lower().compile()
    except (RuntimeError, ValueError, TypeError) as error:
        listed = ", ".join(f"{name}={value}" for name, value in sorted(chosen.items()))
        raise ConfigError(
            f"the compiler of these {world.backend} devices refuses its options ({error}); it was "
            f"given {listed}. Correct the one it names in compiler_options, or take it away there "
            "with the value None"
        ) from error


def _nothing() -> jax.Array:
    return jnp.zeros(())
