"""The planner compared with compiled programs, `python -m benchmarks.planner`."""

import json
import statistics
import subprocess
import sys

import pytest

from axon_dist.mesh.targets import missing_compiler


def compared(cells, tmp_path):
    file = tmp_path / "compared.json"
    command = [sys.executable, "-m", "benchmarks.planner", "--cells", cells, "--json", str(file)]
    subprocess.run([*command, "--measured", str(tmp_path / "measured.jsonl")], check=True)
    return json.loads(file.read_text())


@pytest.mark.full
def test_on_emulated_devices(tmp_path):
    rows = compared("^(tower|unet)@cpu", tmp_path)
    assert len(rows) == 3
    for row in rows:
        assert row["state"] == pytest.approx(1, abs=0.001)
        # Of the order and the fusions of XLA:CPU the planner knows nothing.
        assert row["peak"] == pytest.approx(1, abs=0.5)
        assert row["sent"] == pytest.approx(1, abs=0.02)


@pytest.mark.aot
def test_on_gpus_that_are_not_here(tmp_path):
    if missing := missing_compiler("h100:8"):
        pytest.skip(missing)
    rows = compared("^(llama|mixer|tower)@h100:8 .*(ddp|zero1|fsdp) bf16$", tmp_path)
    assert len(rows) == 9
    assert statistics.median(abs(row["peak"] - 1) for row in rows) <= 0.1
    for row in rows:
        assert row["state"] == pytest.approx(1, abs=0.001)
        assert row["peak"] == pytest.approx(1, abs=0.25)
        assert row["sent"] == pytest.approx(1, abs=0.02)


@pytest.mark.aot
def test_gradients_of_weights_wait_and_hybrid_sums_stay_whole(tmp_path):
    """A U-Net: its kernels' gradients come last, and one all-reduce adds them up for all axes."""
    if missing := missing_compiler("h100:8"):
        pytest.skip(missing)
    (row,) = compared("^unet@h100:8 .*hybrid ", tmp_path)
    assert row["peak"] == pytest.approx(1, abs=0.05)
    assert row["sent"] == pytest.approx(1, abs=0.02)


@pytest.mark.aot
def test_pipelines_add_in_place(tmp_path):
    """A pipeline of a tied table that lies split over its stages too."""
    if missing := missing_compiler("h100:8"):
        pytest.skip(missing)
    rows = compared("^gpt@h100:8 pp=4,fsdp=2", tmp_path)
    assert len(rows) == 1
    for row in rows:
        assert row["peak"] == pytest.approx(1, abs=0.2)
        assert row["sent"] == pytest.approx(1, abs=0.02)
