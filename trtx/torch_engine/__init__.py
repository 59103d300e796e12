"""The embedded engine: an LLM on PyTorch with TensorRT-LLM's LLM API, for CPU and CUDA.

Start here, in this order:

1. ``step.py``: the contract between scheduler and model runner: what one step computes and returns.
2. ``core/engine_core.py``: the step loop: accept requests, schedule, launch, commit, report.
3. ``core/scheduler.py``: which sequences run in a step: chunked prefill, admission, preemption.
4. ``core/block_pool.py``: the paged KV pool: block states, prefix cache, eviction.
5. ``runner/runner.py``: the forward of one step: packed inputs, CUDA graphs, sampling.

The engine spans several processes. ``llmapi`` runs in the caller's process. ``core``, with ``runner`` (tensors) and
``handoff`` (KV transfer between engines), runs in the engine's process. ``vision`` (images to embeddings) runs in the
encoder's process. These folders share only the modules of this folder and ``trtx.ipc``: messages between processes
(``messages``, ``trtx.ipc.encoder_messages``) go over a ``channel``, tensors as ``trtx.ipc.shared_tensor``, and ``step``
with ``kv_layout`` is the contract between core and runner. Callers enter through ``llmapi``. Serving is the job of
``worker``; finding model files is the job of ``checkpoint``.

Two invariants always hold. The greedy tokens of a request do not depend on batching, chunking, prefix cache hits or
preemption, except where the rounding of logits decides a near-tie (never with ``deterministic``). Every KV block is in
exactly one state: free, held or cached.
"""

from typing import Any

from trtx.names import PUBLIC, public


def __getattr__(name: str) -> Any:
    return public(__name__, name)  # earlier versions exported the names of llmapi here


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
