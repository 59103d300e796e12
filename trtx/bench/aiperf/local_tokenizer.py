"""Patches aiperf 0.13.0 to read a tokenizer from a directory in processes in which it sets ``HF_HUB_OFFLINE`` itself.

These processes create the prompts of a trace from its ``hash_ids`` (``dataset/generator/parallel_decode.py``). Offline,
aiperf looks for the value of ``--tokenizer`` only in Hugging Face's cache. With a directory it therefore failed on
every trace of ten or more records: "A process in the process pool was terminated abruptly". The host process imports
this module before it forks. Remove the module once an aiperf release accepts a directory.
"""

from __future__ import annotations

from pathlib import Path

from aiperf.common.tokenizer import Tokenizer

_in_cache = Tokenizer._resolve_local_snapshot


def _directory_or_in_cache(name: str, revision: str) -> str:
    return name if Path(name).is_dir() else _in_cache(name, revision)


Tokenizer._resolve_local_snapshot = staticmethod(_directory_or_in_cache)
