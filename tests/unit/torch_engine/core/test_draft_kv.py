"""Which copies of a block have the draft model's KV of its whole content, while copies and draft passes overlap."""

from __future__ import annotations

import pytest

from trtx.torch_engine.core.draft_kv import DraftKv

NAME, OTHER = b"one", b"other"


@pytest.fixture
def kv() -> DraftKv:
    kv = DraftKv()
    kv.written(3, NAME)
    return kv


def test_a_whole_block_goes_to_host_memory_and_comes_back_elsewhere(kv: DraftKv) -> None:
    assert kv.copy_lacks(7, 3, NAME)
    kv.storing(3, 7, NAME)
    assert not kv.copy_lacks(7, 3, NAME)
    kv.loading(5)
    assert not kv.is_whole(5, NAME)
    kv.loaded(7, 5, NAME)
    assert kv.is_whole(5, NAME) and not kv.is_whole(5, OTHER)


def test_a_copy_is_not_whole_if_the_draft_kv_became_whole_while_it_was_made() -> None:
    kv = DraftKv()
    kv.storing(3, 7, NAME)
    kv.written(3, NAME)
    assert kv.copy_lacks(7, 3, NAME)


def test_a_load_that_is_given_up_leaves_nothing_whole(kv: DraftKv) -> None:
    kv.loading(3)
    assert not kv.is_whole(3, NAME)


def test_a_block_of_host_memory_with_another_content_brings_back_nothing(kv: DraftKv) -> None:
    kv.storing(3, 7, NAME)
    kv.storing(4, 7, OTHER)
    for name in (NAME, OTHER):
        kv.loading(5)
        kv.loaded(7, 5, name)
        assert not kv.is_whole(5, name)


def test_nothing_is_whole_after_both_pools_are_emptied(kv: DraftKv) -> None:
    kv.storing(3, 7, NAME)
    kv.forget()
    kv.loaded(7, 5, NAME)
    assert not kv.is_whole(3, NAME) and not kv.is_whole(5, NAME)
