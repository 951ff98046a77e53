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
        ["kl", "probs_ratio", "clip_fraction_low", "clip_fraction_high", "clip_fraction_dual", "approx_entropy",
         "token_mult_prob_error", "gen_kl_error", "sampling_importance_ratio"], 0.0
    )  # fmt: skip
    policy_rows, kl_rows, ratios = [], [], []
    for i, row in enumerate(mask):
        policy_row, kl_row = [], []
        a = advantages[i]
        for t, m in enumerate(row):
            if not m:
                continue
            lp = logprobs[i][t]
            rho = math.exp(clamp(lp - old[i][t], -20, 20))
            low, high = 1 - s.ratio_clip_min, 1 + s.ratio_clip_max
            value = max(-a * rho, -a * clamp(rho, low, high))
            if s.ratio_clip_c is not None and a < 0:
                value = min(value, -a * s.ratio_clip_c)
                token_sums["clip_fraction_dual"] += rho > s.ratio_clip_c
            policy_row.append(w[i][t] * value)
            kl_row.append(kl(lp, reference[i][t], s.reference_policy_kl_type, s.kl_input_clamp_value))
            ratios.append(rho)
            token_sums["kl"] += kl_row[-1]
            token_sums["probs_ratio"] += rho
            token_sums["clip_fraction_low"] += a < 0 and rho < low
            token_sums["clip_fraction_high"] += a > 0 and rho > high
            gap = old[i][t] - behaviour[i][t]
            token_sums["token_mult_prob_error"] += math.exp(min(abs(gap), 20))
            token_sums["gen_kl_error"] += kl(behaviour[i][t], old[i][t], "k3")
            token_sums["sampling_importance_ratio"] += math.exp(clamp(gap, -20, 20))
            token_sums["approx_entropy"] -= math.exp(clamp(lp - behaviour[i][t], -20, 20)) * lp
        policy_rows.append(policy_row)
        kl_rows.append(kl_row)

    def reduce(rows):
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
