"""A sweep over the main job: two seeds by two adapter ranks.

    python launch.py --mode=sweep --config=experiments/quickstart_sweep.py

Four quickstarts' time; ends in runs/quickstart_sweep/sweep.csv. `--config.steps=5` is a quick look at how it goes.
"""

import itertools
from typing import Any

from ml_collections import ConfigDict

from experiments import quickstart


def get_config() -> ConfigDict:
    return quickstart.get_config()


def get_hyper() -> list[dict[str, Any]]:
    return [{"seed": seed, "adapter.rank": rank} for seed, rank in itertools.product((0, 1), (4, 16))]
