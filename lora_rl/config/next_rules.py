"""Rules of `grpo.next`: a trajectory that is long enough, and jumps that can be told from each other."""

from __future__ import annotations

from collections.abc import Iterator

from lora_rl.config.errors import Violation
from lora_rl.config.schema import RunConfig

PREFIX = "grpo.next"


def trajectory_can_be_predicted(config: RunConfig) -> Iterator[Violation]:
    """A back-test predicts from the past what is known by now, and learning needs examples before that."""
    section = config.grpo.next
    if section.enabled and section.snapshots < section.least_snapshots:
        what = "its back-test" if section.is_backtested else "its examples"
        problem = (
            f"predictor {section.predictor.type} and {what} need at least {section.least_snapshots} snapshots with "
            f"{PREFIX}.horizon = {section.horizon}; use that many, or a smaller horizon"
        )
        yield Violation(f"{PREFIX}.snapshots", problem, section.snapshots)


def run_comes_to_a_proposal(config: RunConfig) -> Iterator[Violation]:
    """The first proposal needs all snapshots, and after it the steps of its watch, or one to be of use."""
    section, steps = config.grpo.next, config.grpo.max_num_steps
    first, after = section.interval * section.snapshots, section.steps_after_jump
    if section.enabled and first + after > steps:
        largest = (steps - after) // section.snapshots
        advice = f"or a value up to {largest}" if largest > 0 else "or more grpo.max_num_steps"
        problem = (
            f"the first jump would be proposed after {section.interval} x {section.snapshots} = {first} steps, with "
            f"{after} to come ({PREFIX}.watch.patience, or 1), and the run ends after {steps}; use fewer "
            f"{PREFIX}.snapshots {advice}"
        )
        yield Violation(f"{PREFIX}.interval", problem, section.interval)


def alphas_can_be_compared(config: RunConfig) -> Iterator[Violation]:
    """Only the gate can choose between several lengths of a jump."""
    section = config.grpo.next
    if not section.enabled:
        return
    if not section.alphas:
        yield Violation(f"{PREFIX}.alphas", "must name at least one length; use [1.0], say", section.alphas)
    elif len(set(section.alphas)) < len(section.alphas):
        yield Violation(f"{PREFIX}.alphas", "names a length twice; leave one of them out", section.alphas)
    elif len(section.alphas) > 1 and not section.gate.enabled:
        problem = f"without {PREFIX}.gate.enabled nothing chooses between them; use one, such as [1.0]"
        yield Violation(f"{PREFIX}.alphas", problem, section.alphas)


def jumps_of_singular_values_stay_there(config: RunConfig) -> Iterator[Violation]:
    """Of SVD-LoRA the trained numbers are extrapolated, which the frozen weights do not have."""
    section = config.grpo.next
    if section.enabled and section.write_back == "merge" and config.policy.megatron_cfg.peft.svd.enabled:
        problem = (
            "a jump changes the singular values that policy.megatron_cfg.peft.svd.enabled trains, exactly and without "
            "further ranks, and no frozen weight; use adapter"
        )
        yield Violation(f"{PREFIX}.write_back", problem, "merge")


def merged_jumps_reach_the_engine(config: RunConfig) -> Iterator[Violation]:
    """Where engines merge or serve adapters themselves, their frozen weights are those on disk."""
    section, mode = config.grpo.next, config.policy.generation.weight_sync.mode
    svd = config.policy.megatron_cfg.peft.svd.enabled
    if section.enabled and section.write_back == "merge" and mode != "merged" and not svd:
        problem = (
            f"changes weights that never reach the engines in policy.generation.weight_sync.mode {mode}; use adapter, "
            "or the mode merged"
        )
        yield Violation(f"{PREFIX}.write_back", problem, "merge")


def merged_jumps_are_not_rounded_away(config: RunConfig) -> Iterator[Violation]:
    """In bfloat16 a weight of 0.02 has a spacing of 1e-4, more than most entries of a jump."""
    section, precision = config.grpo.next, config.policy.precision
    if section.enabled and section.write_back == "merge" and precision != "float32":
        preset = f", which {PREFIX}.preset {section.preset} sets" if section.preset == "paper" else ""
        problem = (
            f"adds jumps to the frozen weights{preset}, and policy.precision {precision} would round most of a jump "
            "away; use adapter, which are float32 whatever the precision, or float32 weights"
        )
        yield Violation(f"{PREFIX}.write_back", problem, "merge")


NEXT_RULES = (
    trajectory_can_be_predicted,
    run_comes_to_a_proposal,
    alphas_can_be_compared,
    jumps_of_singular_values_stay_there,
    merged_jumps_reach_the_engine,
    merged_jumps_are_not_rounded_away,
)
