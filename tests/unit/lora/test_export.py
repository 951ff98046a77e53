"""Merged export of a real checkpoint: `peft` on the base model is the reference."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from lora_rl.lora.export import export_merged
from lora_rl.lora.merge import AdapterTensors
from lora_rl.lora.peft_io import PeftAdapter, write_peft
from tests.support.batches import make_batch
from tests.support.hf import hf_logprobs, load_hf, peft_model

ROOT = Path(__file__).parents[3]
RANK, ALPHA = 4, 10.0
UP = "model.layers.1.mlp.up_proj"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def new_adapter(base: Path, *, skip: str = "o_proj") -> PeftAdapter:
    """Random, on every linear but one kind."""
    generator = torch.Generator().manual_seed(0)
    modules = {}
    for name, weight in sorted(tensors_of(base).items()):
        if name.endswith("_proj.weight") and skip not in name:
            a = torch.randn(RANK, weight.shape[1], generator=generator) * 0.2
            b = torch.randn(weight.shape[0], RANK, generator=generator) * 0.2
            modules[name.removesuffix(".weight")] = AdapterTensors(a, b, ALPHA / RANK)
    return PeftAdapter(modules)


def with_module(adapter: PeftAdapter, module: str, *, columns: int) -> PeftAdapter:
    extra = AdapterTensors(torch.ones(RANK, columns), torch.ones(96, RANK), 1.0)
    return PeftAdapter({**adapter.tensors, module: extra})


@pytest.fixture(scope="module", params=["tied", "untied", "in shards"])
def base(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in models:
        return models[request.param]
    folder = tmp_path_factory.mktemp("shards")
    load_hf(models["tied"]).save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def test_the_export_computes_what_peft_computes(base: Path, tmp_path: Path) -> None:
    adapter, batch = new_adapter(base), make_batch(5)
    export_merged(base, adapter, tmp_path / "new" / "merged")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["merged"]
    reference = peft_model(base, {m: (t.a, t.b) for m, t in adapter.tensors.items()}, alpha=ALPHA, rank=RANK)
    with torch.no_grad():
        want, got = (hf_logprobs(model, batch) for model in (reference, load_hf(tmp_path / "new" / "merged")))
        plain = hf_logprobs(load_hf(base), batch)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert (got - plain).abs().max() > 1, "the adapter must matter"


def test_what_has_no_adapter_is_copied_bit_for_bit(base: Path, tmp_path: Path) -> None:
    adapter, before = new_adapter(base), tensors_of(base)
    export_merged(base, adapter, tmp_path / "merged")
    after = tensors_of(tmp_path / "merged")
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor.dtype is before[name].dtype
        assert tensor.equal(before[name]) == (name.removesuffix(".weight") not in adapter.tensors), name
    for file in base.iterdir():
        copy = tmp_path / "merged" / file.name
        assert copy.exists()
        assert file.suffix == ".safetensors" or copy.read_bytes() == file.read_bytes()


def test_the_tokenizer_comes_along(models: dict[str, Path], tmp_path: Path) -> None:
    export_merged(models["tied"], new_adapter(models["tied"]), tmp_path / "merged")
    text = "1 + 2 ="
    ids = [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for folder in (models["tied"], tmp_path / "merged")]
    assert ids[0] == ids[1]


def test_bfloat16_is_cast_once_after_a_merge_in_float32(models: dict[str, Path], tmp_path: Path) -> None:
    base, adapter = models["tied"], new_adapter(models["tied"])
    export_merged(base, adapter, tmp_path / "float32")
    export_merged(base, adapter, tmp_path / "bfloat16", dtype="bfloat16")
    exact = tensors_of(tmp_path / "float32")
    for name, tensor in tensors_of(tmp_path / "bfloat16").items():
        assert tensor.dtype is torch.bfloat16
        assert tensor.equal(exact[name].bfloat16()), name


# -- refusals: nothing is written, nothing half-written stays --------------------------------------------------------


@pytest.mark.parametrize("content", [None, "notes.txt"])
def test_an_existing_folder_is_refused(models: dict[str, Path], tmp_path: Path, content: str | None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if content:
        (out / content).write_text("mine")
    with pytest.raises(FileExistsError, match="out exists; choose a directory that does not"):
        export_merged(models["tied"], new_adapter(models["tied"]), out)
    assert [path.name for path in out.iterdir()] == ([content] if content else [])


def test_modules_that_the_base_lacks_are_named(models: dict[str, Path], tmp_path: Path) -> None:
    adapter = with_module(new_adapter(models["tied"]), "model.layers.9.mlp.up_proj", columns=64)
    with pytest.raises(ValueError, match=r"no weights for the adapter's modules model\.layers\.9\.mlp\.up_proj$"):
        export_merged(models["tied"], adapter, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_middle_leaves_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    adapter = with_module(new_adapter(models["tied"]), UP, columns=65)
    with pytest.raises(ValueError, match=r"A \[4, 65\] and B \[96, 4\] does not fit a base matrix \[96, 64\]"):
        export_merged(models["tied"], adapter, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    with pytest.raises(FileNotFoundError, match=r"base has no model\.safetensors: .*see --base"):
        export_merged(tmp_path / "base", PeftAdapter({}), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_the_example_ends_wrong_input_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    command = [sys.executable, "examples/export_adapter.py", "--adapter", tmp_path, "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    [message] = done.stderr.splitlines()
    assert message.startswith(f"{tmp_path / 'adapter_model.safetensors'} does not exist")
    assert not (tmp_path / "out").exists()


def test_other_weights_beside_the_model_are_not_taken_for_it(base: Path, tmp_path: Path) -> None:
    """Some repositories have the same weights under other names beside them."""
    import shutil

    from safetensors.torch import save_file

    from lora_rl.sync.receiver import Checkpoint

    both = tmp_path / "both"
    shutil.copytree(base, both)
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, str(both / "consolidated.safetensors"))
    assert Checkpoint.open(str(both)).names == Checkpoint.open(str(base)).names == tensors_of(base).keys()
    export_merged(both, new_adapter(base), tmp_path / "merged")
    assert not (tmp_path / "merged" / "consolidated.safetensors").exists()
    assert tensors_of(tmp_path / "merged").keys() == tensors_of(base).keys()


def test_a_damaged_base_is_named_and_leaves_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(models["tied"], base)
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"base/model\.safetensors: not a readable safetensors file"):
        export_merged(base, new_adapter(models["tied"]), tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_others_may_read_what_is_written(models: dict[str, Path], tmp_path: Path) -> None:
    adapter = new_adapter(models["tied"])
    export_merged(models["tied"], adapter, tmp_path / "merged")
    write_peft(tmp_path / "adapter", adapter, base_model="x")
    (tmp_path / "new").touch()
    files = [*tmp_path.glob("*/*.safetensors")]
    assert len(files) == 2 and {file.stat().st_mode for file in files} == {(tmp_path / "new").stat().st_mode}
