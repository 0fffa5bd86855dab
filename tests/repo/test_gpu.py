"""The unattended GPU run works on any devices, with models of seconds."""

import json
import sys

import pytest

from benchmarks import gpu

ROW = {"name": "speed:124m:bf16", "tiny": False, "device": "H", "jax": "1", "figures": {
    "tokens_per_second": 1000.0, "mfu": 0.4, "estimated_peak_bytes": 2**30,
    "measured_peak_bytes": 2**31,
}}  # fmt: skip


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu", *map(str, arguments)])
    gpu.main()


def test_flops_are_counted_as_is_said():
    # 12 layers of 12 D^2 and their norms, the head, and 6 L T D of attention that is causal.
    weights = 12 * (12 * 768**2) + 50304 * 768
    assert gpu.flops_per_token(gpu.SIZES["124m"]) == pytest.approx(
        6 * weights + 6 * 12 * 1024 * 768, rel=1e-3
    )


def test_finished_rows_are_not_run_again(monkeypatch, tmp_path):
    out, asked = tmp_path / "gpu.json", []

    def in_process(name, args):
        asked.append(name)
        failed = name == "doctor"
        return {"name": name, "tiny": True, **({"failure": "x"} if failed else {"figures": {}})}

    monkeypatch.setattr(gpu, "run_in_process", in_process)
    for _ in range(2):
        run(monkeypatch, "--tiny", "--only", "doctor", "verify", "--json", out)
    verified = [f"verify:{name}" for name in gpu.VERIFIED]
    assert asked == [*verified, "doctor", "doctor"]  # what failed is tried again
    assert sorted(row["name"] for row in json.loads(out.read_text())) == [
        "doctor",
        *sorted(verified),
    ]


def test_a_chunk_that_fails_leaves_its_reason(monkeypatch, tmp_path):
    out = tmp_path / "gpu.json"
    run(monkeypatch, "--tiny", "--only", "doctor", "--seconds", "0", "--json", out)
    (row,) = json.loads(out.read_text())
    assert row == {"name": "doctor", "tiny": True, "failure": "took more than 0 s"}


def test_the_table_has_what_was_measured_alone():
    tiny = {**ROW, "tiny": True}
    failed = {"name": "torch:1.3b", "tiny": False, "failure": "x"}
    rows = list(gpu.markdown([ROW, tiny, failed]))[2:]
    assert rows == ["| speed:124m:bf16 | H | 1 | 1,000 | 40.0% | 1.00 | 2.00 |"]


CHEAP = ("deterministic", "torch:124m")


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in CHEAP else pytest.mark.full) for n in gpu.chunks(True)],
)
def test_every_chunk_runs_here(name):
    row = gpu.run_here(name, small=True)
    figures = row["figures"]
    assert row["name"] == name
    assert row["device"]
    assert figures
    assert figures.get("passed", True)
    json.dumps(row)
