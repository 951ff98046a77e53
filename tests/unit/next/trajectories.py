"""Synthetic trajectories of low-rank matrices, whole and in shards, and ranks as threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from lora_rl.next.factors import AllReduce, Factors

ROWS, COLUMNS, RANK = 24, 18, 4


def random_factors(seed: int, *, rows: int = ROWS, columns: int = COLUMNS, rank: int = RANK) -> Factors:
    """float32 factors with entries N(0, 1): a B that is as large as A."""
    generator = torch.Generator().manual_seed(seed)
    return Factors(torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator))


def whole(factors: Factors) -> torch.Tensor:
    """B A in float64."""
    return factors.b.double() @ factors.a.double()


def shards(factors: Factors, *, a_split: bool = True) -> list[Factors]:
    """The parts of two ranks; without `a_split` both have all of A."""
    a_parts = factors.a.chunk(2, dim=1) if a_split else (factors.a, factors.a)
    return [Factors(a, b, a_split, True) for a, b in zip(a_parts, factors.b.chunk(2), strict=True)]


def on_two_ranks(function: Callable[[int, AllReduce], Any]) -> list[Any]:
    """What `function(rank, all_reduce)` returns on two threads whose all-reduce adds their tensors up."""
    barrier, given = threading.Barrier(2), {}

    def run(rank: int) -> Any:
        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            given[rank] = tensor
            barrier.wait(timeout=30)
            total = given[0] + given[1]
            barrier.wait(timeout=30)
            return total

        return function(rank, all_reduce)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def rotating(count: int, *, noise: float = 0.01, seed: int = 0) -> list[dict[str, Factors]]:
    """Two modules that grow and turn ever more slowly: s(t) u(t) v(t)^T, where s and the angles of u and v saturate."""
    generator = torch.Generator().manual_seed(seed)
    planes = {}
    for name in ("first", "second"):
        u, _ = torch.linalg.qr(torch.randn(ROWS, 2, generator=generator))
        v, _ = torch.linalg.qr(torch.randn(COLUMNS, 2, generator=generator))
        planes[name] = (u, v)
    snapshots = []
    for t in range(count + 1):
        size, angle = 1 - math.exp(-t / 4), 0.9 * (1 - math.exp(-t / 5))
        turn = torch.tensor([math.cos(angle), math.sin(angle)])
        snapshot = {}
        for name, (u, v) in planes.items():
            a = torch.cat([(v @ turn)[None], noise * torch.randn(2, COLUMNS, generator=generator)])
            b = torch.cat([size * (u @ turn)[:, None], noise * torch.randn(ROWS, 2, generator=generator)], dim=1)
            snapshot[name] = Factors(a, b)
        snapshots.append(snapshot)
    return snapshots


def random_walk(count: int, *, seed: int = 0, modules: int = 4) -> list[dict[str, Factors]]:
    """A and B take independent steps N(0, 1): nothing of the future is in the past."""
    generator = torch.Generator().manual_seed(seed)
    a = {n: torch.randn(RANK, 96, generator=generator) for n in range(modules)}
    b = {n: torch.zeros(96, RANK) for n in range(modules)}
    snapshots = []
    for _ in range(count + 1):
        snapshots.append({f"module{n}": Factors(a[n].clone(), b[n].clone()) for n in range(modules)})
        for n in range(modules):
            b[n] += torch.randn(96, RANK, generator=generator)
            a[n] += 0.1 * torch.randn(RANK, 96, generator=generator)
    return snapshots
