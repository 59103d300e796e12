"""What each of ``trtx build``'s four formats costs, by both measures: eight bits are nearer than four.

``pytest -m proof -s tests/integration/test_four_builds.py`` prints the figures of docs/fidelity.md and docs/eval.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trtx.checkpoint.text import sentences
from trtx.cli.app import run
from trtx.evals import statistics
from trtx.evals.fidelity import TopologyFidelity, read_fidelity
from trtx.evals.fidelity.forms import MeanOverPositions
from trtx.evals.fidelity.reference import read_reference
from trtx.evals.pairs import TopologyValues, paired_differences, read_values
from trtx.stats.intervals import Interval

pytestmark = pytest.mark.proof

MODEL = "synthetic:tiny-trained"
EIGHT, FOUR = ("fp8", "int8_sq"), ("int4_awq", "nvfp4")
FORMATS = (*EIGHT, *FOUR)
DOCUMENTS, PARAGRAPHS = 100, 10  # of each; no training saw any


@dataclass(frozen=True, slots=True)
class Costs:
    fidelity: dict[str, TopologyFidelity]  # by format
    scores: dict[str, TopologyValues]  # by format, and of the model itself


def only(parent: Path) -> Path:
    (found,) = (path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    return found


def scored(model: str, text: Path, runs: Path) -> TopologyValues:
    assert run(["eval", "--tasks", "perplexity", "--text", str(text), "--model", model, "-o", str(runs)]) == 0
    found = read_values(only(runs), "agg")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Costs:
    """Builds all four, and asks each twice: for its fidelity to what it was made from, and for its perplexity."""
    home = tmp_path_factory.mktemp("four-builds")
    text, drawn = home / "text.jsonl", list(sentences(2000003, DOCUMENTS * PARAGRAPHS))
    documents = (" ".join(drawn[at : at + PARAGRAPHS]) for at in range(0, len(drawn), PARAGRAPHS))
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
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
    costs = Costs(fidelity, scores)
    print("", *_of_fidelity(costs), *_of_perplexity(costs), sep="\n")
    return costs


def change(costs: Costs, form: str) -> Interval:
    """By how much a document's log-likelihood is another than the model's own, up or down: nats a token."""
    (before,), (now,) = costs.scores["bf16"].tasks, costs.scores[form].tasks
    changes = []
    for key, (logprob, tokens) in before.samples.items():  # type: ignore[misc]
        changes.append(abs(now.samples[key][0] - logprob) / tokens)  # type: ignore[index]
    found = statistics.score_interval(changes)
    assert isinstance(found, Interval)
    return found


def _of_fidelity(costs: Costs) -> Iterator[str]:
    for form, found in costs.fidelity.items():
        for part in found.parts:
            figures = ", ".join(_range(one) for one in (part.kl, part.agreement, part.perplexity_increase_pct))
            yield f"{form} {part.part}, {part.positions} tokens, seen {part.shared:.4f}: {figures}"


def _of_perplexity(costs: Costs) -> Iterator[str]:
    yield f"bf16: {costs.scores['bf16'].tasks[0].value:.5g}"
    for form in FORMATS:
        (found,) = paired_differences(costs.scores[form], costs.scores["bf16"])
        told = _range(MeanOverPositions(found.candidate.value - costs.scores["bf16"].tasks[0].value, found.interval))
        of_each = change(costs, form)
        documents = _range(MeanOverPositions(of_each.estimate, of_each))
        yield f"{form}: {found.candidate.value:.5g}, {told}; of a document {documents}"


def _range(figure: MeanOverPositions) -> str:
    assert figure.interval is not None
    return f"{figure.value:.4g} ({figure.interval.low:.4g} to {figure.interval.high:.4g})"


@pytest.mark.parametrize("four", FOUR)
@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.parametrize("part", ["text", "prompt"])
def test_eight_bits_diverge_less_than_four_beyond_the_intervals_of_both(
    costs: Costs, part: str, eight: str, four: str
) -> None:
    one, other = (costs.fidelity[form].part(part) for form in (eight, four))  # type: ignore[arg-type]
    assert one is not None and other is not None
    assert one.kl.interval is not None and other.kl.interval is not None
    assert one.kl.interval.high < other.kl.interval.low
    assert one.agreement.value > other.agreement.value


@pytest.mark.parametrize("four", FOUR)
@pytest.mark.parametrize("eight", EIGHT)
def test_a_documents_likelihood_stays_nearer_in_eight_bits_than_in_four_beyond_the_intervals_of_both(
    costs: Costs, eight: str, four: str
) -> None:
    """Perplexity itself is no distance: what is lost in one document may be won in another."""
    assert change(costs, eight).high < change(costs, four).low
