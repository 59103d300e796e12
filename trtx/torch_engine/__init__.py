"""The embedded engine: an LLM on PyTorch that speaks TensorRT-LLM's LLM API, on a CPU and on CUDA.

Two towers with a process boundary between them: ``llmapi`` in the caller's process, ``core`` with ``runner`` (tensors)
and ``handoff`` (KV between engines) in the engine's own. They share the modules of this folder alone: what crosses
(``messages``, over a ``channel``), and ``batch`` between core and runner. It does not serve, nor look for models:
``worker`` and ``checkpoint`` do. Enter through ``llmapi``. It always holds that a request's greedy tokens depend
neither on batching, chunking, prefix hits nor preemption, and that every block is free, held or cached, exactly once.
"""
