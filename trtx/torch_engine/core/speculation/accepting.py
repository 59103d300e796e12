"""Which drafted tokens of a committed step become tokens of their sequence."""

from __future__ import annotations

from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.messages import Update
from trtx.torch_engine.step import Sampled


def accept_drafted(sequence: Sequence, sampled: Sampled) -> tuple[Update, int]:
    """Applies a step with drafted tokens. Returns the update, and the number of accepted drafted tokens.

    A drafted token is accepted if it was sampled before it. After a token that ends the sequence, and where the next
    token has an error or can't follow the grammar, none is accepted: the next step meets the same there.
    """
    drafted, sequence.drafted = sequence.drafted, None
    assert drafted is not None
    start = sequence.num_written
    update = sequence.advance(sampled, start + 1)
    assert update is not None
    row, accepted = sampled, 0
    for place, (token_id, following) in enumerate(zip(drafted.tokens, sampled.after_drafts, strict=True)):
        if update.finish_reason is not None or row.token_id != token_id or following.token_id is None:
            break
        if sequence.matcher is not None:
            matcher = drafted.matchers[place]
            if matcher.problem:
                break
            sequence.matcher = matcher
        row, accepted = following, place + 1
        if sequence.matcher is not None and sequence.matcher.is_complete:
            update.finish_reason = "stop"
            break
        assert following.token_id is not None
        update.extend(sequence.accept(following.token_id, following.logprobs))
    sequence.dropped = [one.token_id for one in sampled.after_drafts[accepted:] if one.token_id is not None]
    sequence.num_written = sequence.num_computed = start + 1 + accepted
    sequence.num_tokens = sequence.num_known
    return update, accepted
