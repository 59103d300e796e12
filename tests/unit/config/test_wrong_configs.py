"""Fifty seeded wrong configs, one change each: every one is refused, for the right field and by the right rule."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtx.config import Finding, Role, check_engine_configs, load_engine_config, recipe_files, recipe_names, schema
from trtx.config.findings import refuse_errors
from trtx.errors import UsageError

Values = dict[str, Any]


@dataclass(frozen=True)
class Wrong:
    """One change: in ``role``, what it does to the values, and which finding must name it. ``version``: checked for."""

    role: Role
    change: Callable[[Values], None]
    path: str
    rule: str
    version: str | None = None


@dataclass(frozen=True)
class Drawn:
    recipe: str
    wrong: Wrong


def put(path: str, value: object) -> Callable[[Values], None]:
    def change(values: Values) -> None:
        *parents, leaf = path.split(".")
        for parent in parents:
            child = values.get(parent) or {}
            values[parent] = child
            values = child
        values[leaf] = value

    return change


def misspell(name: str, rng: random.Random) -> str:
    """Swaps two neighbours until no version knows the name."""
    while name in schema.known_fields():
        at = rng.randrange(len(name) - 1)
        name = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    return name


def schema_wrongs(rng: random.Random, role: Role, values: Values) -> Iterator[Wrong]:
    """What no config may hold, whatever else it says."""
    name = rng.choice([name for name in values if name not in ("backend", "world_size")])
    typo = misspell(name, rng)

    def renamed(target: Values) -> None:
        target[typo] = target.pop(name)

    yield Wrong(role, renamed, typo, "unknown-field")
    for path, value in (
        ("max_batch_size", "many"),
        ("enable_chunked_prefill", "yes please"),
        ("kv_cache_config", [1, 2]),
        ("cuda_graph_config.batch_sizes", [1, "two"]),
        ("stream_interval", 1.5),
    ):
        if role != "encode" or not path.startswith("kv"):
            yield Wrong(role, put(path, value), path, "wrong-type")
    for path, value in (
        ("kv_cache_config.free_gpu_memory_fraction", rng.choice([-0.1, 1.01, 85])),
        ("kv_cache_config.dtype", "fp16"),
        ("max_num_tokens", 0),
        ("cache_transceiver_config.backend", "RDMA"),
        ("allreduce_strategy", "FAST"),
        ("batch_wait_timeout_ms", -1),
        ("tensor_parallel_size", -2),
    ):
        yield Wrong(role, put(path, value), path, "wrong-value")
    for path, value, version in (
        ("enable_sleep", True, None),
        ("kv_cache_config.onboard_blocks", True, "1.3.0rc22"),
        ("kv_cache_config.block_reuse_config", {"policy": "per_request"}, "1.3.0rc22"),
        ("kv_cache_config.block_reuse_policy", "per_request", "1.3.0rc24"),
        ("sampler_type", "TorchSampler", "1.4.0rc1"),
        ("moe_config.backend", "WIDEEP", "1.3.0rc27"),
        ("sleep_config", {}, "1.2.1"),
    ):
        yield Wrong(role, put(path, value), path, "other-version", version)


def pair_wrongs(rng: random.Random, values: dict[Role, Values]) -> Iterator[Wrong]:
    """What one side may hold and the other must hold too."""
    decode, prefill = values["decode"], values["prefill"]
    kv, transceiver = "kv_cache_config", "cache_transceiver_config"
    side: Role = rng.choice(["prefill", "decode"])
    dtype = "auto" if decode[kv].get("dtype") == "fp8" else "fp8"
    yield Wrong(side, put(f"{kv}.dtype", dtype), f"{kv}.dtype", "kv-dtype-equal")
    yield Wrong(side, put(f"{kv}.tokens_per_block", 128), f"{kv}.tokens_per_block", "tokens-per-block-equal")
    yield Wrong(side, put(f"{transceiver}.backend", "NIXL"), f"{transceiver}.backend", "transceiver-backend-equal")
    yield Wrong(
        side,
        put(f"{transceiver}.transceiver_runtime", "PYTHON"),
        f"{transceiver}.transceiver_runtime",
        "transceiver-runtime-equal",
    )
    yield Wrong(
        side,
        put(f"{transceiver}.max_tokens_in_buffer", 1024),
        f"{transceiver}.max_tokens_in_buffer",
        "transfer-buffer-equal",
    )
    if "max_seq_len" in prefill:
        yield Wrong("decode", put("max_seq_len", prefill["max_seq_len"] - 1), "max_seq_len", "decode-holds-prefill")
    if "speculative_config" in prefill:
        yield Wrong(side, put("speculative_config", None), "speculative_config", "speculation-on-both")


def role_wrongs(rng: random.Random, role: Role, values: Values) -> Iterator[Wrong]:
    """What the values of one worker must be to one another."""
    if role == "encode":
        yield Wrong(role, put("max_batch_size", None), "max_batch_size", "encoder-batch")
        yield Wrong(role, put("kv_cache_config.dtype", "fp8"), "kv_cache_config", "encoder-sections")
        return
    if role == "prefill":
        yield Wrong(role, put("disable_overlap_scheduler", False), "disable_overlap_scheduler", "prefill-overlap")
        yield Wrong(role, put("pipeline_parallel_size", 2), "pipeline_parallel_size", "prefill-pipeline", "1.3.0rc7")
    if role == "decode":
        batch = values["max_batch_size"]
        graphs = {"enable_padding": True, "max_batch_size": batch // 2}
        yield Wrong(role, put("cuda_graph_config", None), "cuda_graph_config", "decode-graphs-cover-batch")
        yield Wrong(
            role, put("cuda_graph_config", graphs), "cuda_graph_config.max_batch_size", "decode-graphs-cover-batch"
        )
        yield Wrong(role, put("max_num_tokens", batch - 1), "max_num_tokens", "tokens-cover-batch")
        if "speculative_config" not in values:
            yield Wrong(role, put("disable_overlap_scheduler", True), "disable_overlap_scheduler", "decode-overlap")
        yield Wrong(role, put("max_beam_width", rng.randint(2, 4)), "max_beam_width", "one-beam")
    ranks = values.get("tensor_parallel_size", 1)
    yield Wrong(role, put("moe_expert_parallel_size", ranks + 1), "moe_expert_parallel_size", "experts-fill-tp")
    sizes = {"batch_sizes": [1, 2, 4], "max_batch_size": 8}
    yield Wrong(role, put("cuda_graph_config", sizes), "cuda_graph_config.max_batch_size", "graph-sizes-agree")
    yield Wrong(role, put("enable_lora", True), "lora_config.lora_target_modules", "lora-targets")
    drafts = {"decoding_type": "NGram"}
    yield Wrong(role, put("speculative_config", drafts), "speculative_config.max_draft_len", "speculation-is-whole")


def draw(seed: int) -> Drawn:
    rng = random.Random(seed)
    recipe = rng.choice(recipe_names())
    values: dict[Role, Values] = {
        role: yaml.safe_load(path.read_text(encoding="utf-8")) for role, path in recipe_files(recipe).items()
    }
    role = rng.choice(sorted(values))
    wrongs = [
        *schema_wrongs(rng, role, values[role]),
        *role_wrongs(rng, role, values[role]),
        *pair_wrongs(rng, values),
    ]
    rule = rng.choice(sorted({wrong.rule for wrong in wrongs}))
    return Drawn(recipe, rng.choice([wrong for wrong in wrongs if wrong.rule == rule]))


def written(drawn: Drawn, folder: Path) -> dict[Role, Path]:
    """The recipe's files with the one change, its topology's only, as a user would have them."""
    alone = drawn.wrong.role in ("agg", "encode")
    roles: tuple[Role, ...] = (drawn.wrong.role,) if alone else ("prefill", "decode")
    files = {}
    for role in roles:
        text = recipe_files(drawn.recipe)[role].read_text(encoding="utf-8")
        values = yaml.safe_load(text)
        if role == drawn.wrong.role:
            drawn.wrong.change(values)
        header = "".join(line for line in text.splitlines(keepends=True)[:2])
        files[role] = folder / f"{role}.yaml"
        files[role].write_text(header + yaml.safe_dump(values), encoding="utf-8")
    return files


def findings_of(drawn: Drawn, files: dict[Role, Path]) -> tuple[Finding, ...]:
    configs = {
        role: load_engine_config(role, family="", path=path, overrides=(), engine="tensorrt-llm")
        for role, path in files.items()
    }
    return check_engine_configs(configs, version=drawn.wrong.version)


@pytest.mark.parametrize("seed", range(50))
def test_a_wrong_config_is_refused_for_the_right_field_by_the_right_rule(seed: int, tmp_path: Path) -> None:
    drawn = draw(seed)
    findings = findings_of(drawn, written(drawn, tmp_path))
    errors = {(finding.path, finding.rule) for finding in findings if finding.severity == "error"}
    assert (drawn.wrong.path, drawn.wrong.rule) in errors
    with pytest.raises(UsageError) as refused:
        refuse_errors(findings)
    assert f"[{drawn.wrong.rule}]" in str(refused.value)
    assert drawn.wrong.path in str(refused.value)


def test_the_fifty_cover_every_kind() -> None:
    rules = {draw(seed).wrong.rule for seed in range(50)}
    assert {"unknown-field", "wrong-type", "wrong-value", "other-version"} <= rules
    assert len(rules) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_command_refuses_it_too(seed: int, tmp_path: Path) -> None:
    drawn = draw(seed)
    files = [f"--config={role}={path}" for role, path in written(drawn, tmp_path).items()]
    version = [f"--trtllm-version={drawn.wrong.version}"] if drawn.wrong.version else []
    done = subprocess.run(
        [sys.executable, "-m", "trtx", "build", "--check", "--json", *files, *version],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    (checked,) = json.loads(done.stdout)
    told = {(finding["path"], finding["rule"]) for finding in checked["findings"] if finding["severity"] == "error"}
    assert (drawn.wrong.path, drawn.wrong.rule) in told
