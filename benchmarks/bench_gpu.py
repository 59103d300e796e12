"""Measures the GPU numbers of docs/performance.md again, in resumable sections: trtx, its peers, and the limits.

    make bench-gpu                                              # every section that this machine has the GPUs for
    python benchmarks/bench_gpu.py --sections http-8b --peer vllm=DIR --peer sglang=DIR   # beside them

A section takes at most 8 minutes for each peer. It writes one file, ``<out>/<section>.json``, with its commands, their
JSON documents, the device, the commit and the time. A section that already has a file from this device and these
sources is not run again, unless ``--again`` is given. If a peer or a second GPU is missing, its cells stay empty. The
script prints the table of all files at the end, and writes it to ``--docs``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from peer_servers import kind_of, peers_of
from user_loads import KINDS

import trtx
from trtx.checkpoint import resolve_checkpoint

HERE = Path(__file__).parent
LIMIT_S = 480.0
ENDING_S = 30.0  # of a section, for a script with a budget to end in
MODELS = {"0.6b": "synthetic:qwen3-0.6b", "8b": "synthetic:qwen3-8b"}
PREFILLS = {"1 x 8192": ("1", "8192"), "64 x 512": ("64", "512")}
LOADS = [kind for kind in KINDS if kind != "fixed"]  # that is what the sections of concurrencies have
FIGURES = {
    "output_token_throughput": "tokens/s", "time_to_first_token_p50": "TTFT p50 ms",
    "time_to_first_token_p90": "TTFT p90 ms", "time_to_first_token_p99": "TTFT p99 ms",
    "inter_token_latency_p50": "ITL p50 ms", "inter_token_latency_p99": "ITL p99 ms",
}  # fmt: skip
IN = "directory of "
"""Prefix of a model's name in a command, which is replaced with the model's directory, because peers know no shapes."""


@dataclass(frozen=True, slots=True)
class Section:
    """What one call measures.

    ``commands``: script and arguments, by the name of the resulting document. ``peer``: the same for commands that need
    vLLM and run with its folder on PYTHONPATH.
    """

    name: str
    gpus: int
    commands: Mapping[str, tuple[str, ...]]
    peer: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. None: not measured here."""

    section: str
    case: str
    unit: str
    trtx: float | None
    peer: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Images:
    """The model and images of the image sections. ``grid``: the image size for the encoder, in patches."""

    model: str
    side: int
    grid: str
    requests: int


def section_limit_s(peers: dict[str, Path]) -> float:
    """Time limit of a section. A peer takes minutes to start: SGLang five, on a machine without compiled kernels."""
    return LIMIT_S * max(1, len(peers))


def sections(models: dict[str, str], batches: str, peers: dict[str, Path], images: Images) -> list[Section]:
    """Returns all sections in the order in which they run."""
    found = []
    beside = [word for name, folder in peers.items() for word in ("--peer", f"{name}={folder}")]
    for size, model in models.items():
        shape = ("--model", model, "--batch", batches)
        found.append(
            Section(
                f"runner-{size}",
                1,
                {"limits": ("gpu_limits.py", *shape), "trtx": ("engine_decode.py", *shape)},
                {"peer": ("peer_decode.py", "--model", f"{IN}{model}", "--batch", batches)},
            )
        )
        http = ("http_beside_peer.py", "--model", model)
        within = ("--budget-s", f"{section_limit_s(peers) - ENDING_S:g}", *beside)
        for name, concurrencies in _apart(f"http-{size}", batches).items():
            found.append(Section(name, 1, {"all": (*http, "--concurrency", concurrencies, *within)}, {}))
        for load in LOADS:
            words = (*http, "--load", load, "--temperature", "0", *within)
            found.append(Section(f"http-{size}-{load}", 1, {"all": words}, {}))
        engine = ("closed_loop.py", "--model", model, "--concurrency", batches, "--ways", "default", "--requests", "4")
        client = (*http, "--concurrency", batches, "--budget-s", f"{LIMIT_S - 4 * ENDING_S:g}")
        found.append(Section(f"path-{size}", 1, {"engine": engine, "client": client}, {}))
        found.append(Section(f"start-{size}", 1, {"trtx": ("start_time.py", "--model", model)}, {}))
        found.append(Section(f"loop-{size}", 1, {"trtx": ("overlap.py", *shape)}, {}))
        found.append(
            Section(
                f"deterministic-{size}",
                1,
                {"trtx": ("deterministic.py", *shape, "--isl", "512", "--osl", "32", "--prompts", "64")},
                {},
            )
        )
    size, model = list(models.items())[-1]
    prefills = {
        name: ("--batch", batch, "--isl", isl, "--osl", "8", "--model") for name, (batch, isl) in PREFILLS.items()
    }
    found.append(
        Section(
            f"prefill-{size}",
            1,
            {f"limits {name}": ("gpu_limits.py", *words, model) for name, words in prefills.items()}
            | {f"trtx {name}": ("engine_decode.py", *words, model) for name, words in prefills.items()},
            {f"peer {name}": ("peer_decode.py", *words, f"{IN}{model}") for name, words in prefills.items()},
        )
    )
    found.append(Section("attention", 1, {"ways": ("attention.py", "--fp8")}, {}))
    loops = {f"clients {name}": ("closed_loop.py", "--model", each) for name, each in models.items()}
    found.append(Section("clients", 1, loops, {}))
    found += image_sections(images)
    found.append(Section("handoff", 2, {"trtx": ("kv_handoff.py", "--json")}, {}))
    found.append(Section("handoff-engines", 2, {"trtx": ("kv_handoff_engines.py",)}, {}))
    return found


def _apart(name: str, batches: str) -> dict[str, str]:
    """Returns the concurrencies of each section, with 1 in a section of its own.

    One request at a time takes as long as all other concurrencies together, so both would not fit for a large model.
    """
    others = ",".join(batch for batch in batches.split(",") if batch != "1")
    return {name: others, f"{name}-1": "1"} if others and others != batches else {name: batches}


def image_sections(images: Images) -> list[Section]:
    """Sections for the encoder alone, embeddings between processes, and topologies on one and two GPUs."""
    size = ("--side", str(images.side), "--requests", str(images.requests))
    serve = ("image_serving.py", "--model", images.model, *size, "--topologies")
    shape = ("encoder_batches.py", "--model", images.model, "--grid", images.grid, "--batches", "1,2,4,8", "--json")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        Section("encoder", 1, {"trtx": shape}, {}),
        Section("embeddings", 1, {"trtx": ("embedding_handoff.py", "--device", device, "--json")}, {}),
        Section("images-cache", 1, {"trtx": (*serve, "agg")}, {}),
        Section("images-topologies", 2, {"trtx": (*serve, "2-agg,e-pd,ep-d,e-p-d")}, {}),
    ]


def lines_of(section: str, documents: dict[str, Any]) -> Iterator[Line]:
    """Yields the table's lines for the documents of one section, whose name decides how they are read."""
    kind = section.split("-")[0]
    if kind == "runner":
        peer = _by_batch(documents.get("peer"))
        limits = _by_batch(documents["limits"])
        for row in documents["trtx"]["rows"]:
            batch, unit = row["batch"], "decode tokens/s"
            name = f"batch {batch}" + ("" if row["kind"] == "greedy" else f", {row['kind']}")
            theirs, most = (of.get(batch, {}).get("decode_tokens_per_s") for of in (peer, limits))
            yield Line(section, name, unit, row["decode_tokens_per_s"], theirs, most)
    elif kind == "prefill":
        for name in PREFILLS:
            rows = {
                who: documents[f"{who} {name}"]["rows"][0]["prefill_tokens_per_s"]
                for who in ("trtx", "peer", "limits")
                if f"{who} {name}" in documents
            }
            yield Line(section, name, "prompt tokens/s", rows["trtx"], rows.get("peer"), rows["limits"])
    elif kind == "http":
        yield from _beside_peers(section, documents["all"])
    elif kind == "path":  # the steady part of a load beside the steady engine: a share of 0.97 loses 3 % on the way
        own = {row["clients"]: row["tokens_per_s"] for row in documents["engine"]["rows"]}
        for row in documents["client"]["rows"]:
            unit, concurrency = "tokens/s at the client, limit: of the engine alone", row["concurrency"]
            yield Line(
                section,
                f"concurrency {concurrency}",
                unit,
                row["steady_output_token_throughput"],
                None,
                own[concurrency],
            )
    elif kind == "start":
        for number, steps in enumerate(documents["trtx"]["serve"], start=1):
            yield from (Line(section, f"start {number}, {name}", "s", value) for name, value in steps.items())
        for number, steps in enumerate(documents["trtx"]["engine"], start=1):
            case = f"engine alone, start {number}"
            yield from (Line(section, f"{case}, {name}", "s", value) for name, value in steps.items())
    elif kind == "loop":
        for row in documents["trtx"]["rows"]:
            yield Line(section, f"batch {row['batch']}", "decode tokens/s, whole engine", row["on"]["decode"])
    elif kind == "deterministic":
        for row in documents["trtx"]["rows"]:  # beside the engine without it: a share of 0.75 is a cost of 25 %
            unit = f"{row['phase']} tokens/s"
            yield Line(section, f"batch {row['batch']}", unit, row["deterministic"], None, row["default"])
        for mode, shares in documents["trtx"]["differing"].items():
            for how, share in shares.items():
                yield Line(section, f"{mode}, {how}", "answers that differ from alone, %", 100 * share)
    elif section == "attention":
        for row in documents["ways"]["rows"]:
            for way, us in row["us"].items():
                name = f"{row['case']}, {row['dtype']}, {way}"
                yield Line(section, name, "us a layer", us, None, row["limit_us"])
    elif kind == "passes":
        for row in documents["ways"]["rows"]:
            cap = "no cap" if row["cap"] is None else f"at most {row['cap']} a step"
            name = f"prompts {row['load']} beside {row['decodes']} decodes, {cap}, {row['way']}"
            for figure, unit in (("prompt_tokens_per_s", "prompt tokens/s"), ("decode_tokens_per_s", "decode tokens/s"),
                                 ("itl_p99_ms", "ITL p99 ms")):  # fmt: skip
                yield Line(section, name, unit, row[figure])
    elif kind == "encoder":
        for row in documents["trtx"]["rows"]:
            yield Line(section, f"batch {row['batch']}", "ms an image", row["ms_an_image"])
            yield Line(section, f"batch {row['batch']}", "images/s", row["images_per_s"])
    elif kind == "embeddings":
        for row in documents["trtx"]["rows"]:
            case = f"{row['way']}, {row['rows']} rows"
            yield Line(section, case, "GB/s, kept and taken", row["gbps"], None, row["copy_gbps"])
            yield Line(section, case, "GB/s, taken", row["take_gbps"], None, row["copy_gbps"])
    elif kind == "images":
        for row in documents["trtx"]["rows"]:
            case = f"{row['topology']}, {row['load']}"
            for figure, unit in (("ttft_p50_ms", "TTFT p50 ms"), ("ttft_p90_ms", "TTFT p90 ms"),
                                 ("images_per_s", "images/s"), ("encode_ms", "ms to encode an image, waiting included"),
                                 ("encoded", "images encoded")):  # fmt: skip
                yield Line(section, case, unit, row[figure])
    elif section == "handoff":
        for row in documents["trtx"]["rows"]:
            yield Line(section, f"{row['route']}, {row['tokens']} tokens", "GB/s", row["gbps"], None, row["copy_gbps"])
    elif section == "handoff-engines":
        for row in documents["trtx"]:
            yield Line(section, f"{row['tokens']} tokens", "ms that disagg adds", row["disagg_adds_ms"])


def _beside_peers(section: str, document: dict[str, Any]) -> Iterator[Line]:
    """Yields each metric of trtx alone, or once for each peer with a result for the same load."""
    versions, start_s = document["versions"], document["start_s"]
    peers = [name for name in versions if name != "trtx"]
    of = {(row["server"], row["load"]): row for row in document["rows"]}
    cases: list[tuple[str, str, float | None, dict[str, float | None]]] = []
    for load in dict.fromkeys(row["load"] for row in document["rows"]):
        for figure, unit in FIGURES.items():
            theirs = {name: of.get((name, load), {}).get(figure) for name in peers}
            cases.append((load, unit, of.get(("trtx", load), {}).get(figure), theirs))
    cases.append(("start to first answer", "s", start_s.get("trtx"), {name: start_s.get(name) for name in peers}))
    for case, unit, ours, theirs in cases:
        if not peers:
            yield Line(section, case, unit, ours)
        for name, its in theirs.items():
            yield Line(section, f"{case}, beside {name} {versions[name]}", unit, ours, its)


def _by_batch(document: dict[str, Any] | None) -> dict[int, dict[str, Any]]:
    return {} if document is None else {row["batch"]: row for row in document["rows"]}


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns Markdown with the lines of each section, its device, commit and commands."""
    out = []
    for result in results:
        out += ["", f"## {result['section']}", ""]
        out.append(f"{result['device']}, {result['versions']}, commit {result['commit']}, {result['started']}, "
                   f"{result['seconds']:.0f} s")  # fmt: skip
        out += ["", *(f"    {' '.join(command)}" for command in result["commands"].values()), ""]
        out += ["| case | unit | trtx | peer | trtx / peer | limit | of the limit |", "|---|---|--:|--:|--:|--:|--:|"]
        for line in lines_of(result["section"], result["documents"]):
            cells = [_number(line.trtx), _number(line.peer), _ratio(line.trtx, line.peer)]
            cells += [_number(line.limit), _ratio(line.trtx, line.limit)]
            out.append(f"| {line.case} | {line.unit} | {' | '.join(cells)} |")
    return out


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ratio(value: float | None, other: float | None) -> str:
    return "" if value is None or not other else f"{value / other:.3f}"


def run(section: Section, peers: dict[str, Path], commit: str) -> dict[str, Any]:
    """Runs a section. Raises RuntimeError with the end of the output if a command fails or takes too long."""
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    commands = dict(section.commands)
    in_process = next((folder for name, folder in peers.items() if kind_of(name) == "vllm"), None)
    if in_process is not None:
        commands |= section.peer
    documents = {}
    for name, words in commands.items():
        is_peer = name in section.peer
        script, *arguments = [_directory(word) if word.startswith(IN) else word for word in words]
        command = [sys.executable, str(HERE / script), *arguments]
        environment = os.environ | ({"PYTHONPATH": str(in_process)} if is_peer else {})
        last = called(command, environment, section_limit_s(peers) - (time.monotonic() - began))
        documents[name] = json.loads(last)
    return {
        "section": section.name, "device": device(), "sources": sources(), "commit": commit, "started": started,
        "versions": f"torch {torch.__version__}, Python {sys.version.split()[0]}",
        "seconds": time.monotonic() - began, "documents": documents,
        "commands": {name: ["python", f"benchmarks/{words[0]}", *words[1:]] for name, words in commands.items()},
    }  # fmt: skip


def called(command: list[str], environment: dict[str, str], limit_s: float) -> str:
    """Runs a command, shows its output as it arrives, and returns the last line.

    Raises RuntimeError if it fails or exceeds ``limit_s``; then it gets SIGTERM, so that its child processes end too.
    """
    script = Path(command[1]).name
    lines: list[str] = []
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=environment | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
                                   stderr=said, text=True)  # fmt: skip
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.terminate()

        timer = threading.Timer(limit_s, stop)
        killer = threading.Timer(limit_s + ENDING_S, process.kill)
        timer.start()
        killer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                print(line, end="", flush=True)
            process.wait()
        finally:
            timer.cancel()
            killer.cancel()
            end(process)
        said.seek(0)
        if late.is_set():
            raise RuntimeError(f"{script} did not end within {limit_s:.0f} s, which the section had left")
        if process.returncode != 0 or not lines:
            told = "".join(lines) + said.read()
            raise RuntimeError(f"{script} ended with {process.returncode}:\n{told[-2000:]}")
    return lines[-1]


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _directory(word: str) -> str:
    return str(resolve_checkpoint(word.removeprefix(IN), on_gpu=torch.cuda.is_available()).path)


def device() -> str:
    if not torch.cuda.is_available():
        return "CPU"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}"


def _commit() -> str:
    asked = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=10"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def sources() -> str:
    """Returns a digest of the sources of trtx and these scripts. A change of it invalidates earlier results."""
    digest = hashlib.blake2b(digest_size=6)
    for root in (HERE, Path(trtx.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def kept(out: Path, name: str) -> dict[str, Any] | None:
    """Returns the file that a section wrote to ``out``; None if there is none or it can't be read."""
    try:
        found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return found


def unwritable(docs: Path | None) -> str | None:
    """Returns why the table can't be written to ``docs``, or None."""
    if docs is None or (docs.parent.is_dir() and not docs.is_dir()):
        return None
    what = "is a directory" if docs.is_dir() else "is in a directory that does not exist"
    return f"--docs {str(docs)!r} {what}; expected a file for the table"


def measure(known: list[Section], names: list[str], options: argparse.Namespace, failed: list[str]) -> None:
    """Runs the named sections for which this machine has enough GPUs. Adds the names of failed ones to ``failed``."""
    gpus = torch.cuda.device_count()
    for section in known:
        before = kept(options.out, section.name)
        done = before is not None and (before["device"], before["sources"]) == (device(), sources())
        if section.name not in names or (done and not options.again):
            continue
        if section.gpus > max(gpus, 1):
            print(f"{section.name}: not run, it takes {section.gpus} GPUs and {gpus} are here", flush=True)
            continue
        print(f"{section.name}:", flush=True)
        try:
            result = run(section, options.peers, options.commit or _commit())
        except RuntimeError as error:
            failed.append(section.name)
            print(f"{section.name}: {error}", flush=True)
            continue
        path = options.out / f"{section.name}.json"
        path.with_suffix(".tmp").write_text(json.dumps(result))
        path.with_suffix(".tmp").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", help="comma-separated names (default: all)")
    parser.add_argument("--models", default=",".join(f"{size}={model}" for size, model in MODELS.items()),
                        help="comma-separated NAME=MODEL (default: %(default)s)")  # fmt: skip
    parser.add_argument("--batch", default="1,8,64,256", help="batch sizes and concurrencies (default: %(default)s)")
    parser.add_argument(
        "--images-model", default="synthetic:qwen2.5-vl-7b", help="a multimodal model (default: %(default)s)"
    )
    parser.add_argument(
        "--image-side", type=int, default=1008, help="side of a served image in pixels (default: %(default)s)"
    )
    parser.add_argument(
        "--image-grid", default="1,72,72", help="image size for the encoder, in patches (default: %(default)s)"
    )
    parser.add_argument(
        "--image-requests", type=int, default=100, help="requests of each image load (default: %(default)s)"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=DIR",
                        help="as in http_beside_peer.py; without it the peer's cells are empty")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu"), help="default: %(default)s")
    parser.add_argument("--docs", type=Path, help="also write the table to this file")
    parser.add_argument("--commit", help="the measured commit, if git is not available")
    parser.add_argument("--again", action="store_true", help="also run sections that have a file")
    options = parser.parse_args()
    models = dict(pair.split("=", 1) for pair in options.models.split(","))
    images = Images(options.images_model, options.image_side, options.image_grid, options.image_requests)
    try:
        options.peers = peers_of(options.peer)
    except ValueError as error:
        parser.error(str(error))
    if problem := unwritable(options.docs):
        parser.error(problem)
    known = sections(models, options.batch, options.peers, images)
    names = [section.name for section in known] if options.sections is None else options.sections.split(",")
    if unknown := [name for name in names if name not in {section.name for section in known}]:
        parser.error(f"no section {unknown[0]!r}; there are {', '.join(section.name for section in known)}")
    options.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # with the table of what is finished
    try:
        measure(known, names, options, failed)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not cut the table
        results = [result for section in known if (result := kept(options.out, section.name)) is not None]
        page = [
            "# GPU figures",
            "",
            "Written by `make bench-gpu`; an empty cell was not measured.",
            *table(results),
            "",
        ]
        print("\n".join(page))
        if options.docs is not None:
            options.docs.write_text("\n".join(page))
    if failed:
        raise SystemExit(f"not measured, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
