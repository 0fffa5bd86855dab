"""The compiler computes the gradients of these operations correctly; otherwise this test fails."""

import jax
import pytest

from axon_dist.core.errors import ConfigError, MeshError
from axon_dist.ir.rewrite import ByRank
from axon_dist.train.app import Finding, check_numerics
from axon_dist.train.app.numerics import LAYOUTS, SENTINELS
from axon_dist.train.cli.main import main


def devices(world, count=4):
    return list(world.mesh.devices.flat[:count])


@pytest.mark.full
@pytest.mark.uncached
def test_convolutions_are_right(world):
    names = ["conv", "conv_depthwise"]  # "dot" is in the test of compiler mistakes
    found = check_numerics(devices(world), names)
    assert {finding.sentinel for finding in found} == set(names)
    assert [finding for finding in found if not finding.is_right] == []


# Loaded from a warm cache, this step once hung.
@pytest.mark.full
@pytest.mark.uncached
def test_the_core_table(world):
    found = check_numerics(devices(world))
    core = [name for name, row in SENTINELS.items() if row.core]
    layouts = [name for name, row in LAYOUTS.items() if row.core]
    assert len(found) == 2 * len(core) * len(layouts)
    assert [finding for finding in found if not finding.is_right] == []


@pytest.mark.full
@pytest.mark.uncached
def test_the_whole_table(world):
    found = check_numerics(devices(world, 8), full=True)
    assert len(found) == 2 * len(SENTINELS) * len(LAYOUTS)
    assert [finding for finding in found if not finding.is_right] == []


def test_compiler_mistakes_are_found(world, monkeypatch):
    """Without our rewriting of convolutions; if a compiler passes this, the rewriting can go."""
    monkeypatch.setattr(ByRank, "__call__", lambda by_rank, equation, operands: None)
    found = check_numerics(devices(world), ["dot", "conv_depthwise"])
    wrong = {(finding.sentinel, finding.leaf) for finding in found if not finding.is_right}
    assert wrong == {("conv_depthwise", "kernel")}


def test_a_finding_beyond_rounding_is_wrong():
    assert Finding("dot", "one", "kernel", 1e-6).is_right
    assert not Finding("dot", "one", "kernel", 1e-3).is_right
    assert not Finding("dot", "one", "kernel", float("nan")).is_right


def test_too_few_devices_and_unknown_names(world):
    with pytest.raises(MeshError, match="needs a mesh with two axes, but got 2 devices; give an"):
        check_numerics(devices(world, 2))
    with pytest.raises(ConfigError, match=r"unknown sentinel 'cov'\. Did you mean 'conv'"):
        check_numerics(devices(world), ["cov"])


def test_the_doctor_says_what_is_wrong(capsys, monkeypatch):
    findings = [Finding("dot", "samples", "kernel", 1e-7), Finding("fft", "samples", "inner", 1.0)]
    monkeypatch.setattr("axon_dist.train.cli.machine.check_numerics", lambda given, full: findings)
    assert main(["doctor", "--numerics"]) == 1
    text = capsys.readouterr().out
    assert "1 of 2 right, error <= 1.0e-07" in text
    assert "off by 1.0e+00, samples" in text
    assert f"{len(jax.devices())} x " in text
