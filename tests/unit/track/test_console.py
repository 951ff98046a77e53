"""What a person sees: plain lines, the live region on a real pseudo-terminal, the summary."""

import fcntl
import io
import logging
import math
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from synthetic_run import metrics_of, run_records, samples

from lora_rl.track import Console, PhaseTimer, Sample

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(mode: str, records: list[dict], seconds_per_step: float = 1.0, shown=(), **options) -> list[str]:
    """Lines of a console without a terminal that is shown `records`."""
    stream, clock = io.StringIO(), Clock()
    with Console(mode, records[-1]["step"], stream=stream, clock=clock, **options) as console:
        for record in records:
            clock.now += seconds_per_step
            console.step(record, shown)
    assert all(c.isprintable() or c == "\n" for c in stream.getvalue())
    return stream.getvalue().splitlines()


def steps_shown(lines: list[str]) -> list[int]:
    return [int(match[1]) for line in lines if (match := re.match(r"step +(\d+)/", line))]


def test_plain_lines_are_throttled_to_first_steps_validations_and_ten_seconds():
    records = run_records(steps=62, val_every=50)
    lines = play("auto", records, seconds_per_step=1.0)  # no terminal: auto is plain
    assert steps_shown(lines) == [0, 1, 2, 3, 4, 5, 15, 25, 35, 45, 50, 60, 62]
    slow = play("plain", records, seconds_per_step=11.0)
    assert steps_shown(slow) == list(range(63))


def test_a_file_never_gets_control_characters_even_when_colour_is_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert steps_shown(play("auto", run_records(steps=3), shown=list(samples()))) == [0, 1, 2, 3]  # play checks


def test_a_plain_line_names_what_matters():
    lines = play("plain", run_records(steps=20))
    (line,) = [line for line in lines if line.startswith("step 20/20")]
    for part in ("reward 0.", "accuracy 0.", "(start 0.110)", "kl 0.00", "gen_kl_error", "grad_norm", "lr 2.00e-05"):
        assert part in line
    assert re.search(r"generation \d+ tokens/s  training \d+ tokens/s  \d+ s", line)
    assert re.search(r"left 2 m \d\d s|left [34] m \d\d s", lines[2])  # after step 2 of 20 steps of some 10 s


def test_summary_accounts_for_the_whole_wall_time(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    records = run_records(steps=60)
    paths = {"metrics": tmp_path / "metrics.jsonl", "curve": tmp_path / "not-drawn.png", "log": "/dev/null"}
    lines = play("quiet", records, paths=paths)
    assert lines[0].startswith("run finished: 60 steps in ")
    wall = sum(record["time/step"] for record in records)
    assert lines[0].endswith(f"{int(wall) // 60} m {round(wall) % 60:02d} s")
    percents = [int(p) for p in re.findall(r"(\d+) %", "\n".join(lines))]
    assert sum(percents) == 100
    for phase in ("start-up", "generation", "training", "sync", "validation", "other"):
        assert any(f"{phase} " in line for line in lines)
    accuracies = [(r["val/accuracy"], r["step"]) for r in records if "val/accuracy" in r]
    best, at = max(accuracies)
    last = accuracies[-1][0]
    assert f"accuracy    start 0.110 -> best {best:.3f} at step {at} -> last {last:.3f}" in lines
    tokens = sum(r.get("tokens/generation", 0) for r in records)
    rate = tokens / sum(r.get("time/generation", 0) for r in records)
    assert any(line.startswith("tokens/s") and f"generation {rate:.0f}" in line for line in lines)
    assert "metrics     metrics.jsonl" in lines
    assert "log         /dev/null" in lines
    assert not any("not-drawn" in line for line in lines)


def test_quiet_shows_only_warnings_and_the_summary():
    records = run_records(steps=8)
    records[3]["train/loss"] = math.nan
    lines = play("quiet", records, shown=list(samples()))
    assert lines[0] == "warning     step 3: not finite: train/loss"
    assert lines[1].startswith("run finished: 8 steps")


def test_a_repeated_warning_is_shown_once_and_counted():
    stream = io.StringIO()
    with Console("plain", stream=stream) as console:
        for _ in range(5):
            console.warn("engine 0 is slow\x1b[31m")
        logging.getLogger("lora_rl.rollout").warning("reward of %d prompts timed out", 3)
        logging.getLogger("lora_rl.rollout").info("not shown")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["warning     engine 0 is slow\\x1b[31m", "warning     reward of 3 prompts timed out"]
    assert "warnings    2 different, 6 in all" in lines
    before = stream.getvalue()
    logging.getLogger("lora_rl.rollout").warning("after the run")
    assert stream.getvalue() == before


def test_startup_tasks_may_overlap_and_list_their_parts():
    stream, clock = io.StringIO(), Clock()
    with Console("plain", stream=stream, clock=clock) as console:
        with console.startup("starting Ray"):
            clock.now += 3.1
        rank, engine = console.startup("rank 0"), console.startup("engine 0")
        rank.update("importing Megatron")
        clock.now += 9
        rank.update("building the model")
        engine.update("loading weights")
        clock.now += 5
        assert rank.waiting() == "rank 0: building the model 14 s"
        rank.done()
        rank.done()
        clock.now += 60
        engine.done()
    assert stream.getvalue().splitlines()[:6] == [
        "start-up    starting Ray ...",
        "start-up    starting Ray 3.1 s",
        "start-up    rank 0 ...",
        "start-up    engine 0 ...",
        "start-up    rank 0 14 s (importing Megatron 9.0 s, building the model 5.0 s)",
        "start-up    engine 0 1 m 14 s (loading weights 1 m 05 s)",
    ]


def test_a_failure_says_what_failed_and_what_was_still_waited_for():
    stream, clock = io.StringIO(), Clock()
    with pytest.raises(RuntimeError, match="no memory"), Console("quiet", 9, stream=stream, clock=clock) as console:
        console.startup("engine 0").update("loading weights")
        with console.startup("rank 0") as task:
            task.update("importing Megatron")
            clock.now += 7
            raise RuntimeError("no memory")
    assert stream.getvalue().splitlines() == [
        "start-up    rank 0: importing Megatron 7.0 s FAILED: RuntimeError: no memory",
        "waiting     engine 0: loading weights 7.0 s",
        "run failed before the first step",
    ]


@pytest.mark.parametrize(
    ("error", "title"),
    [(ValueError, "run failed after step 2 of 9"), (KeyboardInterrupt, "run stopped at step 2 of 9")],
)
def test_the_summary_also_comes_after_an_exception(error, title):
    stream = io.StringIO()
    with pytest.raises(error), Console("quiet", 9, stream=stream) as console:
        for record in run_records(steps=2):
            console.step(record)
        raise error
    assert stream.getvalue().startswith(title + ": 2 steps in ")


def test_plain_says_what_it_waits_for_when_nothing_else_is_said():
    stream, timer = io.StringIO(), PhaseTimer()
    with Console("plain", stream=stream, timer=timer, heartbeat_s=0.05) as console:
        console.startup("engine 0").update("loading weights")
        deadline = time.monotonic() + 5
        while "waiting     engine 0: loading weights" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "waiting     engine 0: loading weights 0." in stream.getvalue()
    stream.truncate(0)
    with Console("plain", stream=stream, timer=timer, heartbeat_s=0.05), timer("generation"):
        deadline = time.monotonic() + 5
        while "waiting     generation" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "waiting     generation 0." in stream.getvalue()


def test_samples_are_spread_over_rewards_and_cannot_break_the_terminal():
    lines = play("plain", run_records(steps=3), shown=list(samples()), sample_count=3)
    heads = [line for line in lines if line.startswith("sample")]
    assert [re.search(r"reward (\S+)", head)[1] for head in heads] == ["1.000", "0", "-0.500"]
    completions = [line for line in lines if line.startswith("completion")]
    assert "[red]なので[/red] \\x1b[31m答えは六\\x1b[0m\\r\\n" in completions[1]
    assert completions[2] == "completion  (empty)"


def test_samples_come_every_so_many_steps():
    shown = [Sample("p", "c", "e", 1.0, "stop")]
    lines = play("plain", run_records(steps=30, val_every=15), shown=shown, sample_every=10)
    assert [int(line.split()[2]) for line in lines if line.startswith("sample")] == [0, 10, 20, 30]
    never = play("plain", run_records(steps=30, val_every=15), shown=shown, sample_every=0)
    assert not [line for line in never if line.startswith("sample")]


def test_a_long_completion_keeps_its_end():
    shown = [Sample("p" * 5000, "x" * 5000 + " so \\boxed{72}", "72", 1.0, "stop")]
    lines = play("plain", run_records(steps=1), shown=shown)
    (completion,) = {line for line in lines if line.startswith("completion")}
    assert completion.endswith("so \\boxed{72}")
    assert len(completion) == 100


def test_a_stream_that_is_not_unicode_gets_ascii():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Console("plain", 3, stream=stream) as console:
        for record in run_records(steps=3):
            console.step(record, list(samples()))
    text = raw.getvalue().decode("ascii")
    assert "G generation" in text
    assert "\\u4e09\\u89d2" in text


class Latin1Terminal(io.TextIOWrapper):
    """A terminal of another age."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_that_is_not_unicode_shows_what_it_can(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    raw = io.BytesIO()
    with Console("auto", 3, stream=Latin1Terminal(raw, encoding="latin-1")) as console:
        assert console._is_live
        for record in run_records(steps=3):
            console.step(record, list(samples()))
        console.warn("three: \u4e09")
    assert "\\u4e09" in raw.getvalue().decode("latin-1")


def test_a_closed_terminal_does_not_end_the_run(caplog):
    read, write = os.pipe()
    os.close(read)
    stream = open(write, "w", buffering=1)  # noqa: SIM115
    finished = False
    with Console("plain", 5, stream=stream) as console:
        for record in run_records(steps=5):
            console.step(record)
        finished = True
    assert finished
    assert [r.getMessage() for r in caplog.records] == ["the display is switched off: [Errno 32] Broken pipe"]
    with pytest.raises(BrokenPipeError):  # what is left in the stream's buffer
        stream.close()


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="console mode 'fancy'; valid: auto, plain, quiet"):
        Console("fancy")


PROGRAM = """
import logging, random, sys
sys.path.insert(0, sys.argv[1])
from synthetic_run import metrics_of, samples
from lora_rl.track import Console, PhaseTimer
timer, rng = PhaseTimer(), random.Random(0)
with Console(total_steps=12, timer=timer, paths={"log": "/dev/null"}) as console:
    with console.startup("starting Ray"):
        pass
    tasks = []
    for i in range(12):
        tasks.append(console.startup(f"rank {i}"))
        tasks[i].update("importing Megatron")
    print("a line printed by somebody else")
    for task in tasks:
        task.done()
    for step in range(13):
        with timer("generation"):
            console.step({"step": step, **metrics_of(step, 12, rng)}, list(samples()))
        if step % 3 == 0:
            logging.getLogger("lora_rl").warning("warning %d, %s", step, "long enough to need more room " * 6)
"""


def on_a_terminal(columns: int, **environment: str) -> str:
    """Everything that a run writes to a pseudo-terminal of that width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)],
        stdin=slave, stdout=slave, stderr=slave, env={**inherited, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(slave)
    output = b""
    while True:
        try:
            output += os.read(master, 1 << 16)
        except OSError:  # Linux: the other side is closed
            break
    os.close(master)
    assert child.wait(timeout=10) == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_live_region_fits_the_terminal(columns: int):
    output = on_a_terminal(columns)
    assert "\x1b[1A" in output  # it is redrawn in place
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor comes back
    lines = [line for line in re.split(r"[\r\n]+", ESCAPE.sub("", output)) if line]
    assert max(map(cell_len, lines)) <= columns
    assert not any("\x1b" in line for line in lines)
    for part in (
        r"waiting     rank 0: importing Megatron \d",
        r"            and 4 more",
        r"start-up    rank 11 0\.0 s",
        r"a line printed by somebody else",
        r"step        4/12  ━+─+  .*left 1 m \d\d s",
        r"reward      0\.\d+ +[▁▂▃▄▅▆▇█]+  start 0\.\d+",
        r"accuracy    0\.\d+ +[▁▂▃▄▅▆▇█]+  start 0\.110",
        r"time        █+▓+▒+░*·*",
        r"now         generation \d",
        r"warning     step 9: warning 9, long",
        r"run finished: 12 steps in",
        r"log         /dev/null",
    ):
        assert any(re.match(part, line) for line in lines), part
    assert any("samples of step 10" in line for line in lines) == (columns == 140)
    whole_warning = re.sub(r"\s+", " ", " ".join(lines))
    for step in (0, 3, 6, 9, 12):  # cut in the live region, whole once they leave it
        assert f"warning {step}, " + ("long enough to need more room " * 6).strip() in whole_warning


def test_no_color_has_no_colours():
    colours = re.compile(r"\x1b\[[0-9;]*\b(3[0-9]|4[0-9]|9[0-7])[0-9;]*m")
    assert colours.search(on_a_terminal(80))
    assert not colours.search(on_a_terminal(80, NO_COLOR="1"))


def test_a_dumb_terminal_gets_plain_lines():
    output = on_a_terminal(80, TERM="dumb")
    assert "\x1b" not in output
    assert re.search(r"^step  1/12  reward", output, re.MULTILINE)


def test_metrics_of_synthetic_run_add_up():
    metrics = metrics_of(7, 12, random.Random(1))
    phases = sum(v for k, v in metrics.items() if k.startswith("time/") and k != "time/step")
    assert phases == pytest.approx(metrics["time/step"])


def test_the_summary_of_an_asynchronous_run_tells_how_old_the_data_was():
    records = run_records(steps=4)
    for step, record in enumerate(records[1:], start=1):
        record |= {
            "rollout/age_mean": step / 4, "rollout/age_max": 2 if step == 3 else 1, "rollout/stale_share": 0.25,
            "rollout/engine_idle_share": 0.5, "rollout/trainer_idle_s": record["time/step"] / 10,
        }  # fmt: skip
    text = " ".join(play("plain", records))
    for part in ("mean age 0.625", "oldest 2", "given up 25%", "engines idle 50%", "trainer waiting 10%"):
        assert part in text
    assert "staleness" not in " ".join(play("plain", run_records(steps=4)))
