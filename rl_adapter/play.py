"""Completions with what they earned: rollout, the environments that answer it, and rewards, each as soon as a completion is there.

Training and evaluation both come here, so what is trained on and what is measured cannot drift apart.
"""

import collections
import dataclasses
import time
from collections.abc import Iterator
from concurrent import futures

import jax
import numpy as np

from rl_adapter import engine, microbatch, rollout, scalar
from rl_adapter.data import prompts
from rl_adapter.episodes import Episode, Episodes
from rl_adapter.rewards.score import with_part
from rl_adapter.sampling import Sampling
from rl_adapter.types import Outcome, Problem, Rollout


@dataclasses.dataclass(frozen=True)
class Played:
    """Completions of some prompts on the host, and what they earned; B = P * G of each list, in the order P, G."""

    samples: Rollout
    problems: list[Problem]
    texts: list[str]  # all that was said, environments included
    outcomes: list[Outcome]
    episodes: list[Episode]  # none, where no environment answers

    @property
    def rewards(self) -> np.ndarray:
        """[P, G] f32."""
        return np.array([o.reward for o in self.outcomes], np.float32).reshape(self.samples.lengths.shape)

    def rows(self, prompts_: np.ndarray) -> "Played":
        group = self.samples.lengths.shape[1]
        of = lambda values: [values[p * group + g] for p in prompts_ for g in range(group)] if values else []
        return Played(microbatch.take(self.samples, prompts_), *(of(getattr(self, name)) for name in LISTS))


LISTS = "problems", "texts", "outcomes", "episodes"


def joined(parts: list[Played]) -> Played:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]
    join = lambda path, *xs: np.concatenate(xs, 1 if microbatch.is_behind(path) else 0)
    samples = jax.tree_util.tree_map_with_path(join, *(p.samples for p in parts))
    return Played(samples, *(sum((getattr(p, name) for p in parts), []) for name in LISTS))


def play(
    config, session, data, indices, adapter, settings: Sampling, seed: int, sizes: engine.Engine | None = None,
    counts: collections.Counter | None = None,
) -> Played:  # fmt: skip
    """Complete the problems `indices` of `data`, and score each completion while the device decodes the others.

    Args:
        adapter: prepared; None: the base.
        counts: gets the engine's work added, and `waited_ns`, the time spent on rewards once all was sampled.
    """
    group, counts = settings.group, collections.Counter() if counts is None else counts
    of_prompts, encoded = [data.problems[i] for i in indices], [data.encoded[i] for i in indices]
    problems = [problem for problem in of_prompts for _ in range(group)]
    texts, outcomes, episodes = [""] * len(problems), [None] * len(problems), []
    talks = Episodes(session.talk, of_prompts, encoded, seed) if session.talk.talks else None
    if talks:
        episodes = [None] * len(problems)
    tokens, lengths = prompts.batch(data.encoded, indices, data.length, session.tokenizer.pad_id)

    def score(one, row: int) -> None:
        texts[row] = session.tokenizer.decode(one.tokens.tolist())
        given, said = {}, texts[row]
        if talks:
            episode, said = episodes[row], episodes[row].scored_text
            if episode.reward is not None or episode.failure:
                given["env"] = (episode.reward, episode.failure)
        outcomes[row] = session.rewards.score(problems[row], said, truncated=not one.stopped, given=given)

    jobs = []
    with futures.ThreadPoolExecutor(config.reward.workers) as scorers:

        def passing(completions: Iterator) -> Iterator:
            for one in completions:
                row = one.prompt * group + one.sample
                if talks:  # on the thread that asks environments
                    episodes[row] = talks.finish(one.prompt, one.sample, one.tokens)
                jobs.append(scorers.submit(score, one, row))
                yield one

        completions = rollout.stream(
            session.model, settings, session.base, adapter, encoded, [problem.id for problem in of_prompts], seed,
            sizes or engine.from_config(config.rollout), respond=talks.respond if talks else None, counts=counts, longest=data.length,
        )  # fmt: skip
        samples = rollout.collect(session.model, settings, tokens, lengths, passing(completions))
        sampled = time.monotonic_ns()
    counts["waited_ns"] += time.monotonic_ns() - sampled
    for job in jobs:
        job.result()  # raises what it raised
    if session.judge is not None:
        placed, end = rollout.place(session.model, samples), session.tokenizer.stop_ids[0]
        scores = scalar.score_all(session.model, session.base, session.judge, placed, end, config.optimizer.microbatch_tokens)
        outcomes = [with_part(config.reward, o, "model", float(x)) for o, x in zip(outcomes, scores.reshape(-1))]
    return Played(samples, problems, texts, outcomes, episodes)
