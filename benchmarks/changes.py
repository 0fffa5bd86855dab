"""Changes between two legs of a run: it is the same run, or a sentence names the change.

    python -m benchmarks.changes                 # each change alone
    python -m benchmarks.changes --pairs         # and every two of them
    python -m benchmarks.changes --other PYTHON  # saved by another Python, with other versions
    python -m benchmarks.changes --log rows.txt  # goes on with those that are not in a file

A small model is trained on chats, of which a tokenizer and a template make tokens, and saved. Then
something is edited: a data file, the tokenizer, the template, the cache of tokens, the config, the
number of devices, a flag of JAX, the versions of libraries. The run that resumes has to end with
the bits of the run that nobody disturbed, or to name each change that it goes on with, or to end
with an error that names one. Exits with 1 where a change passed without a word.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import tokenizers
from rich.console import Console

from axon_dist.checkpoint import read_manifest
from axon_dist.checkpoint.layout import MANIFEST, MARKER, marker_of
from axon_dist.core.errors import AxonDistError
from axon_dist.mesh import World
from axon_dist.train.app import train
from axon_dist.train.config import RunConfig, load_config

from .rows import GOOD, as_line, done_in, note_in

STEPS, SAVED = 4, 2
JINJA = (
    "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}"
    "{{ end }}{% endfor %}"
)


def make_ground(folder: Path) -> Path:
    """Makes the data, the tokenizer, its template and a config; returns the path of the config."""
    words = {f"w{number}": number for number in range(40)} | {"user": 40, ":": 41, "</s>": 42}
    words["[UNK]"] = 43
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"chat_template": JINJA.replace("end }}", "'</s>' }}"), "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    for name, first in (("train", 0), ("validation", 7)):
        lines = [_chat((first + 3 * number) % 40) for number in range(24)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    config = {
        "name": "changes",
        "run_dir": str(folder / "run"),
        "devices": {"emulate": 2},
        "mesh": {"dp": 2},
        "model": {
            "width": 8, "num_layers": 1, "num_heads": 2, "ffn_width": 16, "max_length": 16,
            "vocab_size": 64, "dropout": 0.1,
        },
        "data": {
            "kind": "jsonl",
            "files": [str(folder / "train.jsonl")],
            "validation_files": [str(folder / "validation.jsonl")],
            "messages": "messages",
            "tokenizer": str(folder / "tokenizer.json"),
            "sequence_length": 16,
            "cache": str(folder / "cache"),
        },
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "train": {
            "steps": STEPS, "global_batch": 4, "eval_every": STEPS, "eval_batches": 1,
            "log_every": 1,
        },
        "checkpoint": {"every": SAVED, "keep": 9},
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def _chat(first: int) -> str:
    texts = [f"w{(first + step) % 40} w{(first * step) % 40} w{first % 40}" for step in range(2)]
    roles = ("user", "assistant")
    chat = [{"role": role, "content": x} for role, x in zip(roles, texts, strict=True)]
    return json.dumps({"messages": chat}) + "\n"


OTHER = "other versions"
"""The name of the change that is none but the Python of the first leg."""

Edit = Callable[[Path], None]
"""Changes something in the folder of `make_ground`, whose run was saved after step `SAVED`."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Something that may be another one when a run goes on.

    Args:
        edit: makes the change.
        words: one of them has to be in what the run says, where it is another run.
        flag: of JAX, which is set for the leg.
        is_none: whether the run that goes on has to be the same one; it then needs no word.
    """

    edit: Edit
    words: tuple[str, ...] = ()
    flag: str | None = None
    is_none: bool = False


def _replaced(name: str, old: str, new: str) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / name
        text = path.read_text()
        assert old in text, (name, old)
        path.write_text(text.replace(old, new, 1))

    return edit


def _appended(folder: Path) -> None:
    with open(folder / "train.jsonl", "a") as file:
        file.write(_chat(11))


def _same_again(folder: Path) -> None:
    """Writes the same data anew, with other times and another inode."""
    path = folder / "train.jsonl"
    contents = path.read_bytes()
    path.unlink()
    path.write_bytes(contents)


def _config(**changes: Any) -> Edit:
    """Sets keys, whose two parts a `__` divides."""

    def edit(folder: Path) -> None:
        path = folder / "config.yaml"
        config = json.loads(path.read_text())
        for key, value in changes.items():
            section, _, name = key.partition("__")
            if name:
                config.setdefault(section, {})[name] = value
            else:
                config[section] = value
        path.write_text(json.dumps(config))

    return edit


def _in_caches(change: Callable[[bytes], bytes], suffix: str) -> Edit:
    def edit(folder: Path) -> None:
        paths = sorted((folder / "cache").glob(f"*{suffix}"))
        assert paths, suffix
        for path in paths:
            path.write_bytes(change(path.read_bytes()))

    return edit


def _flipped(contents: bytes) -> bytes:
    middle = len(contents) // 2
    return contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]


def _other_version(contents: bytes) -> bytes:
    """A cache of the version after this one, whose own checksums are right."""
    return bytes([contents[0] ^ 1]) + contents[1:]


def _no_cache(folder: Path) -> None:
    shutil.rmtree(folder / "cache")


def _cache_of_a_file(folder: Path) -> None:
    """Half a file under the name of one that another run is writing, and its lock."""
    for path in sorted((folder / "cache").glob("*.tokens")):
        path.with_name(f".{'0' * 16}.axon.tmp").write_bytes(path.read_bytes()[:40])
        path.with_suffix(".lock").touch()
        path.unlink()


def _versions(**others: str) -> Edit:
    """Writes into the manifest that other versions had saved it."""

    def edit(folder: Path) -> None:
        path = folder / "run" / "checkpoints" / f"step_{SAVED:08d}"
        manifest = json.loads((path / MANIFEST).read_text())
        manifest["versions"] |= others
        text = json.dumps(manifest, indent=1).encode()
        (path / MANIFEST).write_bytes(text)
        (path / MARKER).write_bytes(marker_of(text))

    return edit


def _nothing(folder: Path) -> None:
    pass


CHANGES: dict[str, Change] = {
    "nothing": Change(_nothing, is_none=True),
    "data, a word": Change(_replaced("train.jsonl", "w6 ", "w5 "), ("contents=",)),
    "data, a record more": Change(_appended, ("contents=", "num_samples=")),
    "data, written again": Change(_same_again, is_none=True),
    "validation data": Change(_replaced("validation.jsonl", "w7 ", "w5 "), ("contents=",)),
    "tokenizer": Change(_replaced("tokenizer.json", '"w6": 6', '"w6": 44'), ("tokenizer=",)),
    "template": Change(_replaced("tokenizer_config.json", "}}: ", "}} : : "), ("template=",)),
    "cache, none": Change(_no_cache, is_none=True),
    "cache, a flipped bit": Change(_in_caches(_flipped, ".tokens"), is_none=True),
    "cache, half": Change(_in_caches(lambda x: x[: len(x) // 2], ".tokens"), is_none=True),
    "cache, empty": Change(_in_caches(lambda x: b"", ".tokens"), is_none=True),
    "cache, of another version": Change(_in_caches(_other_version, ".tokens"), is_none=True),
    "cache, its rows flipped": Change(_in_caches(_flipped, ".npz"), is_none=True),
    "cache, its index flipped": Change(_in_caches(_flipped, ".json"), is_none=True),
    "cache, of a killed run": Change(_cache_of_a_file, is_none=True),
    "learning rate": Change(_config(optimizer__learning_rate=0.02), ("learning_rate: 0.01",)),
    "dropout": Change(_config(model__dropout=0.2), ("model.dropout: 0.1 ->",)),
    "batch": Change(_config(train__global_batch=8), ("train.global_batch: 4 ->",)),
    "seed": Change(_config(seed=1), ("seed=0",)),
    "length of a sample": Change(
        _config(data__sequence_length=8), ("length=16", "data.sequence_length")
    ),
    "devices": Change(
        _config(devices={"emulate": 4}, mesh={"dp": 4}), ("mesh dp=2 -> dp=4", "mesh")
    ),
    "strategy": Change(
        _config(parallel="fsdp", mesh={"fsdp": 2}), ("mesh dp=2 -> fsdp=2",)
    ),
    "flag of JAX": Change(
        _nothing, ("jax_softmax_custom_jvp", "jax_default_matmul_precision"),
        "jax_default_matmul_precision",
    ),
    OTHER: Change(_nothing, ("changed since it was saved: jax ",)),
    "version of jax": Change(_versions(jax="0.0.1"), ("jax 0.0.1 ->",)),
    "version of a reader": Change(_versions(tokenizers="0.0.1"), ("tokenizers 0.0.1 ->",)),
}  # fmt: skip
"""By its name each change of one thing."""


@dataclasses.dataclass(frozen=True)
class Leg:
    """The result of a run: its losses by step, the checksums of its end, and its output."""

    losses: dict[int, float]
    checksums: dict[str, int]
    said: str
    has_ended: bool

    def is_same(self, other: Leg) -> bool:
        """Whether it ended with the same bits."""
        return self.losses == other.losses and self.checksums == other.checksums


@contextlib.contextmanager
def _flag(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    before = jax.config.values[name]
    jax.config.update(name, "highest")
    try:
        yield
    finally:
        jax.config.update(name, before)


def run_leg(folder: Path, resume: str | None) -> Leg:
    """Trains in a folder of `make_ground`."""
    output, has_ended = io.StringIO(), True
    try:
        config: RunConfig = load_config(str(folder / "config.yaml"))
        train(config, Console(file=output, width=1000), resume)
    except AxonDistError as error:
        print(error, file=output)
        has_ended = False
    return leg_at(folder, output.getvalue(), has_ended)


def leg_at(folder: Path, said: str, has_ended: bool) -> Leg:
    """The files that a run has left in a folder."""
    metrics = folder / "run" / "metrics.jsonl"
    rows = [json.loads(x) for x in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    last = folder / "run" / "checkpoints" / f"step_{STEPS:08d}"
    checksums = dict(read_manifest(last).checksums) if has_ended else {}
    return Leg(losses, checksums, said, has_ended)


def make_saved(folder: Path, python: str | None = None) -> Leg:
    """A run to its end, which is then set back to the checkpoint after step `SAVED`.

    Args:
        folder: takes everything.
        python: another interpreter that runs it, and whose versions may be others.
    """
    folder.mkdir()
    config = make_ground(folder)
    if python is None:
        whole = run_leg(folder, None)
    else:
        command = [python, "-m", "axon_dist.train.cli", "train", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        whole = leg_at(folder, done.stdout + done.stderr, done.returncode == 0)
    assert whole.has_ended, whole.said
    shutil.rmtree(folder / "run" / "checkpoints" / f"step_{STEPS:08d}")
    return whole


def problem_of(folder: Path, saved: Path, whole: Leg, names: Sequence[str]) -> str | None:
    """A change that passed without a word where a saved run goes on; None if none did.

    Args:
        folder: takes the run; the changes are made there.
        saved: as `make_saved` has left it. Its paths are in the config, so it is moved away.
        whole: the run that nobody disturbed.
        names: keys of `CHANGES`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    flag = None
    for name in names:
        CHANGES[name].edit(folder)
        flag = CHANGES[name].flag or flag
    with _flag(flag):
        leg = run_leg(folder, "auto")
    if leg.has_ended and leg.is_same(whole):
        return None
    named = [any(word in leg.said for word in CHANGES[name].words) for name in names]
    if not leg.has_ended:
        return None if any(named) else f"it ended, and names none: {leg.said[-300:]}"
    wrong = [
        name
        for name, is_named in zip(names, named, strict=True)
        if not (is_named or CHANGES[name].is_none)
    ]
    if wrong or all(CHANGES[name].is_none for name in names):
        return f"another run, and no word of {', '.join(wrong or names)}"
    return None


def measure_changes(
    folder: Path,
    cells: Sequence[Sequence[str]],
    python: str | None = None,
    log: Path | None = None,
) -> list[tuple[str, int, int]]:
    """Rows of single changes and of pairs: how many, and how many were noticed or did nothing.

    Args:
        folder: an empty one.
        cells: of each run the changes made before it goes on.
        python: the interpreter of the first leg; None for this one.
        log: a file with a line for each cell; a cell that is there is not tried again.
    """
    # JAX starts once, with the most devices of all cells.
    World.emulate(4)
    work, saved = folder / "work", folder / "saved"
    whole = make_saved(work, python)
    shutil.copytree(work, saved)
    counts: dict[int, list[int]] = {}
    done = done_in(log)
    for names in cells:
        cell = " + ".join(names)
        if cell not in done:
            problem = problem_of(work, saved, whole, names)
            done[cell] = as_line(problem)
            if problem is not None:
                print(f"{cell}: {done[cell]}", flush=True)
            note_in(log, cell, done[cell])
        row = counts.setdefault(len(names), [0, 0])
        row[0] += 1
        row[1] += done[cell] == GOOD
    titles = {1: "one change between two legs", 2: "two changes between two legs"}
    return [(titles[size], row[0], row[1]) for size, row in counts.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("changes", nargs="*", help=f"{', '.join(CHANGES)}; or all")
    parser.add_argument("--pairs", action="store_true", help="every two changes, too")
    parser.add_argument("--other", help="the Python of the first leg")
    parser.add_argument("--log", type=Path, help="a file of the cells that are done")
    asked = parser.parse_args()
    if unknown := set(asked.changes) - CHANGES.keys():
        parser.error(f"there is no change {', '.join(sorted(unknown))}: {', '.join(CHANGES)}")
    single = [name for name in CHANGES if (name == OTHER) == (asked.other is not None)]
    cells: list[tuple[str, ...]] = [(name,) for name in asked.changes or single]
    if asked.pairs:
        pairs = [*itertools.combinations([name for name in single if name != "nothing"], 2)]
        # A log that is cut off is then a sample of all.
        random.Random(0).shuffle(pairs)
        cells += pairs
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_changes(Path(os.path.realpath(folder)), cells, asked.other, asked.log)
    for name, count, good in rows:
        print(f"{name}: {good}/{count}")
    return 0 if all(count == good for _, count, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
