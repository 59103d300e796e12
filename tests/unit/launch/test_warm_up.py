"""A plan is refused where the launcher's own first request would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.launch.ports import HOLDER
from trtx.launch.preparation import prepare


def spec(*overrides: str) -> TopologySpec:
    return TopologySpec(model="synthetic:tiny", engine="torch", port=0, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("max_seq_len=2",), "agg: with its max_seq_len the torch engine takes prompts of at most 1 tokens"),
        (("max_seq_len=28",), "at most 27 tokens, and the launcher's own first request has 28; raise max_seq_len"),
        (
            ("kv_cache_config.tokens_per_block=16", "kv_cache_config.max_tokens=31"),
            "kv_cache_config.max_tokens the torch engine takes prompts of at most 15",
        ),
        (("max_num_tokens=27", "enable_chunked_prefill=false"), "max_num_tokens the torch engine takes prompts of at"),
    ],
)
def test_sequences_that_can_not_hold_the_first_request_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UsageError) as refused:
        prepare(spec(*overrides), run_dir=tmp_path)
    assert says in str(refused.value)


def test_the_shortest_that_holds_it_is_planned(tmp_path: Path) -> None:
    for overrides in (
        ("max_seq_len=29",),
        ("max_num_tokens=28", "enable_chunked_prefill=false"),
        ("max_num_tokens=2",),
    ):
        planned = prepare(spec("enable_chunked_prefill=true", *overrides), run_dir=tmp_path)
        HOLDER.release((planned.port, *planned.internal_ports))
