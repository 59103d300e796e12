"""The gate of a run: what is refused before anything starts, and what it is judged to be at its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judged_runs import CELLS, GOLDEN, NOISY, a_run, change_cells, conditions_of_kept, gated, judged, of_trials, prepare

from trtx.bench import Cell, Figures, read_cells
from trtx.bench.judge.judgement import Verdict
from trtx.bench.metrics import request_throughput
from trtx.errors import UsageError
from trtx.experiment import gate, load_sweep
from trtx.experiment.baselines.conditions import Conditions
from trtx.experiment.baselines.store import Baselines
from trtx.experiment.lifecycle import forget_verdict
from trtx.runs.forms import BASELINE, VERDICT, RunVerdict

pytestmark = pytest.mark.slow

ITL = "inter_token_latency:p50"
THROUGHPUT = "output_token_throughput:avg"  # which takes no number of requests


def criteria(found: RunVerdict, cell: str = "agg-c1") -> dict[str, Verdict]:
    return {one.criterion: one.verdict for one in found.judgements if one.cell == cell}


def test_without_a_gate_failed_requests_alone_are_judged_and_that_is_kept(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    found = judged(run)
    assert [(one.cell, one.criterion) for one in found.judgements] == [
        (cell, "request_error_rate:avg:le:0") for cell in CELLS
    ]
    assert (found.verdict, found.exit_code, found.sentence, found.baseline) == (Verdict.PASS, 0, None, None)
    assert VERDICT.read(run, RunVerdict) == found


@pytest.mark.parametrize(
    ("slower", "trials", "verdict", "code"),
    [
        (1.0, (1.001, 1.0, 0.9995), Verdict.PASS, 0),
        (0.8, (1.0, 1.001, 0.999), Verdict.PASS, 0),
        (1.3, (1.0, 1.001, 0.999), Verdict.REGRESSED, 1),
        (1.0, NOISY, Verdict.NO_VERDICT, 3),
        (1.3, NOISY, Verdict.NO_VERDICT, 3),
    ],
)
def test_a_run_is_held_against_its_baseline(
    tmp_path: Path, slower: float, trials: tuple[float, ...], verdict: Verdict, code: int
) -> None:
    run = a_run(tmp_path / "run", slower=slower, trials=trials)
    found = judged(run, baseline=str(a_run(tmp_path / "base")), max_regression="5%")
    assert (found.verdict, found.exit_code) == (verdict, code)
    assert criteria(found)[ITL] is verdict and len(found.judgements) == 4 * (1 + 3)
    assert found.baseline is not None and found.baseline.run == "base" and found.baseline.differences == ()
    if verdict is Verdict.REGRESSED:
        assert "of the baseline" in str(found.sentence) and "all beyond the limit 1.05" in str(found.sentence)


@pytest.mark.parametrize(
    ("slower", "slower_when_steady", "window", "verdict"),
    [
        (1.3, 1 / 1.3, "whole", Verdict.REGRESSED),
        (1.3, 1 / 1.3, "steady", Verdict.PASS),
        (1.0, 1.3, "whole", Verdict.PASS),
        (1.0, 1.3, "steady", Verdict.REGRESSED),
    ],
)
def test_both_sides_are_judged_over_the_window_that_is_asked(
    tmp_path: Path, slower: float, slower_when_steady: float, window: str, verdict: Verdict
) -> None:
    run = a_run(tmp_path / "run", slower=slower, slower_when_steady=slower_when_steady)
    base = str(a_run(tmp_path / "base"))
    found = judged(run, baseline=base, max_regression="5%", metrics=["request_latency:avg"], window=window)
    assert (found.verdict, found.window) == (verdict, window)
    reasons = [one.reason for one in found.judgements if one.criterion == "request_latency:avg"]
    assert ["of the baseline over the steady part, " in reason for reason in reasons] == [window == "steady"] * 4
    assert VERDICT.read(run, RunVerdict) == found


def test_objectives_and_goodput_are_of_the_steady_part_where_it_is_asked(tmp_path: Path) -> None:
    said: dict[str, Any] = {"slo": ["request_latency:avg:le:5000"], "min_goodput": 0.1}
    whole, steady = (
        judged(a_run(tmp_path / window, trials=(1.0,), slower_when_steady=1000), window=window, **said)
        for window in ("whole", "steady")
    )
    assert criteria(whole)["request_latency:avg:le:5000"] is Verdict.PASS
    assert criteria(steady)["request_latency:avg:le:5000"] is Verdict.MISSED
    rates = {cell.name: cell.steady[request_throughput] for cell in read_cells(GOLDEN) if cell.steady}
    of_records = {one.cell: one.value for one in steady.judgements if one.criterion.startswith("goodput")}
    assert of_records == pytest.approx(rates)  # every request of the kept records is good
    (goodput,) = {
        one.reason for one in steady.judgements if one.criterion.startswith("goodput") and one.cell == "agg-c1"
    }
    assert "requests/s over the steady part" in goodput


def test_requests_that_failed_have_failed_in_whatever_part(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")

    def fail(cell: Cell) -> Cell:
        """In the ramp: the steady part has none."""
        failed = {"error_request_count": 3, "request_error_rate": 20.0}
        trials = [
            replace(trial, figures=Figures(trial.figures.stored | failed)) for trial in cell.trials if trial.figures
        ]
        assert cell.figures is not None
        return replace(cell, trials=tuple(trials), figures=Figures(cell.figures.stored | failed))

    change_cells(run, fail)
    found = judged(
        run, baseline=str(a_run(tmp_path / "base")), max_regression="5%", metrics=[THROUGHPUT], window="steady"
    )
    assert criteria(found)["request_error_rate:avg:le:0"] is Verdict.MISSED
    assert criteria(found)[THROUGHPUT] is Verdict.FAILED


def _without_steady_part(run: Path) -> Path:
    def cut(cell: Cell) -> Cell:
        if cell.name != "agg-c1":
            return cell
        first, *others = cell.trials
        return replace(cell, steady=None, trials=(first, *(replace(trial, steady=None) for trial in others)))

    change_cells(run, cut)
    return run


def test_a_baseline_without_a_steady_part_is_refused_where_it_is_asked(tmp_path: Path) -> None:
    run, base = a_run(tmp_path / "run"), _without_steady_part(a_run(tmp_path / "base"))
    with pytest.raises(
        UsageError, match="base has trials without a steady part in agg-c1, and --window steady compares"
    ):
        judged(run, baseline=str(base), max_regression="5%", metrics=[THROUGHPUT], window="steady")
    assert judged(run, baseline=str(base), max_regression="5%").verdict is Verdict.PASS


def test_a_run_without_a_steady_part_gets_no_verdict_of_it(tmp_path: Path) -> None:
    run, base = _without_steady_part(a_run(tmp_path / "run")), a_run(tmp_path / "base")
    found = judged(run, baseline=str(base), max_regression="5%", metrics=[THROUGHPUT], window="steady")
    assert (criteria(found)[THROUGHPUT], criteria(found, "agg-c2")[THROUGHPUT]) == (Verdict.NO_VERDICT, Verdict.PASS)
    assert "trial 2, 3 of 3 has no steady part; measure longer" in str(found.sentence)


def test_the_metrics_that_are_named_are_compared_and_no_others(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", slower=1.3)
    base = str(a_run(tmp_path / "base"))
    found = judged(run, baseline=base, max_regression="5%", metrics=["request_latency:p50"])
    assert criteria(found) == {"request_error_rate:avg:le:0": Verdict.PASS, "request_latency:p50": Verdict.REGRESSED}


def test_objectives_and_goodput_are_judged_in_each_cell(tmp_path: Path) -> None:
    found = judged(
        a_run(tmp_path / "run"), slo=["time_to_first_token:p50:le:1", "request_latency:p50:le:5000"], min_goodput=0.5
    )
    assert criteria(found) == {
        "request_error_rate:avg:le:0": Verdict.PASS,
        "time_to_first_token:p50:le:1": Verdict.MISSED,
        "request_latency:p50:le:5000": Verdict.PASS,
        "goodput:avg:ge:0.5": Verdict.MISSED,  # no request has its first token within 1 ms
    }
    assert found.exit_code == 1 and "expected at most 1 ms" in str(found.sentence)


def test_goodput_is_of_the_requests_that_aiperf_recorded(tmp_path: Path) -> None:
    found = judged(a_run(tmp_path / "run", trials=(1.0,)), slo=["request_latency:p50:le:5000"], min_goodput=1)
    rates = {
        cell.name: cell.figures.stored["request_throughput"] for cell in read_cells(tmp_path / "run") if cell.figures
    }
    goodput = {one.cell: one.value for one in found.judgements if one.criterion.startswith("goodput")}
    assert goodput == pytest.approx(rates) and found.exit_code == 0


def test_a_percentile_of_too_few_requests_is_no_verdict(tmp_path: Path) -> None:
    found = judged(a_run(tmp_path / "run"), slo=["time_to_first_token:p99:le:5000"])
    assert (found.exit_code, found.verdict) == (3, Verdict.NO_VERDICT) and "p99 needs 662" in str(found.sentence)


def failing(cell: Cell, failed: int) -> Cell:
    """``failed`` requests of its first trial, and of the cell, failed."""

    def of(figures: Figures | None) -> Figures:
        assert figures is not None
        succeeded = figures.stored["request_count"] - failed
        rate = 100 * failed / (succeeded + failed)
        counts = {"request_count": succeeded, "error_request_count": failed, "request_error_rate": rate}
        return Figures({**figures.stored, **counts})

    first = replace(
        cell.trials[0], status="errors", errors=(("HTTP 500 boom", failed),), figures=of(cell.trials[0].figures)
    )
    return replace(cell, trials=(first, *cell.trials[1:]), figures=of(cell.figures))


def test_failed_requests_are_told_with_their_reasons_and_a_limit_lets_some_pass(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", trials=(1.0,))
    change_cells(run, lambda cell: failing(cell, 3) if cell.name == "agg-c1" else cell)
    found = judged(run, max_error_rate="10%")
    assert (found.exit_code, found.sentence) == (
        1, "3 of 48 failed: HTTP 500 boom (agg-c1); expected at most 10 % of a cell",
    )  # fmt: skip
    assert found.judgements[0].reason == "3 of 12 failed: HTTP 500 boom; expected at most 10 %"
    assert judged(run, max_error_rate="25%").exit_code == 0


def test_figures_of_a_cell_with_failed_requests_are_not_compared(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    change_cells(run, lambda cell: failing(cell, 3))
    found = judged(run, baseline=str(a_run(tmp_path / "base")), max_regression="5%")
    assert criteria(found)[ITL] is Verdict.FAILED and found.exit_code == 1


def test_a_cell_without_a_result_is_the_load_generators_and_comes_first(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", slower=2)
    lost = "aiperf exited 1 without a result"

    def without(cell: Cell) -> Cell:
        trial = replace(cell.trials[0], status="failed", figures=None, failure=lost)
        return replace(cell, trials=(trial,), figures=None)

    change_cells(run, lambda cell: without(cell) if cell.name == "agg-c2" else failing(cell, 2))
    found = judged(run, baseline=str(a_run(tmp_path / "base")), max_regression="5%")
    assert found.exit_code == 5 and str(found.sentence).startswith(
        f"1 of 4 cells have no result (agg-c2; agg-c2: {lost})"
    )
    assert set(criteria(found, "agg-c2").values()) == {Verdict.FAILED}


def test_a_cell_that_was_not_measured_failed(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "cells" / "disagg-c2" / "cell.json").unlink()
    found = judged(run)
    assert found.exit_code == 1 and "disagg-c2" in str(found.sentence) and "it was not measured" in str(found.sentence)


def test_one_trial_has_no_interval_and_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", trials=(1.0,))
    with pytest.raises(UsageError, match="one trial of agg-c1, which gives no interval; expected at least 2"):
        prepare(run, gated(run, baseline=str(a_run(tmp_path / "base")), max_regression="5%"))


def test_a_limit_below_the_baselines_spread_is_refused_with_the_trials_that_would_do(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    noisy = str(a_run(tmp_path / "base", trials=NOISY))
    with pytest.raises(UsageError, match=r"--max-regression 5% can't be resolved: .* take \d+ trials of 12 requests"):
        prepare(run, gated(run, baseline=noisy, max_regression="5%"))
    assert not (run / BASELINE.file).exists()


def changed(group: str, **values: Any) -> Any:
    return lambda conditions: replace(conditions, **{group: getattr(conditions, group) | values})


@pytest.mark.parametrize(
    ("group", "key", "value", "told"),
    [
        ("model", "name", "other", "model.name was other and is tiny"),
        ("model", "weights", "0123", "model.weights was 0123 and is"),
        ("load", "seed", 8, "load.seed was 8 and is 7"),
        ("machine", "cpu_cores", 64, "machine.cpu_cores was 64 and is"),
        ("machine", "gpus", ["NVIDIA H200"], "machine.gpus was NVIDIA H200 and is none"),
    ],
)
def test_a_baseline_of_other_conditions_is_refused_by_name_unless_that_is_allowed(
    tmp_path: Path, group: str, key: str, value: object, told: str
) -> None:
    run = a_run(tmp_path / "run")
    base = str(a_run(tmp_path / "base", conditions=changed(group, **{key: value})))
    name = f"{group}.{key}"
    with pytest.raises(UsageError) as refused:
        prepare(run, gated(run, baseline=base, max_regression="5%"))
    assert f"--allow-different {name}: {told}" in str(refused.value)
    for allowed in (name, group):
        found = judged(run, baseline=base, max_regression="5%", allow_different=[allowed])
        assert found.exit_code == 0 and found.baseline is not None
        assert any(told in one for one in found.baseline.differences)


def test_another_load_of_a_cell_is_refused_by_name(tmp_path: Path) -> None:
    run, base = a_run(tmp_path / "run"), a_run(tmp_path / "base")
    change_cells(base, lambda cell: replace(cell, load=replace(cell.load, request_count=99)))
    with pytest.raises(UsageError, match=r"--allow-different load.request_count: load.request_count was 99 and is 12$"):
        prepare(run, gated(run, baseline=str(base), max_regression="5%"))


def test_a_topology_or_a_version_may_differ_and_is_told(tmp_path: Path) -> None:
    base = a_run(tmp_path / "base", conditions=changed("versions", torch="1.0"))
    found = judged(a_run(tmp_path / "run"), baseline=str(base), max_regression="5%")
    assert found.exit_code == 0 and found.baseline is not None
    assert [one for one in found.baseline.differences if one.startswith("versions.torch was 1.0")]


def test_what_neither_side_knows_is_told_as_unchecked(tmp_path: Path) -> None:
    unknown = changed("model", weights=None)
    run, base = a_run(tmp_path / "run"), a_run(tmp_path / "base", conditions=unknown)
    with pytest.raises(UsageError, match="model.weights was not known and is"):
        prepare(run, gated(run, baseline=str(base), max_regression="5%"))
    known: Conditions = conditions_of_kept(run)
    assert gate.unchecked(unknown(known), unknown(known)) == ("model.weights",)


def test_a_key_that_is_no_condition_is_refused_with_the_nearest(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    said = {"baseline": str(a_run(tmp_path / "base")), "max_regression": "5%", "allow_different": ["machine.cpus"]}
    with pytest.raises(
        UsageError, match=r"--allow-different 'machine.cpus' is not a condition .*did you mean machine.cpu"
    ):
        prepare(run, gated(run, **said))


def test_a_baseline_without_the_cell_is_refused(tmp_path: Path) -> None:
    run, base = a_run(tmp_path / "run"), a_run(tmp_path / "base")
    (base / "cells" / "agg-c2" / "cell.json").unlink()
    with pytest.raises(UsageError, match="the baseline has no cell agg-c2; expected all cells of this run"):
        prepare(run, gated(run, baseline=str(base), max_regression="5%"))


def test_the_baseline_of_the_start_is_what_a_run_is_judged_by(tmp_path: Path) -> None:
    baselines = Baselines(tmp_path / "baselines")
    baselines.save(a_run(tmp_path / "base"), "main")
    run = a_run(tmp_path / "run", slower=1.3)
    spec = gated(run, baseline="main", max_regression="5%", baseline_dir=str(tmp_path / "baselines"))
    prepare(run, spec)
    baselines.save(run, "main")  # as slow as the run itself
    assert gate.judge(run, spec).verdict is Verdict.REGRESSED


def test_a_run_that_goes_on_has_no_verdict(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    judged(run)
    forget_verdict(run)
    assert VERDICT.find(run, RunVerdict) is None
    forget_verdict(run)


def test_a_run_is_saved_under_the_name_that_it_asked_for(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    directory = str(tmp_path / "kept" / "here")
    spec = gated(run, save_baseline="main", baseline_dir=directory)
    prepare(run, spec)
    gate.judge(run, spec)
    assert gate.saved(run, spec) == Path(directory) / "main.json"
    assert Baselines(Path(directory)).get("main").verdict is Verdict.PASS
    assert gate.saved(run, gated(run)) is None


def test_a_run_that_would_be_saved_over_a_promoted_baseline_is_not_begun(tmp_path: Path) -> None:
    run, baselines = a_run(tmp_path / "run"), Baselines(tmp_path / "baselines")
    judged(run)
    baselines.save(run, "main")
    baselines.promote("main")
    with pytest.raises(UsageError, match="main.json is promoted and would be replaced"):
        prepare(run, gated(run, save_baseline="main", baseline_dir=str(baselines.directory)))


def test_a_run_that_could_not_be_saved_is_not_begun_and_leaves_no_directory(tmp_path: Path) -> None:
    run, file = a_run(tmp_path / "run"), tmp_path / "a file"
    file.write_text("")
    for directory in (file, file / "below"):
        with pytest.raises(
            UsageError, match="no baseline can be saved in .*'.*a file' is not a directory; name another"
        ):
            prepare(run, gated(run, save_baseline="main", baseline_dir=str(directory)))
    prepare(run, gated(run, save_baseline="main", baseline_dir=str(tmp_path / "not" / "yet")))
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"slo": "ttft:p99:le:5"}, "--slo ttft:p99:le:5: no metric is called 'ttft'; did you mean time_to_first_token"),
        ({"slo": "time_to_first_token:p98:le:5"}, "no statistic 'p98'; expected one of avg, p50, p90, p95, p99"),
        ({"slo": ["time_to_first_token:p50:le:5"] * 2}, "--slo time_to_first_token:p50:le:5 is listed twice"),
        ({"window": "steady"}, "--window steady has no effect if no metric is judged; add --slo or"),
        ({"window": "ramp"}, "gate.window is \"ramp\"; expected 'whole' or 'steady'"),
        ({"min_goodput": 1}, "--min-goodput has no effect without the --slo of a latency"),
        ({"min_goodput": 0}, "gate.min_goodput is 0; expected greater than 0"),
        ({"max_error_rate": "5"}, "--max-error-rate 5: expected a percentage"),
        ({"baseline": "main"}, "--baseline has no effect without --max-regression"),
        ({"max_regression": "5%"}, "--max-regression has no effect without --baseline"),
        ({"baseline": "main", "max_regression": "5"}, "--max-regression 5: expected a percentage"),
        ({"metrics": "request_latency:p50"}, "--metrics has no effect without --baseline"),
        ({"baseline": "main", "max_regression": "5%", "metrics": "itl"}, "--metrics itl: no metric is called 'itl'"),
        ({"allow_different": "machine"}, "--allow-different has no effect without --baseline"),
        ({"save_baseline": "../x"}, "'../x' can't be the name of a baseline; use letters"),
        ({"max_regresion": "5%"}, "gate.max_regresion is not a field of a sweep; did you mean max_regression"),
    ],
)
def test_a_gate_that_can_not_be_judged_by_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_sweep(None, {"gate": said})
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_several_in_one_text_are_a_list() -> None:
    said = {"baseline": "main", "max_regression": "5%", "metrics": "request_latency:p50, output_token_throughput"}
    assert [metric.name for metric in load_sweep(None, {"gate": said}).gate.compared] == [
        "request_latency:p50", "output_token_throughput:avg",
    ]  # fmt: skip


def test_trials_that_have_nothing_in_common_still_end_in_a_verdict(tmp_path: Path) -> None:
    """Their interval is wider than floats are."""
    base = a_run(tmp_path / "base")
    run = a_run(tmp_path / "run", trials=(1.0, 1.001))
    spec = gated(run, baseline=str(base), max_regression="5%")
    prepare(run, spec)
    change_cells(run, lambda cell: of_trials(cell, (1.0, 1e9)))
    assert gate.judge(run, spec).exit_code == 3
    assert VERDICT.read(run, RunVerdict).verdict is Verdict.NO_VERDICT
