"""Makes questions with reasoning-gym in a process of its own: a script, without any import of this package.

Some of its datasets iterate over sets of text, whose order differs from process to process unless PYTHONHASHSEED is
fixed before Python starts; some draw from Python's global random numbers. Here both are fixed.

Reads a JSON object {"draws": [{"datasets": [{"name", "weight", "config"}], "size", "seed"}, ...]} from standard input,
and writes a pickle to standard output: the list of draws, each a list of (index of the dataset, item), or a text that
says what is wrong. No question is in two places.
"""

import dataclasses
import difflib
import json
import pickle
import random
import sys

# Give up on finding more different questions after this many tries for each that was asked for.
TRIES = 10


def shares(weights: list[float], size: int) -> list[int]:
    """`size` in whole parts proportional to the weights; the largest remainders get what is left."""
    exact = [size * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: size - sum(parts)]:
        parts[i] += 1
    return parts


def create(task: dict, seed: int, size: int):
    """The dataset of one entry; ValueError says which entry is wrong, and how."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name, config = task["name"], task["config"]
    names = sorted(set(DATASETS) - {"composite"})
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
        raise ValueError(f"reasoning-gym has no dataset {name!r}; {hint}")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for key in config:
        if key in ("seed", "size"):
            raise ValueError(f"{name}: {key} is not set in config but by data.reasoning_gym.{key} and val_{key}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{name} has no setting {key!r}; it has {', '.join(sorted(known)) or 'none'}{hint}")
    try:
        return reasoning_gym.create_dataset(name, **config, seed=seed, size=size)
    except (AssertionError, ValueError, TypeError) as error:
        raise ValueError(f"{name} refuses its config {config}: {error}") from error


def draw(task: dict, count: int, seed: int, seen: set[str]) -> list[dict]:
    """`count` items whose questions are not in `seen`, or as many as there are; adds them to `seen`."""
    items: list[dict] = []
    tried = 0
    random.seed(seed)
    while len(items) < count and tried < TRIES * count:
        wanted = count - len(items)
        # Item i of a dataset is made from seed + i, so this goes on where the last round ended.
        dataset = create(task, seed + tried, wanted)
        for index in range(wanted):
            item = dataset[index]
            if item["question"].strip() not in seen:
                seen.add(item["question"].strip())
                items.append(item)
        tried += wanted
    return items


def interleave(parts: list[list[dict]]) -> list[tuple[int, dict]]:
    """The parts as one list in which each is spread evenly, so that any stretch of it is a fair mixture."""
    places = [((i + 0.5) / len(part), which, item) for which, part in enumerate(parts) for i, item in enumerate(part)]
    places.sort(key=lambda place: place[:2])
    return [(which, item) for _, which, item in places]


def main() -> list | str:
    order = json.load(sys.stdin)
    seen: set[str] = set()
    answers = []
    try:
        for wanted in order["draws"]:
            tasks = wanted["datasets"]
            counts = shares([task["weight"] for task in tasks], wanted["size"])
            parts = [draw(t, count, wanted["seed"], seen) for t, count in zip(tasks, counts, strict=True)]
            answers.append(interleave(parts))
    except ValueError as error:
        return str(error)
    return answers


if __name__ == "__main__":
    # Whatever a dataset prints must not get between the bytes of the answer.
    output, sys.stdout = sys.stdout.buffer, sys.stderr
    answer = main()
    output.write(pickle.dumps(answer))
