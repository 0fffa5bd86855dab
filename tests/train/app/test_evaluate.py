"""After training: evaluation and generation give the results of plain JAX, on any mesh."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers

from axon_dist.core.errors import ConfigError
from axon_dist.data import TextLoader, TextSource, load_text
from axon_dist.data.chat import Rendered, ask, find_template
from axon_dist.data.tokenizer import load_tokenizer
from axon_dist.train.app import Completion, evaluate, generate_text, load_model, train
from axon_dist.train.app.evaluate import (
    _chats,
    end_of_answer,
    of_text,
    prompt_of_chat,
    tokens_of_chat,
    world_of,
)
from axon_dist.train.app.run_model import _token_ids, tokenizer_of
from axon_dist.train.app.runs import measured_on
from axon_dist.train.app.steps import build_step
from axon_dist.train.cli import runs
from axon_dist.train.cli.main import main
from axon_dist.train.config import RunConfig
from tests.data.chat_templates import ANSWER, ASK, TEMPLATES, THINKING, TOKENS
from tests.first_state import begun

LENGTH = 16
MADE_UP = "data={{kind: synthetic_images, image_size: 16}}"


def small(folder, **changes):
    """The config of a run on a small text."""
    for name, count in (("train", 40), ("validation", 37)):
        (folder / f"{name}.txt").write_text(f"{name}: the quick brown fox jumps. " * count)
    config = {
        "run_dir": str(folder / "run"),
        "mesh": "dp=1",
        "devices": {"emulate": 1},
        "model": {
            "width": 16, "num_layers": 2, "num_heads": 2, "ffn_width": 16, "max_length": LENGTH,
        },
        "data": {
            "files": [str(folder / "train.txt")],
            "validation_files": [str(folder / "validation.txt")],
            "sequence_length": LENGTH,
        },
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "train": {"steps": 4, "global_batch": 8, "eval_every": 2, "eval_batches": 1},
        "checkpoint": {"every": 2},
    }  # fmt: skip
    for section, keys in changes.items():
        config[section] = {**config.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return RunConfig.from_dict(config)


def trained(folder, **changes):
    """A run on a small text."""
    return train(small(folder, **changes)).directory.path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four steps in a pipeline, with dropout, which must be off in evaluation."""
    pipeline = {"ddp": {}, "pipeline": {"num_microbatches": 2}}
    folder = tmp_path_factory.mktemp("eval")
    return trained(folder, mesh="pp=2,dp=4", devices={"emulate": 8}, parallel=pipeline,
                   model={"dropout": 0.2})  # fmt: skip


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """A run on one device with a checkpoint of its first state, for error cases."""
    changes = {"model": {"num_layers": 1, "gated": False}, "optimizer": {"name": "sgd"}}
    config = small(tmp_path_factory.mktemp("plain"), **changes)
    return begun(config)


def greedy(run, prompt, num_tokens):
    """Returns the likeliest bytes after a prompt, one by one, on one device."""
    model, _ = load_model(run)
    model.eval()
    tokens = list(prompt.encode())
    for _ in range(num_tokens):
        filled = jnp.array([tokens + [0] * (LENGTH - len(tokens))])
        tokens.append(int(model(filled)[0, len(tokens) - 1].argmax()))
    return bytes(tokens[len(prompt) :]).decode(errors="replace")


def plainly(run, step=None):
    """Computes loss and accuracy over all validation windows at once, on one device."""
    model, config = load_model(run, step)
    model.eval()
    data = config.data
    source = TextSource(files=data.files, validation_files=data.validation_files)
    stream = load_text(source).validation.astype(np.int32)
    count = (len(stream) - 1) // LENGTH
    assert count % 8, "a last batch that is not full"
    starts = np.linspace(0, len(stream) - LENGTH - 1, count).astype(int)
    windows = jnp.stack([stream[start : start + LENGTH + 1] for start in starts])
    logits = jax.jit(lambda tokens: model(tokens))(windows[:, :-1])
    log_probs = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(log_probs, windows[:, 1:, None], -1)
    return count, float(losses.mean()), float((logits.argmax(-1) == windows[:, 1:]).mean())


@pytest.mark.full
@pytest.mark.sample("another mesh")
@pytest.mark.parametrize(
    "where",
    [
        {},
        {"one_device": True},
        {"overrides": ("mesh=fsdp=4,tp=2", "parallel=[full_shard, tensor]")},
    ],
    ids=["its own mesh", "one device", "another mesh"],
)
def test_evaluation_is_plain_jax(run, where):
    count, loss, accuracy = plainly(run)
    found = evaluate(run, **where)
    assert (found.num_samples, found.step, found.unit) == (count, 4, "nats/byte")
    np.testing.assert_allclose(found.metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(found.metrics["accuracy"], accuracy, rtol=1e-5)
    np.testing.assert_allclose(found.metrics["perplexity"], np.exp(loss), rtol=1e-5)
    np.testing.assert_allclose(found.metrics["bits_per_byte"], loss / np.log(2), rtol=1e-5)


@pytest.mark.full
def test_the_command_prints_and_writes_the_same(run, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("validation: the quick brown fox jumps. " * 9)
    json_file = tmp_path / "found.json"
    arguments = ["eval", str(run), "train.global_batch=4", "--step", "2", "--one-device"]
    assert main([*arguments, "--batches", "1", "--json", str(json_file)]) == 0
    printed, written = capsys.readouterr().out, json.loads(json_file.read_text())
    assert written["step"] == 2
    assert written["num_samples"] == 4
    for name, value in written["metrics"].items():
        assert name.replace("_", " ") in printed
        assert f"{value:.4f}" in printed
    assert main([*arguments, "--data", str(tmp_path / "other.txt")]) == 0
    assert "1 file of 0.00 MB for validation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no run in 'nowhere', because it has no config.yaml; name a folder"),
        (["{run}", "--step", "7"], "got step 7, but the checkpoints in '{run}/checkpoints' have"),
        (["{run}", "mesh=dp=3"], "mesh dp=3 needs 3 devices and got 1"),
        (["{run}", "--data", "none.txt"], "data.files: 'none.txt' matches no file"),
    ],
)
def test_mistakes_are_one_line(plain_run, capsys, arguments, message):
    assert main(["eval", *(word.format(run=plain_run) for word in arguments)]) == 2
    assert message.format(run=plain_run) in capsys.readouterr().err


def test_one_device_has_none_of_the_axes_that_a_config_names(tiny):
    tiny |= {"mesh": "dp=4,tp=2", "axis_names": {"heads": "tp", "rows": ["dp", "tp"]}}
    config, world = world_of(RunConfig.from_dict(tiny), one_device=True)
    step = build_step(config, world, optax.identity(), trains=False)
    assert world.size == 1
    assert [step.axis_names.meant(name) for name in ("heads", "rows")] == [(), ()]


def test_images_that_are_made_up_are_in_no_files(plain_run):
    made_up = ("model={kind: vit, preset: tiny}", MADE_UP.replace("{{", "{").replace("}}", "}"))
    with pytest.raises(ConfigError, match=r"got files a.npz for a run whose data are not read"):
        evaluate(plain_run, overrides=made_up, files=["a.npz"])


MESHES = [(), ("mesh=fsdp=4,tp=2", "parallel=[full_shard, tensor]")]


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [MESHES[0], pytest.param(MESHES[1], marks=pytest.mark.full)],
    ids=["its own mesh", "another mesh"],
)
def test_texts_are_those_of_one_device(run, overrides):
    prompts = ["the quick", "fox"]
    found = generate_text(run, prompts, 5, temperature=0, stops=False, overrides=overrides)
    assert [done.text for done in found] == [greedy(run, prompt, 5) for prompt in prompts]
    drawn = generate_text(run, prompts, 5, seed=3, top_p=0.9, overrides=overrides)
    assert drawn == generate_text(run, prompts, 5, seed=3, top_p=0.9, one_device=True)


@pytest.mark.full
def test_a_text_has_no_token_of_a_padded_vocabulary(tmp_path, monkeypatch):
    run = trained(
        tmp_path,
        model={"vocab_size": 1024, "num_layers": 1},
        train={"steps": 1, "eval_every": 0},
    )
    module = sys.modules[generate_text.__module__]
    monkeypatch.setattr(module, "_completion", lambda *row: row[3])
    [drawn] = generate_text(run, ["fox"], 12, temperature=100.0, stops=False)
    assert len(drawn) == 12
    assert max(drawn) < 256


@pytest.mark.full
def test_the_command_goes_on_with_prompts(run, tmp_path, capsys):
    arguments = ["generate", str(run), "--prompt", "the quick", "--prompt", "\x1bfox", "--tokens"]
    file = tmp_path / "texts.json"
    options = ["--one-device", "--past-end", "--seed", "1", "--top-k", "9", "--json", str(file)]
    assert main([*arguments, "6", *options]) == 0
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    assert [text["num_tokens"] for text in written] == [6, 6]
    assert "the quick" in printed
    assert "fox" in printed
    assert "\x1b" not in printed
    want = generate_text(
        run, ["the quick", "\x1bfox"], 6, top_k=9, seed=1, stops=False, one_device=True
    )
    assert [text["text"] for text in written] == [done.text for done in want]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--prompt", "a"], "there is no run in 'nowhere'"),
        (["{run}", "--prompt", ""], "prompt 0 is empty; it needs at least one token"),
        (["{run}", "--prompt", "a" * 9], "a prompt of 9 tokens plus 8 new tokens exceeds"),
        (["{run}", "--prompt", "a", "--temperature", "-1"], "temperature=-1.0 must be 0 or in ["),
        (["{run}", "--prompt", "a", "--system", "b"], "got a system message without chat; add --"),
        (
            ["{run}", "--prompt", "a", "--template-options", '{{"thinks": false}}'],
            "got template options {'thinks': False} without chat; add --chat",
        ),
        (["{run}", "--prompt", "a", "data.tokenizer=no.json"], "data.tokenizer='no.json' is not"),
        (
            ["{run}", "--prompt", "a", "model={{kind: vit, preset: tiny}}", MADE_UP],
            "is trained on images, but generation needs a text model; name another",
        ),
    ],
)  # fmt: skip
def test_mistakes_in_generating_are_one_line(plain_run, capsys, arguments, message):
    words = [word.format(run=plain_run) for word in arguments]
    assert main(["generate", *words, "--tokens", "8", "--one-device"]) == 2
    assert message in capsys.readouterr().err


def test_template_options_are_a_json_object(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "run", "--prompt", "a", "--template-options", "[1]"])
    assert "'[1]' is not a JSON object; write one such as" in capsys.readouterr().err


def test_a_completion_without_a_letter_is_said(monkeypatch, capsys):
    found = [Completion("hi", "", 1, True), Completion("so", " \n", 3, False)]
    monkeypatch.setattr(runs, "generate_text", lambda **_: [*found, Completion("a", "b", 1, True)])
    assert main(["generate", "run", "--prompt", "hi"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "axon: after 'hi' the model ends the text at once; --past-end continues past that",
        "axon: after 'so' the model adds 3 tokens without visible characters, such as spaces",
    ]


@pytest.mark.full
def test_only_the_loss_of_the_task_has_a_perplexity(tmp_path):
    own = {"function": "axon_dist.models:next_token_loss"}
    run = trained(tmp_path, loss=own, model={"num_layers": 1}, train={"steps": 1, "eval_every": 0})
    found = evaluate(run, trust=True)
    assert (found.unit, {*found.metrics}) == ("", {"loss", "accuracy"})


def test_bits_per_byte_count_the_bytes_behind_tokens(tmp_path):
    words = {"[UNK]": 0, "quick": 1, "fox": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "train.txt").write_text("quick fox")
    (tmp_path / "held.txt").write_text("fox quick fox ")
    files = (str(tmp_path / "train.txt"),), (str(tmp_path / "held.txt"),)
    text = load_text(TextSource(*files, tokenizer=str(tmp_path / "words.json")))
    found = of_text(2.0, TextLoader(text, length=1, global_batch=1))
    assert found["bits_per_byte"] == pytest.approx(2.0 / np.log(2) * 3 / 14)


@pytest.mark.parametrize("end_token", [None, "[END]"])
def test_a_question_is_encoded_without_the_end_of_the_document(tmp_path, end_token):
    """Training appends `end_token` to a chat, and nothing of the tokenizer's post-processor."""
    words = {"[UNK]": 0, "[SEP]": 1, "[END]": 2, "hi": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "$A [SEP]", special_tokens=[("[SEP]", 1)]
    )
    tokenizer.save(str(tmp_path / "words.json"))
    loaded = load_tokenizer(str(tmp_path / "words.json"), end_token)
    for text, ids in {"hi hi": [3, 3], "hi [SEP]": [3, 1], "hi [END]": [3, 2]}.items():
        assert tokens_of_chat(loaded, text).tolist() == ids


SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>"]


@pytest.fixture(scope="module", params=["byte level", "prepended"])
def words(request, tmp_path_factory):
    """A tokenizer in the style of GPT-2 or Llama, in which a blank is part of the next word."""
    normalizers, pre_tokenizers = tokenizers.normalizers, tokenizers.pre_tokenizers
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if request.param == "byte level":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
    else:
        alphabet = [chr(code) for code in (10, *range(32, 127))]
        blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(blanks)
        made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        made.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["User: what is it\nAssistant: answer me. four five\n"] * 9, trainer)
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    made.save(str(path))
    return load_tokenizer(str(path))


SEVERAL = [[], [ASK, ANSWER]]


@pytest.mark.parametrize(
    ("name", "earlier", "answer"),
    [
        ("chatml", SEVERAL, ANSWER),
        ("chatml, default system", SEVERAL, ANSWER),
        ("chatml, generation", SEVERAL, ANSWER),
        ("generation, trimmed", SEVERAL, ANSWER),
        ("headers", SEVERAL, ANSWER),
        ("instructions", SEVERAL, ANSWER),
        ("alternating", SEVERAL, ANSWER),
        ("bars", SEVERAL, ANSWER),
        ("thinks", [[]], ANSWER),
        ("thinks", [[]], THINKING),
    ],
)
def test_a_prompt_is_the_tokens_before_the_learned_ones_in_training(words, name, earlier, answer):
    template = Rendered(name, TEMPLATES[name], TOKENS)
    for before in earlier:
        ids, is_learned = words.chat(template.pieces([*before, ASK, answer]))
        last = np.flatnonzero(is_learned & ~np.roll(is_learned, 1))[-1]
        text, made_up, _ = ask(template, [*before, ASK])
        assert words.decode(ids[last:]).strip()
        assert prompt_of_chat(words, text, made_up).tolist() == ids[:last].tolist()


@pytest.mark.parametrize(("name", "end"), [("plain", "Assistant: "), ("macro", "[assistant] ")])
def test_a_blank_before_an_answer_is_left_to_the_model(words, name, end):
    """In training it is one token with the first word of an answer."""
    source = TEMPLATES.get(name)
    template = find_template(name, None) if source is None else Rendered(name, source, TOKENS)
    ids, _ = words.chat(template.pieces([ASK, {"role": "assistant", "content": "four"}]))
    text, made_up, _ = ask(template, [ASK])
    assert text.endswith(end)
    prompt = prompt_of_chat(words, text, made_up).tolist()
    assert prompt == ids[: len(prompt)].tolist()
    assert words.decode(np.array(prompt)).endswith(end.strip())
    assert words.decode(ids[len(prompt) :]).lstrip().startswith("four")


@pytest.mark.parametrize(
    ("ending", "end"),
    [
        ("<|end|>\n</s>", "<|end|>"),
        (" </s>", "</s>"),
        ("\n\n<|im_end|>\n", "<|im_end|>"),
        ("<|end|>", "<|end|>"),
        # An answer may contain the word before the token.
        (" end<|end|>", None),
        ("é</s>", None),
        ("\n", None),
    ],
)
def test_an_answer_ends_with_the_first_special_token_of_its_ending(words, ending, end):
    ids = {text: token for token, text in words.special.items()}
    assert end_of_answer(words, ending) == (end and ids[end])


def mixture_of(folder, *sources, weights=None):
    """A config of a mixture whose sources have one tokenizer."""
    words = ["[UNK]", "[END]", "[STOP]", "<|im_start|>", "<|im_end|>", "user", "assistant", "hi"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(words[1:5])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "words.json"))
    common = {"kind": "jsonl", "files": ["a"], "tokenizer": str(folder / "words.json")}
    data = {"kind": "mixture", "sources": [common | source for source in sources]}
    return RunConfig.from_dict({"data": data | {"weights": weights or [1] * len(sources)}})


TEXTS = {"kind": "text"}
ENDED = {"end_token": "[END]"}
STOPPED = {"kind": "tokens", "document_end": 2}


@pytest.mark.parametrize(
    ("sources", "weights", "end", "is_told"),
    [
        ([TEXTS, ENDED], [9, 1], 1, False),
        ([STOPPED, TEXTS], [1, 1], 2, False),
        ([ENDED, ENDED], [1, 1], 1, False),
        ([{"end_token": "[STOP]"}, STOPPED], [1, 1], 2, False),
        ([ENDED, STOPPED], [1, 3], 2, True),
        ([ENDED, STOPPED], [2, 2], 1, True),
        ([TEXTS, TEXTS], [1, 1], None, False),
    ],
)
def test_texts_of_a_mixture_end_as_those_of_its_sources(tmp_path, sources, weights, end, is_told):
    told = []
    config = mixture_of(tmp_path, *sources, weights=weights)
    assert tokenizer_of(tmp_path, config, tell=told.append).end == end
    assert _token_ids(tmp_path, config, told.append) == {"eos_token_id": end}
    assert len(told) == 2 * is_told
    named = {1: r"'\[END\]', which ends a text .* '\[STOP\]'", 2: r"'\[STOP\]', .* '\[END\]'"}
    assert all(re.search(named[end], line) for line in told)


def test_users_are_answered_as_in_the_first_source_with_chats(tmp_path):
    chats = {"messages": "messages", "template": "chatml", "end_token": "[STOP]"}
    plain = chats | {"template": "plain"}
    for more, is_told in (((), False), ((chats,), False), ((plain,), True)):
        told = []
        config = mixture_of(tmp_path, ENDED, chats, *more)
        tokenizer = tokenizer_of(tmp_path, config, chat=True, tell=told.append)
        assert tokenizer.added == (2,)
        (ids,), end = _chats(tmp_path, config, tokenizer, ["hi"], None)
        assert (ids[0], end) == (3, 4)
        assert [r"these are used: data.sources[1], the first" in line for line in told] == (
            [True] * is_told
        )
    without = mixture_of(tmp_path, ENDED, TEXTS)
    tokenizer = tokenizer_of(tmp_path, without, chat=True)
    with pytest.raises(ConfigError, match=r"was not trained on chats: its data has no data.messag"):
        _chats(tmp_path, without, tokenizer, ["hi"], None)


def test_a_mixture_has_no_one_way_to_read_other_files(tmp_path):
    config = mixture_of(tmp_path, ENDED, TEXTS)
    with pytest.raises(ConfigError, match=r"got files b for a run whose data are a mixture of 2 s"):
        measured_on(config, ["b"])


@pytest.mark.full
def test_a_user_is_answered_as_in_training(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in [{"messages": turns}] * 64))
    plain = {
        "model": {
            "kind": "transformer",
            "preset": "quickstart",
            "num_layers": 1,
            "width": 32,
            "num_heads": 2,
            "num_kv_heads": 2,
        },
        "devices": {"emulate": 8},
        "data": {
            "kind": "jsonl",
            "files": [str(file)],
            "messages": "messages",
            "template": "llama3",
            "sequence_length": 128,
        },
        "optimizer": {"name": "adamw", "learning_rate": 0.02, "weight_decay": 0.0},
        "train": {"steps": 60, "global_batch": 8, "eval_every": 0},
        "run_dir": str(tmp_path / "run"),
    }
    train(RunConfig.from_dict(plain))
    (answer,) = generate_text(tmp_path / "run", ["a"], 11, temperature=0, chat=True)
    assert answer.text.startswith("b<|eot_id|>")
    with pytest.raises(ConfigError, match="got a system message without chat"):
        generate_text(tmp_path / "run", ["a"], 2, system="b")
