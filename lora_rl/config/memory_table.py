"""A memory plan as data: kinds of devices, what is on them in each phase, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

GIB = 2**30
PHASES = ("generation", "training", "push")


@dataclass(frozen=True)
class Item:
    """Bytes of one thing, per phase in the order of `PHASES`."""

    name: str
    generation: int = 0
    training: int = 0
    push: int = 0

    @classmethod
    def always(cls, name: str, nbytes: int) -> Item:
        """The same in each phase."""
        return cls(name, nbytes, nbytes, nbytes)


@dataclass(frozen=True)
class Holder:
    """A kind of device (on the CPU: of process) and what is on it.

    Attributes:
        name: for a reader.
        items: what it holds.
        certain: bytes that are there for sure in some phase: weights alone.
        limit: bytes it has; None where that is not known.
        key: what to change when it does not fit.
    """

    name: str
    items: tuple[Item, ...]
    certain: int
    limit: int | None
    key: str

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes per phase."""
        return tuple(sum(getattr(item, phase) for item in self.items) for phase in PHASES)

    @property
    def peak(self) -> int:
        """Bytes of the fullest phase."""
        return peak(self.items)


@dataclass(frozen=True)
class MemoryPlan:
    """The plan.

    Attributes:
        holders: kinds of devices, empty where the model's sizes are not known.
        parameters, trained: of the model and of its adapters.
        facts: further lines for a reader.
        assumptions: what the numbers rest on.
        unknown: why there is no plan.
    """

    holders: tuple[Holder, ...] = ()
    parameters: int = 0
    trained: int = 0
    facts: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    unknown: str = field(default="")

    def too_large(self) -> Iterator[tuple[Holder, str]]:
        """Devices whose weights alone do not fit: a run cannot begin."""
        for holder in self.holders:
            if holder.limit is not None and holder.certain > holder.limit:
                yield holder, f"weights alone take {gib(holder.certain)} of {gib(holder.limit)} GiB on {holder.name}"

    def warnings(self) -> list[str]:
        """Devices on which the estimate is more than there is."""
        refused = {holder.name for holder, _ in self.too_large()}
        return [
            f"the memory plan needs {gib(holder.peak)} of {gib(holder.limit)} GiB on {holder.name}; lower {holder.key}"
            for holder in self.holders
            if holder.limit is not None and holder.peak > holder.limit and holder.name not in refused
        ]

    def describe(self) -> str:
        """A table for a reader."""
        if self.unknown:
            return f"memory plan: none, because {self.unknown}"
        lines = [f"memory plan, an estimate in GiB ({self.parameters:,} parameters, {self.trained:,} trained):"]
        for holder in self.holders:
            lines.append(f"  {holder.name:<34}" + "".join(f"{phase:>12}" for phase in PHASES))
            for item in holder.items:
                if not any(getattr(item, phase) for phase in PHASES):
                    continue
                values = (getattr(item, phase) for phase in PHASES)
                lines.append(f"    {item.name:<32}" + "".join(f"{gib(v) if v else '-':>12}" for v in values))
            limit = "" if holder.limit is None else f"  of {gib(holder.limit)}"
            lines.append(f"    {'total':<32}" + "".join(f"{gib(total):>12}" for total in holder.totals) + limit)
        verdicts = [f"  does not fit: {text}" for _, text in self.too_large()]
        verdicts += [f"  may not fit: {text}" for text in self.warnings()]
        if not verdicts and any(holder.limit for holder in self.holders):
            verdicts = ["  fits"]
        lines += [
            *verdicts,
            *(f"  {fact}" for fact in self.facts),
            *(f"  assumed: {text}" for text in self.assumptions),
        ]
        return "\n".join(lines)


def peak(items: tuple[Item, ...]) -> int:
    """Bytes of the fullest phase."""
    return max(sum(getattr(item, phase) for item in items) for phase in PHASES)


def gib(nbytes: int | None) -> str:
    """Bytes as GiB, for a reader."""
    value = (nbytes or 0) / GIB
    return f"{value:.2f}" if value >= 0.01 or value == 0 else "<0.01"
