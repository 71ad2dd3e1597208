"""The advantage stage: from the rewards of a group to what each completion is worth against the others."""

import numpy as np


def group_normalized(rewards: np.ndarray, eps: float) -> np.ndarray:
    """GRPO (Shao et al. 2024, arXiv:2402.03300): (r - mean) / (std + eps) over each prompt's completions.

    Args:
        rewards: [P, G] f32.
        eps: > 0; added to the standard deviation, in units of reward.

    Returns:
        [P, G] f32; exactly zero where all rewards of a group are equal.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rollout.group: found rewards of shape {rewards.shape}, need [P, G] with G of at least 2")
    centered = rewards - rewards.mean(1, keepdims=True)
    mixed = np.ptp(rewards, 1, keepdims=True) > 0  # equal rewards may differ from their rounded mean
    return np.where(mixed, centered / (rewards.std(1, keepdims=True) + eps), 0.0).astype(np.float32)
