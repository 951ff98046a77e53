"""Every configuration key with its type, default, unit and meaning. Sections and names follow NeMo-RL."""

from lora_rl.config.schema.base import Section
from lora_rl.config.schema.generation import GenerationConfig, VllmConfig, WeightSyncConfig
from lora_rl.config.schema.grpo import AdvEstimatorConfig, AsyncGRPOConfig, GRPOConfig, LossConfig, RewardShapingConfig
from lora_rl.config.schema.policy import MegatronConfig, OptimizerConfig, PeftConfig, PolicyConfig, SchedulerConfig
from lora_rl.config.schema.run import (
    CheckpointingConfig,
    ClusterConfig,
    DataConfig,
    LoggerConfig,
    RewardConfig,
    RunConfig,
)

__all__ = [
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
    "OptimizerConfig",
    "PeftConfig",
    "PolicyConfig",
    "RewardConfig",
    "RewardShapingConfig",
    "RunConfig",
    "SchedulerConfig",
    "Section",
    "VllmConfig",
    "WeightSyncConfig",
]
