"""Patches aiperf 0.13.0 to tokenize its 5 MB text corpus once per run instead of once per call (1.3 s or more each).

Prompts don't change, because the tokens depend only on the text and the tokenizer. The tokens are cached in the
temporary directory of the host process (``warm_host.py``), which imports this module before it forks. Remove this
module once an aiperf release caches the tokens itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from array import array
from pathlib import Path

from aiperf.dataset.generator.prompt import PromptCorpus, PromptGenerator

from trtx.bench.aiperf.process import KEPT_VARIABLE

_tokenize = PromptGenerator._initialize_corpus


def _tokenize_once(self: PromptGenerator) -> None:
    directory, tokenizer = os.environ.get(KEPT_VARIABLE), self.tokenizer.resolved_name
    if directory is None or tokenizer is None or self._corpus == PromptCorpus.RANDOM:
        _tokenize(self)
        return
    kept = Path(directory, f"{hashlib.sha256(tokenizer.encode()).hexdigest()}.tokens")
    try:
        tokens = array("I", kept.read_bytes())
    except OSError:
        _tokenize(self)
        _keep(kept, array("I", self._tokenized_corpus))
        return
    self._tokenized_corpus = tokens.tolist()
    self._corpus_size = len(tokens)


def _keep(path: Path, tokens: array[int]) -> None:
    """Writes the cache atomically, because the next call reads it."""
    with contextlib.suppress(OSError):  # disk full: the next call tokenizes again
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(tokens.tobytes())
        part.replace(path)


PromptGenerator._initialize_corpus = _tokenize_once
