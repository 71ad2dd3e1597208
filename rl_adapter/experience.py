"""A step's experience: prompts -> completions, environments' answers, rewards; scored one by one while the device decodes the others."""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import jax
import numpy as np

from rl_adapter import advantage, engine, evaluate, microbatch, rollout, runtime
from rl_adapter import session as sessions
from rl_adapter.data import prompts
from rl_adapter.types import Outcome, Problem, Rollout


@dataclasses.dataclass(frozen=True)
class Played:
    """Completions of some prompts on the host, and what they earned; B = P * G of each list."""

    samples: Rollout
    problems: list[Problem]
    texts: list[str]
    outcomes: list[Outcome]

    @property
    def rewards(self) -> np.ndarray:
        """[P, G] f32."""
        return np.array([o.reward for o in self.outcomes], np.float32).reshape(self.samples.lengths.shape)

    def rows(self, prompts_: np.ndarray) -> "Played":
        group = self.samples.lengths.shape[1]
        of = lambda values: [values[p * group + g] for p in prompts_ for g in range(group)]
        return Played(microbatch.take(self.samples, prompts_), of(self.problems), of(self.texts), of(self.outcomes))


@dataclasses.dataclass(frozen=True)
class Experience(Played):
    """What a step learns from."""

    seed: int
    version: int  # updates' steps that the adapter which sampled had seen
    discarded: Played | None  # drawn by a step, and left out: their completions do not differ in reward
    tries: int
    counts: dict[str, int]  # of the engine's work
    sampling_s: float
    waiting_s: float  # for rewards, once all was sampled


def play(config, session, data, indices, adapter, settings, seed: int, judge, counts: collections.Counter) -> Played:
    """Complete the problems `indices` of `data` by the prepared `adapter` (None: the base), and score each completion as soon as it is
    finished. Training and evaluation both come here."""
    group = settings.group
    problems = [data.problems[i] for i in indices for _ in range(group)]
    texts, outcomes = [""] * len(problems), [None] * len(problems)
    tokens, lengths = prompts.batch(data.encoded, indices, data.length, session.tokenizer.pad_id)

    def score(one, row: int) -> None:
        texts[row] = session.tokenizer.decode(one.tokens.tolist())
        outcomes[row] = judge.score(problems[row], texts[row], truncated=not one.stopped)

    jobs = []
    with futures.ThreadPoolExecutor(judge.workers) as scorers:

        def passing(completions: Iterator) -> Iterator:
            for one in completions:
                jobs.append(scorers.submit(score, one, one.prompt * group + one.sample))
                yield one

        completions = rollout.stream(
            session.model, settings, session.base, adapter, [data.encoded[i] for i in indices], [data.problems[i].id for i in indices],
            seed, engine.from_config(config.rollout), counts=counts, longest=data.length,
        )  # fmt: skip
        samples = rollout.collect(session.model, settings, tokens, lengths, passing(completions))
        sampled = time.monotonic()
    counts["waited_ns"] += time.monotonic_ns() - int(sampled * 1e9)
    for job in jobs:
        job.result()  # raises what it raised
    return Played(samples, problems, texts, outcomes)


def gather(config, session, data, batches, adapter, version: int, step: int, judge) -> tuple[Experience, dict]:
    """A step's experience by the raw `adapter`, and the data's cursor after it.

    With `rollout.tries` above 1, prompts whose completions all earn the same are replaced by more that are drawn, in so many batches at
    most (dynamic sampling, DAPO, arXiv:2503.14476); what is still missing then is filled up with them.
    """
    started, compiled = time.monotonic(), runtime.compilations()
    counts, prepared = collections.Counter(), evaluate.prepare(session.model, adapter)
    settings, wanted, found = sessions.sampling(config, session), config.rollout.prompts, []
    # A prompt that comes again in a later epoch gets other noise: the step is part of the seed.
    seed = (config.seed * 1_000_003 + step) % 2**31
    mixed = 0
    for attempt in range(config.rollout.tries):
        indices = next(batches)
        found.append(play(config, session, data, indices, prepared, settings, (seed + attempt * 7_368_787) % 2**31, judge, counts))
        rewards = found[-1].rewards
        batches.observe(indices, np.clip(rewards, 0, 1).mean(1))  # before the cursor is taken, or a resumed run would miss it
        mixed += int(advantage.mixed(rewards).sum())
        if mixed >= wanted:
            break
    cursor = batches.get_state()
    whole = joined(found)
    # The first of those that differ; then, should they not be enough, the first of the others.
    order = np.argsort(~advantage.mixed(whole.rewards), kind="stable") if config.rollout.tries > 1 else np.arange(wanted)
    chosen, rest = np.sort(order[:wanted]), np.sort(order[wanted:])
    counts["compilations"] = runtime.compilations() - compiled
    kept, waited = whole.rows(chosen), counts.pop("waited_ns") / 1e9
    return Experience(
        kept.samples, kept.problems, kept.texts, kept.outcomes, seed, version, whole.rows(rest) if len(rest) else None, len(found), counts,
        time.monotonic() - started - waited, waited,
    ), cursor  # fmt: skip


def joined(parts: list[Played]) -> Played:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]
    join: Callable = lambda path, *xs: np.concatenate(xs, 1 if microbatch.is_behind(path) else 0)
    samples = jax.tree_util.tree_map_with_path(join, *(p.samples for p in parts))
    lists = (sum((getattr(p, name) for p in parts), []) for name in ("problems", "texts", "outcomes"))
    return Played(samples, *lists)
