"""What each of ``trtx build``'s four formats costs, by both measures: eight bits are nearer than four.

``pytest -m proof -s tests/integration/test_four_builds.py`` prints the figures of docs/fidelity.md and docs/eval.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trtx.checkpoint.text import sentences
from trtx.cli.app import run
from trtx.evals.fidelity import TopologyFidelity, read_fidelity, read_reference
from trtx.evals.fidelity.forms import Figure
from trtx.evals.pairs import TopologyValues, paired_differences, read_values

pytestmark = pytest.mark.proof

MODEL = "synthetic:tiny-trained"
EIGHT, FOUR = ("fp8", "int8_sq"), ("int4_awq", "nvfp4")
FORMATS = (*EIGHT, *FOUR)
TEXTS = 1000  # paragraphs that no training saw
TASKS = ("perplexity", "trtx_text")


@dataclass(frozen=True, slots=True)
class Costs:
    fidelity: dict[str, TopologyFidelity]  # by format
    scores: dict[str, TopologyValues]  # by format, and of the model itself


def only(parent: Path) -> Path:
    (found,) = (path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    return found


def scored(model: str, text: Path, runs: Path) -> TopologyValues:
    argv = ["eval", "--tasks", ",".join(TASKS), "--text", str(text), "--model", model, "-o", str(runs)]
    assert run(argv) == 0
    found = read_values(only(runs), "agg")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Costs:
    """Builds all four, and asks each twice: for its fidelity to what it was made from, and for its perplexity."""
    home = tmp_path_factory.mktemp("four-builds")
    text = home / "text.txt"
    text.write_text("\n\n".join(sentences(2000003, TEXTS)))
    fidelity, scores = {}, {"bf16": scored(MODEL, text, home / "scores-bf16")}
    for form in FORMATS:
        gpu = ["--gpu", "B200"] if form == "nvfp4" else []
        assert run(["build", MODEL, "--quant", form, *gpu, "-o", str(home / form)]) == 0
        build, runs = only(home / form), home / f"fidelity-{form}"
        asked = ["--prompts", "192", "--osl", "32"]
        assert run(["eval", "fidelity", "--model", str(build), *asked, "-o", str(runs)]) == 0
        made, found = read_reference(only(runs)), read_fidelity(only(runs), "agg")
        assert made is not None and made[0].model == MODEL and found is not None  # by the build's manifest
        fidelity[form] = found
        scores[form] = scored(str(build), text, home / f"scores-{form}")
    print("", *_told(fidelity), *_differences(scores), sep="\n")
    return Costs(fidelity, scores)


def _told(fidelity: dict[str, TopologyFidelity]) -> Iterator[str]:
    for form, found in fidelity.items():
        for part in found.parts:
            figures = (part.kl, part.agreement, part.perplexity_increase_pct)
            yield f"{form} {part.part}, {part.positions} tokens, seen {part.shared:.4f}: " + ", ".join(
                map(_range, figures)
            )


def _range(figure: Figure) -> str:
    assert figure.interval is not None
    return f"{figure.value:.4g} ({figure.interval.low:.4g} to {figure.interval.high:.4g})"


def _differences(scores: dict[str, TopologyValues]) -> Iterator[str]:
    for form, values in scores.items():
        yield f"{form}: " + ", ".join(f"{task.task} {task.metric} {task.value:.5g}" for task in values.tasks)
    for one, other in [("bf16", form) for form in FORMATS] + [(eight, four) for eight in EIGHT for four in FOUR]:
        for found in paired_differences(scores[other], scores[one]):
            interval = found.interval
            assert interval is not None
            yield (
                f"{other} - {one}, {found.candidate.task}: {interval.estimate:+.4g} ({interval.low:+.4g} to "
                f"{interval.high:+.4g})"
            )


@pytest.mark.parametrize("part", ["text", "prompt"])
def test_eight_bits_diverge_less_than_four_beyond_the_intervals_of_both(costs: Costs, part: str) -> None:
    kl = {form: found.part(part) for form, found in costs.fidelity.items()}  # type: ignore[arg-type]
    for eight in EIGHT:
        for four in FOUR:
            one, other = kl[eight], kl[four]
            assert one is not None and other is not None
            assert one.kl.interval is not None and other.kl.interval is not None
            assert one.kl.interval.high < other.kl.interval.low, (eight, four)
            assert one.agreement.value > other.agreement.value, (eight, four)


@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.parametrize("four", FOUR)
def test_four_bits_cost_more_perplexity_of_the_same_text_than_eight(costs: Costs, eight: str, four: str) -> None:
    """Of pairs of the same paragraphs, beyond the interval of their difference."""
    found = {one.candidate.task: one.interval for one in paired_differences(costs.scores[four], costs.scores[eight])}
    interval = found["perplexity"]
    assert interval is not None and interval.low > 0


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_costs_perplexity(costs: Costs, form: str) -> None:
    found = {one.candidate.task: one.interval for one in paired_differences(costs.scores[form], costs.scores["bf16"])}
    interval = found["perplexity"]
    assert interval is not None and interval.low > 0
