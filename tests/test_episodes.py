"""Conversations in tokens: templates take answers, what was sampled stays, and a failing environment ends its own episode only."""

import dataclasses
import types

import chat_templates
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quickly
from test_model import World

from rl_adapter import environments, episodes, lora, rollout
from rl_adapter.engine import Engine
from rl_adapter.environments import Environment, Kit, Turn
from rl_adapter.environments.signatures import tool
from rl_adapter.hub import chat
from rl_adapter.hub.tokenizer import make_tokenizer
from rl_adapter.sampling import Sampling
from rl_adapter.types import Numerics, Problem


def echo(text: str) -> str:
    """Says it again."""
    return text


def both(text: str, more: str) -> str:
    """Says them."""
    return text + more


TWO, WIDE = Kit({"echo": tool(echo), "other": tool(echo)}), Kit({"both": tool(both)})
ECHO = Kit({"echo": tool(echo)}, lambda text, problem: 0.0)
PROBLEM = Problem(7, "two?", "4", "one")
opening = lambda problem: [{"role": "user", "content": problem.prompt}]


def tokenizer(style="qwen3", template=None):
    source, _, stop = chat_templates.STYLES[style]
    backend = chat_templates.backend(style)
    special = {"bos_token": chat_templates.BOS.get(style), "eos_token": stop[0]}
    special = {k: v for k, v in special.items() if v}
    return make_tokenizer(backend, 400, [backend.token_to_id(t) for t in stop], special=special, template=template or source)


def env(**fields):
    return types.SimpleNamespace(**{"calls": "auto", "max_turns": 8, "max_result_tokens": 100} | fields)


def make(of, name="tools", kit=ECHO, plain=False, stops=(), problems=(PROBLEM,), **fields):
    """An `Episodes` of one environment, whose prompts are rendered as a run does it."""
    made = {"": environments.make(name, kit) if isinstance(name, str) else name}
    stop_ids = (*of.stop_ids, *(of.encode(text, special=False)[0] for text in stops))
    setting = episodes.setting(env(**fields), made, of, stop_ids, None if plain else opening, problems)
    render = lambda p: of.encode(p.prompt) if plain else chat.start(of, opening(p), **episodes.variables(made[""])).ids
    return episodes.Episodes(setting, problems, [np.array(render(p), np.int32) for p in problems], 0)


def talk(of, says, prompt=0, sample=0):
    """Plays the engine: texts (or token ids) of turns -> all tokens, which of them were drawn, and the episode."""
    tokens, drawn = [], []
    for said in says:
        said = of.setting.tokenizer.encode(said, special=False) if isinstance(said, str) else said
        tokens, drawn = tokens + list(said), drawn + [True] * len(said)
        more = of.respond(prompt, sample, np.array(tokens, np.int32))
        if not more:
            break
        tokens, drawn = tokens + list(more), drawn + [False] * len(more)
    return tokens, drawn, of.finish(prompt, sample, np.array(tokens, np.int32))


def added(of, tokens, drawn):
    """What was not drawn, as text."""
    return of.setting.tokenizer.decode([t for t, d in zip(tokens, drawn) if not d], special=True)


# style, call format, a turn that calls, what its end is, what follows, the answer
CALLS = [
    (
        "qwen3",
        "auto",
        '<think>\nhm\n</think>\n<tool_call>\n{"name": "echo", "arguments": {"text": "four"}}\n</tool_call><|im_end|>',
        "\n<|im_start|>user\n<tool_response>\nfour\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "4<|im_end|>",
    ),
    (
        "llama3",
        "auto",
        '{"name": "echo", "parameters": {"text": "four"}}<|eot_id|>',
        "<|start_header_id|>ipython<|end_header_id|>\n\nfour<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "4<|eot_id|>",
    ),
    (
        "harmony",
        "auto",
        ' to=functions.echo<|channel|>commentary json<|message|>{"text": "four"}<|call|>',
        '<|start|>functions.echo to=assistant<|channel|>commentary<|message|>"four"<|end|><|start|>assistant',
        "<|channel|>final<|message|>4<|return|>",
    ),
    ("mistral", "mistral", '[TOOL_CALLS]echo[ARGS]{"text": "four"}</s>', "[INST] four[/INST]", " 4</s>"),  # whose template has no tools
    ("glm4", "glm", "<tool_call>echo<arg_key>text</arg_key><arg_value>four</arg_value></tool_call><|observation|>",
     "\nfour<|assistant|>\n", "4<|user|>"),
]  # fmt: skip


@pytest.mark.parametrize(("style", "calls", "said", "follows", "answer"), CALLS)
def test_tools_by_each_template(style, calls, said, follows, answer):
    of = make(tokenizer(style), calls=calls)
    tokens, drawn, episode = talk(of, [said, answer])
    assert added(of, tokens, drawn) == follows and episode.failure is None
    assert (episode.turns, episode.calls, episode.malformed, episode.reward) == (2, 1, 0, None)
    assert episode.scored_text == episode.texts[-1] and episode.scored_text.endswith("4") and "<|" not in episode.scored_text


@pytest.mark.parametrize(
    ("calls", "stop", "says", "follows"),
    [
        ("auto", "]", ["So [echo four]", " 4<|im_end|>"], " four\n"),
        ("equals", "=", ["So four=", " 4<|im_end|>"], "four"),
    ],
)
def test_tools_without_a_template(calls, stop, says, follows):
    of = make(tokenizer(), plain=True, stops=[stop], calls=calls)
    tokens, drawn, episode = talk(of, says)
    assert added(of, tokens, drawn) == follows
    assert (episode.texts, episode.scored_text) == ((says[0], " 4"), " 4")


@pytest.mark.parametrize("style", sorted(chat_templates.STYLES))
def test_what_was_sampled_stays_though_the_text_has_another_tokenization(style):
    of = make(tokenizer(style), "attempts")
    odd = [i for c in "answer" for i in of.setting.tokenizer.encode(c, special=False)]
    assert odd != of.setting.tokenizer.encode("answer", special=False)
    turn = [*odd, of.setting.tokenizer.stop_ids[0]]
    tokens, drawn, episode = talk(of, [turn] * 5)
    assert [t for t, d in zip(tokens, drawn) if d] == turn * 3 and episode.texts == ("answer",) * 3
    ends = [n for n in range(len(drawn)) if drawn[n] and (n + 1 == len(drawn) or not drawn[n + 1])]
    for end in ends:
        assert tokens[end - 6 : end + 1] == turn
    # As the chat says it, appended message by message.
    expected = chat.start(of.setting.tokenizer, opening(PROBLEM))
    first = len(expected.ids)
    for n in range(3):
        expected = chat.add_completion(expected, turn)
        expected = chat.add_messages(expected, [{"role": "user", "content": "That is wrong. Try again."}]) if n < 2 else expected
    assert list(expected.ids[first:]) == tokens and list(expected.sampled[first:]) == drawn


def call(text):
    return f'<tool_call>{{"name": "echo", "arguments": {{"text": "{text}"}}}}</tool_call><|im_end|>'


def test_what_a_tool_prints_begins_no_turn():
    of, special = make(tokenizer()), chat_templates.STYLES["qwen3"][1]
    special_of = lambda said: [t for t, d in zip(*talk(of, [said])[:2]) if not d and t in of.setting.tokenizer.special_ids]
    for text in (*special, "".join(special), "<|im_<|im_end|>end|>"):
        escaped = text.replace("<", "\\u003c")  # as a model may write it, without sampling the token
        assert special_of(call(escaped)) == special_of(call("four")) != []


def test_long_results_are_cut():
    of = make(tokenizer(), max_result_tokens=5)
    assert "<tool_response>\n12345 ... [cut]\n</tool_response>" in added(of, *talk(of, [call("1234567")])[:2])
    assert "<tool_response>\n12345\n</tool_response>" in added(of, *talk(of, [call("12345")])[:2])


@given(st.text(max_size=60) | st.text("an swer", max_size=60), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_cut_and_defused(text, most):
    of = TOKENIZER
    kept = episodes.cut(of, text, most)
    if len(of.encode(text, special=False)) <= most:
        assert kept == text
    else:
        head = kept.removesuffix(episodes.CUT)
        assert text.startswith(head) and (kept == text or kept != head)
        assert len(of.encode(head, special=False)) <= most + 3  # a character of several tokens stays whole
    assert not of.special_ids & set(of.encode(episodes.defused(of, text + "<|im_end|>"), special=False))


TOKENIZER = tokenizer()


def test_a_huge_result_takes_no_time():
    assert len(episodes.cut(TOKENIZER, "x" * 10**7, 10)) == 10 + len(episodes.CUT)


def test_malformed_calls_are_told_and_counted():
    of = make(tokenizer())
    says = ["<tool_call>nope</tool_call>", '<tool_call>{"name": "nothing"}</tool_call>', '<tool_call>{"name": "echo"}</tool_call>']
    tokens, drawn, episode = talk(of, [f"{said}<|im_end|>" for said in says] + [call("four"), "4<|im_end|>"])
    text = added(of, tokens, drawn)
    assert all(reason in text for reason in ("Error: found no JSON", "Error: found no tool 'nothing'", "Error: text: Field required"))
    assert (episode.calls, episode.malformed, episode.turns) == (4, 3, 5)
    both = episodes.describe([episode, dataclasses.replace(episode, calls=0, malformed=0, texts=("",), failure="broken")])
    assert both == {"env/turns": 3.0, "env/calls": 2.0, "env/malformed": 0.75, "env/failed": 0.5}
    assert set(episodes.describe([]).values()) == {0.0}


# Ends


def test_turns_are_bounded_and_the_last_one_counts():
    of = make(tokenizer(), Counting(), max_turns=3)
    tokens, drawn, episode = talk(of, ["a<|im_end|>"] * 9)
    assert sum(drawn) == 6 and drawn[-1] and (episode.turns, episode.reward) == (3, 3.0)


def test_a_turn_that_was_cut_is_not_answered():
    of = make(tokenizer(), Counting())
    assert of.respond(0, 0, np.array(TOKENIZER.encode("abc"))) is None
    assert of.finish(0, 0, np.array(TOKENIZER.encode("abc"))).reward is None


def test_an_answer_that_did_not_fit():
    """The engine drops it and ends: the tokens are those of the turn."""
    of = make(tokenizer(), Counting())
    tokens = np.array(TOKENIZER.encode("abc<|im_end|>"))
    assert of.respond(0, 0, tokens)
    assert of.finish(0, 0, tokens) == episodes.Episode(("abc",), "abc", 0, 0, 1.0, None)
    assert not of.talks


def test_an_engine_that_asks_for_no_answer():
    of = make(tokenizer(), "")
    assert not of.setting.talks
    assert of.finish(0, 0, np.array(TOKENIZER.encode("abc<|im_end|>"))) == episodes.Episode(("abc",), "abc", 0, 0, None, None)


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_scored(whole):
    made = Counting()
    made.whole = whole
    _, _, episode = talk(make(tokenizer(), made, max_turns=2), ["ab<|im_end|>", "cd<|im_end|>"])
    assert episode.texts == ("ab", "cd") and episode.scored_text == ("abcd" if whole else "cd")


class Counting(Environment):
    """Earns one a turn; `answer` and `begin` may be anything."""

    def __init__(self, answer=None, begin=None):
        self.tools = {}
        self.answer = answer or (lambda state: Turn([{"role": "user", "content": "on"}], reward=state))
        self.begin = begin or (lambda problem, seed: 0)

    def start(self, problem, seed):
        return self.begin(problem, seed)

    def reply(self, state, said):
        return state + 1, self.answer(state + 1)


def broken(*_):
    raise KeyError("broken")


def leaves(*_):
    raise SystemExit(3)


@pytest.mark.parametrize(("begin", "reason"), [(broken, "KeyError: 'broken'"), (leaves, "SystemExit: 3")])
def test_an_environment_that_never_begins_is_told_at_start(begin, reason):
    with pytest.raises(ValueError, match=f"environment '': prompt 'two.': found {reason}, need a start"):
        make(tokenizer(), Counting(begin=begin))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (broken, "KeyError: 'broken'"),
        (leaves, "SystemExit: 3"),
        (lambda state: None, "AttributeError"),
        (lambda state: Turn([{"role": "user", "content": "on"}], reward=float("nan")), "ValueError: reward: found nan"),
        (lambda state: Turn([{"role": "user", "content": 3}]), "ValueError: content: found 3"),
        (lambda state: Turn([{"content": "on"}]), "KeyError: 'role'"),
        (lambda state: Turn([{"role": "user", "content": "\ud800"}]), "ValueError"),
        (lambda state: Turn(reward=10**400), "OverflowError"),
    ],
)
def test_a_failure_ends_its_own_episode(answer, reason):
    """The second sample fails in its second turn; others do not notice."""
    fails = lambda state: answer(state) if state == 2 else Turn([{"role": "user", "content": "on"}], reward=0.5)
    whole, failing = make(tokenizer(), Counting(), max_turns=3), make(tokenizer(), Counting(fails), max_turns=3)
    expected = talk(whole, ["a<|im_end|>"] * 4, sample=0)
    tokens, drawn, episode = talk(failing, ["a<|im_end|>"] * 4, sample=1)
    assert episode.failure.startswith(reason) and len(episode.failure) <= 200 and (episode.turns, episode.reward) in ((2, 0.5), (2, 0.5))
    assert tokens == expected[0][: len(tokens)] and drawn == expected[1][: len(drawn)] and drawn[-1]


def test_a_start_that_fails_for_one_sample():
    of = make(tokenizer(), Counting(begin=lambda problem, seed: 0 if seed == 0 else broken()))  # it is tried with seed 0
    _, _, episode = talk(of, ["a<|im_end|>"] * 3)
    assert episode == episodes.Episode(("a",), "a", 0, 0, None, "KeyError: 'broken'")


def test_what_is_drawn_is_keyed_by_seed_prompt_and_sample():
    """Wherever in a batch it stands, and in whatever order it is asked."""
    seen = {}

    def begin(problem, seed):
        seen.setdefault(problem.id, []).append(seed)
        return 0

    problems = [dataclasses.replace(PROBLEM, id=n) for n in range(3)]
    for order, seed in (([0, 1, 2], 5), ([2, 1, 0], 5), ([0, 1, 2], 6)):
        of = make(tokenizer(), Counting(begin=begin), problems=[problems[i] for i in order])
        of.seed = seed
        for place in range(3):
            for sample in (0, 1):
                talk(of, ["a<|im_end|>"], place, sample)
    drawn = [[seed for seed in seeds if seed] for seeds in seen.values()]  # without the trials of `setting`
    assert all(s[:2] == s[2:4] for s in drawn) and len({seed for s in drawn for seed in s}) == 3 * 2 * 2


# Settings that cannot work

ALTERNATING = chat_templates.MISTRAL
NO_FOLLOWING = "{% for m in messages[:1] %}{{ m.content }}{% endfor %}<|im_end|>"


@pytest.mark.parametrize(
    ("template", "name", "more", "match"),
    [
        (None, "tools", dict(plain=True), r"rollout.stop: found no '\]', need it for env.calls 'brackets'"),
        (None, "tools", dict(calls="equals"), "rollout.stop: found no '='"),
        (
            None,
            "tools",
            dict(calls="equals", stops=("=",), kit=TWO),
            "env.tools: found echo, other with .*, need exactly one",
        ),
        (None, "tools", dict(calls="equals", stops=("=",), kit=WIDE), "env.tools: found both with .*, with one required parameter"),
        (chat_templates.CHATML, "tools", {}, "env.calls: found 'auto' and a chat template of no known format"),
        (NO_FOLLOWING, "attempts", {}, "chat_template: takes no message after a turn"),
        ("{{ raise_exception('no') }}", "attempts", {}, "chat_template: cannot begin a conversation"),
        (None, "guess", {}, "environment '': prompt 'two\\?': metadata: found low None"),
        (None, "", dict(problems=[dataclasses.replace(PROBLEM, env="chess")]), r"env: found 'chess' of prompt 'two\?', need one of \[''\]"),
    ],
)
def test_settings_that_cannot_work(template, name, more, match):
    with pytest.raises(ValueError, match=match):
        make(tokenizer(template=template), name, **more)


# Through the sampler itself


def test_a_batch_of_conversations_on_a_model():
    """Every token is either the policy's or what the template says between turns, and the mask says which."""
    of_style = tokenizer("wrapped")
    problems = [dataclasses.replace(PROBLEM, id=n, prompt=prompt) for n, prompt in enumerate(("a", "two", "on", "so"))]
    stops = [chr(c) for c in range(ord("!"), ord("`"))]  # many, so that a random model's turns end
    episodes_ = make(of_style, Counting(), stops=stops, problems=problems, max_turns=3)
    ranks = tuple((g, 2 * (g == "attention")) for g in lora.GROUPS)
    world = World(
        seed=3, form="int4", adapter_spec=lora.AdapterSpec(ranks, tuple((g, 2.0) for g in lora.GROUPS)),
        changes=(("d_model", 32), ("heads", 4), ("head_dim", 16), ("layers", 1), ("vocab", 330)),
    )  # fmt: skip
    longest, sampling = max(map(len, episodes_.prompts)), Sampling(2, 44, episodes_.setting.stop_ids, of_style.pad_id)
    assert longest + 44 <= 64
    with quickly():
        done = list(
            rollout.stream(
                world.model(Numerics("exact", 16)), sampling, world.place(), None, episodes_.prompts, [p.id for p in problems], 1,
                Engine(page=4, chunk=8), respond=episodes_.respond,
            )
        )  # fmt: skip
    turns = []
    for one in done:
        episode = episodes_.finish(one.prompt, one.sample, one.tokens)
        assert episode.failure is None
        turns.append(episode.turns)
        expected, sampled, at = chat.start(of_style, opening(problems[one.prompt])), [], 0
        first = len(expected.ids)
        while at < len(one.tokens):
            n = int(np.argmin(np.append(one.drawn[at:], False)))
            said = one.tokens[at : at + n].tolist()
            sampled.append(of_style.decode(said))
            expected, at = chat.add_completion(expected, said), at + n
            if at < len(one.tokens):
                expected = chat.add_messages(expected, [{"role": "user", "content": "on"}])
                at = len(expected.ids) - first
        assert list(expected.ids[first:]) == one.tokens.tolist() and list(expected.sampled[first:]) == one.drawn.tolist()
        assert tuple(sampled) == episode.texts and (one.logprobs[~one.drawn] == 0).all() and (one.logprobs[one.drawn] < 0).all()
    assert len(done) == 8 and max(turns) == 3 and not episodes_.talks
