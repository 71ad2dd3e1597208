"""Whether a reward can be trusted: gold answers must earn it, empty words must not, and a scorer that is not rewarded watches for drift."""

import random
from collections.abc import Callable, Sequence
from concurrent import futures

import numpy as np

from rl_adapter.rewards.score import Rewards
from rl_adapter.types import Outcome, Problem

SHOWN = 5  # offenders listed in a message
SAMPLE = 16  # problems that are probed
OF_ANSWERS = "exact", "math", "code", "gym"  # scorers that compare with something that the problem must have


def gold_completion(name: str, problem: Problem, mark: str) -> str | None:
    """The gold answer in the form that a scorer expects; None where the problem has none for it."""
    answer, entry = problem.answer, problem.metadata.get("entry")
    if name == "gym":
        answer = entry.get("answer") if isinstance(entry, dict) else answer
        return None if answer is None else f"{mark} {answer}"
    if name == "code":
        solution = problem.metadata.get("solution")
        return None if solution is None else f"```python\n{solution}\n```"
    return f"{mark} {answer}" if name in ("exact", "math") and answer else None


def check_gold(
    rewards: Rewards, problems: Sequence[Problem], policy: str = "refuse", progress: Callable[[int, int], None] = lambda done, of: None
) -> tuple[list[Problem], list[tuple[Problem, str]]]:
    """The problems whose gold answer earns 1.0 from each scorer that has one, and the others with the reason.

    A scorer that finds no gold form of a problem is asked about an empty completion: one that cannot score that can score none, since what
    it looks at in the problem (an answer, tests) is not there. Problems whose environment may reward them need not have it, and what a
    scorer of the user's needs is not known: of those, `run_probes` tells.

    Args:
      rewards: whose scorers are asked, also the one that is held out.
      problems: to check.
      policy: "refuse": the others are a ValueError that lists some; "drop": they are left out, but for none left, which is one too.
      progress: is called with how many are done, of how many: a scorer may take long.
    """

    def trouble(problem):
        elsewhere = problem.env and rewards.section.env.weight
        for name in rewards.names:
            text = gold_completion(name, problem, rewards.section.mark)
            if text is None and (elsewhere or name not in OF_ANSWERS):
                continue
            value, failure = rewards.part(name, problem, text or "")
            if failure is not None or (text is not None and value != 1.0):
                fields = "" if text else f" (of its fields, metadata are {', '.join(map(repr, problem.metadata)) or 'none'})"
                return f"{name}: {failure if failure is not None else f'earns {value:g}'}{fields}"
        return ""

    with futures.ThreadPoolExecutor(rewards.section.workers) as threads:
        found = []
        for reason in threads.map(trouble, problems):
            found.append(reason)
            progress(len(found), len(problems))
    kept = [problem for problem, reason in zip(problems, found) if not reason]
    dropped = [(problem, reason) for problem, reason in zip(problems, found) if reason]
    if dropped and (policy == "refuse" or not kept):
        some = "; ".join(f"{_short(p.prompt)} with {_short(p.answer)}: {reason}" for p, reason in dropped[:SHOWN])
        need = "a gold answer that earns its own reward" + (", or reward.gold='drop'" if kept else "")
        raise ValueError(f"answer: found {len(dropped)} of {len(problems)} that do not earn 1.0 ({some}), need {need}")
    return kept, dropped


def probes(problem: Problem, mark: str = "Answer:") -> dict[str, str]:
    """Completions that answer nothing, by what they are."""
    said = f"{mark} " if mark else ""
    return {
        "empty": "",
        "one word again and again": "the " * 200,
        "the prompt copied": problem.prompt,
        "the prompt copied as the answer": said + problem.prompt,
        "the mark without an answer": mark,
        "a word for an answer": said + "the",
        "nan for an answer": said + "nan",
        "an empty box": said + "\\boxed{}",
        "an empty block": "```\n```",
        "an empty object": "```json\n{}\n```",
        "empty tags": "<think></think><answer></answer>",
        "empty tags on lines": "<think>\n</think>\n<answer>\n</answer>",
    }


def run_probes(rewards: Rewards, problems: Sequence[Problem], seed: int = 0) -> list[str]:
    """Warnings, one for each kind of probe that earns reward on some of a sample of the problems, and one for each scorer that can score
    no probe of some of them."""
    sample = random.Random(seed).sample(list(problems), min(SAMPLE, len(problems)))
    asked = [(name, problem, text) for problem in sample for name, text in probes(problem, rewards.section.mark).items()]
    outcomes = rewards.score_all([problem for _, problem, _ in asked], [text for *_, text in asked])
    warnings, each = [], len(asked) // len(sample)
    for name in dict.fromkeys(name for name, *_ in asked):
        earned = [outcome for (probe, *_), outcome in zip(asked, outcomes) if probe == name and outcome.reward > 0]
        if earned:
            parts = sorted({n for o in earned for n, value in o.parts.items() if value > 0 and rewards.section[n].weight > 0})
            mean = np.mean([outcome.reward for outcome in earned])
            warnings.append(f"reward: {name} earns {mean:.3g} on {len(earned)} of {len(sample)} problems ({', '.join(parts)})")
    for scorer in rewards.names:
        reasons = np.array([outcome.failures.get(scorer, "") for outcome in outcomes], object).reshape(len(sample), each)
        failed = [of_problem[0] for of_problem in reasons if all(of_problem)]
        if failed:
            warnings.append(f"reward: {scorer} cannot score {len(failed)} of {len(sample)} problems, whatever is said ({failed[0]})")
    return warnings


def divergence(outcomes: Sequence[Outcome], held_out: str = "") -> dict[str, float]:
    """Metrics of a step's completions: each part, failures, and how far reward has gone from the scorer that is held out.

    A reward that rises while the held-out scorer does not is being gamed (Goodhart): the gap grows, the correlation falls.
    """
    metrics = {f"reward/part/{name}": float(np.mean([o.parts[name] for o in outcomes])) for name in outcomes[0].parts}
    metrics["reward/failures"] = float(np.mean([bool(o.failures) for o in outcomes]))
    if held_out:
        rewards, held = np.array([o.reward for o in outcomes]), np.array([o.parts[held_out] for o in outcomes])
        metrics |= {"reward/held_out/mean": float(held.mean()), "reward/held_out/gap": float(rewards.mean() - held.mean())}
        if np.ptp(rewards) > 0 and np.ptp(held) > 0:
            metrics["reward/held_out/correlation"] = float(np.corrcoef(rewards, held)[0, 1])
    return metrics


def _short(text: str) -> str:
    return repr(text) if len(repr(text)) <= 60 else repr(text)[:57] + "..."
