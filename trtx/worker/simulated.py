"""``python -m trtx.worker.simulated``: runs Dynamo's mocker with parsers and a chat template.

The mocker has no flags for them. This module replaces a function of ``dynamo.mocker.main`` 1.6.1 that builds the
model's registration, and a template replaces the model's in a directory of links to its files. Remove it once the
mocker has flags for them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

_TEMPLATE = "chat_template.jinja"


def main(argv: list[str]) -> None:
    """Runs until SIGTERM. Passes all flags on to the mocker, except three flags of trtx and the model's path."""
    parser = argparse.ArgumentParser(prog="python -m trtx.worker.simulated", add_help=False, allow_abbrev=False)
    parser.add_argument("--tool-call-parser")
    parser.add_argument("--reasoning-parser")
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--model-path", type=Path, required=True)
    args, rest = parser.parse_known_args(argv)

    import dynamo.mocker.main as mocker

    build = mocker.build_runtime_config

    def with_parsers(engine_args: Any) -> Any:
        block_size, registration = build(engine_args)
        registration.tool_call_parser = args.tool_call_parser
        registration.reasoning_parser = args.reasoning_parser
        return block_size, registration

    mocker.build_runtime_config = with_parsers
    model = args.model_path if args.chat_template is None else with_template(args.model_path, args.chat_template)
    sys.argv = [sys.argv[0], "--model-path", str(model), *rest]
    mocker.main()


def with_template(model: Path, template: Path) -> Path:
    """A new temporary directory with links to the files of ``model`` and with another chat template."""
    directory = Path(tempfile.mkdtemp(prefix="model-"))  # in TMPDIR, which is removed with the topology
    for file in model.resolve().iterdir():
        if file.name != _TEMPLATE:
            (directory / file.name).symlink_to(file)
    shutil.copyfile(template, directory / _TEMPLATE)
    return directory


if __name__ == "__main__":
    main(sys.argv[1:])
