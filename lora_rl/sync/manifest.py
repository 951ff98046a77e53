"""What a push consists of, and how both sides prove they mean the same bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from lora_rl.sync.errors import SyncError

if TYPE_CHECKING:
    import torch

    from lora_rl.lora.merge import AdapterTensors, Fidelity, Rounding

SyncMode = Literal["merged", "adapter_merge", "adapter"]
LORA_A, LORA_B = ".lora_A", ".lora_B"
# Of an SVD-LoRA adapter: B is then U, and the B to merge is U times the core that these describe.
LORA_SIGMA, LORA_MIXING = ".lora_sigma", ".lora_mixing"
_SUFFIXES = (LORA_A, LORA_B, LORA_SIGMA, LORA_MIXING)


@dataclass(frozen=True)
class Transfer:
    """What a receiver needs to know before the first push.

    Attributes:
        path: of the buffer the sending rank writes, on its host.
        nbytes: size of the buffer.
        names: the tensors that every push must consist of.
    """

    path: str
    nbytes: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a push.

    Attributes:
        name: Hugging Face parameter name.
        shape: full shape.
        dtype: torch dtype name, such as `float32`.
        offset: first byte in the transfer buffer.
        nbytes: size in bytes.
        checksum: CRC-32 of the bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """All tensors of one push and the weight version they make up.

    Attributes:
        version: weight version.
        entries: the tensors: full Hugging Face weights in mode `merged`, `<module>.lora_A` and `.lora_B` otherwise,
            with `.lora_sigma` (and `.lora_mixing`) where sigma travels apart from the singular vectors.
        mode: `merged`, `adapter_merge` or `adapter`.
        scales: alpha / r of each adapted module; empty in mode `merged`.
        rounding: how a receiver that merges casts to its weight type, `nearest` or `stochastic`.
        seed: seed of stochastic rounding; together with the version and a tensor's name it fixes every bit.
    """

    version: int
    entries: tuple[TensorEntry, ...]
    mode: SyncMode = "merged"
    scales: dict[str, float] = field(default_factory=dict)
    rounding: Rounding = "nearest"
    seed: int = 0

    @property
    def nbytes(self) -> int:
        """Payload in bytes: a matrix that several entries share counts once, alignment gaps do not."""
        return sum({entry.offset: entry.nbytes for entry in self.entries}.values())

    @property
    def digest(self) -> str:
        """One hexadecimal number for names, shapes, types and contents, independent of order and version."""
        lines = [f"{e.name} {e.shape} {e.dtype} {e.checksum:08x}" for e in self.entries]
        lines = sorted([*lines, *(f"{name} scale {scale!r}" for name, scale in self.scales.items())])
        return f"{zlib.crc32(chr(10).join(lines).encode()):08x}"

    def to_dict(self) -> dict[str, Any]:
        """Plain types, as vLLM's RPC carries them."""
        return {**vars(self), "entries": [asdict(entry) for entry in self.entries]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Manifest:
        """Inverse of `to_dict`."""
        entries = (TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in data["entries"])
        return cls(**{**data, "entries": tuple(entries)})


@dataclass(frozen=True)
class SyncReport:
    """What one vLLM worker says it holds after a push.

    Attributes:
        version: weight version of the push it loaded.
        digest: `Manifest.digest` recomputed from the bytes it read.
        tensors: number of Hugging Face tensors loaded.
        nbytes: their size in bytes.
        fidelity: what a worker that merged delivered of the update; None where the trainer merged.
    """

    version: int
    digest: str
    tensors: int
    nbytes: int
    fidelity: Fidelity | None = None


def checksum(tensor: torch.Tensor) -> int:
    """32 bits that change with the bytes of a contiguous tensor or their order.

    CRC-32 on the CPU. On a GPU, which both sides of a transfer then are, the sum of the 16-bit words, each times an
    odd number of its place: it is computed where the data is.
    """
    import torch

    flat = tensor.detach().reshape(-1)
    if flat.device.type == "cpu":
        return zlib.crc32(flat.view(torch.uint8).numpy())
    return weighted_sum(flat)


def weighted_sum(flat: torch.Tensor) -> int:
    """See `checksum`; for 1-D tensors of 2- or 4-byte types on any device."""
    import torch

    words = flat.view(torch.int16)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), 1 << 24):
        part = words[start : start + (1 << 24)].long()
        places = torch.arange(start, start + part.numel(), device=flat.device) * 2654435761 | 1
        # int64 products and sums wrap around, the same on every device.
        total += (part * places).sum()
    mixed = int(total) & 0xFFFFFFFFFFFFFFFF
    return mixed >> 32 ^ mixed & 0xFFFFFFFF


def check_names(received: Iterable[str], expected: Iterable[str], *, optional: Iterable[str] = ()) -> None:
    """Refuse a push that does not consist of exactly the model's tensors.

    Args:
        received: names in the push.
        expected: names in the checkpoint the engine loaded.
        optional: names that may be in either only (a tied output layer).

    Raises:
        SyncError: naming missing, unexpected and repeated tensors.
    """
    received = list(received)
    got, want, free = set(received), set(expected), set(optional)
    repeated = sorted({name for name in received if received.count(name) > 1}) if len(got) != len(received) else []
    problems = [
        f"{what} {len(names)} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
        for what, names in (
            ("missing", sorted(want - got - free)),
            ("unexpected", sorted(got - want - free)),
            ("repeated", repeated),
        )
        if names
    ]
    if problems:
        raise SyncError(f"the pushed tensors are not the model's: {'; '.join(problems)}")


def check_reports(manifest: Manifest, reports: Sequence[SyncReport | None]) -> None:
    """Compare what every worker echoed with what was sent.

    Raises:
        SyncError: a worker holds another version, other bytes, or another number of tensors; or none answered.
    """
    if not reports:
        raise SyncError(f"no engine worker reported on weight version {manifest.version}")
    want = SyncReport(manifest.version, manifest.digest, len(manifest.entries), manifest.nbytes)
    for worker, report in enumerate(reports):
        if report is None or replace(report, fidelity=None) != want:
            raise SyncError(f"engine worker {worker} holds {report}, but the trainer sent {want}")


def pair_adapters(tensors: Mapping[str, torch.Tensor], scales: Mapping[str, float]) -> dict[str, AdapterTensors]:
    """The adapters in the tensors of a push, by Hugging Face module name.

    Raises:
        SyncError: an A without its B or the reverse, or a module without a scale, naming it.
    """
    from lora_rl.lora.merge import AdapterTensors

    modules = {name.removesuffix(next((s for s in _SUFFIXES if name.endswith(s)), "")) for name in tensors}
    for module in sorted(modules | scales.keys()):
        if module + LORA_A not in tensors or module + LORA_B not in tensors or module not in scales:
            raise SyncError(f"the adapter of {module} is incomplete: A, B and its scale must all be in the push")
    return {
        module: AdapterTensors(tensors[module + LORA_A], _whole_b(tensors, module), scales[module])
        for module in sorted(modules)
    }


def _whole_b(tensors: Mapping[str, torch.Tensor], module: str) -> torch.Tensor:
    """B of an adapter, computed where it came as singular vectors and sigma."""
    b, sigma = tensors[module + LORA_B], tensors.get(module + LORA_SIGMA)
    if sigma is None:
        return b
    from lora_rl.lora.svd import times_core

    return times_core(b, sigma, tensors.get(module + LORA_MIXING))
