"""Files of tokens, JSONL and Parquet, packed rows and mixtures, all with one counter as state."""

import bz2
import errno
import fcntl
import gzip
import itertools
import json
import lzma
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.core.errors import ConfigError
from axon_dist.data import (
    DatasetsSource,
    JsonlSource,
    Loader,
    Mixture,
    ParquetSource,
    Sequences,
    TextSource,
    TokenSource,
    pack,
)
from axon_dist.data.store import _Part
from axon_dist.data.tokens import Joined

NUMBERS = np.arange(1000, dtype=np.uint16)


@pytest.fixture
def bins(tmp_path):
    """Files in nanoGPT's format, whose tokens are positions."""
    NUMBERS.tofile(tmp_path / "train.bin")
    NUMBERS[:300].tofile(tmp_path / "val.bin")
    return tmp_path


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def chats(tmp_path):
    records = [{"q": f"what is {n}? ", "a": "x" * (n % 13)} for n in range(40)]
    return lines(tmp_path / "chats.jsonl", records)


@pytest.fixture
def texts(tmp_path):
    return lines(tmp_path / "texts.jsonl", [{"text": f"{n:03}" * (1 + n % 9)} for n in range(60)])


def everything(samples):
    """Returns all training rows, in order."""
    return samples.train(np.arange(samples.identity["num_samples"]))


def documents(batch):
    """Returns the texts in rows of bytes."""
    return sorted(
        bytes(tokens[segments == number].tolist()).decode()
        for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True)
        for number in range(1, segments.max() + 1)
    )


def test_token_files_are_mapped_and_cut(bins):
    source = TokenSource((str(bins / "train.bin"),), (str(bins / "val.bin"),))
    samples = source.open(10)
    batch = samples.train(np.array([0, 98]))
    assert batch["tokens"].tolist() == [list(range(11)), list(range(980, 991))]
    assert samples.validation(np.array([289]))["tokens"].tolist() == [list(range(289, 300))]
    assert (samples.vocab_size, source.arrays) == (1000, ("tokens",))
    assert isinstance(samples.text.train, Joined)


def test_without_validation_files_the_end_is_held_out(bins):
    samples = TokenSource((str(bins / "train.bin"),), validation_fraction=0.2).open(10)
    assert (len(samples.text.train), int(samples.text.validation[np.array(0)])) == (800, 800)
    assert "800 tokens for training, 200 for validation" in samples.description


def test_several_files_are_one_stream(bins):
    NUMBERS[:500].astype("<u2").tofile(bins / "a.bin")
    NUMBERS[500:].astype("<u2").tofile(bins / "b.bin")
    one, two = (
        TokenSource(tuple(str(bins / name) for name in names)).open(7)
        for names in (["train.bin"], ["a.bin", "b.bin"])
    )
    np.testing.assert_array_equal(everything(one)["tokens"], everything(two)["tokens"])
    np.testing.assert_array_equal(
        one.validation(one.spread(5))["tokens"], two.validation(two.spread(5))["tokens"]
    )


def test_ends_of_documents_make_segments(tmp_path):
    tokens = np.array([5, 9, 6, 7, 9, 8, 1, 2, 9, 3] * 9, np.uint32)
    np.save(tmp_path / "t.npy", tokens)
    batch = TokenSource((str(tmp_path / "t.npy"),), document_end=9).open(8).train(np.array([0]))
    assert batch["tokens"].tolist() == [[5, 9, 6, 7, 9, 8, 1, 2, 9]]
    assert batch["segments"].tolist() == [[1, 1, 2, 2, 2, 3, 3, 3, 3]]


def test_other_contents_of_a_mapped_file_are_other_data(bins):
    source = TokenSource((str(bins / "train.bin"),))
    before = source.open(10).identity
    assert source.open(10).identity == before
    NUMBERS[::-1].tofile(bins / "train.bin")
    assert source.open(10).identity["contents"] != before["contents"]


@pytest.mark.parametrize(
    ("name", "content", "fields", "message"),
    [
        ("a.bin", b"123", {}, r"has 3 bytes, which is not a whole number of uint16 tokens"),
        ("a.bin", b"", {}, r"has 0 bytes"),
        (
            "a.bin",
            np.arange(9, dtype=np.uint32).tobytes(),
            {},
            r"every other token is 0, as if .* 4 bytes; set data.dtype=uint32",
        ),
        ("a.npy", b"123", {}, r"a.npy is not an .npy file: .* name raw tokens .bin"),
        ("a.bin", b"12", {"document_end": -1}, r"document_end=-1 must be a token"),
        (
            "a.bin",
            b"12",
            {"document_end": 2**16},
            r"=65536 does not fit into files of uint16",
        ),
    ],
)
def test_files_that_are_no_tokens(tmp_path, name, content, fields, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        TokenSource((str(tmp_path / name),), **fields).open(2)
    with pytest.raises(ConfigError, match=r"data.files names no file: name files of tokens"):
        TokenSource().open(2)
    np.save(tmp_path / "floats.npy", np.ones(3))
    with pytest.raises(
        ConfigError, match=r"has float64 \(3,\) and must be a 1-D array of integers"
    ):
        TokenSource((str(tmp_path / "floats.npy"),)).open(2)


def test_a_token_that_the_model_does_not_know_is_said(bins):
    samples = TokenSource((str(bins / "train.bin"),)).open(10)
    with pytest.raises(ConfigError, match=r"model.vocab_size: got 50, but the data has the token "):
        next(Loader(samples, global_batch=4, vocab_size=50))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_loses_nothing_and_fits(lengths):
    rows = pack(np.array(lengths), 20)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(lengths)))
    sums = [sum(lengths[n] for n in row) for row in rows]
    assert max(sums) <= 20
    # No two documents fit into one row.
    assert len(sums) == 1 or sum(sorted(sums)[:2]) > 20


def test_every_document_is_in_one_row_with_its_own_segment(texts):
    samples = JsonlSource((texts,), validation_fraction=0.25).open(40)
    batch = everything(samples)
    held = samples.validation(np.arange(samples.num_validation))
    expected = [f"{n:03}" * (1 + n % 9) + "\0" for n in range(60)]
    assert sorted(documents(batch) + documents(held)) == sorted(expected)
    assert len(documents(held)) == 15
    padding = (batch["segments"] == 0).mean()
    assert samples.padding == pytest.approx(padding)
    assert padding < 0.1
    assert f"{100 * padding:.1f}% is padding" in samples.description
    assert "raise data.sequence_length" not in samples.description
    lonely = JsonlSource((texts,), validation_fraction=0.25, too_long="drop").open(3)
    assert "; no two fit into 3 tokens: raise data.sequence_length" in lonely.description
    alone = JsonlSource((texts,), validation_fraction=0.25, packed=False).open(40)
    assert (everything(alone)["segments"].max(), documents(everything(alone))) == (
        1,
        documents(batch),
    )


def test_long_texts_are_split_so_that_every_token_is_a_target_once(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"body": "abcdefghij"}, {"body": "k"}])
    held = lines(tmp_path / "b.jsonl", [{"body": "held"}])
    source = JsonlSource((path,), (held,), text="body")
    assert documents(everything(source.open(4))) == ["abcde", "efghi", "ij\0", "k\0"]
    dropped = JsonlSource((path,), (held,), text="body", too_long="drop").open(4)
    assert documents(everything(dropped)) == ["k\0"]
    assert "1 documents are dropped" in dropped.description


def test_prompts_are_seen_and_not_learned(chats):
    source = JsonlSource((chats,), prompt="q", response="a")
    batch = everything(source.open(64))
    for tokens, segments, mask in zip(*(batch[name] for name in source.arrays), strict=True):
        for number in range(1, segments.max() + 1):
            here = segments == number
            prompt, answer = (bytes(tokens[here & (mask == m)].tolist()).decode() for m in (0, 1))
            asked = int(prompt.removeprefix("what is ").removesuffix("? "))
            assert answer == "x" * (asked % 13) + "\0"
    with pytest.raises(ConfigError, match=r"of 36 documents are longer than 20 tokens, the l"):
        source.open(19)


def test_prompts_by_a_tokenizer_whose_end_is_learned(tmp_path):
    words = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "<end>": 4, "<bos>": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "<bos> $A", None, [("<bos>", 5)]
    )
    tokenizer.save(str(tmp_path / "words.json"))
    path = lines(tmp_path / "a.jsonl", [{"q": "one two ", "a": "three"}] * 2)
    fields = {"prompt": "q", "response": "a", "tokenizer": str(tmp_path / "words.json")}
    source = JsonlSource((path,), validation_fraction=0.5, end_token="<end>", **fields)
    batch = source.open(5).train(np.array([0]))
    assert batch["tokens"].tolist() == [[5, 1, 2, 3, 4, 0]]
    assert batch["mask"].tolist() == [[0, 0, 0, 1, 1, 0]]
    with pytest.raises(ConfigError, match=r"end_token='<eos>' is not in the vocabulary of .*words"):
        JsonlSource((path,), end_token="<eos>", **fields).open(5)


def test_parquet_is_jsonl_in_columns(tmp_path, texts):
    records = [json.loads(line) for line in pathlib.Path(texts).read_text().splitlines()]
    path = str(tmp_path / "texts.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=7)
    ours = everything(ParquetSource((path,)).open(40))
    theirs = everything(JsonlSource((texts,)).open(40))
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])
    with pytest.raises(ConfigError, match=r"has no column 'tex'; .*Did you mean 'text'\?"):
        ParquetSource((path,), text="tex").open(40)
    with pytest.raises(ConfigError, match=r"texts.jsonl is not a Parquet file that pyarrow"):
        ParquetSource((texts,)).open(40)


def by_stream(path, tables):
    with pyarrow.ipc.new_stream(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)


def by_file(path, tables):
    with pyarrow.ipc.new_file(path, tables[0].schema) as writer:
        writer.write_table(pyarrow.concat_tables(tables).unify_dictionaries(), max_chunksize=5)


def test_a_number_of_many_digits_in_another_field_is_valid(tmp_path):
    long = "9" * 5000
    lines = [f'{{"text": "a{n}", "id": [{n}, {long}, -{long}]}}' for n in range(8)]
    plain = [json.dumps({"text": f"a{n}"}) for n in range(8)]
    found = []
    for name, rows in (("long", lines), ("plain", plain)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(rows))
        found.append(everything(JsonlSource((str(path),), validation_fraction=0.3).open(6)))
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name])
    path.write_text('{"text": ' + "9" * 5000 + "}")
    with pytest.raises(ConfigError, match=r"plain.jsonl:1 has inf under 'text', which must be a t"):
        JsonlSource((str(path),)).open(6)


KINDS_OF_ARROW = {
    "categories": {"kind": pyarrow.array(["a", "b"] * 5).dictionary_encode()},
    "lists of categories": {
        "kind": pyarrow.array([["a"]] * 10, pyarrow.list_(pyarrow.dictionary("int8", "string")))
    },
    "plain": {},
}


@pytest.mark.parametrize("write", [by_stream, by_file])
@pytest.mark.parametrize("others", KINDS_OF_ARROW.values(), ids=KINDS_OF_ARROW)
def test_arrow_files_may_have_dictionaries_and_either_format(tmp_path, monkeypatch, write, others):
    """A batch in the middle of a file has its dictionary far before it."""
    # Every batch would be a part of its own.
    monkeypatch.setattr("axon_dist.data.arrow.PART", 1)
    texts = [f"text {number}" for number in range(20)]
    first, last = (pyarrow.table({"text": part, **others}) for part in (texts[:10], texts[10:]))
    path = str(tmp_path / "texts.arrow")
    write(path, [first, last])
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ours = everything(DatasetsSource((path,)).open(40))
    theirs = everything(JsonlSource((str(lines),)).open(40))
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_a_text_may_be_a_category_whose_values_change(tmp_path):
    parts = [["one", "two"], ["three", "one", "two"]]
    tables = [pyarrow.table({"text": pyarrow.array(p).dictionary_encode()}) for p in parts]
    path = str(tmp_path / "texts.arrow")
    by_stream(path, tables)
    with open(tmp_path / "texts.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for part in parts for text in part)
    ours = everything(DatasetsSource((path,), validation_fraction=0.5).open(6))
    theirs = everything(JsonlSource((file.name,), validation_fraction=0.5).open(6))
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.parametrize("write", [by_stream, by_file])
def test_an_arrow_file_that_was_cut_is_refused(tmp_path, write):
    table = pyarrow.table({"text": ["a"] * 10, **KINDS_OF_ARROW["categories"]})
    path = tmp_path / "texts.arrow"
    write(str(path), [table])
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ConfigError, match=r"texts.arrow is not an Arrow stream that pyarrow can"):
        DatasetsSource((str(path),)).open(40)


def test_chats_in_parquet_are_those_in_jsonl(tmp_path):
    turns = [{"role": "user", "content": "to be"}, {"role": "assistant", "content": "or not"}]
    records, (lines, columns) = [{"turns": turns}] * 8, (tmp_path / "c.jsonl", tmp_path / "c.pq")
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), columns)
    ours, theirs = (
        everything(kind((str(path),), messages="turns", validation_fraction=0.5).open(40))
        for kind, path in ((ParquetSource, columns), (JsonlSource, lines))
    )
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_tokens_are_made_once_and_again_where_anything_changed(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"number {i} " * (1 + i % 5)}) for i in range(200)]
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("axon_dist.data.documents.PART", 2048)
    source = JsonlSource((str(path),))
    first = source.open(40)
    rows = everything(first)["tokens"]
    parts = sorted((tmp_path / ".axon_tokens").glob("*.tokens"))
    assert len(parts) > 3
    kept = dict.fromkeys(parts)
    for part in kept:
        kept[part] = part.stat().st_mtime_ns
    again = source.open(40)
    assert again.identity == first.identity
    np.testing.assert_array_equal(everything(again)["tokens"], rows)
    assert all(part.stat().st_mtime_ns == time for part, time in kept.items())
    # A truncated part is made again; after a change of the file, all parts are.
    os.truncate(parts[0], 100)
    np.testing.assert_array_equal(everything(source.open(40))["tokens"], rows)
    path.write_text("\n".join(lines).replace("number 7 ", "number 8 ") + "\n")
    assert source.open(40).identity != first.identity


def failing(number):
    """A function of the operating system that fails; whoever tries it again and again hangs."""
    calls = itertools.count()

    def fail(*_, **__):
        assert next(calls) < 20, "it is tried forever"
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_tokens_are_made_on_a_file_system_without_locks(texts, tmp_path, monkeypatch, number):
    with_locks = everything(JsonlSource((texts,), cache=str(tmp_path / "a")).open(40))
    monkeypatch.setattr(fcntl, "flock", failing(number))
    samples = JsonlSource((texts,), cache=str(tmp_path / "b")).open(40)
    assert "has no locks, so processes may tokenize the same part twice: name" in (
        samples.description
    )
    np.testing.assert_array_equal(everything(samples)["tokens"], with_locks["tokens"])
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in "ab"]
    assert names[0] == names[1]
    # Nothing has to be tokenized, so locks do not matter.
    again = JsonlSource((texts,), cache=str(tmp_path / "b")).open(40)
    assert "has no locks" not in again.description


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "damaged"])
def test_without_locks_a_part_that_another_host_has_completed_stays(
    texts, tmp_path, monkeypatch, is_whole, links
):
    """Its reader refuses a file that was replaced by another one."""
    source = JsonlSource((texts,))
    rows = everything(source.open(40))["tokens"]
    (kept,) = (tmp_path / ".axon_tokens").glob("*.tokens")
    content = kept.read_bytes()
    kept.unlink()
    write = _Part.write

    def write_after_another(path, documents):
        write(path, documents)
        kept.write_bytes(content if is_whole else content[:-9])

    monkeypatch.setattr(_Part, "write", write_after_another)
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    if not links:
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
    kept.touch()
    number = kept.stat().st_ino
    samples = source.open(40)
    assert (kept.stat().st_ino == number) == is_whole
    np.testing.assert_array_equal(everything(samples)["tokens"], rows)
    assert not [*kept.parent.glob(".*")]


def test_a_lock_that_fails_is_not_taken_for_that_of_another_process(texts, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with pytest.raises(ConfigError, match=r"data.cache: '.*lock' cannot be locked: .*; name an"):
        JsonlSource((texts,)).open(40)


def test_a_folder_that_cannot_be_written_is_said(texts, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"data.cache: tokens cannot be cached in .*taken"):
        JsonlSource((texts,), cache=str(tmp_path / "taken")).open(40)


def test_without_pyarrow_the_extra_is_named(monkeypatch, texts):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.*\[parquet\]'"):
        ParquetSource((texts,)).open(40)


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ('{"text": "a"}\n\n{"text": 3}\n', {}, r"a.jsonl:3 has 3 under 'text', which must be a te"),
        ('{"text": "a"}\nnone\n', {}, r"a.jsonl:2 is not valid JSON: .*; correct or remove it"),
        ('{"text": "a"}\n[1]\n', {}, r"a.jsonl:2 is \[1\], which must be an object with field"),
        ('{"txt": "a"}\n{"txt": "b"}', {}, r"has no field 'text', .* or data.text. Did you mean"),
        ("\n \n", {}, r"a.jsonl has no record; give files with records"),
        ('{"text": ""}\n{"text": ""}', {}, r"none of 1 documents has from 2 to 9 tokens"),
        ("", {"prompt": "q"}, r"data.prompt='q' and data.response=None: name both fields"),
        ("", {"text": "t", "prompt": "q", "response": "a"}, r"data.text='t' and data.prompt='q'"),
        ("", {"end_token": "x"}, r"data.end_token='x' needs a data.tokenizer that has this token"),
    ],
)
def test_records_that_cannot_be(tmp_path, text, fields, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        JsonlSource((str(tmp_path / "a.jsonl"),), validation_fraction=0.5, **fields).open(8)


@pytest.fixture
def mixture(texts, chats, bins):
    parts = [
        JsonlSource((texts,)),
        JsonlSource((chats,), prompt="q", response="a"),
        TokenSource((str(bins / "train.bin"),)),
    ]
    return Mixture([part.open(30) for part in parts], [5, 3, 2])


@pytest.mark.full
def test_a_mixture_has_its_shares_in_every_stretch(mixture):
    order = mixture.order(0)
    which = np.array([np.searchsorted(mixture._starts, order[g], "right") - 1 for g in range(2000)])
    assert [(which == part).sum() for part in range(3)] == [1000, 600, 400]
    assert [(which[500:600] == part).sum() for part in range(3)] == [50, 30, 20]
    # The smaller source has its own epochs, each in a different order.
    size = int(np.diff(mixture._starts)[0])
    mine = [order[g] for g in range(2000) if which[g] == 0]
    epochs = [mine[i : i + size] for i in range(0, 3 * size, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([5, 3, 2], [50, 30, 20]), ([7, 11], [99, 157]), ([1, 1.009, 1.2], [10, 10, 12])],
    ids=range(3),
)
def test_a_mixture_says_the_shares_that_it_draws(mixture, weights, counts):
    mixed = Mixture(mixture._parts[: len(weights)], weights)
    length = 2 * sum(counts)
    order = mixed.order(0)
    which = [np.searchsorted(mixed._starts, order[g], "right") - 1 for g in range(length)]
    assert np.bincount(which).tolist() == [2 * count for count in counts]
    assert np.bincount(mixed.spread(length)[:, 0]).tolist() == [2 * count for count in counts]
    said = re.findall(r"(\S+)% of \(", mixed.description)
    assert said == [f"{100 * count / sum(counts):.3g}" for count in counts]
    paddings = [part.padding for part in mixed._parts]
    assert mixed.padding == pytest.approx(np.average(paddings, weights=counts))


def test_rows_of_a_mixture_have_all_arrays(mixture):
    batch = mixture.train(np.array([0, mixture._starts[1], mixture._starts[2]]))
    assert {name: x.shape for name, x in batch.items()} == dict.fromkeys(
        ("tokens", "segments", "mask"), (3, 31)
    )
    assert (batch["segments"][2] == 1).all()
    assert (batch["mask"][[0, 2]] == 1).all()
    assert batch["tokens"][2].tolist() == list(range(31))
    places = mixture.spread(20)
    assert np.bincount(places[:, 0]).tolist() == [10, 6, 4]
    one = Loader(mixture, global_batch=4)
    rows = np.concatenate([batch["tokens"] for batch in one.validation_batches(2)])
    np.testing.assert_array_equal(rows, mixture.validation(mixture.spread(8))["tokens"])
    assert one.num_validated() == mixture.num_validation > 8
    counts = np.bincount(mixture.spread(mixture.num_validation)[:, 0])
    assert (counts <= [part.num_validation for part in mixture._parts]).all()
    with pytest.raises(
        ConfigError, match=r"data.weights: got \[1\] for 3 sources; give one number"
    ):
        Mixture(mixture._parts, [1])


def sources(texts, chats, bins, mixture):
    return {
        "tokens": TokenSource((str(bins / "train.bin"),)).open(30),
        "packed": JsonlSource((texts,)).open(30),
        "mixture": mixture,
    }


@pytest.mark.parametrize("name", ["tokens", "packed", "mixture"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1)])
def test_a_resumed_run_goes_on_with_the_same_rows(texts, chats, bins, mixture, name, before, after):
    samples = sources(texts, chats, bins, mixture)[name]

    def loaders(count, **fields):
        return [Loader(samples, process=p, num_processes=count, **fields) for p in range(count)]

    def run(parts, steps):
        rounds = [[next(part) for part in parts] for _ in range(steps)]
        return np.concatenate([batch["tokens"] for step in rounds for batch in step])

    whole = run(loaders(1, global_batch=4, seed=3), 9)
    first = loaders(before, global_batch=4, seed=3)
    rows = [run(first, 3)]
    states = [json.loads(json.dumps(part.state())) for part in first]
    assert all(state == states[0] for state in states)
    rest = loaders(after, global_batch=6, seed=3)
    for part in rest:
        part.restore(states[0])
    rows.append(run(rest, 4))
    np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_sequences_of_samples_have_equal_lengths_and_32_bits():
    rows = [{"x": [1.0, 2.0], "n": n} for n in range(9)]
    batch = Sequences(rows, rows[:1], "rows").train(np.array([3, 1]))
    assert {name: x.dtype for name, x in batch.items()} == {"x": np.float32, "n": np.int32}
    assert batch["n"].tolist() == [3, 1]
    other = Sequences([*rows[:2], {"x": [1.0], "n": 2}], rows, "rows")
    with pytest.raises(ConfigError, match=r"sample 2 of rows has x float32\[1\], n int32\[\], but"):
        other.train(np.array([0, 2]))
    for bad, message in (
        ([{"x": 2**40}], r"integers up to 1099511627776, beyond 32 bits"),
        (
            [{"x": "text"}],
            r"sample 0 is \{'x': 'text'\}, which must be a dict of arrays of numbers",
        ),
        ([], r"the training side of rows is empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            Sequences(bad, rows, "rows")


@pytest.mark.full
def test_sequences_keep_the_64_bits_that_jax_keeps():
    rows = [
        {"x": np.array([1 / 3]), "n": 2**40 + n, "w": np.ones(1, np.longdouble)} for n in range(4)
    ]
    small = [{"x": np.array([1 / 3])}] * 4
    narrow = Sequences(small, small, "rows")
    with jax.enable_x64(True):
        samples, wide = Sequences(rows, rows, "rows"), Sequences(small, small, "rows")
    # The thread and the processes of a loader do not have the setting of the main thread.
    for workers in (0, 1):
        loader = Loader(samples, global_batch=4, num_workers=workers)
        batch = next(loader)
        del loader
        assert {name: x.dtype.name for name, x in batch.items()} == {
            "x": "float64",
            "n": "int64",
            "w": "float64",
        }
        assert sorted(batch["n"].tolist()) == [2**40 + n for n in range(4)]
        assert batch["x"].max() == 1 / 3
    assert narrow.identity == wide.identity


def test_sequences_take_narrow_and_empty_arrays():
    for kind in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4):
        rows = [{"x": jnp.full(3, n, kind), "empty": np.zeros((0, 4))} for n in range(4)]
        samples = Sequences(rows, rows, "rows")
        batch = samples.train(np.array([2, 1]))
        assert batch["x"].dtype == kind
        assert batch["x"].astype(np.float32)[:, 0].tolist() == [2, 1]
        assert batch["empty"].shape == (2, 0, 4)
        assert samples.identity != Sequences(rows[::-1], rows, "rows").identity


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ((np.ones(3), 1), r"sample 0 is a tuple of 2, .* return a dict of arrays"),
        ((np.ones(3), np.ones(3)), r"sample 0 is a tuple of 2, .* return a dict of arrays"),
        ([np.ones(3), 1], r"sample 0 has \[array.*\] as x, which is no array .* make a dict"),
        ({"x": [[1], [2, 3]]}, r"sample 0 has \[\[1\], \[2, 3\]\] as x, which is no array .*pad"),
    ],
)
def test_samples_without_one_array_for_each_name_are_refused(sample, message):
    with pytest.raises(ConfigError, match=message):
        Sequences([sample], [sample], "rows")


def test_a_limit_of_tokens_needs_tokens():
    rows = [{"x": np.ones(2)}] * 3
    with pytest.raises(ConfigError, match=r"vocab_size=5 .* the samples have x, and no 'tokens'"):
        next(Loader(Sequences(rows, rows, "rows"), global_batch=1, vocab_size=5, num_ahead=0))


def test_a_few_files_are_split_by_their_bytes(tmp_path):
    line = "a line of text that is not short\n"
    (tmp_path / "large.txt").write_text(line * 6000)
    (tmp_path / "small.txt").write_text(line * 300)
    text = TextSource((str(tmp_path / "*.txt"),)).open(16).text
    share = len(text.validation) / (len(text.train) + len(text.validation))
    assert share == pytest.approx(0.1, abs=0.001)
    assert bytes(text.train).endswith(b"short\n\0")
    assert b"parts of files" in text.description.encode()
    assert "note" not in text.description
    both = bytes(text.train).count(b"line") + bytes(text.validation).count(b"line")
    assert both == 6300
    one = TextSource((str(tmp_path / "small.txt"),), (str(tmp_path / "large.txt"),)).open(16)
    assert one.description.endswith("note that only 5% of the bytes are for training")


def test_a_file_without_lines_is_cut_between_letters(tmp_path):
    (tmp_path / "a.txt").write_text("äöü" * 1000)
    text = TextSource((str(tmp_path / "a.txt"),)).open(16).text
    parts = [bytes(side).decode().rstrip("\0") for side in (text.train, text.validation)]
    assert "".join(parts) == "äöü" * 1000
    assert len(parts[1]) == pytest.approx(300, abs=1)


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3 + 3?"},
    {"role": "assistant", "content": "6, é."},
]


def learned(batch):
    """Returns the texts of each document's target bytes, turn by turn."""
    found = []
    for tokens, segments, mask in zip(
        *(batch[k] for k in ("tokens", "segments", "mask")), strict=True
    ):
        for number in range(1, segments.max() + 1):
            own, is_learned = tokens[segments == number], mask[segments == number] != 0
            turns = np.split(own, 1 + np.flatnonzero(np.diff(is_learned)))
            found.append([bytes(t.tolist()).decode() for t in turns[int(not is_learned[0]) :: 2]])
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_every_answer_of_a_chat_is_learned_and_nothing_else(tmp_path, packed):
    path = lines(tmp_path / "a.jsonl", [{"messages": TALK}, {"messages": TALK[1:4]}] * 6)
    source = JsonlSource((path,), messages="messages", packed=packed, validation_fraction=0.5)
    batch = everything(source.open(200))
    wanted = {("4\n", "6, é.\n\0"), ("4\n",)}
    assert {tuple(turns) for turns in learned(batch)} == wanted
    first = next(row for row in documents(batch) if row.startswith("System"))
    assert first == (
        "System: Be brief.\nUser: 2 + 2?\nAssistant: 4\nUser: 3 + 3?\nAssistant: 6, é.\n\0"
    )
    assert source.arrays == ("tokens", "segments", "mask")
    assert "chats as plain" in source.open(200).description


@pytest.mark.parametrize(
    ("template", "end"), [("chatml", "<|im_end|>\n"), ("llama3", "<|eot_id|>")]
)
def test_the_end_of_an_answer_is_learned_in_any_template(tmp_path, template, end):
    path = lines(tmp_path / "a.jsonl", [{"chat": TALK}] * 4)
    source = JsonlSource((path,), messages="chat", template=template, validation_fraction=0.5)
    found = learned(everything(source.open(400)))
    assert found == [[f"4{end}", f"6, é.{end}\0"]] * 2
    other = JsonlSource((path,), messages="chat", validation_fraction=0.5)
    assert source.open(400).identity["contents"] != other.open(400).identity["contents"]


JINJA = (
    "{% for m in messages %}\n<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def snapshot(folder, template):
    """Writes the files of a hub tokenizer in which each character is a word."""
    letters = sorted({*"<>systemuassistantBe brief.2+3?46,é "})
    words = {letter: n for n, letter in enumerate(["[UNK]", "</s>", *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder / "tokenizer.json")


def test_the_template_of_a_tokenizer_is_its_own(tmp_path):
    pytest.importorskip("jinja2")
    path = lines(tmp_path / "a.jsonl", [{"messages": TALK}] * 2)
    fields = {"messages": "messages", "tokenizer": snapshot(tmp_path, JINJA)}
    samples = JsonlSource((path,), validation_fraction=0.5, **fields).open(100)
    assert "chats as tokenizer_config.json" in samples.description
    batch = everything(samples)
    mask = (batch["mask"] != 0) & (batch["segments"] != 0)
    # The end of an answer is a single token, and is learned.
    assert batch["tokens"][mask].tolist().count(1) == 2
    shown = samples.show(batch["tokens"][mask]).replace(" ", "")
    assert shown == "4</s>6,é.</s>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ messages[0]['content'] }}{{ messages[-1]['content'] }}",
            r"a.jsonl:1 has message 2, which the template 'tokenizer_",
        ),
        ("{{ raise_exception('no system') }}", r"a.jsonl:1 has messages that its .*: no system"),
        ("{% if %}", r"chat template in .*tokenizer_config.json' cannot be used"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tmp_path, template, message):
    pytest.importorskip("jinja2")
    path = lines(tmp_path / "a.jsonl", [{"messages": TALK}] * 2)
    fields = {"messages": "messages", "tokenizer": snapshot(tmp_path, template)}
    source = JsonlSource((path,), validation_fraction=0.5, **fields)
    with pytest.raises(ConfigError, match=message):
        source.open(100)


def test_a_prompt_of_messages_is_seen_and_only_its_completion_is_learned(tmp_path):
    """The records that TRL calls conversational, with a prompt and a completion."""
    record = {"prompt": [*TALK[:4]], "completion": TALK[4:]}
    assert {"assistant"} < {message["role"] for message in record["prompt"]}
    path = lines(tmp_path / "a.jsonl", [record] * 2)
    fields = {"template": "chatml", "validation_fraction": 0.5}
    samples = JsonlSource((path,), prompt="prompt", messages="completion", **fields).open(300)
    batch = everything(samples)
    whole = lines(tmp_path / "b.jsonl", [{"messages": TALK}] * 2)
    tokens = everything(JsonlSource((whole,), messages="messages", **fields).open(300))["tokens"]
    np.testing.assert_array_equal(batch["tokens"], tokens)
    mask = (batch["mask"] != 0) & (batch["segments"] != 0)
    assert samples.show(batch["tokens"][mask]).strip("\0") == f"{TALK[4]['content']}<|im_end|>\n"


SPLIT = {"prompt": TALK[:2], "completion": TALK[2:3]}


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        (
            SPLIT,
            {"prompt": "prompt", "response": "completion"},
            r"a.jsonl:1 has a list of \d messages under '(prompt|completion)', which must be a "
            r"text; to learn chats, set data.messages=completion in place of data.response, with "
            r"messages in data.prompt=prompt too$",
        ),
        ({"text": TALK}, {}, r"to learn chats, set data.messages=text in place of data.text$"),
        ({"text": 3}, {}, r"has 3 under 'text', which must be a text; set .* data.text.$"),
        (
            {**SPLIT, "prompt": "hi"},
            {"prompt": "prompt", "messages": "completion"},
            r"a.jsonl:1 has 'hi', which must be a list of messages; write",
        ),
        (
            {**SPLIT, "completion": []},
            {"prompt": "prompt", "messages": "completion"},
            r"a.jsonl:1 has .*of system, user",
        ),
        (
            {"completion": SPLIT["completion"]},
            {"prompt": "prompt", "messages": "completion"},
            r"a.jsonl:1 has no field 'prompt', which must hold a chat; set data.prompt",
        ),
        (
            SPLIT,
            {"prompt": "prompt", "response": "completion", "messages": "completion"},
            r"data.prompt='prompt' and data.messages='completion' both name the field to read",
        ),
    ],
)
def test_lists_of_messages_for_texts_and_texts_for_messages(tmp_path, record, fields, message):
    path = lines(tmp_path / "a.jsonl", [record] * 2)
    with pytest.raises(ConfigError, match=message):
        JsonlSource((path,), validation_fraction=0.5, **fields).open(100)


def test_without_jinja_the_extra_and_the_named_templates_are_told(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    path = lines(tmp_path / "a.jsonl", [{"messages": TALK}] * 2)
    source = JsonlSource((path,), messages="messages", tokenizer=snapshot(tmp_path, JINJA))
    with pytest.raises(ConfigError, match=r"\[tokenizers\]', or set .* plain, chatml"):
        source.open(100)


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        ({"talk": TALK}, {}, r"a.jsonl:2 has no field 'messages', which must hold a chat; set d"),
        ({"messages": "hi"}, {}, r"a.jsonl:2 has 'hi', which must be a list of messages; write"),
        ({"messages": []}, {}, r"a.jsonl:2 has \[\], which must be a list of messages"),
        (
            {"messages": [TALK[1], {"role": "user"}]},
            {},
            r"a.jsonl:2 has .* as message 2, whose role",
        ),
        ({"messages": TALK[:2]}, {}, r"only messages of system, user, and none of an assistant"),
        ({"messages": [{**TALK[2], "role": "bot"}, *TALK]}, {}, r"a.jsonl:2 has the role 'bot', w"),
        (
            {},
            {"template": "chatm"},
            r"template='chatm' is neither a template nor a file; .* chatml",
        ),
        (
            {},
            {"messages": None, "template": "plain"},
            r"data.template='plain' applies to chats only: na",
        ),
        (
            {},
            {"text": "t"},
            r"data.text='t' and data.messages='messages' both name the field to read",
        ),
    ],
)
def test_chats_that_cannot_be(tmp_path, record, fields, message):
    path = lines(tmp_path / "a.jsonl", [{"messages": TALK}, record])
    fields = {"messages": "messages", "validation_fraction": 0.5} | fields
    with pytest.raises(ConfigError, match=message):
        JsonlSource((path,), **fields).open(100)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_compressed_lines_are_those_of_the_plain_file(tmp_path, suffix):
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        compress = zstandard.ZstdCompressor().compress
    else:
        compress = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[suffix]
    path = lines(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(40)])
    packed = tmp_path / f"b.jsonl{suffix}"
    content = pathlib.Path(path).read_bytes()
    # Two concatenated members, as written by `cat a.gz b.gz`.
    packed.write_bytes(compress(content[:100]) + compress(content[100:]))
    both = [JsonlSource((str(name),), validation_fraction=0.5).open(20) for name in (path, packed)]
    first, second = (everything(samples) for samples in both)
    np.testing.assert_array_equal(first["tokens"], second["tokens"])
    packed.write_bytes(compress(content)[:-9])
    with pytest.raises(ConfigError, match=rf"b.jsonl{suffix} cannot be unpacked"):
        JsonlSource((str(packed),), validation_fraction=0.5).open(20)
    packed.write_bytes(compress(b'{"text": "a"}\n\n{"text": null}\n'))
    with pytest.raises(ConfigError, match=rf"b.jsonl{suffix}:3 has null under 'text', which must"):
        JsonlSource((str(packed),), validation_fraction=0.5).open(20)


def test_a_flipped_bit_of_kept_tokens_is_noticed(tmp_path, monkeypatch):
    """In a small file on opening; in a large file when the damaged block is first read."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"number {i} " * 40}) + "\n" for i in range(20)))
    monkeypatch.setattr("axon_dist.data.store._BLOCK", 2**10)
    source = JsonlSource((str(path),))
    rows = everything(source.open(40))["tokens"]
    (kept,) = (tmp_path / ".axon_tokens").glob("*.tokens")
    whole = kept.read_bytes()
    assert len(whole) > 3 * 2**10
    for place in (50, len(whole) // 2, len(whole) - 2):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        kept.write_bytes(flipped)
        np.testing.assert_array_equal(everything(source.open(40))["tokens"], rows)
        assert kept.read_bytes() == whole
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    kept.write_bytes(flipped)
    monkeypatch.setattr("axon_dist.data.store._SAMPLE", 2)
    opened = source.open(40)
    with pytest.raises(ConfigError, match=r"are damaged; remove the file"):
        everything(opened)
