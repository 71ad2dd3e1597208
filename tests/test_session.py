"""What a run starts from: what can be told without weights is told before they are read."""

import pytest

from rl_adapter import config as configs
from rl_adapter import session as sessions
from rl_adapter.hub import load


def test_everything_that_headers_tell_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    """Ranks, prompts, kinds and stop texts: a large model takes long to load, and a typo must not cost that."""
    monkeypatch.setattr(load, "load", lambda *_: pytest.fail("weights were read"))
    refused = {
        "adapter.experts.rank": (200, "adapter.experts.rank: found 200, need at most 128"),
        "data.train": (("chain",), "data.train: found 'chain'"),
        "data.max_prompt_tokens": (2, "data.max_prompt_tokens: found 2"),
        "data.chat": (True, "template"),
        "rollout.stop": (("12",), "rollout.stop: found '12', which is 2 tokens"),
    }
    small = {"rollout.max_new_tokens": 16, "data.train_size": 30, "data.eval_size": 30, "eval.examples": 30}
    for field, (value, message) in refused.items():
        config = configs.override(configs.default(), small | {field: value})
        with pytest.raises(ValueError, match=message):
            sessions.open_session(config, "train", "eval")
