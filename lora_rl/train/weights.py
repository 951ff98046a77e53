"""Pushing weights from the policy to the engines, and checking that both then compute the same thing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lora_rl.policy.group import PolicyGroup
from lora_rl.rollout.pool import EnginePool
from lora_rl.rollout.types import batch_of_sequences
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import LORA_SIGMA, Manifest

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.config.schema import WeightSyncConfig


class WeightSync:
    """Counts weight versions and moves them. Version 0 is what the engines loaded from disk."""

    def __init__(
        self,
        policy: PolicyGroup,
        engines: EnginePool,
        settings: WeightSyncConfig,
        warn: Callable[[str], None],
        *,
        streamed: bool = False,
    ) -> None:
        """
        Args:
            settings: rounding, thresholds.
            warn: shows a warning to the user.
            streamed: ranks send from device to device, and the engines have loaded a push when it was sent.
        """
        self._streamed = streamed
        self._policy, self._engines, self._settings, self._warn = policy, engines, settings, warn
        self.version = 0
        self.payload = ""
        self._expected: str | None = None

    def resume(self, version: int, payload: str) -> None:
        """Make the next push the one of a checkpoint again: same version, and, in the same mode, the same payload.

        Args:
            version: of the last push before the checkpoint.
            payload: `payload` then.
        """
        self.version, self._expected = version - 1, payload

    def push(self, *, after_update: bool) -> dict[str, float]:
        """Give the engines the policy's current weights as the next version.

        Args:
            after_update: an optimizer step lies between this push and the last, so the payload must differ.

        Returns:
            `sync/version`, `sync/bytes` (of tensors that changed), `sync/seconds`, `sync/tensors`, and where weights
            are merged `sync/delta_norm`, `sync/retention`, `sync/relative_error`, `sync/changed_fraction`.

        Raises:
            SyncError: an engine does not hold exactly what was sent, nothing changed although it should have, or
                less of the update survived the cast than `min_retention` with `on_low_retention: stop`.
        """
        start = time.perf_counter()
        with self._engines.pushing():
            push = self._policy.send(self.version + 1, must_differ=after_update)
            if self._streamed:
                reports = self._engines.confirm(push.manifest)
            else:
                payload = self._policy.payload(changed=True) if self._engines.needs_payload else None
                reports = self._engines.load(push.manifest, payload)
        self.version = push.manifest.version
        self.payload = self._describe(push.manifest)
        self._check_expected()
        # Where the engines merged, each of their workers measured the same update; one of them speaks for all. None
        # does when all engines are being started anew: they load this version before they serve.
        fidelity = push.fidelity or (reports[0].fidelity if reports else None)
        measured = fidelity.metrics() if fidelity is not None else {}
        self._check_retention(measured)
        return {
            "sync/version": self.version,
            "sync/bytes": push.sent_bytes,
            "sync/tensors": len(push.manifest.entries),
            "sync/seconds": time.perf_counter() - start,
            **measured,
        }

    def _describe(self, manifest: Manifest) -> str:
        """The digest of a push, with what it depends on besides the weights."""
        types = sorted({entry.dtype for entry in manifest.entries})
        mode = manifest.mode + ("+sigma" if any(e.name.endswith(LORA_SIGMA) for e in manifest.entries) else "")
        # From device to device checksums are of another kind.
        mode += " streamed" if self._streamed else ""
        rounding = f"stochastic-{manifest.seed}" if manifest.rounding == "stochastic" else manifest.rounding
        return f"{mode} {rounding} {','.join(types)} {manifest.digest}"

    def _check_expected(self) -> None:
        expected, self._expected = self._expected, None
        if expected is None or expected.rpartition(" ")[0] != self.payload.rpartition(" ")[0]:
            return
        if expected != self.payload:
            raise SyncError(
                f"the first push after resuming has digest {self.payload.rpartition(' ')[2]}, but that of the "
                f"checkpoint was {expected.rpartition(' ')[2]}: the engines would sample from other weights than before"
            )

    def _check_retention(self, measured: dict[str, float]) -> None:
        least, retention = self._settings.min_retention, measured.get("sync/retention")
        if least is None or retention is None or retention >= least:
            return
        # Without numbers that change from step to step, so that the console shows it once.
        problem = (
            f"less of the update survived the cast to the engine's weight type than "
            f"policy.generation.weight_sync.min_retention {least:.1%} (see sync/retention); rounding: stochastic "
            "keeps small updates"
        )
        if self._settings.on_low_retention == "stop":
            raise SyncError(f"weight version {self.version}: retention {retention:.2%}: {problem}")
        self._warn(problem)

    def check_parity(self, probes: Sequence[tuple[int, ...]], tolerance: float | None) -> float:
        """Compare trainer and engines on given token sequences.

        Args:
            probes: sequences of at least two tokens.
            tolerance: largest mean |difference| of logprobs accepted, in nats; None: measure, but accept any.

        Returns:
            The largest mean difference over the engines.

        Raises:
            SyncError: an engine is further from the trainer than that.
        """
        trainer = self._policy.logprobs(batch_of_sequences(probes, [1] * len(probes)), temperature=1.0)
        worst = 0.0
        for name, scores in self._engines.score(probes):
            ours = np.concatenate([trainer[row, 1 : len(p)] for row, p in enumerate(probes)])
            difference = float(np.abs(ours - np.concatenate([np.asarray(s) for s in scores])).mean())
            # Unlike max(), keeps a NaN.
            worst = float(np.maximum(worst, difference))
            if tolerance is not None and not difference <= tolerance:
                raise SyncError(
                    f"{name} and the trainer disagree about weight version {self.version}: mean |difference| of "
                    f"logprobs {difference:.2e} nats on {len(probes)} probe prompts, accepted is {tolerance:.0e} "
                    "(policy.generation.weight_sync.parity_tolerance). Both load policy.model_name; a difference means "
                    "that one of them maps or computes the model wrongly, so training would be off-policy without "
                    "saying so"
                )
        return worst


def check_drift(metrics: dict[str, float], tolerance: float | None) -> None:
    """The same promise at every step: the trainer's logprobs of the sampled tokens equal those of the engine.

    Args:
        metrics: of a synchronous step; `token_mult_prob_error` is mean exp|difference|.
        tolerance: as for `WeightSync.check_parity`; None switches the check off.

    Raises:
        SyncError: they do not.
    """
    error = metrics.get("token_mult_prob_error")
    if tolerance is not None and error is not None and not error <= math.exp(tolerance):
        raise SyncError(
            f"the engine sampled with other weights than the trainer holds: token_mult_prob_error {error:.6f}, "
            f"accepted is {math.exp(tolerance):.6f} (policy.generation.weight_sync.parity_tolerance {tolerance:.0e})"
        )


def parity_tolerance(config: RunConfig) -> float | None:
    """The configured tolerance where exact agreement can be expected, None where it cannot.

    That is float32 on both sides, and sampling from the whole distribution: behind top_p or top_k the engine
    renormalises over the tokens it kept.
    """
    generation = config.policy.generation
    exact = config.policy.precision == config.engine_precision == "float32"
    whole = generation.top_p == 1 and (generation.top_k or -1) < 1
    return generation.weight_sync.parity_tolerance if exact and whole else None
