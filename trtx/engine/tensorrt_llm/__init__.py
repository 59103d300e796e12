"""TensorRT-LLM behind the worker: found, started, ended. The one room that knows its versions and its process habits.

Owns what differs from version to version (``versions``), the way from an engine config to keyword arguments
(``arguments``), the environment a start needs (``environment``) and the start itself (``life``).
Does not handle requests (``trtx.worker`` does) and does not check configs against the schema (``trtx.config`` does).
Always holds: nothing here imports ``tensorrt_llm`` but ``life`` and ``versions``, and those only when called.
"""
