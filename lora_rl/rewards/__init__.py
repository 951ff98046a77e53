"""Rewards: verifiers that turn a completion into a value and a reason, and fail closed. Start with `Scorer`."""

from lora_rl.rewards.exact_match import exact_match
from lora_rl.rewards.scorer import Scorer
from lora_rl.rewards.types import RewardError, RewardReason, RewardResult, Score, ScoreRequest

__all__ = ["RewardError", "RewardReason", "RewardResult", "Score", "ScoreRequest", "Scorer", "exact_match"]
