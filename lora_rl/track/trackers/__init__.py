"""Trackers of others: Weights & Biases, MLflow, TensorBoard. None of them can stop, fail or slow a run."""

from lora_rl.track.trackers.background import BackgroundSink
from lora_rl.track.trackers.open import open_sinks
from lora_rl.track.trackers.process import TrackerError, TrackerProcess

__all__ = ["BackgroundSink", "TrackerError", "TrackerProcess", "open_sinks"]
