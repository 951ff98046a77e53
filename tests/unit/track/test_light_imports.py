"""The driver imports `lora_rl.track` and must stay light."""

import subprocess
import sys


def test_nothing_in_track_imports_torch_and_heavy_packages_wait_until_used(tmp_path):
    program = """
import pathlib, sys
import lora_rl.track as track
heavy = {"torch", "ray", "matplotlib", "tensorboard", "numpy", "tensorflow", "vllm", "megatron"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
where = pathlib.Path(sys.argv[1])
sink = track.TensorBoardSink(where / "tb")
with track.RunRecorder(where, sinks=[sink]) as recorder, track.Console("quiet") as console:
    console.step(recorder.log(1, {"train/reward": 0.5, "time/step": 1.0, "time/other": 1.0}))
track.learning_curve(track.read_metrics(recorder.path), where / "curve.png")
assert {"matplotlib", "tensorboard"} <= sys.modules.keys()
unwanted = {"torch", "ray", "tensorflow", "vllm", "megatron", "matplotlib.pyplot"}
assert not unwanted & sys.modules.keys(), unwanted & sys.modules.keys()
"""
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "curve.png").exists()
