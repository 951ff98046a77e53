"""What Megatron-Bridge and Megatron-Core need to be imported and built where Transformer Engine is not installed."""

from __future__ import annotations

import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

# Fields of a model provider that choose kernels of Transformer Engine or Apex.
UNFUSED = {
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    # Experts one by one: the grouped product and the fused permutation are kernels of Transformer Engine.
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
}


def import_bridge() -> None:
    """Import Megatron-Bridge so that its adapters, and Megatron's local layers, work without Transformer Engine."""
    with _transformer_engine_placeholder():
        import megatron.bridge  # noqa: F401 - imported here so that the patches surround it
    _allow_norms_of_split_sequences()
    _patch_megatron_bridge()


class _Placeholder(types.ModuleType):
    """A module whose attributes are empty classes: enough for annotations and isinstance checks at import time."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"Sequential": type("Sequential", (), {})})


class _PlaceholderDuring(importlib.abc.MetaPathFinder):
    """Finds one module and shows `transformer_engine` to it, and to nothing else, while it executes."""

    def __init__(self, target: str) -> None:
        self._target = target

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._target:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                package = _Placeholder("transformer_engine")
                package.pytorch = _Placeholder("transformer_engine.pytorch")  # type: ignore[attr-defined]
                sys.modules["transformer_engine"] = package
                sys.modules["transformer_engine.pytorch"] = package.pytorch  # type: ignore[attr-defined]
                try:
                    execute(module)
                finally:
                    del sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"]

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def _transformer_engine_placeholder() -> Iterator[None]:
    """`megatron.bridge.peft.lora_layers` imports Transformer Engine unconditionally, for annotations only.

    A placeholder left in `sys.modules` would make other modules' guarded imports believe the engine is there.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        yield
        return
    finder = _PlaceholderDuring("megatron.bridge.peft.lora_layers")
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _allow_norms_of_split_sequences() -> None:
    """Under sequence parallelism Megatron refuses torch's norms, whose weights' gradients it could not sum over ranks.

    Ours are frozen and have none. (Training all weights under sequence parallelism is refused by a rule.)
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.sequence_parallel:
            config = copy.copy(config)
            config.sequence_parallel = False
        return original(cls, config, *args, **kwargs)

    WrappedTorchNorm.__new__ = new


def _patch_megatron_bridge() -> None:
    import megatron.bridge.peft.utils as peft_utils

    # Megatron-Core defines its Transformer Engine names as None when the engine is missing, which the bridge's
    # "did the import succeed" test takes for presence.
    if importlib.util.find_spec("transformer_engine") is None:
        peft_utils.HAVE_TE = False
