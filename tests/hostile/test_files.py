"""Files of somebody else that are not what they say: each is one error, and none is waited for.

The default run tries files that are cut off, of a dtype or a kind that nothing reads, or at an
address; `-m full` tries those that somebody has made on purpose.
"""

import contextlib
import json
import os
import pathlib
import struct

import numpy as np
import pytest

from axon_dist.checkpoint import list_tensors
from axon_dist.core.errors import CheckpointError, ConfigError
from axon_dist.core.files import as_path, as_place
from axon_dist.data import DatasetsSource, JsonlSource, TokenSource, chat
from axon_dist.data.chat import find_template
from axon_dist.weights.files import find_tensors


def row(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


TWICE = f'{{"a": {json.dumps(row(0, 8))}, "a": {json.dumps(row(8, 16))}}}'
LIES = {
    "overlap": ({"a": row(0, 8), "b": row(0, 8)}, 8, "overlaps"),
    "hole": ({"a": row(0, 8), "b": row(12, 20)}, 20, "hole"),
    "start": ({"a": row(8, 16)}, 16, "hole"),
    "trailing": ({"a": row(0, 8)}, 16, "more in it"),
    "cut": ({"a": row(0, 8)}, 4, "cut off"),
    "twice": (TWICE, 16, "twice"),
    "deep": ("[" * 100_000, 0, "cannot read"),
    "shape": ({"a": row(0, 8, [2.0])}, 8, "whole numbers"),
    "bool": ({"a": row(0, 4, [True])}, 4, "whole numbers"),
    "offsets": ({"a": row(0.0, 8.0)}, 8, "whole numbers"),
    "dtype": ({"a": row(0, 8, dtype="F31")}, 8, "F31"),
    "list": ("[1]", 0, "cannot read"),
    "mark": ("\ufeff{}", 0, "cannot read"),
    "metadata": ({"__metadata__": {"a": 1}}, 0, "is not a string"),
    "metadata list": ({"__metadata__": [1]}, 0, "cannot read"),
    "too large": ({"a": row(0, 0, [2**62, 0])}, 0, "too big"),
    "dims": ({"a": row(0, 4, [1] * 100)}, 4, "maximum supported dimension"),
    "late": ('{"n": 1' + "".join(f', "n{i}": 1' for i in range(99_999)) + ', "n": 1}', 0, "twice"),
}


@pytest.mark.sample("cut", "dtype")
@pytest.mark.parametrize("name", LIES)
def test_tensors_that_lie(tmp_path, name):
    header, size, words = LIES[name]
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    with pytest.raises(CheckpointError, match=words):
        list_tensors(path)


def test_tensors_in_a_pipe_or_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder")):
        with pytest.raises(CheckpointError, match=f"it is {kind}"):
            list_tensors(path)


def test_a_token_below_0(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(1000) % 200 - 5)
    with pytest.raises(ConfigError, match=r"the token -5, but tokens count from 0"):
        TokenSource(files=(str(tmp_path / "a.npy"),)).open(16)


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'a' * 10**10 }}", "MemoryError: it exceeds its memory"),
        ("{{ 'a'|center(9999999999) }}", "MemoryError"),
        ("{{ '%9999999999d' % 1 }}", "ValueError|MemoryError"),
        ("{{ 10 ** 1000000000 }}", "more than 0.5 seconds"),
        (
            "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "seconds",
        ),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than"),
    ],
)
def test_a_template_without_end(tmp_path, source, words, monkeypatch):
    pytest.importorskip("jinja2")
    monkeypatch.setattr(chat, "_SECONDS", 0.5)
    (tmp_path / "t.jinja").write_text(source)

    def made():
        template = find_template(str(tmp_path / "t.jinja"), None)
        return template.pieces([{"role": "user", "content": "q"}])

    with pytest.raises((ValueError, ConfigError), match=words):
        made()


@pytest.mark.full
def test_a_file_that_shrinks_or_is_replaced_while_it_is_read(tmp_path):
    path = tmp_path / "a.bin"
    np.arange(1000, dtype="<u2").tofile(path)
    samples = TokenSource(files=(str(path),)).open(16)
    os.truncate(path, 100)
    with pytest.raises(ConfigError, match="has shrunk while it was read"):
        samples.train(np.array([50]))
    np.arange(1000, dtype="<u2").tofile(tmp_path / "b.bin")
    os.replace(tmp_path / "b.bin", path)
    with pytest.raises(ConfigError, match="was replaced by another file"):
        samples.train(np.array([50]))


@pytest.mark.full
@pytest.mark.parametrize("token", [-5, -(2**32) + 7, 2**31, 2**40 + 3])
def test_a_late_token_that_is_none(tmp_path, token):
    tokens = np.arange(80_000, dtype=np.int64) % 200
    tokens[70_000] = token
    np.save(tmp_path / "a.npy", tokens)
    samples = TokenSource(files=(str(tmp_path / "a.npy"),)).open(16)
    with pytest.raises(ConfigError, match=rf"the token {token}, but tokens count from 0"):
        samples.train(np.array([70_000 // 16]))


def test_unpaired_surrogates_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "aa"}\n' * 20 + '{"text": "\\ud800"}\n')
    with pytest.raises(ConfigError, match=r"a.jsonl:21 has '\\ud800', a lone surrogate"):
        JsonlSource(files=(str(tmp_path / "a.jsonl"),)).open(16)


@pytest.mark.full
def test_a_list_in_the_folder_of_a_template(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ 1 }}")
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is a list and must be an object"):
        find_template(str(tmp_path / "t.jinja"), None)


@pytest.mark.full
def test_a_template_by_a_name_that_is_none(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": []}, 3]}')
    with pytest.raises(ConfigError, match="has no chat_template"):
        find_template(str(tmp_path / "tokenizer_config.json"), None)


ADAPTERS = {
    "rank": ({}, (2, 0), "division by zero"),
    "huge": ({"lora_alpha": 10**400}, (2, 1), "too large"),
    "endless": ({"alpha_pattern": {"(a+)+$": 1}}, (2, 1), "repeats a group"),
    "repeats": ({"alpha_pattern": {"a{99999999999}": 1}}, (2, 1), "not a regular expression"),
    "flags": ({"alpha_pattern": {"(?i)A+!": 10**400}}, (2, 1), "too large"),
    "polynomial": ({"alpha_pattern": {".*" * 9: 1}}, (2, 1), "has more than 6 repetitions"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_that_lie(tmp_path, name):
    config, shape, words = ADAPTERS[name]
    config = {"peft_type": "LORA", "lora_alpha": 4, **config}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    size = 4 * shape[0] * shape[1]
    layer = "base_model.model.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"
    text = json.dumps({f"{layer}.lora_B.weight": row(0, size, shape)}).encode()
    contents = struct.pack("<Q", len(text)) + text + bytes(size)
    (tmp_path / "adapter_model.safetensors").write_bytes(contents)
    with pytest.raises(CheckpointError, match=words):
        find_tensors(str(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("text", ['{"a": [[1e999, 1, 1, 1], 1, "x", []]}', None])
def test_kept_tokens_that_are_damaged(tmp_path, text):
    (tmp_path / "a.jsonl").write_text('{"text": "hello there"}\n' * 40)
    source = JsonlSource(files=(str(tmp_path / "a.jsonl"),), packed=True, too_long="split")
    source.open(16)
    for path in [*(tmp_path / ".axon_tokens").glob("*.json")]:
        path.unlink()
        path.mkdir() if text is None else path.write_text(text)
    refused = pytest.raises(ConfigError, match=r"data.cache: .* cannot be written: Is a directory")
    with refused if text is None else contextlib.nullcontext():
        source.open(16)


@pytest.mark.full
def test_a_lock_that_is_a_pipe(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "hello there"}\n' * 40)
    source = JsonlSource(files=(str(tmp_path / "a.jsonl"),), packed=True, too_long="split")
    source.open(16)
    for path in [*(tmp_path / ".axon_tokens").glob("*.tokens")]:
        path.unlink()
        os.mkfifo(path.with_suffix(".lock"))
    source.open(16)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_arrow_with_flipped_bytes(tmp_path, seed):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": ["hello there my friend"] * 40})
    with arrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    contents = bytearray((tmp_path / "a.arrow").read_bytes())
    # Where the offsets of the texts lie: read unchecked, one ends the process.
    start = contents.index(struct.pack("<3i", 0, 21, 42)) + 4 * seed + 4
    contents[start : start + 4] = b"\xff\xff\xff\x7f"
    (tmp_path / "a.arrow").write_bytes(contents)
    with pytest.raises(ConfigError, match="not an Arrow stream"):
        DatasetsSource(files=(str(tmp_path / "a.arrow"),)).open(16)


@pytest.mark.parametrize("address", ["gs://bucket/run", pathlib.Path("az://bucket/run")])
def test_an_address_is_no_folder(address):
    with pytest.raises(ConfigError, match=r"the address of an object store.*mount the store"):
        as_path(address, "run_dir")


@pytest.mark.sample("gs://bucket/a//b-must have no empty part")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gs://bucket/a//b", "must have no empty part"),
        ("gs://bucket/../b", "must have no empty part"),
        ("s3://bucket/a\nb", "no control character"),
        ("gs://bucket/" + "a" * 1025, "at most 1024 bytes"),
        ("gs://Not A Bucket/a", "'Not A Bucket' cannot be the name of a bucket"),
        ("s3://b/runs/one", "'b' cannot be the name of a bucket: a name has 3 to 63"),
        ("gs://", "'' cannot be the name of a bucket"),
        (7, "a int; it must be a path"),
    ],
)
def test_wrong_addresses_raise_clear_errors(text, said):
    with pytest.raises(ConfigError, match=f"run_dir: got .*{said}"):
        as_place(text, "run_dir")


@pytest.mark.parametrize("text", ["gs://bucket/a/b/", pathlib.Path("gs://bucket/a/b")])
def test_an_address_of_a_bucket(text):
    assert str(as_place(text, "run_dir")) == "gs://bucket/a/b"
    assert as_place("runs/one", "run_dir") == pathlib.Path("runs/one")
