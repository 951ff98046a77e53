"""Merging an adapter into a base matrix for the engine, and measuring how much of the adapter survives the cast.

A bfloat16 weight near 1 has neighbours 0.004 to 0.008 away, so rounding to the nearest value erases an adapter of size
1e-4 almost completely. Stochastic rounding delivers it in expectation; `Fidelity` says what was delivered either way.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import astuple, dataclass
from typing import Literal, get_args

import torch

Rounding = Literal["nearest", "stochastic"]

# Rows are merged in chunks of about this many elements: the float32 copies stay small and near the cache.
CHUNK_ELEMENTS = 1 << 17
CHUNK_ELEMENTS_ON_DEVICE = 1 << 24


@dataclass(frozen=True)
class AdapterTensors:
    """One LoRA adapter: y = W x + scale * B A x.

    Attributes:
        a: float32 [r, in].
        b: float32 [out, r].
        scale: alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    def delta(self) -> torch.Tensor:
        """scale * B A, float32 [out, in]."""
        return (self.b @ self.a) * self.scale


@dataclass(frozen=True)
class Fidelity:
    """How much of the adapters' deltas reached the delivered weights: sums over elements, so they add over tensors.

    "Delivered" is the cast merged weight minus the base weight, both as float32.

    Attributes:
        delta_sq: <delta, delta>.
        delivered_dot_delta: <delivered, delta>.
        error_sq: ||delivered - delta||^2.
        changed: elements that differ from the base weight cast to the same dtype, to nearest.
        total: elements.
    """

    delta_sq: float
    delivered_dot_delta: float
    error_sq: float
    changed: float
    total: float

    @classmethod
    def zero(cls) -> Fidelity:
        """No tensors."""
        return cls(0.0, 0.0, 0.0, 0.0, 0.0)

    def __add__(self, other: Fidelity) -> Fidelity:
        return Fidelity(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float]:
        """Over the adapted tensors:

        - `sync/delta_norm`: ||delta||
        - `sync/retention`: <delivered, delta> / <delta, delta>; 1 when all arrives (in expectation), 0 when nothing
        - `sync/relative_error`: ||delivered - delta|| / ||delta||
        - `sync/changed_fraction`: changed / total

        Where every delta is zero (B = 0) there is nothing to lose: retention 1 and relative error 0.
        """
        nothing = self.delta_sq == 0.0
        return {
            "sync/delta_norm": math.sqrt(self.delta_sq),
            "sync/retention": 1.0 if nothing else self.delivered_dot_delta / self.delta_sq,
            "sync/relative_error": 0.0 if nothing else math.sqrt(self.error_sq / self.delta_sq),
            "sync/changed_fraction": self.changed / self.total if self.total else 0.0,
        }


@torch.no_grad()
def merge(
    base: torch.Tensor,
    adapter: AdapterTensors | None,
    *,
    dtype: torch.dtype,
    rounding: Rounding,
    seed: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, Fidelity]:
    """base + scale * B A, computed in float32 on a copy and cast once. `base` is only read.

    Args:
        base: [out, in] in any floating-point type; any shape without an adapter.
        adapter: on the same device as `base`; None: the result is the base cast to nearest.
        dtype: type of the result.
        rounding: `stochastic` goes up or down with probabilities that make the expectation exact.
        seed: of the stochastic rounding, see `seed_for`.
        chunk_elements: about how many elements to merge at a time.

    Returns:
        A new tensor of the base's shape, and what it delivers (zero without an adapter).

    Raises:
        ValueError: shapes that do not fit, an unknown rounding, or a type without stochastic rounding.
    """
    if rounding not in get_args(Rounding):
        raise ValueError(f"unknown rounding {rounding!r}; valid are {list(get_args(Rounding))}")
    if adapter is None:
        return base.to(dtype, copy=True), Fidelity.zero()
    if base.device.type == "cuda":
        # A chunk is for a cache of the CPU; on a device it would be thousands of short kernels.
        chunk_elements = max(chunk_elements, CHUNK_ELEMENTS_ON_DEVICE)
    a, b = adapter.a.float(), adapter.b.float()
    if base.ndim != 2 or (b.shape[0], a.shape[1]) != tuple(base.shape) or b.shape[1] != a.shape[0]:
        raise ValueError(
            f"an adapter with A {list(a.shape)} and B {list(b.shape)} does not fit a base matrix {list(base.shape)}"
        )
    merged = torch.empty(base.shape, dtype=dtype, device=base.device)
    sums = torch.zeros(4, dtype=torch.float64, device=base.device)
    step = max(1, chunk_elements // max(1, base.shape[1]))
    for start in range(0, base.shape[0], step):
        rows = slice(start, start + step)
        before = base[rows].float()
        delta = (b[rows] @ a).mul_(adapter.scale)
        exact = before + delta
        if rounding == "stochastic":
            merged[rows] = stochastic_round(exact, dtype, seed, row_offset=start)
        else:
            merged[rows] = exact
        delivered = merged[rows].float() - before
        changed = (merged[rows] != before.to(dtype)).sum()
        terms = [_dot(delta, delta), _dot(delivered, delta), _dot(delivered - delta, delivered - delta), changed]
        sums += torch.stack([term.double() for term in terms])
    return merged, Fidelity(*sums.tolist(), float(base.numel()))


def stochastic_round(
    x: torch.Tensor, dtype: torch.dtype, seed: int, *, row_offset: int = 0, col_offset: int = 0
) -> torch.Tensor:
    """Round to one of the two neighbouring values, the nearer one more often, so that the expectation is x.

    The probabilities are exact multiples of 2^-16. Each element's random number is a hash of the seed and its row and
    column alone: every rank, device and slice of a matrix rounds an element alike. Values that `dtype` can represent,
    infinities and NaN stay; a finite value beyond the largest finite one becomes that one.

    Args:
        x: float32 [rows, columns], the whole matrix or a slice.
        dtype: bfloat16, or float32 (which changes nothing).
        seed: 64 bits.
        row_offset, col_offset: place of x[0, 0] in the whole matrix; below 2^31 as are its dimensions.

    Returns:
        A new tensor of type `dtype`.

    Raises:
        ValueError: another type or shape.
    """
    if x.dtype is not torch.float32 or x.ndim != 2:
        raise ValueError(f"stochastic rounding takes a float32 matrix, not {x.dtype} {list(x.shape)}")
    if dtype is torch.float32:
        return x.clone()
    if dtype is not torch.bfloat16:
        raise ValueError(f"stochastic rounding to {dtype} is not supported; use torch.bfloat16 or torch.float32")
    # bfloat16 is the upper half of float32, and between two neighbours float32's bit pattern grows linearly with the
    # value (also below the smallest normal number): adding 16 random bits carries with the right probability.
    noise = _hash(x.shape, seed, row_offset, col_offset, x.device).bitwise_and_(0xFFFF)
    rounded = noise.add_(x.contiguous().view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
    largest = torch.finfo(torch.bfloat16).max
    beyond = torch.where(x.isfinite(), x.clamp(-largest, largest), x)
    return torch.where(x.abs() <= largest, rounded, beyond).to(torch.bfloat16)


def seed_for(version: int, name: str, seed: int) -> int:
    """A 64-bit rounding seed for one tensor of one weight version, so that no two pushes share their errors.

    Args:
        version: weight version.
        name: the tensor's Hugging Face name.
        seed: the run's seed.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}:{version}:{name}".encode(), digest_size=8).digest(), "little")


def _dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum(dtype=torch.float64)


def _hash(shape: torch.Size, seed: int, row_offset: int, col_offset: int, device: torch.device) -> torch.Tensor:
    """int32 [rows, columns]: 32 well-mixed bits per element of (seed, row, column)."""
    rows = torch.arange(row_offset, row_offset + shape[0], dtype=torch.int32, device=device)[:, None]
    columns = torch.arange(col_offset, col_offset + shape[1], dtype=torch.int32, device=device)
    keys = _mix(_mix(rows ^ _signed(seed)) ^ _signed(seed >> 32))
    return _mix(keys ^ columns)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser, in place: Chris Wellons, "Prospecting for hash functions" (2018), `lowbias32`.

    int32 products wrap around on every device; right shifts copy the sign, which the masks remove.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def _signed(bits: int) -> int:
    """The int32 with the low 32 of these bits."""
    return ((bits & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
