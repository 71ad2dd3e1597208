"""Problems drawn from the generators of this package: which kinds there are, and how a set of them is made."""

import random

from rl_adapter.environments import arithmetic, fewshot, games
from rl_adapter.types import Problem

POOLS = {  # kind -> (kind, split) -> problems
    **dict.fromkeys(arithmetic.KINDS, arithmetic.pool),
    **dict.fromkeys(fewshot.KINDS, fewshot.pool),
    "guess": games.guess_pool,
    "vault": games.vault_pool,
}


def problems(kinds: tuple[str, ...], size: int, seed: int, split: str) -> list[Problem]:
    """Draws distinct problems, as many of each kind as can be, in an order that `seed` decides.

    Splits are made by question: no question of one split ever occurs in another, whatever the seeds.

    Args:
      kinds: names of `POOLS`.
      size: how many problems in all.
      seed: chooses the problems and their order.
      split: "pretrain", "train" or "eval".
    """
    unknown = sorted(set(kinds) - POOLS.keys())
    if unknown or not kinds:
        raise ValueError(f"kinds: found {unknown or 'none'}, need some of {sorted(POOLS)}")
    if size < 1:
        raise ValueError(f"size: found {size}, need at least 1")
    rng, chosen = random.Random(seed), []
    for n, kind in enumerate(kinds):
        wanted = size // len(kinds) + (n < size % len(kinds))
        available = POOLS[kind](kind, split)
        if wanted > len(available):
            raise ValueError(f"size: found {size} ({wanted} of kind {kind}), need at most {len(available)} of that kind in {split}")
        chosen += rng.sample(available, wanted)
    rng.shuffle(chosen)
    return chosen
