"""Speculative decoding: guesses the next tokens of a sequence, so that one step computes several of them.

A step computes a sequence's last token and up to ``max_draft_len`` drafted tokens. After each of them the model's own
token is sampled, with the logits, seed and index that it would have without speculation. A drafted token is accepted if
it is the token that was sampled before it, so the output is the very sequence that no speculation would give.

:mod:`drafters` and :mod:`suffixes` guess tokens, :mod:`lengths` decides how many of them a step verifies, and
:mod:`speculation` joins them for the scheduler and the step loop.
"""
