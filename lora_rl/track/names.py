"""The metric names that the console and the plots look for. A run may record any others beside them."""

REWARD = "train/reward"  # mean over the rollouts of a step, before any baseline is subtracted
RESPONSE_LENGTH = "train/response_length"  # mean tokens per response
KL = "train/kl"  # policy to reference, mean per token, nats
GEN_KL_ERROR = "train/gen_kl_error"  # engine's log-probabilities to the trainer's, mean per token, nats
TOKEN_MULT_PROB_ERROR = "train/token_mult_prob_error"  # mean exp(|difference|) of the same two; 1 is exact
GRAD_NORM = "train/grad_norm"  # before clipping
LR = "train/lr"
# Of supervised runs only: the loss of a policy update says nothing to a reader.
NLL = "train/nll"
VAL_NLL = "val/nll"
ACCURACY = "val/accuracy"  # on held-out prompts, 0 to 1
# Tokens of all completions that were sampled for a step, those of groups that dynamic sampling drops included.
GENERATED_TOKENS = "rollout/generated_tokens"
# With dynamic sampling only: mean reward of all groups that were generated for a step, also of those it drops.
GENERATED_REWARD = "rollout/generated_reward"

# Of asynchronous runs only. Ages count weight versions between sampling and training.
AGE = "rollout/age_mean"
OLDEST = "rollout/age_max"
STALE_SHARE = "rollout/stale_share"  # groups given up as too old, of those started
ENGINE_IDLE_SHARE = "rollout/engine_idle_share"
TRAINER_IDLE_S = "rollout/trainer_idle_s"  # seconds of a step in which the trainer waited for rollouts

# Prefixes followed by a phase name. `PhaseTimer.end_step` writes all of them.
TIME = "time/"  # seconds in that phase; the phases and time/other add up to time/step
TOKENS = "tokens/"  # tokens that the phase worked on
TOKENS_PER_S = "tokens_per_s/"

STEP_TIME = TIME + "step"  # wall seconds of the whole step
OTHER = "other"  # time in no phase

# Order in which phases are shown; a phase that is not listed comes after these, `other` last.
PHASES = ("startup", "generation", "reward", "training", "sync", "validation", "checkpoint")


def phase_order(phase: str) -> tuple[int, str]:
    """Sort key that puts phases in the order in which they are shown."""
    if phase == OTHER:
        return len(PHASES) + 1, phase
    return (PHASES.index(phase) if phase in PHASES else len(PHASES)), phase


def phase_seconds(record: dict) -> dict[str, float]:
    """Seconds per phase in one record, `other` included and the step's total left out."""
    return {
        name.removeprefix(TIME): seconds
        for name, seconds in record.items()
        if name.startswith(TIME) and name != STEP_TIME
    }
