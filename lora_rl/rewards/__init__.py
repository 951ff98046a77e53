"""Rewards: verifiers that turn a completion into a value and a reason, and fail closed."""

from lora_rl.rewards.exact_match import exact_match, score_batch
from lora_rl.rewards.types import RewardReason, RewardResult

__all__ = ["RewardReason", "RewardResult", "exact_match", "score_batch"]
