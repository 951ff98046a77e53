"""What is added to the verifier's reward before advantages are taken."""

import torch
from torch import Tensor

from lora_rl.algorithm.kl import KLType, kl_per_token
from lora_rl.algorithm.masking import LOG_RATIO_LIMIT, blank_outside


def overlong_penalty(lengths: Tensor, *, max_response_length: int, buffer_length: int, penalty: float) -> Tensor:
    """Soft penalty for responses that come near the limit (DAPO, arXiv:2503.14476, equation 13).

        0                                               up to max_response_length - buffer_length tokens
        -penalty * (tokens into the buffer) / buffer    within the buffer
        -penalty                                        from max_response_length on

    Args:
        lengths: [B] tokens of each response.
        max_response_length: where the penalty is full; tokens.
        buffer_length: width of the ramp before that; tokens.
        penalty: the full penalty, in units of reward.

    Returns:
        [B] fp32, to be added to the reward.

    Raises:
        ValueError: the buffer is empty or longer than the response may be, or the penalty is negative.
    """
    if not 1 <= buffer_length <= max_response_length:
        raise ValueError(f"buffer_length = {buffer_length}: must be in 1..max_response_length = {max_response_length}")
    if not penalty >= 0:
        raise ValueError(f"penalty = {penalty}: must be >= 0; it is subtracted")
    into_buffer = lengths.double() - (max_response_length - buffer_length)
    # Adding 0 turns the -0 of a response that is short enough into 0.
    return (-(into_buffer / buffer_length).clamp(0, 1) * penalty + 0.0).float()


def sequence_kl(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, *, kind: KLType = "k1", clamp: float = LOG_RATIO_LIMIT
) -> Tensor:
    """KL(pi || pi_ref) of each whole response: the sum of the estimates of its tokens, in nats.

    Subtracted from the reward with kind k1 it has the exact gradient of the penalty, as in RLOO (arXiv:2402.14740);
    `lora_rl.algorithm.kl` says why k2 and k3 do not. The sum, not the mean: KL of a sequence adds up over its tokens.

    Args:
        logprobs: [B, T] log pi of the sampled tokens under the policy before the update.
        reference_logprobs: [B, T] log pi_ref of the same.
        mask: [B, T] bool, response tokens; other positions may hold anything.
        kind: estimator.
        clamp: bound on |log pi_ref - log pi| of a token.

    Returns:
        [B], without gradient; 0 for an empty response.
    """
    with torch.no_grad():
        policy, reference = blank_outside(logprobs, mask), blank_outside(reference_logprobs, mask)
        return kl_per_token(policy, reference, kind, clamp).sum(dim=1)
