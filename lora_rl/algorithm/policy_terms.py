"""The policy term of the loss, per token: what multiplies the advantage, and how it is kept near the old policy.

With rho_t = pi / pi_old of a token, A the advantage of its sequence, sg(x) = x without gradient, and
clip(x) = min(max(x, 1 - ratio_clip_min), 1 + ratio_clip_max):

| kind      | loss of a token                                                             | source               |
| --------- | --------------------------------------------------------------------------- | -------------------- |
| ppo_clip  | max(-A rho, -A clip(rho)); with dual clip at most -A c where A < 0          | PPO, arXiv:1707.06347 |
| gspo      | the same with s = exp(mean over the sequence of log rho) in place of rho    | GSPO, arXiv:2507.18071 |
| cispo     | -A sg(clip(rho)) log pi                                                     | CISPO, arXiv:2506.13585 |
| sapo      | -A (4 / tau) sigmoid(tau (rho - 1)), tau of its own for A > 0 and for A < 0 | SAPO, arXiv:2511.20347 |
| reinforce | -A log pi                                                                   | REINFORCE, Williams 1992 |

All have the gradient -A grad log pi while pi = pi_old. They differ in what becomes of a token whose ratio has moved:
ppo_clip and gspo drop its gradient beyond the bound (gspo that of the whole sequence at once), cispo keeps it with a
bounded weight, sapo fades it out by 4 sigmoid (1 - sigmoid), reinforce does not look.

gspo's s is differentiated as it stands: d s / d log pi_t = s / length for each token, which after the sequence mean is
the paper's gradient, and that of its GSPO-token variant when all tokens share one advantage, as they do here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lora_rl.algorithm.masking import bounded_exp
from lora_rl.algorithm.settings import LossSettings


@dataclass(frozen=True)
class PolicyTerm:
    """loss: [B, T] with graph. shares: [B, T] per metric name, without graph; each is averaged over tokens."""

    loss: Tensor
    shares: dict[str, Tensor]


def policy_term(
    settings: LossSettings, logprobs: Tensor, log_ratio: Tensor, advantage: Tensor, mask: Tensor
) -> PolicyTerm:
    """The policy term that `settings.policy_loss` names; the table at the top of the module gives the formulas.

    Args:
        logprobs: [B, T] log pi with graph, blanked at masked positions.
        log_ratio: [B, T] log pi - log pi_old with graph, blanked.
        advantage: [B, 1] without graph.
        mask: [B, T] bool.
    """
    match settings.policy_loss:
        case "ppo_clip":
            return _clipped(settings, bounded_exp(log_ratio), advantage)
        case "gspo":
            return _clipped(settings, sequence_ratio(log_ratio, mask).expand_as(log_ratio), advantage)
        case "cispo":
            return _cispo(settings, logprobs, bounded_exp(log_ratio), advantage)
        case "sapo":
            return _sapo(settings, bounded_exp(log_ratio), advantage)
        case "reinforce":
            return PolicyTerm(-advantage * logprobs, {})


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] geometric mean of the sequence's token ratios (arXiv:2507.18071, equation 7); 1 for an empty one."""
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return bounded_exp(torch.where(mask, log_ratio, 0.0).sum(dim=1, keepdim=True) / length)


def _bounds(settings: LossSettings) -> tuple[float, float]:
    return 1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max


def _clipped(settings: LossSettings, ratio: Tensor, advantage: Tensor) -> PolicyTerm:
    low, high = _bounds(settings)
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
    clipped = {
        "clip_fraction_low": (advantage < 0) & (ratio < low),
        "clip_fraction_high": (advantage > 0) & (ratio > high),
    }
    if settings.ratio_clip_c is not None:
        bound = -advantage * settings.ratio_clip_c
        loss = torch.where(advantage < 0, torch.minimum(loss, bound), loss)
        clipped["clip_fraction_dual"] = (advantage < 0) & (ratio > settings.ratio_clip_c)
    return PolicyTerm(loss, {name: which.float() for name, which in clipped.items()})


def _cispo(settings: LossSettings, logprobs: Tensor, ratio: Tensor, advantage: Tensor) -> PolicyTerm:
    low, high = _bounds(settings)
    weight = ratio.detach().clamp(low, high)
    clipped = {"clip_fraction_low": ratio < low, "clip_fraction_high": ratio > high}
    return PolicyTerm(-advantage * weight * logprobs, {name: which.float() for name, which in clipped.items()})


def _sapo(settings: LossSettings, ratio: Tensor, advantage: Tensor) -> PolicyTerm:
    tau = torch.full_like(advantage, settings.sapo_tau_neg).masked_fill(advantage > 0, settings.sapo_tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1))
    let_through = (4 * gate * (1 - gate)).detach()
    return PolicyTerm(-advantage * (4 / tau) * gate, {"soft_gate": let_through})
