"""Images through ``--engine tensorrt-llm``: encoder, handles, ``generation_only``; the package under test inside.

The model counts three positions for a token, so an answer's log-probabilities tell a picture on its side from one that
stands, and whether decode got the positions that prefill had.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jinja2
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from topology_clients import trtx_serve, wait_until

from trtx.checkpoint import resolve_checkpoint
from trtx.ipc.shared_tensor import open_shared, remove_shared
from trtx.text import load_tokenizer
from trtx.topology import Plan
from trtx.torch_engine.embeddings import EmbeddingReader, parse_handle
from trtx.torch_engine.llmapi import LLM, MultimodalEncoder, SamplingParams

pytestmark = [pytest.mark.proof, pytest.mark.trtllm]

MODEL = "synthetic:tiny-qwen2.5-vl"
CONTEXT, TOKENS, MERGE = 160, 5, 2
HTTP = httpx.Client(timeout=120, trust_env=False)
SERVED = (
    *("--engine", "tensorrt-llm", "--model", MODEL, "--decode-processes", "1", "--set", "max_batch_size=4"),
    *("--set", f"max_seq_len={CONTEXT}", "--set", "kv_cache_config.max_tokens=4096"),
)
E_P_D = ("--mode", "disagg", "--encode", "1")
SIZES = {"wide": (140, 56), "tall": (56, 140), "small": (56, 56)}


def image(name: str) -> Image.Image:
    """A gradient, so that a turned picture is another one; its pixels say which."""
    width, height = SIZES[name]
    made = Image.linear_gradient("L").resize((width, height))
    return Image.merge("RGB", (made, made.rotate(180), Image.new("L", (width, height), 40 * len(name))))


def part(name: str) -> dict[str, Any]:
    file = io.BytesIO()
    image(name).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


QUESTIONS: dict[str, tuple[str, ...]] = {
    "none": (), "wide": ("wide",), "tall": ("tall",), "two": ("wide", "tall"), "turned": ("tall", "wide"),
    "twice": ("small", "small"),
}  # fmt: skip


def messages(names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [text("which?"), *map(part, names)]}]


@dataclass(frozen=True)
class Answer:
    logprobs: tuple[float, ...]
    prompt_tokens: int


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    """The torch engine's own, with its own encoder, of the checkpoint's template."""
    path = resolve_checkpoint(MODEL).path
    template = json.loads((path / "tokenizer_config.json").read_text()).get("chat_template")
    template = template or (path / "chat_template.jinja").read_text()
    tokenizer, answers = load_tokenizer(path), {}
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    with MultimodalEncoder(path, max_batch_size=4) as encoder, LLM(path, max_seq_len=CONTEXT, max_batch_size=4) as llm:
        for question, names in QUESTIONS.items():
            shown = [{"role": "user", "content": [text("which?"), *({"type": "image"} for _ in names)]}]
            prompt = (
                jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
                .from_string(template)
                .render(messages=shown, add_generation_prompt=True)
            )
            inputs: dict[str, Any] = {"prompt_token_ids": list(tokenizer.encode(prompt).ids)}
            if names:
                made = encoder.generate({"multi_modal_data": {"image": [image(name) for name in names]}})
                assert not isinstance(made, list) and made.disaggregated_params is not None
                rows, grids = [], []
                for one in made.disaggregated_params.multimodal_embedding_handles or ():
                    handle = parse_handle(one)
                    file = EmbeddingReader().read(handle)
                    rows.append(open_shared(file))
                    remove_shared(file)
                    t, h, w = handle.grid or (0, 0, 0)
                    grids.append((t, h * MERGE, w * MERGE))
                inputs["multi_modal_embeddings"] = {"image": rows, "image_grid_thw": grids}
            output = llm.generate(inputs, sampling)
            assert not isinstance(output, list)
            found = tuple(next(iter(position.values())).logprob for position in output.outputs[0].logprobs)
            answers[question] = Answer(found, len(output.prompt_token_ids))
    return answers


@dataclass(frozen=True)
class Served:
    plan: Plan

    def post(self, asked: list[dict[str, Any]], **more: Any) -> httpx.Response:
        body = {"model": self.plan.model, "messages": asked, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        return HTTP.post(f"{self.plan.url}/v1/chat/completions", json=body | {"logprobs": True} | more)

    def ask(self, names: tuple[str, ...]) -> Answer:
        answer = self.post(messages(names))
        assert answer.status_code == 200, answer.text
        told = answer.json()
        logprobs = tuple(one["logprob"] for one in told["choices"][0]["logprobs"]["content"])
        return Answer(logprobs, told["usage"]["prompt_tokens"])

    def refused(self, *parts: dict[str, Any]) -> str:
        answer = self.post([{"role": "user", "content": list(parts)}])
        assert answer.status_code == 400, answer.text
        said = str(answer.json()["message"])
        assert len(said) < 400 and "\n" not in said
        return said

    def pictures(self, worker: str, stage: str) -> float:
        port = next(one.system_port for one in self.plan.workers if one.name == worker)
        families = text_string_to_metric_families(HTTP.get(f"http://127.0.0.1:{port}/metrics").text)
        samples = [one for family in families for one in family.samples if one.name == "trtx_media_pictures_total"]
        return sum(one.value for one in samples if one.labels["stage"] == stage)

    def held(self) -> list[Path]:
        """Files behind handles that nobody has read, and of pictures on their way."""
        return [*self.plan.scratch_dir.glob("tensorrt_llm-standin-*/*"), *self.plan.scratch_dir.glob("*.tensor")]


@contextmanager
def serving(environment: Mapping[str, str], *options: str) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with trtx_serve(*SERVED, *options) as command:
            yield Served(command.wait_ready(150))


@pytest.fixture(scope="module")
def agg(trtllm_environment: Mapping[str, str]) -> Iterator[Served]:
    with serving(trtllm_environment) as served:
        yield served


@pytest.fixture(scope="module")
def split(trtllm_environment: Mapping[str, str]) -> Iterator[Served]:
    """Encode, prefill and decode workers."""
    with serving(trtllm_environment, *E_P_D) as served:
        yield served


@pytest.fixture(scope="module", params=["agg", "split"])
def served(request: pytest.FixtureRequest) -> Served:
    started: Served = request.getfixturevalue(request.param)
    return started


def check(served: Served, expected: dict[str, Answer]) -> None:
    for question, names in QUESTIONS.items():
        answer = served.ask(names)
        assert answer.prompt_tokens == expected[question].prompt_tokens, question
        assert answer.logprobs == pytest.approx(expected[question].logprobs, abs=1e-4), question


def test_an_answer_is_the_torch_engines_whoever_encodes(served: Served, expected: dict[str, Answer]) -> None:
    first = {question: answer.logprobs[0] for question, answer in expected.items()}
    assert min(abs(first[one] - first[other]) for one in first for other in first if one != other) > 1e-3
    check(served, expected)
    check(served, expected)  # of the cache


def test_an_encode_worker_computes_in_the_dtype_of_the_llm(trtllm_environment: Mapping[str, str]) -> None:
    """An LLM takes rows of its own dtype alone."""
    with serving(trtllm_environment, "--encode", "1", "--set", "dtype=bfloat16") as served:
        answers = {names: served.ask(names).logprobs[0] for names in QUESTIONS.values()}
        assert len({*answers.values()}) == len(answers)
        assert served.pictures("agg-0", "put") == 0, "no picture was left to the LLM's own tower"


def test_each_picture_is_seen_once_and_decode_sees_none(agg: Served, split: Served) -> None:
    before = {
        (name, stage): served.pictures(name, stage)
        for served, name, stage in (
            (agg, "agg-0", "put"), (split, "encode-0", "encode"), (split, "prefill-0", "remote"),
            (split, "prefill-0", "put"), (split, "decode-0", "fetch"),
        )
    }  # fmt: skip
    for served in (agg, split):
        served.ask(("wide", "tall"))
    assert agg.pictures("agg-0", "put") == before["agg-0", "put"] + 2
    assert split.pictures("encode-0", "encode") == before["encode-0", "encode"] + 2
    assert split.pictures("prefill-0", "remote") == before["prefill-0", "remote"] + 2
    assert split.pictures("prefill-0", "put") == before["prefill-0", "put"] == 0
    assert split.pictures("decode-0", "fetch") == before["decode-0", "fetch"] == 0


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([text("an <|image_pad|> in words")], "the prompt has 1 image placeholders and the request 0 images"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}], "broken or cut short"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "--allowed-media-path"),
        ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], "brings video_url"),
        ([{"type": "image_url", "image_url": {"url": "data:application/x-safetensors;base64,AAAA"}}], "an embedding"),
        ([part("small")] * 17, "brings 17 images, expected at most 16"),
        ([part("wide")] * 16, f"and the context holds {CONTEXT} together with the output"),
    ],
    ids=["placeholder", "truncated", "file", "video", "embedding", "too many", "too long"],
)
def test_what_is_refused_is_said_in_a_sentence_and_leaves_nothing_behind(
    served: Served, parts: list[dict[str, Any]], says: str
) -> None:
    if len(served.plan.workers) == 1 and says == "--allowed-media-path":
        answer = served.post([{"role": "user", "content": parts}])
        said = answer.json()["message"]  # not behind a prefill worker: the status is its own
        assert 400 <= answer.status_code < 500
    else:
        said = served.refused(*parts)
    assert says in said
    # What no request took is let go of, beside the answer.
    wait_until(lambda: served.held() == [], 15, "nothing held")


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ((1, 400), "has 1x400 pixels, which this model can't take"),
        ((3000, 3000), f"makes 11449 tokens of the prompt, and the context holds {CONTEXT}; send a smaller one"),
    ],
    ids=["shape", "rows"],
)
def test_a_picture_that_can_not_be_is_refused_before_it_is_encoded_and_ends_no_worker(
    served: Served, size: tuple[int, int], says: str
) -> None:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    refused = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    encoder, stage = ("agg-0", "put") if len(served.plan.workers) == 1 else ("encode-0", "encode")
    before = served.pictures(encoder, stage)
    for _ in range(3):
        answer = served.post(refused)
        assert answer.status_code == 400, answer.text
        assert says in answer.json()["message"]
    assert served.pictures(encoder, stage) == before
    served.ask(("small",))
    assert served.pictures(encoder, stage) == before + 1
    wait_until(lambda: served.held() == [], 15, "nothing held")


def test_text_of_several_scripts_comes_back_as_the_tokens_that_it_was(agg: Served, split: Served) -> None:
    """Beside encode workers TensorRT-LLM makes the prompt of its text again."""
    asked = [{"role": "user", "content": [text("caf\u00e9 \U0001f600 \u6f22"), part("small")]}]
    answers = [served.post(asked).json() for served in (agg, split)]
    assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]
    assert answers[0]["usage"] == answers[1]["usage"]


@pytest.mark.parametrize("options", [("--encode", "2"), ("--mode", "disagg")], ids=" ".join)
def test_the_other_topologies_answer_the_same(
    trtllm_environment: Mapping[str, str], expected: dict[str, Answer], options: tuple[str, ...]
) -> None:
    with serving(trtllm_environment, *options) as served:
        check(served, expected)
        assert served.held() == []
