import dataclasses
import inspect
import io
import json
import re
import sys
import types
import typing
from math import inf, nan
from unittest import mock

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import yaml
from array_record.python.array_record_module import ArrayRecordWriter
from flax import nnx
from jax.errors import JaxRuntimeError
from rich.console import Console

from axon_dist.checkpoint import read_manifest
from axon_dist.core.errors import ConfigError, OutOfMemoryError, install_command
from axon_dist.mesh import MeshSpec, World
from axon_dist.train.app import config_plans, create_directory, train
from axon_dist.train.app.directory import RunDirectory
from axon_dist.train.app.examine import _files_of as files_of
from axon_dist.train.app.runs import build_loader, build_run
from axon_dist.train.app.summary import attention_line, opening_lines, summarize
from axon_dist.train.app.training import advice
from axon_dist.train.cli.main import main
from axon_dist.train.config import DATA, LOGGERS, MODELS, OPTIMIZERS, RATES, RunConfig, load_config
from axon_dist.train.config.models import make_model
from axon_dist.train.config.read import read
from axon_dist.train.loop import TrainResult
from tests.words import WORDS


def plain_console():
    return Console(file=io.StringIO(), width=100)


@pytest.mark.full
def test_a_run_leaves_everything_in_its_folder(tiny, tmp_path):
    console = plain_console()
    done = train(RunConfig.from_dict(tiny), console)
    directory = done.directory
    assert directory.path == tmp_path / "run"
    names = {file.name for file in directory.path.iterdir()}
    written = {"config.yaml", "metrics.jsonl", "program.json", "summary.json", "loss.png"}
    assert names == {*written, "checkpoints"}

    rows = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    curve = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    validation = [row["step"] for row in rows if "validation/loss" in row]
    assert tuple(curve) == done.result.train_curve
    assert ([step for step, _ in curve], validation) == ([2, 4, 6], [3, 6])

    summary = json.loads(directory.summary.read_text())
    assert summary == done.summary
    assert (summary["ended"], summary["steps"], summary["mesh"]) == ("finished", 6, "dp=8")
    assert summary["validation_loss"] == done.result.validation_curve[-1][1]

    program = json.loads(directory.program.read_text())
    assert program["peak_bytes"] == sum(program["memory"].values())
    assert program["memory"]["optimizer state"] == 2 * program["memory"]["parameters"] + 8
    assert {row["axis"] for row in program["collectives"]} == {"dp"}
    assert len(program["leaves"]) > 3

    last = next(row for row in reversed(rows) if "train/loss" in row)
    assert (last["seen/tokens"], last["seen/epoch"] > 0) == (6 * 8 * 16, True)
    rates = RunConfig.from_dict(tiny).optimizer.rates(6)
    assert last["optimizer/learning_rate"] == pytest.approx(float(rates[5]))
    assert "time/model_flops_utilization" not in last  # the FLOP/s of a CPU are unknown
    spent = sum(summary["seconds"].values())
    assert summary["seconds"]["compile"] == summary["compile_seconds"]
    assert last["time/elapsed_seconds"] <= spent

    manifest = read_manifest(directory.checkpoints / "step_00000006")
    assert (manifest.meta["step"], manifest.meta["data"]["samples_seen"]) == (6, 48)
    assert RunConfig.from_dict(manifest.meta["config"]) == RunConfig.from_dict(tiny)
    assert manifest.score == summary["validation_loss"]
    assert any(name.startswith("opt_state/") for name in manifest.leaves)

    text = console.file.getvalue()
    for words in ("ddp on mesh dp=8 of 8 emulated", "6 steps of 8 x 16 tokens", "step 6/6",
                  "finished after 6 steps", "nats/byte", f"run directory: {directory.path}",
                  f"loss curves: {directory.plot}"):  # fmt: skip
        assert words in text


@pytest.mark.full
def test_the_written_config_makes_the_same_run(tiny, tmp_path, capsys):
    """A run without a console prints nothing."""
    first = train(RunConfig.from_dict(tiny))
    again = load_config(first.directory.config, [f"run_dir={tmp_path / 'again'}"])
    assert train(again).result.train_curve == first.result.train_curve
    assert capsys.readouterr() == ("", "")


@pytest.mark.full
def test_a_run_goes_on_without_matplotlib_and_its_program_and_says_why(tiny):
    console = plain_console()
    with (
        mock.patch("axon_dist.train.app.training.has_module", return_value=False),
        mock.patch(
            "axon_dist.train.app.training.program_record", side_effect=RuntimeError("no text")
        ),
    ):
        done = train(RunConfig.from_dict(tiny), console)
    assert done.result.is_finished
    assert not done.directory.plot.exists()
    assert f"loss curves: none ({install_command('plots')})" in console.file.getvalue()
    assert not done.directory.program.exists()
    assert "program.json is not written: RuntimeError: no text" in console.file.getvalue()


def test_a_folder_holds_one_run(tiny):
    config = RunConfig.from_dict(tiny)
    create_directory(config)
    with pytest.raises(ConfigError, match=r"run_dir: '.*run' already contains a run; name another"):
        create_directory(config)


def test_a_folder_that_cannot_be_made(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    config = RunConfig.from_dict(tiny | {"run_dir": str(tmp_path / "file" / "run")})
    with pytest.raises(ConfigError, match=r"run_dir: cannot write to '.*': Not a directory; name"):
        create_directory(config)


def test_a_run_without_a_folder_gets_one_with_its_name(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = create_directory(RunConfig.from_dict(tiny | {"run_dir": None}))
    assert str(directory.path).startswith("runs/tiny-")
    assert yaml.safe_load(directory.config.read_text())["train"]["steps"] == 6


@pytest.mark.full
def test_other_processes_train_and_write_no_metrics(tiny, tmp_path):
    console = plain_console()
    with mock.patch("axon_dist.train.app.runs.Run.is_main", False):
        done = train(RunConfig.from_dict(tiny), console)
    assert done.result.is_finished
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.yaml", "checkpoints"}
    assert console.file.getvalue() == ""


def variants():
    tables = (DATA, OPTIMIZERS, RATES, LOGGERS)
    models = [kind.sizes for kind in MODELS.values()]
    return [*models, *(cls for table in tables for cls in table.values())]


def sections():
    hints = typing.get_type_hints(RunConfig)
    return [RunConfig, *(cls for cls in hints.values() if dataclasses.is_dataclass(cls))]


@pytest.fixture
def pictures(tmp_path):
    """Configs of every kind of model and image data, as plain data."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 16, 16, 3)).astype(np.uint8)
    files = {side: str(tmp_path / f"{side}.npz") for side in ("train", "held")}
    for path in files.values():
        np.savez(path, images=images, labels=np.arange(40) % 10)
    read_ones = {"kind": "images", "files": [files["train"]], "image_size": 16}
    rows = []
    for number, image in enumerate(images[:20]):
        path = tmp_path / "classes" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(image).save(path)
        rows.append({"image": {"bytes": path.read_bytes()}, "label": number % 2})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "images.parquet")
    folder = {"kind": "image_folder", "files": [str(tmp_path / "classes")], "image_size": 16}
    kept = {"cache": str(tmp_path / "kept"), "image_size": 16}
    common = {
        "mesh": "dp=8",
        "devices": {"emulate": 8},
        "train": {"steps": 2, "global_batch": 8, "eval_batches": 1, "log_every": 1},
    }
    return [
        {"model": {"kind": kind, "preset": "tiny"}, "data": data, **common}
        for kind, data in (
            ("resnet", read_ones),
            ("resnet", {**read_ones, "validation_files": [files["held"]]}),
            ("vit", {"kind": "synthetic_images", "num_images": 64, "image_size": 16}),
            ("vit", folder),
            ("vit", {"kind": "image_records", "files": [str(tmp_path / "images.parquet")], **kept}),
        )
    ]


@pytest.mark.full
@pytest.mark.parametrize("number", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_on_images(pictures, tmp_path, number):
    console = plain_console()
    done = train(RunConfig.from_dict(pictures[number] | {"run_dir": str(tmp_path / "r")}), console)
    assert done.result.is_finished
    assert (done.summary["unit"], done.summary["item"]) == ("nats/image", "images")
    rate = 8 / done.result.train_seconds
    assert done.summary["items_per_second"] == pytest.approx(rate)
    record = json.loads(done.directory.metrics.read_text().splitlines()[-2])
    assert {"time/images_per_second"} < set(record)
    told = console.file.getvalue()
    assert "2 steps of 8 images of 16 x 16" in told
    assert "images/s" in told
    assert "tokens" not in told


def every_kind_of_text(folder):
    """Returns a `data` section of each kind of token data, and the files that it names."""
    rows = [{"q": "to be, ", "a": "or not to be"}] * 40
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    np.save(folder / "ids.npy", np.arange(5000, dtype=np.uint16) % 250)
    asked = {"prompt": "q", "response": "a", "sequence_length": 32}
    of = lambda name: {"files": [str(folder / name)], "validation_fraction": 0.2}
    words = tokenizers.models.WordLevel({"to": 0, "or": 1, "<end>": 2}, unk_token="to")
    by_word = tokenizers.Tokenizer(words)
    by_word.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    by_word.save(str(folder / "tokenizer.json"))
    named = {"tokenizer": str(folder / "tokenizer.json"), "end_token": "<end>"}
    turns = [{"role": "user", "content": "to be"}, {"role": "assistant", "content": "or not"}]
    chats = [{"turns": turns}] * 40
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), folder / "chats.parquet")
    told = {"messages": "turns", "template": "plain", "sequence_length": 32}
    for name in ("rows", "chats"):
        table = pyarrow.parquet.read_table(folder / f"{name}.parquet")
        with pyarrow.ipc.new_stream(folder / f"{name}.arrow", table.schema) as file:
            file.write_table(table)
        records = ArrayRecordWriter(str(folder / f"{name}.array_record"), "group_size:1")
        [records.write(json.dumps(row).encode()) for row in table.to_pylist()]
        records.close()
    for kind in ("jsonl", "parquet", "array_record"):
        yield {"kind": kind, **told, **of(f"chats.{kind}")}
        yield {"kind": kind, **asked, **of(f"rows.{kind}")}
        yield {"kind": kind, "text": "a", "sequence_length": 32, **named, **of(f"rows.{kind}")}
    yield {"kind": "datasets", **asked, **of("rows.arrow")}
    yield {"kind": "datasets", **told, **of("chats.arrow")}
    yield {"kind": "datasets", "text": "a", "sequence_length": 32, **named, **of("rows.arrow")}
    kept = {"tokenizer": named["tokenizer"], "cache": str(folder / "kept")}
    yield {"kind": "text", "sequence_length": 32, **kept, **of("rows.jsonl")}
    yield {"kind": "tokens", "sequence_length": 32, **of("ids.npy")}
    sources = [{"kind": kind, **of("rows.jsonl")} for kind in ("jsonl", "text")]
    sources[0] |= {"prompt": "q", "response": "a"}
    yield {"kind": "mixture", "sequence_length": 32, "sources": sources, "weights": [2, 1]}


@pytest.mark.full
def test_every_field_is_used_by_a_run(tiny, pictures, tmp_path, monkeypatch):
    """Records the fields that a run reads, except to check and write the config itself."""
    schema = [cls for cls in {*sections(), *variants()} if not inspect.isabstract(cls)]
    schema.remove(MeshSpec)
    used = set()

    def record(self, name):
        caller = sys._getframe(1)
        where, function = caller.f_globals["__name__"], caller.f_code.co_name
        is_check = function == "validate" or function.startswith("_check")
        if where not in ("axon_dist.train.config.read", "dataclasses") and not is_check:
            used.add((type(self), name))
        return object.__getattribute__(self, name)

    tensorboard = types.SimpleNamespace(SummaryWriter=mock.MagicMock())
    monkeypatch.setitem(sys.modules, "tensorboardX", tensorboard)
    trackers = {name: mock.MagicMock() for name in ("wandb", "trackio", "mlflow")}
    # A run keeps the name of its tracker's run in a file.
    trackers["wandb"].init.return_value.id = "1"
    trackers["trackio"].init.return_value.name = "1"
    trackers["mlflow"].MlflowClient.return_value.create_run.return_value.info.run_id = "1"
    for name, module in {**trackers, "prometheus_client": mock.MagicMock()}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for cls in schema:
        monkeypatch.setattr(cls, "__getattribute__", record)
    tiny["model"] |= {"logits": "chunked"}
    loggers = ["tensorboard", "wandb", "trackio", "mlflow", "prometheus"]
    train(read(RunConfig, tiny | {"loggers": loggers}))
    build_loader(read(RunConfig, {"data": {"max_bytes": 10**5}}), World.emulate(8))
    for picture in pictures:
        config = read(RunConfig, picture)
        batch = next(build_loader(config, World.emulate(8)))
        nnx.eval_shape(lambda config=config, x=batch["x"]: make_model(config.model, 0)(x))
    for data in every_kind_of_text(tmp_path):
        next(build_loader(read(RunConfig, {"data": data}), World.emulate(8)))
    for name in OPTIMIZERS:
        for schedule in RATES:
            config = read(RunConfig, {"optimizer": {"name": name, "schedule": schedule}})
            config.optimizer.build(10)

    fields = {(cls, field.name) for cls in schema for field in dataclasses.fields(cls)}
    assert {f"{cls.__name__}.{name}" for cls, name in fields - used} == set()


def test_a_chip_that_is_known_needs_no_rate_for_utilization(tiny, chip):
    config = RunConfig.from_dict(tiny)
    run = build_run(config)
    assert run.peak_flops == chip.rate("float32")
    assert dataclasses.replace(run, config=_with_peak(config, 7.0)).peak_flops == 7.0


@pytest.mark.parametrize(
    ("fields", "can_run"),
    [({"windows": [4]}, True), ({"windows": [4], "attention_softcap": 5.0}, False)],
    ids=["windows", "windows and a cap"],
)
def test_advice_about_windows_is_given_only_where_a_kernel_would_then_run(tiny, fields, can_run):
    config = RunConfig.from_dict(tiny | {"model": tiny["model"] | fields})
    line = attention_line(config, build_run(config).step)
    assert line.startswith("attention: einsum")
    assert ("with max_length within the shortest window" in line) == can_run


def _with_peak(config, peak):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, peak_flops=peak))


def test_a_device_without_memory_says_what_to_change(tiny, tmp_path):
    full = JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")
    tiny["train"] |= {"global_batch": 32}
    with (
        mock.patch("axon_dist.train.app.training._fit", side_effect=full),
        pytest.raises(OutOfMemoryError) as caught,
    ):
        train(RunConfig.from_dict(tiny))
    message = str(caught.value)
    assert message.startswith("a device has no memory left (RESOURCE_EXHAUSTED: Out of memory all")
    assert "parallel=fsdp; use smaller microbatches with train.accumulate=2; recompute" in message
    assert "'remat={interval: 1}'" in message
    assert (tmp_path / "run" / "memory.prof").stat().st_size > 0
    assert f"in '{tmp_path / 'run' / 'memory.prof'}'" in message


def test_another_error_of_a_device_is_left_alone(tiny):
    other = JaxRuntimeError("INTERNAL: something")
    with (
        mock.patch("axon_dist.train.app.training._fit", side_effect=other),
        pytest.raises(JaxRuntimeError, match="INTERNAL: something"),
    ):
        train(RunConfig.from_dict(tiny))


@pytest.mark.full
def test_on_a_known_chip_the_planner_is_asked_too(tiny, chip, monkeypatch):
    monkeypatch.setattr(config_plans, "MOST", 1)
    monkeypatch.setattr(config_plans, "FEW", 0)
    tiny |= {"mesh": "dp=2", "devices": {"emulate": 2}}
    plans = advice(build_run(RunConfig.from_dict(tiny)))
    assert re.match(r"axon plan suggests ddp on mesh dp=2, .* GB on a emulated", plans[0])


@pytest.mark.full
def test_an_axis_that_nothing_is_split_over_is_told(tiny):
    line = "no strategy uses axis tp of the mesh: its 2 ranks compute the same"
    found = opening_lines(build_run(RunConfig.from_dict(tiny | {"mesh": "dp=4,tp=2"})))
    assert [line in one for one in found].count(True) == 1
    parallel = {"ddp": {}, "pipeline": {"num_microbatches": 2}}
    deep = tiny | {"mesh": "dp=4,pp=2", "model": tiny["model"] | {"num_layers": 2}}
    both = RunConfig.from_dict(deep | {"parallel": parallel})
    assert not any("no strategy" in one for one in opening_lines(build_run(both)))


def test_a_dry_run_says_all_and_writes_nothing(tiny, tmp_path, capsys):
    path = tmp_path / "tiny.yaml"
    tiny |= {"mesh": "dp=2", "devices": {"emulate": 2}, "model": WORDS}
    path.write_text(yaml.safe_dump(tiny))
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    for words in (
        "train.global_batch = 8", "further keys with the default value",
        "ddp on mesh dp=2 of 2 emulated", "768 tokens in total",
        "each of 2 batch ranks (dp) takes 4 of 8 samples a step",
        "memory per device, read from the compiled step:", "optimizer state",
        f"{tmp_path / 'run' / 'program.json'}", "every 100 steps and at the end",
    ):  # fmt: skip
        assert words in out, words
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["train", str(path), "--dry-run", "--resume", "auto"]) == 2
    assert "--resume auto with --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "checkpoint", "words"),
    [
        (1000, {"every": 100, "keep": 3, "best": 1}, "of which 4 stay"),
        (100, {"every": 0, "keep": 3}, "at the end, 0 B each, of which 1 stays"),
        (150, {"every": 100, "keep": 3}, "of which 2 stay"),
        (
            1000,
            {"every": 100, "keep": 2, "keep_every": 500},
            "of which 2 stay, and each of a multiple of 500 steps",
        ),
    ],
)
def test_a_dry_run_says_which_checkpoints_stay(tiny, steps, checkpoint, words):
    tiny["train"] |= {"steps": steps, "eval_every": 50}
    files = files_of(RunConfig.from_dict(tiny | {"checkpoint": checkpoint}), {})
    assert files[-1].endswith(words)


@pytest.mark.parametrize(
    ("changes", "entries"),
    [
        ({}, []),
        ({"loggers": ["tensorboard", "wandb"]}, ["tensorboard", "wandb"]),
        ({"loggers": ["trackio", "mlflow", "prometheus"]}, ["mlflow.db", "metrics.prom"]),
        ({"loggers": [{"name": "mlflow", "uri": "http://host"}]}, []),
        ({"loggers": [{"name": "prometheus", "file": "/exported/a.prom"}]}, ["/exported/a.prom"]),
        ({"train": {"profile": {"at": 3}}}, ["profile/: a trace of steps 3 to 5"]),
        ({"train": {"profile": {"at": 1, "steps": 2}}}, ["profile/: a trace of step 2"]),
        ({"train": {"profile": {"at": 0}}}, []),
    ],
)
def test_a_dry_run_says_what_loggers_and_traces_write(
    tiny, tmp_path, monkeypatch, changes, entries
):
    monkeypatch.setitem(files_of.__globals__, "has_module", lambda name: True)
    tiny["train"] |= changes.pop("train", {})
    *found, _ = files_of(RunConfig.from_dict(tiny | changes), {})
    records = ["config.yaml", "metrics.jsonl", "program.json", "summary.json", "loss.png"]
    assert found == [str(tmp_path / "run" / name) for name in (*records, *entries)]


def test_a_dry_run_says_nothing_of_a_plot_without_matplotlib(tiny, monkeypatch):
    monkeypatch.setitem(files_of.__globals__, "has_module", lambda name: False)
    assert not any("loss.png" in file for file in files_of(RunConfig.from_dict(tiny), {}))


DECAYS = [
    ({}, "weight decay 0.1 on 8 of 12 parameters, not on norms, biases and embeddings (optim"),
    ({"decay": "all"}, None),
    (
        {"groups": [{"paths": ["mlp"], "weight_decay": 0.5}]},
        "weight decay 0.1 on 5 and 0.5 on 4 of 12 parameters",
    ),
    (
        {"decay": "all", "groups": [{"paths": ["norm"], "weight_decay": 0}]},
        "weight decay 0.1 on 9 of 12 parameters, with the decay of their group where it has",
    ),
    ({"weight_decay": 0, "groups": [{"paths": ["mlp"], "weight_decay": 0.5}]},
     "weight decay 0.5 on 4 of 12 parameters, with the decay of their group where it has one"),
]  # fmt: skip
"""Keys of an optimizer, and how the opening lines begin to tell of its weight decay, if at all."""


@pytest.mark.full
def test_the_weight_decay_of_groups_is_told(tiny):
    run = build_run(RunConfig.from_dict(tiny))
    for keys, words in DECAYS:
        config = RunConfig.from_dict(tiny | {"optimizer": tiny["optimizer"] | keys})
        lines = opening_lines(dataclasses.replace(run, config=config))
        found = [line for line in lines if line.startswith("weight decay")]
        assert len(found) == (words is not None), found
        assert all(words in line for line in found), found


def jsonl_of(folder, name, count):
    """The data section of a file with some texts of different lengths, one to a row."""
    paths = [folder / f"{name}-{side}.jsonl" for side in ("train", "held-out")]
    for path in paths:
        texts = (json.dumps({"text": name * (1 + i % 15)}) for i in range(count))
        path.write_text("\n".join(texts))
    train, held_out = ([str(path)] for path in paths)
    return {"kind": "jsonl", "files": train, "validation_files": held_out, "packed": False}


@pytest.mark.full
def test_an_epoch_of_buckets_has_only_the_rows_that_fill_a_batch(tiny, tmp_path):
    tiny["data"] = jsonl_of(tmp_path, "x", 15) | {"sequence_length": 16, "buckets": 2}
    tiny["train"] |= {"steps": 4, "global_batch": 8}
    run = build_run(RunConfig.from_dict(tiny | {"model": WORDS}))
    # 8 of the 15 rows are an epoch, so the second batch has some of the first again.
    assert [run.data_facts()(count)["seen/epoch"] for count in (1, 2)] == [1.0, 2.0]
    assert any(
        "4 steps of 8 x 16 tokens, 4 epochs of 8 samples; v" in x for x in opening_lines(run)
    )


def test_every_source_of_a_mixture_has_its_own_epochs(tiny, tmp_path):
    sources = [jsonl_of(tmp_path, name, count) for name, count in (("x", 32), ("y", 64))]
    tiny["data"] = {"kind": "mixture", "sequence_length": 16, "sources": sources, "weights": [3, 1]}
    tiny["train"] |= {"steps": 8, "global_batch": 8}
    run = build_run(RunConfig.from_dict(tiny))
    order = run.loader.samples.order(run.config.seed)
    assert sum(order[g] < 32 for g in range(64)) == 1.5 * 32
    assert run.data_facts()(8)["seen/epoch"] == 1.5
    told = ", 1.5 epochs of 32 samples, 0.25 epochs of 64 samples; validated"
    assert any(told in line for line in opening_lines(run))


def test_metrics_of_the_past_are_read_again_and_not_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "train/loss": 1.0 / step} for step in (1, 3, 2, 3, 4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "tr')
    told = []
    past = RunDirectory(tmp_path).take_metrics(3, told.append)
    assert told == []
    assert [row["step"] for row in past] == [row["step"] for row in past] == [1, 2, 3]
    assert path.read_text().count("\n") == 3
    assert vars(past) == {"path": path, "step": 3}


def test_the_best_loss_of_a_summary_is_the_least_that_is_finite():
    step = mock.Mock(model_spec=mock.Mock(weights={}))
    run = mock.Mock(step=step, world=mock.Mock(runtime_info=dict))
    for losses, best in (([nan, 2.0, inf, 1.0, -inf], 1.0), ([nan, inf], None), ([], None)):
        result = TrainResult(
            state=mock.Mock(), num_steps=5, reason="finished", device_bytes=0,
            validation_curve=tuple(enumerate(losses)),
        )  # fmt: skip
        assert summarize(run, result)["best_validation_loss"] == best


@pytest.mark.full
def test_a_best_metric_that_no_validation_has_is_found_before_the_first_step(tiny):
    def best(metric):
        train = tiny["train"] | {"best": {"metric": metric}}
        sets = {"validation": {"again": tiny["data"]["validation_files"]}}
        return build_run(RunConfig.from_dict(tiny | sets | {"train": train, "model": WORDS}))

    for metric in ("validation/los", "validation/again/los"):
        with pytest.raises(ConfigError, match=r"no metric 'los'\. Did you mean 'loss'\?"):
            best(metric)
    assert best("validation/again/loss").validation.keys() == {"again"}
