"""SVD-LoRA: the singular vectors of a trained adapter are frozen, its singular values are trained.

An adapter adds s B A to a weight (s = alpha / r). Its decomposition is written s U C V^T with orthonormal U [out, r]
and V [in, r], and a small core C that depends on trained numbers `sigma`:

    product  C = diag(sigma)           thin SVD of B A                                        r numbers
    factors  C = diag(b) M diag(a)     B = U diag(b) W_B^T, A = W_A diag(a) V^T, M = W_B^T W_A  2r numbers, M is frozen
    core     C = sigma [r, r]          starts as the diagonal of `product`                    r^2 numbers

All three start at exactly the function of the adapter. `factors` is the decomposition of ESSA (see docs/papers.md).
The module below sits between a LoRA layer's two linears, which then hold V^T and U.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

SvdMode = Literal["product", "factors", "core"]
# Directions whose singular value is a smaller share of the largest one are rounding noise of float32 factors.
NEGLIGIBLE = 1e-7


class Spectrum(torch.nn.Module):
    """x -> C x over the last dimension, in float32: what is trained of an SVD-LoRA adapter.

    Attributes:
        theta: float32, the parameter; 0 at the start. sigma = sigma_ref + theta, or sigma_ref * (1 + theta) if
            `relative`. Trained as a distance, the start is exact and small steps do not round away.
        sigma_ref: float32, sigma of the adapter that the run started from: the reference policy. [r] (`product`),
            [2, r] with b in row 0 and a in row 1 (`factors`), [r, r] (`core`).
        mixing: float32 [r, r], M of `factors`; the identity otherwise.
    """

    theta: torch.nn.Parameter
    sigma_ref: torch.Tensor
    mixing: torch.Tensor

    def __init__(self, dim: int, mode: SvdMode, *, relative: bool = False, device: torch.device | None = None) -> None:
        super().__init__()
        shape = {"product": (dim,), "factors": (2, dim), "core": (dim, dim)}[mode]
        self.mode, self.relative = mode, relative
        self.theta = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))
        self.register_buffer("sigma_ref", torch.zeros(shape, dtype=torch.float32, device=device))
        self.register_buffer("mixing", torch.eye(dim, dtype=torch.float32, device=device))

    @property
    def sigma(self) -> torch.Tensor:
        """The current values, float32, of the shape of `sigma_ref`."""
        return self.sigma_ref * (1 + self.theta) if self.relative else self.sigma_ref + self.theta

    @property
    def directions(self) -> int:
        """Numbers that can have an effect: those of directions that the starting adapter has."""
        if self.mode == "core":
            return int(self.sigma_ref.diagonal().count_nonzero()) ** 2
        return int(self.sigma_ref.count_nonzero())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """C x for x [..., r]."""
        sigma = self.sigma
        if self.mode == "product":
            return x * sigma
        if self.mode == "factors":
            return torch.nn.functional.linear(x * sigma[1], self.mixing) * sigma[0]
        return torch.nn.functional.linear(x, sigma)

    @torch.no_grad()
    def start_from(self, parts: Decomposition) -> None:
        """Take sigma and M of a decomposition as the start and the reference."""
        self.sigma_ref.copy_(parts.sigma)
        self.mixing.copy_(parts.mixing)
        self.theta.zero_()


def spectrum_of(adapter: torch.nn.Module) -> Spectrum | None:
    """The trained part of an SVD-LoRA adapter; None for plain LoRA."""
    module = getattr(adapter, "activation", None)
    return module if isinstance(module, Spectrum) else None


def install_spectrum(adapter: torch.nn.Module, mode: SvdMode, *, relative: bool) -> None:
    """Turn a LoRA layer into an SVD-LoRA layer, whose values are still to be set (`decompose`).

    Megatron-Bridge applies the layer's `activation` (none in LoRA) between its two linears, on the whole rank: that is
    where C belongs. On a tensor-parallel rank its gradient is complete, as the second linear sums that of its input.
    """
    for parameter in adapter.parameters():
        parameter.requires_grad = False
    weight = adapter.linear_in.weight
    adapter.activation = Spectrum(adapter.dim, mode, relative=relative, device=weight.device)


def times_core(u: torch.Tensor, sigma: torch.Tensor, mixing: torch.Tensor | None) -> torch.Tensor:
    """U C, float32 [out, r]: with A = V^T it is the B of an ordinary LoRA adapter of the same rank and alpha.

    Args:
        u: float32 [out, r], or a shard of its rows.
        sigma: [r], [r, r], or with `mixing` [2, r].
        mixing: M of mode `factors`; None in the others.
    """
    if mixing is not None:
        return ((u * sigma[0]) @ mixing) * sigma[1]
    return u * sigma if sigma.ndim == 1 else u @ sigma


@torch.no_grad()
def effective_factors(adapter: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B that an adapter computes with now: B A times alpha / r is its change of the weight.

    Args:
        adapter: LoRA or SVD-LoRA layer of Megatron-Bridge.

    Returns:
        float32 copies of this rank's shards, sharded as `linear_in.weight` and `linear_out.weight` are.
    """
    a, b = (linear.weight.detach().float() for linear in (adapter.linear_in, adapter.linear_out))
    spectrum = spectrum_of(adapter)
    if spectrum is None:
        return a.clone(), b.clone()
    return a.clone(), times_core(b, spectrum.sigma, spectrum.mixing if spectrum.mode == "factors" else None)


@contextmanager
def as_plain_lora(adapters: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the block `linear_out.weight` of each SVD-LoRA adapter is U C, for exporters that know LoRA only.

    The live weights are set aside, not changed.
    """
    live = []
    try:
        for adapter in adapters:
            if spectrum_of(adapter) is not None:
                weight = adapter.linear_out.weight
                live.append((weight, weight.data))
                weight.data = effective_factors(adapter)[1]
        yield
    finally:
        for weight, data in live:
            weight.data = data


@dataclass(frozen=True)
class Shards:
    """The ranks over which the rows of a matrix are spread.

    Attributes:
        rank: of this process among them.
        gather: a small tensor of each rank, in their order, on every rank. Collective.
    """

    rank: int
    gather: Callable[[torch.Tensor], list[torch.Tensor]]


ALONE = Shards(0, lambda tensor: [tensor])


@dataclass(frozen=True)
class Decomposition:
    """s U C V^T of an adapter; see the top of the file.

    Attributes:
        u: float32 [out, r], this rank's rows. Orthonormal columns; those of negligible directions are 0.
        v: float32 [in, r], this rank's rows, likewise.
        sigma, mixing: as in `Spectrum`.
    """

    u: torch.Tensor
    v: torch.Tensor
    sigma: torch.Tensor
    mixing: torch.Tensor


@torch.no_grad()
def decompose(
    a: torch.Tensor, b: torch.Tensor, mode: SvdMode, *, a_shards: Shards = ALONE, b_shards: Shards = ALONE
) -> Decomposition | None:
    """Decompose an adapter whose matrices are spread over ranks, without putting any of them together. Collective.

    QR of the shards, then of their small R factors (TSQR, Demmel et al. 2012, arXiv:0808.2664), reduces the problem to
    r x r. Unlike an eigendecomposition of Gram matrices this does not square the condition number. All of it in
    float64; every rank gets the same sigma. The sign of each pair of vectors makes the largest entry of u (of v for A
    in `factors`) positive.

    Args:
        a: [r, in], or columns of it spread over `a_shards`.
        b: [out, r], or rows of it spread over `b_shards`.

    Returns:
        None where B A is 0: there is no direction to keep.
    """
    rank = a.shape[0]
    q_b, r_b = _orthonormal(b.double(), b_shards)
    q_a, r_a = _orthonormal(a.double().T, a_shards)
    product = r_b @ r_a.T
    if not bool(product.count_nonzero()):
        return None
    if mode == "factors":
        w_b, values_b, left = _svd(r_b, b_shards)
        right, values_a, w_a = _svd(r_a.T, b_shards)
        u, keep_b, sign_b = _frame(q_b @ w_b, values_b, b_shards)
        v, keep_a, sign_a = _frame(q_a @ w_a.T, values_a, a_shards)
        mixing = sign_b[:, None] * (left @ right) * sign_a
        sigma = torch.stack([_pad(values_b * keep_b, rank), _pad(values_a * keep_a, rank)])
        return _as_float(_pad(u, rank), _pad(v, rank), sigma, _pad(_pad(mixing, rank).T, rank).T)
    left, values, right = _svd(product, b_shards)
    u, keep, sign = _frame(q_b @ left, values, b_shards)
    v = (q_a @ right.T) * sign * keep
    sigma = _pad(values * keep, rank)
    if mode == "core":
        sigma = sigma.diag()
    return _as_float(_pad(u, rank), _pad(v, rank), sigma, torch.eye(rank, device=a.device))


def _orthonormal(rows: torch.Tensor, shards: Shards) -> tuple[torch.Tensor, torch.Tensor]:
    """Q (this rank's rows) and R of a matrix whose rows are spread over ranks; R is the same everywhere."""
    q, r = torch.linalg.qr(rows)
    parts = shards.gather(r.contiguous())
    if len(parts) == 1:
        return q, r
    q_of_r, r = torch.linalg.qr(torch.cat(parts))
    return q @ q_of_r[shards.rank * len(parts[0]) :][: len(parts[0])], r


def _svd(matrix: torch.Tensor, shards: Shards) -> tuple[torch.Tensor, ...]:
    """Thin SVD as the first rank computes it: others could round, or choose signs, differently."""
    parts = torch.linalg.svd(matrix, full_matrices=False)
    return tuple(shards.gather(part.contiguous())[0] for part in parts)


def _frame(vectors: torch.Tensor, values: torch.Tensor, shards: Shards) -> tuple[torch.Tensor, ...]:
    """(vectors with canonical signs, 0 where negligible; 1 for each one that stays, else 0; their signs)."""
    keep = (values > NEGLIGIBLE * values.max()).double()
    if len(vectors):
        largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))[0]
    else:
        largest = torch.zeros_like(values)
    everywhere = torch.stack(shards.gather(largest.contiguous()))
    winner = everywhere.gather(0, everywhere.abs().argmax(dim=0, keepdim=True))[0]
    sign = torch.where(winner < 0, -1.0, 1.0).double()
    return vectors * sign * keep, keep, sign


def _pad(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Zeros behind the last dimension up to a size: a matrix with a side shorter than r has fewer directions."""
    return torch.nn.functional.pad(tensor, (0, size - tensor.shape[-1]))


def _as_float(*tensors: torch.Tensor) -> Decomposition:
    return Decomposition(*(t.float().contiguous() for t in tensors))
