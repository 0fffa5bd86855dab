"""The compiler options of a step: those of its chip, of `deterministic`, and the user's."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..core.errors import ConfigError, UnsupportedError, did_you_mean, warn
from ..core.typing import OptionValue
from ..mesh import Backend, World, is_abstract, option_names, options_row_of
from ..parallel import Strategy
from .options import ELASTIC

_OPTIONS: MappingProxyType[Backend, dict[str, bool]] = MappingProxyType(
    {
        # XLA:CPU adds in a fixed order, whatever the number of threads.
        Backend.EMULATED: {},
        Backend.GLOO: {},
        # Scatters sort instead of racing, cuBLAS and cuDNN use algorithms with a fixed order, and
        # no kernel is chosen by its measured time: more than xla_gpu_exclude_nondeterministic_ops
        # (openxla/xla, docs/determinism.md and #12520). Triton is off, because its kernels are only
        # chosen by measured time: XLA finds none for a product that it gives to Triton (jax 0.11
        # and 0.12). cuBLAS has a default kernel for each product.
        Backend.NCCL: {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False},
        # The TPU compiler fixes the order.
        Backend.TPU: {},
    }
)


def deterministic_options(world: World, deterministic: bool | str = True) -> dict[str, OptionValue]:
    """Returns the compiler options under which a program gives the same bits every time.

    This holds for the same program, mesh, versions and kind of devices. Another mesh adds in
    another order, except under `"elastic"`.

    Args:
        world: the devices, and the mesh they form.
        deterministic: True, or `"elastic"` for the same bits on 1, 2, 4, ... devices.

    Returns:
        Names and values for `jax.jit(..., compiler_options=...)`; empty if nothing has to be set.

    Raises:
        UnsupportedError: for devices whose options are not known; for `"elastic"` on other devices
            than CPUs.

    Example:
        >>> deterministic_options(World.emulate(8))
        {}
    """
    if world.backend not in _OPTIONS:
        raise UnsupportedError(
            f"deterministic=True on {world.backend} devices: no options are known with which "
            f"they give the same bits twice; use {', '.join(_OPTIONS)} devices, or leave it out",
            code="deterministic-devices",
        )
    if deterministic != ELASTIC:
        return dict(_OPTIONS[world.backend])
    if not world.is_cpu:
        raise UnsupportedError(
            f"deterministic={ELASTIC!r} on {world.backend} devices: equal bits on any "
            "number of ranks have been shown only on CPUs; use emulated devices or processes on "
            "CPUs, or deterministic=True",
            code="elastic-devices",
        )
    # Whether the simplifier turns x / broadcast(y) into x * broadcast(1 / y) depends on the passes
    # before it, which differ between one partition and several. Code that is moved out of a loop is
    # fused with the code around the loop, and then other products are contracted with a sum (FMA).
    return {"xla_disable_hlo_passes": "algsimp,while-loop-invariant-code-motion"}


def compiler_options(
    world: World,
    given: Mapping[str, OptionValue | None] | None = None,
    deterministic: bool | str = False,
    strategy: Strategy | None = None,
) -> dict[str, OptionValue]:
    """Merges the compiler options of every program of a step.

    The table of chips has, for each kind of device, options that combine collectives and overlap
    them with compute; emulated devices and unknown chips have none. `deterministic` adds its own
    options. The user's options take precedence.

    Args:
        world: the devices, and the mesh they form.
        given: names and values for the compiler; the value None removes an option of the chip.
        deterministic: True if every run should give the same bits, `"elastic"` if also on any
            number of devices.
        strategy: the strategy of the step, because options in the table depend on what it sends.
            None if it is not known.

    Returns:
        Names and values for `jax.jit(..., compiler_options=...)`.

    Raises:
        ConfigError: for a value of an unsupported type, an option to remove that no chip has,
            one that contradicts `deterministic`, or one that the compiler refuses.
        UnsupportedError: for `deterministic` on devices whose options are not known.

    Example:
        >>> compiler_options(World.emulate(8))
        {}
    """
    if given is not None:
        _check_values(given)
    given = dict(given or {})
    fixed = deterministic_options(world, deterministic) if deterministic else {}
    for name, value in fixed.items():
        if name in given and str(given[name]).lower() != str(value).lower():
            raise ConfigError(
                f"deterministic={deterministic} compiles with {name}={value}, but "
                f"compiler_options say {given[name]!r}; leave one of the two out"
            )
    if is_abstract(world):
        return {name: value for name, value in given.items() if value is not None}
    defaults: Mapping[str, OptionValue] = {}
    chip = None if world.is_cpu else options_row_of(world.mesh)
    if chip is not None and strategy is None:
        defaults = chip.options_for(world.size)
    elif chip is not None and strategy is not None:
        parallel = False if strategy.pipeline else None
        if strategy.layers and parallel is None:
            # Each transfer around a ring consists of several arrays.
            parallel = all(x.sends_around and x.splits_positions for x in strategy.layers)
        gathers_nothing = strategy.loops_gather_nothing
        sums = strategy.sends_only_sums
        defaults = chip.options_for(world.size, gathers_nothing, sums, parallel)
    merged = {**defaults, **fixed, **given}
    options = {name: value for name, value in merged.items() if value is not None}
    of_chip = defaults.keys() - fixed.keys() - given.keys()
    return _accepted(world, options, of_chip) if options else {}


def _check_values(options: Mapping[str, OptionValue | None]) -> None:
    known = option_names()
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, OptionValue | None):
            raise ConfigError(
                f"compiler_options has {name!r}: {value!r}; names must be strings, and values "
                "strings, numbers, True or False, or None to leave an option of the chip out"
            )
        if value is None and name not in known:
            raise ConfigError(
                f"compiler_options removes {name!r}, which no chip sets.{did_you_mean(name, known)}"
            )


def _accepted(
    world: World, options: Mapping[str, OptionValue], of_chip: Set[str]
) -> dict[str, OptionValue]:
    """Removes the options of the chip that this compiler does not know.

    Compiles a trivial program: otherwise an unknown name would only fail in the first step.
    """
    known = dict(options)
    refused = []
    replicated = NamedSharding(world.mesh, PartitionSpec())
    while known:
        trivial = jax.jit(lambda: jnp.zeros(()), out_shardings=replicated, compiler_options=known)
        try:
            trivial.lower().compile()
            break
        except (RuntimeError, ValueError, TypeError) as error:
            unknown = [name for name in known if f"option: '{name}'" in str(error)]
            if not unknown or unknown[0] not in of_chip:
                raise _refusal(world, known, error) from error
            refused += unknown
            known = {name: value for name, value in known.items() if name not in unknown}
    if refused:
        warn(
            f"the compiler of these {world.backend} devices does not know {', '.join(refused)}, "
            "which the table of chips has for them; steps are compiled without, and may be slower"
        )
    return known


def _refusal(world: World, options: Mapping[str, OptionValue], error: Exception) -> ConfigError:
    listed = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
    return ConfigError(
        f"the compiler of these {world.backend} devices refuses its options ({error}); it was "
        f"given {listed}. Correct the one it names in compiler_options, or set it to None there "
        "to leave it out"
    )
