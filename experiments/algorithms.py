"""The algorithms as they were published, each a few fields of the config, on the base that ships with the package.

    python launch.py --config=experiments/algorithms.py:dapo --workdir=runs/dapo        one of them
    python launch.py --mode=sweep --config=experiments/algorithms.py --workdir=runs/algorithms --config.steps=12
    python -m experiments.learning_table runs/algorithms                                the sweep as a table, with intervals

Hardware: 2 CPU cores. Learning rates are of LoRA, and were not tuned for any of them. Where a step makes one update, all ratios are 1 when
it is made, so clips do nothing: set `optimizer.minibatches` or `epochs` for them to act. The clip of gspo is ten times as wide as the
paper's, whose steps make many updates.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments import quickstart
from rl_adapter import config as config_lib

SEEDS = 0, 1, 2
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"loss.aggregation": "sequence", "loss.kl": 0.01},
    "dr_grpo": {"advantage.estimator": "dr_grpo", "loss.aggregation": "constant", "optimizer.learning_rate": 4e-3},
    "dapo": {"loss.clip_high": 0.28, "rollout.tries": 3, "advantage.overlong_buffer": 8},
    "gspo": {
        "loss.kind": "gspo",
        "loss.aggregation": "sequence",
        "loss.clip_low": 3e-3,
        "loss.clip_high": 4e-3,
        "optimizer.minibatches": 2,
    },
    "cispo": {"loss.kind": "cispo", "loss.clip_low": 0.99, "loss.clip_high": 0.28},
    "rloo": {"advantage.estimator": "rloo", "loss.kl": 0.01, "loss.kl_in": "reward", "loss.kl_estimator": "k1"},
    "reinforce_pp": {"advantage.estimator": "reinforce_pp", "loss.kl": 0.01, "loss.kl_in": "reward", "loss.kl_estimator": "k1"},
    "reinforce_pp_baseline": {"advantage.estimator": "reinforce_pp_baseline", "loss.kl": 0.01, "loss.kl_estimator": "k2"},
    "ppo": {"advantage.estimator": "gae", "advantage.lam": 0.95, "optimizer.minibatches": 2, "critic.learning_rate": 4e-3},
    "online_dpo": {"loss.kind": "dpo", "loss.beta": 0.1, "loss.kl": 0.0},
}


def get_config(name: str = "grpo") -> ConfigDict:
    if name not in ALGORITHMS:
        raise ValueError(f"--config: found {name!r}, need one of {', '.join(ALGORITHMS)}")
    return config_lib.override(quickstart.get_config(), ALGORITHMS[name])


def get_hyper() -> list[dict[str, Any]]:
    """Every algorithm with every seed; what one of them does not say stays as in the quickstart."""
    plain = config_lib.flatten(quickstart.get_config())
    fields = {field: plain[field] for changes in ALGORITHMS.values() for field in changes}
    return [{"seed": seed} | fields | changes for changes in ALGORITHMS.values() for seed in SEEDS]
