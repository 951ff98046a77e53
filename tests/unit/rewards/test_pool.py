"""The pool: limits, deaths, order, threads, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lora_rl.config.schema import RewardConfig
from lora_rl.rewards import RewardError, Scorer, ScoreRequest
from tests.support import reward_functions
from tests.support.processes import running, wait_gone

FILE = reward_functions.__file__
ROOT = Path(__file__).parents[3]
TIMEOUT_S = 1.0


def config(name: str = "act", **options: Any) -> RewardConfig:
    return RewardConfig(
        **{"name": "function", "function": f"{FILE}:{name}", "num_workers": 2, "timeout_s": TIMEOUT_S, **options}
    )


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    log = tmp_path_factory.mktemp("pool") / "workers.log"
    with Scorer(config(), log_file=log) as started:
        started.wait_ready()
        yield started


def reasons(scorer: Scorer, *completions: str, metadata: dict[str, Any] | None = None) -> list[str]:
    return [
        s.reason.value for s in scorer.score([ScoreRequest(c, "right", metadata=metadata or {}) for c in completions])
    ]


def worker_pids(scorer: Scorer) -> list[int]:
    scores = scorer.score([ScoreRequest("pid", "")] * 30)
    return sorted({int(s.components["function/pid"]) for s in scores})


def test_order_is_kept(scorer: Scorer) -> None:
    completions = ["right" if n % 3 else f"sleep {0.01 * (n % 7)}" for n in range(60)]
    values = [s.value for s in scorer.score([ScoreRequest(c, "right") for c in completions])]
    assert values == [float(c == "right") for c in completions]


@pytest.mark.parametrize("endless", ["sleep 60", "spin"])
def test_the_limit_is_kept_and_the_rest_is_unharmed(scorer: Scorer, endless: str) -> None:
    start = time.monotonic()
    assert reasons(scorer, "right", endless, *["right"] * 20, "wrong") == [
        "correct", "timed_out", *["correct"] * 20, "wrong",
    ]  # fmt: skip
    assert TIMEOUT_S <= time.monotonic() - start < TIMEOUT_S + 1.5
    assert scorer.score([ScoreRequest(endless, "right")])[0].value == 0.0


@pytest.mark.parametrize("death", ["exit 0", "exit 1", "segfault"])
def test_a_dead_worker_costs_its_own_answer_only(scorer: Scorer, death: str) -> None:
    assert reasons(scorer, "right", death, *["right"] * 10) == ["correct", "worker_died", *["correct"] * 10]


def test_a_killed_worker_is_replaced(scorer: Scorer) -> None:
    pids = worker_pids(scorer)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert reasons(scorer, *["right"] * 4) == ["correct"] * 4
    assert not set(pids) & set(worker_pids(scorer))


def test_an_answer_is_tried_twice_and_no_more(scorer: Scorer, tmp_path: Path) -> None:
    assert reasons(scorer, "die_once a", metadata={"folder": str(tmp_path)}) == ["correct"]
    assert reasons(scorer, "count b", metadata={"folder": str(tmp_path)}) == ["worker_died"]
    assert (tmp_path / "b").read_text() == "xx"


def test_a_killed_fork_server_is_replaced(scorer: Scorer) -> None:
    server = scorer._pool._server._process.pid
    os.kill(server, signal.SIGKILL)
    assert not wait_gone([server])
    assert reasons(scorer, *["right"] * 8) == ["correct"] * 8
    assert scorer._pool._server._process.pid != server


@pytest.mark.parametrize("completion", ["raise oh", "leave 3"])
def test_an_exception_is_a_reason_and_is_said_once(
    tmp_path: Path, completion: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "workers.log"
    with Scorer(config(num_workers=1), log_file=log) as scorer:
        assert reasons(scorer, completion, "right", completion) == ["error", "correct", "error"]
    [record] = caplog.records
    name = "LookupError: 'oh'" if "raise" in completion else "SystemExit: 3"
    assert f"reward function: error: {name.replace(chr(39), '')}" in record.getMessage().replace("'", "")
    assert log.read_text().count("Traceback") == 2


def test_what_cannot_be_pickled_is_refused_at_once(scorer: Scorer) -> None:
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        scorer.score([ScoreRequest("right", "right", metadata={"lock": threading.Lock()})])
    assert reasons(scorer, "right") == ["correct"]


def test_from_several_threads_and_a_coroutine(scorer: Scorer) -> None:
    batches = [["right", "wrong"] * (n + 1) for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda batch: reasons(scorer, *batch), batches))
    assert results == [["correct", "wrong"] * (n + 1) for n in range(8)]

    async def both() -> list[str]:
        requests = [ScoreRequest("right", "right"), ScoreRequest("sleep 0.1", "right")]
        return [s.reason.value for s in await asyncio.wrap_future(scorer.submit(requests))]

    assert asyncio.run(both()) == ["correct", "wrong"]


def test_an_empty_batch(scorer: Scorer) -> None:
    assert scorer.score([]) == []


def test_submitting_does_not_wait(scorer: Scorer) -> None:
    start = time.monotonic()
    future = scorer.submit([ScoreRequest("sleep 0.5", "right")])
    assert time.monotonic() - start < 0.3
    assert not future.done()
    assert future.result()[0].value == 0.0


def test_truncated_completions_are_scored_only_on_request(scorer: Scorer) -> None:
    cut = ScoreRequest("right", "right", truncated=True)
    assert scorer.score([cut])[0].reason == "truncated"
    with Scorer(config(num_workers=1, score_truncated=True)) as other:
        assert other.score([cut])[0].reason == "correct"


def test_memory_is_limited() -> None:
    with Scorer(config(num_workers=1, worker_memory_gib=0.25)) as scorer:
        assert reasons(scorer, f"allocate {2**30}", f"allocate {2**20}", "right") == ["error", "correct", "correct"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_at_all", "importing .* failed: ModuleNotFoundError: No module named 'no_such"),
        ("def other(completion): return 1.0", "has no f; it has other"),
        ("import os; os._exit(7)", "a reward worker died while it started, by exit code 7"),
        ("import time; time.sleep(60)", "not ready after 1 s"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_the_start(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "own.py").write_text(source)
    settings = RewardConfig(name="function", function=f"{tmp_path}/own.py:f", num_workers=1)
    patience = 1.0 if "sleep" in source else 30.0
    with Scorer(settings, startup_timeout_s=patience) as scorer, pytest.raises(RewardError, match=message):
        scorer.wait_ready()
    with Scorer(settings, startup_timeout_s=patience) as scorer, pytest.raises(RewardError, match=message):
        scorer.score([ScoreRequest("", "")] * 2)


def test_not_started_and_closed() -> None:
    scorer = Scorer(config())
    with pytest.raises(RewardError, match="function runs in worker processes, which were not started"):
        scorer.score([ScoreRequest("right", "right")])
    scorer.start()
    waiting = scorer.submit([ScoreRequest("sleep 60", "right")] * 5)
    time.sleep(0.5)
    start = time.monotonic()
    scorer.close()
    with pytest.raises(RewardError, match="closed"):
        waiting.result(timeout=1)
    with pytest.raises(RewardError, match="closed"):
        scorer.score([ScoreRequest("right", "right")])
    assert time.monotonic() - start < 2
    scorer.close()


def test_closing_while_it_starts_does_not_wait(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    scorer = Scorer(RewardConfig(name="function", function=f"{tmp_path}/slow.py:f", num_workers=2))
    for pause in (0.0, 0.05, 1.0):
        scorer = Scorer(RewardConfig(name="function", function=f"{tmp_path}/slow.py:f", num_workers=2))
        scorer.start()
        time.sleep(pause)
        start = time.monotonic()
        scorer.close()
        assert time.monotonic() - start < 3
        with pytest.raises(RewardError):
            scorer.wait_ready()


def test_what_a_worker_started_goes_with_it(scorer: Scorer) -> None:
    assert reasons(scorer, "spawn 61.2875") == ["timed_out"]
    found = [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"61.2875" in read(p)]
    assert not wait_gone([int(p.parent.name) for p in found], 2)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


SCRIPT = """
import signal
import sys
# A shell without a terminal starts background jobs with SIGINT ignored, and what they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from lora_rl.config.schema import RewardConfig
from lora_rl.rewards import Scorer, ScoreRequest
# No `if __name__ == "__main__"`: nothing of this may run a second time.
scorer = Scorer(RewardConfig(name="function", function=sys.argv[1], num_workers=2, timeout_s=60))
scorer.start()
scores = scorer.score([ScoreRequest("pid", "")] * 30)
print(scorer._pool._server._process.pid, *{int(s.components["function/pid"]) for s in scores}, flush=True)
scorer.score([ScoreRequest("spin", "")] * 2)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nobody_outlives_the_driver(how: signal.Signals, tmp_path: Path) -> None:
    """Not even workers that are in C code which never looks at signals."""
    driver = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, f"{FILE}:act"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    try:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 3
        time.sleep(0.3)
        assert all(map(running, pids))
        driver.send_signal(how)
        assert not wait_gone([*pids, driver.pid])
    finally:
        driver.kill()
        driver.wait()


# In an interpreter of its own: what other tests opened and the garbage collector closes meanwhile must not count.
LEAVES_NOTHING = """
import gc
import os
import sys
import threading
from lora_rl.config.schema import RewardConfig
from lora_rl.rewards import Scorer, ScoreRequest

def use():
    config = RewardConfig(name="function", function=sys.argv[1], num_workers=2, timeout_s=1.0)
    with Scorer(config) as scorer:
        scores = scorer.score([ScoreRequest("pid", "")] * 30)
        scorer.score([ScoreRequest(text, "right") for text in ("sleep 60", "exit 1", "right")])
        return scorer._pool._server._process.pid, *{int(s.components["function/pid"]) for s in scores}

pids = use()
gc.collect()
before = len(os.listdir("/proc/self/fd"))
pids += use()
gc.collect()
print(*pids)
print(len(os.listdir("/proc/self/fd")) - before)
print(*[t.name for t in threading.enumerate() if t is not threading.main_thread()])
"""


def test_the_pool_leaves_nothing() -> None:
    """Neither processes nor open files nor threads, after work that timed out and a worker that died."""
    driver = subprocess.run(
        [sys.executable, "-c", LEAVES_NOTHING, f"{FILE}:act"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert driver.returncode == 0, driver.stderr
    pids, descriptors, threads = driver.stdout.split("\n")[:3]
    assert len(pids.split()) == 6
    assert not wait_gone([int(pid) for pid in pids.split()])
    assert descriptors == "0"
    assert threads == ""
