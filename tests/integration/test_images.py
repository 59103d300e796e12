"""Images through the real frontend and real workers: the same answers in every topology, cached or not."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from picture_tasks import PictureSample, held_out
from pictures import draw
from PIL import Image
from processes import freeze
from prometheus_client.parser import text_string_to_metric_families
from served_records import check_served
from topology_clients import trtx_serve, wait_until
from trace_collector import TraceCollector, collector

from trtx.checkpoint import resolve_checkpoint
from trtx.launch.processes import members
from trtx.topology import Plan
from trtx.worker.multimodal.encode_endpoint import SILENCE_SECONDS

MODEL = "synthetic:tiny-vl"
ROWS = 25  # of each picture, in this model
CONTEXT = 400
HTTP = httpx.Client(timeout=120, trust_env=False)


def picture(color: Any, size: tuple[int, int] = (40, 30)) -> dict[str, Any]:
    """A message's part."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": data_url(file.getvalue())}}


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


RED, BLUE, TALL = picture("red"), picture("blue"), picture("green", (20, 90))
# Each as messages, with how many pictures are in it.
QUESTIONS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "none": ([{"role": "user", "content": [text("what is it")]}], 0),
    "red": ([{"role": "user", "content": [text("what is it"), RED]}], 1),
    "blue": ([{"role": "user", "content": [text("what is it"), BLUE]}], 1),
    "tall": ([{"role": "user", "content": [TALL, text("what is it")]}], 1),
    "red, blue": ([{"role": "user", "content": [text("these"), RED, BLUE]}], 2),
    "blue, red": ([{"role": "user", "content": [text("these"), BLUE, RED]}], 2),
    "one twice": ([{"role": "user", "content": [RED, text("and"), RED]}], 2),
    "two messages": (
        [
            {"role": "user", "content": [text("one"), RED]},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": [BLUE, text("and this")]},
        ],
        2,
    ),
}


@dataclass(frozen=True)
class Served:
    plan: Plan

    def post(self, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
        body = {"model": self.plan.model, "messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        return HTTP.post(f"{self.plan.url}/v1/chat/completions", json=body | more)

    def ask(self, messages: list[dict[str, Any]], **more: Any) -> str:
        answer = self.post(messages, **more)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def refused(self, *parts: dict[str, Any]) -> tuple[int, str]:
        answer = self.post([{"role": "user", "content": list(parts)}])
        return answer.status_code, answer.json()["message"]

    def metric(self, worker: str, family: str, **labels: str) -> float:
        """Summed over what ``labels`` leave open."""
        port = next(one.system_port for one in self.plan.workers if one.name == worker)
        families = text_string_to_metric_families(HTTP.get(f"http://127.0.0.1:{port}/metrics").text)
        samples = [sample for one in families for sample in one.samples if sample.name in (family, f"{family}_total")]
        return sum(one.value for one in samples if labels.items() <= one.labels.items())

    def wait_idle(self) -> None:
        """Until every request is counted, and its images are released: Dynamo ends a worker's stream after its client
        has the answer.
        """
        for worker in self.plan.workers:
            wait_until(lambda name=worker.name: self.metric(name, "trtx_open_requests") == 0, 30, "no open request")
            wait_until(
                lambda name=worker.name: self.metric(name, "trtx_embedding_cache_pinned_bytes") == 0,
                30,
                "no image held",
            )

    def tensors(self) -> list[Path]:
        """Files of pictures and embeddings that nobody has removed."""
        return [*self.plan.scratch_dir.glob("*.tensor"), *self.plan.scratch_dir.glob("*.partial")]


SERVED = ("--engine", "torch", "--model", MODEL, "--set", f"max_seq_len={CONTEXT}", "--decode-processes", "1")
ALL_IN_ONE: tuple[str, ...] = ()
E_P_D = ("--mode", "disagg", "--encode", "1")


@pytest.fixture(scope="module")
def traces() -> Iterator[TraceCollector]:
    with collector() as collecting:
        yield collecting


@pytest.fixture(scope="module")
def topologies(traces: TraceCollector) -> Iterator[dict[tuple[str, ...], Served]]:
    further = {ALL_IN_ONE: (), E_P_D: ("--otlp-endpoint", traces.url)}
    with ExitStack() as stack:
        commands = {
            options: stack.enter_context(trtx_serve(*SERVED, *options, *more)) for options, more in further.items()
        }
        yield {options: Served(command.wait_ready(150)) for options, command in commands.items()}


@pytest.fixture(scope="module")
def agg(topologies: dict[tuple[str, ...], Served]) -> Served:
    return topologies[ALL_IN_ONE]


@pytest.fixture(scope="module")
def disagg(topologies: dict[tuple[str, ...], Served]) -> Served:
    return topologies[E_P_D]


def test_an_answer_is_the_same_with_and_without_encode_workers_streamed_or_not_cached_or_not(
    agg: Served, disagg: Served
) -> None:
    answers = {}
    for name, (messages, _) in QUESTIONS.items():
        answers[name] = agg.ask(messages)
        assert disagg.ask(messages) == answers[name], name
        assert agg.ask(messages) == disagg.ask(messages) == answers[name], f"{name}, cached"
    assert len({*answers.values()}) == len(answers), "another picture, or another order, is another answer"
    messages, _ = QUESTIONS["two messages"]
    for served in (agg, disagg):
        lines = served.post(messages, stream=True).text.splitlines()
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        told = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
        assert told == answers["two messages"]


TRACED = {
    "trtx-frontend": {"http-request"},
    "trtx-encode-0": {"engine.generate", "trtx.encode"},
    "trtx-prefill-0": {"engine.generate", "trtx.prefill", "media", "queue", "prefill"},
    "trtx-decode-0": {"engine.generate", "trtx.decode", "media", "queue", "handoff", "first step", "decode"},
}


def traced(served: Served, traces: TraceCollector, number: int) -> float:
    """Asks about a new picture, and checks the spans of the request.

    Returns the sum of the workers' spans, and of the times before, between and after them, as a share of the client's
    own time.
    """
    trace_id, parent = f"4bf92f3577b34da6a3ce929d0e0e473{number}", "00f067aa0ba902b7"
    body = {"model": served.plan.model, "max_tokens": 320, "ignore_eos": True, "stream": True}
    messages = [{"role": "user", "content": [text("what is it"), picture((200, 10 * number, 0), (33, 44))]}]
    began_ns = time.time_ns()
    answer = HTTP.post(
        f"{served.plan.url}/v1/chat/completions",
        json={**body, "messages": messages},
        headers={"traceparent": f"00-{trace_id}-{parent}-01"},
    )
    answered_ns = time.time_ns()
    assert answer.status_code == 200

    def seen() -> dict[str, set[str]]:
        names: dict[str, set[str]] = {}
        for span in traces.trace(trace_id):
            names.setdefault(span.service, set()).add(span.name)
        return names

    wait_until(lambda: all(names <= seen().get(service, set()) for service, names in TRACED.items()), 20, "all spans")
    assert traces.complaints == []
    spans = traces.trace(trace_id)
    ids = {span.span_id for span in spans} | {parent}
    assert {span.name for span in spans if span.parent_id not in ids} == set()
    of_name = {span.name: span for span in spans}
    whole, prefill, decode = (of_name[name] for name in ("http-request", "trtx.prefill", "trtx.decode"))
    # Not that it ends before answered_ns: the frontend may end it some ms after the client has read the last byte.
    assert began_ns <= whole.start_ns <= decode.start_ns <= answered_ns
    assert decode.events == ("first chunk", "last chunk")
    stages = [span for span in spans if span.parent_id in (prefill.span_id, decode.span_id)]
    for worker in (prefill, decode):
        inside = [span for span in stages if span.parent_id == worker.span_id]
        assert all(worker.start_ns <= span.start_ns <= span.end_ns <= worker.end_ns for span in inside)
    (loading,) = [span for span in stages if span.name == "media" and span.parent_id == prefill.span_id]
    # The encode worker's span ends once Dynamo asks for another chunk, which can be after prefill has the only one.
    assert loading.start_ns <= of_name["trtx.encode"].start_ns <= loading.end_ns
    between_ns = prefill.start_ns - whole.start_ns, decode.start_ns - prefill.end_ns, whole.end_ns - decode.end_ns
    return (sum(span.seconds for span in stages) * 1e9 + sum(between_ns)) / (answered_ns - began_ns)


def test_a_request_with_a_picture_is_one_trace_whose_spans_add_up(disagg: Served, traces: TraceCollector) -> None:
    # On a machine with too much else to do, a worker may not run between two stages: one of four requests is enough.
    shares: list[float] = []
    while not shares or (len(shares) < 4 and shares[-1] != pytest.approx(1, abs=0.02)):
        shares.append(traced(disagg, traces, len(shares)))
    assert shares[-1] == pytest.approx(1, abs=0.02), shares


def test_a_response_takes_images_as_chat_does(agg: Served) -> None:
    parts = [
        {"type": "input_text", "text": "what is it"},
        {"type": "input_image", "image_url": RED["image_url"]["url"]},
    ]
    body = {"model": agg.plan.model, "input": [{"role": "user", "content": parts}], "max_output_tokens": 4}
    answer = HTTP.post(f"{agg.plan.url}/v1/responses", json=body | {"temperature": 0})
    assert answer.status_code == 200, answer.text
    told = "".join(part["text"] for one in answer.json()["output"] for part in one["content"])
    assert told and agg.ask(QUESTIONS["red"][0]).startswith(told)


def embedding_of(size: tuple[int, int], color: Any, **dtype: Any) -> dict[str, Any]:
    """What transformers makes of a picture of the model, as a client would send it."""
    import torch
    from safetensors.torch import save
    from transformers import AutoImageProcessor, LlavaForConditionalGeneration

    path = resolve_checkpoint(MODEL).path
    model = LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    pixels = AutoImageProcessor.from_pretrained(path, backend="pil")(Image.new("RGB", size, color), return_tensors="pt")
    with torch.inference_mode():
        rows = model.model.get_image_features(pixels["pixel_values"]).pooler_output[0]
    data = base64.b64encode(save({"embedding": rows.contiguous().to(**dtype)})).decode()
    return {"type": "image_url", "image_url": {"url": f"data:application/x-safetensors;base64,{data}"}}


def test_an_embedding_that_a_client_made_is_taken_in_place_of_its_picture(agg: Served, disagg: Served) -> None:
    red = embedding_of((40, 30), "red")
    cut = {"type": "image_url", "image_url": {"url": red["image_url"]["url"][:-400]}}
    for served in (agg, disagg):
        encoded = served.metric("encode-0" if served is disagg else "agg-0", "trtx_media_pictures", stage="encode")
        assert served.ask([{"role": "user", "content": [text("what is it"), red]}]) == served.ask(QUESTIONS["red"][0])
        assert served.ask([{"role": "user", "content": [text("these"), red, BLUE]}]) == served.ask(
            QUESTIONS["red, blue"][0]
        )
        after = served.metric("encode-0" if served is disagg else "agg-0", "trtx_media_pictures", stage="encode")
        assert after <= encoded + 2, "it was not encoded"
        code, said = served.refused(cut)
        assert (code, "data:application/x-safetensors URL of" in said, "broken" in said) == (400, True, True), said
        served.wait_idle()


def test_prompt_tokens_count_the_rows_of_pictures(agg: Served, disagg: Served) -> None:
    for served in (agg, disagg):
        counts = {
            name: served.post(messages).json()["usage"]["prompt_tokens"] for name, (messages, _) in QUESTIONS.items()
        }
        assert counts["red"] == counts["none"] + ROWS  # one placeholder is a token itself, and has become 25
        assert counts["red"] == counts["blue"] and counts["red, blue"] == counts["blue, red"]


def test_each_picture_is_encoded_once_and_decode_looks_at_none(agg: Served, disagg: Served) -> None:
    new = [picture((10, 20, shade)) for shade in range(4)]
    for served, encoder, looker in ((agg, "agg-0", "agg-0"), (disagg, "encode-0", "prefill-0")):
        encoded = served.metric(encoder, "trtx_media_pictures", stage="encode")
        hits = served.metric(looker, "trtx_embedding_cache_lookups", outcome="hit")
        for count in (2, 4, 3):  # the second a partial hit, the third one of all
            served.ask([{"role": "user", "content": [text(f"{count}"), *new[:count]]}])
        assert served.metric(encoder, "trtx_media_pictures", stage="encode") == encoded + 4
        assert served.metric(looker, "trtx_embedding_cache_lookups", outcome="hit") == hits + 2 + 3
        served.wait_idle()
    assert disagg.metric("prefill-0", "trtx_media_pictures", stage="encode") == 0
    assert disagg.metric("decode-0", "trtx_embedding_cache_lookups") == 0
    held = disagg.metric("encode-0", "trtx_embedding_cache_pictures")
    assert len(disagg.tensors()) == held, "what an encoder keeps, and nothing else"
    assert agg.tensors() == []
    for worker in (*agg.plan.workers, *disagg.plan.workers):
        check_served(HTTP.get(f"http://127.0.0.1:{worker.system_port}/metrics").text, worker.role, has_images=True)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (text("an <image> in words"), "the prompt has 1 image placeholders and the request 0 images"),
        ({"type": "image_url", "image_url": {"url": data_url(b"no picture")}}, "is not an image of a"),
        ({"type": "image_url", "image_url": {"url": data_url(b"\x89PNG\r\n\x1a\n")}}, "broken or cut short"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "--allowed-media-path"),
        ({"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}, "--allow-http-media"),
        ({"type": "image_url", "image_url": {"url": "https://127.0.0.1/a.png"}}, "Invalid request"),
        ({"type": "image_url", "image_url": None, "uuid": "a"}, "has only a uuid"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "brings video_url"),
    ],
    ids=["placeholder", "no picture", "truncated", "file", "http", "private", "uuid", "video"],
)  # fmt: skip
def test_what_is_no_picture_is_a_400_of_one_sentence(
    agg: Served, disagg: Served, part: dict[str, Any], says: str
) -> None:
    """The frontend itself refuses URLs of internal addresses, without a reason."""
    for served in (agg, disagg):
        code, said = served.refused(text("what is it"), part)
        assert (code, says in said) == (400, True), said
        assert len(said) < 300 and "\n" not in said
    assert disagg.ask(QUESTIONS["red"][0]) == agg.ask(QUESTIONS["red"][0]), "nobody else is harmed"


def test_sound_beside_text_alone_is_refused_although_the_frontend_drops_it(agg: Served, disagg: Served) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    for served in (agg, disagg):
        for parts in ([text("what is it"), sound], [sound]):
            code, said = served.refused(*parts)
            assert (code, said.partition(";")[0]) == (
                400,
                "the request contains input_audio, which no model takes here, expected text or images",
            )
        code, said = served.refused(sound, RED)
        assert (code, "contains input_audio, " in said) == (400, True), said


def test_an_encode_worker_counts_what_it_refuses_as_invalid(disagg: Served) -> None:
    def outcomes() -> tuple[float, float]:
        disagg.wait_idle()
        invalid, stop = (disagg.metric("encode-0", "trtx_requests", outcome=one) for one in ("invalid", "stop"))
        return invalid, stop

    invalid, stop = outcomes()
    code, said = disagg.refused({"type": "image_url", "image_url": {"url": data_url(b"none that others sent")}})
    assert (code, "data:image/png URL of" in said) == (400, True), said
    assert outcomes() == (invalid + 1, stop)
    disagg.ask([{"role": "user", "content": [picture((7, 77, 177))]}])
    assert outcomes() == (invalid + 1, stop + 1)


def test_too_many_images_are_refused(agg: Served) -> None:
    code, said = agg.refused(*[RED] * 17)
    assert (code, said) == (400, "the request brings 17 images, expected at most 16")


def test_images_that_expand_past_the_context_are_refused(agg: Served) -> None:
    code, said = agg.refused(*[RED] * 16)
    assert code == 400 and f"and the context holds {CONTEXT} together with the output" in said


def test_a_prompt_of_many_times_the_context_is_refused_by_its_beginning(agg: Served, disagg: Served) -> None:
    for served in (agg, disagg):
        code, said = served.refused({"type": "text", "text": "a b " * (500 * CONTEXT)})
        assert (code, said) == (
            400,
            f"the prompt has more than {2 * CONTEXT} tokens and the context holds {CONTEXT} together with the output; "
            f"send at most {CONTEXT - 1}",
        )


@pytest.mark.proof
def test_an_image_of_40_megabytes_is_a_413_and_one_of_30_is_served(disagg: Served) -> None:
    """Dynamo's own limits let it reach a worker, whose connection and place in the routing it then costs."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    small = file.getvalue()
    # A PNG whose end has come is read no further.
    try:
        code = disagg.post(messages_with(small + bytes(40 << 20))).status_code
    except httpx.WriteError:  # the frontend has answered, and reads no more of it
        code = 413
    assert code == 413
    assert disagg.post(messages_with(small + bytes(30 << 20))).status_code == 200
    assert disagg.ask(QUESTIONS["none"][0])


def encoder_of(served: Served) -> int:
    """Pid of the encoder that its only worker runs beside its engine."""
    pids = members(served.plan.marker, ())
    (pid,) = (pid for pid in pids if b"trtx.torch_engine.vision.process" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


@pytest.mark.proof  # a topology of its own; the death of an encode worker's is below
def test_an_encoder_of_a_workers_own_that_is_killed_costs_no_answer(agg: Served, disagg: Served) -> None:
    """SIGKILL, with pictures in it: another one is started, which encodes them."""
    asked = [[{"role": "user", "content": [text("what"), picture((77, shade, 3))]}] for shade in range(6)]
    expected = [disagg.ask(messages) for messages in asked]
    encoder, red = encoder_of(agg), agg.ask(QUESTIONS["red"][0])
    freeze(encoder)
    prepared = agg.metric("agg-0", "trtx_media_pictures", stage="prepare")
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(agg.ask, messages) for messages in asked]
        wait_until(
            lambda: agg.metric("agg-0", "trtx_media_pictures", stage="prepare") == prepared + len(asked),
            60,
            "all in it",
        )
        assert agg.ask(QUESTIONS["none"][0]) and agg.ask(QUESTIONS["red"][0]) == red, "text, and what is cached, go on"
        os.kill(encoder, signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
    assert encoder_of(agg) != encoder
    agg.wait_idle()
    assert agg.metric("agg-0", "trtx_requests", outcome="error") == 0
    assert agg.tensors() == []


@pytest.mark.proof
def test_an_encode_worker_that_is_at_work_is_waited_for_longer_than_a_silent_one(agg: Served, disagg: Served) -> None:
    """Its encoder stands still: it says nothing of that, and its worker that it is at work."""
    asked = [{"role": "user", "content": [text("what"), picture((78, 3, 200))]}]
    encoder = encoder_of(disagg)
    freeze(encoder)
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(disagg.ask, asked)
            time.sleep(SILENCE_SECONDS + 1)
            assert not answer.done()
            os.kill(encoder, signal.SIGCONT)
            assert answer.result() == agg.ask(asked)
    finally:
        os.kill(encoder, signal.SIGCONT)
    for metric in ("trtx_encoder_fallbacks", "trtx_encoder_retries"):
        assert disagg.metric("prefill-0", metric) == 0
    assert encoder_of(disagg) == encoder


def messages_with(file: bytes) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(file)}}]}]


def test_mixed_requests_get_the_answers_of_their_own_pictures(agg: Served, disagg: Served) -> None:
    asked = [
        [{"role": "user", "content": [text("mixed"), picture((shade * 20, 255 - shade, 7))]}] for shade in range(12)
    ]
    expected = [agg.ask(messages) for messages in asked]
    with ThreadPoolExecutor(8) as pool:
        for served in (agg, disagg):
            assert [*pool.map(served.ask, [*asked, *asked])] == expected * 2


@pytest.mark.proof  # test_faults.py kills workers of the other roles
def test_an_encoder_that_dies_takes_its_worker_along_and_no_request(agg: Served, disagg: Served) -> None:
    """SIGKILL. Dynamo takes a model for not ready where it has lost the endpoint of its only encode worker and not its
    card: every request was a 503, text too, for as long as that worker took to end. Last of this topology."""
    encoder, asked = encoder_of(disagg), [{"role": "user", "content": [text("what"), picture((79, 5, 6))]}]
    worker = Path("/proc") / Path(f"/proc/{encoder}/stat").read_text().rpartition(")")[2].split()[1]
    with ThreadPoolExecutor(1) as pool:
        os.kill(encoder, signal.SIGKILL)
        answer = pool.submit(disagg.ask, asked)
        statuses = {disagg.post(QUESTIONS["none"][0], max_tokens=1).status_code}
        while worker.exists():
            statuses.add(disagg.post(QUESTIONS["none"][0], max_tokens=1).status_code)
        statuses.update(disagg.post(QUESTIONS["none"][0], max_tokens=1).status_code for _ in range(20))
        assert statuses == {200}
        assert answer.result() == agg.ask(asked)


@pytest.mark.proof
@pytest.mark.parametrize("options", [("--encode", "2"), ("--mode", "disagg")], ids=" ".join)
def test_the_other_topologies_answer_the_same(agg: Served, options: tuple[str, ...]) -> None:
    with trtx_serve("--engine", "torch", "--model", MODEL, *options) as command:
        served = Served(command.wait_ready(150))
        for name, (messages, _) in QUESTIONS.items():
            assert served.ask(messages) == served.ask(messages) == agg.ask(messages), name


@pytest.mark.proof
def test_encode_workers_follow_the_dtype_of_the_others_and_larger_inline_files_get_through() -> None:
    bfloat16 = ("--engine", "torch", "--model", MODEL, "--set", "dtype=bfloat16", "--max-media-bytes", str(64 << 20))
    with ExitStack() as stack:
        one, other = (
            Served(stack.enter_context(trtx_serve(*bfloat16, *options)).wait_ready(150))
            for options in (ALL_IN_ONE, ("--encode", "1"))
        )
        for name, (messages, _) in QUESTIONS.items():
            assert one.ask(messages) == other.ask(messages), name
        assert other.metric("encode-0", "trtx_media_pictures", stage="encode") > 0
        assert other.metric("agg-0", "trtx_encoder_fallbacks") == 0
        file = io.BytesIO()
        Image.new("RGB", (8, 8), "red").save(file, "PNG")
        assert other.post(messages_with(file.getvalue() + bytes(60 << 20))).status_code == 200


@pytest.mark.proof
def test_an_encode_worker_that_is_killed_costs_no_answer(agg: Served) -> None:
    asked = [[{"role": "user", "content": [text("what"), picture((shade, 90, 200))]}] for shade in range(0, 240, 8)]
    expected = [agg.ask(messages) for messages in asked]
    with trtx_serve("--engine", "torch", "--model", MODEL, "--encode", "1") as command:
        served = Served(command.wait_ready(150))
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(served.ask, messages) for messages in asked]
            answers[3].result()
            os.kill(command.pid_of("encode-0"), signal.SIGKILL)
            assert [answer.result() for answer in answers] == expected
        assert served.metric("agg-0", "trtx_encoder_fallbacks") > 0
        again = "whole again: a request went through, and an image through encode-0"
        wait_until(lambda: again in command.text(), 120, "again")
        encoded = served.metric("encode-0", "trtx_media_pictures", stage="encode")
        new = [{"role": "user", "content": [text("what"), picture((1, 2, 3))]}]
        assert served.ask(new) == agg.ask(new)
        assert served.metric("encode-0", "trtx_media_pictures", stage="encode") == encoded + 1
        held = served.metric("encode-0", "trtx_embedding_cache_pictures")
        assert len(served.tensors()) == held, "of what the dead one kept nothing is left"


@pytest.mark.proof
def test_a_decode_worker_that_has_to_compute_a_prompt_looks_at_its_pictures_itself(agg: Served) -> None:
    """Its pool is too small for all of them: some are preempted, and their prompts computed anew."""
    asked = [[{"role": "user", "content": [text("what is it"), picture((shade * 30, 9, 80))]}] for shade in range(6)]
    expected = [agg.ask(messages, max_tokens=90) for messages in asked]
    with trtx_serve(
        "--engine", "torch", "--model", MODEL, *E_P_D, "--set", "decode.kv_cache_config.max_tokens=384"
    ) as command:  # fmt: skip
        served = Served(command.wait_ready(150))
        with ThreadPoolExecutor(6) as pool:
            for _ in range(3):
                assert [*pool.map(lambda one: served.ask(one, max_tokens=90), asked)] == expected
        assert served.metric("decode-0", "trtx_embedding_cache_lookups", outcome="miss") > 0


@pytest.mark.proof
@pytest.mark.parametrize("shape", ["tiny-qwen2.5-vl", "tiny-qwen3-vl"])
def test_models_with_three_positions_answer_the_same_with_and_without_encode_workers(shape: str) -> None:
    with ExitStack() as stack:
        one, other = (
            Served(stack.enter_context(trtx_serve("--model", f"synthetic:{shape}", *options)).wait_ready(150))
            for options in (ALL_IN_ONE, E_P_D)
        )
        answers = {}
        for name, (messages, _) in QUESTIONS.items():
            answers[name] = one.ask(messages)
            assert other.ask(messages) == one.ask(messages) == other.ask(messages) == answers[name], name
        assert len({*answers.values()}) == len(answers)


@pytest.mark.proof
def test_the_kv_router_sends_an_image_back_to_the_worker_that_has_it() -> None:
    """By the ids that Dynamo's frontend routes by: it knows Qwen's processor."""
    shades = [picture((shade, 255 - shade, 40), (336, 224)) for shade in range(0, 240, 20)]
    with trtx_serve(
        "--model", "synthetic:tiny-qwen2.5-vl", "--workers", "2", "--router-mode", "kv",
        "--set", "kv_cache_config.tokens_per_block=16",
    ) as command:  # fmt: skip
        served = Served(command.wait_ready(150))

        def cached(part: dict[str, Any], words: str) -> int:
            answer = served.post([{"role": "user", "content": [part, text(words)]}], max_tokens=1)
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        rows = 12 * 8
        for part in shades:
            cached(part, "first")
        wait_until(lambda: all(cached(part, "heard of") >= rows - 16 for part in shades), 60, "the router knows all")
        hits = [cached(part, f"words of round {number}") >= rows - 16 for number in range(3) for part in shades]
        assert all(hits), f"{sum(hits)} of {len(hits)}"


@pytest.mark.proof
def test_many_requests_with_cancellations_leave_nothing_and_mix_nothing_up(agg: Served) -> None:
    pictures = [picture((shade * 5, (shade * 91) % 256, 255 - shade * 5)) for shade in range(50)]
    asked = [[{"role": "user", "content": [text("which"), part]}] for part in pictures]
    expected = [agg.ask(messages) for messages in asked]
    with trtx_serve("--engine", "torch", "--model", MODEL, *E_P_D) as command:
        served = Served(command.wait_ready(150))

        def one(number: int) -> bool:
            """One of five goes away while it is answered."""
            messages, answer = asked[number * 7 % 50], expected[number * 7 % 50]
            if number % 5:
                return served.ask(messages) == answer
            body = {"model": served.plan.model, "messages": messages, "max_tokens": 200, "stream": True}
            with HTTP.stream("POST", f"{served.plan.url}/v1/chat/completions", json=body) as stream:
                next(stream.iter_bytes())
            return True

        with ThreadPoolExecutor(32) as pool:
            assert all(pool.map(one, range(1000)))
        served.wait_idle()
        made = 50 + 1  # the launcher's own, before it said Ready
        assert served.metric("encode-0", "trtx_media_pictures", stage="encode") == made
        assert served.metric("prefill-0", "trtx_embedding_cache_lookups", outcome="miss") == made
        wait_until(lambda: served.metric("prefill-0", "trtx_leases") == 0, 90, "no lease is left")
        assert len(served.tensors()) == made, "one of each picture, which the encode worker keeps"


@pytest.mark.proof
def test_a_trained_model_says_what_is_in_pictures_that_it_never_saw() -> None:
    """Above 95 %: a swapped, turned or mirrored picture is a wrong answer."""
    with trtx_serve("--engine", "torch", "--model", "synthetic:tiny-vl-trained", *E_P_D) as command:
        served = Served(command.wait_ready(150))

        def is_right(sample: PictureSample) -> bool:
            parts = []
            for scene in sample.scenes:
                file = io.BytesIO()
                draw(scene).save(file, "PNG")
                parts.append({"type": "image_url", "image_url": {"url": data_url(file.getvalue())}})
            asked = [{"role": "user", "content": [*parts, text(sample.question.text)]}]
            return served.ask(asked, ignore_eos=False).strip() == sample.question.answer

        with ThreadPoolExecutor(8) as pool:
            for task in ("colour", "background", "shape", "side", "digit", "which-colour"):
                right = sum(pool.map(is_right, held_out(task, 60, 7)))
                assert right > 57, f"{task}: {right} of 60"
