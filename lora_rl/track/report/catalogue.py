"""Which metrics have a chart of their own, under which heading, and what is said of them."""

from dataclasses import dataclass

from lora_rl.track import names


@dataclass(frozen=True)
class Shown:
    """How one metric is drawn.

    Attributes:
        metric: its name.
        title, unit, note: of the chart.
        minus: taken off every value, so that an axis around 1 stays readable.
        dots: it is measured now and then, not at every step.
        zero: the axis begins at zero.
        constant: drawn too when it never changes.
    """

    metric: str
    title: str
    unit: str = ""
    note: str = ""
    minus: float = 0.0
    dots: bool = False
    zero: bool = False
    constant: bool = True


RESULT = (
    Shown(names.ACCURACY, "Held-out accuracy", "fraction right", dots=True),
    Shown(names.REWARD, "Reward", "mean of the training rollouts"),
)
LEARNING = (
    Shown(names.NLL, "Loss", "nats per token"),
    Shown(names.VAL_NLL, "Held-out loss", "nats per token", dots=True),
    Shown("val/answer_probability", "Probability of the held-out answers", "mean", dots=True),
    Shown(names.RESPONSE_LENGTH, "Response length", "tokens"),
    Shown("train/entropy", "Entropy", "nats per token", zero=True),
    Shown(names.KL, "KL to the reference policy", "nats per token"),
    Shown(names.GRAD_NORM, "Gradient norm", "before clipping", zero=True),
    Shown(names.LR, "Learning rate", zero=True),
    Shown(
        "train/zero_variance_share",
        "Groups that teach nothing",
        "share",
        "All rewards of the group are equal.",
        zero=True,
        constant=False,
    ),
    Shown("train/truncated_share", "Truncated completions", "share", zero=True, constant=False),
)
ENGINE = (
    Shown(
        names.GEN_KL_ERROR,
        "gen_kl_error",
        "nats per token",
        "KL of the engine's probabilities to the trainer's; 0 is exact.",
    ),
    Shown(
        names.TOKEN_MULT_PROB_ERROR,
        "token_mult_prob_error - 1",
        "factor",
        "Mean factor between both probabilities of a token, less 1; 0 is exact.",
        minus=1.0,
    ),
    Shown("sync/parity", "Parity on probe sequences", "nats", "Mean difference of both logprobs.", dots=True),
    Shown("train/sampling_importance_ratio", "Importance weight", "mean", "Trainer over engine.", constant=False),
)
SYNC = (
    Shown("sync/retention", "Retention", "share", "Of the update, what survives the cast to the engine's type."),
    Shown("sync/relative_error", "Relative error", "of the update", "What the cast adds or takes away.", zero=True),
    Shown("sync/changed_fraction", "Changed weights", "fraction", "Of the weights under adapters, against the base."),
    Shown("sync/delta_norm", "Size of the update", "Frobenius norm", zero=True),
    Shown("sync/seconds", "Duration of a push", "seconds", zero=True),
)
STALENESS = (
    Shown(names.STALE_SHARE, "Given up as too old", "share of groups", zero=True, constant=False),
    Shown(names.ENGINE_IDLE_SHARE, "Engines idle", "share of time", zero=True),
    Shown(names.TRAINER_IDLE_S, "Trainer waiting for rollouts", "seconds per step", zero=True),
)
SECTIONS = (RESULT, LEARNING, ENGINE, SYNC, STALENESS)
# Shown as bars, tables or tiles, or the same for all steps by their nature.
ELSEWHERE = (names.TIME, names.TOKENS, names.TOKENS_PER_S, "model/", "sync/version", names.AGE, names.OLDEST)
EXPLAINED = {shown.metric: shown for section in SECTIONS for shown in section}
