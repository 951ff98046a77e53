#!/usr/bin/env python3
"""Ten thousand malformed answers through every verifier: none scores, none takes longer than the limit.

uv run tests/functional/reward_fuzz.py [--answers N] [--seed N]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lora_rl.config.schema import RewardConfig
from lora_rl.rewards import Scorer, ScoreRequest
from tests.support.malformed import GOLDS, malformed_answers

TIMEOUT_S = 1.0
BATCH = 500
TAGS = {"answer_from": "regex", "answer_pattern": "^(.*)$"}
# (name, configuration, right answers it can use)
CASES = (
    ("exact_match", {}, GOLDS[:1]),
    ("exact_match, text", {"name": "exact_match", "match": "text"}, GOLDS),
    ("numeric, last", {"name": "numeric", "number": "last", "atol": 0.5}, (GOLDS[0], GOLDS[2])),
    ("numeric, whole", {"name": "numeric", "rtol": 1e-6}, (GOLDS[0], GOLDS[2])),
    ("math_verify", {"name": "math_verify"}, GOLDS),
    ("math_verify, cut out", {"name": "math_verify", **TAGS}, GOLDS),
    ("reasoning_gym", {"name": "reasoning_gym"}, GOLDS[:1]),
)


def main() -> int:
    """The number of checks that failed, as exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=10_000, help="malformed answers per verifier")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    item = {"question": "", "answer": GOLDS[0], "metadata": {"difficulty": {}}}
    metadata = {"reasoning_gym": {"dataset": "chain_sum", "config": {}, "item": item}}
    failures = 0
    for name, options, golds in CASES:
        # The same answers for every verifier.
        answers = malformed_answers(random.Random(arguments.seed), arguments.answers)
        requests = [ScoreRequest(a, golds[n % len(golds)], metadata=metadata) for n, a in enumerate(answers)]
        reasons: Counter[str] = Counter()
        scored, slowest = [], 0.0
        began = time.monotonic()
        with Scorer(RewardConfig(**{"num_workers": 2, "timeout_s": TIMEOUT_S, **options})) as scorer:
            scorer.wait_ready()
            for first in range(0, len(requests), BATCH):
                part = requests[first : first + BATCH]
                start = time.monotonic()
                scores = scorer.score(part)
                late = sum(s.reason == "timed_out" for s in scores)
                # What is left of the batch's time when those that hit the limit have taken theirs.
                slowest = max(slowest, time.monotonic() - start - late * (TIMEOUT_S + 0.5))
                reasons.update(s.reason.value for s in scores)
                scored += [(r.completion, r.answer) for r, s in zip(part, scores, strict=True) if s.value > 0.0]
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
        checks = [
            (f"{name}: {len(answers)} answers in {time.monotonic() - began:.1f} s ({counts})", True),
            (f"{name}: none scores {scored[:3]}", not scored),
            (f"{name}: no error, no dead worker", not reasons["error"] and not reasons["worker_died"]),
            (f"{name}: no batch waited longer than its answers' limits", slowest < BATCH * 0.1),
        ]
        for text, passed in checks:
            print(f"{'PASS' if passed else 'FAIL'}   {text}", flush=True)
            failures += not passed
    return min(failures, 100)


if __name__ == "__main__":
    sys.exit(main())
