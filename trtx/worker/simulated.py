"""``python -m trtx.worker.simulated``: runs Dynamo's mocker with parsers and a chat template.

The mocker has no flags for them.

The module replaces two names of ``dynamo.mocker.main`` 1.4.2, which builds the model's registration. Remove it once the
mocker has flags for them.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any


def main(argv: list[str]) -> None:
    """Runs until SIGTERM. All flags but the three of trtx are the mocker's."""
    parser = argparse.ArgumentParser(prog="python -m trtx.worker.simulated", add_help=False, allow_abbrev=False)
    parser.add_argument("--tool-call-parser")
    parser.add_argument("--reasoning-parser")
    parser.add_argument("--chat-template")
    args, rest = parser.parse_known_args(argv)

    import dynamo.mocker.main as mocker

    build = mocker.build_runtime_config

    def with_parsers(engine_args: Any) -> Any:
        block_size, registration = build(engine_args)
        registration.tool_call_parser = args.tool_call_parser
        registration.reasoning_parser = args.reasoning_parser
        return block_size, registration

    mocker.build_runtime_config = with_parsers
    mocker.EntrypointArgs = partial(mocker.EntrypointArgs, template_file=args.chat_template)
    sys.argv = [sys.argv[0], *rest]
    mocker.main()


if __name__ == "__main__":
    main(sys.argv[1:])
