"""The ranks of a tensor-parallel engine: their processes, their group, and the plans of steps that they follow.

Rank 0 is the engine's process. It schedules, and sends every step's plan to the other ranks, which compute the same
forward with their share of the weights and of the KV pool. The arithmetic of a share is in ``runner/rank_split.py``.

Enter at :func:`trtx.torch_engine.ranks.children.start_ranks`, and then at ``create_ranked_runner`` of
:mod:`trtx.torch_engine.ranks.leader`, which imports torch. All ranks live and die together: a rank that ends takes the
engine with it.
"""
