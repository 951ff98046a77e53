"""Questions of reasoning-gym: procedural, verifiable, the same for the same configuration on every machine."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from lora_rl.config.schema import ReasoningGymConfig, ReasoningGymTask
from lora_rl.data.examples import Example, Warn

_WORKER = Path(__file__).with_name("reasoning_gym_worker.py")
_PATIENCE_S = 30.0
# The last answer: a run asks for its data once for its identity and once for itself.
_last: dict[str, Any] = {}


def reasoning_gym_examples(section: ReasoningGymConfig, warn: Warn) -> tuple[list[Example], list[Example]]:
    """(train, held out), disjoint: no question is in both, and none twice.

    Held-out questions are drawn first, so that they do not depend on how much is trained on. An example's metadata
    has `reasoning_gym`: the name of its `dataset`, that dataset's `config`, and the whole `item`, which its scorer
    needs. Datasets without a single right answer have items without one: the example's answer is then empty.

    Args:
        warn: told when fewer different questions exist than were asked for, and when making them takes long.

    Raises:
        ValueError: reasoning-gym has no such dataset or setting, or refuses it, or cannot be used.
    """
    datasets = [task.model_dump() for task in section.datasets]
    sizes = {"val": (section.val_size, section.val_seed), "train": (section.size, section.seed)}
    order = json.dumps({"draws": [{"datasets": datasets, "size": n, "seed": seed} for n, seed in sizes.values()]})
    if order not in _last:
        answer = _ask(order, section, warn)
        _last.clear()
        _last[order] = answer
    parts = []
    for draw, (name, (size, _)) in zip(_last[order], sizes.items(), strict=True):
        if len(draw) < size:
            key = "val_size" if name == "val" else "size"
            warn(f"data.reasoning_gym.{key}={size}: only {len(draw)} different questions were found")
        parts.append([_example(section.datasets[which], item) for which, item in draw])
    held_out, train = parts
    if not train:
        raise ValueError(
            f"data.reasoning_gym: no question is left to train on after {len(held_out)} for validation; "
            "lower val_size, or let the config of the datasets make more different ones"
        )
    return train, held_out


def _ask(order: str, section: ReasoningGymConfig, warn: Warn) -> Any:
    command = [sys.executable, "-P", str(_WORKER)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        try:
            try:
                output, errors = process.communicate(order.encode(), timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                names = ", ".join(task.name for task in section.datasets)
                warn(
                    f"{names}: making {section.size} + {section.val_size} questions takes more than "
                    f"{_PATIENCE_S:.0f} s; some datasets, such as countdown and knight_swap, are slow: a smaller "
                    "data.reasoning_gym.size starts sooner"
                )
                output, errors = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        reason = errors.decode(errors="replace").strip().splitlines()
        raise ValueError(f"data.reasoning_gym: making the questions failed: {reason[-1] if reason else 'no message'}")
    answer = pickle.loads(output)
    if isinstance(answer, str):
        raise ValueError(f"data.reasoning_gym.datasets: {answer}")
    return answer


def _example(task: ReasoningGymTask, item: dict[str, Any]) -> Example:
    name = f"reasoning_gym/{task.name}/{hashlib.sha256(item['question'].strip().encode()).hexdigest()[:16]}"
    metadata = {"reasoning_gym": {"dataset": task.name, "config": task.config, "item": item}}
    return Example(name, item["question"], item["answer"] or "", where=name, metadata=metadata)
