"""The engine's process: decides which sequence computes which tokens next, and on which KV blocks.

Owns sequences, scheduler, block pool, leases and reads, and the step loop, which calls ``runner`` and ``handoff``. It
handles token ids, never text; ``trtx.torch_engine.llmapi`` is the other end of the socket and talks to callers. The
entry point is ``process``; ``admission.py`` refuses requests, such as those that exceed the context. After each step,
every block is in exactly one state: free, held or cached.
"""
