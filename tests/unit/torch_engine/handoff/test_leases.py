from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.torch_engine.handoff import LeaseTable


def test_a_lease_hands_its_blocks_back_once() -> None:
    table = LeaseTable(grace_s=0)
    table.grant(1, [4, 5], deadline_s=10)
    assert table.num_blocks == 2
    lease = table.release(1)
    assert lease is not None and lease.block_ids == (4, 5)
    assert table.release(1) is None
    assert table.expire(1000) == []
    assert len(table) == table.num_blocks == 0


def test_blocks_outlive_the_deadline_by_the_grace() -> None:
    table = LeaseTable(grace_s=1)
    table.grant(1, [4], deadline_s=10)
    assert table.expire(10.9) == []
    assert [lease.lease_id for lease in table.expire(11)] == [1]
    assert table.release(1) is None


def test_an_id_that_is_still_leased_is_refused() -> None:
    table = LeaseTable()
    table.grant(1, [4], deadline_s=10)
    with pytest.raises(ValueError, match="lease 1 is still held"):
        table.grant(1, [5], deadline_s=20)


def test_an_id_granted_again_keeps_its_new_deadline() -> None:
    table = LeaseTable(grace_s=0)
    table.grant(1, [4], deadline_s=10)
    table.release(1)
    table.grant(1, [5], deadline_s=20)
    assert table.expire(15) == []
    assert [lease.block_ids for lease in table.expire(20)] == [(5,)]


Step = st.one_of(
    st.tuples(st.just("grant"), st.integers(0, 9), st.integers(0, 20)),
    st.tuples(st.just("release"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("expire"), st.just(0), st.integers(0, 30)),
)


@settings(deadline=None)
@given(st.lists(Step, max_size=60))
def test_every_grant_ends_exactly_once_and_never_before_its_deadline(steps: list[tuple[str, int, int]]) -> None:
    table = LeaseTable(grace_s=2)
    held: dict[int, int] = {}  # lease id -> deadline: what must be in the table
    now = 0
    for action, lease_id, number in steps:
        if action == "grant" and lease_id not in held:
            table.grant(lease_id, [lease_id], deadline_s=now + number)
            held[lease_id] = now + number
        elif action == "release":
            ended = table.release(lease_id)
            assert (ended is not None) == (held.pop(lease_id, None) is not None)
        elif action == "expire":
            now += number
            expired = [lease.lease_id for lease in table.expire(now)]
            assert sorted(expired) == sorted(i for i, deadline in held.items() if deadline + 2 <= now)
            assert expired == sorted(expired, key=lambda i: held[i]) or len(expired) < 2
            for i in expired:
                del held[i]
        assert len(table) == table.num_blocks == len(held)
