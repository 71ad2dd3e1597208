"""GRPO on Qwen3-30B-A3B, whose bfloat16 linears become int8 on load.

    python launch.py --config=experiments/qwen3_30b_a3b.py:/path/to/checkpoint --workdir=runs/qwen3_30b_a3b

Hardware: 8 x H200. Memory: 53.5 GB of the 141 GB of each, by `python launch.py --mode=plan --config=experiments/qwen3_30b_a3b.py`.
Not run on that hardware: the figure is arithmetic. Without a path, planning reads experiments/models, facts of the release.
"""

import pathlib

from ml_collections import ConfigDict

from rl_adapter import config as config_lib


def get_config(model: str = "") -> ConfigDict:
    """`model`: directory of the checkpoint; '' gives what planning needs, the release's config.json without weights."""
    c = config_lib.default().unlock()
    c.model = model or str(pathlib.Path(__file__).parent / "models" / "qwen3_30b_a3b")
    c.steps = 200
    c.mesh.data = 1
    c.mesh.expert = 8
    c.quantize.linear = "int8"
    c.data.chat = True
    c.data.max_prompt_tokens = 256
    c.rollout.prompts = 32
    c.rollout.group = 8
    c.rollout.max_new_tokens = 1024
    c.optimizer.microbatch_tokens = 1  # as few as a prompt with its group may need
    c.optimizer.learning_rate = 2e-5  # about ten times what all weights would take
    c.optimizer.warmup_steps = 5
    c.adapter.rank = 16
    c.adapter.alpha = 32.0
    c.adapter.shared_a = True  # a rank counts 128 times
    c.adapter.experts.rank = 4
    c.adapter.experts.alpha = 8.0
    c.loss.measure_kl = False
    c.eval.batch = 64
    return c.lock()
