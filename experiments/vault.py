"""A tool that must be learnt: the base that ships asks a vault for what lies in it.

    python launch.py --config=experiments/vault.py --workdir=runs/vault

The prompt is a key of four digits ("vault 4711? "), the answer two digits that a keyed hash makes of it, so nothing but the vault's tool
can tell. A turn that ends in "=" is the call, and the two digits come right after it: "1+1=" "93" " Answer: 93". The base ends some 9 % of
its turns so, by the habit of working sums, and is right in 3 to 10 %; to ask is all that there is to learn, for held-out keys too.
Hardware: 2 CPU cores. Duration: a minute after compiling. Expected: reward 1.0 from about step 15.
"""

from ml_collections import ConfigDict

from rl_adapter import config as config_lib


def get_config() -> ConfigDict:
    c = config_lib.default().unlock()
    c.steps = 20
    c.remat = False
    c.data.train = ("vault",)
    c.data.max_prompt_tokens = 16
    c.data.train_size = 1900
    c.data.eval_size = 256
    c.env.calls = "equals"
    c.env.max_turns = 2
    c.env.max_result_tokens = 8
    c.rollout.stop = ("=",)
    c.rollout.max_new_tokens = 24
    c.eval.batch = 128
    c.optimizer.learning_rate = 2e-3
    c.optimizer.warmup_steps = 2
    return c.lock()
