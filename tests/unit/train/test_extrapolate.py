"""Jumps in a job around a real rank: taken when they help, refused or undone bit for bit when they do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_rl.cluster.workers import WorkerError
from lora_rl.config import RunConfig
from lora_rl.config.schema import SvdConfig
from lora_rl.train.checkpoint import CheckpointError
from lora_rl.train.extrapolate import Extrapolation
from lora_rl.train.extrapolation_state import load_extrapolation, save_extrapolation
from lora_rl.train.resume import check_keeps_jumps
from tests.support.configs import tiny_config, with_peft
from tests.support.models import make_model
from tests.support.ranks import run_ranks
from tests.unit.policy.test_peft import ALL, make_adapter

pytestmark = pytest.mark.multiprocess
NEXT = "grpo.next"
LONG = "grpo.max_num_steps=100"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), layers=2)


def config_for(model: Path, *overrides: str) -> RunConfig:
    settings = ("enabled=true", "interval=1", "snapshots=6", "horizon=2", "predictor.type=saturating")
    more = ("gate.num_prompts=16", "gate.num_generations=2", "gate.max_kl=10", "watch.patience=3", "alphas=[0.5, 1.0]")
    return tiny_config(model, "grpo.max_num_steps=30", *(f"{NEXT}.{o}" for o in (*settings, *more, *overrides)))


def without_gate(*overrides: str) -> tuple[str, ...]:
    return ("gate.enabled=false", "alphas=[1.0]", "min_backtest_cos=null", "damping=false", *overrides)


def lives(config: RunConfig, poison: float, steps: int) -> dict[str, Any]:
    """Live some steps; what was decided, and pictures of the policy before and after the sixth step's decision."""
    from tests.support.extrapolation import Life, equal, picture

    life = Life(config, poison=poison)
    life.extrapolation.start()
    records, pictures, before = [], [], None
    for step in range(1, steps + 1):
        own = life.extrapolation._snapshot

        def seen(number: int, source: Any, left: int, own: Any = own) -> Any:
            nonlocal before
            before = picture(life.policy)
            return own(number, source, left)

        life.extrapolation._snapshot = seen
        records.append(life.step(step))
        life.extrapolation._snapshot = own
        pictures.append((before, picture(life.policy)))
    return {
        "records": records,
        "unchanged": [equal(x, y) for x, y in pictures],
        "versions": [int(e.split()[1]) for e in life.source.events if e.startswith("push")],
        "halted": life.source.events.count("halted"),
        "pushed": life.weights.pushed,
        "asked": life.generator.asked,
        "said": life.out.getvalue(),
        "ledger": life.extrapolation.ledger,
    }


def test_a_jump_that_helps_is_measured_taken_and_kept(model: Path) -> None:
    lived = run_ranks(lives, config_for(model), 1.0, 10)[0]
    sixth = lived["records"][5]
    assert sixth["next/backtest_cos_poisoned"] > 0.9
    assert sixth["next/gate_gain_1"] > sixth["next/gate_gain_0.5"] > 0.02
    assert sixth["next/alpha"] == 1.0
    assert sixth["next/gate_kl_1"] > sixth["next/gate_kl_0.5"] > 0
    assert [r.get("next/alpha") for r in lived["records"]].count(None) == 9
    assert lived["records"][8]["next/kept"] == 1.0
    # Pushes of two alphas and of the jump, each a new version.
    assert lived["versions"] == sorted(set(lived["versions"]))
    assert len(lived["versions"]) == 3
    # Always the same prompts and seeds: without a jump, and with each alpha.
    assert len(lived["asked"]) == 3
    assert lived["asked"][0] == lived["asked"][1] == lived["asked"][2]
    assert lived["unchanged"] == [True] * 5 + [False] + [True] * 4
    ledger = lived["ledger"]
    assert (ledger.proposed, ledger.accepted, ledger.rolled_back, ledger.wasted_steps) == (1, 1, 0, 0)
    assert ledger.optimizer_steps == 10
    # 8 rollouts of 2 tokens a step, after prompts of 2; 32 in the gate, three times, scored as often.
    assert (ledger.generated_tokens, ledger.trained_tokens) == (10 * 16, 10 * 32)
    assert (ledger.gate_generated_tokens, ledger.gate_scored_tokens) == (3 * 64, 3 * 128)
    assert lived["records"][-1]["next/tokens"] == ledger.tokens == 480 + 192 + 384
    assert "jump of" in lived["said"] and "jump kept" in lived["said"]


@pytest.mark.slow
def test_a_poisoned_proposal_does_not_pass_the_back_test(model: Path) -> None:
    lived = run_ranks(lives, config_for(model), -1.0, 6)[0]
    assert lived["records"][5]["next/backtest_cos_poisoned"] < -0.9
    assert "supports no prediction" in lived["said"]
    assert lived["unchanged"] == [True] * 6
    assert lived["versions"] == []


def test_a_poisoned_proposal_does_not_pass_the_gate(model: Path) -> None:
    lived = run_ranks(lives, config_for(model, "min_backtest_cos=null", "damping=false"), -1.0, 6)[0]
    assert lived["records"][5]["next/alpha"] == 0.0
    assert lived["records"][5]["next/gate_gain_1"] < 0
    assert "no jump: alpha 0.5: mean reward changes by -" in lived["said"]
    assert lived["unchanged"] == [True] * 6
    # The engines get the old weights back, as a new version.
    assert lived["versions"] == sorted(set(lived["versions"]))
    assert lived["pushed"][-1] == lived["pushed"][-4]


def resumed(life: Any, config: RunConfig, folder: Path) -> Any:
    """The same life in a policy of its own, from a checkpoint on disk."""
    from types import SimpleNamespace

    from lora_rl.train.checkpoint import CheckpointStore
    from lora_rl.train.extrapolation_state import load_extrapolation, save_extrapolation
    from lora_rl.train.job import restore_policy
    from lora_rl.train.resume import take
    from tests.support.extrapolation import Life

    store = CheckpointStore(folder / "checkpoints", keep=None, higher_is_better=True, warn=print)
    (folder / "metrics.jsonl").touch()
    layout: Any = SimpleNamespace(tp=1, pp=1, dp=1)
    trail = save_extrapolation(life.extrapolation, life.policy)
    store.save(take(life.job, config, layout, 7, {}, folder / "metrics.jsonl", cursor={}, extrapolation=trail))
    saved = store.load_newest()
    other = Life(config, poison=-2.0)
    restore_policy(saved, other.policy, layout)
    load_extrapolation(other.extrapolation, saved.extrapolation, other.policy)
    other.weights.version, other.weights.pushed = life.weights.version, list(life.weights.pushed)
    return other


def undone(config: RunConfig, resume: bool, folder: Path) -> dict[str, Any]:
    """A poisoned jump that nothing measures, watched; with `resume` the run is stopped within the watch."""
    from tests.support.extrapolation import Life, equal, picture

    life = Life(config, poison=-2.0)
    life.extrapolation.start()
    for step in range(1, 6):
        life.step(step)
    kept = {}
    own = life.extrapolation._snapshot

    def seen(number: int, source: Any, left: int) -> Any:
        kept["before"] = picture(life.policy)
        return own(number, source, left)

    life.extrapolation._snapshot = seen
    taken = life.step(6)
    life.extrapolation._snapshot = own
    jumped = picture(life.policy)
    records = [taken, life.step(7)]
    if resume:
        other = resumed(life, config, folder)
        assert equal(picture(other.policy), picture(life.policy))
        assert other.extrapolation.ledger.state_dict() == life.extrapolation.ledger.state_dict()
        life = other
    version = life.weights.version
    records += [life.step(step) for step in (8, 9)]
    return {
        "records": records,
        "jumped": not equal(kept["before"], jumped),
        "back": equal(kept["before"], picture(life.policy)),
        "versions": (version, life.weights.version),
        "ledger": life.extrapolation.ledger,
        "said": life.out.getvalue(),
        "origin": life.extrapolation.origin,
    }


@pytest.mark.parametrize("resume", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("kind", ["adapter", "merge", "svd"])
def test_a_poisoned_jump_that_was_taken_is_undone_bit_for_bit(
    model: Path, tmp_path: Path, kind: str, resume: bool
) -> None:
    more = ["watch.tolerance=0.0", "write_back=merge"] if kind == "merge" else ["watch.tolerance=0.0"]
    config = config_for(model, *without_gate(*more))
    if kind == "svd":
        make_adapter(model, tmp_path / "sft", r=2, lora_alpha=6, target_modules=ALL)
        config = with_peft(config, adapter_path=str(tmp_path / "sft"), svd=SvdConfig(enabled=True))
    lived = run_ranks(undone, config, resume, tmp_path)[0]
    assert lived["records"][0]["next/alpha"] == 1.0
    assert lived["jumped"]
    at = next(n for n, r in enumerate(lived["records"]) if r.get("next/undone"))
    assert at == 3
    assert lived["back"]
    # Two pushes of steps, and the old weights as a new version after them.
    before, after = lived["versions"]
    assert after == before + 3
    ledger = lived["ledger"]
    assert (ledger.accepted, ledger.rolled_back, ledger.wasted_steps) == (1, 1, 3)
    assert "the last jump is undone, with 3 optimizer steps since" in lived["said"]
    assert lived["origin"] == 9


def watched_with_dynamic_sampling(config: RunConfig) -> list[dict[str, float]]:
    """A poisoned jump while all groups that are kept are half right."""
    from tests.support.extrapolation import Life

    life = Life(config, poison=-2.0)
    life.extrapolation.start()
    return [life.step(step, dropping=True) for step in range(1, 10)]


def test_the_watch_sees_what_dynamic_sampling_drops(model: Path) -> None:
    records = run_ranks(watched_with_dynamic_sampling, config_for(model, *without_gate("watch.tolerance=0.0")))[0]
    assert [n for n, r in enumerate(records, 1) if r.get("next/undone")] == [9]


def near_the_end(config: RunConfig, last: int) -> list[dict[str, float]]:
    from tests.support.extrapolation import Life

    life = Life(config)
    life.extrapolation.start()
    return [life.step(step, left=last - step) for step in range(1, last + 1)]


@pytest.mark.parametrize(("last", "taken"), [(9, [6]), (8, [])])
def test_no_jump_that_could_not_be_watched_to_the_end(model: Path, last: int, taken: list[int]) -> None:
    records = run_ranks(near_the_end, config_for(model, *without_gate()), last)[0]
    assert [n for n, r in enumerate(records, 1) if r.get("next/alpha")] == taken
    assert records[-1]["next/proposed"] == len(taken)
    assert [n for n, r in enumerate(records, 1) if r.get("next/kept")] == [9] * len(taken)


@pytest.mark.parametrize(("setting", "begins"), [("interval", True), ("snapshots", True), ("retry_after", False)])
def test_a_trail_of_other_settings_is_not_continued(model: Path, setting: str, begins: bool) -> None:
    """Changes over two steps and over one would be fitted as if they were alike."""
    first = config_for(model)
    policy, said = Recorded(first), []
    job = SimpleNamespace(policy=policy)
    console = SimpleNamespace(info=said.append)
    before = Extrapolation(job, first, console, None, among={})
    before.since = before.retry_at = 6
    saved = save_extrapolation(before, policy)
    now = config_for(model, f"{setting}={getattr(first.grpo.next, setting) + 1}")
    after = Extrapolation(job, now, console, None, among={})
    load_extrapolation(after, saved, policy)
    after.settle(12)
    assert (after.origin, after.since) == ((12, 0) if begins else (0, 6))
    assert after.retry_at == (now.grpo.next.snapshots if begins else 6)
    assert bool(said) == begins
    if begins:
        assert "recorded with grpo.next.interval 1, grpo.next.snapshots 6; a new one begins" in said[0]
        assert policy.calls[-1] == "clear"


@pytest.mark.slow
def test_the_preset_of_the_paper_jumps_once_unmeasured(model: Path) -> None:
    settings = ("preset=paper", "write_back=adapter", "interval=1", "snapshots=6", "horizon=2", "predictor.epochs=5")
    config = tiny_config(model, "grpo.max_num_steps=30", *(f"{NEXT}.{o}" for o in ("enabled=true", *settings)))
    lived = run_ranks(lives, config, 1.0, 14)[0]
    assert [n for n, r in enumerate(lived["records"], 1) if r.get("next/alpha")] == [6]
    assert lived["records"][5]["next/alpha"] == 1.5
    assert lived["asked"] == []
    assert lived["ledger"].accepted == 1


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ((), r"grpo\.next\.enabled = false; continue with true"),
        (("enabled=true", "mode=adapter_merge"), r"weight_sync\.mode = adapter_merge; continue with merged"),
        (("enabled=true", "mode=adapter"), r"weight_sync\.mode = adapter; continue with merged"),
        (("enabled=true", "precision=bfloat16"), r"policy\.precision = bfloat16; continue with float32"),
    ],
)
def test_merged_jumps_are_not_lost_by_other_settings(model: Path, overrides: Sequence[str], problem: str) -> None:
    """No later checkpoint, or no engine, would hold them, and the run would go on with another policy."""
    full = {
        "enabled": f"{NEXT}.enabled",
        "mode": "policy.generation.weight_sync.mode",
        "precision": "policy.precision",
    }
    given = [f"{full[key]}={value}" for key, value in (o.split("=") for o in overrides)]
    config = tiny_config(model, LONG, *given)
    resume = SimpleNamespace(path="checkpoints/step_5", extrapolation=({"merged": 1}, {}))
    with pytest.raises(CheckpointError, match=rf"checkpoints/step_5 holds jumps ahead (.|\n)*{problem}"):
        check_keeps_jumps(resume, config)
    for harmless in (None, ({"merged": 0}, {})):
        check_keeps_jumps(SimpleNamespace(extrapolation=harmless), config)
    check_keeps_jumps(resume, tiny_config(model, LONG, f"{NEXT}.enabled=true"))


class Recorded:
    """A policy of which only the jumps in its weights are known."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.calls, self.scored_tokens = config, [], 0

    def load_state(self, *args: Any, **options: Any) -> None:
        self.calls.append("load_state")

    def extrapolation(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        return []

    def state(self) -> tuple[Any, Any]:
        return None, None

    def hurry(self, timeout_s: float) -> None:
        """Nothing is waited for."""


@pytest.mark.parametrize("write_back", ["adapter", "merge"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, WorkerError])
def test_a_gate_that_ends_early_leaves_the_policy_as_it_was(
    model: Path, monkeypatch: pytest.MonkeyPatch, write_back: str, error: type[BaseException]
) -> None:
    """What a run keeps, however it ends, must not hold a jump that was only tried."""
    config = config_for(model, f"write_back={write_back}")
    policy = Recorded(config)
    job = SimpleNamespace(policy=policy, turns=SimpleNamespace(to_trainer=lambda: None))
    extrapolation = Extrapolation(job, config, SimpleNamespace(info=print), None, among={})

    def interrupted(*args: Any) -> Any:
        raise error

    monkeypatch.setattr("lora_rl.train.extrapolate.measure", interrupted)
    with pytest.raises(error):
        extrapolation._measured(5, SimpleNamespace(changes={}, predictor="scale"), None)
    assert policy.calls == ["merged", "load_state", "set_merged"]
