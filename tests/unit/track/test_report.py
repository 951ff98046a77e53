"""report.html and the comparison: what they say, and that nothing of a run can become markup."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_run import HOSTILE, make_run

from lora_rl.track import read_metrics
from lora_rl.track.report import write_comparison, write_report
from lora_rl.track.report.compare_page import common_level, run_labels, seconds_to
from lora_rl.track.report.run_folder import read_run
from lora_rl.track.report.scale import LOG_FROM_RATIO, nice_step, step_scale, thinned, tick_text, value_scale
from lora_rl.track.run_info import FAILED, INTERRUPTED, RunInfo


class Page(HTMLParser):
    """Visible text of a page, its charts by title, and what it would fetch or run."""

    def __init__(self, path: Path):
        super().__init__()
        self.text, self.charts, self.links, self.scripts = "", {}, [], 0
        self._inside: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag in ("style", "script"):
            self._inside.append(tag)
            self.scripts += tag == "script"
        self.links += [values[name] for name in ("href", "src", "xlink:href") if values.get(name)]
        if "data-lines" in values:
            self.charts[values["aria-label"].rpartition(", ")[0]] = json.loads(values["data-lines"])["lines"]

    def handle_endtag(self, tag):
        if self._inside and tag == self._inside[-1]:
            self._inside.pop()

    def handle_data(self, data):
        if not self._inside:
            self.text += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "a run", stale=True)
    write_report(folder)
    return folder


def chart(page: Page, title: str) -> list[dict]:
    return next(lines for name, lines in page.charts.items() if name.startswith(title))


def test_curves_hold_what_was_recorded_and_the_key_figures_agree(run: Path):
    page, records = Page(run / "report.html"), read_metrics(run / "metrics.jsonl")
    accuracy = {r["step"]: r["val/accuracy"] for r in records if "val/accuracy" in r}
    (drawn,) = chart(page, "Held-out accuracy")
    assert drawn["points"] == [[step, pytest.approx(value, rel=1e-5)] for step, value in accuracy.items()]
    best = max(accuracy, key=accuracy.get)
    assert f"start 0.110, best {accuracy[best]:.3f} at step {best}" in page.text
    total = round(math.fsum(r["time/step"] for r in records))
    assert f"time{total // 60} m {total % 60:02d} s60 steps" in page.text
    values, means = (line["points"] for line in chart(page, "token_mult_prob_error - 1"))
    raw = [r["train/token_mult_prob_error"] - 1 for r in records if r["step"]]
    assert [v for _, v in values] == pytest.approx(raw, rel=1e-4)
    assert means[-1] == [60, pytest.approx(math.fsum(raw[-10:]) / 10, rel=1e-4)]
    assert [line["label"] for line in chart(page, "Age of the rollouts")] == ["mean", "oldest"]
    for part in ("finished, 60 steps", "gen_kl_error", "seed: 0", "processor", "model <small & fine>"):
        assert part in page.text, part


def test_the_page_is_self_contained_and_shows_hostile_text_as_text(run: Path):
    page = Page(run / "report.html")
    assert page.scripts == 1
    assert {link for link in page.links if not link.startswith("#")} == {"data:,"}
    assert "url(" not in (run / "report.html").read_text()
    assert "</pre><script>document.title" in page.text
    assert r"\x00\x1b[31m\ud800 & <b>" in page.text
    assert HOSTILE[:20] not in (run / "report.html").read_text()


def test_samples_are_sorted_by_what_changed(run: Path):
    text = Page(run / "report.html").text
    assert (
        "Of 4 held-out prompts, answered after step 0 and after step 60: 1 improved, 1 regressed, 1 right both times, "
        "1 wrong both times. Answers are sampled at temperature 1.0"
    ) in text
    improved, regressed, wrong, right = (
        text.index(part) for part in ("Improved 1", "Regressed 1", "Wrong both", "Right both")
    )
    assert improved < text.index("question up") < regressed < text.index("question down") < wrong
    assert wrong < text.index("question wrong") < right < text.index("question right")
    assert "✗ up at 0" in text and "✓ down at 0" in text and "down at 30" not in text


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        (None, "no end recorded, step 12 The"),
        ((INTERRUPTED, None), "interrupted after step 12 of 40"),
        ((FAILED, "WorkerError: rank 1 died"), "Failed after step 12 of 40WorkerError: rank 1 died"),
    ],
)
def test_the_end_of_a_run_is_told(tmp_path: Path, end, shown):
    folder = make_run(tmp_path / "run", steps=12, samples=False)
    info = RunInfo(folder, "grpo")
    if end:
        info.end(*end, total_steps=40)
    text = Page(write_report(folder)).text
    assert shown.replace(" The", "") in text
    assert "Samples that improved" not in text


def test_values_that_were_not_finite_are_named_and_leave_gaps(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [{"step": n, "wall_time": 0.0, "elapsed_s": 1.0 * n, "train/reward": 0.1 * n} for n in range(1, 9)]
    lines[4] |= {"train/reward": None, "nonfinite": ["train/reward"]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(write_report(folder))
    assert "not finite" in page.text and "train/reward (first at step 5)" in page.text
    (line,) = chart(page, "Reward")
    assert [step for step, _ in line["points"]] == [1, 2, 3, 4, 6, 7, 8]
    path = re.search(r'<path d="([^"]*)" class="line', (folder / "report.html").read_text()).group(1)
    assert path.count("M") == 2 and path.count("L") == 5


def test_damaged_or_missing_folders_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="is no folder; give the folder of a run"):
        write_report(tmp_path / "none")
    made = make_run(tmp_path / "results" / "run", steps=3)
    with pytest.raises(FileNotFoundError, match=r"holds no metrics.jsonl.*run folders in it: .*results/run"):
        write_report(tmp_path / "results")
    with pytest.raises(ValueError, match="needs two run folders or more; given: 1"):
        write_comparison([made], tmp_path / "c.html")
    with (made / "val_samples.jsonl").open("a") as file:
        file.write('{"step": 3}\n')
    with pytest.raises(ValueError, match=r"val_samples\.jsonl, line 13: a sample is an object with"):
        write_report(made)
    (made / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no record yet"):
        write_report(made)
    assert not (made / "report.html").exists()


def test_a_comparison_sets_runs_side_by_side(tmp_path: Path):
    first = make_run(tmp_path / "one" / "run", seed=0)
    second = make_run(tmp_path / "two" / "run", seed=1, steps=40)
    page = Page(write_comparison([first, second], tmp_path / "c.html"))
    for folder, line in zip((first, second), chart(page, "Held-out accuracy"), strict=True):
        recorded = [
            [r["step"], r["val/accuracy"]] for r in read_metrics(folder / "metrics.jsonl") if "val/accuracy" in r
        ]
        assert line["points"] == [[step, pytest.approx(value, rel=1e-5)] for step, value in recorded]
        assert line["label"] == f"{folder.parent.name}/run"
    assert "grpo.seed01" in page.text.replace(" ", "")
    answered = (
        "Of 4 held-out prompts that both answered: 2 right in both, 0 better in two/run, 0 better in one/run, 2 wrong"
    )
    assert answered in page.text


def test_time_to_the_level_that_all_runs_reached(tmp_path: Path):
    runs = [read_run(make_run(tmp_path / name, seed=seed)) for name, seed in (("a", 0), ("b", 1))]
    level = common_level(runs)
    best = [max(r.get("val/accuracy", 0.0) for r in run.records) for run in runs]
    assert level == min(best)
    for run in runs:
        reached = seconds_to(run, level)
        (record,) = [r for r in run.records if r["elapsed_s"] == reached]
        assert record["val/accuracy"] >= level
        assert all(r.get("val/accuracy", 0.0) < level for r in run.records if r["elapsed_s"] < reached)
    assert run_labels([runs[0], runs[0]]) == ["a (1)", "a (2)"]


@pytest.mark.parametrize(
    "values",
    [
        [0.4, 0.93],
        [1.0, 1.00002],
        [0.0, 0.0],
        [-3.0, 5.0],
        [2e-12, 9e-12],
        [1e5, 3e6],
        [0.25],
        [1e-13] + [1e-3] * 30,
        [1e-5] * 40 + [1.0],
    ],
)
def test_axes_hold_every_value_and_ticks_read_differently(values):
    scale = value_scale(values, 200.0, 10.0)
    places = [scale(value) for value in values]
    assert all(10.0 - 1e-6 <= place <= 200.0 + 1e-6 for place in places)
    assert scale.low <= min(values) and scale.high >= max(values)
    assert 2 <= len(scale.ticks) <= 9
    texts = [tick_text(tick, scale.ticks) for tick in scale.ticks]
    assert len(set(texts)) == len(texts)
    assert all(len(text) <= 8 for text in texts)
    for tick, text in zip(scale.ticks, texts, strict=True):
        assert float(text.replace(",", "")) == pytest.approx(tick, rel=0.05, abs=1e-30)
    assert scale.log == (values == [1e-5] * 40 + [1.0])
    assert max(values) / max(min(values), 1e-300) > LOG_FROM_RATIO or not scale.log


def test_steps_have_whole_ticks_and_steps_of_axes_are_round():
    assert [tick_text(t, step_scale(0, 3, 0, 1).ticks) for t in step_scale(0, 3, 0, 1).ticks] == ["0", "1", "2", "3"]
    for span in (0.03, 1.0, 7.0, 9.99, 10.0, 170.0, 12345.0):
        step = nice_step(span, 5)
        assert span / step <= 5 * (1 + 1e-6)
        assert f"{step:.0e}"[0] in "125"


def test_thinning_keeps_extremes_gaps_and_ends():
    values = [math.sin(n / 500) for n in range(10_000)]
    values[1234], values[7777] = 50.0, -50.0
    values[3000:4000] = [math.nan] * 1000
    points = thinned(range(10_000), values, most=400)
    assert len(points) < 420
    assert (1234, 50.0) in points and (7777, -50.0) in points
    assert points[-1][0] == 9_999
    assert any(math.isnan(value) for _, value in points)
    assert [step for step, _ in points] == sorted(step for step, _ in points)
