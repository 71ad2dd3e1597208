"""GRPO on Kimi-K2-Thinking, its experts in INT4 as released.

    python launch.py --config=experiments/kimi_k2_thinking.py:/path/to/checkpoint --workdir=runs/kimi_k2_thinking

Hardware: 8 x H200. Memory: 105.4 GB of the 141 GB of each, by `python launch.py --mode=plan --config=experiments/kimi_k2_thinking.py`.
Not run on that hardware: the figure is arithmetic. Without a path, planning reads experiments/models, facts of the release.
"""

import pathlib

from ml_collections import ConfigDict

from rl_adapter import config as config_lib


def get_config(model: str = "") -> ConfigDict:
    """`model`: directory of the checkpoint; '' gives what planning needs, the release's config.json without weights."""
    c = config_lib.default().unlock()
    c.model = model or str(pathlib.Path(__file__).parent / "models" / "kimi_k2_thinking")
    c.steps = 200
    c.mesh.data = 1
    c.mesh.expert = 2
    c.mesh.model = 4  # splits attention and the head too, which would take a copy on every device
    c.quantize.linear = "int8"  # attention and shared experts, which the release has in bfloat16
    c.data.chat = True
    c.data.max_prompt_tokens = 128
    c.rollout.prompts = 16
    c.rollout.group = 8
    c.rollout.max_new_tokens = 256
    c.optimizer.microbatch_tokens = 1  # as few as a prompt with its group may need
    c.optimizer.learning_rate = 1e-5  # about ten times what all weights would take
    c.optimizer.warmup_steps = 5
    c.adapter.rank = 8
    c.adapter.alpha = 16.0
    c.adapter.shared_a = True  # a rank counts 384 times
    c.adapter.experts.rank = 1
    c.adapter.experts.alpha = 2.0
    c.loss.measure_kl = False
    c.eval.batch = 16
    return c.lock()
