"""The section `reward`: a list of sections, functions found without being imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rl.config import load_config, resolved_yaml

LIST = "reward.additional"


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        ("[{name: format, wieght: 1}]", f"{LIST}[0].wieght", "unknown key; did you mean weight?"),
        ("[{name: numerc}]", f"{LIST}[0].name", "did you mean numeric?"),
        ("[{name: numeric}, {name: numeric, rtol: -1}]", f"{LIST}[1].rtol", "expected number >= 0 | null"),
        ("[{name: numeric, weight: 0}]", f"{LIST}[0].weight", "expected number > 0"),
        ("[{name: numeric, rtol: nan}]", f"{LIST}[0].rtol", "expected number >= 0 | null"),
        ("[numeric]", f"{LIST}[0]", "expected a mapping with the keys name, weight, label"),
        ("[{name: {a: 1}}]", f"{LIST}[0].name", "expected exact_match | numeric"),
        ("numeric", LIST, "expected list of {name, weight, label"),
    ],
)
def test_mistakes_in_a_list_of_verifiers_name_the_item(refused, value: str, key: str, message: str) -> None:
    violations = refused(f"{LIST}={value}")
    assert set(violations) == {key}
    assert message in str(violations[key])


def test_several_verifiers_survive_the_resolved_file(config_file: Path, tmp_path: Path) -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    config = load_config(
        config_file,
        [
            "reward.answer_from=marker",
            "reward.answer_marker='#### '",
            f"{LIST}=[{{name: format, weight: 0.2, pattern: '{pattern}'}}, {{name: numeric, label: near, atol: 1}}]",
        ],
    )
    assert [v.metric for v in (config.reward, *config.reward.additional)] == ["exact_match", "format", "near"]
    assert config.reward.additional[0].pattern == pattern
    (tmp_path / "again.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("at", ["reward.function", f"{LIST}=[{{name: function, function: "])
def test_a_function_file_is_found_beside_the_configuration(config_file: Path, monkeypatch, at: str) -> None:
    (config_file.parent / "own_rewards.py").write_text("def score(completion):\n    return 1.0\n")
    monkeypatch.chdir("/")
    inside = at.startswith(LIST)
    override = f"{at}own_rewards.py:score}}]" if inside else f"{at}=own_rewards.py:score"
    config = load_config(config_file, [override] if inside else ["reward.name=function", override])
    found = config.reward.additional[0].function if inside else config.reward.function
    assert found == f"{config_file.parent.resolve()}/own_rewards.py:score"


@pytest.mark.parametrize(
    "source",
    [
        "def score(completion): ...",
        "async def score(completion): ...",
        "import functools\nscore = functools.partial(print)",
        "class score: ...",
        "from os.path import join as score",
        "from os.path import *",
        "def __getattr__(name): ...",
        "globals()['score'] = print",
        "if True:\n    score = print",
        "score: object = print",
    ],
)
def test_every_way_to_define_a_function_is_accepted_unseen(config_file: Path, source: str) -> None:
    """And nothing of the module is run."""
    (config_file.parent / "own.py").write_text(f"{source}\nraise SystemExit\n")
    load_config(config_file, ["reward.name=function", f"reward.function={config_file.parent}/own.py:score"])


def test_a_module_of_the_current_directory_is_found(config_file: Path, tmp_path: Path, monkeypatch, refused) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own_module.py").write_text("def score(completion):\n    return 1.0\n")
    wanted = ["reward.name=function", "reward.function=own_module:score"]
    assert "there is no module own_module" in str(refused(*wanted)["reward.function"])
    monkeypatch.chdir(tmp_path / "here")
    load_config(config_file, wanted)
    (tmp_path / "here" / "own_module.py").write_text("def score(:\n")
    assert "is not Python: invalid syntax" in str(refused(*wanted)["reward.function"])


def test_a_label_has_no_slash_which_parts_follow(refused) -> None:
    assert "a/b" in str(refused("reward.name=numeric", "reward.label=a/b")["reward.label"])


@pytest.mark.parametrize("label", ["length penalty", "a:b", "L\u00e4nge", ""])
def test_a_label_is_the_name_of_a_metric(config_file: Path, refused, label: str) -> None:
    from lora_rl.config.metric_names import is_metric_part

    assert not is_metric_part(label)
    if label:
        assert "it becomes the name of a metric" in str(
            refused("reward.name=numeric", f"reward.label={label!r}")["reward.label"]
        )
    load_config(config_file, ["reward.name=numeric", "reward.label=length_penalty@2"])


def test_a_package_with_a_finder_of_its_own_is_found(config_file: Path, tmp_path: Path, monkeypatch) -> None:
    """As setuptools installs packages in place."""
    import importlib.util
    import sys

    file = tmp_path / "elsewhere.py"
    file.write_text("def score(completion):\n    return 1.0\n")

    class Finder:
        @staticmethod
        def find_spec(name, path, target=None):
            return importlib.util.spec_from_file_location(name, file) if name == "in_place" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    load_config(config_file, ["reward.name=function", "reward.function=in_place:score"])
