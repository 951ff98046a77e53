"""The remaining sections, and `RunConfig`: the whole configuration of a run."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from lora_rl.config.schema.base import Precision, Section
from lora_rl.config.schema.data import DataConfig, SFTConfig
from lora_rl.config.schema.grpo import GRPOConfig, LossConfig
from lora_rl.config.schema.policy import PolicyConfig
from lora_rl.config.schema.reward import RewardConfig


class WandbConfig(Section):
    """`logger.wandb`."""

    project: str = Field("lora-rl", description="Weights & Biases project.")
    entity: str | None = Field(None, description="User or team that the project belongs to; null: your default.")
    name: str | None = Field(None, description="Name of the run; null: the run folder's name.")
    mode: Literal["online", "offline"] | None = Field(
        None, description="offline: into the run folder, for `wandb sync`; null: as WANDB_MODE says, else online."
    )


class MlflowConfig(Section):
    """`logger.mlflow`."""

    experiment_name: str = Field("lora-rl", description="MLflow experiment.")
    run_name: str | None = Field(None, description="Name of the run; null: the run folder's name.")
    tracking_uri: str | None = Field(
        None, description="Server or store; null: as MLFLOW_TRACKING_URI says, else mlruns/ in the run folder."
    )


class LoggerConfig(Section):
    """`logger`: the run folder, trackers and the console. metrics.jsonl is always written."""

    log_dir: str = Field(
        "results/run",
        description="Run folder. A file that does not set it gets results/<name of the file>.",
    )
    tensorboard_enabled: bool = Field(True, description="Write TensorBoard events into the run folder.")
    wandb_enabled: bool = Field(False, description="Log to Weights & Biases; needs the extra `trackers`.")
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    mlflow_enabled: bool = Field(False, description="Log to MLflow; needs the extra `trackers`.")
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
    monitor_gpus: bool = Field(
        False, description="Record how busy this machine is: its GPUs (gpu/*), its CPU and memory (host/*)."
    )
    log_rollouts: bool = Field(False, description="Write every completion of a training step to rollouts.jsonl.")
    log_val_samples: bool = Field(
        True, description="Write every completion of a validation to val_samples.jsonl, which report.html shows."
    )
    num_val_samples_to_print: NonNegativeInt = Field(4, description="Completions in a table on the terminal.")
    sample_table_period: NonNegativeInt = Field(
        10, description="Steps between tables of completions, those of a validation if there was one; 0: never."
    )
    console: Literal["auto", "plain", "quiet"] = Field(
        "auto", description="Console output; auto: a live display on a terminal, plain lines elsewhere."
    )


class CheckpointingConfig(Section):
    """`checkpointing`."""

    enabled: bool = Field(False, description="Save checkpoints.")
    checkpoint_dir: str | None = Field(None, description="Folder of the checkpoints; null: <log_dir>/checkpoints.")
    metric_name: str | None = Field(None, description="Metric that ranks checkpoints; null: keep the latest.")
    higher_is_better: bool = Field(True, description="Whether larger values of that metric are better.")
    keep_top_k: PositiveInt | None = Field(3, description="Checkpoints kept; null: all.")
    save_period: PositiveInt = Field(20, description="Steps between checkpoints.")
    checkpoint_must_save_by: str | None = Field(
        None, description="Save and stop after this run time, days:hours:minutes:seconds; null: no limit."
    )


class ClusterConfig(Section):
    """`cluster`: machines, Ray, time limits."""

    platform: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where to compute; auto: cuda if this machine has an NVIDIA GPU, else cpu."
    )
    gpus_per_node: PositiveInt | None = Field(
        None,
        description="GPUs used per node, on the CPU Megatron ranks per node; null: all GPUs of this machine, "
        "on the CPU tp x pp.",
    )
    gpu_memory_gib: PositiveFloat | None = Field(
        None, description="Memory of one GPU in GiB, for the memory plan; null: what nvidia-smi says on this machine."
    )
    num_nodes: PositiveInt = Field(1, description="Nodes used, those of the engines included.")
    address: str | None = Field(
        None,
        description="Running Ray cluster to use, host:port, or auto for that of this machine; null: start a local Ray.",
    )
    num_cpus: PositiveInt | None = Field(None, description="Cores to use per node; null: all that are available.")
    startup_timeout_s: PositiveFloat = Field(
        300.0, description="Seconds until every process must be ready; longer ends the job."
    )
    heartbeat_timeout_s: PositiveFloat = Field(
        120.0, description="Seconds after which an engine that makes no step, or does not answer, counts as hung."
    )
    max_engine_restarts: NonNegativeInt = Field(
        3, description="New processes in a row for an engine that dies or hangs; 0: the job ends with the first."
    )
    step_timeout_s: PositiveFloat = Field(
        1800.0, description="Seconds one phase of a step may take; longer ends the job."
    )


class RunConfig(Section):
    """The whole configuration of a run. Null keys that mean "as that other key" have a property below."""

    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    loss_fn: LossConfig = Field(default_factory=LossConfig)
    policy: PolicyConfig
    data: DataConfig = Field(default_factory=DataConfig)
    sft: SFTConfig = Field(default_factory=SFTConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    @property
    def sequences_per_step(self) -> int:
        """Completions sampled per step: prompts x generations."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def train_global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.policy.train_global_batch_size or self.sequences_per_step

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of a whole run of `grpo.max_num_steps` steps, at most."""
        return self.grpo.max_num_steps * max(1, self.sequences_per_step // self.train_global_batch_size)

    @property
    def lr_decay_iters(self) -> int:
        """Optimizer step at which the learning rate has decayed to `min_lr`."""
        return self.policy.megatron_cfg.scheduler.lr_decay_iters or self.num_optimizer_steps

    @property
    def engine_precision(self) -> Precision:
        """Type of the engine's weights."""
        return self.policy.generation.vllm_cfg.precision or self.policy.precision

    @property
    def engine_max_model_len(self) -> int:
        """Longest sequence of an engine, in tokens."""
        return self.policy.generation.vllm_cfg.max_model_len or self.policy.max_total_sequence_length

    @property
    def data_seed(self) -> int:
        """Seed of the order of prompts."""
        return self.grpo.seed if self.data.seed is None else self.data.seed
