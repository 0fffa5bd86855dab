import io
import json
import re
import shutil
import signal
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from rich.console import Console

from axon_dist.checkpoint import load_checkpoint, read_manifest
from axon_dist.checkpoint.layout import MANIFEST, MARKER, marker_of
from axon_dist.core.errors import CheckpointError, ConfigError
from axon_dist.data import Loader
from axon_dist.step import TrainStep
from axon_dist.train.app import RunDirectory, train
from axon_dist.train.app.lock import locked
from axon_dist.train.app.refit import refit_of
from axon_dist.train.app.resume import SavedStates, changes_since, open_states
from axon_dist.train.app.run_model import find_checkpoint
from axon_dist.train.app.runs import build_run
from axon_dist.train.config import RunConfig, load_config
from tests.line import OWN
from tests.words import WORDS


@pytest.fixture
def config(tiny, tmp_path):
    """Six steps on two devices with dropout and a schedule, saved after each; overrides by key."""

    def make(folder, **overrides):
        data = tiny | {"run_dir": str(tmp_path / folder)}
        data |= {"mesh": "dp=2", "devices": {"emulate": 2}}
        data["model"] = tiny["model"] | {"dropout": 0.1}
        data["optimizer"] = tiny["optimizer"] | {"schedule": {"name": "cosine", "warmup_steps": 1}}
        data["train"] = tiny["train"] | {"log_every": 1}
        data["checkpoint"] = {"every": 1, "keep": 9}
        for key, value in overrides.items():
            section, _, name = key.partition("__")
            data[section] = {**data.get(section, {}), name: value} if name else value
        return RunConfig.from_dict(data)

    return make


def bits(state):
    plain = lambda x: (
        jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    return [np.asarray(plain(leaf)).tobytes() for leaf in jax.tree.leaves(state)]


def rows(done):
    names = ("step", "train/loss", "train/grad_norm", "validation/loss")
    lines = done.directory.metrics.read_text().splitlines()
    return [{name: row[name] for name in names if name in row} for row in map(json.loads, lines)]


def keep_only(done, *steps):
    """Simulates a run that was killed after the last of these steps."""
    for folder in done.directory.checkpoints.iterdir():
        if int(folder.name.removeprefix("step_")) not in steps:
            shutil.rmtree(folder)


@pytest.fixture
def tokens_seen(monkeypatch):
    """Records every batch that a loader yields, in order."""
    seen, hand_out = [], Loader.__next__

    def watched(self):
        batch = hand_out(self)
        seen.append(batch["tokens"].tobytes())
        return batch

    monkeypatch.setattr(Loader, "__next__", watched)
    return seen


@pytest.mark.parametrize(
    ("stop", "model"),
    [
        pytest.param(2, {"model": WORDS}, id="2"),
        pytest.param(5, {}, marks=pytest.mark.full, id="5"),  # the transformer of `config`
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(config, tokens_seen, stop, model):
    console = Console(file=io.StringIO(), width=200)
    options = {**model, "checkpoint": {"every": stop, "keep": 9}}
    whole = train(config("whole", **options), console, resume="auto")
    assert "no checkpoint in" in console.file.getvalue()
    assert "beginning at step 0" in console.file.getvalue()
    expected = list(tokens_seen)
    tokens_seen.clear()
    of_whole, last = rows(whole), whole.directory.checkpoints / "step_00000006"
    manifests = [read_manifest(last)]
    keep_only(whole, stop)

    resumed = train(config("whole", **options), resume="auto")
    assert bits(resumed.result.state) == bits(whole.result.state)
    assert tokens_seen == expected[stop:] != []
    assert rows(resumed) == of_whole
    manifests.append(read_manifest(last))
    assert manifests[0].checksums == manifests[1].checksums
    assert manifests[0].meta["data"] == manifests[1].meta["data"]


OTHERS = {
    "fsdp on 4": {"mesh": "fsdp=4", "devices": {"emulate": 4}, "parallel": "full_shard"},
    "zero1 on 2": {"mesh": "dp=2", "devices": {"emulate": 2}, "parallel": "zero1"},
    "one device": {"mesh": "dp=1", "devices": {"emulate": 1}},
    "accumulated": {"train__accumulate": 1, "mesh": "dp=4", "devices": {"emulate": 4}},
}


@pytest.mark.full
@pytest.mark.parametrize(
    "other",
    [pytest.param(name, marks=() if name == "fsdp on 4" else pytest.mark.full) for name in OTHERS],
)
def test_on_another_mesh_it_is_the_same_run_within_rounding(config, other):
    whole = train(config("whole"))
    keep_only(whole, 3)
    before = rows(whole)
    resumed = train(config("whole", **OTHERS[other]), resume="auto")
    np.testing.assert_allclose(
        [row["train/loss"] for row in rows(resumed) if "train/loss" in row],
        [row["train/loss"] for row in before if "train/loss" in row],
        rtol=1e-5,
    )
    assert resumed.result.num_steps == 6


@pytest.mark.full
def test_auto_falls_back_to_the_newest_good_checkpoint_and_says_so(config):
    whole = train(config("run"))
    good = bits(whole.result.state)
    keep_only(whole, 2, 4)
    file = max((whole.directory.checkpoints / "step_00000004").rglob("d/*"),
               key=lambda path: path.stat().st_size)  # fmt: skip
    file.write_bytes(file.read_bytes()[:-1])
    console = Console(file=io.StringIO(), width=400)
    resumed = train(config("run"), console, resume="auto")
    text = console.file.getvalue()
    assert "step_00000004': file arrays/" in text
    assert "going back to the previous one" in text
    assert "resuming after step 2" in text
    assert bits(resumed.result.state) == good


@pytest.mark.full
def test_a_finished_run_has_nothing_left(config):
    whole = train(config("run"))
    summary = whole.directory.summary.read_text()
    console = Console(file=io.StringIO(), width=200)
    again = train(config("run"), console, resume="auto")
    assert bits(again.result.state) == bits(whole.result.state)
    assert again.result.is_finished
    assert "finished already: 6 of 6 steps are done" in console.file.getvalue()
    assert whole.directory.summary.read_text() == summary


@pytest.mark.full
def test_a_finished_run_is_told_again_and_can_be_longer(config):
    whole = train(config("run"))
    whole.directory.summary.unlink()
    train(config("run"), resume="auto")
    assert json.loads(whole.directory.summary.read_text())["ended"] == "finished"
    longer = train(config("run", train__steps=7), resume="auto")
    assert longer.result.num_steps == 7


@pytest.mark.full
@pytest.mark.parametrize("at", [2, 6])
def test_a_validation_that_a_signal_aborts_is_made_up_for(config, monkeypatch, at):
    """With the last validation, the run ends without a step that could follow."""
    make = Loader.validation_batches
    options = {"train__steps": 6, "train__eval_every": 2, "checkpoint": {"every": 2, "keep": 9}}
    options |= {"train__best": {"patience": 3, "min_delta": 100.0}, **OWN}
    whole = train(config("whole", **options))
    calls = []

    def interrupted(self, count):
        calls.append(count)
        if len(calls) == at // 2:
            signal.raise_signal(signal.SIGTERM)
        return make(self, count)

    monkeypatch.setattr(Loader, "validation_batches", interrupted)
    first = train(config("run", **options))
    assert (first.result.reason, first.result.num_steps) == ("SIGTERM", at)
    assert first.result.is_interrupted
    checkpoint = first.directory.checkpoints / f"step_{at:08d}"
    assert read_manifest(checkpoint).score is None
    console = Console(file=io.StringIO(), width=200)
    resumed = train(config("run", **options), console, resume="auto")
    assert bits(resumed.result.state) == bits(whole.result.state)
    assert resumed.result.validation_curve == whole.result.validation_curve
    assert rows(resumed) == rows(whole)
    assert read_manifest(checkpoint).score is not None
    assert resumed.summary["validation_loss"] == whole.summary["validation_loss"]
    assert "finished already" not in console.file.getvalue()


@pytest.mark.full
def test_a_run_that_stopped_early_has_nothing_left_unless_it_may_wait_longer(config):
    options = {"train__steps": 20, "train__eval_every": 1, "checkpoint": {"every": 1, "keep": 9}}
    options |= OWN
    patient = lambda count: {"train__best": {"patience": count, "min_delta": 100.0}}
    first = train(config("run", **options, **patient(2)))
    assert (first.result.reason, first.result.num_steps) == ("early stopping", 3)
    summary = first.directory.summary.read_text()
    console = Console(file=io.StringIO(), width=200)
    again = train(config("run", **options, **patient(2)), console, resume="auto")
    assert (again.result.reason, again.result.num_steps) == ("early stopping", 3)
    assert bits(again.result.state) == bits(first.result.state)
    assert first.directory.summary.read_text() == summary
    assert (
        "finished already: 3 of 20 steps are done, and validation/loss did not improve in the last "
        "2 validations; raise train.best.patience to continue"
    ) in console.file.getvalue()
    longer = train(config("run", **options, **patient(3)), resume="auto")
    assert (longer.result.reason, longer.result.num_steps) == ("early stopping", 4)


@pytest.mark.full
@pytest.mark.parametrize(
    "part",
    [
        pytest.param("", marks=pytest.mark.full),
        pytest.param("checkpoints", marks=pytest.mark.full),
        "checkpoints/step_00000002",
    ],
)
def test_from_a_path_into_a_new_folder(config, part):
    first = train(config("first"))
    keep_only(first, 2)
    second = train(config("second"), resume=str(first.directory.path / part))
    assert bits(second.result.state) == bits(first.result.state)
    assert [row["step"] for row in rows(second) if "train/loss" in row] == [3, 4, 5, 6]
    assert sorted(path.name for path in first.directory.checkpoints.iterdir()) == ["step_00000002"]


@pytest.mark.full
def test_auto_finds_the_newest_folder_of_a_run_without_one_of_its_own(
    config, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    train(config("x", run_dir="runs/tiny-20260101-000000", train__steps=2))
    shutil.copytree("runs/tiny-20260101-000000", "runs/tiny-20260102-000000")
    (tmp_path / "runs" / "tiny-20260103-000000").mkdir()
    (tmp_path / "runs" / "tiny-er-20260104-000000" / "checkpoints").mkdir(parents=True)
    resumed = train(config("x", run_dir=None, train__steps=3), resume="auto")
    assert str(resumed.directory.path) == "runs/tiny-20260102-000000"
    assert resumed.result.num_steps == 3


@pytest.mark.full
def test_runs_that_cannot_be_resumed_raise(config, tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint in '.*none'; name a checkpoint"):
        train(config("run"), resume=str(tmp_path / "none"))
    whole = train(config("whole", train__steps=2))
    path = str(whole.directory.path)
    with pytest.raises(
        CheckpointError, match=r"params/.* is float32\[.* model.ffn_width: 16 -> 32; "
    ):
        train(config("a", model__ffn_width=32), resume=path)
    with pytest.raises(CheckpointError, match=r"opt_state/.* is in the checkpoint and not here"):
        train(config("b", optimizer={"name": "sgd"}), resume=path)
    with pytest.raises(ConfigError, match=r"taken with seed=0, but this loader has seed=1"):
        train(config("c", seed=1), resume=path)
    manifest = whole.directory.checkpoints / "step_00000002"
    with mock.patch("axon_dist.train.app.resume.read_manifest") as read:
        read.return_value = mock.Mock(meta={})
        with pytest.raises(CheckpointError, match="has no position in the data"):
            train(config("d"), resume=str(manifest))


@pytest.mark.full
def test_checkpoints_of_two_runs_do_not_mix(config, tmp_path):
    shared = {
        "checkpoint__dir": str(tmp_path / "shared"),
        "train__steps": 2,
        "checkpoint__every": 0,
    }
    train(config("one", **shared))
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["step_00000002"]
    with pytest.raises(
        ConfigError, match=r"checkpoint.dir: .* of another run; name another folder, or"
    ):
        train(config("two", **shared))


@pytest.mark.full
@pytest.mark.sample("sharded-False")
@pytest.mark.parametrize(("kind", "background"), [("full", True), ("sharded", False)])
def test_every_kind_of_saving(config, kind, background):
    changes = {"checkpoint__type": kind, "checkpoint__background": background}
    changes |= {"checkpoint__keep": 1, "checkpoint__best": 1, "checkpoint__every": 3}
    done = train(config("run", **changes))
    manifest = read_manifest(done.directory.checkpoints / "step_00000006")
    assert manifest.type == kind
    best = done.summary["best_validation_loss"]
    scores = [read_manifest(path).score for path in done.directory.checkpoints.iterdir()]
    assert best in scores


@pytest.mark.full
def test_the_best_is_of_the_branch_that_the_run_went_on_with(config):
    """The run goes back to step 2 and becomes worse; its first save is of a later step than all."""
    changes = {"train__eval_every": 2, "checkpoint__keep": 9, "train__steps": 6}
    done = train(config("run", checkpoint__every=2, **changes))
    folder = done.directory.checkpoints
    worse = {"optimizer__learning_rate": 100.0, "train__steps": 8, "checkpoint__every": 8}
    again = config("run", **{**changes, **worse, "checkpoint__best": 1, "checkpoint__keep": 1})
    resumed = train(again, resume=str(folder / "step_00000002"))
    curve = dict(resumed.result.validation_curve)
    assert curve[8] > curve[2]
    assert find_checkpoint(done.directory.path, again, "best").name == "step_00000002"
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000002", "step_00000008"]


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """The folder of a run by its options, which stopped after step 3 of 6."""
    made = {}

    def folder(config, **options):
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            at = tmp_path_factory.mktemp("three")
            made[key] = train(config("made", run_dir=str(at / "run"), **options))
            keep_only(made[key], 3)
        return made[key].directory.checkpoints / "step_00000003"

    return folder


SPIKES = {"train__spikes": {"window": 2}}
FP16 = {"precision": "fp16"}
BEGUN = {
    "norms begin": ({}, {"train__norms_by_layer": True}, None),
    "norms end": ({"train__norms_by_layer": True}, {}, None),
    "spikes begin": ({}, SPIKES, "train.spikes: the averages of losses and norms begin at 0"),
    "spikes end": (SPIKES, {}, "train.spikes: the averages of losses and norms in the checkpoint"),
    "spikes go on without a clip": (SPIKES, SPIKES | {"train__clip_norm": None}, None),
    "ema begins": ({}, {"train__ema": 0.5}, "train.ema: the moving average begins with the param"),
    "ema ends": ({"train__ema": 0.5}, {}, "train.ema: the moving average in the checkpoint is not"),
    "scale begins": ({}, FP16, "precision or loss_scale: the loss scale begins at its first value"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", BEGUN)
def test_a_run_goes_on_when_what_watches_it_begins_or_ends(name, config, three_steps):
    """Parameters and moments are those of the checkpoint; what begins, begins there."""
    before, after, line = BEGUN[name]
    path = three_steps(config, **before)
    run = build_run(config("on", **after))
    told, directory = [], mock.Mock(checkpoints=path.parent, place=path.parent, address=None)
    saved = open_states(run, directory, {}, told.append)
    state = saved.find_start(str(path), told.append)
    original = build_run(config("made", **before)).step
    expected = load_checkpoint(path, original)
    assert bits(state.params) == bits(expected.params)
    moments = lambda s: bits(s.opt_state.inner if "inner" in dir(s.opt_state) else s.opt_state)
    assert moments(state) == moments(expected)
    assert line is None or any(text.startswith(line) for text in told), told
    if name == "ema begins":
        assert bits(state.ema) == bits(state.params)
    if name == "scale begins":
        assert float(state.scaler.scale) == float(run.step.init().scaler.scale)
    if name == "spikes begin":
        assert int(state.opt_state.steps) == 0
    state, metrics = run.step(state, next(run.loader))
    assert np.isfinite(metrics["loss"])


@pytest.mark.full
def test_a_checkpoint_that_does_not_fit_names_the_changed_keys(config, three_steps):
    path = three_steps(config, **OWN)
    other = config("on", **OWN, optimizer={"name": "sgd", "learning_rate": 0.1, "momentum": 0.9})
    with pytest.raises(CheckpointError, match=r"does not fit: .* saved: optimizer.name: .* Set"):
        train(other, resume=str(path))


def test_old_states_in_which_the_optimizer_clipped_are_read():
    """Until 0.3 norms by layer were in the state, and a clip in the chain that was watched."""
    rest = ["opt_state/steps", "opt_state/metrics/grad_norm/head", "params/w"]
    for number in (0, 1):
        saved = [f"opt_state/inner/{number}/0/mu/w", *rest]
        refit, lines = refit_of(saved, ["opt_state/0/mu/w", "params/w"])
        assert (refit.names["opt_state/0/mu/w"], lines) == (saved[0], [])
        assert refit.dropped == set(rest[:2])
        watched = ["opt_state/inner/0/0/mu/w", "opt_state/averages/loss/mean", *rest]
        refit, lines = refit_of(saved, watched)
        assert refit.names["opt_state/inner/0/0/mu/w"] == saved[0]
        # Averages that begin have seen no steps.
        assert "opt_state/steps" in refit.absent


def test_averages_go_on_where_an_old_checkpoint_also_has_norms_by_layer():
    """Until 0.3 the norms of the last step were in the state, and now only the step has them."""
    averages = [f"opt_state/averages/{x}/mean" for x in ("loss", "norm")]
    own = ["opt_state/steps", *averages, "opt_state/metrics/spike_skipped", "params/w"]
    norms = ["opt_state/metrics/grad_norm/head", "opt_state/metrics/param_norm/head"]
    refit, lines = refit_of(
        ["opt_state/inner/1/0/mu/w", *own, *norms], ["opt_state/inner/0/0/mu/w", *own]
    )
    assert (lines, refit.absent, refit.dropped) == ([], frozenset(), set(norms))
    assert refit.names["opt_state/inner/0/0/mu/w"] == "opt_state/inner/1/0/mu/w"
    # Norms of the last step may begin, and the averages go on.
    refit, lines = refit_of(own, [*own, *norms])
    assert (lines, refit.absent, refit.dropped) == ([], set(norms), frozenset())
    # Only norms are watched now: the averages end.
    rest = ["opt_state/steps", *norms, "params/w"]
    refit, lines = refit_of([*own, *norms], rest)
    assert lines == [
        "train.spikes: the averages of losses and norms in the checkpoint are not read"
    ]
    assert refit.dropped == {*averages, own[3]}
    assert refit_of(["params/w"], rest)[1] == []


def test_feedback_of_compression_under_its_old_name_goes_on_ends_or_begins():
    feedback = ["meeting/missing/w", "meeting/missing/v"]
    now = [f"outer_{x.replace('meeting', 'state')}" for x in feedback]
    rest = ["params/w", "outer/w"]
    refit, lines = refit_of([*rest, *feedback], [*rest, *now])
    assert (lines, refit.absent, refit.dropped) == ([], frozenset(), frozenset())
    assert [refit.names[path] for path in now] == feedback
    refit, lines = refit_of([*rest, *feedback], rest)
    assert lines == ["parallel: the feedback of compression in the checkpoint is not read"]
    assert refit.dropped == set(feedback)
    refit, lines = refit_of(rest, [*rest, *now])
    assert lines == ["parallel: the feedback of compression begins at 0"]
    assert refit.absent == set(now)


@pytest.mark.parametrize(
    ("part", "begins", "ends"),
    [
        (
            ["ema/w", "ema/v"],
            "train.ema: the moving average begins with the parameters of this step",
            "train.ema: the moving average in the checkpoint is not read",
        ),
        (
            ["scaler/scale", "scaler/good_steps"],
            "precision or loss_scale: the loss scale begins at its first value",
            "precision or loss_scale: the loss scale in the checkpoint is not read",
        ),
    ],
    ids=["ema", "scaler"],
)
def test_a_moving_average_or_a_loss_scale_goes_on_ends_or_begins(part, begins, ends):
    rest = ["opt_state/0/mu/w", "params/w", "params/v"]
    refit, lines = refit_of([*rest, *part], [*rest, *part])
    assert (lines, refit.absent, refit.dropped) == ([], frozenset(), frozenset())
    refit, lines = refit_of(rest, [*rest, *part])
    assert (lines, refit.absent, refit.dropped) == ([begins], set(part), frozenset())
    assert refit.names == {path: path for path in rest}
    refit, lines = refit_of([*rest, *part], rest)
    assert (lines, refit.absent, refit.dropped) == ([ends], frozenset(), set(part))
    # What differs but neither begins nor ends is of another model, and is refused on reading.
    refit, lines = refit_of([*rest, *part], [*rest, part[0]])
    assert (lines, refit.absent, refit.dropped) == ([], frozenset(), frozenset())


def test_best_needs_validations(config):
    with pytest.raises(ConfigError, match=r"checkpoint.best: got 1, .* multiple of train.eval_ev"):
        config("run", checkpoint__best=1, checkpoint__every=2)


@pytest.mark.full
def test_a_run_goes_on_when_it_cannot_save_and_says_so_at_the_end(config, monkeypatch):
    from axon_dist.checkpoint import stores as store

    begin = store.OrbaxStore.begin

    def full_disk(self, folder, *others):
        if folder.name != "step_00000002.tmp":
            raise OSError(28, "No space left on device")
        return begin(self, folder, *others)

    monkeypatch.setattr(store.OrbaxStore, "begin", full_disk)
    console = Console(file=io.StringIO(), width=400)
    with pytest.raises(CheckpointError, match=r"last state is not saved: .*No space left on dev"):
        train(config("run"), console)
    text = console.file.getvalue()
    assert text.count("No space left on device; earlier checkpoints stay. Free space") == 5
    assert "finished after 6 steps" in text

    monkeypatch.undo()
    assert train(config("run"), resume="auto").result.num_steps == 6


@pytest.mark.full
def test_a_refused_resume_changes_nothing(config, tmp_path):
    done = train(config("run", train__steps=2))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"params/.* model.ffn_width: 16 -> 32; "):
        train(config("run", model__ffn_width=32), resume="auto")
    wanted = pytest.raises(ConfigError, match="in use by process")
    with locked(done.directory.path, "run_dir", print), wanted:
        train(config("run", train__steps=4), resume="auto")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.full
def test_two_runs_do_not_save_into_one_folder(config, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    wanted = pytest.raises(ConfigError, match=r"checkpoint.dir: '.*shared' is in use by process")
    with locked(shared, "checkpoint.dir", print), wanted:
        train(config("one", checkpoint__dir=str(shared)))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint.dir: cannot write to '.*': Not a director"):
        train(config("two", checkpoint__dir=str(tmp_path / "file" / "checkpoints")))


@pytest.mark.full
def test_a_resumed_run_is_told_as_a_whole(config, tiny, monkeypatch):
    """Curves, summary and best validation begin at the start of the run; changes are reported."""
    steady = {"optimizer": tiny["optimizer"] | {"schedule": {"name": "constant"}}}
    whole = train(config("whole", **steady))
    first = train(config("run", train__steps=3, **steady))
    lines = first.directory.metrics.read_text().splitlines(keepends=True)
    lines.insert(1, "}{\n")
    first.directory.metrics.write_text("".join(lines))
    console = Console(file=io.StringIO(), width=400)
    drawn = mock.Mock()
    monkeypatch.setattr("axon_dist.train.app.training.plot_losses", drawn)
    second = train(config("run", **steady), console, resume="auto")
    text = console.file.getvalue()
    assert text.count("config: train.steps: 3 -> 6") == 1
    assert f"metrics.jsonl: 1 of {len(lines)} lines cannot be read and are dropped; the fir" in text
    result = second.result
    assert (result.first_step, result.num_steps, len(result.train_curve)) == (3, 6, 6)
    assert drawn.call_args.args[1] == result.train_curve
    assert rows(second) == rows(whole)
    # The shorter leg validated its last step, too.
    assert [step for step, _ in result.validation_curve] == [3, 6]
    assert second.summary["best_validation_loss"] == whole.summary["best_validation_loss"]
    assert load_config(second.directory.config).train.steps == 6
    assert "time since step 3" in text


@pytest.mark.full
def test_a_folder_that_vanishes_ends_with_an_error_after_everything_is_kept(config, monkeypatch):
    step = TrainStep.__call__

    def vanishing(self, state, *args):
        if int(state.step) == 3:
            shutil.rmtree(here)
        return step(self, state, *args)

    run = config("run", checkpoint__background=False)
    here = run.run_dir
    monkeypatch.setattr(TrainStep, "__call__", vanishing)
    with pytest.raises(ConfigError, match=r"'.*run' was removed or emptied while the run was writ"):
        train(run)
    found = {path.name for path in RunDirectory(Path(here)).path.iterdir()}
    assert found >= {"config.yaml", "metrics.jsonl", "summary.json", "checkpoints"}
    assert train(run, resume="auto").result.num_steps == 6


def saved_by_others(folder):
    """Makes a checkpoint look saved with another version of JAX, other devices and flags."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["versions"]["jax"] = "0.0.1"
    manifest["mesh"] = {"dp": 7}
    manifest["meta"]["settings"]["jax_enable_x64"] = "True"
    text = json.dumps(manifest, indent=1).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / MARKER).write_bytes(marker_of(text))


@pytest.mark.full
def test_a_resumed_run_with_another_batch_counts_the_samples_of_both(config):
    done = train(config("run", train__steps=2, train__global_batch=8, train__eval_every=0))
    longer = config("run", train__steps=3, train__global_batch=4, train__eval_every=0)
    lines = train(longer, resume="auto").directory.metrics.read_text().splitlines()
    last = [row for row in map(json.loads, lines) if "seen/tokens" in row][-1]
    assert last["step"] == 3
    assert last["seen/tokens"] == (2 * 8 + 4) * 16
    data = read_manifest(done.directory.checkpoints / "step_00000003").meta["data"]
    assert data["samples_seen"] == 2 * 8 + 4
    assert last["seen/epoch"] == data["samples_seen"] / data["num_samples"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unroll", 7),
        ("scan_layers", True),
        ("axis_names", {"heads": "dp"}),
        ("train__log_every", 7),
    ],
)
def test_a_key_that_does_not_change_the_numbers_is_not_listed(config, key, value):
    before, after = config("run"), config("run", **{key: value})
    assert before != after
    assert changes_since(before.to_dict(), after, types.SimpleNamespace(step=2)) == []


@pytest.mark.full
def test_a_resumed_run_says_what_it_changes(config, tiny):
    cosine = {"optimizer": tiny["optimizer"] | {"schedule": {"name": "cosine"}}}
    first = train(config("first", train__steps=4, checkpoint__every=2, **cosine))
    folder = first.directory.path / "checkpoints"
    console = Console(file=io.StringIO(), width=400)
    changed = config("second", train__steps=6, train__log_every=1, **cosine)
    saved_by_others(folder / "step_00000002")
    train(changed, console, resume=str(folder / "2"))
    text = console.file.getvalue()
    assert "resuming after step 2 from" in text
    assert "config: train.steps: 4 -> 6" in text
    assert re.search(
        r"config: learning rate: \S+ in step 2, (\S+) in step 3; the saved config had (?!\1)", text
    )
    assert "log_every" not in text
    assert f"changed since it was saved: jax 0.0.1 -> {jax.__version__}" in text
    assert "changed since it was saved: mesh dp=7 -> dp=2" in text
    assert "changed since it was saved: jax_enable_x64 True -> False" in text
    assert text.count("changed since it was saved") == 3
    with pytest.raises(CheckpointError, match=r"no checkpoint '3' in .* of the steps 2, 4; name"):
        train(changed, resume=str(folder / "3"))


@pytest.mark.full
def test_a_resumed_run_continues_the_run_of_its_tracker(config, monkeypatch):
    calls, ids = [], iter(["one", "two"])

    class Run:
        def __init__(self, id):
            self.id = id

        def define_metric(self, *args, **kwargs):
            pass

        def log(self, metrics):
            calls.append((self.id, metrics["step"]))

        def finish(self):
            pass

    init = lambda id=None, **kwargs: Run(id or next(ids))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    part = lambda folder, steps, project: config(
        folder, **OWN, optimizer__schedule={"name": "constant"},
        train__steps=steps, train__eval_every=0, checkpoint={"every": 2},
        loggers=[{"name": "wandb", "project": project}],
    )  # fmt: skip
    done = train(part("run", 2, "p"))
    train(part("run", 3, "p"), resume="auto")
    # A run cannot move to another project.
    train(part("run", 4, "q"), resume="auto")
    assert list(dict.fromkeys(calls)) == [("one", 1), ("one", 2), ("one", 3), ("two", 4)]
    runs = json.loads((done.directory.path / "trackers.json").read_text())
    assert runs == {"wandb/p": "one", "wandb/q": "two"}


@pytest.mark.parametrize(
    "saved", [{"skipped_steps": 2}, {}, {"window_steps": 1, "window_sum/loss": 0.5}]
)
def test_going_back_finds_the_counts_of_the_checkpoint(saved):
    manifest = mock.Mock(meta={"counts": saved} if saved else {})
    checkpoints = mock.Mock(restore_own=lambda *given: mock.Mock(manifest=manifest))
    states = SavedStates(mock.Mock(), mock.Mock(), checkpoints, None, mock.Mock())
    states.take_counts({"skipped_steps": 3, "window_sum/gone": 1.0})
    assert states.go_back() is not None
    assert states.counts == saved
