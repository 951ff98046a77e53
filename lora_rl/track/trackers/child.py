"""The process of one tracker; see `lora_rl.track.trackers.process`, which starts it."""

import json
import os
import sys
from typing import Any

from lora_rl.track.sinks import Sink


def open_tracker(kind: str, settings: dict[str, Any]) -> tuple[Sink, str]:
    """A tracker and where its results are, as a line for the user.

    Raises:
        ValueError: unknown kind.
        Exception: whatever the library raises.
    """
    if kind == "wandb":
        from lora_rl.track.trackers.wandb_sink import WandbSink

        tracker = WandbSink(**settings)
    elif kind == "mlflow":
        from lora_rl.track.trackers.mlflow_sink import MlflowSink

        tracker = MlflowSink(**settings)
    else:
        raise ValueError(f"unknown tracker {kind!r}")
    return tracker, tracker.place


def main() -> None:
    """Answer each line of standard input with one on standard output, until the input ends."""
    # Libraries print; only answers may go to the parent.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tracker: Sink | None = None
    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if "kind" in message:
                tracker, answer["told"] = open_tracker(message["kind"], message["settings"])
            elif "step" in message:
                tracker.log(message["step"], message["metrics"])
            else:
                tracker.close()
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
