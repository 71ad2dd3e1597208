"""The advantage stage: from what completions earned to what each of their tokens is worth, on the host.

Estimators take rewards [P, G] of whole completions, `mask` [P, G, C] of the tokens that the policy sampled, and rewards of tokens
[P, G, C] where there are any (a KL, say), and give [P, G, C] f32, 0 outside of the mask.
"""

import numpy as np

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "distill")
OF_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")  # need more than one completion of a prompt


def mixed(rewards: np.ndarray) -> np.ndarray:
    """[P, G] -> [P] bool: which prompts' completions differ in reward. Of the others a group's estimator makes exactly nothing."""
    return np.ptp(rewards, 1) > 0


def of_group(estimator: str, rewards: np.ndarray, eps: float) -> np.ndarray:
    """[P, G] -> [P, G], each against the others of its prompt; exactly 0 where all are equal (equal rewards may differ from their rounded
    mean).

    grpo     (r - mean) / (std + eps) (Shao et al. 2024, arXiv:2402.03300)
    dr_grpo, reinforce_pp_baseline   r - mean (Liu et al. 2025, arXiv:2503.20783; the latter is normalized over the batch after)
    rloo     r - mean of the others (Ahmadian et al. 2024, arXiv:2402.14740)
    """
    g_ = rewards.shape[1]
    if g_ < 2:
        raise ValueError(f"rollout.group: found {g_}, need at least 2 for {estimator}, which holds completions against the others")
    centered = rewards - rewards.mean(1, keepdims=True)
    if estimator == "grpo":
        centered = centered / (rewards.std(1, keepdims=True) + eps)
    elif estimator == "rloo":
        centered = centered * g_ / (g_ - 1)
    return np.where(mixed(rewards)[:, None], centered, 0.0)


def normalized(values: np.ndarray, mask: np.ndarray, eps: float) -> np.ndarray:
    """(v - mean) / (std + eps) over all tokens of the mask."""
    there = values[mask]
    if not there.size or np.ptp(there) == 0:
        return np.zeros_like(values)
    return np.where(mask, (values - there.mean()) / (there.std() + eps), 0.0)


def to_go(rewards: np.ndarray, gamma: float, mask: np.ndarray) -> np.ndarray:
    """What each token of the mask and those after it earn, discounted by `gamma` a sampled token: token rewards [P, G, C] -> [P, G, C]."""
    return gae(rewards, np.zeros_like(rewards), mask, gamma, 1.0)


def gae(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438), all [P, G, C]. What an environment added between two
    sampled tokens is a part of the step between them: neither discounted nor valued. After the last one nothing is expected."""
    out = np.zeros(rewards.shape)
    ahead, after = np.zeros(rewards.shape[:2]), np.zeros(rewards.shape[:2])  # value and advantage of the next sampled token
    for t in range(rewards.shape[2] - 1, -1, -1):
        there = mask[..., t]
        delta = rewards[..., t] + gamma * ahead - values[..., t]
        after = np.where(there, delta + gamma * lam * after, after)
        ahead = np.where(there, values[..., t], ahead)
        out[..., t] = np.where(there, after, 0.0)
    return out


def at_last(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Rewards [P, G] as those of each completion's last sampled token: [P, G, C]."""
    c_ = mask.shape[2]
    last = c_ - 1 - np.argmax(mask[..., ::-1], -1)
    return np.where(mask & (np.arange(c_) == last[..., None]), rewards[..., None], 0.0)


def estimate(
    estimator: str,
    rewards: np.ndarray,
    mask: np.ndarray,
    token_rewards: np.ndarray | None = None,
    values: np.ndarray | None = None,
    eps: float = 1e-4,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> np.ndarray:
    """Advantages [P, G, C].

    grpo, dr_grpo, rloo     `of_group`; rewards of tokens are summed into those of completions
    reinforce_pp            rewards to go, normalized over the batch's tokens (Hu 2025, arXiv:2501.03262)
    reinforce_pp_baseline   of groups, then normalized over the batch's tokens (there); rewards of tokens are added to go
    gae                     `gae` with a critic's `values` [P, G, C], normalized over the batch's tokens
    distill                 each token's own reward: the log-ratio of teacher to student (Gu et al. 2023, arXiv:2306.08543)
    """
    of_tokens = np.zeros(mask.shape) if token_rewards is None else np.where(mask, token_rewards, 0.0)
    rewards = np.asarray(rewards, np.float64)
    if estimator in ("grpo", "dr_grpo", "rloo"):
        out = np.where(mask, of_group(estimator, rewards + of_tokens.sum(-1), eps)[..., None], 0.0)
    elif estimator == "reinforce_pp":
        out = normalized(to_go(at_last(rewards, mask) + of_tokens, gamma, mask), mask, eps)
    elif estimator == "reinforce_pp_baseline":
        out = np.where(mask, of_group(estimator, rewards, eps)[..., None] + to_go(of_tokens, gamma, mask), 0.0)
        out = normalized(out, mask, eps)
    elif estimator == "gae":
        if values is None:
            raise ValueError("advantage.estimator: found 'gae' without a critic's values, need them")
        out = normalized(gae(at_last(rewards, mask) + of_tokens, np.where(mask, values, 0.0), mask, gamma, lam), mask, eps)
    elif estimator == "distill":
        out = of_tokens
    else:
        raise ValueError(f"advantage.estimator: found {estimator!r}, need one of {', '.join(ESTIMATORS)}")
    return out.astype(np.float32)


def overlong(lengths: np.ndarray, longest: int, buffer: int, penalty: float) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): 0 up to `longest - buffer` tokens, falling in a line to -penalty at
    `longest`; lengths [P, G] -> [P, G]."""
    if not buffer:
        return np.zeros(lengths.shape)
    return -penalty * np.clip((lengths - (longest - buffer)) / buffer, 0.0, 1.0)


def returns(
    rewards: np.ndarray, mask: np.ndarray, token_rewards: np.ndarray | None, values: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """What a critic should have said, [P, G, C]: its `values` plus the advantages over them."""
    of_tokens = np.zeros(mask.shape) if token_rewards is None else np.where(mask, token_rewards, 0.0)
    values = np.where(mask, values, 0.0)
    return gae(at_last(rewards, mask) + of_tokens, values, mask, gamma, lam) + values
