"""Lets aiperf 0.13.0 read a tokenizer's directory in the processes in which it sets ``HF_HUB_OFFLINE`` itself.

Those make the prompts of a trace from its ``hash_ids`` (``dataset/generator/parallel_decode.py``). Offline, aiperf
looks for whatever ``--tokenizer`` names in Hugging Face's cache alone, so with a directory it measured no trace of ten
records or more: "A process in the process pool was terminated abruptly". Imported where aiperf is, before it forks.
Drop it when a release takes a directory.
"""

from __future__ import annotations

from pathlib import Path

from aiperf.common.tokenizer import Tokenizer

_in_cache = Tokenizer._resolve_local_snapshot


def _directory_or_in_cache(name: str, revision: str) -> str:
    return name if Path(name).is_dir() else _in_cache(name, revision)


Tokenizer._resolve_local_snapshot = staticmethod(_directory_or_in_cache)
