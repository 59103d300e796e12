"""``trtx eval parity --url``: servers that are running already, held against one another, or against one of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from called import only
from openai_server import openai_server
from parity_proxy import proxy
from topology_clients import trtx_serve

from trtx.cli.app import run
from trtx.evals.parity import read_answers, read_parity

pytestmark = pytest.mark.proof  # a server of its own; test_bench_attach.py and test_parity.py have the halves

MODEL = "synthetic:tiny"
SMALL = ("--prompts", "12", "--isl", "48", "--osl", "4")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with trtx_serve("--model", MODEL) as serve:
        yield serve.wait_ready().url


def parity(parent: Path, *argv: str) -> int:
    return run(["eval", "parity", *SMALL, *argv, "-o", str(parent)])


def judgements(run_dir: Path) -> dict[tuple[str, str], str]:
    document = json.loads((run_dir / "verdict.json").read_text())
    return {(one["cell"], one["criterion"].partition(":le:")[0]): one["verdict"] for one in document["judgements"]}


def test_a_server_of_another_make_is_compared_by_what_it_gives_and_no_more_is_claimed(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with proxy(url) as other:
        assert parity(tmp_path, "--url", other.url, "--against", url, "--dtype", "float32", "--json") == 0
    told: dict[str, Any] = json.loads(capfd.readouterr().out)
    run_dir = only(tmp_path)
    assert [one["name"] for one in told["routes"]] == ["against again", "url"]
    assert told["conditions"]["url"].endswith("an unknown server")
    assert "NVIDIA Dynamo 1." in told["conditions"]["against"]
    assert {key for key in judgements(run_dir) if key[0] == "url"} == {
        ("url", "unanswered:count"), ("url", "unexplained_divergences:count"),
        ("url", "logprob_distance:max"), ("url", "logprob_distance:mean"),
    }, "that a route happened is claimed of nobody"  # fmt: skip
    assert set(judgements(run_dir).values()) == {"pass"}
    assert any("it returns no log-probabilities of prompts" in note for note in told["notes"])
    report = (run_dir / "report.html").read_text()
    assert "handoffs, migrations, prompts in several steps: not checked" in report
    found = read_parity(run_dir)
    assert found is not None and found.routes[0].compared.identical == 12
    assert found.routes[0].compared.prompt_positions == 0
    assert found.reference is not None and found.reference.compared.prompt_positions > 0
    assert not any(set(body) & {"nvext", "prompt_logprobs"} for body in other.asked)
    assert len(read_answers(run_dir, "against")) == 12


def test_one_that_answers_otherwise_fails_and_where_rounding_might_explain_it_there_is_no_verdict(
    url: str, tmp_path: Path
) -> None:
    with proxy(url, shifts=0.04) as other:
        assert parity(tmp_path / "unsaid", "--url", other.url, "--against", url) == 3
        assert judgements(only(tmp_path / "unsaid"))["url", "logprob_distance:max"] == "no verdict"
        assert parity(tmp_path / "said", "--url", other.url, "--against", url, "--dtype", "float32") == 1
        assert judgements(only(tmp_path / "said"))["url", "logprob_distance:max"] == "missed"


def test_an_answer_that_names_another_model_is_told_and_of_several_models_there_is_no_verdict(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with proxy(url, names=("an-alias",)) as other:
        assert parity(tmp_path / "alias", "--url", other.url, "--against", url, "--dtype", "float32", "--json") == 0
        told: dict[str, Any] = json.loads(capfd.readouterr().out)
        assert "url: answers name model 'an-alias', but 'tiny' was requested" in told["notes"]
    with proxy(url, names=("one", "other")) as other:
        assert parity(tmp_path / "several", "--url", url, "--against", other.url, "--dtype", "float32") == 3
        assert judgements(only(tmp_path / "several"))["against", "named_models"] == "no verdict"
        assert "answers name several models, 'o" in capfd.readouterr().err


def test_a_server_that_is_gone_in_the_middle_is_told_and_resumed_once_it_is_back(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with proxy(url) as other:
        # Probing takes one; then the reference's passes are asked, twice 15 requests.
        other.lasts = 20
        # Of few requests and without a dtype two equal servers may differ more than the yardstick has seen.
        assert parity(tmp_path, "--url", url, "--against", other.url, "--dtype", "float32") == 3
        said = capfd.readouterr().err
        run_dir = only(tmp_path)
        assert f"{other.url} no longer answers (" in said
        assert f"resume it with: trtx eval parity --resume {run_dir}" in said
        kept = (run_dir / "eval" / "against" / "answers.jsonl").read_bytes()
        assert not (run_dir / "eval" / "against-again").exists() and not (run_dir / "verdict.json").exists()
        assert run(["eval", "parity", "--resume", str(run_dir)]) == 2
        assert "did not answer as OpenAI's API does" in capfd.readouterr().err
        other.lasts = None
        asked = len(other.asked)
        assert run(["eval", "parity", "--resume", str(run_dir)]) == 0
        assert 12 <= len(other.asked) - asked <= 15, "one pass of it was missing; who leaves at once may not have asked"
        assert (run_dir / "eval" / "against" / "answers.jsonl").read_bytes() == kept
        assert "ended early" not in (run_dir / "summary.md").read_text()


def test_a_server_is_held_against_a_model_that_is_served_for_it(url: str, tmp_path: Path) -> None:
    assert parity(tmp_path, "--url", url, "--against", MODEL, "--dtype", "float32") == 0
    run_dir = only(tmp_path)
    assert (run_dir / "against" / "serve" / "logs").is_dir()
    found = read_parity(run_dir)
    assert found is not None and found.tolerance is not None and found.tolerance.dtype == "float32"
    assert found.routes[0].compared.identical == 12 and found.routes[0].compared.prompt_positions > 0


def test_what_can_not_be_compared_is_one_sentence_and_leaves_nothing(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with openai_server() as other:
        tokenizer = ("--tokenizer", "synthetic:tiny-trained")
        assert parity(tmp_path, "--url", other.url, "--against", url, *tokenizer) == 2
        said = capfd.readouterr().err
        assert f"tiny-trained at {other.url} can't be compared (" in said and said.count("trtx: ") == 1
        assert "return_tokens_as_token_ids" in said
    assert parity(tmp_path, "--url", url, "--against", f"{url}/v1") == 2
    assert "name the same model of the same server" in capfd.readouterr().err
    assert parity(tmp_path, "--url", url, "--against", "http://127.0.0.1:9") == 2
    assert "http://127.0.0.1:9/v1/models did not answer" in capfd.readouterr().err
    assert parity(tmp_path, "--url", url, "--against", "http://user:secret@127.0.0.1:9") == 2
    said = capfd.readouterr().err
    assert said.startswith("trtx: --against has a user name or password") and "secret" not in said
    assert parity(tmp_path, "--url", url, "--against", "no/such-model") == 2
    assert "no/such-model" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
