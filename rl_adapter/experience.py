"""A step's experience: prompts that are drawn, completed and scored, and drawn again where nothing can be learned from them."""

import collections
import dataclasses
import time

import numpy as np

from rl_adapter import advantage, evaluate, play, runtime
from rl_adapter import session as sessions
from rl_adapter.play import Played


@dataclasses.dataclass(frozen=True)
class Experience:
    """What a step learns from."""

    played: Played
    version: int  # steps that the adapter which sampled had learned from
    drawn: Played  # all that the step drew, in order, of which `played` is a part
    kept: np.ndarray  # [P] which prompts of it
    seeds: np.ndarray  # of each prompt of `drawn`
    tries: int
    counts: dict[str, int]  # of the engine's work
    sampling_s: float
    waiting_s: float  # for rewards, once all was sampled


def gather(config, session, data, batches, adapter, version: int, step: int) -> tuple[Experience, dict]:
    """A step's experience by the raw `adapter`, and the data's cursor after it.

    With `rollout.tries` above 1, prompts whose completions all earn the same are replaced by more that are drawn, in so many batches at
    most (dynamic sampling, DAPO, arXiv:2503.14476); what is still missing then is filled up with them.
    """
    started, compiled = time.monotonic(), runtime.compilations()
    counts, prepared = collections.Counter(), evaluate.prepare(session.model, adapter)
    settings, wanted, found, seeds = sessions.sampling(config, session), config.rollout.prompts, [], []
    # A prompt that comes again in a later epoch gets other noise: the step is part of the seed.
    seed, mixed = (config.seed * 1_000_003 + step) % 2**31, 0
    for attempt in range(config.rollout.tries):
        indices = next(batches)
        seeds += [(seed + attempt * 7_368_787) % 2**31] * wanted
        found.append(play.play(config, session, data, indices, prepared, settings, seeds[-1], counts=counts))
        rewards = found[-1].rewards
        batches.observe(indices, np.clip(rewards, 0, 1).mean(1))  # before the cursor is taken, or a resumed run would miss it
        mixed += int(advantage.mixed(rewards).sum())
        if mixed >= wanted:
            break
    cursor, drawn = batches.get_state(), play.joined(found)
    # The first of those that differ; then, should they not be enough, the first of the others.
    order = np.argsort(~advantage.mixed(drawn.rewards), kind="stable") if config.rollout.tries > 1 else np.arange(wanted)
    kept = np.sort(order[:wanted])
    counts["compilations"] = runtime.compilations() - compiled
    waited = counts.pop("waited_ns") / 1e9
    took = time.monotonic() - started - waited
    return Experience(drawn.rows(kept), version, drawn, kept, np.array(seeds), len(found), counts, took, waited), cursor
