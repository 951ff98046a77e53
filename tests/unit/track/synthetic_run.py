"""A made-up run with the metrics a real one records."""

import math
import random
from collections.abc import Iterator

from lora_rl.track import Sample


def metrics_of(step: int, steps: int, rng: random.Random, val_every: int = 5, slow: float = 1.0) -> dict:
    """Metrics of one step: a reward that rises and levels off, noise, a validation now and then."""
    if step == 0:
        return {"val/accuracy": 0.11, "time/startup": 34.2, "time/validation": 6.1, "time/other": 0.4,
                "time/step": 40.7}  # fmt: skip
    progress = 1 - math.exp(-3 * step / steps)
    generation, training, sync = (s * slow * rng.uniform(0.8, 1.3) for s in (5.2, 2.9, 0.4))
    validation = 6.0 * slow if step % val_every == 0 else 0.0
    length = 180 - 60 * progress + rng.gauss(0, 8)
    metrics = {
        "train/reward": min(max(0.1 + 0.7 * progress + rng.gauss(0, 0.06), 0.0), 1.0),
        "train/response_length": length,
        "train/loss": rng.gauss(0, 0.02),
        "train/kl": 0.002 * step / steps + abs(rng.gauss(0, 1e-4)),
        "train/gen_kl_error": 4e-4 * math.exp(rng.gauss(0, 0.4)),
        "train/token_mult_prob_error": 1.004 + abs(rng.gauss(0, 0.004)),
        "train/grad_norm": 0.6 + abs(rng.gauss(0, 0.2)),
        "train/lr": 2e-5,
        "sync/bytes": 1_310_720,
        "tokens/generation": round(length * 32),
        "tokens/training": round(length * 32),
        "tokens_per_s/generation": length * 32 / generation,
        "tokens_per_s/training": length * 32 / training,
        "time/generation": generation,
        "time/training": training,
        "time/sync": sync,
        "time/other": 0.1,
        "time/step": generation + training + sync + validation + 0.1,
    }
    if validation:
        metrics["time/validation"] = validation
        metrics["val/accuracy"] = min(0.11 + 0.7 * progress + rng.gauss(0, 0.02), 1.0)
    return metrics


def run_records(steps: int = 60, seed: int = 0, val_every: int = 5) -> list[dict]:
    """Records of a whole run, step 0 included."""
    rng = random.Random(seed)
    records, elapsed = [], 0.0
    for step in range(steps + 1):
        metrics = metrics_of(step, steps, rng, val_every)
        elapsed += metrics["time/step"]
        records.append({"step": step, "wall_time": 1.7e9 + elapsed, "elapsed_s": elapsed, **metrics})
    return records


def samples() -> Iterator[Sample]:
    """Rollouts with what models really write: long texts, line breaks, markup, escapes, wide characters."""
    yield Sample("What is 6 times 7?", "6 * 7 = 42\nThe answer is \\boxed{42}", "42", 1.0, "stop")
    yield Sample(
        "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many clips did "
        "she sell altogether in April and May?",
        "In April she sold 48. In May she sold 48/2 = 24. " * 12 + "So altogether 48 + 24 = \\boxed{72}.",
        "72", 1.0, "stop",
    )  # fmt: skip
    yield Sample(
        "三角形の面積は?", "底辺かける高さわる二 [red]なので[/red] \x1b[31m答えは六\x1b[0m\r\n", "6", 0.0, "length"
    )
    yield Sample("Say nothing.", "", "", -0.5, "stop")
