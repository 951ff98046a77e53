"""What a person sees of a run: start-up, progress, samples, warnings, and a summary at the end."""

import io
import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from lora_rl.track import dashboard, names
from lora_rl.track.dashboard import Sample, label
from lora_rl.track.format import ASCII, UNICODE, duration, printable
from lora_rl.track.recorder import nonfinite_names
from lora_rl.track.startup import StartupTask, waiting_lines, waiting_summary
from lora_rl.track.state import RunState
from lora_rl.track.timer import PhaseTimer

MODES = ("auto", "plain", "quiet")
PLAIN_WIDTH = 100
SHOWN_WARNINGS = 3
FIRST_STEPS = 5  # in plain mode, these many steps have a line each


class Console:
    """Shows a run on a terminal, or as plain lines when there is none.

        with Console(total_steps=200, timer=timer, paths={"metrics": recorder.path}) as console:
            with console.startup("starting Ray"):
                ...
            for step in range(1, 201):
                ...
                console.step(recorder.log(step, metrics, timer.end_step()), samples)

    On a terminal a live region is redrawn in place and everything else is printed above it. Otherwise there is
    one line per step: the first five, then each validation and the last step, and others when `plain_interval_s`
    have gone by; no control characters. While no line is due for `heartbeat_s`, a line says what is waited for.

    Warnings of the `lora_rl` loggers are shown too. The summary is printed on leaving the `with` block, also
    when it is left by an exception. A display that cannot be written to is switched off and the run goes on.
    Every method may be called from any thread. A resumed run first gives `console.state.update` the records of
    `RunRecorder.earlier`, so that curves and totals are those of the whole run.

    Args:
        mode: `auto`, `plain` (as if there were no terminal), or `quiet` (warnings and the summary only).
        total_steps: step at which the run ends; may be set later as `console.state.total_steps`.
        timer: asked for the phase that is running now.
        paths: what the summary points to, by label; a path that does not exist by then is left out.
        stream: standard output unless given.
        sample_every: steps between two tables of samples; 0: none is shown.
        sample_count: samples per table.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(
        self,
        mode: str = "auto",
        total_steps: int | None = None,
        *,
        timer: PhaseTimer | None = None,
        paths: Mapping[str, Path | str] | None = None,
        stream: TextIO | None = None,
        sample_every: int = 10,
        sample_count: int = 3,
        plain_interval_s: float = 10.0,
        heartbeat_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if mode not in MODES:
            raise ValueError(f"console mode {mode!r}; valid: {', '.join(MODES)}")
        self.state = RunState(total_steps)
        self.paths = dict(paths or {})
        self._quiet = mode == "quiet"
        self._stream = stream or sys.stdout
        self._clock = clock
        self._timer = timer
        self._sample_every, self._sample_count = sample_every, sample_count
        self._plain_interval_s, self._heartbeat_s = plain_interval_s, heartbeat_s
        self._rich = rich.console.Console(file=self._stream, highlight=False, markup=False, emoji=False)
        # The stream is asked itself: rich also calls a file a terminal when FORCE_COLOR is set, as CI systems do.
        self._is_live = (
            mode == "auto" and self._stream.isatty() and self._rich.is_terminal and not self._rich.is_dumb_terminal
        )
        unicode = (getattr(self._stream, "encoding", None) or "utf-8").lower().startswith("utf")
        self._glyphs = UNICODE if unicode else ASCII
        self._encoding = "utf-8" if unicode else "ascii"
        if self._is_live and not unicode and isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="backslashreplace")

        # Guards the state below. Never held while printing: the live region's own thread takes this lock
        # inside rich's.
        self._lock = threading.RLock()
        self._begin = self._last_line = clock()
        self._last_sample_step: int | None = None
        self._tasks: list[StartupTask] = []
        self._warnings: Counter[str] = Counter()
        self._recent_warnings: deque[str] = deque()
        self._broken = False
        self._live: Live | None = None
        self._closing = threading.Event()
        self._handler = _WarningHandler(self)

    def __enter__(self) -> "Console":
        self._begin = self._last_line = self._clock()
        logging.getLogger("lora_rl").addHandler(self._handler)
        if self._is_live:
            self._live = Live(
                get_renderable=self._live_region, console=self._rich, refresh_per_second=4, transient=True
            )
            self._output(self._live.start)
        elif not self._quiet:
            threading.Thread(target=self._heartbeat, name="console-heartbeat", daemon=True).start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._closing.set()
        logging.getLogger("lora_rl").removeHandler(self._handler)
        if self._live is not None:
            self._output(self._live.stop)
            self._live = None
            self._print(*map(_warning_line, self._recent_warnings))
        self._print(*waiting_lines(self._tasks))
        self._summary(failed=error is not None and not issubclass(kind, KeyboardInterrupt))

    def startup(self, name: str) -> StartupTask:
        """Show that `name` is being started, with the seconds it takes; see `StartupTask`."""
        task = StartupTask(name, self._clock, self._startup_closed)
        with self._lock:
            self._tasks.append(task)
        if not self._is_live and not self._quiet:
            self._print(label("start-up").append(f"{task.name} ..."))
        self._refresh()
        return task

    def step(self, record: Mapping, samples: Sequence[Sample] = ()) -> None:
        """Show one record, as `RunRecorder.log` returns it, and now and then some of the samples.

        The record before training (step 0: start-up and first validation) is shown in the same way.
        """
        with self._lock:
            self.state.update(record)
            show_line = not self._is_live and not self._quiet and self._is_due(record)
            show_samples = bool(samples) and not self._quiet and self._samples_due(record)
            line = dashboard.step_line(self.state, record) if show_line else ""
        self._refresh()
        if nonfinite := nonfinite_names(record):
            self.warn(f"not finite: {', '.join(nonfinite)}")
        if show_line:
            self._print(Text(line))
        if show_samples:
            picked = dashboard.pick_samples(samples, self._sample_count)
            self._print(*dashboard.sample_view(record["step"], picked, self._width(), as_table=self._is_live))

    def warn(self, message: str) -> None:
        """Show a warning. One that was shown before is only counted."""
        dropped = None
        with self._lock:
            self._warnings[message] += 1
            if self._warnings[message] > 1:
                return
            step = self.state.step
            text = printable(message if step is None else f"step {step}: {message}")
            self._recent_warnings.append(text)
            if len(self._recent_warnings) > SHOWN_WARNINGS:
                dropped = self._recent_warnings.popleft()
        # The live region holds the last ones. One that leaves it stays readable above.
        if not self._is_live:
            self._print(_warning_line(text))
        elif dropped is not None:
            self._print(_warning_line(dropped))

    def info(self, message: str) -> None:
        """Print one line, unless quiet."""
        if not self._quiet:
            self._print(Text(printable(message)))

    def _startup_closed(self, task: StartupTask, line: str) -> None:
        with self._lock:
            self._tasks.remove(task)
        if not self._quiet or "FAILED" in line:
            self._print(label("start-up").append(line))

    def _is_due(self, record: Mapping) -> bool:
        if self.state.trained <= FIRST_STEPS or names.ACCURACY in record:
            return True
        is_last = record["step"] == self.state.total_steps
        return is_last or self._clock() - self._last_line >= self._plain_interval_s

    def _samples_due(self, record: Mapping) -> bool:
        if not self._sample_every:
            return False
        last = self._last_sample_step
        due = last is None or record["step"] >= last + self._sample_every
        if due:
            self._last_sample_step = record["step"]
        return due

    def _refresh(self) -> None:
        if self._live is not None:
            self._output(self._live.refresh)

    def _live_region(self) -> RenderableType:
        with self._lock:
            lines = waiting_lines(self._tasks)
            if self.state.step is not None:
                elapsed = self._clock() - self._begin
                lines += dashboard.live_lines(self.state, self._width(), self._glyphs, elapsed)
            if now := self._now():
                lines.append(label("now").append(now))
            lines += map(_warning_line, self._recent_warnings)
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _now(self) -> str:
        current = self._timer.current if self._timer else None
        return f"{current[0]} {duration(current[1])}" if current else ""

    def _heartbeat(self) -> None:
        while not self._closing.wait(min(1.0, self._heartbeat_s / 4)):
            with self._lock:
                waiting = waiting_summary(self._tasks) or self._now()
                due = self._clock() - self._last_line >= self._heartbeat_s
            if due and waiting:
                self._print(label("waiting").append(waiting))

    def _summary(self, failed: bool) -> None:
        if self.state.total_steps == 0:
            # No training run: whoever opened the console reports for itself.
            return
        paths = {name: Path(path) for name, path in self.paths.items() if Path(path).exists()}
        lines = dashboard.summary_lines(self.state, self._width(), self._glyphs, failed)
        if self._warnings:
            shown = f"{len(self._warnings)} different, {self._warnings.total()} in all"
            lines.append(label("warnings").append(shown, style="yellow"))
        here = Path.cwd()
        for name, path in paths.items():
            shown = path.relative_to(here) if path.is_relative_to(here) else path
            line = label(name).append(f"{shown}")
            line.no_wrap = True
            lines.append(line)
        self._print(*lines)

    def _width(self) -> int:
        return max(self._rich.width, 40) if self._is_live else PLAIN_WIDTH

    def _print(self, *renderables: RenderableType) -> None:
        """Print above the live region, or as plain text."""
        if not renderables:
            return
        self._last_line = self._clock()
        if self._is_live:
            for shown in map(self._fitted, renderables):
                # What may not be broken, such as a path to copy, is left for the terminal to wrap.
                whole = isinstance(shown, Text)
                self._output(lambda shown=shown, whole=whole: self._rich.print(shown, soft_wrap=whole))
        else:
            text = "".join(f"{line}\n" for line in renderables)
            text = text.encode(self._encoding, "backslashreplace").decode(self._encoding)
            self._output(lambda: (self._stream.write(text), self._stream.flush()))

    def _fitted(self, renderable: RenderableType) -> RenderableType:
        """A labelled line that is too long, continued under itself; everything else as it is."""
        width = self._width()
        if not isinstance(renderable, Text) or renderable.no_wrap or renderable.cell_len <= width:
            return renderable
        head, body = renderable.divide([dashboard.LABEL_CELLS])
        grid = Table.grid(Column(width=dashboard.LABEL_CELLS), Column(overflow="fold"))
        grid.add_row(head, body)
        return grid

    def _output(self, write: Callable[[], object]) -> None:
        """Write to the display. A closed terminal must not end a run that has been going for hours."""
        if self._broken:
            return
        try:
            write()
        except (OSError, ValueError) as error:
            self._broken = True
            logging.getLogger(__name__).error("the display is switched off: %s", error)


class _WarningHandler(logging.Handler):
    """Shows what the `lora_rl` loggers warn of."""

    def __init__(self, console: Console):
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.warn(record.getMessage())


def _warning_line(text: str) -> Text:
    return label("warning").append(text, style="yellow")
