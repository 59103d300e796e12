"""Owns the ranks of a tensor-parallel engine: their processes, their group, and the plan of each step that they follow.

Rank 0 is the engine's process. It schedules, and sends every step's plan to the other ranks, which compute the same
forward with their share of the weights and of the KV pool. The arithmetic of a share is in ``runner/split.py``.

Enter at :func:`create_ranked_runner`. All ranks live and die together: a rank that ends takes the engine with it.
"""

from trtx.torch_engine.ranks.leader import LeadingRunner, create_ranked_runner

__all__ = ["LeadingRunner", "create_ranked_runner"]
