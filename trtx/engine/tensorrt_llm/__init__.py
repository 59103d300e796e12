"""Finds, starts and shuts down TensorRT-LLM. The only room that knows its versions and process behaviour.

Owns the differences between versions (``versions``), the conversion of an engine config to keyword arguments
(``arguments``), the environment that a start needs (``environment``) and the start itself (``life``). Does not handle
requests (``trtx.worker`` does) and does not check configs against the schema (``trtx.config`` does). Always holds: only
``life`` and ``versions`` import ``tensorrt_llm``, and only when called.
"""
