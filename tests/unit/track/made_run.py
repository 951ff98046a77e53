"""A run folder as a run leaves it, made from synthetic records."""

import json
from pathlib import Path

from synthetic_run import run_records

from lora_rl.track import RunRecorder
from lora_rl.track.run_info import FINISHED, RunInfo
from lora_rl.track.samples import FILE_NAME

HOSTILE = '</pre><script>document.title = "broken"</script>\x00\x1b[31m\ud800 & <b>'
CONFIG = """\
grpo:
  val_temperature: 1.0
  seed: {seed}
policy:
  model_name: models/<small & fine>
"""


def make_run(folder: Path, *, steps: int = 60, seed: int = 0, stale: bool = False, samples: bool = True) -> Path:
    """Write metrics.jsonl, config.yaml, run.json and val_samples.jsonl."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(seed=seed))
    info = RunInfo(folder, "grpo")
    with RunRecorder(folder) as recorder:
        for record in run_records(steps, seed):
            metrics = {name: value for name, value in record.items() if "/" in name}
            if stale and record["step"]:
                metrics |= {"rollout/age_mean": 1.0, "rollout/age_max": 2, "rollout/engine_idle_share": 0.25}
            recorder.log(record["step"], metrics)
    if samples:
        write_samples(folder / FILE_NAME, steps)
    info.end(FINISHED, total_steps=steps)
    return folder


def sample(step: int, prompt: str, completion: str, right: bool, index: int = 0) -> dict:
    return {
        "step": step, "prompt_id": prompt, "sample": index, "prompt": f"question {prompt}",
        "expected": f"answer {prompt}", "completion": completion, "reward": float(right), "right": right,
    }  # fmt: skip


def write_samples(path: Path, last: int) -> None:
    """One prompt improves, one regresses, one stays wrong, one right; a validation in between says otherwise."""
    marks = {"up": (False, True), "down": (True, False), "wrong": (False, False), "right": (True, True)}
    lines = []
    for step, column in ((0, 0), (last // 2, 0), (last, 1)):
        for prompt, rights in marks.items():
            text = HOSTILE if (prompt, step) == ("up", last) else f"{prompt} at {step}"
            lines.append(sample(step, prompt, text, rights[column]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
