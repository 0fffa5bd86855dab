import numpy as np
import pytest
import tokenizers

from axon_dist.core.errors import ConfigError
from axon_dist.data import TextLoader, TextSource, byte_tokenizer, load_text, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(f"this is {name} " * 3)
    return tmp_path


@pytest.fixture
def tokenizer_file(tmp_path):
    words = {"[UNK]": 0, "this": 1, "is": 2, "a": 3, "far": 700}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "words.json"
    tokenizer.save(str(path))
    return str(path)


def source(folder, **fields):
    return TextSource(files=(str(folder / "*.txt"),), validation_fraction=0.3, **fields)


def documents(stream):
    return {part.decode() for part in bytes(stream).split(b"\0") if part}


def test_bytes_are_all_there_and_each_document_on_one_side(folder):
    text = load_text(source(folder))
    train, validation = documents(text.train), documents(text.validation)
    assert train
    assert validation
    assert not train & validation
    assert train | validation == {f"this is {name} " * 3 for name in "abcdefgh"}
    assert text.vocab_size == 256
    assert text.train.dtype == np.uint8
    assert len(text.train) == sum(len(document) + 1 for document in train)
    assert str(folder) in text.description
    assert "as bytes" in text.description


def test_loading_twice_gives_the_same(folder):
    first, second = (load_text(source(folder)) for _ in range(2))
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.validation, second.validation)


def test_without_files_it_is_the_standard_library_and_says_so():
    text = load_text(TextSource(max_bytes=300_000))
    assert "standard library" in text.description
    assert 10_000 < len(text.train) < 310_000
    assert b"import" in bytes(text.validation)


def test_named_validation_files_are_used_whole(folder):
    text = load_text(
        TextSource(files=(str(folder / "[ab].txt"),), validation_files=(str(folder / "h.txt"),))
    )
    assert documents(text.train) == {"this is a " * 3, "this is b " * 3}
    assert documents(text.validation) == {"this is h " * 3}


def test_max_bytes_keeps_whole_files(folder):
    everything = load_text(source(folder))
    text = load_text(source(folder, max_bytes=70))
    assert len(text.train) == 62
    assert documents(text.train) < documents(everything.train)


def test_tokens_by_a_tokenizers_file(folder, tokenizer_file):
    text = load_text(source(folder, tokenizer=tokenizer_file))
    assert text.vocab_size == 701
    assert text.train.dtype == np.uint16
    both = [side[np.arange(len(side))].tolist() for side in (text.train, text.validation)]
    assert sum(tokens.count(3) for tokens in both) == 3
    assert both[0][:2] == [1, 2]
    assert "tokens of words.json" in text.description


def test_prompts_have_no_end_and_tokens_are_text_again(tokenizer_file):
    by_bytes, by_words = byte_tokenizer(), load_tokenizer(tokenizer_file)
    assert by_bytes.prompt("aé").tolist() == [97, 195, 169]
    assert by_bytes.decode(np.array([97, 195, 169, 195])) == "aé\N{REPLACEMENT CHARACTER}"
    assert (by_bytes.end, by_words.end) == (0, None)
    assert by_words.decode(by_words.prompt("this is far")) == "this is far"
    ended = tokenizers.Tokenizer.from_file(tokenizer_file)
    ended.post_processor = tokenizers.processors.TemplateProcessing(
        single="a $A far", special_tokens=[("a", 3), ("far", 700)]
    )
    ended.save(tokenizer_file)
    by_words = load_tokenizer(tokenizer_file)
    assert by_words.encode(b"this is").tolist() == [3, 1, 2, 700]
    assert (by_words.prompt("this is").tolist(), by_words.end) == ([3, 1, 2], 700)


def test_an_id_that_is_no_token_is_shown_as_one(tokenizer_file):
    """A model with a padded vocabulary has such ids; 353 is 97, the letter a, modulo 256."""
    unknown = "\N{REPLACEMENT CHARACTER}"
    decode = byte_tokenizer().decode
    assert decode(np.array([353, 353, 97])) == 2 * unknown + "a"
    assert decode(np.array([97, 1000, 195, 169, -1])) == f"a{unknown}é{unknown}"
    decode = load_tokenizer(tokenizer_file).decode
    assert decode(np.array([1, 2, 10**6])) == f"this is{unknown}"
    # The vocabulary has holes.
    assert decode(np.array([600, 1, 2])) == f"{unknown}this is"


def test_special_tokens_around_a_text_without_tokens_are_told_apart(tmp_path):
    words = {"[PAD]": 0, "[UNK]": 1, "<s>": 2, "</s>": 3, "\u0301": 4, "hello": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    # Removes the shortest token of the vocabulary.
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    for form, end in (("<s> $A", None), ("<s> $A </s>", 3), ("$A </s>", 3), ("$A", None)):
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=form, special_tokens=[("<s>", 2), ("</s>", 3)]
        )
        tokenizer.save(str(tmp_path / "t.json"))
        loaded = load_tokenizer(str(tmp_path / "t.json"))
        begin = [2] if form.startswith("<s>") else []
        assert loaded.end == end
        assert loaded.prompt("").tolist() == begin
        assert loaded.prompt("hello").tolist() == [*begin, 5]
        ids, num_prompt = loaded.answer("hello", "")
        assert ids[:num_prompt].tolist() == [*begin, 5]


def test_byte_tokens_end_a_document_with_zero():
    assert byte_tokenizer().encode(b"\xffa").tolist() == [255, 97, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"validation_fraction": 0.0}, r"validation_fraction=0.0 must be between 0 and 1"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1.0 must be between 0 and 1"),
        ({"max_bytes": 0}, r"max_bytes=0 must be at least 1; leave it out"),
        ({"files": "a.txt"}, r"data.files='a.txt' is a string: write a list"),
        (
            {"files": ("a",), "validation_files": ("b",), "validation_fraction": 0.2},
            r"validation_fraction=0.2 and data.validation_files=\('b',\) both define",
        ),
        ({"validation_files": ("x",)}, r"validation_files=\('x',\) without data.files: name"),
    ],
)
def test_validate_names_value_and_remedy(fields, message):
    with pytest.raises(ConfigError, match=message):
        load_text(TextSource(**fields))


def test_an_empty_side_is_refused(folder):
    one = (str(folder / "a.txt"),)
    with pytest.raises(ConfigError, match=r"0.001 of 1 files .* validation.*validation_files"):
        load_text(TextSource(files=one, validation_fraction=0.001))
    with pytest.raises(ConfigError, match=r"0.999 of 1 files .* training.*give more text"):
        load_text(TextSource(files=one, validation_fraction=0.999))


def test_a_file_on_both_sides_is_refused(folder):
    overlapping = TextSource(
        files=(str(folder / "*.txt"),), validation_files=(str(folder / "a.txt"),)
    )
    with pytest.raises(ConfigError, match=r"1 files are in .*a\.txt.*remove the files from one"):
        load_text(overlapping)


def test_max_bytes_below_the_first_file_is_refused(folder):
    with pytest.raises(ConfigError, match=r"max_bytes=5 is less than .*\.txt of 30 bytes: raise"):
        load_text(source(folder, max_bytes=5))


def test_a_tokenizer_needs_utf8(folder, tokenizer_file):
    (folder / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(ConfigError, match=r"a\.txt is not UTF-8 \(byte 3\): convert it"):
        load_text(source(folder, tokenizer=tokenizer_file))


def test_a_missing_or_broken_tokenizer_is_refused(folder):
    with pytest.raises(ConfigError, match=r"'none.json' is not a file .*give the path"):
        load_tokenizer("none.json")
    with pytest.raises(ConfigError, match=r"a\.txt' is not a tokenizer.json .*Tokenizer.save"):
        load_tokenizer(str(folder / "a.txt"))


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.*\[tokenizers\]'"):
        load_tokenizer("words.json")


def test_a_state_names_the_tokenizer_that_changed(folder, tokenizer_file):
    """The same if the files differ, or the tokens of a different tokenizer."""

    def loader():
        text = load_text(source(folder, tokenizer=tokenizer_file))
        return TextLoader(text, length=2, global_batch=2)

    state = loader().state()
    loader().restore(state)
    (folder / "a.txt").write_text("this is a is this" * 2)
    with pytest.raises(ConfigError, match=r"taken with contents=.* the files have changed"):
        loader().restore(state)
    path = folder / "words.json"
    path.write_text(path.read_text().replace('"far"', '"fair"'))
    with pytest.raises(ConfigError, match=r"taken with tokenizer=.* data.tokenizer or data.end_to"):
        loader().restore(state)
    # A state of an older version does not contain the tokenizer.
    old = {name: value for name, value in state.items() if name != "tokenizer"}
    with pytest.raises(ConfigError, match="taken with contents="):
        loader().restore(old)
