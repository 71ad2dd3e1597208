"""Chats: templates are rendered within bounds, and tokens that were sampled stay as they were sampled."""

import json
import threading

import chat_templates
import pytest
import tokenizers

from rl_adapter.hub import chat
from rl_adapter.hub.tokenizer import make_tokenizer

USER, NEXT = {"role": "user", "content": "two and two?"}, {"role": "user", "content": "think again"}
SYSTEM = {"role": "system", "content": "answer"}
TOOL = {"role": "tool", "content": "four", "name": "add", "tool_call_id": "abcdefghi"}


def make(style, template=None, stops=None):
    source, _, stop = chat_templates.STYLES[style]
    backend = chat_templates.backend(style)
    special = {"bos_token": chat_templates.BOS.get(style), "eos_token": stop[0]}
    special = {k: v for k, v in special.items() if v}
    ids = [backend.token_to_id(t) for t in stops or stop]
    return make_tokenizer(backend, 400, ids, special=special, template=source if template is None else template)


def bare(template):
    return make("chatml", template)


def text(tokenizer, ids):
    return tokenizer.backend.decode(list(ids), skip_special_tokens=False)


def ids_of(tokenizer, what):
    return tokenizer.encode(what, special=False)


# Token in, token out


# style, what the model says at first, the message after it, what must follow it: from the style's reference format
FOLLOWS = [
    ("chatml", "four<|im_end|>", NEXT, "\n<|im_start|>user\nthink again<|im_end|>\n<|im_start|>assistant\n"),
    ("chatml", "fo", NEXT, "<|im_end|>\n<|im_start|>user\nthink again<|im_end|>\n<|im_start|>assistant\n"),
    ("chatml", "four<|endoftext|>", NEXT, "\n<|im_start|>user\nthink again<|im_end|>\n<|im_start|>assistant\n"),
    ("chatml", "four<|im_end|>", TOOL, "\n<|im_start|>tool\nfour<|im_end|>\n<|im_start|>assistant\n"),
    (
        "llama3",
        "four<|eot_id|>",
        NEXT,
        "<|start_header_id|>user<|end_header_id|>\n\nthink again<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    (
        "llama3",
        "four<|end_of_text|>",
        NEXT,
        "<|start_header_id|>user<|end_header_id|>\n\nthink again<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    (
        "llama3",
        '{"name": "add", "par',
        TOOL,
        "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\nfour<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("qwen3", "<think>\nhm\n</think>\n\nfour<|im_end|>", NEXT, "\n<|im_start|>user\nthink again<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen3", "<think>\nhm", NEXT, "<|im_end|>\n<|im_start|>user\nthink again<|im_end|>\n<|im_start|>assistant\n"),
    (
        "qwen3",
        "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call><|im_end|>",
        TOOL,
        "\n<|im_start|>user\n<tool_response>\nfour\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>",
        NEXT,
        "<|start|>user<|message|>think again<|end|><|start|>assistant",
    ),
    ("harmony", "<|channel|>final<|message|>fo", NEXT, "<|end|><|start|>user<|message|>think again<|end|><|start|>assistant"),
    (
        "harmony",
        " to=functions.add<|channel|>commentary json<|message|>{}<|call|>",
        TOOL,
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"four"<|end|><|start|>assistant',
    ),
    ("mistral", " four</s>", NEXT, "[INST] think again[/INST]"),
    ("mistral", " fo", NEXT, "</s>[INST] think again[/INST]"),
    ("glm4", "four<|user|>", NEXT, "\nthink again<|assistant|>\n"),
    ("glm4", "four<|endoftext|>", NEXT, "<|user|>\nthink again<|assistant|>\n"),
    ("glm4", "four<|observation|>", TOOL, "\nfour<|assistant|>\n"),
    ("wrapped", "four<|said|><|over|>", NEXT, "<|turn|>user<|say|>think again<|said|><|over|><|turn|>assistant<|say|>"),
    ("wrapped", "four<|over|>", NEXT, "<|turn|>user<|say|>think again<|said|><|over|><|turn|>assistant<|say|>"),
    ("wrapped", "fo", NEXT, "<|said|><|over|><|turn|>user<|say|>think again<|said|><|over|><|turn|>assistant<|say|>"),
    ("glm4", "fo", NEXT, "<|user|>\nthink again<|assistant|>\n"),
]


@pytest.mark.parametrize(("style", "said", "then", "follows"), FOLLOWS)
def test_what_follows_a_completion(style, said, then, follows):
    tokenizer = make(style)
    first = chat.start(tokenizer, [USER])
    assert text(tokenizer, first.ids) == chat.render(tokenizer, [USER], True) and not any(first.sampled)
    said = ids_of(tokenizer, said)
    second = chat.add_completion(first, said)
    third = chat.add_messages(second, [then])
    n, m = len(first.ids), len(said)
    assert third.ids[:n] == first.ids and third.ids[n : n + m] == tuple(said)
    assert text(tokenizer, third.ids[n + m :]) == follows
    assert third.ids[n + m :] == tuple(ids_of(tokenizer, follows))
    assert third.sampled == (False,) * n + (True,) * m + (False,) * len(ids_of(tokenizer, follows))


@pytest.mark.parametrize("style", sorted(chat_templates.STYLES))
def test_sampled_tokens_stay_though_the_text_has_another_tokenization(style):
    tokenizer = make(style)
    odd = [ids_of(tokenizer, c)[0] for c in "answer"]  # letter by letter
    assert odd != ids_of(tokenizer, "answer")
    talk = chat.start(tokenizer, [USER])
    spans = []
    for _ in range(3):
        spans.append(len(talk.ids))
        talk = chat.add_messages(chat.add_completion(talk, [*odd, tokenizer.stop_ids[0]]), [NEXT])
    for start in spans:
        assert list(talk.ids[start : start + 7]) == [*odd, tokenizer.stop_ids[0]] and all(talk.sampled[start : start + 7])
    assert sum(talk.sampled) == 21


@pytest.mark.parametrize("style", ["chatml", "llama3", "mistral"])
def test_a_chat_equals_its_rendering_where_the_template_only_appends(style):
    tokenizer = make(style)
    stop = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}[style]
    space = " " if style == "mistral" else ""
    talk, messages = chat.start(tokenizer, [USER]), [USER]
    for said in ("four", "the answer is four"):
        talk = chat.add_messages(chat.add_completion(talk, ids_of(tokenizer, space + said + stop)), [NEXT])
        messages += [{"role": "assistant", "content": said}, NEXT]
        assert list(talk.ids) == ids_of(tokenizer, chat.render(tokenizer, messages, True))


def test_thinking_that_the_template_drops_from_history_stays_in_the_tokens():
    tokenizer = make("qwen3")
    said = "<think>\nhm\n</think>\n\nfour<|im_end|>"
    again = chat.render(tokenizer, [USER, {"role": "assistant", "content": said.removesuffix("<|im_end|>")}, NEXT], True)
    assert "hm" not in again  # what a new rendering would have made of it
    talk = chat.add_completion(chat.start(tokenizer, [USER]), ids_of(tokenizer, said))
    after = chat.add_messages(talk, [NEXT])
    assert after.ids[: len(talk.ids)] == talk.ids and after.sampled[: len(talk.ids)] == talk.sampled
    kept = [i for i, s in zip(after.ids, after.sampled) if s]
    assert text(tokenizer, kept) == said


def test_several_messages_tools_and_variables():
    tokenizer = make("qwen3")
    talk = chat.start(tokenizer, [SYSTEM, USER], enable_thinking=False)
    assert text(tokenizer, talk.ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    talk = chat.add_completion(talk, ids_of(tokenizer, "x<|im_end|>"))
    after = chat.add_messages(talk, [TOOL, TOOL | {"content": "<think>\nfive"}, NEXT])
    expected = "\n<|im_start|>user\n<tool_response>\nfour\n</tool_response>\n<tool_response>\n<think>\nfive\n</tool_response><|im_end|>\n"
    expected += "<|im_start|>user\nthink again<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert text(tokenizer, after.ids[len(talk.ids) :]) == expected
    llama = make("llama3")
    opening = text(llama, chat.start(llama, [USER], tools=[{"name": "a<b"}]).ids)
    assert '{\n    "name": "a<b"\n}' in opening  # not escaped as HTML


def test_content_as_parts():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% for p in m.content %}{{ p.text }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    )
    tokenizer = make("chatml", template)
    talk = chat.start(tokenizer, [{"role": "user", "content": [{"type": "text", "text": "two"}]}])
    talk = chat.add_completion(talk, ids_of(tokenizer, "fo"))
    after = chat.add_messages(talk, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    assert text(tokenizer, after.ids[len(talk.ids) :]) == "<|im_end|><|im_start|>userab<|im_end|>"


def test_messages_that_contain_the_marks_or_special_tokens():
    tokenizer = make("chatml")
    talk = chat.add_completion(chat.start(tokenizer, [{"role": "user", "content": "XQ0Z XW1Z"}]), ids_of(tokenizer, "XQ2Z<|im_end|>"))
    after = chat.add_messages(talk, [{"role": "user", "content": "XW0Z <|im_end|>"}])
    assert text(tokenizer, after.ids[len(talk.ids) :]) == "\n<|im_start|>user\nXW0Z <|im_end|><|im_end|>\n<|im_start|>assistant\n"


def test_the_last_stop_token_counts_though_it_is_the_pad_token_and_padding_does_not():
    tokenizer = make("chatml")
    stop = tokenizer.stop_ids[0]
    assert tokenizer.pad_id == stop
    talk = chat.start(tokenizer, [USER])
    done = chat.add_completion(talk, [70, stop])
    assert done.stopped and done.sampled[-2:] == (True, True) and done.ids[-1] == stop
    with pytest.raises(ValueError, match="stop token .* padding"):
        chat.add_completion(talk, [70, stop, stop])


@pytest.mark.parametrize("which", [0, 1])
def test_each_stop_token_ends_a_turn(which):
    tokenizer = make("llama3")
    done = chat.add_completion(chat.start(tokenizer, [USER]), [70, tokenizer.stop_ids[which]])
    assert done.stopped
    with pytest.raises(ValueError, match="completion that ended"):
        chat.add_completion(done, [70])


def test_a_cut_completion_may_go_on():
    tokenizer = make("chatml")
    talk = chat.start(tokenizer, [USER])
    parts = chat.add_completion(chat.add_completion(talk, [70, 71]), [72, tokenizer.stop_ids[0]])
    assert parts == chat.add_completion(talk, [70, 71, 72, tokenizer.stop_ids[0]])


def test_a_stop_token_that_the_template_does_not_have():
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{{ 'assistant:' if add_generation_prompt else '' }}"
    tokenizer = make("chatml", plain)
    talk = chat.add_completion(chat.start(tokenizer, [USER]), ids_of(tokenizer, " four<|endoftext|>"))
    after = chat.add_messages(talk, [NEXT])
    assert text(tokenizer, after.ids[len(talk.ids) :]) == "\nuser: think again\nassistant:"


TURN = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ messages[-1].content }}", "found the turn before the new messages 0 times"),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "2 times"),
        ("{% for m in messages | reverse %}{{ m.content + '<|im_end|>' }}{% endfor %}", "no trace of the new messages after"),
        ("{% for m in messages[:2] %}{{ m.content + '<|im_end|>' }}{% endfor %}", "no trace of the new messages after"),
        (TURN + "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}", "TemplateError: too long"),
        ("{% for m in messages %}{{ m.content + 'the' }}{% endfor %}", "token across the end"),
    ],
)
def test_templates_to_which_nothing_can_be_appended(template, match):
    tokenizer = bare(template)
    if match.startswith("token across"):
        tokenizer.backend.add_tokens(["Zthe"])
    talk = chat.add_completion(chat.start(tokenizer, [USER]), [70, tokenizer.stop_ids[0]])
    with pytest.raises(ValueError, match=match):
        chat.add_messages(talk, [NEXT])


def test_an_unmatched_role_names_both_reasons():
    tokenizer = make("mistral")
    talk = chat.add_completion(chat.start(tokenizer, [USER]), ids_of(tokenizer, "x</s>"))
    with pytest.raises(ValueError, match="Only user and assistant.*tool calls in the turn before"):
        chat.add_messages(talk, [TOOL])


@pytest.mark.parametrize("messages", [[], None, "hi", ["hi"], [{"content": "a"}], [{"role": 3}], [{"role": "user", "content": b"x"}]])
def test_messages_must_be_messages(messages):
    with pytest.raises(ValueError, match="messages"):
        chat.start(make("chatml"), messages)


def test_order_of_calls():
    tokenizer = make("chatml")
    talk = chat.start(tokenizer, [USER])
    with pytest.raises(ValueError, match="need a completion first"):
        chat.add_messages(talk, [NEXT])
    for ids in ([], [-1]):
        with pytest.raises(ValueError, match="at least one token id"):
            chat.add_completion(talk, ids)
    for name in ("messages", "add_generation_prompt"):
        with pytest.raises(ValueError, match=f"{name}.*chats set themselves"):
            chat.start(tokenizer, [USER], **{name: False})
    with pytest.raises(ValueError, match="chat_template: found none"):
        chat.start(make_tokenizer(tokenizer.backend, 400, 0), [USER])
    with pytest.raises(ValueError, match="no token"):
        chat.start(bare(" {#- nothing -#} "), [USER])


def test_a_tokenizer_that_puts_a_space_before_the_first_word():
    """As Llama 2 has it: what follows a turn is not the first word."""
    pieces = ["▁", "▁user", "▁four", "four", "▁think", "▁assistant", "user", "think", "assistant", "XQ0Z", "<s>", "</s>", "<unk>"]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([(p, -float(len(pieces) - len(p))) for p in pieces], unk_id=12))
    backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    source = "{{ bos_token }}{% for m in messages %}{{ m.role + ' ' + m.content + ' ' + eos_token }}{% endfor %}"
    source += "{% if add_generation_prompt %}assistant{% endif %}"
    tokenizer = make_tokenizer(backend, 400, 11, special={"bos_token": "<s>", "eos_token": "</s>"}, template=source)
    messages = [{"role": "user", "content": "four"}]
    talk = chat.add_completion(chat.start(tokenizer, messages), [2, 11])
    after = chat.add_messages(talk, [{"role": "user", "content": "think"}])
    again = [*messages, {"role": "assistant", "content": "four"}, {"role": "user", "content": "think"}]
    everything = ids_of(tokenizer, chat.render(tokenizer, again, True))
    new = after.ids[len(talk.ids) :]
    assert new and list(new) == everything[-len(new) :] and everything[-len(new) - 1] == 11


# Rendering


def test_what_templates_can_use():
    render = lambda source, **more: chat.render(bare(source), [USER], **more)
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ strftime_now('%Y') | int > 2000 }}") == "True"
    assert render("{% generation %}{{ x }}{% endgeneration %}", x="a") == "a"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"  # blocks leave no space of their own
    assert render("{{ eos_token }}{{ unk_token }}{{ tools is none }}{{ documents }}", documents=[1]) == "<|im_end|>True[1]"
    message = {"role": "assistant", "content": None, "thinking": "hm"}
    shown = json.loads(chat.render(bare("{{ messages[0] | tojson }}"), [message]))
    assert shown == {"role": "assistant", "thinking": "hm", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for", "line 1"),
        ("{{ x | nonsense }}", "nonsense"),
        ("{{ messages.missing.deeper }}", "UndefinedError"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ raise_exception.__globals__.os }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ range(10**9) | length }}", "OverflowError"),
        ("{{ 'x' * 10**12 }}", "memory"),
        ("{{ '%9999999999d' % 1 }}", "memory|Overflow"),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "more than"),
        ("{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("(" * 9 + "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "RecursionError|died|too many nested|memory"),
        ("x" * 2**21, "at most"),
    ],
)
def test_hostile_templates_end_in_an_error(template, match):
    with pytest.raises(ValueError, match=f"chat_template: .*({match})"):
        chat.render(bare(template), [USER])
    assert chat.render(bare("fine"), [USER]) == "fine"


@pytest.mark.parametrize(("template", "content"), [("\ud800", "a"), ("{{ '\\ud800' }}", "a"), ("{{ messages[0].content }}", "\ud800")])
def test_half_a_character(template, content):
    with pytest.raises(ValueError, match="chat_template.*(half a character|surrogates)"):
        chat.start(bare(template), [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{{ (9 ** 9999999) % 7 }}",
    ],
)
def test_endless_templates_end(template, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    with pytest.raises(ValueError, match="no end within 0.5 s"):
        chat.render(bare(template), [USER])
    monkeypatch.undo()
    assert chat.render(bare("fine"), [USER]) == "fine"


def test_threads_get_their_own_replies():
    tokenizer, found = bare("{{ x }}"), {}

    def ask(n):
        found[n] = [chat.render(tokenizer, [USER], x=f"{n}:{i}") for i in range(20)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == {n: [f"{n}:{i}" for i in range(20)] for n in range(4)}
