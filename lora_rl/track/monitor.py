"""How busy this machine is: its GPUs, its CPU, its memory."""

import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping

GIB = 2**30
INTERVAL_S = 2.0
QUERY = "index,utilization.gpu,memory.used"
TIMEOUT_S = 10.0


class Monitor:
    """Means since the last step, as metrics.

        with Monitor() as monitor, RunRecorder(run_dir, monitor=monitor.take) as recorder:
            ...

    `gpu/N/utilization` (0 to 1) and `gpu/N/memory_gib` of every GPU of this machine that `nvidia-smi` lists, sampled
    every `interval_s` in a thread; `host/cpu_utilization` (0 to 1) over the whole step, `host/memory_gib` at its end.
    Processes of others count too. Other machines of a cluster are not looked at.

    Args:
        warn: told once when GPUs cannot be read any more; the rest goes on.
        interval_s: seconds between two looks at the GPUs.
    """

    def __init__(self, warn: Callable[[str], None], interval_s: float = INTERVAL_S):
        self._warn, self._interval_s = warn, interval_s
        self._samples: dict[str, list[float]] = {}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def sees_gpus(self) -> bool:
        """Whether GPUs can be read here."""
        return shutil.which("nvidia-smi") is not None

    def __enter__(self) -> "Monitor":
        import psutil

        psutil.cpu_percent()  # the next call tells of the time since this one
        if self.sees_gpus:
            self._thread = threading.Thread(target=self._work, name="monitor", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._closing.set()

    def take(self) -> dict[str, float]:
        """Metrics of the time since the last call."""
        import psutil

        with self._lock:
            samples, self._samples = self._samples, {}
        return {
            **{name: sum(values) / len(values) for name, values in samples.items()},
            "host/cpu_utilization": psutil.cpu_percent() / 100,
            "host/memory_gib": psutil.virtual_memory().used / GIB,
        }

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                found = gpu_metrics(_nvidia_smi())
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                self._warn(f"logger.monitor_gpus: GPUs are not recorded any more: {error}")
                return
            with self._lock:
                for name, value in found.items():
                    self._samples.setdefault(name, []).append(value)
            self._closing.wait(self._interval_s)


def gpu_metrics(table: str) -> Mapping[str, float]:
    """Metrics from what `nvidia-smi` prints for QUERY: a line `index, per cent, MiB` for each GPU.

    A value that a GPU does not report, `[N/A]`, is left out.

    Raises:
        ValueError: a line of another form.
    """
    metrics: dict[str, float] = {}
    for line in filter(None, map(str.strip, table.splitlines())):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or not fields[0].isdigit():
            raise ValueError(f"nvidia-smi printed {line!r} instead of {QUERY}")
        index, utilization, memory = fields
        if not utilization.startswith("["):
            metrics[f"gpu/{index}/utilization"] = float(utilization) / 100
        if not memory.startswith("["):
            metrics[f"gpu/{index}/memory_gib"] = float(memory) / 1024
    return metrics


def _nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
