"""The formulas once more, with loops and `math` on Python floats: written from the papers, not from the package.

Nothing here imports lora_rl or torch, so that agreement means something.
"""

import math
from statistics import fmean, stdev


def advantages(rewards, group_ids, normalize, leave_one_out, epsilon=1e-6):
    result = []
    for i, group in enumerate(group_ids):
        members = [r for r, g in zip(rewards, group_ids, strict=True) if g == group]
        others = [r for j, r in enumerate(rewards) if group_ids[j] == group and j != i]
        if max(members) == min(members):
            result.append(0.0)
            continue
        value = rewards[i] - fmean(others if leave_one_out else members)
        result.append(value / (stdev(members) + epsilon) if normalize else value)
    return result


def clamp(x, low, high):
    return min(max(x, low), high)


def kl(logprob, reference, kind, bound=20.0):
    d = clamp(reference - logprob, -bound, bound)
    return {"k1": -d, "k2": 0.5 * d * d, "k3": math.exp(d) - 1 - d}[kind]


def weights(train, behaviour, mask, level, kind, upper, lower):
    """[B][T] importance weights; 0 at masked positions."""
    result = []
    for i, row in enumerate(mask):
        positions = [t for t, m in enumerate(row) if m]
        differences = {t: train[i][t] - behaviour[i][t] for t in positions}
        total = sum(differences.values())
        out = [0.0] * len(row)
        for t in positions:
            w = math.exp(clamp(differences[t] if level == "token" else total, -20, 20))
            if kind == "tis":
                w = min(w, upper)
            elif kind == "icepop":
                w = w if lower <= w <= upper else 0.0
            elif kind == "seq_mask":
                mean_ratio = math.exp(clamp(total / len(positions), -20, 20))
                w = w if lower <= mean_ratio <= upper else 0.0
            out[t] = w
        result.append(out)
    return result


def clipped(s, a, ratio):
    value = max(-a * ratio, -a * clamp(ratio, 1 - s.ratio_clip_min, 1 + s.ratio_clip_max))
    return min(value, -a * s.ratio_clip_c) if s.ratio_clip_c is not None and a < 0 else value


def policy_value(s, a, lp, rho, sequence_rho):
    """Loss of one token."""
    match s.policy_loss:
        case "ppo_clip":
            return clipped(s, a, rho)
        case "gspo":
            return clipped(s, a, sequence_rho)
        case "cispo":
            return -a * clamp(rho, 1 - s.ratio_clip_min, 1 + s.ratio_clip_max) * lp
        case "sapo":
            tau = s.sapo_tau_pos if a > 0 else s.sapo_tau_neg
            return -a * 4 / tau / (1 + math.exp(-clamp(tau * (rho - 1), -700, 700)))
        case "reinforce":
            return -a * lp


def policy_slope(s, a, lp, rho, sequence_rho):
    """Derivative of the loss of one token's sequence with respect to log pi of that token, per token of weight 1.

    gspo: of the mean over the sequence, times its length.
    """
    low, high = 1 - s.ratio_clip_min, 1 + s.ratio_clip_max
    if s.policy_loss == "cispo":
        return -a * clamp(rho, low, high)
    if s.policy_loss == "reinforce":
        return -a
    if s.policy_loss == "sapo":
        tau = s.sapo_tau_pos if a > 0 else s.sapo_tau_neg
        gate = 1 / (1 + math.exp(-tau * (rho - 1)))
        return -a * 4 * gate * (1 - gate) * rho
    ratio = sequence_rho if s.policy_loss == "gspo" else rho
    stopped = ratio > high if a > 0 else ratio < low or ratio > (s.ratio_clip_c or math.inf)
    return 0.0 if stopped else -a * ratio


def sequence_ratio(logprobs, old, mask):
    gaps = [lp - o for lp, o, m in zip(logprobs, old, mask, strict=True) if m]
    return math.exp(fmean(gaps)) if gaps else 1.0


def standardised(values, weights, epsilon=1e-6):
    """Mean 0 and std 1 over values that each count `weight` times; 0 where the weight is 0."""
    repeated = [v for v, w in zip(values, weights, strict=True) for _ in range(w)]
    if not repeated or max(repeated) == min(repeated):
        return [0.0] * len(values)
    mean = fmean(repeated)
    std = math.sqrt(fmean((v - mean) ** 2 for v in repeated))
    return [(v - mean) / (std + epsilon) if w else 0.0 for v, w in zip(values, weights, strict=True)]


def reinforce_plus_plus(rewards, group_ids, tokens, minus_baseline):
    values = advantages(rewards, group_ids, False, False) if minus_baseline else rewards
    return standardised(values, tokens)


def gdpo(components, group_ids, trained, normalize, leave_one_out):
    parts = [advantages(rewards, group_ids, normalize, leave_one_out) for rewards in components]
    return standardised([sum(part) for part in zip(*parts, strict=True)], [int(t) for t in trained])


def overlong(length, max_response_length, buffer, penalty):
    start = max_response_length - buffer
    if length <= start:
        return 0.0
    return (start - length) / buffer * penalty if length <= max_response_length else -penalty


def loss(s, logprobs, old, behaviour, reference, advantages, token_mask, sample_mask):
    """(loss, metrics) of a whole batch; `s` is any object with the LossSettings fields, tensors are nested lists."""
    mask = [[m and keep for m in row] for row, keep in zip(token_mask, sample_mask, strict=True)]
    tokens = sum(sum(row) for row in mask)
    sequences = sum(sample_mask)
    old = logprobs if old is None else old
    w = [[1.0] * len(row) for row in mask]
    if s.use_importance_sampling_correction:
        w = weights(
            old, behaviour, mask, s.importance_sampling_level, s.importance_sampling_type,
            s.truncated_importance_sampling_ratio, s.truncated_importance_sampling_ratio_min,
        )  # fmt: skip

    token_sums = dict.fromkeys(
        ["kl", "probs_ratio", "clip_fraction_low", "clip_fraction_high", "clip_fraction_dual", "soft_gate",
         "approx_entropy", "token_mult_prob_error", "gen_kl_error", "sampling_importance_ratio"], 0.0
    )  # fmt: skip
    policy_rows, kl_rows, ratios = [], [], []
    for i, row in enumerate(mask):
        policy_row, kl_row = [], []
        a = advantages[i]
        sequence_rho = sequence_ratio(logprobs[i], old[i], row)
        for t, m in enumerate(row):
            if not m:
                continue
            lp = logprobs[i][t]
            rho = math.exp(clamp(lp - old[i][t], -20, 20))
            low, high = 1 - s.ratio_clip_min, 1 + s.ratio_clip_max
            value = policy_value(s, a, lp, rho, sequence_rho)
            judged = sequence_rho if s.policy_loss == "gspo" else rho
            either = s.policy_loss == "cispo"
            if s.ratio_clip_c is not None and a < 0:
                token_sums["clip_fraction_dual"] += judged > s.ratio_clip_c
            policy_row.append(w[i][t] * value)
            kl_row.append(kl(lp, reference[i][t], s.reference_policy_kl_type, s.kl_input_clamp_value))
            ratios.append(rho)
            token_sums["kl"] += kl_row[-1]
            token_sums["probs_ratio"] += rho
            token_sums["clip_fraction_low"] += (a < 0 or either) and judged < low
            token_sums["clip_fraction_high"] += (a > 0 or either) and judged > high
            gate = s.sapo_tau_pos if a > 0 else s.sapo_tau_neg
            gate = 1 / (1 + math.exp(-clamp(gate * (rho - 1), -700, 700)))
            token_sums["soft_gate"] += 4 * gate * (1 - gate)
            gap = old[i][t] - behaviour[i][t]
            token_sums["token_mult_prob_error"] += math.exp(min(abs(gap), 20))
            token_sums["gen_kl_error"] += kl(behaviour[i][t], old[i][t], "k3")
            token_sums["sampling_importance_ratio"] += math.exp(clamp(gap, -20, 20))
            token_sums["approx_entropy"] -= math.exp(clamp(lp - behaviour[i][t], -20, 20)) * lp
        policy_rows.append(policy_row)
        kl_rows.append(kl_row)

    def reduce(rows):
        if s.constant_length is not None:
            return sum(sum(row) for row in rows) / (sequences * s.constant_length) if sequences else 0.0
        if s.token_level_loss:
            return sum(sum(row) for row in rows) / tokens if tokens else 0.0
        return sum(fmean(row) for row in rows if row) / sequences if sequences else 0.0

    policy = reduce(policy_rows)
    total = policy + s.reference_policy_kl_penalty * reduce(kl_rows)
    metrics = {name: value / tokens for name, value in token_sums.items()} if tokens else {}
    metrics |= {"loss": total, "policy_loss": policy}
    if ratios:
        metrics |= {"probs_ratio_min": min(ratios), "probs_ratio_max": max(ratios)}
    return total, metrics
