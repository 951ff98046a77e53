"""PEFT directories: what `peft` writes is read, what is written `peft` reads, and what is not supported is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from lora_rl.lora.merge import AdapterTensors
from lora_rl.lora.peft_io import PeftAdapter, read_peft, write_peft

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


class Toy(torch.nn.Module):
    """Two linears with the module names of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
        self.model.layers[0].self_attn = torch.nn.Module()
        self.model.layers[0].self_attn.q_proj = torch.nn.Linear(6, 8)
        self.model.layers[1].mlp = torch.nn.Module()
        self.model.layers[1].mlp.up_proj = torch.nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.layers[1].mlp.up_proj(self.model.layers[0].self_attn.q_proj(x))


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapter(rank_q: int = 2, rank_up: int = 2, scale_q: float = 1.5, scale_up: float = 1.5) -> PeftAdapter:
    q = AdapterTensors(random(rank_q, 6, seed=1), random(8, rank_q, seed=2), scale_q)
    up = AdapterTensors(random(rank_up, 8, seed=3), random(10, rank_up, seed=4), scale_up)
    return PeftAdapter({Q: q, UP: up}, "somewhere/base")


def merged(tensors: dict[str, AdapterTensors]) -> Toy:
    """The toy model with the adapters added to its weights, in float64."""
    toy = Toy().double()
    with torch.no_grad():
        for module, t in tensors.items():
            toy.get_submodule(module).weight += t.scale * t.b.double() @ t.a.double()
    return toy


@pytest.mark.parametrize(
    ("ranks", "scales"),
    [((2, 2), (1.5, 1.5)), ((2, 4), (1.5, 1.5)), ((2, 2), (1.5, 0.3)), ((3, 5), (2 / 3, 7.1))],
    ids=["uniform", "ranks", "scales", "both"],
)
def test_round_trip_and_peft_agrees(tmp_path: Path, ranks: tuple[int, int], scales: tuple[float, float]) -> None:
    given = adapter(*ranks, *scales)
    write_peft(tmp_path / "adapter", given, base_model="base")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter"]
    back = read_peft(tmp_path / "adapter")
    assert back.base_model_name_or_path == "base"
    assert back.tensors.keys() == given.tensors.keys()
    for module, t in given.tensors.items():
        assert back.tensors[module].a.equal(t.a)
        assert back.tensors[module].b.equal(t.b)
        assert back.tensors[module].scale == pytest.approx(t.scale, rel=1e-12)
    x = random(5, 6, seed=9)
    config = LoraConfig.from_pretrained(str(tmp_path / "adapter"))
    assert config.task_type == "CAUSAL_LM"
    config.task_type = None  # the toy model is not one
    theirs = PeftModel.from_pretrained(Toy(), str(tmp_path / "adapter"), config=config).eval()(x)
    torch.testing.assert_close(theirs.double(), merged(given.tensors)(x.double()), atol=1e-4, rtol=1e-5)
    assert not torch.allclose(theirs, Toy()(x), atol=0.1)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("patterns", [False, True])
def test_what_peft_writes_is_read(tmp_path: Path, rslora: bool, patterns: bool) -> None:
    """Patterns are regular expressions on the end of a path; here one hits by its last name, one by a wildcard."""
    more = {"rank_pattern": {"up_proj": 5}, "alpha_pattern": {r".*\.0\..*q_proj": 11}} if patterns else {}
    config = LoraConfig(r=3, lora_alpha=7, use_rslora=rslora, target_modules=["q_proj", "up_proj"], **more)
    model = get_peft_model(Toy(), config).eval()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_B" in name:
                parameter.copy_(random(*parameter.shape, seed=seed))
    model.save_pretrained(str(tmp_path / "adapter"))
    read = read_peft(tmp_path / "adapter")
    assert {m: t.rank for m, t in read.tensors.items()} == {Q: 3, UP: 5 if patterns else 3}
    root = math.sqrt if rslora else float
    assert read.tensors[Q].scale == pytest.approx((11 if patterns else 7) / root(3))
    x = random(5, 6, seed=9)
    torch.testing.assert_close(model(x).double(), merged(dict(read.tensors))(x.double()), atol=1e-4, rtol=1e-5)


def written(tmp_path: Path, **changes: object) -> Path:
    write_peft(tmp_path / "adapter", adapter(), base_model="base")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [3]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("alora_invocation_tokens", [1]),
        ("use_qalora", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "loftq"),
        ("peft_type", "IA3"),
        ("r", 0),
        ("r", 2.5),
        ("rank_pattern", [1]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        read_peft(written(tmp_path, **{key: value}))
    assert f"adapter_config.json: {key}: {value!r} is not" in str(error.value)


def test_everything_wrong_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)use_dora.*\n.*bias.*\n.*modules_to_save"):
        read_peft(written(tmp_path, use_dora=True, bias="all", modules_to_save=["lm_head"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"r": 3}, r"A \[2, 6\] and B \[8, 2\], but .* rank 3"), ({"lora_alpha": "x"}, "lora_alpha of .* 'x'")],
)
def test_a_configuration_that_does_not_fit_the_tensors(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_peft(written(tmp_path, **changes))


def test_half_an_adapter_and_foreign_tensors(tmp_path: Path) -> None:
    folder = written(tmp_path)
    weights = folder / "adapter_model.safetensors"
    state = load_file(weights)
    half = {name: t for name, t in state.items() if not name.endswith("q_proj.lora_B.weight")}
    save_file(half, weights)
    with pytest.raises(ValueError, match=f"{Q} has only A"):
        read_peft(folder)
    save_file({**state, "base_model.model.lm_head.weight": torch.zeros(2, 2)}, weights)
    with pytest.raises(ValueError, match=r"lm_head\.weight \[2, 2\] is not a LoRA factor"):
        read_peft(folder)


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json does not exist"):
        read_peft(tmp_path)
    folder = written(tmp_path)
    (folder / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: not a readable safetensors file"):
        read_peft(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json: not JSON"):
        read_peft(folder)


def test_nothing_is_overwritten_and_nothing_half_written_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path)
    with pytest.raises(FileExistsError, match="choose a directory that does not"):
        write_peft(folder, adapter(), base_model="base")

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("lora_rl.lora.tensor_files.save_file", full)
    with pytest.raises(OSError, match="No space"):
        write_peft(tmp_path / "other", adapter(), base_model="base")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter"]
