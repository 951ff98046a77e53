"""A model as a download from the Hugging Face hub leaves it.

python -m tests.support.hub FOLDER ID HF_HOME
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

COMMIT = "fedcba9876543210fedcba9876543210fedcba98"


def put_into_cache(model: Path, hub_id: str, hf_home: Path) -> Path:
    """Copy a model's folder into the hub's cache under an id; the folder of the copy."""
    repository = hf_home / "hub" / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    return Path(shutil.copytree(model, repository / "snapshots" / COMMIT))


if __name__ == "__main__":
    put_into_cache(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
