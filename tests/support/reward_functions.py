"""Reward functions for the tests of the pool: what a completion says is done."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from lora_rl.rewards import RewardReason, RewardResult

# `re` works on this for longer than anybody waits, without ever looking at Python's signals or letting go of the lock.
ENDLESS = "a" * 40 + "b"


def act(completion: str, answer: str, metadata: dict[str, Any]) -> Any:
    """Do what the completion says; the reward is 1 if it equals the answer."""
    verb, _, rest = completion.partition(" ")
    if verb == "sleep":
        time.sleep(float(rest))
    elif verb == "spin":
        re.fullmatch("(a|a)*c", ENDLESS)
    elif verb == "exit":
        os._exit(int(rest))
    elif verb == "segfault":
        ctypes.string_at(0)
    elif verb == "leave":
        sys.exit(int(rest))
    elif verb == "raise":
        raise LookupError(rest)
    elif verb == "allocate":
        return float(len(bytearray(int(rest))) > 0)
    elif verb == "spawn":
        # A process of the worker's own, to be found by its argument.
        subprocess.Popen(["sleep", rest])
        time.sleep(60)
    elif verb == "die_once":
        marker = Path(metadata["folder"]) / rest
        if not marker.exists():
            marker.touch()
            os._exit(3)
        return 1.0
    elif verb == "count":
        path = Path(metadata["folder"]) / rest
        with path.open("a") as file:
            file.write("x")
        os._exit(1)
    elif verb == "pid":
        time.sleep(0.02)  # so that every worker gets a share
        return {"reward": 1.0, "pid": os.getpid(), "threads": float(metadata.get("threads", 0))}
    return float(completion == answer)


RETURNS: dict[str, Any] = {
    "zero": 0.0,
    "half": 0.5,
    "one": 1.0,
    "minus": -2.0,
    "three": 3.0,
    "int": 1,
    "true": True,
    "false": False,
    "numpy": np.float32(0.25),
    "numpy_array": np.array(1.0),
    "dict": {"reward": 0.5, "length": 0.25, "style": 0},
    "result": RewardResult(0.0, RewardReason.UNPARSEABLE),
    "result_parts": RewardResult(1.0, RewardReason.CORRECT, {"length": 0.5}),
    "none": None,
    "nan": math.nan,
    "inf": math.inf,
    "numpy_nan": np.float64("nan"),
    "huge": 10**400,
    "text": "1.0",
    "numpy_text": np.array("1.0"),
    "list": [1.0],
    "complex": 1j,
    "two": np.array([1.0, 1.0]),
    "dict_without": {"score": 1.0},
    "dict_none": {"reward": None},
    "dict_nan": {"reward": 1.0, "length": math.nan},
    "result_nan": RewardResult(math.nan, RewardReason.CORRECT),
}


def returned(completion: str) -> Any:
    """The value of that name."""
    return RETURNS[completion]


async def later(completion: str, answer: str) -> float:
    """A coroutine that has to wait."""
    await asyncio.sleep(0.01)
    return float(completion == answer)


def scaled(completion: str, answer: str, *, value: float) -> float:
    """For partial functions."""
    return value * (completion == answer)


half_of_it = functools.partial(scaled, value=0.5)


class Judge:
    """For callable objects, methods and dotted names."""

    def __call__(self, completion: str, answer: str) -> float:
        return float(completion == answer)

    async def wait(self, **given: Any) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"reward": float(given["completion"] == given["answer"]), "given": len(given)}


judge = Judge()


def everything(completion: str, answer: str, prompt: str, truncated: bool, metadata: dict[str, Any]) -> float:
    """1 if each argument is what the test sent."""
    return float((completion, answer, prompt, truncated, metadata) == ("c", "a", "p", False, {"k": [1]}))


def demanding(completion: str, tokens: list[int]) -> float:
    """Requires what nobody has."""
    return 1.0


not_callable = 3
