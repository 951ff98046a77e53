"""The command-line checker of a metrics.jsonl."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from lora_rl.track import RunRecorder

SCRIPT = Path(__file__).parents[2] / "functional" / "check_metrics.py"
spec = importlib.util.spec_from_file_location("check_metrics", SCRIPT)
check_metrics = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_metrics)


@pytest.fixture(scope="module")
def metrics(tmp_path_factory) -> str:
    """Steps 0 to 20: reward = step / 20, accuracy at 0, 10, 20, a NaN loss at step 7."""
    with RunRecorder(tmp_path_factory.mktemp("run")) as recorder:
        recorder.log(0, {"val/accuracy": 0.25})
        for step in range(1, 21):
            loss = float("nan") if step == 7 else 1 / step
            record = {"train/reward": step / 20, "train/loss": loss, "val/math-500/accuracy": 0.5}
            if step % 10 == 0:
                record["val/accuracy"] = 0.25 + step / 40
            recorder.log(step, record)
    return str(recorder.path)


@pytest.mark.parametrize(
    "check",
    [
        "mean(train/reward) == 0.525",
        "mean(train/reward, 5, 20) > 0.6",
        "mean(train/reward, 11) == mean(train/reward, 11, 20)",
        "mean(train/reward, -5, -1) == mean(train/reward, 16, 20)",
        "mean(train/reward, 1, -20) == 0.05",
        "median(train/reward, 1, 3) == 0.1",
        "min(train/reward) == first(train/reward)",
        "max(val/accuracy) >= first(val/accuracy) + 0.4",
        "0.2 < first(val/accuracy) < 0.3",
        "last(val/accuracy, 0, 19) == 0.5",
        "count(train/reward) == 20",
        "count(train/loss) == 19",
        "count(val/accuracy, 1, 9) == 0",
        "count(train/reward <= 0.5) == 10",
        "count(train/loss != 1) == 18",
        "count(train/reward > 0.5, 1, 12) == count(train/reward, 11, 12)",
        "last(train/loss) < 1",
        'last("val/math-500/accuracy") == 2 * 0.25',
        "-last(train/reward) < -0.9",
    ],
)
def test_true_checks_pass(metrics, check, capsys):
    assert check_metrics.main([metrics, check]) == 0
    assert capsys.readouterr().out.startswith(f"PASS   {check}   [")


@pytest.mark.parametrize(
    ("check", "measured"),
    [
        ("mean(train/reward, 5, 20) > 0.7", "mean(train/reward, 5, 20) = 0.625"),
        ("max(train/loss) < 100", "max(train/loss) = nan"),
        ("last(train/loss, 1, 7) < 1", "last(train/loss, 1, 7) = nan"),
        ("mean(train/loss) != 3", "mean(train/loss) = nan"),
        ("0.3 < first(val/accuracy) < 0.5", "first(val/accuracy) = 0.25"),
        ("last(val/accuracy) / count(val/accuracy, 1, 9) > 0", "count(val/accuracy, 1, 9) = 0"),
    ],
)
def test_false_checks_fail_with_the_measured_value(metrics, check, measured, capsys):
    assert check_metrics.main([metrics, check]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"FAIL   {check}")
    assert measured in out


def test_a_missing_metric_fails_with_the_nearest_names(metrics, capsys):
    assert check_metrics.main([metrics, "mean(train/rewards) > 0", "count(train/reward) == 20"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL   mean(train/rewards) > 0: no metric 'train/rewards'")
    assert "nearest: train/reward" in lines[0]
    assert lines[1].startswith("PASS")


def test_an_empty_range_fails_and_says_what_there_is(metrics, capsys):
    assert check_metrics.main([metrics, "mean(val/accuracy, 11, 19) > 0"]) == 1
    assert "no value in steps 11 to 19; it has 0 to 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ("mean(train/reward)", "a check is a comparison"),
        ("mean(train/reward > 0.4", "not an expression"),
        ("avg(train/reward) > 0", "function 'avg'; there are: mean, median, min"),
        ("means(train/reward) > 0", "function 'means'; nearest: mean"),
        ("mean(train/reward, 1.5) > 0", "'1.5' is no step"),
        ("mean(train/reward, 1, 2, 3) > 0", "is neither a number nor function"),
        ("mean() > 0", "is neither a number nor function"),
        ("train/reward > 0", "'train' is neither a number nor function"),
        ("mean(train/math-500) > 0", "put an unusual name in quotes"),
        ("last(train/loss) in 1", "compare with < <= > >= == !="),
        ("__import__('os').system('true') == 0", "is neither a number nor function"),
        ("(lambda: 1)() == 1", "is neither a number nor function"),
        ("last(open('x')) == 1", "is no metric name"),
        ("True == 1", "is neither a number nor function"),
        ("count(train/reward < 1 < 2) == 1", "compare the metric once"),
        ("mean(train/reward < 1) == 1", "is no metric name"),
    ],
)
def test_a_malformed_check_is_an_error_and_runs_no_code(metrics, check, message, capsys):
    assert check_metrics.main([metrics, check]) == 2
    assert message in capsys.readouterr().out


def test_as_a_command(metrics, tmp_path):
    def status(*arguments):
        command = [sys.executable, str(SCRIPT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    assert status(metrics, "count(train/reward) == 20").returncode == 0
    assert status(metrics, "count(train/reward) == 20", "last(train/reward) < 0").returncode == 1
    missing = status(str(tmp_path / "none.jsonl"), "last(train/reward) < 0")
    assert missing.returncode == 2
    assert "none.jsonl" in missing.stderr
