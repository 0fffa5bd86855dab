"""`axon inspect` compiles the program that `axon train` runs, including the chip's options."""

import dataclasses
import io
import sys
import types

import numpy as np
import pytest
from rich.console import Console

from axon_dist.core.errors import ConfigError
from axon_dist.core.words import byte_size
from axon_dist.inspect import MemoryReport, bytes_per_device, report
from axon_dist.inspect.parse import as_module
from axon_dist.step import TrainStep
from axon_dist.train.app import examine, train
from axon_dist.train.app.examine import memory_by_category
from axon_dist.train.app.steps import build_step, build_world, check_memory
from axon_dist.train.config import RunConfig
from axon_dist.train.loop import LoopOptions, Trainer


@pytest.fixture
def ran(monkeypatch):
    """Returns the programs that the runtime compiled for calls of steps, as text."""
    texts, call = [], TrainStep.__call__

    def watched(step, state, batch, was_nonfinite=None):
        client = step.world.mesh.devices.flat[0].client
        before = [id(program) for program in client.live_executables()]
        result = call(step, state, batch, was_nonfinite)
        new = (p for p in client.live_executables() if id(p) not in before)
        texts.extend(program.hlo_modules()[0].to_string() for program in new)
        return result

    monkeypatch.setattr(TrainStep, "__call__", watched)
    return texts


@pytest.fixture
def read(monkeypatch):
    """Returns the reported programs, as text."""
    texts = []

    def watched(compiled, mesh, **told):
        texts.append(compiled.as_text())
        return report(compiled, mesh, **told)

    # The subpackage has a function of the same name, which a dotted path would find first.
    monkeypatch.setattr(sys.modules["axon_dist.train.app.examine"], "report", watched)
    return texts


@pytest.mark.full
def test_the_examined_step_is_the_trained_one(tiny, chip, ran, read, monkeypatch):
    config = RunConfig.from_dict(tiny)
    train(config, Console(file=io.StringIO()))
    (trained,) = (text for text in ran if "train_step" in text.splitlines()[0])
    # A run also reports on its step.
    read.clear()
    assert examine(config).report.machine is chip
    bare = {chip.name: dataclasses.replace(chip, options=())}
    monkeypatch.setattr("axon_dist.mesh.chips.HARDWARE", bare)
    examine(config)
    examined, without = read
    assert instructions(trained) == instructions(examined)
    assert instructions(trained) != instructions(without)


def instructions(text):
    """Returns the computations of a program, in the order of the schedule."""
    return {
        name: [(i.name, i.opcode, i.shapes, i.arguments) for i in computation.instructions]
        for name, computation in as_module(text).computations.items()
    }


class OffloadedStep:
    """The step of a config whose state is in host memory, on devices that are no CPUs."""

    def __init__(self, step, free):
        device = types.SimpleNamespace(
            process_index=0, device_kind="chip", memory_stats=lambda: {"bytes_limit": free}
        )
        mesh = types.SimpleNamespace(devices=np.array([device, device], object))
        self.world = types.SimpleNamespace(
            is_cpu=False, size=2, process_index=0, mesh=mesh, num_batch_shares=lambda axes: 1
        )
        self.options, self.strategy, self.state_layout = (
            step.options,
            step.strategy,
            step.state_layout,
        )


def test_arrays_in_host_memory_take_none_of_a_device(tiny):
    config = RunConfig.from_dict({**tiny, "parallel": {"fsdp": {"cpu_offload": "full"}}})
    step = build_step(config, build_world(config))
    shapes = step.state_layout.placed_shapes
    on_device, all_of_it = bytes_per_device(shapes), bytes_per_device(shapes, None)
    assert on_device < all_of_it / 1000

    check_memory(config, OffloadedStep(step, free=on_device))
    with pytest.raises(ConfigError, match=f"need {byte_size(on_device)} on each"):
        check_memory(config, OffloadedStep(step, free=on_device - 1))

    for is_cpu, expected in ((False, on_device), (True, all_of_it)):
        fake = OffloadedStep(step, 0)
        fake.world.is_cpu = is_cpu
        trainer = Trainer(step=fake, batches=[], options=LoopOptions(num_steps=1))
        held = trainer._recorder(dataclasses.replace(shapes, step=0), print, None).device_bytes
        # The step count is an int here, without its four bytes.
        assert held == expected - 4

    read = types.SimpleNamespace(
        memory=MemoryReport(on_device + 7, 0, 0, 100, 0, host_arguments=all_of_it - on_device)
    )
    sizes = memory_by_category(
        types.SimpleNamespace(step=OffloadedStep(step, 0), world=OffloadedStep(step, 0).world), read
    )
    assert sum(sizes.values()) == read.memory.peak
    assert sizes["batch and padding"] == 7 + 4
