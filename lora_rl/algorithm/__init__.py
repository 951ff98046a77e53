"""The algorithm as pure functions of tensors: advantages, KL, importance weights, losses, metrics, batching.

Nothing here logs, communicates, or knows about models, engines or configuration files. Needs torch only.
Read in this order: `shaping`, `advantages`, `batch_advantages` -> `settings`, `policy_terms`, `losses` (which use `kl`,
`importance`, `metrics`) -> `batching`.

Notation: B sequences, T token positions. pi is the current policy, pi_old the policy before this batch's first
update, pi_b the behaviour policy (the engine that sampled), pi_ref the frozen reference policy.
"""

from lora_rl.algorithm.advantages import GroupAdvantages, group_advantages, zero_variance_samples
from lora_rl.algorithm.batch_advantages import gdpo_advantages, reinforce_plus_plus_advantages
from lora_rl.algorithm.batching import (
    Row,
    num_microbatches_for_all,
    pad_microbatches,
    padded_tokens,
    row_length,
    shard_sequences,
    share_prompts,
    split_microbatches,
)
from lora_rl.algorithm.importance import ImportanceWeights, importance_weights
from lora_rl.algorithm.kl import kl_per_token
from lora_rl.algorithm.losses import LossOutput, policy_loss
from lora_rl.algorithm.metrics import METRICS, MetricSum, Normaliser, as_floats, finalise, merge
from lora_rl.algorithm.settings import POLICY_LOSSES, LossSettings, PolicyLossKind
from lora_rl.algorithm.shaping import overlong_penalty, sequence_kl

__all__ = [
    "METRICS",
    "POLICY_LOSSES",
    "GroupAdvantages",
    "ImportanceWeights",
    "LossOutput",
    "LossSettings",
    "MetricSum",
    "Normaliser",
    "PolicyLossKind",
    "Row",
    "as_floats",
    "finalise",
    "gdpo_advantages",
    "group_advantages",
    "importance_weights",
    "kl_per_token",
    "merge",
    "num_microbatches_for_all",
    "overlong_penalty",
    "pad_microbatches",
    "padded_tokens",
    "policy_loss",
    "reinforce_plus_plus_advantages",
    "row_length",
    "sequence_kl",
    "shard_sequences",
    "share_prompts",
    "split_microbatches",
    "zero_variance_samples",
]
