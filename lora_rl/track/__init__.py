"""Everything the user sees of a run: metrics, console, plots, logs. Imports neither torch nor Ray."""

from lora_rl.track.console import Console
from lora_rl.track.dashboard import Sample
from lora_rl.track.logs import Capture, capture_to_file, tail
from lora_rl.track.plot import learning_curve, learning_curve_many
from lora_rl.track.recorder import RunRecorder, read_metrics, series
from lora_rl.track.sinks import Sink, TensorBoardSink
from lora_rl.track.startup import StartupTask
from lora_rl.track.timer import PhaseTimer

__all__ = [
    "Capture",
    "Console",
    "PhaseTimer",
    "RunRecorder",
    "Sample",
    "Sink",
    "StartupTask",
    "TensorBoardSink",
    "capture_to_file",
    "learning_curve",
    "learning_curve_many",
    "read_metrics",
    "series",
    "tail",
]
