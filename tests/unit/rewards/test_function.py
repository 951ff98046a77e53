"""Functions as verifiers: how they are found, what they are given, what their return values mean."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lora_rl.rewards import RewardError, RewardReason, RewardResult, ScoreRequest
from lora_rl.rewards.function import FunctionVerifier, load_function, to_result
from tests.support import reward_functions

FILE = reward_functions.__file__
MODULE = "tests.support.reward_functions"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("zero", 0.0, "wrong"),
        ("half", 0.5, "partial"),
        ("one", 1.0, "correct"),
        ("minus", -2.0, "wrong"),
        ("three", 3.0, "correct"),
        ("int", 1.0, "correct"),
        ("true", 1.0, "correct"),
        ("false", 0.0, "wrong"),
        ("numpy", 0.25, "partial"),
        ("numpy_array", 1.0, "correct"),
        ("dict", 0.5, "partial"),
        ("result", 0.0, "unparseable"),
        ("result_parts", 1.0, "correct"),
        *(
            (name, 0.0, "invalid_value")
            for name in (
                "none", "nan", "inf", "numpy_nan", "huge", "text", "numpy_text", "list", "complex", "two",
                "dict_without", "dict_none", "dict_nan", "result_nan",
            )
        ),
    ],
)  # fmt: skip
def test_every_kind_of_return_value(name: str, value: float, reason: str) -> None:
    result = FunctionVerifier(f"{FILE}:returned").score(ScoreRequest(name, ""))
    assert (result.value, result.reason) == (value, reason)
    assert type(result.value) is float
    assert bool(result.message) == (reason == "invalid_value")


def test_every_return_value_of_the_table_is_tested() -> None:
    marks = next(m for m in test_every_kind_of_return_value.pytestmark if m.name == "parametrize")
    assert {case[0] for case in marks.args[1]} == set(reward_functions.RETURNS)


def test_parts_of_a_mapping_are_reported() -> None:
    verifier = FunctionVerifier(f"{FILE}:returned")
    assert verifier.score(ScoreRequest("dict", "")).components == {"length": 0.25, "style": 0.0}
    assert verifier.score(ScoreRequest("result_parts", "")).components == {"length": 0.5}


@pytest.mark.parametrize("name", ["later", "judge", "judge.wait", "Judge.__call__"])
@pytest.mark.parametrize("place", [FILE, MODULE])
def test_coroutines_objects_methods(place: str, name: str) -> None:
    if name == "Judge.__call__":
        # An unbound method requires `self`.
        with pytest.raises(RewardError, match="it requires self; what it may take, by name, is completion, answer"):
            FunctionVerifier(f"{place}:{name}")
        return
    verifier = FunctionVerifier(f"{place}:{name}")
    assert [verifier.score(ScoreRequest(c, "x")).value for c in ("x", "y", "x")] == [1.0, 0.0, 1.0]


def test_a_partial_function() -> None:
    verifier = FunctionVerifier(f"{FILE}:half_of_it")
    assert [verifier.score(ScoreRequest(c, "x")).value for c in ("x", "y")] == [0.5, 0.0]


def test_a_function_gets_what_it_names() -> None:
    request = ScoreRequest("c", "a", prompt="p", metadata={"k": [1]})
    assert FunctionVerifier(f"{FILE}:everything").score(request).value == 1.0
    assert FunctionVerifier(f"{FILE}:judge.wait").score(request).components == {"given": 5.0}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{FILE}:nothing", "has no nothing; it has Judge, "),
        (f"{FILE}:judge.nothing", "has no judge.nothing"),
        (f"{FILE}:not_callable", "not_callable is int, which cannot be called"),
        (f"{FILE}:demanding", "it requires tokens; what it may take"),
        ("/nowhere/f.py:g", "importing /nowhere/f.py failed: FileNotFoundError"),
        ("no_such_module_at_all:g", "importing no_such_module_at_all failed: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_used_is_named(path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        FunctionVerifier(path)


@pytest.mark.parametrize(
    ("source", "message"), [("import sys\nsys.exit(3)", "SystemExit: 3"), ("1 / 0", "ZeroDivisionError")]
)
def test_a_module_that_fails(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "failing.py").write_text(source)
    with pytest.raises(RewardError, match=message):
        load_function(f"{tmp_path}/failing.py:f")


def test_a_file_may_import_its_neighbour_and_use_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "reward_neighbour.py").write_text("VALUE = 0.5\n")
    (tmp_path / "with_neighbour.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport reward_neighbour\n"
        "@dataclass\nclass Weights:\n    length: float = reward_neighbour.VALUE\n"
        "def score(completion):\n    return Weights().length\n"
    )
    result = FunctionVerifier(f"{tmp_path}/with_neighbour.py:score").score(ScoreRequest("", ""))
    assert (result.value, result.reason) == (0.5, RewardReason.PARTIAL)


def test_a_result_has_plain_numbers_and_a_known_reason() -> None:
    """It is written as JSON, and its reason becomes a metric."""
    given = RewardResult(np.float32(0.5), "partial", {"format": np.float64(1.0), "length": torch.tensor(2)})
    result = to_result(given)
    assert result == RewardResult(0.5, RewardReason.PARTIAL, {"format": 1.0, "length": 2.0})
    assert result.reason is RewardReason.PARTIAL
    assert json.loads(json.dumps([result.value, *result.components.values()])) == [0.5, 1.0, 2.0]
    with pytest.raises(ValueError, match="cannot have the reason 'too_short'; valid are correct, partial, wrong"):
        RewardResult(0.0, "too_short")


@pytest.mark.parametrize("name", ["length penalty", "a:b", "L\u00e4nge"])
def test_a_part_that_cannot_be_a_metric_is_an_invalid_value(name: str) -> None:
    for returned in ({"reward": 1.0, name: 0.5}, RewardResult(1.0, RewardReason.CORRECT, {name: 0.5})):
        result = to_result(returned)
        assert (result.value, result.reason) == (0.0, RewardReason.INVALID_VALUE)
        assert "the name of a metric has letters, digits" in result.message
