"""--router-args, held against dynamo.frontend's own parser before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.launch.preparation import prepare
from trtx.launch.router_args_check import check_flags


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("positional",), "--router-args holds positional, which dynamo.frontend does not accept; leave it out"),
        (("--nosuch", "5"), "--router-args holds --nosuch 5, which"),
        (("--router-temperature",), "refuses it (argument --router-temperature: expected one argument)"),
        (("--router-temperature", "hot"), "invalid float value: 'hot'"),
        (("--migration-limit", "-1"), "--migration-limit must be between 0"),
        (("--serve-indexer",), "--serve-indexer requires --router-mode=kv"),
    ],
)
def test_what_dynamos_frontend_would_end_over_is_refused_by_the_plan(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UsageError) as refused:
        prepare(TopologySpec(router_args=words), run_dir=tmp_path)
    assert says in str(refused.value)


def test_what_contradicts_a_policy_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    spec = TopologySpec(
        mode="disagg", router_mode="kv", conditional_disagg="isl_bounding", router_args=("--no-router-kv-events",)
    )
    with pytest.raises(UsageError, match="--router-conditional-disagg requires --router-kv-events"):
        prepare(spec, run_dir=tmp_path)


def test_flags_that_it_knows_pass() -> None:
    check_flags(("--router-temperature", "0.5", "--migration-limit", "1"), "round-robin")
    check_flags(("--serve-indexer",), "kv")
