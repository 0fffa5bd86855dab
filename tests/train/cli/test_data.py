"""`axon data check`: samples, their loading speed compared with the step's, and padding."""

import dataclasses
import itertools
import json
import types

import numpy as np
import pytest
import yaml

from axon_dist.core.errors import ConfigError
from axon_dist.train.app import check_data
from axon_dist.train.app.measure import _time_steps
from axon_dist.train.app.runs import build_run
from axon_dist.train.cli import runs
from axon_dist.train.cli.main import main
from axon_dist.train.config import RunConfig
from axon_dist.train.loop import SilentProgress
from tests.words import WORDS


@pytest.fixture
def sft(tiny, tmp_path):
    """A config with prompts and responses, as plain data."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"q": "ask?", "a": "yes"}) + "\n" for _ in range(40)))
    data = {"kind": "jsonl", "files": [str(path)], "prompt": "q", "response": "a"}
    return tiny | {"data": data | {"sequence_length": 16}}


@pytest.mark.full
def test_the_summary_shows_measured_values(sft):
    found = check_data(RunConfig.from_dict(sft), num_samples=2, seconds=0.05)
    # Two documents of 8 tokens in a row of 17; the last 4 tokens of each are targets.
    shown = "[ask?] yes\0\n[ask?] yes\0\n(1 of 17 tokens are padding)"
    assert found.samples == (shown, shown)
    assert found.padding == pytest.approx(1 / 17)
    assert found.learned == pytest.approx(8 / 16)
    assert found.samples_per_second > 0
    assert found.needed_per_second > 0
    assert found.item == "tokens"
    slow = dataclasses.replace(found, samples_per_second=5.0, needed_per_second=10.0)
    assert (slow.keeps_up, dataclasses.replace(slow, samples_per_second=11.0).keeps_up) == (
        False,
        True,
    )
    text = "\n".join(runs.data_lines(slow))
    assert "loading: 5 samples/s by one thread" in text
    assert "by 3 processes" in "\n".join(runs.data_lines(dataclasses.replace(slow, num_workers=3)))
    assert "takes 10 samples/s on these devices: TOO SLOW: steps will wait for data (0.5" in text
    assert "padding: 5.9% of the tokens\ntargets: 50.0% of the tokens" in text


def test_the_verb(sft, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(sft))
    options = ["--samples", "1", "--seconds", "0.01", "--no-step"]
    assert main(["data", "check", str(path), "data.packed=false", *options]) == 0
    shown = capsys.readouterr().out
    # The byte at the end of a document must not control a terminal.
    assert "--- sample 1\n[ask?] yes\N{REPLACEMENT CHARACTER}\n" in shown
    assert "(9 of 17 tokens are padding)" in shown
    assert "the step takes" not in shown


@pytest.mark.full
def test_utilization_counts_the_attention_of_rows_as_long_as_they_are(tiny, tmp_path):
    path = tmp_path / "chats.jsonl"
    sizes = [2] * 95 + [14] * 5
    path.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in sizes))
    data = {"kind": "jsonl", "files": [str(path)], "sequence_length": 16, "packed": False}
    run = build_run(RunConfig.from_dict(tiny | {"data": data | {"buckets": 2}}))
    buckets = run.loader.samples.buckets
    trainer = run.trainer(SilentProgress(), [], lambda *given: None)
    expected = round(buckets.length_around_a_token)
    assert trainer.options.sequence_length == expected < buckets.lengths[-1]
    whole = build_run(RunConfig.from_dict(tiny | {"data": data}))
    assert whole.trainer(SilentProgress(), [], lambda *given: None).options.sequence_length == 16


@pytest.mark.parametrize(("buckets", "lengths"), [(None, {8}), (2, {8, 16})])
def test_a_step_is_timed_with_batches_of_every_length(buckets, lengths, monkeypatch):
    seen = set()

    class Step:
        def init(self):
            return 0

        def __call__(self, state, batch):
            seen.add(batch["tokens"].shape[1])
            ticks[0] += 16 / batch["tokens"].shape[1]
            return state, {}

    class Batches:
        samples = types.SimpleNamespace(buckets=buckets)

        def __iter__(self):
            return (
                {"tokens": np.zeros((4, 16 if number % 4 == 3 else 8))}
                for number in itertools.count()
            )

    ticks = [0.0]
    monkeypatch.setattr("axon_dist.train.app.measure.time.perf_counter", lambda: ticks[0])
    config = types.SimpleNamespace(train=types.SimpleNamespace(global_batch=4))
    speed = _time_steps(Step(), Batches(), config)
    assert seen == lengths
    # A batch of 8 tokens takes two seconds here, and one of 16 one second.
    assert speed == pytest.approx(4 / (2 if buckets is None else 0.75 * 2 + 0.25 * 1))


@pytest.mark.full
def test_every_process_times_the_steps_of_one_position(tiny, monkeypatch):
    def load_for(loader, seconds):
        # Once one batch, then two.
        for _ in range(len(seen) + 1):
            next(loader)
        return 1.0, None

    def time_steps(step, loader, config):
        seen.append(loader.state())
        return 1.0

    seen = []
    monkeypatch.setattr("axon_dist.train.app.measure._load_for", load_for)
    monkeypatch.setattr("axon_dist.train.app.measure._time_steps", time_steps)
    for _ in range(2):
        check_data(RunConfig.from_dict(tiny | {"model": WORDS}), num_samples=1, seconds=0.01)
    assert seen[0] == seen[1]


@pytest.mark.full
def test_pictures_are_told_by_their_shape(tiny):
    data = {"kind": "synthetic_images", "num_images": 40, "image_size": 16}
    plain = tiny | {"model": {"kind": "vit", "preset": "tiny", "num_layers": 1}, "data": data}
    found = check_data(RunConfig.from_dict(plain), 1, 0.01, with_step=False)
    assert found.samples[0].startswith("x uint8[16, 16, 3], y=")
    assert (found.padding, found.learned, found.keeps_up) == (None, None, None)


def test_nothing_to_show_is_refused(tiny):
    with pytest.raises(ConfigError, match="got num_samples=0, an int; give a whole number"):
        check_data(RunConfig.from_dict(tiny), num_samples=0)
