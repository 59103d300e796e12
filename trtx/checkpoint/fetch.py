"""``python3 -m trtx.checkpoint.fetch NAME --directory DIR`` downloads a model's files into a directory.

An init container runs it before the containers that read the model. A second run fetches only the missing files.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from trtx.checkpoint.hub import fetch_from_hub
from trtx.checkpoint.shapes import PREFIX, find_shape
from trtx.checkpoint.synthetic import make_synthetic
from trtx.errors import TrtxError, UsageError


def fetch(name: str, directory: Path, *, revision: str | None, with_weights: bool) -> None:
    """Writes the files of a model into ``directory``.

    ``name``: ``synthetic:<shape>`` or a model name on the hub. Raises UsageError if the model can't be fetched or the
    directory can't be written.
    """
    if not name.startswith(PREFIX):
        fetch_from_hub(name, directory, revision=revision, with_weights=with_weights)
        return
    try:
        made = make_synthetic(find_shape(name.removeprefix(PREFIX)), directory.parent / ".synthetic")
        shutil.copytree(made, directory, dirs_exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory} can't be written ({error.strerror}); name another directory") from error


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python3 -m trtx.checkpoint.fetch", allow_abbrev=False)
    parser.add_argument("name", help="a name of the hub, or synthetic:<shape>")
    parser.add_argument("--directory", type=Path, required=True, help="where its files shall lie")
    parser.add_argument("--revision", help="commit, branch or tag of the hub (default: its newest)")
    parser.add_argument("--without-weights", action="store_true", help="what describes it, and its tokenizer")
    args = parser.parse_args(argv)
    fetch(args.name, args.directory, revision=args.revision, with_weights=not args.without_weights)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TrtxError as error:
        sys.stderr.write(f"trtx.checkpoint.fetch: {error}\n")
        sys.exit(error.exit_code)
