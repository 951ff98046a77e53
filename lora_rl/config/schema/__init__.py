"""Every configuration key with its type, default, unit and meaning. Sections and names follow NeMo-RL."""

from lora_rl.config.schema.base import Section
from lora_rl.config.schema.data import AdditionConfig, DataConfig, ReasoningGymConfig, ReasoningGymTask, SFTConfig
from lora_rl.config.schema.generation import GenerationConfig, VllmConfig, WeightSyncConfig
from lora_rl.config.schema.grpo import AdvEstimatorConfig, AsyncGRPOConfig, GRPOConfig, LossConfig, RewardShapingConfig
from lora_rl.config.schema.next import NextConfig, NextGateConfig, NextPredictorConfig, NextWatchConfig
from lora_rl.config.schema.policy import (
    MegatronConfig,
    OptimizerConfig,
    PeftConfig,
    PolicyConfig,
    SchedulerConfig,
    SvdConfig,
)
from lora_rl.config.schema.reward import RewardConfig, VerifierConfig
from lora_rl.config.schema.run import (
    CheckpointingConfig,
    ClusterConfig,
    LoggerConfig,
    RunConfig,
)

__all__ = [
    "AdditionConfig",
    "AdvEstimatorConfig",
    "AsyncGRPOConfig",
    "CheckpointingConfig",
    "ClusterConfig",
    "DataConfig",
    "GRPOConfig",
    "GenerationConfig",
    "LoggerConfig",
    "LossConfig",
    "MegatronConfig",
    "NextConfig",
    "NextGateConfig",
    "NextPredictorConfig",
    "NextWatchConfig",
    "OptimizerConfig",
    "PeftConfig",
    "PolicyConfig",
    "ReasoningGymConfig",
    "ReasoningGymTask",
    "RewardConfig",
    "RewardShapingConfig",
    "RunConfig",
    "SFTConfig",
    "SchedulerConfig",
    "Section",
    "SvdConfig",
    "VerifierConfig",
    "VllmConfig",
    "WeightSyncConfig",
]
