"""The reference: finds the checkpoint to compare with, and computes the embedded engine's results for it.

They are computed once per run, before anything is served, and stored in the run directory for all topologies and for
``--resume``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.build.manifest import FILE as MANIFEST
from trtx.build.manifest import read_manifest
from trtx.build.source import read_source
from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.facts import read_config, text_config
from trtx.checkpoint.identity import identify_model
from trtx.errors import UsageError
from trtx.evals.fidelity.forms import REFERENCE, SEQUENCES, TOP, ReferenceFacts, ReferenceSequence, reference_directory
from trtx.evals.fidelity.prompts import FidelityPrompts
from trtx.evals.lines import LineWriter, read_lines
from trtx.evals.messages import EvalProgress
from trtx.text import load_tokenizer
from trtx.torch_engine.llmapi import OfflineEngine

_NAME_IT = "name the reference with --reference"
_PURPOSE = "makes the reference"


@dataclass(frozen=True, slots=True)
class Reference:
    """``name``: as requested, or as in a build's manifest."""

    name: str
    path: Path
    dtype: str


def find_reference(named: str | None, served: Path | None) -> Reference:
    """The checkpoint ``named`` by the user, else the one from which the build ``served`` was made, else ``served``
    itself.

    Raises UsageError if it isn't available, or if its weights have changed since the build.
    """
    if named is None and served is not None and (served / MANIFEST).exists():
        return _source_of(served)
    name = named or str(served)
    checkpoint = resolve_checkpoint(name)
    return Reference(name, checkpoint.path, checkpoint.dtype)


def _source_of(build: Path) -> Reference:
    try:
        manifest = read_manifest(build)
        name = str(manifest.source["name"])
        source = read_source(name, on_gpu=False)
    except UsageError as error:
        raise UsageError(f"the source of {build} is not found ({error}); {_NAME_IT}") from error
    if source.weights_hash != manifest.inputs.get("weights_sha256"):
        raise UsageError(f"{build} was built from {name}, but {source.path} has different weights now; {_NAME_IT}")
    return Reference(name, source.path, source.checkpoint.dtype)


def check_same_vocabulary(reference: Path, served: Path) -> None:
    """Raises UsageError if the token ids of both models differ. ``served`` is the directory of the served tokenizer."""
    before, after = (vocabulary(path) for path in (reference, served))
    if before != after:
        differing = sum(after.get(token) != id_ for token, id_ in before.items()) + len(after.keys() - before.keys())
        raise UsageError(
            f"the tokenizers of the reference {reference} and the served model {served} differ in {differing} tokens, "
            f"so their token ids can't be compared; {_NAME_IT}"
        )
    sizes = [_vocab_size(path) for path in (reference, served)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise UsageError(
            f"vocab_size is {sizes[0]} in the reference {reference} and {sizes[1]} in the served model {served}; "
            f"expected the same size; {_NAME_IT}"
        )


def vocabulary(model: Path) -> dict[str, int]:
    """Token -> id, including added tokens."""
    tokenizer: Any = load_tokenizer(model)
    found: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return found


def _vocab_size(model: Path) -> int | None:
    """vocab_size of a model; None for a directory with only a tokenizer."""
    if not (model / "config.json").exists():
        return None
    size = text_config(read_config(model)).get("vocab_size")
    return size if isinstance(size, int) else None


def read_reference(run_dir: Path) -> tuple[ReferenceFacts, tuple[ReferenceSequence, ...]] | None:
    """The stored reference; None if it is incomplete. Raises UsageError."""
    directory = reference_directory(run_dir)
    facts = REFERENCE.find(directory, ReferenceFacts)
    return None if facts is None else (facts, read_lines(directory, SEQUENCES, ReferenceSequence))


def make_reference(
    run_dir: Path,
    reference: Reference,
    prompts: FidelityPrompts,
    *,
    osl: int,
    gpus: str | None,
    device: str,
    check: Callable[[], None],
    on_progress: Callable[[EvalProgress], None],
) -> tuple[ReferenceFacts, tuple[ReferenceSequence, ...]]:
    """Computes greedy text of at most ``osl`` tokens after each prompt, and scores all tokens with teacher forcing.

    ``gpus``: ``CUDA_VISIBLE_DEVICES`` for the engine, or None for that of this process. ``device``: the device's name.
    Raises UsageError for a prompt that doesn't fit or a checkpoint that the engine can't load, and LaunchError if the
    engine dies.
    """
    started = time.monotonic()
    directory = reference_directory(run_dir)
    writer = LineWriter(directory, SEQUENCES)
    longest = max(map(len, prompts.tokens)) + osl + 1
    total = len(prompts.tokens)
    with OfflineEngine(reference.path, purpose=_PURPOSE, longest=longest, gpus=gpus, check=check) as engine:
        _check_fits(prompts, osl, engine.max_seq_len)
        texts = []
        for done, (prompt, text) in enumerate(
            zip(prompts.tokens, engine.continuations(prompts.tokens, osl), strict=True), start=1
        ):
            texts.append([*prompt, *text])
            on_progress(_progress("greedy text", done, total))
        sequences = []
        for index, (ids, rows) in enumerate(zip(texts, engine.prompt_logprobs(texts, TOP), strict=True)):
            sequences.append(_sequence(index, len(prompts.tokens[index]), ids, rows))
            on_progress(_progress("log-probabilities", index + 1, total))
    writer.replace(sequences)
    facts = ReferenceFacts(
        model=reference.name,
        files_sha256=identify_model(reference.path).sampled_sha256,
        dtype=reference.dtype,
        device=device,
        prompts=prompts.source,
        top=TOP,
        sequences=total,
        seconds=round(time.monotonic() - started, 1),
    )
    REFERENCE.write(directory, facts)
    return facts, tuple(sequences)


def _check_fits(prompts: FidelityPrompts, osl: int, most: int) -> None:
    for number, prompt in enumerate(prompts.tokens, start=1):
        if len(prompt) + osl + 1 > most:
            raise UsageError(
                f"prompt {number} has {len(prompt)} tokens, and with --osl {osl} it exceeds the {most} tokens that the "
                f"reference supports; shorten the prompt, or lower --osl"
            )


def _sequence(index: int, prompt_length: int, ids: list[int], rows: list[dict[int, float]]) -> ReferenceSequence:
    return ReferenceSequence(
        index=index,
        prompt_length=prompt_length,
        tokens=tuple(ids),
        top_tokens=tuple(tuple(row) for row in rows),
        top_logprobs=tuple(tuple(round(logprob, 7) for logprob in row.values()) for row in rows),
    )


def _progress(what: str, done: int, total: int) -> EvalProgress:
    return EvalProgress("reference", what, done, done, total, 0, None, None, None, None)
