"""Models named by a hub id: taken from the hub's cache, downloaded once, and a clear error where neither can be."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lora_rl.config.model_files import find_folder, read_model_facts
from lora_rl.data import load_tokenizer, model_folder
from tests.support.hub import put_into_cache

MODEL = Path(__file__).parents[3] / "examples/models/tiny-adder"
ID, COMMIT = "someone/tiny", "0123456789abcdef0123456789abcdef01234567"
# Of these a run needs nothing.
IGNORED = {"pytorch_model.bin": b"pickled", "original/params.json": b"{}", "original/model.safetensors": b"x"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_itself(cache: Path) -> None:
    assert model_folder(str(MODEL)) == find_folder(str(MODEL)) == MODEL


def test_what_the_cache_has_is_used_without_asking(cache: Path) -> None:
    snapshot = put_into_cache(MODEL, ID, cache)
    # A request would need the hub, which cannot be reached from the tests.
    assert model_folder(ID) == model_folder(ID, "tokenizer") == snapshot
    assert load_tokenizer(snapshot).eos_token == load_tokenizer(MODEL).eos_token
    assert read_model_facts(ID).source == "cache"


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_cache_is_where_the_hubs_client_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "here"))
    ask = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    put_into_cache(MODEL, ID, tmp_path / "elsewhere")
    Path(said).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "elsewhere/hub").rename(said)
    found = find_folder(ID)
    assert found is not None and found.is_relative_to(said)


def test_a_folder_that_lacks_weights_is_refused_before_anything_starts(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model has no model\.safetensors: the folder is not a whole model"):
        model_folder(str(tmp_path / "model"))
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json: no weight_map"):
        model_folder(str(tmp_path / "model"))


@pytest.mark.parametrize("lacking", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_part_of_a_model_is_not_taken_for_all_of_it(cache: Path, lacking: str) -> None:
    (put_into_cache(MODEL, ID, cache) / lacking).unlink()
    is_tokenizer = lacking.startswith("tokenizer")
    assert (find_folder(ID, "tokenizer") is None) == is_tokenizer
    assert (find_folder(ID) is None) != is_tokenizer


def test_all_shards_must_be_there(cache: Path) -> None:
    snapshot = put_into_cache(MODEL, ID, cache)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model.safetensors").rename(snapshot / shards[0])
    assert find_folder(ID) is None
    (snapshot / shards[1]).touch()
    assert find_folder(ID) == snapshot


class Hub(BaseHTTPRequestHandler):
    """What of the hub's interface a download needs."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        files = {f.name: f.read_bytes() for f in MODEL.iterdir()} | IGNORED
        info, resolve = f"/api/models/{ID}/revision/main", f"/{ID}/resolve/{COMMIT}/"
        if self.path.split("?")[0] == info:
            siblings = [{"rfilename": name} for name in files]
            body = json.dumps({"id": ID, "sha": COMMIT, "siblings": siblings}).encode()
        elif self.path.startswith(f"/api/models/{ID}/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            body = json.dumps(tree).encode()
        elif self.path.startswith(resolve) and (name := self.path.removeprefix(resolve)) in files:
            body = files[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for header, value in {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """URL of a hub on loopback that has the tiny model, and what was asked of it."""
    handler = type("Handler", (Hub,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.asked
    server.shutdown()
    thread.join()
    server.server_close()


def ask(cache: Path, *names: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`model_folder` in a process of its own: where the hub is, is read at import."""
    script = "import sys; from lora_rl.data import model_folder; print(model_folder(*sys.argv[1:]))"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-c", script, *names],
        env={**clean, "HF_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_what_is_missing_is_downloaded_once(cache: Path, hub: tuple[str, list[str]]) -> None:
    url, asked = hub
    done = ask(cache, ID, "tokenizer", HF_ENDPOINT=url)
    assert done.returncode == 0, done.stderr
    assert not any(path.endswith("model.safetensors") for path in asked)
    assert find_folder(ID) is None
    done = ask(cache, ID, HF_ENDPOINT=url)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert find_folder(ID) == find_folder(ID, "tokenizer") == folder
    assert (folder / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    assert not any((folder / name).exists() for name in IGNORED)
    asked.clear()
    assert ask(cache, ID, HF_ENDPOINT=url).stdout.strip() == str(folder)
    assert not asked


@pytest.mark.parametrize("how", ["no such model", "offline", "unreachable"])
def test_what_cannot_be_had_is_one_clear_error(cache: Path, hub: tuple[str, list[str]], how: str) -> None:
    name = "someone/nothing" if how == "no such model" else ID
    environment = {
        "no such model": {"HF_ENDPOINT": hub[0]},
        "offline": {"HF_HUB_OFFLINE": "1"},
        "unreachable": {"HF_ENDPOINT": "http://127.0.0.1:1"},
    }[how]
    done = ask(cache, name, **environment)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"FileNotFoundError: model {name}: there is no such folder, and the files of a hub id of ")
    assert "Use the folder of a Hugging Face model" in last


def test_a_model_without_safetensors_is_named(cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    (other / "model.safetensors").unlink()
    put_into_cache(other, ID, cache)
    done = ask(cache, ID, HF_HUB_OFFLINE="1")
    assert "model.safetensors" in done.stderr.strip().splitlines()[-1]
