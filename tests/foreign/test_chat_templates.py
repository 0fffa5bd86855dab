"""Templates of a hub write what `apply_chat_template` of transformers writes, to the byte."""

import pytest

from axon_dist.data.chat import Conversation, Rendered
from tests.data.chat_templates import CHATS, TEMPLATES, TEMPLATES_OF_RECORDS, TOKENS

utils = pytest.importorskip("transformers.utils.chat_template_utils")


def theirs(template, chat, mask=False):
    """The text of transformers, and the parts that it marks; None where it refuses."""
    options = {"tools": chat.get("tools"), "documents": chat.get("documents")}
    try:
        texts, spans = utils.render_jinja_template(
            [chat["messages"]],
            chat_template=template,
            return_assistant_tokens_mask=mask,
            **options,
            **TOKENS,
        )
    except Exception:
        return None
    return texts[0], [tuple(span) for span in spans[0]] if mask else []


ALL = {**TEMPLATES, **TEMPLATES_OF_RECORDS}


@pytest.mark.parametrize("name", ALL)
def test_texts_and_masks_are_those_of_transformers(name):
    template = Rendered(name, ALL[name], TOKENS)
    for kind, chat in CHATS.items():
        wanted = theirs(ALL[name], chat, mask="generation %}" in ALL[name])
        conversation = Conversation(**{"learned": [False] * len(chat["messages"]), **chat})
        try:
            written = template.process.write(conversation)
        except ValueError:
            assert wanted is None, kind
            continue
        assert (written.text, list(written.spans)) == wanted, kind
