"""The caller's side of the engine: TensorRT-LLM's LLM API, in the process of a worker.

Owns what callers see (:class:`LLM`, parameters, results), checks and resolves each request once, and holds the engine's
process at the other end of a socket. It computes nothing and holds no device: ``trtx.torch_engine.core`` does, in that
process. Enter through ``trtx.torch_engine``; the two import nothing of each other, and share only the messages above
them.
"""
