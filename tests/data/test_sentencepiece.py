"""SentencePiece models as tokenizers: ids, prompts, chats, and invalid files."""

import numpy as np
import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.data import JsonlSource, load_tokenizer
from axon_dist.data.chat import find_template

sentencepiece = pytest.importorskip("sentencepiece")

LINES = ["hello world, how are you", "日本 is nice  and é fine", "the quick brown fox jumps"]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_prefix=str(folder / "t"),
        model_type=request.param,
        vocab_size=310,
        byte_fallback=True,
        hard_vocab_limit=request.param != "unigram",
        control_symbols=["<|im_start|>", "<|im_end|>"],
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return str(folder / "t.model")


def processor(path):
    found = sentencepiece.SentencePieceProcessor()
    found.LoadFromFile(path)
    return found


def test_documents_and_prompts_are_those_of_the_library(path):
    tokenizer = load_tokenizer(path, "</s>")
    theirs = processor(path)
    assert tokenizer.vocab_size == theirs.get_piece_size()
    for text in [*LINES, "", "  two  blanks ", "</s> is text ß"]:
        ids = theirs.encode(text)
        np.testing.assert_array_equal(tokenizer.encode(text.encode()), [*ids, theirs.eos_id()])
        np.testing.assert_array_equal(tokenizer.prompt(text), ids)
        assert tokenizer.decode(np.array(ids, int)) == theirs.decode(ids)
    assert tokenizer.end == theirs.eos_id()
    assert load_tokenizer(path).end is None
    assert load_tokenizer(path).digest != tokenizer.digest


def test_an_id_that_is_no_piece_is_shown_as_one(path):
    tokenizer = load_tokenizer(path)
    ids = np.append(tokenizer.prompt("hello world"), [tokenizer.vocab_size, 10**6]).astype(int)
    assert tokenizer.decode(ids) == "hello world" + 2 * "\N{REPLACEMENT CHARACTER}"


def test_what_is_learned_of_an_answer(path):
    tokenizer = load_tokenizer(path, "</s>")
    ids, count = tokenizer.answer("hello", " world 日本 ß")
    np.testing.assert_array_equal(ids, tokenizer.encode("hello world 日本 ß".encode()))
    assert tokenizer.decode(ids[:count]) == "hello"
    assert tokenizer.decode(ids[count:-1]).strip() == "world 日本 ß"


def test_control_symbols_of_a_chat_are_single_tokens(path):
    tokenizer = load_tokenizer(path)
    theirs = processor(path)
    pieces = find_template("chatml", None).pieces(
        [{"role": "user", "content": "how  are ß"}, {"role": "assistant", "content": "fine é"}]
    )
    ids, is_learned = tokenizer.chat(pieces)
    start, end = map(theirs.piece_to_id, ("<|im_start|>", "<|im_end|>"))
    wanted = [start, *theirs.encode("user\nhow  are ß"), end, *theirs.encode("\n")]
    wanted += [start, *theirs.encode("assistant\nfine é"), end, *theirs.encode("\n")]
    np.testing.assert_array_equal(ids, wanted)
    learned = ids[is_learned]
    assert end in learned
    assert start not in learned
    # `decode` leaves control symbols out, so the end of an answer is found by this text.
    assert tokenizer.special[end] == "<|im_end|>"
    # The first piece may also contain the end of the header, and is then not learned.
    assert tokenizer.decode(learned).strip() in ("fine é", "ine é")


def test_a_source_of_records_takes_it(path, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join('{"text": "the quick fox"}\n' for _ in range(4)))
    files = (str(tmp_path / "a.jsonl"),)
    source = JsonlSource(files, tokenizer=path, end_token="</s>", validation_fraction=0.5)
    samples = source.open(16)
    row = samples.train(np.array([0]))["tokens"][0]
    assert "the quick fox" in samples.show(row)


def test_what_is_no_model_is_refused(path, tmp_path):
    for content in (b"", b"garbage" * 100):
        file = tmp_path / "b.model"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="is not a model that sentencepiece can read"):
            load_tokenizer(str(file))
    with pytest.raises(ConfigError, match=r"is not a file .* SentencePiece \.model"):
        load_tokenizer(str(tmp_path / "none.model"))
    with pytest.raises(ConfigError, match="end_token='<nothing>' is not in the vocabulary"):
        load_tokenizer(path, "<nothing>")
