"""Validates router arguments with dynamo.frontend's own parser before anything starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from trtx.config.wording import shown
from trtx.errors import UsageError


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


class _Refused(Exception):
    pass


def check_flags(words: Sequence[str], router_mode: str, own: Sequence[str] = ()) -> None:
    """Raises UsageError for ``--router-args`` with which dynamo.frontend would exit at its start.

    ``own``: the flags that trtx adds to them.

    If there are any, this imports Dynamo's parser, which takes half a second. It repeats the three steps of
    ``parse_args`` in the ``main`` of dynamo.frontend 1.6.1, which can't be imported itself because it would set up the
    runtime's logging.
    """
    if not words:
        return
    from dynamo.frontend.frontend_args import FrontendArgGroup, FrontendConfig

    parser = _Parser(add_help=False)
    FrontendArgGroup().add_arguments(parser)
    try:
        args, unknown = parser.parse_known_args(["--router-mode", router_mode, *own, *words])
        config = FrontendConfig.from_cli_args(args)
        config.validate()
    except (_Refused, ValueError) as error:
        raise UsageError(
            f"--router-args {shown(' '.join(words))}: dynamo.frontend refuses it ({shown(error, 400)}); "
            "correct it, or leave it out"
        ) from error
    if unknown and config.chat_processor == "dynamo":  # the other chat processors have their own parsers for the rest
        raise UsageError(
            f"--router-args holds {shown(' '.join(unknown))}, which dynamo.frontend does not accept; leave it out "
            "(python -m dynamo.frontend --help lists its flags)"
        )
