"""What a run waits for before its first step."""

import itertools
from collections.abc import Callable, Sequence

from rich.text import Text

from lora_rl.track.dashboard import label
from lora_rl.track.format import duration, printable

SHOWN_TASKS = 8


class StartupTask:
    """One thing that is being started. Several may be open at once, in any thread.

        with console.startup("rank 0") as task:
            task.update("importing Megatron")
            ...
            task.update("building the model")

    Without `with`, end it by `done()` or `fail(reason)`. Made by `Console.startup`.
    """

    def __init__(self, name: str, clock: Callable[[], float], on_close: Callable[["StartupTask", str], None]):
        self.name = printable(name)
        self._clock = clock
        self._on_close = on_close
        self._begin = clock()
        self._parts: list[tuple[str, float]] = []  # what was being done, and since when
        self._closed = False

    def update(self, doing: str) -> None:
        """Say what is being done now; the parts and their seconds are listed when the task ends."""
        if not self._parts or self._parts[-1][0] != doing:
            self._parts.append((printable(doing), self._clock()))

    def done(self) -> None:
        """End the task. Ending it again does nothing."""
        now = self._clock()
        parts = ", ".join(
            f"{doing} {duration(end - begin)}"
            for (doing, begin), (_, end) in itertools.pairwise([*self._parts, ("", now)])
        )
        self._close(f"{self.name} {duration(now - self._begin)}" + (f" ({parts})" if parts else ""))

    def fail(self, reason: str) -> None:
        """End the task as failed. The caller still raises what is to be raised."""
        self._close(f"{self.waiting()} FAILED: {printable(reason)}")

    def waiting(self) -> str:
        """What is waited for and how long: `rank 0: importing Megatron 3.1 s`."""
        doing = f": {self._parts[-1][0]}" if self._parts else ""
        return f"{self.name}{doing} {duration(self._clock() - self._begin)}"

    def __enter__(self) -> "StartupTask":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.done()
        else:
            first_line = str(error).partition("\n")[0]
            self.fail(f"{kind.__name__}: {first_line}")

    def _close(self, line: str) -> None:
        if not self._closed:
            self._closed = True
            self._on_close(self, line)


def waiting_lines(tasks: Sequence[StartupTask]) -> list[Text]:
    """The open tasks, one a line, the first `SHOWN_TASKS` of them."""
    lines = [label("waiting").append(task.waiting()) for task in tasks[:SHOWN_TASKS]]
    if len(tasks) > SHOWN_TASKS:
        lines.append(label("").append(f"and {len(tasks) - SHOWN_TASKS} more"))
    return lines


def waiting_summary(tasks: Sequence[StartupTask]) -> str:
    """The open tasks in one line."""
    more = f", and {len(tasks) - SHOWN_TASKS} more" if len(tasks) > SHOWN_TASKS else ""
    return ", ".join(task.waiting() for task in tasks[:SHOWN_TASKS]) + more
