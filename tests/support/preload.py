"""Imported once by the fork server, so that every rank a test starts begins with Megatron imported and patched."""

from lora_rl.policy.platform import prepare

prepare("cpu", num_threads=1)

import lora_rl.policy.trainer  # noqa: E402, F401
