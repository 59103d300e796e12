"""The page in a real browser: it draws every chart, asks the network for nothing, and has no script error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from judged_runs import a_needle_run, a_run, an_ab_run, compared, judged, retrieval
from playwright.sync_api import Browser, Error, Page, sync_playwright

from trtx.bench.records import RECORDS_FILE, RequestRecord, read_trial
from trtx.bench.stage_rows import write_rows
from trtx.report import render
from trtx.report.evaluation import render_evaluation

RUN = Path(__file__).parents[1] / "unit" / "report" / "golden" / "run"
CHARTS = ("pareto", "throughput", "ttft", "itl")
# Nothing but the page itself: Chromium would otherwise look for updates and speak to name servers.
FLAGS = [
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-sandbox",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    installed = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    with sync_playwright() as playwright:
        try:
            running = playwright.chromium.launch(executable_path=installed, args=FLAGS)
        except Error as error:
            pytest.skip(f"no Chromium here: {str(error).splitlines()[0]}")
        yield running
        running.close()


def watched_page(browser: Browser, width: int) -> tuple[Page, list[str], list[str]]:
    """An empty page, what it will complain of, and the URLs that it will request."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    requested: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    return page, complaints, requested


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_draws_its_charts_offline_and_without_errors(browser: Browser, tmp_path: Path, width: int) -> None:
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    render(run)
    page, complaints, requested = watched_page(browser, width)
    page.goto((run / "report.html").as_uri())
    for name in CHARTS:
        page.wait_for_selector(f"#{name} .main-svg .scatterlayer .points path")
        box, panel = page.locator(f"#{name} .main-svg").first.bounding_box(), page.locator(f"#{name}").bounding_box()
        assert box is not None and panel is not None
        assert box["width"] <= panel["width"] + 1, f"{name} is wider than its panel"
        assert box["height"] > 200
    drawn = page.locator("#pareto .scatterlayer .points path").count()
    assert drawn == 4  # one a cell
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("tbody tr:visible").count() == 4
    assert complaints == []
    assert requested == [(run / "report.html").as_uri()]
    page.close()


def with_stages(run: Path) -> Path:
    """Gives each request of a run the times of a worker: 0.15 frontend, 0.2 queue, 0.5 prefill and 0.15 stream of TTFT,
    and 0.9 decode steps of what follows."""

    def row(record: RequestRecord) -> str:
        assert record.time_to_first_token and record.inter_token_latency and record.output_sequence_length
        ttft_s = record.time_to_first_token / 1e3
        rest_s = record.inter_token_latency * (record.output_sequence_length - 1) / 1e3
        values = {
            "id": record.request_id, "worker": "agg-0", "role": "agg", "outcome": "length",
            "arrived_ns": record.start_ns + round(0.1e9 * ttft_s), "submitted_s": 0.05 * ttft_s,
            "queue_s": 0.2 * ttft_s, "prefill_s": 0.5 * ttft_s, "token_s": 0.75 * ttft_s,
            "first_chunk_s": 0.75 * ttft_s, "last_chunk_s": 0.75 * ttft_s + 0.95 * rest_s, "decode_s": 0.9 * rest_s,
        }  # fmt: skip
        return json.dumps(values)

    for path in run.glob(f"cells/*/*/{RECORDS_FILE}"):
        write_rows(path.parent, [row(record) for record in read_trial(path).measured])
    return run


# The bars of a chart: the label of each, and the lengths of its drawn parts in units of the axis, by stage.
BARS = """(name) => {
  const chart = document.getElementById(name), axis = chart._fullLayout.xaxis;
  const pixels = axis._length / (axis.range[1] - axis.range[0]);
  const traces = [...chart.querySelectorAll(".barlayer .trace")];
  return chart.data[0].y.map((label, place) => [label, chart.data.map((stage, index) => [
    stage.name, traces[index].querySelectorAll(".point path")[place].getBBox().width / pixels])]);
}"""
# Of each row of the table of all figures: topology, concurrency, and the median TTFT and ITL as the reader sees them.
MEDIANS = """() => [...document.querySelectorAll("tbody")].map((body) => [...body.querySelectorAll("tr")])
  .sort((one, other) => other.length - one.length)[0].filter((row) => row.checkVisibility()).map((row) => {
    const cells = [...row.querySelectorAll("td, th")].map((cell) => cell.innerText.trim());
    return [`${cells[0]}-${cells[1]}`, cells[8], cells[13]];
  })"""


@pytest.mark.parametrize("width", [1280, 390])
def test_the_parts_of_a_bar_are_as_long_as_the_latency_in_the_table(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    run = with_stages(Path(shutil.copytree(RUN, tmp_path / "run")))
    render(run)
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((run / "report.html").as_uri())
    page.wait_for_selector("#stages-ttft .barlayer .point path")
    page.wait_for_selector("#stages-itl .barlayer .point path")
    medians = {cell: figures for cell, *figures in page.evaluate(MEDIANS)}
    assert set(medians) == {"agg-c1", "agg-c2", "disagg-c1", "disagg-c2"}
    for place, (chart, expected) in enumerate(
        {
            "stages-ttft": {"frontend": 0.15, "queue": 0.2, "prefill": 0.5, "stream": 0.15},
            "stages-itl": {"decode steps": 0.9, "stream": 0.05, "unaccounted": 0.05},
        }.items()
    ):
        bars = {label: dict(parts) for label, parts in page.evaluate(BARS, chart)}
        assert set(bars) == {f"{cell} p{q}" for cell in medians for q in (50, 99)}
        for cell, figures in medians.items():
            parts, median = bars[f"{cell} p50"], float(figures[place].lstrip("~"))
            assert sum(parts.values()) == pytest.approx(median, rel=0.01)
            assert parts == pytest.approx({stage: share * median for stage, share in expected.items()}, rel=0.02)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    page.close()


# Of each label of the Pareto chart, what can be seen: inside the drawing, and where an ancestor clips, inside the axes.
CUT = """() => {
  const chart = document.querySelector("#pareto"), whole = chart.querySelector(".main-svg").getBoundingClientRect();
  const axes = chart.querySelector(".nsewdrag").getBoundingClientRect();
  const labels = [...chart.querySelectorAll(".scatterlayer text")].filter((label) => label.textContent.trim());
  return [labels.length, labels.filter((label) => {
    const box = label.getBoundingClientRect(), room = label.closest("[clip-path]") ? axes : whole;
    return box.left < room.left || box.right > room.right || box.top < room.top || box.bottom > room.bottom;
  }).map((label) => label.textContent.trim())];
}"""


@pytest.mark.proof
@pytest.mark.parametrize("width", [1200, 400])
def test_the_label_of_the_point_that_is_furthest_right_can_be_read(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    for path in run.glob("cells/*-c2/cell.json"):  # which is further up too, so that its label is right of it
        cell = json.loads(path.read_text())
        cell["figures"]["output_token_throughput_per_user"] *= 1.5
        path.write_text(json.dumps(cell))
    render(run)
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((run / "report.html").as_uri())
    page.wait_for_selector("#pareto .scatterlayer .points path")
    shown, cut = page.evaluate(CUT)
    assert (shown, cut) == (4, [])
    page.close()


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_shows_what_did_not_pass_and_unfolds_what_did(browser: Browser, tmp_path: Path, width: int) -> None:
    run = a_run(tmp_path / "run", slower=1.3)
    judged(run, baseline=str(a_run(tmp_path / "base")), max_regression="5%", slo=["request_latency:p50:le:5000"])
    render(run)
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((run / "report.html").as_uri())
    section = page.locator("section[aria-label=Verdict]")
    assert section.get_by_text("regressed", exact=True).first.is_visible()
    passed = section.get_by_text("request_latency:p50:le:5000").first
    assert not passed.is_visible()
    section.locator("summary").click()
    assert passed.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    page.close()


@pytest.mark.proof
@pytest.mark.parametrize("width", [1400, 700, 390])
def test_an_ab_run_has_a_forest_plot_and_its_rounds_unfold(browser: Browser, tmp_path: Path, width: int) -> None:
    run = an_ab_run(tmp_path / "run", 1.1)
    compared(run, baseline="agg", max_regression="5%")
    render(run)
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((run / "report.html").as_uri())
    forest = page.locator("#forest-0")
    page.wait_for_selector("#forest-0 .scatterlayer .points path")
    assert forest.locator(".scatterlayer .points path").count() == 6 * (3 + 1)  # rounds and ratios
    assert forest.locator(".errorbar").count() == 6
    assert "c2 ITL p50" in forest.locator(".ytick").all_text_contents()
    box, panel = forest.locator(".main-svg").first.bounding_box(), forest.bounding_box()
    assert box is not None and panel is not None and box["width"] <= panel["width"] + 1
    limits = [one.bounding_box() for one in forest.locator(".shapelayer path").all()]
    assert sum(box is not None and box["width"] > 0 for box in limits) >= 6, "what lies beyond each limit is shaded"
    section = page.get_by_role("region", name="A/B: disagg against agg")
    first = section.locator("table.rounds td").nth(4)
    assert not first.is_visible()
    section.get_by_text("Round by round").click()
    assert first.is_visible() and first.inner_text() == "0.909"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    page.close()


@pytest.mark.proof
def test_a_reader_chooses_the_part_the_lengths_and_the_topologies(browser: Browser, tmp_path: Path) -> None:
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    for path in run.glob("cells/*-c2/cell.json"):  # each topology with a cell of two pairs of lengths
        document = json.loads(path.read_text())
        load = document["load"] | {"isl": 256, "label": "c2-i256-o16"}
        path.write_text(json.dumps(document | {"load": load, "steady": None}))
    render(run)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((run / "report.html").as_uri())
    points = page.locator("#throughput .scatterlayer .points path")
    page.wait_for_selector("#throughput .scatterlayer .points path")

    first = page.locator("tbody tr:visible").first
    assert "12" in first.inner_text().split()
    page.get_by_text("Steady part", exact=True).click()
    assert "10" in first.inner_text().split()  # requests sent in it

    shown = page.locator("[data-of-lengths]:visible h2")
    assert shown.all_inner_texts() == ["agg 64/16", "disagg 64/16"]
    page.get_by_role("button", name="256 / 16").click()
    assert shown.all_inner_texts() == ["agg 256/16", "disagg 256/16"]
    assert page.locator("#throughput .xtick").all_text_contents() == ["2"]

    assert points.count() == 2
    page.get_by_role("button", name="disagg").click()
    assert points.count() == 1
    page.get_by_role("button", name="disagg").click()
    assert points.count() == 2
    assert complaints == []
    page.close()


@pytest.mark.proof
@pytest.mark.parametrize("width", [1280, 390])
def test_what_needle_found_is_drawn_with_a_dash_where_nobody_answered(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    found = tuple(
        retrieval(length, depth, 10 - place, 10) if (length, depth) != (2048, 50) else retrieval(length, depth, 0, 0)
        for place, length in enumerate((512, 1024, 2048, 4096))
        for depth in (0, 50, 100)
    )
    run = a_needle_run(tmp_path / "run", found)
    render_evaluation(run)
    page, complaints, requested = watched_page(browser, width)
    page.goto((run / "report.html").as_uri())
    chart = page.locator("#retrieval-agg-needle")
    page.wait_for_selector("#retrieval-agg-needle .heatmaplayer image")
    labels = chart.locator(".heatmap-label text").all_text_contents()
    assert len(labels) == len(found) and labels.count("–") == 1 and "0.70(0.40–0.89)" in labels
    box = chart.locator(".main-svg").first.bounding_box()
    assert box is not None and box["width"] > 170 + 4 * 70 and box["height"] > 150
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    assert [url for url in requested if not url.startswith(("data:", "blob:"))] == [(run / "report.html").as_uri()]
    page.close()
