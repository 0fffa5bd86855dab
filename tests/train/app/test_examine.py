"""`axon inspect` compiles the program that `axon train` runs, including the chip's options."""

import dataclasses
import io
import sys

import pytest
from rich.console import Console

from axon_dist.inspect import report
from axon_dist.inspect.parse import as_module
from axon_dist.step import TrainStep
from axon_dist.train.app import examine, train
from axon_dist.train.config import RunConfig


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
