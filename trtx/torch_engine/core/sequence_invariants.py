"""The invariants of one sequence between two steps. Each check raises AssertionError with the numbers in question."""

from __future__ import annotations

from trtx.torch_engine.core.kv_cache_groups import LayerGroups
from trtx.torch_engine.core.media import MediaStore
from trtx.torch_engine.core.sequence import Sequence


def check_waiting(sequence: Sequence) -> None:
    if sequence.block_ids or sequence.slot >= 0:
        raise AssertionError(f"waiting sequence {sequence.sequence_id} holds {sequence.block_ids}")


def check_media(sequence: Sequence, media: MediaStore) -> None:
    """A running sequence holds exactly those embeddings that it still needs."""
    if sequence.num_computed >= sequence.chunked_until:
        unmet: object = "embeddings that no step needs more" if sequence.embeddings else None
    else:
        unmet = media.shortage(sequence.media, sequence.embeddings, sequence.num_computed)
    if unmet is not None:
        raise AssertionError(f"sequence {sequence.sequence_id} runs, and has {unmet}")


def check_holding(sequence: Sequence, groups: LayerGroups, tokens_per_block: int, *, is_leaving: bool) -> None:
    """The blocks of a sequence with a slot cover its positions, and its counts agree with the steps in flight."""
    room = sequence.room
    lengths = [len(blocks) * tokens_per_block for blocks in sequence.block_ids]
    if lengths != [room] * groups.count:
        raise AssertionError(f"sequence {sequence.sequence_id} has room for {room}, and blocks for {lengths}")
    for group, left in enumerate(sequence.num_left):
        if left > groups.first(group, sequence.num_written):
            raise AssertionError(f"sequence {sequence.sequence_id} gave back {left} blocks that it still sees")
    if not sequence.num_written <= sequence.num_computed <= room:
        raise AssertionError(
            f"sequence {sequence.sequence_id}: {sequence.num_written} tokens written, {sequence.num_computed} "
            f"computed or under way, room for {room}"
        )
    if not sequence.num_steps and (is_leaving or sequence.num_written != sequence.num_computed):
        raise AssertionError(
            f"sequence {sequence.sequence_id} is in no step under way, {sequence.num_written} of its "
            f"{sequence.num_computed} tokens are written, and it is {'leaving' if is_leaving else 'there'}"
        )
