"""The embedded engine: an LLM on PyTorch that speaks TensorRT-LLM's LLM API, on a CPU and on CUDA.

Towers with process boundaries between them: ``llmapi`` in the caller's process, ``core`` with ``runner`` (tensors) and
``handoff`` (KV between engines) in the engine's own, ``vision`` (pictures to embeddings) in the encoder's. They share
the modules of this folder alone: what crosses (``messages``, ``encoder_messages``, over a ``channel``; tensors as
``shared_tensor``), and ``batch`` between core and runner. It does not serve, nor look for models:
``worker`` and ``checkpoint`` do. Enter through ``llmapi``. It always holds that a request's greedy tokens depend
neither on batching, chunking, prefix hits nor preemption, and that every block is free, held or cached, exactly once.
"""

from typing import Any

from trtx.names import PUBLIC, public


def __getattr__(name: str) -> Any:
    return public(__name__, name)  # earlier versions had the names of llmapi here


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
