"""The engine's side, in a process of its own: which sequence computes what next, and on which KV blocks.

Owns sequences, the scheduler, the block pool, leases and reads, and the step loop, which calls ``runner`` and
``handoff``. It sees no text and no caller: ``trtx.torch_engine.llmapi`` does, at the other end of the socket. Enter
through ``process``. Every block is free, held or cached, exactly once, after each step.
"""
