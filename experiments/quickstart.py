"""The main job: GRPO on the base that ships with the package.

    python launch.py

Hardware: 2 CPU cores. Duration: under 10 minutes after install. Expected: held-out greedy accuracy rises by 30 points or
more over the base, with mismatch and expert flips exactly 0 at every step.
"""

from ml_collections import ConfigDict

from rl_adapter import config as config_lib


def get_config() -> ConfigDict:
    c = config_lib.default().unlock()
    c.steps = 20
    c.data.max_prompt_tokens = 16
    c.data.train_size = 900  # 300 of each kind
    c.data.eval_size = 450
    c.rollout.max_new_tokens = 44
    c.eval.examples = 450
    c.eval.batch = 150
    c.remat = False  # a step is a fifth faster, and memory is no concern here
    c.optimizer.learning_rate = 2e-3
    c.optimizer.warmup_steps = 2
    c.checkpoint.every = 10
    return c.lock()
