"""Per-token estimators of KL(pi || pi_ref) from sampled tokens.

With d = log pi_ref - log pi of the sampled token (J. Schulman, "Approximating KL Divergence", 2020):

| kind | estimate       | value, tokens from pi             | expected gradient as a loss term, tokens from pi |
| ---- | -------------- | --------------------------------- | ------------------------------------------------ |
| k1   | -d             | unbiased, can be negative         | 0: E[grad log pi] = 0, so it regularises nothing |
| k2   | d^2 / 2        | biased, small when policies agree | grad KL(pi || pi_ref), the exact reverse KL      |
| k3   | exp(d) - 1 - d | unbiased, never negative          | grad KL(pi_ref || pi), the forward KL            |

Each estimator has a non-zero gradient on single samples, but k1's is pure noise around 0: as a loss term it only
adds variance. Inside the reward it is the other way round. There the score function supplies the gradient,
E[k grad log pi]:

| kind | expected gradient as a penalty of the reward                                        |
| ---- | ------------------------------------------------------------------------------------ |
| k1   | grad KL(pi || pi_ref), exact                                                          |
| k2   | grad E[k2] - grad KL(pi || pi_ref): the two cancel to first order near the reference   |
| k3   | grad KL(pi || pi_ref) - grad KL(pi_ref || pi): they cancel likewise                    |

So k2 or k3 belong in the loss and k1 in the reward, and nothing else is accepted. The gradients are derived in
"On a few pitfalls in KL divergence gradient estimation for RL" (arXiv:2506.09477).
"""

from typing import Literal

from torch import Tensor

from lora_rl.algorithm.masking import LOG_RATIO_LIMIT

KLType = Literal["k1", "k2", "k3"]
KL_TYPES: tuple[str, ...] = ("k1", "k2", "k3")


def kl_per_token(logprobs: Tensor, reference_logprobs: Tensor, kind: KLType, clamp: float = LOG_RATIO_LIMIT) -> Tensor:
    """Estimate of KL(pi || pi_ref) at each sampled token, in nats. Gradients flow into `logprobs`.

    Args:
        logprobs: log pi of the sampled tokens, any shape, already blanked at masked positions.
        reference_logprobs: log pi_ref of the same tokens, same shape.
        kind: "k1", "k2" or "k3", see the table above.
        clamp: bound on |d|. Beyond it the estimate is constant and its gradient 0.

    Raises:
        ValueError: unknown kind.
    """
    d = (reference_logprobs - logprobs).clamp(-clamp, clamp)
    match kind:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            return d.expm1() - d
    raise ValueError(f"KL type {kind!r} is unknown; valid: {', '.join(KL_TYPES)}")
