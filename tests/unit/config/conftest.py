"""Fixtures: a small local model, a valid configuration file, and what is refused when it is overridden."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rl.config import ConfigError, Violation, load_config
from tests.unit.config.sample_files import write_config, write_model


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def config_file(tmp_path: Path, model_dir: Path) -> Path:
    return write_config(tmp_path, model_dir)


@pytest.fixture
def refused(config_file: Path):
    """Load the valid file with overrides that must be refused; the violations by key."""

    def load(*overrides: str, path: Path = config_file) -> dict[str, Violation]:
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        keys = [violation.key for violation in caught.value.violations]
        assert len(keys) == len(set(keys)), f"a key is reported twice: {keys}"
        return {violation.key: violation for violation in caught.value.violations}

    return load
