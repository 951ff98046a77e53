"""Write word problems of one sum or difference as JSON lines: question, equation, answer.

    uv run examples/make_word_problems.py --out examples/data/word_problems.jsonl

`examples/data/word_problems.jsonl` was made so. The equation, such as `7 + 5 = 12`, is what supervised fine-tuning
teaches the form of; rewards compare what follows its `=` with the answer. No question occurs twice.
"""

import argparse
import json
import random
from pathlib import Path

NAMES = ["Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jonas", "Kira", "Leo"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers"]
SUMS = [
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "{name} has {a} {things}. {other} has {b} more than {name}. How many {things} does {other} have?",
    "There are {a} {things} in one box and {b} in another. How many {things} are there in both boxes?",
    "{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} did {name} find?",
    "{name} gave away {a} {things} and has {b} left. How many {things} did {name} have at first?",
    "{name} bought {a} {things} for {other} and {b} for the school. How many {things} did {name} buy?",
]
DIFFERENCES = [
    "{name} has {a} {things} and gives {b} to {other}. How many {things} does {name} have left?",
    "{name} has {a} {things}. {other} has {b} fewer. How many {things} does {other} have?",
    "There were {a} {things} on the table, and {name} took {b}. How many {things} are still there?",
    "{name} has {a} {things} and {other} has {b}. How many more {things} does {name} have?",
    "{name} wants {a} {things} and has {b} so far. How many more {things} does {name} need?",
    "Of the {a} {things} in a box, {b} are red. How many {things} are not red?",
]

PATIENCE = 1000  # questions in a row that are there already


def problem(rng: random.Random, largest: int) -> dict[str, str]:
    """A random one with numbers from 2 to `largest`; differences are positive."""
    a, b = rng.sample(range(2, largest + 1), 2)
    plus = rng.random() < 0.5
    if not plus:
        a, b = max(a, b), min(a, b)
    name, other = rng.sample(NAMES, 2)
    text = rng.choice(SUMS if plus else DIFFERENCES)
    answer = a + b if plus else a - b
    return {
        "question": text.format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b),
        "equation": f"{a} {'+' if plus else '-'} {b} = {answer}",
        "answer": str(answer),
    }


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--largest", type=int, default=50, help="largest number in a question")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.count < 1 or arguments.largest < 3:
        parser.error("--count must be at least 1, --largest at least 3")
    rng = random.Random(arguments.seed)
    problems: dict[str, dict[str, str]] = {}
    repeats = 0
    while len(problems) < arguments.count:
        found = problem(rng, arguments.largest)
        repeats = repeats + 1 if found["question"] in problems else 0
        if repeats == PATIENCE:
            parser.error(f"--count {arguments.count}: with --largest {arguments.largest} there are not so many")
        problems[found["question"]] = found
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(found) + "\n" for found in problems.values()]
    arguments.out.write_text("".join(lines), encoding="utf-8")
    print(f"{arguments.out}: {len(lines)} problems")


if __name__ == "__main__":
    main()
