"""Chats: text as written by hub templates, learned tokens, and records that raise."""

import functools
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from axon_dist.core.errors import ConfigError
from axon_dist.data import JsonlSource, ParquetSource, chat_process
from axon_dist.data.chat import (
    MOST_LETTERS,
    Conversation,
    Rendered,
    TemplateProcess,
    ask,
    find_template,
    parse_conversation,
)
from axon_dist.data.tokenizer import load_tokenizer

from .chat_templates import (
    ANSWER,
    ASK,
    CALLING,
    CHATS,
    MORE,
    RESULT,
    SYSTEM,
    TEMPLATES,
    TEMPLATES_OF_RECORDS,
    THINKING,
    TOKENS,
    TOOL,
)

jinja2 = pytest.importorskip("jinja2")
pytest.importorskip("jinja2.sandbox")


def text_of(pieces):
    return "".join(text for text, _ in pieces)


def learned_of(pieces):
    return [text for text, is_learned in pieces if is_learned]


def rendered(name):
    return Rendered(name, TEMPLATES[name], TOKENS)


def parsed(chat):
    return parse_conversation(chat, "messages")


@pytest.mark.parametrize("name", ["plain", "chatml", "llama3"])
def test_a_question_is_the_start_of_what_was_learned(name):
    template = find_template(name, None)
    text, _, ending = ask(template, [SYSTEM, ASK])
    pieces = template.pieces([SYSTEM, ASK, ANSWER])
    assert text == "".join(part for part, is_learned in pieces if not is_learned)
    assert learned_of(pieces) == [ANSWER["content"] + ending]


def test_a_template_of_a_hub_is_asked():
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    text, _, ending = ask(Rendered("a", source, {}), [{"role": "user", "content": "2 + 2?"}])
    assert (text, ending) == ("<|user|>2 + 2?<|end|><|assistant|>", "<|end|>")


def test_json_keeps_the_order_of_keys_and_escapes_nothing():
    pieces = rendered("chatml, calls").pieces(parsed(CHATS["tool call"]))
    assert '{"name": "look_up", "arguments": {"b": "it\'s <b> & 日本", "a": [1, 2.5, null]}}' in (
        text_of(pieces)
    )
    assert json.dumps(TOOL, ensure_ascii=False) in text_of(pieces)


def test_a_template_is_told_that_there_are_no_tools():
    name = "chatml, tools not none"
    assert "You may" not in text_of(rendered(name).pieces([ASK, ANSWER]))
    with_tools = parsed({"messages": [ASK, ANSWER], "tools": [TOOL]})
    assert "You may" in rendered(name).process.write(with_tools).text
    with pytest.raises(ValueError, match="the function 'look_up' of a tool"):
        rendered(name).pieces(with_tools)


def test_the_tags_of_a_template_say_what_is_learned():
    chat = parsed(CHATS["several turns"])
    learned = learned_of(rendered("chatml, generation").pieces(chat))
    assert learned == ["4<|im_end|>", "Tōkyō.\n<|im_end|>"]
    # Without tags, an answer begins after the generation prompt.
    assert learned_of(rendered("chatml").pieces(chat)) == ["4<|im_end|>\n", "Tōkyō.\n<|im_end|>\n"]


@pytest.mark.parametrize("first", [[], [SYSTEM]], ids=["no system", "system"])
def test_an_end_token_that_only_closes_a_text_is_no_part_of_an_earlier_turn(first):
    """Such a template, as that of Phi-3, writes it in place of a generation prompt."""
    template = rendered("bars")
    pieces = template.pieces(parsed({"messages": [*first, ASK, ANSWER, *MORE]}))
    assert learned_of(pieces) == ["4<|end|>\n", "Tōkyō.\n<|end|>\n</s>"]
    assert pieces[2] == ("<|user|>\n And 日本?<|end|>\n<|assistant|>\n", False)
    unlearned = [{**ANSWER, "weight": 0}, *MORE]
    assert learned_of(template.pieces(parsed({"messages": [*first, ASK, *unlearned]}))) == [
        "Tōkyō.\n<|end|>\n</s>"
    ]
    # Another user's turn at the end of the chat is not learned either.
    pieces = template.pieces(parsed({"messages": [*first, ASK, ANSWER, *MORE, ASK]}))
    assert learned_of(pieces) == ["4<|end|>\n", "Tōkyō.\n<|end|>\n"]


CLOSED = {
    # The end of an earlier answer would not be learned.
    "the end of the last turn": "{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}{{ eos_token }}{% else %}<|end|>{% endif %}",
    "the end of the last turn, kept": "{{ m.content }}"
    "{% if loop.last %}{{ eos_token }}{% else %}<|end|>{% endif %}",
    "the end of the last answer": "{{ m.content }}{% if m.role == 'user' %}<|end|>{% else %} (it)"
    "{% if loop.last %}{{ eos_token }}{% else %}<|end|>{% endif %}{% endif %}",
    "more than the end": "{{ m.content }}<|end|>{% if loop.last %}!{{ eos_token }}{% endif %}",
}


@pytest.mark.parametrize("name", CLOSED)
def test_an_end_token_that_may_be_that_of_an_answer_is_not_cut_off(name):
    source = "{% for m in messages %}<|{{ m.role }}|>" + CLOSED[name] + "{% endfor %}"
    source += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    with pytest.raises(ValueError, match=r"message 2, which the template .* writes differently"):
        Rendered("t", source, TOKENS).pieces([ASK, ANSWER, *MORE])


def test_thoughts_that_are_learned_are_not_in_the_prompt():
    prompt, answer, ending = ask(rendered("thinks"), [ASK])
    pieces = rendered("thinks").pieces([ASK, THINKING])
    assert pieces[0] == (prompt, False)
    assert prompt.endswith("<|im_start|>assistant\n")
    assert (answer, ending) == ("<think>\n\n</think>\n\nanswer<|im_end|>\n", "<|im_end|>\n")


def test_options_of_records_are_in_the_prompt_if_they_are_given():
    off = {"enable_thinking": False}
    record = {"messages": [ASK, ANSWER], "chat_template_kwargs": off}
    pieces = rendered("thinks").pieces(parsed(record))
    prompt, answer, _ = ask(rendered("thinks"), [ASK], off)
    assert pieces[0] == (prompt, False)
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    assert answer == "answer<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([SYSTEM, ASK], {}, "messages of the role 'system', which the template"),
        ([ASK], {"enable_thinking": False}, "'enable_thinking' in chat_template_kwargs, which the"),
    ],
)
def test_a_question_that_a_template_drops_in_part_is_refused(messages, options, message):
    source = (
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with pytest.raises(ValueError, match=message):
        ask(Rendered("t", source, TOKENS), messages, options)


def test_tags_within_a_macro_are_refused():
    macro = "{% macro m(x) %}{{ x }}{% generation %}b{% endgeneration %}{% endmacro %}"
    template = Rendered("t", macro + "a{{ m('c') }}", {})
    with pytest.raises(ValueError, match="a generation tag inside a macro"):
        template.pieces([ASK, ANSWER])


@pytest.mark.parametrize("name", ["plain", "chatml", "chatml, generation"])
@pytest.mark.parametrize("field", ["weight", "train"])
def test_a_message_of_weight_zero_is_seen_and_not_learned(name, field):
    template = (
        rendered(name) if name in TEMPLATES and name != "plain" else find_template(name, None)
    )
    messages = [ASK, {**ANSWER, field: 0}, MORE[0], {**MORE[1], field: True}]
    pieces = template.pieces(parsed({"messages": messages}))
    plain = template.pieces(parsed({"messages": [ASK, ANSWER, *MORE]}))
    assert text_of(pieces) == text_of(plain)
    assert learned_of(pieces) == learned_of(plain)[1:]


@pytest.mark.parametrize(
    "turn",
    [
        "{% generation %}{{ '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endgeneration %}",
        "<|im_start|>assistant\n{% generation %}"
        "{{ '<think></think>' + m.content + '<|im_end|>\\n' }}{% endgeneration %}",
    ],
    ids=["header", "thinking"],
)
def test_a_message_of_weight_zero_is_not_learned_if_its_tag_begins_before_the_answer(turn):
    asked = "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
    if turn.startswith("{% generation"):
        asked = asked.replace("<think></think>", "")
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}"
        "{% else %}" + turn + "{% endif %}{% endfor %}" + asked
    )
    messages = [ASK, {**ANSWER, "weight": 0}, *MORE]
    learned = learned_of(Rendered("t", source, {}).pieces(parsed({"messages": messages})))
    assert len(learned) == 1
    assert MORE[1]["content"].strip() in learned[0]


def test_templates_of_a_list_are_chosen_by_whether_there_are_tools(tmp_path):
    texts = {"default": "d{{ messages[0].content }}", "tool_use": "t{{ tools }}"}
    named = [{"name": name, "template": text} for name, text in texts.items()]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": named}))
    template = find_template(str(path), None)
    assert template.tool_source == "t{{ tools }}"
    assert text_of(template.pieces(Conversation([ASK], [False]))) == "d2 + 2?"


NAMED = (
    "{{ bos_token }}{{ image_token }}|"
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
)
MAP = {"bos_token": {"content": "<s>"}, "eos_token": "</e>"}


@pytest.mark.parametrize(
    ("config", "others", "start", "end"),
    [
        # As in transformers 4.57, the map counts only without `added_tokens_decoder`.
        ({"eos_token": "</s>"}, {"special_tokens_map": MAP}, "<s>|", "</e>"),
        (
            {"eos_token": "</s>", "added_tokens_decoder": {}},
            {"special_tokens_map": MAP},
            "|",
            "</s>",
        ),
        (
            {"image_token": "<old>", "extra_special_tokens": {"image_token": {"content": "<img>"}}},
            {},
            "<img>|",
            "",
        ),
        ({"extra_special_tokens": ["<img>"]}, {}, "|", ""),
        ({"eos_token": "</s>"}, {"chat_template": {"chat_template": NAMED}}, "|", "</s>"),
    ],
)
def test_special_tokens_have_the_names_of_transformers(tmp_path, config, others, start, end):
    config = config if "chat_template" in others else {**config, "chat_template": NAMED}
    for name, data in {"tokenizer_config": config, **others}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    template = find_template(None, str(tmp_path / "tokenizer.json"))
    assert text_of(template.pieces([ASK])) == start + ASK["content"] + end


REFUSED = {
    "calls by name": ("chatml", CHATS["tool call"] | {"tools": None}, "tool_calls in message 2"),
    "calls": ("bars", CHATS["tool call"] | {"tools": None}, "tool_calls, which the template"),
    "tools by name": ("llama3", {"messages": [ASK, ANSWER], "tools": [TOOL]}, "tools, which the"),
    "tools": ("bars", {"messages": [ASK, ANSWER], "tools": [TOOL]}, "tools, which the template"),
    "reasoning by name": ("plain", CHATS["thinking"], "reasoning_content in message 2"),
    "reasoning": ("bars", CHATS["thinking"], "reasoning_content, which the template"),
    "reasoning in prose": ("prose", CHATS["thinking"], "reasoning_content, which the template"),
    "tools in prose": ("prose", {"messages": [ASK, ANSWER], "tools": [TOOL]}, "tools, which the"),
    "a role": ("bars", CHATS["developer"], "messages of the role 'developer', which the template"),
    "a role by name": ("chatml", CHATS["developer"], "the role 'developer', which the template"),
    "a result": ("bars", {"messages": [ASK, ANSWER, RESULT]}, "of the role 'tool'"),
    "options": (
        "bars",
        {"messages": [ASK, ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
        "'enable_thinking' in chat_template_kwargs",
    ),
    "no content": (
        "chatml, calls",
        {"messages": [ASK, {**CALLING, "content": None}]},
        "no content in message 2, which the template .* writes as None",
    ),
    "neither": ("chatml", {"messages": [ASK, {**ANSWER, "content": None}]}, "as message 2, whose"),
    "parts": (
        "bars and parts",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]},
        "a list of parts as content of message 1",
    ),
    "a picture": (
        "chatml",
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}, ANSWER]},
        "as a part of message 1, which must be a text",
    ),
    "half a weight": ("chatml", {"messages": [ASK, {**ANSWER, "weight": 0.5}]}, "0.5 as weight of"),
    "a user's": (
        "chatml",
        {"messages": [{**ASK, "train": 1}, ANSWER]},
        "only messages of an assistant",
    ),
    "no weight": ("chatml", {"messages": [ASK, {**ANSWER, "weight": 0}]}, "weights exclude all"),
    "documents by name": (
        "plain",
        {"messages": [ASK, ANSWER], "documents": [{"text": "d"}]},
        "documents, which the template",
    ),
    "documents": ("bars", CHATS["documents"], "documents, which the template"),
    "bad documents": (
        "chatml, documents",
        {"messages": [ASK, ANSWER], "documents": ["d"]},
        "as documents, which must be a list of objects",
    ),
    "functions": (
        "chatml, calls",
        {"messages": [ASK, ANSWER], "functions": [TOOL["function"]]},
        "as functions, which no template reads",
    ),
    "the second call": (
        "first call only",
        {"messages": [ASK, {**CALLING, "tool_calls": CALLING["tool_calls"] * 2}]},
        "the function 'look_up' of a tool or a call, which the template",
    ),
    "images of a message": (
        "bars",
        {"messages": [{**ASK, "images": ["a.png"]}, ANSWER]},
        "images, which the template",
    ),
    "a message too many": (
        "loop controls",
        {"messages": [ASK, ANSWER, *MORE, {"role": "user", "content": "And now?"}, THINKING]},
        "message [56], which the template|reasoning_content, which the template",
    ),
    "the fifth message": (
        "loop controls",
        {"messages": [ASK, ANSWER, *MORE, {"role": "user", "content": "And now?"}]},
        "message 5, which the template",
    ),
    "bad tools": ("chatml", {"messages": [ASK, ANSWER], "tools": "x"}, "'x' as tools, which must"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_a_message_that_a_template_drops_is_refused_by_file_and_line(tmp_path, row):
    name, chat, message = REFUSED[row]
    template = name
    if name in TEMPLATES and name != "chatml":
        (tmp_path / "t.jinja").write_text(TEMPLATES[name])
        template = str(tmp_path / "t.jinja")
    elif name in TEMPLATES_OF_RECORDS:
        (tmp_path / "t.jinja").write_text(TEMPLATES_OF_RECORDS[name])
        template = str(tmp_path / "t.jinja")
    elif name == "bars and parts":
        source = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}\n{% endfor %}"
        (tmp_path / "t.jinja").write_text(source)
        template = str(tmp_path / "t.jinja")
    path = tmp_path / "a.jsonl"
    rows = [{"messages": [ASK, ANSWER]}, chat]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = JsonlSource(
        (str(path),), messages="messages", template=template, validation_fraction=0.5
    )
    with pytest.raises(ConfigError, match=rf"a.jsonl:2 has .*{message}"):
        source.open(200)


def test_a_list_of_text_parts_is_its_text():
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    chat = parsed({"messages": [{"role": "user", "content": parts}, ANSWER]})
    chatml = find_template("chatml", None)
    assert chatml.pieces(chat) == chatml.pieces([ASK, ANSWER])


def test_thoughts_are_learned_where_the_template_writes_them():
    pieces = rendered("thinks").pieces(parsed({"messages": [SYSTEM, ASK, THINKING]}))
    assert learned_of(pieces) == ["<think>\n2 and 3 make 5.\n</think>\n\n5<|im_end|>\n"]


def test_tools_of_a_table_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "t.jinja").write_text(TEMPLATES["chatml, calls"])
    messages = [[ASK, ANSWER]] * 2
    table = {"messages": messages, "tools": [json.dumps([TOOL]), None], "other": [1, 2]}
    parquet.write_table(pyarrow.table(table), str(tmp_path / "a.parquet"))
    source = ParquetSource(
        (str(tmp_path / "a.parquet"),),
        messages="messages",
        template=str(tmp_path / "t.jinja"),
        validation_fraction=0.5,
    )
    samples = source.open(600)
    rows = [samples.take(side, np.array([0])) for side in (samples.sides)]
    texts = [samples.show(row["tokens"][0]) for row in rows]
    with_tools = [json.dumps(TOOL, ensure_ascii=False) in text for text in texts]
    assert sorted(with_tools) == [False, True]


def marked(name):
    """Returns a chat with these fields, in which each text occurs only once."""
    call = {"type": "function", "function": {"name": "m-name", "arguments": {"m-key": "m-value"}}}
    system = {"role": "system", "content": "m-system"}
    ask = {"role": "user", "content": "m-ask"}
    answer = {"role": "assistant", "content": "m-answer"}
    tool = {"type": "function", "function": {"name": "m-tool", "parameters": {}}}
    parts = [{"type": "text", "text": "m-part-1"}, {"type": "text", "text": "m-part-2"}]
    chats = {
        "system": {"messages": [system, ask, answer]},
        "developer": {"messages": [{**system, "role": "developer"}, ask, answer]},
        "calls": {"messages": [ask, {**answer, "tool_calls": [call]}]},
        "two calls": {"messages": [ask, {**answer, "tool_calls": [call, call]}]},
        "calls, null": {"messages": [ask, {**answer, "content": None, "tool_calls": [call]}]},
        "calls, no content": {"messages": [ask, {"role": "assistant", "tool_calls": [call]}]},
        "result": {"messages": [ask, {**answer, "tool_calls": [call]},
                                {"role": "tool", "content": "m-result"}, answer]},
        "tools": {"messages": [ask, answer], "tools": [tool]},
        "reasoning": {"messages": [ask, {**answer, "reasoning_content": "m-reasoning"}]},
        "thinking": {"messages": [ask, {**answer, "thinking": "m-thinking"}]},
        "parts": {"messages": [{"role": "user", "content": parts}, answer]},
        "parts of an answer": {"messages": [ask, {"role": "assistant", "content": parts}]},
        "weight": {"messages": [ask, {**answer, "weight": 0}, {**ask, "content": "m-more"},
                                {**answer, "content": "m-last", "weight": 1}]},
        "documents": {"messages": [ask, answer], "documents": [{"title": "m-t", "text": "m-d"}]},
        "name": {"messages": [{**ask, "name": "m-name-of-user"}, answer]},
        "late system": {"messages": [ask, answer, {**system}, {**ask, "content": "m-more"},
                                     {**answer, "content": "m-last"}]},
        "long": {"messages": [{"role": ("user", "assistant")[n % 2], "content": f"m-{n}."}
                              for n in range(10)]},
    }  # fmt: skip
    return chats[name]


MARKED = (
    *("system", "developer", "calls", "two calls", "calls, null", "calls, no content", "result"),
    *("tools", "reasoning", "thinking", "parts", "parts of an answer", "weight", "documents"),
    *("name", "late system", "long"),
)

NOT_SHOWN = {"m-name-of-user"}
"""The name of a user is not part of the text, because hub templates do not write it."""


def texts_in(x):
    if isinstance(x, str):
        return {x} if x.startswith("m-") else set()
    if isinstance(x, dict):
        return set().union(*map(texts_in, [*x.keys(), *x.values()]))
    return set().union(*map(texts_in, x)) if isinstance(x, list) else set()


@pytest.fixture
def in_this_process(monkeypatch):
    """Renders templates here; other tests start the process that does it."""

    @functools.cache
    def started(process):
        environment = chat_process._environment(jinja2.sandbox)
        return chat_process.Renderer(environment, *process._setup, MOST_LETTERS)

    def answer(process, renderer, question):
        try:
            return renderer.answer(json.loads(json.dumps(question)))
        except Exception as error:  # a template may raise anything
            raise ValueError(str(error)) from error

    monkeypatch.setattr(TemplateProcess, "_started", started)
    monkeypatch.setattr(TemplateProcess, "_answer", answer)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("template", [*TEMPLATES, *TEMPLATES_OF_RECORDS, "plain", "llama3"])
def test_every_text_of_a_record_is_in_the_result_or_the_record_is_refused(template):
    source = {**TEMPLATES, **TEMPLATES_OF_RECORDS}.get(template)
    found = find_template(template, None) if source is None else Rendered(template, source, TOKENS)
    for name in MARKED:
        chat = marked(name)
        try:
            pieces = found.pieces(parsed(chat))
        except ValueError:
            continue
        text = text_of(pieces)
        if template == "replaces":
            text = text.lower()
        missing = {x for x in texts_in(chat) if x not in text} - NOT_SHOWN
        assert not missing, (name, text)
        assert learned_of(pieces) or template == "items", name


TEXTS = [
    "hello world, def f():\n    if  x: é 日本",
    "  two  blanks ",
    "Hello HELLO héllo",
    "ok\n\n",
]


def trained(model, trainer, **parts):
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


MARKS = ["<|im_start|>", "<|im_end|>"]


def byte_level(trim):
    return trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=MARKS,
        ),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
        post_processor=processors.ByteLevel(trim_offsets=trim),
    )


TOKENIZERS = {
    "byte level, trimmed": lambda: byte_level(True),
    "byte level": lambda: byte_level(False),
    "word pieces": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", *MARKS]),
        normalizer=normalizers.BertNormalizer(lowercase=True),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        post_processor=processors.BertProcessing(("[UNK]", 0), ("[UNK]", 0)),
    ),
    "unigram, metaspace": lambda: trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=150, special_tokens=["[UNK]", *MARKS], unk_token="[UNK]"
        ),
        normalizer=normalizers.NFKC(),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
    ),
    "prepended": lambda: trained(
        models.BPE(unk_token="[UNK]"),
        trainers.BpeTrainer(vocab_size=200, special_tokens=["[UNK]", *MARKS]),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
    ),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {}
    for name, make in TOKENIZERS.items():
        path = folder / f"{name}.json"
        make().save(str(path))
        made[name] = load_tokenizer(str(path))
    return made


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    turns=st.lists(
        st.tuples(*[st.text("ab é日\n ,.H", max_size=8).map(lambda x: f"{x}.") for _ in range(2)]),
        min_size=1,
        max_size=3,
    )
)
def test_only_tokens_of_the_assistant_are_learned(loaded, name, turns):
    """The learned tokens decode to the learned text; the others contain none of it."""
    tokenizer = loaded[name]
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    pieces = find_template("chatml", None).pieces(messages)
    ids, is_learned = tokenizer.chat(pieces)
    whole, _ = tokenizer.chat([(text_of(pieces), True)])
    np.testing.assert_array_equal(ids, whole)
    # Each piece ends at a mark or a line's end, so its tokens are those of the piece alone; a
    # normalizer may put a blank in front of a piece, or fold letters.
    turned = np.split(ids, 1 + np.flatnonzero(np.diff(is_learned)))
    answers = [turn for turn, one in zip(turned, _starts(is_learned), strict=True) if one]
    assert len(answers) == len(turns)
    for answer, (_, said) in zip(answers, turns, strict=True):
        shown = tokenizer.decode(answer)
        assert _letters(shown.partition("<|im_end|>")[0]) == _letters(said) or name in UNKNOWN
        assert "user" not in shown


UNKNOWN = {"word pieces", "unigram, metaspace", "prepended"}
"""Tokenizers with unknown or folded letters; even then nothing else is learned."""


def _starts(is_learned):
    edges = [0, *(1 + np.flatnonzero(np.diff(is_learned)))]
    return [bool(is_learned[edge]) for edge in edges]


def _letters(text):
    # A token across the border, such as two line ends, is not learned.
    return text.lstrip(" ▁\n")


def test_the_blanks_of_a_prompt_are_not_learned(loaded):
    """The same for a tokenizer that trims spaces off the offsets of its tokens."""
    for name in ("byte level, trimmed", "byte level"):
        ids, count = loaded[name].answer("if  x:  ", "ok")
        assert loaded[name].decode(ids[count:]) == "ok"
