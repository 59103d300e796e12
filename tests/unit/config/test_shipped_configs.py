from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtx.checkpoint.families import FAMILIES
from trtx.config import Role, check_engine_configs, config_family, load_engine_config, recipe_files, recipe_names
from trtx.config.families import CONFIG_ROOT, read_header
from trtx.config.rules import Subject
from trtx.config.torch_fields import refused_fields
from trtx.config.versions import schema_version
from trtx.errors import UsageError
from trtx.memory import ENCODER_TOKENS

FILES = sorted(CONFIG_ROOT.rglob("*.yaml"))
TOPOLOGIES: dict[str, tuple[Role, ...]] = {"agg": ("agg", "encode"), "disagg": ("prefill", "decode", "encode")}


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("mode", TOPOLOGIES)
def test_every_recipe_passes_for_the_version_it_names(recipe: str, mode: str) -> None:
    files = recipe_files(recipe)
    assert {"agg", "prefill", "decode"} <= files.keys()
    configs = {
        role: load_engine_config(role, family=recipe, path=files[role], overrides=(), engine="tensorrt-llm")
        for role in TOPOLOGIES[mode]
        if role in files
    }
    findings = check_engine_configs(configs)
    assert [str(finding) for finding in findings if finding.severity != "note"] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_header_says_what_the_config_is_for(path: Path) -> None:
    role: Role = path.stem  # type: ignore[assignment]
    config = load_engine_config(role, family=path.parent.name, path=path, overrides=(), engine="tensorrt-llm")
    header = config.header
    assert header is not None
    version = schema_version(header.tensorrt_llm)
    assert version.columns == ("main-2026-07",)
    assert header.gpus == Subject(role, config.values, config.source, version).world_size
    assert header.gpus <= 8 or header.gpus % 8 == 0, "an engine over nodes has whole ones"
    assert header.gpu


ARCHITECTURES = {header.architecture for path in FILES if (header := read_header(path.read_text(), str(path)))} - {None}


@pytest.mark.parametrize("architecture", sorted(str(name) for name in ARCHITECTURES))
def test_the_folder_of_an_architecture_is_made_for_it(architecture: str) -> None:
    agg = recipe_files(config_family(architecture, on_gpu=True))["agg"]
    header = read_header(agg.read_text(), str(agg))
    assert header is not None
    assert header.architecture == architecture


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_the_torch_engine_takes_the_folder_of_each_of_its_families_on_one_gpu(architecture: str) -> None:
    folder = config_family(architecture, on_gpu=True, engine="torch")
    for role in recipe_files(folder) if folder in recipe_names() else ():
        config = load_engine_config(role, family=folder, path=None, overrides=(), engine="torch")
        assert config.header is not None and (config.header.gpus, config.header.architecture) == (1, architecture)
        assert not list(refused_fields(config.values)), folder


def test_without_a_gpu_every_architecture_takes_the_small_folder() -> None:
    assert {config_family(str(name), on_gpu=False) for name in ARCHITECTURES} == {"tiny"}


def test_a_recipe_of_another_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean deepseek-r1-mtp?"):
        recipe_files("deepseek-r1-mpt")


@pytest.mark.parametrize(
    "line",
    ["# trtx: {tensorrt_llm: 1.3.0rc22}", "# trtx: rc22", "# trtx: {gpus: many", "# trtx: {a: b}\n"],
)
def test_a_garbled_header_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "agg.yaml"
    path.write_text(f"{line}\nmax_batch_size: 1\n")
    with pytest.raises(UsageError, match="is not a header; expected # trtx:"):
        load_engine_config("agg", family="", path=path, overrides=(), engine="torch")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.3.0rc22", []),
        ("1.3.0rc20", ["note"]),  # nothing in it is unknown there
        ("1.3.0rc27", ["error", "note"]),  # WIDEEP is gone
    ],
)
def test_a_config_for_another_version_is_refused_where_that_lacks_something(version: str, expected: list[str]) -> None:
    recipe = "deepseek-r1-wide-ep"
    path = recipe_files(recipe)["decode"]
    config = load_engine_config("decode", family=recipe, path=path, overrides=(), engine="tensorrt-llm")
    findings = check_engine_configs({"decode": config}, version=version)
    told = [finding for finding in findings if finding.rule in ("other-version", "written-for")]
    assert [finding.severity for finding in told] == expected
    if "error" in expected:
        assert told[0].path == "moe_config.backend"
        assert "make it one of AUTO, CUTLASS" in str(told[0].fix)


def test_a_config_for_other_gpus_gets_a_note() -> None:
    path = recipe_files("deepseek-r1")["prefill"]
    config = load_engine_config("prefill", family="", path=path, overrides=(), engine="tensorrt-llm")
    findings = check_engine_configs({"prefill": config}, gpus=("NVIDIA H100 80GB HBM3",))
    (note,) = [finding for finding in findings if finding.rule == "written-for"]
    assert "for B200 or B300, and this is NVIDIA H100 80GB HBM3" in note.message
    assert "moe-backend-for-gpu" in {finding.rule for finding in findings}
    assert not [f for f in check_engine_configs({"prefill": config}, gpus=("NVIDIA B200",)) if f.rule == "written-for"]


def test_the_configs_that_a_build_left_come_before_the_shipped_ones(tmp_path: Path) -> None:
    (tmp_path / "engine_configs").mkdir()
    (tmp_path / "engine_configs" / "agg.yaml").write_text(json.dumps({"max_batch_size": 7}))
    built = load_engine_config("agg", family="tiny", path=None, overrides=(), engine="torch", model_dir=tmp_path)
    assert built.values == {"max_batch_size": 7}
    shipped = load_engine_config("prefill", family="tiny", path=None, overrides=(), engine="torch", model_dir=tmp_path)
    assert shipped.source == "engine_configs/tiny/prefill.yaml"


def test_a_prefill_worker_without_a_file_gets_what_the_transfer_needs() -> None:
    def resolved(role: Role) -> dict[str, object]:
        return load_engine_config(role, family="none", path=None, overrides=(), engine="tensorrt-llm").values

    assert resolved("prefill") == {
        "disable_overlap_scheduler": True,
        "cuda_graph_config": None,
        "cache_transceiver_config": {"backend": "DEFAULT"},
    }
    assert resolved("encode") == {}


@pytest.mark.parametrize("path", [path for path in FILES if path.stem == "encode"], ids=lambda path: path.parent.name)
def test_an_encode_worker_takes_the_pictures_that_an_aggregated_one_takes(path: Path) -> None:
    config = load_engine_config("encode", family=path.parent.name, path=path, overrides=(), engine="torch")
    assert (config.values.get("max_num_tokens") or ENCODER_TOKENS) >= ENCODER_TOKENS
