"""``trtx eval fidelity`` end to end: real frontend, workers and reference, a quantized build, and another server."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from called import only
from openai_server import openai_server
from parity_proxy import proxy
from topology_clients import trtx_serve

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.held_out import held_out_passages
from trtx.cli.app import run
from trtx.evals.fidelity import TopologyFidelity, fidelity_directory, read_fidelity
from trtx.evals.fidelity.divergence import compare
from trtx.evals.fidelity.forms import COMPARED, FIDELITY, PartFigures, read_compared
from trtx.evals.fidelity.reference import read_reference
from trtx.runs.forms import VERDICT, RunVerdict
from trtx.text import load_tokenizer
from trtx.torch_engine.llmapi import OfflineEngine

MODEL = "synthetic:tiny-trained"
PROMPTS, OSL = 12, 8


def asked(*more: str, model: str = MODEL, prompts: int | Path = PROMPTS, osl: int = OSL) -> list[str]:
    return ["eval", "fidelity", "--model", model, "--prompts", str(prompts), "--osl", str(osl), *more]


def compared(run_dir: Path, topology: str = "agg") -> TopologyFidelity:
    found = read_fidelity(run_dir, topology)
    assert found is not None
    return found


def text_of(found: TopologyFidelity) -> PartFigures:
    part = found.part("text")
    assert part is not None
    return part


def test_a_model_is_what_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Served, it is the reference: every document, the table, the verdict, and what is kept of each position."""
    assert run(asked("--max-kl", "0.5", "--min-agreement", "0.7", "--json", "-o", str(tmp_path))) == 0
    run_dir = only(tmp_path)
    said = capfd.readouterr()
    told = json.loads(said.out)
    assert told["verdict"]["verdict"] == "pass" and len(told["verdict"]["judgements"]) == 3
    assert max(map(len, said.err.splitlines()[said.err.splitlines().index("") :])) <= max(80, len(str(run_dir)) + 30)
    found, made = compared(run_dir), read_reference(run_dir)
    assert made is not None and (found.route, found.top) == ("engine_data", 20)
    facts, sequences = made
    assert facts.sequences == found.sequences == found.answered == PROMPTS
    text = text_of(found)
    assert text.kl.value < 1e-6 and text.agreement.value == 1
    assert text.kl.interval is not None and 1e-3 < text.kl.interval.high < 0.5  # 12 prompts do not say more of others
    assert text.agreement.interval is not None and text.agreement.interval.low < 0.8
    assert text.served_perplexity == pytest.approx(text.reference_perplexity, rel=1e-5)
    assert text.positions == sum(len(one.tokens) - one.prompt_length for one in sequences)
    # Greedy text is what the reference itself finds likeliest at each of its positions.
    for one in sequences:
        for token, row in list(zip(one.tokens[1:], one.rows(20), strict=True))[one.prompt_length - 1 :]:
            assert row[token] == max(row.values()) and len(row) == 20
    lines = read_compared(fidelity_directory(run_dir, "agg"))
    assert [one.index for one in lines] == list(range(PROMPTS))
    assert all(len(one.kl) == len(sequences[one.index].tokens) - 1 for one in lines)
    for name, words in (("summary.md", "KL, nats a token"), ("report.html", "Against the reference")):
        assert words in (run_dir / name).read_text()
    assert run(["report", str(run_dir), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["fidelity"] == told["fidelity"]


@pytest.mark.proof
def test_disaggregated_too_and_a_run_goes_on_with_what_it_lacks(tmp_path: Path) -> None:
    assert run(asked("--mode", "agg,disagg", "-o", str(tmp_path))) == 0
    run_dir = only(tmp_path)
    for topology in ("agg", "disagg"):
        assert text_of(compared(run_dir, topology)).kl.value < 1e-6
    home = fidelity_directory(run_dir, "disagg")
    (home / FIDELITY.file).unlink()
    kept = (home / COMPARED.file).read_text().splitlines(keepends=True)
    # As kill -9 leaves it: a line cut short, and a journal without the end of the run.
    (home / COMPARED.file).write_text("".join(kept[:5]) + kept[5][:40])
    events = (run_dir / "journal.jsonl").read_text().splitlines(keepends=True)
    assert json.loads(events[-1])["event"] == "run_ended"
    (run_dir / "journal.jsonl").write_text("".join(events[:-1]))
    before = (run_dir / "fidelity" / "reference.jsonl").stat().st_mtime_ns
    assert run(["eval", "fidelity", "--resume", str(run_dir)]) == 0
    assert (run_dir / "fidelity" / "reference.jsonl").stat().st_mtime_ns == before
    assert "".join(kept) == (home / COMPARED.file).read_text()
    assert VERDICT.read(run_dir, RunVerdict).exit_code == 0


@pytest.mark.proof
def test_of_two_real_engines_it_is_never_more_than_the_whole_divergence_and_most_of_it() -> None:
    """Both are asked for the whole vocabulary: a float8 KV cache against none."""
    path = resolve_checkpoint(MODEL).path
    size = int(json.loads((path / "config.json").read_text())["vocab_size"])
    tokenizer = load_tokenizer(path)
    texts = [tokenizer.encode(text).ids[:40] for text in held_out_passages(12)]
    whole: list[list[list[dict[int, float]]]] = []
    for kv_dtype in ("auto", "fp8"):
        with OfflineEngine(path, purpose="is asked for all", kv_dtype=kv_dtype) as engine:
            whole.append(list(engine.prompt_logprobs(texts, size)))

    def likeliest(row: dict[int, float], own: int) -> dict[int, float]:
        return {token: row[token] for token in (own, *sorted(row, key=row.__getitem__, reverse=True)[:20])}

    shown, exact = [], []
    for ids, before, after in zip(texts, *whole, strict=True):
        for own, p, q in zip(ids[1:], before, after, strict=True):
            assert len(p) == len(q) == size
            shown.append(compare(likeliest(p, own), likeliest(q, own), 20).kl)
            exact.append(math.fsum(math.exp(p[token]) * (p[token] - q[token]) for token in p))
    assert all(one <= other + 1e-5 for one, other in zip(shown, exact, strict=True))
    assert math.fsum(exact) > 1e-5 * len(exact) and 0.5 < math.fsum(shown) / math.fsum(exact) <= 1


@pytest.mark.proof
def test_a_person_s_own_text_and_an_engine_flag_that_costs_something(tmp_path: Path) -> None:
    """A float8 KV cache is an engine's flag: the checkpoint stays its own reference."""
    file = tmp_path / "mine.jsonl"
    words = ("red", "old", "big", "new", "far", "tall", "dark", "long", "warm", "cold")
    rows = [{"text": f"The {word} house"} for word in words]
    file.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"messages": [{"role": "user", "content": "?"}]}])
    )
    runs = tmp_path / "runs"
    argv = asked("--set", "kv_cache_config.dtype=fp8", "--max-kl", "0.0000001", "-o", str(runs), prompts=file, osl=24)
    assert run(argv) == 1
    found = compared(only(runs))
    assert found.sequences == 11 and text_of(found).kl.value > 1e-5
    assert text_of(found).part == "text" and VERDICT.read(only(runs), RunVerdict).verdict.value == "missed"


@pytest.mark.proof
def test_a_server_without_log_probabilities_of_prompts_is_told_in_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with openai_server() as server:
        argv = ["eval", "fidelity", "--url", server.url, "--reference", MODEL, "--prompts", "12", "--osl", "4"]
        assert run([*argv, "--tokenizer", MODEL, "--max-kl", "1", "-o", str(tmp_path)]) == 3
    said = capfd.readouterr().err
    assert "the server gives no log-probabilities of prompts (asked with engine_data: HTTP 400" in said
    assert VERDICT.read(only(tmp_path), RunVerdict).verdict.value == "no verdict"
    assert not compared(only(tmp_path), "attached").parts


@pytest.mark.proof
def test_what_trtx_serves_already_is_compared_by_its_url_and_whose_answers_name_several_models_has_no_verdict(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", "fidelity", "--reference", MODEL, "--tokenizer", MODEL, "--prompts", "12", "--osl", "4"]
    with trtx_serve("--model", MODEL, "--engine", "torch") as serve:
        plan = serve.wait_ready()
        assert run([*argv, "--url", plan.url, "-o", str(tmp_path / "own")]) == 0
        with proxy(plan.url, names=("an-alias",), refuses=()) as other:
            assert run([*argv, "--url", other.url, "-o", str(tmp_path / "alias")]) == 0
        with proxy(plan.url, names=("one", "other"), refuses=()) as other:
            capfd.readouterr()
            assert run([*argv, "--url", other.url, "-o", str(tmp_path / "several")]) == 3
    assert "answers name several models, 'o" in capfd.readouterr().err
    own, alias = (compared(only(tmp_path / name), "attached") for name in ("own", "alias"))
    assert text_of(own).kl.value < 1e-6 and own.others is None
    told = "attached: answers name model 'an-alias', but 'tiny-trained' was requested"
    assert alias.others is not None and told in (only(tmp_path / "alias") / "summary.md").read_text()


def refused(argv: list[str], parent: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """One sentence, and nothing is left."""
    assert run([*argv, "-o", str(parent / "runs")]) == 2
    said = capfd.readouterr().err
    assert said.startswith("trtx: ") and said.count("\n") == 1
    assert not list((parent / "runs").glob("*"))
    return said


def test_another_vocabulary_is_refused_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = refused(asked("--reference", "synthetic:tiny"), tmp_path, capfd)
    assert "the tokenizers of the reference" in said and "name the reference with --reference" in said


def test_a_build_whose_source_is_gone_or_changed_asks_for_a_reference(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from trtx.build.manifest import Manifest

    build = tmp_path / "build"
    shutil.copytree(resolve_checkpoint(MODEL).path, build)
    sources = {"./no/such": "is not found", MODEL: "has different weights now"}
    for name, words in sources.items():
        Manifest(
            schema_version=1, name="b", key="k", created="2026-11-22", inputs={"weights_sha256": "0" * 64},
            source={"name": name, "revision": None}, built_on="CPU", built_for="CPU",
            weight_bytes={"source": 1, "result": 1}, seconds={}, proof=None,
        ).write(build)  # fmt: skip
        said = refused(asked(model=str(build)), tmp_path, capfd)
        assert words in said and "--reference" in said


def test_bad_prompts_and_bounds_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "one"}\n{"other": 1}\n')
    assert "line 2 has the fields other" in refused(asked(prompts=file), tmp_path, capfd)
    assert "--min-agreement is 1.5" in refused(asked("--min-agreement", "1.5"), tmp_path, capfd)
    assert "--max-kl" in refused(asked("--max-kl", "nan"), tmp_path, capfd)
    assert "--prompts is 0" in refused(asked(prompts=0), tmp_path, capfd)
    assert "computes no probabilities" in refused(asked("--engine", "paced"), tmp_path, capfd)
    assert "--reference is needed" in refused(["eval", "fidelity", "--url", "http://127.0.0.1:9"], tmp_path, capfd)
