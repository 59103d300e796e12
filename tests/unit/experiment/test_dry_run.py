"""A dry run opens the baseline, and refuses what the run itself would refuse, in the same sentence."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from judged_runs import GOLDEN, NEARLY_ALIKE, NOISY, of_trials

from trtx.bench import read_cells
from trtx.bench.judge.judgement import Verdict
from trtx.cli.app import run as trtx
from trtx.errors import UsageError
from trtx.experiment import ExperimentSpec, gate, load_sweep, plan_only
from trtx.experiment.baselines.baseline import Baseline, write_baseline
from trtx.experiment.baselines.conditions import conditions_of
from trtx.experiment.environment import environment
from trtx.experiment.provenance import provenance_of
from trtx.launch import prepare
from trtx.runs.forms import Provenance
from trtx.topology import Plan

pytestmark = pytest.mark.slow

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
SWEEP: dict[str, Any] = {"topology": {"engine": "paced"}, "load": {"concurrency": [1], "trials": 3}}


def asked(directory: Path, **load: Any) -> ExperimentSpec:
    said = {"baseline": "main", "max_regression": "5%", "baseline_dir": str(directory)}
    return load_sweep(None, SWEEP | {"load": SWEEP["load"] | load, "gate": said})


def here(spec: ExperimentSpec, directory: Path) -> tuple[dict[str, Plan], Provenance]:
    plans = {one.label: prepare(one.spec, run_dir=directory / one.label) for one in spec.topologies}
    return plans, provenance_of(spec, environment((), NOON), plans, None)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """As if it had been measured on this machine."""
    directory = tmp_path_factory.mktemp("kept")
    spec = asked(directory)
    (load,) = spec.load.loads
    cell = replace(of_trials(read_cells(GOLDEN)[0], NEARLY_ALIKE), topology="agg", load=load)
    return Baseline(
        "main", "then", NOON, Verdict.PASS, conditions_of(spec, *here(spec, directory)), None, None, (cell,)
    )


def test_the_baseline_is_told_with_what_differs(kept: Baseline, tmp_path: Path) -> None:
    versions = kept.conditions.versions | {"torch": "1.0"}
    write_baseline(tmp_path / "main.json", replace(kept, conditions=replace(kept.conditions, versions=versions)))
    found = plan_only(asked(tmp_path), parent=tmp_path).baseline
    assert found is not None and (found.name, found.run) == ("main", "then")
    assert [one.partition(" and ")[0] for one in found.differences] == ["versions.torch was 1.0"]
    assert not (tmp_path / "RUN").exists()


def other(group: str, **values: Any) -> Any:
    return lambda kept: replace(
        kept, conditions=replace(kept.conditions, **{group: getattr(kept.conditions, group) | values})
    )


@pytest.mark.parametrize(
    ("change", "load", "words"),
    [
        (other("model", name="other"), {}, "model.name was other and is"),
        (other("machine", cpu_cores=999), {}, "machine.cpu_cores was 999 and is"),
        (other("load", seed=8), {}, "load.seed was 8 and is"),
        (lambda kept: kept, {"concurrency": [1, 8]}, "the baseline has no cell agg-c8"),
        (lambda kept: replace(kept, cells=(of_trials(kept.cells[0], NOISY),)), {}, "5% can't be resolved"),
        (lambda kept: kept, {"trials": 1}, "which gives no interval"),
        (lambda kept: None, {}, "no baseline is called 'main'"),
    ],
)
def test_what_the_run_would_refuse_is_refused_in_the_same_sentence(
    kept: Baseline, change: Any, load: dict[str, Any], words: str, tmp_path: Path
) -> None:
    if (changed := change(kept)) is not None:
        write_baseline(tmp_path / "main.json", changed)
    spec = asked(tmp_path, **load)
    with pytest.raises(UsageError) as of_run:
        gate.prepare(tmp_path, spec, *here(spec, tmp_path))
    with pytest.raises(UsageError) as of_dry_run:
        plan_only(spec, parent=tmp_path)
    assert str(of_dry_run.value) == str(of_run.value) and words in str(of_run.value)


def test_as_a_person_types_it(
    kept: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bench = ["bench", "--engine", "paced", "--concurrency", "1", "--trials", "3", "--dry-run"]
    gated = [*bench, "--baseline", "main", "--max-regression", "5%"]
    assert trtx(gated) == 2
    said = capsys.readouterr()
    assert said.out == "" and "no baseline is called 'main' in 'baselines'; " in said.err
    Path("baselines").mkdir()
    write_baseline(Path("baselines/main.json"), replace(kept, promoted_at=NOON))
    assert trtx(gated) == 0
    assert "against main: output_token_throughput:avg" in (shown := capsys.readouterr().out)
    assert shown.endswith("Baseline main, run then, 2026-11-22.\n")
    assert trtx([*bench, "--save-baseline", "main"]) == 2
    assert "main.json is promoted and would be replaced" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["baselines"]


@pytest.mark.parametrize(
    ("topology", "load", "words"),
    [
        ({"engine": "torch", "model": "synthetic:tiny"}, {}, "sends images to tiny, a text model"),
        ({"engine": "paced"}, {}, "has no effect with engine paced, whose workers take no images"),
        (
            {"engine": "torch", "model": "synthetic:tiny-vl"},
            {"isl": 9000},
            r"2 images of \d+ tokens in all make 90\d\d",
        ),
        ({"engine": "torch", "model": "synthetic:tiny-vl"}, {"image_batch_size": 17}, "media.max_images of agg is 16"),
        ({"engine": "torch"}, {"image_width_mean": 9000, "image_height_mean": 9000}, "make images of 81000000 pixels"),
        ({"engine": "torch"}, {"image_width_mean": 4000, "image_height_mean": 3000}, "make files of 36000000 bytes at"),
        (
            {"engine": "torch", "media": {"max_media_bytes": 100_000}},
            {"image_width_mean": 300, "image_height_mean": 300, "image_format": "jpeg"},
            "make files of 139500 bytes at least, and media.max_media_bytes of agg is 100000; ask for smaller images",
        ),
        (
            {"engine": "torch"},
            {"image_batch_size": 6, "image_width_mean": 2000, "image_height_mean": 1000},
            "requests of at least 48000000 bytes, with 6 images each, but the .* of agg takes bodies of 45 MiB",
        ),
        ({"engine": "torch"}, {"image_batch_size": 0, "image_width_mean": 9}, "image_batch_size is 0"),
        ({"engine": "torch"}, {"public_dataset": "sharegpt"}, "has its own prompts; leave it out"),
    ],
)
def test_images_are_refused_where_nobody_would_see_them(
    topology: dict[str, Any], load: dict[str, Any], words: str, tmp_path: Path
) -> None:
    asked_of = {"concurrency": [1], "image_batch_size": 2, "osl": 8} | load
    with pytest.raises(UsageError, match=words):
        plan_only(load_sweep(None, {"topology": topology, "load": asked_of}), parent=tmp_path)
