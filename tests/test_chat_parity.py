"""Chats against `apply_chat_template` of transformers, where that is installed."""

import itertools

import chat_templates
import pytest

from rl_adapter.hub import chat
from rl_adapter.hub.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers", reason="needs transformers, which rl-adapter does not depend on")

USER, NEXT = {"role": "user", "content": " two and\ntwo? é<b> "}, {"role": "user", "content": "think again"}
SYSTEM = {"role": "system", "content": "answer"}
SAID = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfour"}
REASONED = {"role": "assistant", "content": "four", "reasoning_content": "hm"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": "<é>"}}}]}
TOOL = {"role": "tool", "content": "four", "name": "add"}
CHATS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "two": [SYSTEM, USER, SAID, NEXT],
    "reasoned": [USER, REASONED, NEXT, REASONED],
    "tool": [USER, CALLED, TOOL],
    "none": [USER, CALLED | {"reasoning": "hm", "thinking": None}, TOOL, SAID, NEXT],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "<é>"}}}]


@pytest.fixture(scope="module", params=sorted(chat_templates.STYLES))
def pair(request, tmp_path_factory):
    """(ours, theirs) from one directory that transformers wrote."""
    directory, style = tmp_path_factory.mktemp(request.param), request.param
    template, _, stops = chat_templates.STYLES[style]
    special = {"bos_token": chat_templates.BOS.get(style), "eos_token": stops[0]}
    backend = chat_templates.backend(style)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)
    theirs.save_pretrained(directory)
    transformers.GenerationConfig(eos_token_id=[backend.token_to_id(s) for s in stops]).save_pretrained(directory)
    transformers.LlamaConfig().save_pretrained(directory)
    return load_tokenizer(directory, 400), transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(("name", "go", "tools"), list(itertools.product(CHATS, (False, True), (None, TOOLS))))
def test_same_text_and_tokens(pair, name, go, tools):
    ours, theirs = pair
    extra = {"tools": tools, "enable_thinking": False}
    try:
        text = theirs.apply_chat_template(CHATS[name], add_generation_prompt=go, tokenize=False, **extra)
    except Exception as error:
        with pytest.raises(ValueError, match="chat_template") as found:
            chat.render(ours, CHATS[name], go, **extra)
        assert str(error) in str(found.value)
        return
    assert chat.render(ours, CHATS[name], go, **extra) == text
    ids = theirs.apply_chat_template(CHATS[name], add_generation_prompt=go, tokenize=True, return_dict=False, **extra)
    assert ours.encode(text, special=False) == ids
    if go:
        assert list(chat.start(ours, CHATS[name], **extra).ids) == ids


def test_same_special_tokens(pair):
    ours, theirs = pair
    assert ours.special.items() >= theirs.special_tokens_map.items()
