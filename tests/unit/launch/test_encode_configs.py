"""What encode workers take from their topology: one dtype for all, or nothing is planned; and their batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtx.config import ResolvedEngineConfig, Role, TopologySpec
from trtx.errors import UsageError
from trtx.launch.encode_configs import with_embedding_dtype
from trtx.launch.ports import HOLDER
from trtx.launch.preparation import prepare, resolve
from trtx.memory.processor import cpu_dtype
from trtx.topology import Plan

AUTO = cpu_dtype("bfloat16")
"""What auto becomes for a checkpoint in bfloat16 on this machine's processor: float32 or bfloat16."""


def planned(run_dir: Path, *overrides: str, **more: Any) -> Plan:
    spec = TopologySpec(model="synthetic:tiny-vl", engine="torch", port=0, overrides=overrides, **more)
    made = prepare(spec, run_dir=run_dir)
    HOLDER.release((made.port, *made.internal_ports))
    return made


def configs(**stated: str | None) -> dict[Role, ResolvedEngineConfig]:
    """Of each role its dtype; None where the config says nothing."""
    roles: tuple[Role, ...] = ("encode", "agg", "prefill", "decode")
    return {
        role: ResolvedEngineConfig(role, {"dtype": stated[role]} if stated[role] else {}, f"{role}.yaml", ())
        for role in roles
        if role in stated
    }


def test_encode_follows_what_set_says_to_the_others_and_tells_why(tmp_path: Path) -> None:
    made = planned(tmp_path, "dtype=bfloat16", encode=1)
    assert made.engine_configs["encode"]["dtype"] == "bfloat16"
    why = "encode: dtype = 'bfloat16' because agg, which takes its embeddings, computes in it"
    assert why in made.reasons
    apart = planned(tmp_path, "dtype=float16", encode=1, mode="disagg")
    assert apart.engine_configs["encode"]["dtype"] == "float16"
    assert any("because prefill and decode, which take its embeddings" in reason for reason in apart.reasons)


def test_a_dtype_in_a_config_file_is_followed_too(tmp_path: Path) -> None:
    file = tmp_path / "agg.yaml"
    file.write_text("dtype: bfloat16\n")
    assert planned(tmp_path, encode=1, engine_configs={"agg": file}).engine_configs["encode"]["dtype"] == "bfloat16"


def test_another_dtype_for_encode_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        planned(tmp_path, "dtype=float16", "encode.dtype=bfloat16", encode=1)
    assert str(refused.value) == (
        "encode makes embeddings in bfloat16 (--set), but agg accepts them only in float16 (--set); leave encode.dtype "
        "out, or --set encode.dtype=float16"
    )
    with pytest.raises(UsageError, match=r"agg accepts them only in float32 \(default\)"):
        with_embedding_dtype(configs(encode="bfloat16", agg=None), "float32", is_gpu=False)


@pytest.mark.parametrize("encode", [0, 1])
def test_prefill_and_decode_of_two_dtypes_are_refused(tmp_path: Path, encode: int) -> None:
    says = r"prefill computes in float16 \(--set\) and decode in float32 \(default\), but decode continues"
    with pytest.raises(UsageError, match=says):
        planned(tmp_path, "prefill.dtype=float16", encode=encode, mode="disagg")
    same = configs(prefill="bfloat16", decode="bfloat16")
    assert with_embedding_dtype(same, "float32", is_gpu=False) == same
    same = configs(prefill=AUTO, decode=None)
    assert with_embedding_dtype(same, "bfloat16", is_gpu=False) == same


@pytest.mark.parametrize(
    ("stated", "own", "is_gpu"),
    [
        ({"encode": AUTO, "agg": None}, "bfloat16", False),
        ({"encode": "auto", "agg": AUTO}, "bfloat16", False),
        ({"encode": "bfloat16", "agg": "auto"}, "bfloat16", True),  # and the checkpoint's own on a GPU
        ({"encode": None, "prefill": "bfloat16", "decode": None}, "bfloat16", True),
        ({"encode": None, "agg": None}, "bfloat16", True),
    ],
)
def test_what_auto_becomes_is_compared_and_the_same_is_left_as_it_is(
    stated: dict[str, str | None], own: str, is_gpu: bool
) -> None:
    given = configs(**stated)
    assert with_embedding_dtype(given, own, is_gpu=is_gpu) == given


def test_auto_that_becomes_another_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match=rf"encode makes embeddings in {AUTO} \(encode.yaml\), but agg .* float16"):
        with_embedding_dtype(configs(encode="auto", agg="float16"), "bfloat16", is_gpu=False)


def test_an_encoder_of_tensorrt_llm_follows_too() -> None:
    """Planned for another machine, as no package of that name is here."""

    def encode_dtype(*overrides: str) -> Any:
        spec = TopologySpec(
            model="synthetic:qwen2.5-vl-7b", engine="tensorrt-llm", mode="disagg", encode=1, overrides=overrides
        )
        return resolve(spec, None, has_gpu=True).configs["encode"].values.get("dtype")

    assert (encode_dtype(), encode_dtype("dtype=bfloat16"), encode_dtype("dtype=float16")) == (None, None, "float16")
    with pytest.raises(UsageError, match=r"encode makes embeddings in bfloat16 \(--set\), but prefill .* float16"):
        encode_dtype("dtype=float16", "encode.dtype=bfloat16")


def test_a_deterministic_topology_encodes_each_picture_alone(tmp_path: Path) -> None:
    file = tmp_path / "encode.yaml"
    file.write_text("max_batch_size: 16\n")
    made = planned(tmp_path, encode=1, engine_configs={"encode": file}, deterministic=True)
    assert made.engine_configs["encode"]["max_batch_size"] == 1
    assert "encode: max_batch_size = 1 because --deterministic encodes each image alone" in made.reasons
    for worker in made.workers:  # an encoder of their own is told by it
        assert ("--deterministic" in worker.argv) == (worker.role != "encode")
    assert planned(tmp_path, encode=1).engine_configs["encode"]["max_batch_size"] != 1
    assert planned(tmp_path, "encode.max_batch_size=1", encode=1, deterministic=True)
    with pytest.raises(UsageError, match=r"encode\.max_batch_size is 8 \(--set\), but --deterministic"):
        planned(tmp_path, "encode.max_batch_size=8", encode=1, deterministic=True)
