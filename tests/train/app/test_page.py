"""The page of a run: all sections, no external files, and a note about every broken record."""

import html.parser
import itertools
import json
import re
import shutil
import subprocess
import time

import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.schedule import build_schedule
from axon_dist.train.app import report_page
from axon_dist.train.app.page import PARTS
from axon_dist.train.app.run_records import read_recorded
from axon_dist.train.cli.main import main

EVIL = '\x1b[2J<script>alert(1)</script><img src="http://evil.example/x.png">'
PROGRAM = {
    "strategy": "ddp + pipeline",
    "mesh": {"dp": 2, "pp": 2},
    "devices": [{"rank": rank, "id": rank, "process": rank // 2} for rank in range(4)],
    "chip": None,
    "chip_bytes": None,
    "memory": {"parameters": 1000, "optimizer state": 2000, "batch and padding": 0},
    "collectives": [
        {
            "kind": "all-reduce", "axis": "dp", "dtypes": ["f32"], "wire_bytes": 500, "count": 3,
            "exposure": "exposed", "source": EVIL,
        },
    ],
    "wire_bytes_by_axis": {"dp": 1500},
    "is_cpu": True,
    "leaves": [
        {
            "path": EVIL, "shape": [2, 3], "dtype": "float32", "bytes": 24, "bytes_per_device": 12,
            "spec": "P('dp',)", "why": "dim 0 of (2, 3) split 2 ways",
        },
    ],
    "schedule": {"name": "1f1b", "csv": build_schedule("1f1b", 2, 4).to_csv()},
}  # fmt: skip
SUMMARY = {
    "name": EVIL, "ended": "finished", "steps": 4, "strategy": "ddp", "mesh": "dp=2,pp=2",
    "unit": "nats/byte", "seconds": {"compile": 3.0, "data": 0.5, "save": 1.0, "validation": 2.0},
    "step_percentiles": {"50": 0.1, "100": 0.4}, "jax": "0.12", "devices": 4, "first_step": 2,
}  # fmt: skip
KINDS = ("products", "attention", "recomputed", "kernels", "copies", "wire", "gaps", "host")
LOST = [
    {"kind": kind, "seconds": 0.01, "advice": EVIL,
     "places": [{"source": EVIL, "operation": "dot.1", "seconds": 0.01, "count": 2.0}]}
    for kind in KINDS
]  # fmt: skip
WATERFALL = {
    "device": EVIL, "num_devices": 4, "num_steps": 3, "step_seconds": 0.1, "peak_flops": 1e12,
    "peak_source": EVIL, "flops": 2e10, "useful_seconds": 0.02, "losses": LOST, "notes": [EVIL],
}  # fmt: skip


def row(step, unix, elapsed):
    return {
        "step": step, "train/loss": 5.0 / step, "train/accuracy": 0.5, "time/unix": unix,
        "time/elapsed_seconds": elapsed, "time/step_seconds": 0.1, "time/goodput": 0.5,
        "time/tokens_per_second": 100.0, "optimizer/learning_rate": 0.1,
    }  # fmt: skip


ROWS = [
    *[row(1, 100.0, 10.0), row(2, 110.0, 20.0), {"step": 2, "validation/loss": 4.0}],
    # Another leg began at 200, 90 seconds after the last record.
    *[row(3, 205.0, 5.0), {"step": 4, "train/loss": "nan"}],
    {"step": 4, "validation/loss": 3.0, "validation/accuracy": 0.6},
]


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (run / "program.json").write_text(json.dumps(PROGRAM))
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    (run / "waterfall.json").write_text(json.dumps(WATERFALL))
    (run / "config.yaml").write_text(f"name: '{EVIL}'\n")
    return run


class Page(html.parser.HTMLParser):
    """Collects tags, addresses and the text of each section."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.texts, self._here = [], [], {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        found = dict(attrs)
        self.addresses += [found[name] for name in ("src", "href", "action") if name in found]
        if tag == "section":
            self._here = found["id"]

    def handle_data(self, data):
        self.texts[self._here] = self.texts.get(self._here, "") + data


def test_all_parts_are_drawn_and_nothing_is_asked_for(folder):
    text = report_page(folder)
    page = Page(text)
    assert {part.key for part in PARTS} - {"runs", "norms"} == set(page.texts) - {"", "absent"}
    assert "Gradient norm: " in page.texts["absent"]
    for figure in ("best validation loss", "3.0000 nats/byte, step 4", "100 tokens/s", "1 time"):
        assert figure in page.texts[""]
    assert text.count("resumed after step 2<") == text.count("dashed: resumed") > 0
    assert "cannot be drawn" not in text
    assert all(re.match("#|data:,$", address) for address in page.addresses)
    assert "http://" not in text.replace("http://evil.example", "")
    assert "https://" not in text
    assert re.search(r"@import|url\(|fetch\(|XMLHttp", text) is None
    assert "default-src 'none'" in text
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert "\x1b" not in text
    expected = {
        "loss": "training", "validation": "accuracy", "rate": "learning rate",
        "throughput": "goodput", "steps": "100 ms", "time": "restart",
        "memory": "3 kB per device", "collectives": "1.5 kB sent", "schedule": "bubble",
        "mesh": "dp=2, pp=2", "parameters": "dim 0 of (2, 3) split 2 ways", "versions": "0.12",
        "config": "name:",
    }  # fmt: skip
    for key, words in expected.items():
        assert words in page.texts[key], key
    assert "1:30" in page.texts["time"]  # the restart, from 110 to 200
    assert "exposed" not in page.texts["collectives"]  # unknown for CPUs
    assert "1 number of the metrics not finite" in page.texts[""]


def test_steps_that_a_rollback_undid_are_not_drawn(folder):
    undone = [row(2, 110.0, 20.0), {"step": 2, "validation/loss": 0.5}, row(3, 115.0, 25.0)]
    again = [row(2, 120.0, 30.0), {"step": 2, "validation/loss": 2.0}]
    rows = [row(1, 100.0, 10.0), *undone, *again, row(3, 125.0, 35.0)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorded = read_recorded(folder)
    assert recorded.curve("validation/loss") == [(2.0, 2.0)]
    assert [step for step, _ in recorded.curve("train/loss")] == [1.0, 2.0, 3.0]
    assert recorded.figures()["best validation loss"] == "2.0000 nats/byte, step 2"
    assert recorded.resumes == ()


def test_the_same_step_twice_in_a_row_is_the_later_one(folder):
    rows = [row(1, 100.0, 10.0), row(2, 110.0, 20.0), row(2, 120.0, 30.0) | {"train/loss": 9.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_recorded(folder).curve("train/loss") == [(1.0, 5.0), (2.0, 9.0)]


@pytest.mark.parametrize("corrected", [-3.0, 0.0, 3.0])
def test_a_leg_that_reports_later_than_the_one_before_is_a_resume(folder, corrected):
    """The clock of the host may be set right within a leg, which is no resume."""
    first = [row(1, 110.0, 10.0), row(2, 120.0 + corrected, 20.0)]
    rows = [*first, row(3, 190.0, 40.0), row(4, 200.0 + corrected, 50.0)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").unlink()
    recorded = read_recorded(folder)
    assert recorded.resumes == (2.0,)
    assert recorded.restart_seconds == 150 - 120 - corrected
    assert recorded.figures()["time"] == "1:10"  # 20 seconds and 50 seconds


@pytest.mark.parametrize("name", ["metrics.jsonl", "program.json", "summary.json", "config.yaml"])
@pytest.mark.parametrize("damage", [None, "", "{", "[1, 2]", '{"memory": 3, "step": {}}\n', "\0ÿ"])
def test_missing_records_are_named_and_the_rest_is_drawn(folder, name, damage):
    if damage is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(damage)
    page = Page(report_page(folder))
    assert set(page.texts) - {"", "absent"} <= {part.key for part in PARTS}
    told = "".join(page.texts.values())
    if name != "config.yaml" or damage is None:
        assert name in told
    if name != "metrics.jsonl":
        assert "training" in page.texts["loss"]


def test_an_endless_file_is_read_to_a_limit(folder, monkeypatch):
    monkeypatch.setattr("axon_dist.train.app.run_records._MOST_READ", 2**14)
    monkeypatch.setattr("axon_dist.train.app.run_records._BLOCK", 2**11)
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step, "train/loss": step}) + "\n")
    (folder / "summary.json").write_text(" " * 2**15)
    page = Page(report_page(folder))
    assert "of which 16.4 kB are read at even distances" in page.texts[""]
    assert "final training loss19999.0000" in page.texts[""]
    assert "lines are broken" not in page.texts[""]
    assert "summary.json cannot be read (it has 32768 bytes" in page.texts[""]


def test_two_runs_are_shown_side_by_side(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "summary.json").write_text(json.dumps({**SUMMARY, "name": "other"}))
    (other / "config.yaml").write_text("name: other\ntrain: {steps: 9}\n")
    page = Page(report_page(folder, [other]))
    assert "training, other" in page.texts["loss"]
    assert page.texts["config"].count("name:") == 2
    assert "train.steps" in page.texts["runs"]
    assert "best validation loss" in page.texts["runs"]
    assert "training, other" not in Page(report_page(folder)).texts["loss"]


@pytest.mark.parametrize("text", ["aliases", "long"])
def test_a_config_that_would_take_for_ever_is_not_compared(folder, tmp_path, text):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join(['*' + a] * 10)}]" for a, b in itertools.pairwise("abcdefgh")]
    many = "".join(f"k{i}: {i}\n" for i in range(150_000))
    (other / "config.yaml").write_text("\n".join(lines) if text == "aliases" else many)
    started = time.process_time()
    report_page(folder, [other])
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (False, r"there is no folder '.*none'; name one"),
        (True, r"has no records of a run: metrics"),
    ],
)
def test_no_run(tmp_path, make, message):
    if make:
        (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=message):
        report_page(tmp_path / "none")


def test_the_command_writes_it_into_the_run_or_where_it_is_told(folder, tmp_path, capsys):
    assert main(["report", str(folder)]) == 0
    assert main(["report", str(folder), "--out", str(tmp_path / "a.html")]) == 0
    assert (tmp_path / "a.html").read_text() == (folder / "report.html").read_text()
    assert f"report: {tmp_path / 'a.html'}" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "none")]) == 2


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")
def test_a_browser_draws_it_without_a_complaint(folder, tmp_path):
    main(["report", str(folder)])
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'page.png'}",
        (folder / "report.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (tmp_path / "page.png").stat().st_size > 5000
    assert "CONSOLE" not in done.stderr


def test_two_runs_of_one_name_are_distinguished(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    for compared, label in ((other, "(other)"), (folder, "(compared)")):
        page = report_page(folder, compared)
        for title in ("Where the time went", "Memory per device", "Collectives"):
            section = page.split(f"<h2>{title}</h2>")[1].split("<h2>")[0]
            heads = re.findall(r"<h3>(.*?)</h3>", section)
            assert len(heads) == len(set(heads)) == 2
            assert heads[1].endswith(label)
