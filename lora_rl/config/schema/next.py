"""Section `grpo.next`: extrapolating the trajectory of the adapters, accepted by measurement."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from lora_rl.config.schema.base import Section

# The published method: one jump, no measurement. What a preset does not name has its own default.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "interval": 10,
        "snapshots": 15,
        "horizon": 5,
        "alphas": [1.5],
        "max_jumps": 1,
        "min_backtest_cos": None,
        "damping": False,
        "write_back": "merge",
        "predictor": {"type": "nextmlp", "hidden": 256, "learning_rate": 2e-5, "epochs": 1000},
        "gate": {"enabled": False},
        "watch": {"patience": 0},
    },
}


class NextPredictorConfig(Section):
    """`grpo.next.predictor`: what proposes the next change of the weights."""

    type: Literal["auto", "nextmlp", "saturating", "linear", "scale", "random"] = Field(
        "auto",
        description="nextmlp: networks trained on the trajectory. saturating: curves that level off. linear: the line "
        "through it. scale: the way so far, stretched; random: any direction; both null models. auto: the best of the "
        "first four in the back-test.",
    )
    hidden: PositiveInt = Field(256, description="nextmlp: width of the encodings.")
    learning_rate: PositiveFloat = Field(1e-3, description="nextmlp: learning rate.")
    epochs: PositiveInt = Field(300, description="nextmlp: passes over the trajectory's examples.")


class NextGateConfig(Section):
    """`grpo.next.gate`: measuring a jump before it is taken."""

    enabled: bool = Field(True, description="Take a jump only if it gains reward on prompts kept for this.")
    # A normal bound for the mean needs some prompts.
    num_prompts: Annotated[int, Ge(16)] = Field(
        128, description="Training prompts set aside for the gate: neither trained nor validated on."
    )
    num_generations: PositiveInt = Field(4, description="Completions per prompt, for every alpha and without a jump.")
    confidence: Annotated[float, Gt(0.5), Le(0.999)] = Field(
        0.9, description="Level of the one-sided bound on the mean gain, for all alphas together."
    )
    tolerance: NonNegativeFloat = Field(
        0.01, description="The lower bound of the mean gain in reward must be above minus this."
    )
    max_kl: PositiveFloat = Field(0.2, description="Largest KL divergence per token that a jump may cause, in nats.")
    max_length_ratio: Annotated[float, Gt(1)] = Field(
        1.25, description="Completions may become at most this many times as long, or as short."
    )
    max_entropy_change: PositiveFloat = Field(0.5, description="Largest change of the entropy per token, in nats.")
    max_norm: PositiveFloat = Field(
        1.0, description="Longest jump, as a share of the way from the oldest recorded weights to the current ones."
    )


class NextWatchConfig(Section):
    """`grpo.next.watch`: the training reward after a jump, and the way back."""

    patience: NonNegativeInt = Field(
        8, description="Steps after a jump within which it is undone if the training reward has fallen; 0: never."
    )
    tolerance: NonNegativeFloat = Field(
        0.02, description="How far the mean reward of these steps may lie below that of as many steps before."
    )


class NextConfig(Section):
    """`grpo.next`: jumps ahead along the trajectory of the adapters (NExt), taken if measurement supports them."""

    enabled: bool = Field(False, description="Record the trajectory and propose jumps.")
    preset: Literal["default", "paper"] = Field(
        "default",
        description="Values of keys of this section that are not set: paper is the published method, one jump that "
        "nothing measures.",
    )
    interval: PositiveInt = Field(5, description="Steps between two snapshots of the adapters.")
    snapshots: Annotated[int, Ge(4)] = Field(
        9, description="Snapshots, after the first, that the trajectory must have before a jump is proposed."
    )
    horizon: PositiveInt = Field(3, description="Snapshots that are predicted ahead.")
    alphas: list[PositiveFloat] = Field(
        [1.0, 2.0], description="Lengths of the jump that are tried, in units of the prediction."
    )
    max_jumps: PositiveInt | None = Field(None, description="Jumps after which no more are proposed; null: no limit.")
    retry_after: PositiveInt = Field(3, description="Snapshots between a proposal that was refused and the next.")
    backtest_folds: PositiveInt = Field(3, description="Newest snapshots that the back-test predicts from.")
    min_backtest_cos: Annotated[float, Ge(-1), Le(1)] | None = Field(
        0.3, description="Smallest cosine between predicted and actual changes for a proposal; null: any."
    )
    damping: bool = Field(True, description="Shorten proposals by the factor that the back-test found best.")
    write_back: Literal["adapter", "merge"] = Field(
        "adapter",
        description="adapter: into what is trained: A and B, truncated to their rank, or SVD-LoRA's singular values, "
        "exactly. merge: into the frozen weights, exactly, which must be float32.",
    )
    predictor: NextPredictorConfig = Field(default_factory=NextPredictorConfig)
    gate: NextGateConfig = Field(default_factory=NextGateConfig)
    watch: NextWatchConfig = Field(default_factory=NextWatchConfig)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset", "default")
        return _filled(given, PRESETS.get(preset, {}) if isinstance(preset, str) else {})

    @property
    def is_backtested(self) -> bool:
        """Whether proposals are compared with the past before they are made."""
        return self.predictor.type == "auto" or self.min_backtest_cos is not None or self.damping

    @property
    def steps_after_jump(self) -> int:
        """The fewest steps that must be left for a jump to be proposed."""
        return max(self.watch.patience, 1)

    @property
    def least_snapshots(self) -> int:
        """The fewest snapshots with which a proposal, and its back-test, can be made."""
        learnt = self.predictor.type in ("auto", "nextmlp")
        if not self.is_backtested:
            return self.horizon + (2 if learnt else 0)
        return 2 * self.horizon + 1 if learnt else self.horizon + 3


def _filled(given: dict[str, Any], preset: dict[str, Any]) -> dict[str, Any]:
    """`given`, with what it lacks from the preset, section by section."""
    filled = dict(preset)
    for key, value in given.items():
        own = preset.get(key)
        filled[key] = _filled(value, own) if isinstance(own, dict) and isinstance(value, dict) else value
    return filled
