"""`axon plan CONFIG --target h100:8`: which mesh and strategies to take for it."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from rich.console import Console

from axon_dist.app import plan_config
from axon_dist.app.sized import config_of_size
from axon_dist.config import load_config
from axon_dist.core.errors import ConfigError
from axon_dist.core.files import host_memory
from axon_dist.mesh.chips import EMULATED, Hardware, hardware, parse_cluster
from axon_dist.mesh.targets import parse_target, prepare_environment
from axon_dist.planner import parse_count, parse_memory

from .plan_table import show_config_plans

_DEFAULT_HARDWARE = "h100"

_GLOBAL_BATCH = 1024
"""Samples of a step where none are given: two million tokens in samples of 2048, as GPT-3 13B had
(arXiv:2005.14165, table 2.1)."""


def run(arguments: argparse.Namespace) -> int:
    """Prints the plans; the exit code is 1 if none fits."""
    memory = None if arguments.memory is None else parse_memory(arguments.memory)
    if (arguments.config is None) == (arguments.params is None):
        raise ConfigError("plan needs either a config or --params, such as --params 7e9")
    if arguments.config is not None:
        return _plan_config(arguments, memory)
    if arguments.compile:
        raise ConfigError("--compile needs a config, for a number of parameters is no program")
    return _plan_size(arguments, memory)


def _devices(arguments: argparse.Namespace) -> tuple[Any, int]:
    if (arguments.target is None) == (arguments.devices is None):
        raise ConfigError(
            "plan needs either --target, such as h100:8, or --devices, such as 8 --memory 80GB"
        )
    if arguments.target is None:
        return hardware(_DEFAULT_HARDWARE), arguments.devices
    if arguments.target.startswith("cpu:"):
        return _emulated(arguments.target)
    return parse_cluster(arguments.target)


def _emulated(target: str) -> tuple[Hardware, int]:
    """Devices that the CPU makes up have no rates: those of another chip rank the plans."""
    count = parse_target(target).num_devices
    row = hardware(_DEFAULT_HARDWARE)
    share = host_memory() // count
    return dataclasses.replace(row, name="cpu", memory_bytes=share, wiring=EMULATED), count


def _plan_size(arguments: argparse.Namespace, memory: int | None) -> int:
    """Plans for a decoder of a number of parameters, and says which."""
    row, num_devices = _devices(arguments)
    given = {
        "sequence_length": arguments.sequence,
        "optimizer": arguments.optimizer,
        "precision": arguments.precision,
    }
    if num_devices < 1:
        raise ConfigError(f"got --devices {num_devices}; it must be at least 1")
    whole = -(-_GLOBAL_BATCH // num_devices) * num_devices
    config = config_of_size(
        parse_count(arguments.params),
        global_batch=whole if arguments.batch is None else arguments.batch,
        **{name: value for name, value in given.items() if value is not None},
    )
    model, console = config.model, Console(highlight=False)
    console.print(
        f"{arguments.params} parameters: a decoder of {model.num_layers} blocks, width "
        f"{model.width}, {model.num_heads} heads, {model.vocab_size} tokens, samples of "
        f"{model.max_length} tokens"
    )
    found = plan_config(config, row, num_devices, memory)
    show_config_plans(config.name, found, console)
    return 0 if found.fits else 1


def _plan_config(arguments: argparse.Namespace, memory: int | None) -> int:
    """Reads the best arrangements of a config from their own steps, and compiles the best."""
    given = [f"--{name}" for name in _BESIDE if getattr(arguments, name) is not None]
    if given:
        raise ConfigError(
            f"got a config together with {', '.join(given)}; a config says these itself: replace "
            "its values behind it, as in train.global_batch=64"
        )
    if arguments.compile and arguments.target is None:
        raise ConfigError(
            f"--compile {arguments.compile} needs a machine to compile for; name it with --target, "
            "such as h100:8 or cpu:8"
        )
    config = load_config(arguments.config, arguments.overrides)
    row, num_devices = _devices(arguments)
    if arguments.compile:
        prepare_environment(arguments.target)
    found = plan_config(
        config,
        row,
        num_devices,
        memory,
        target=arguments.target,
        num_compiled=arguments.compile,
    )
    show_config_plans(config.name, found, Console(highlight=False))
    return 0 if found.fits else 1


_BESIDE = ("batch", "sequence", "optimizer", "precision")
