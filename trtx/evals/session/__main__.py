"""``python -m trtx.evals.session <fd>``: reads the job and endpoints as lines from stdin, writes messages to fd.

It ends when stdin ends, and the kernel kills it when its parent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from trtx.errors import TrtxError, UsageError
from trtx.evals.messages import Endpoint, EvalFailed, EvalJob, TasksLoaded, TopologyScored, Up, from_line, to_line
from trtx.garbage import nothing_of_it_is_garbage
from trtx.text import torch_hidden

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # otherwise it logs a line per request
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as up:

        def tell(message: Up) -> None:
            up.write(to_line(message))

        try:
            _serve(tell)
        except BrokenPipeError:
            sys.exit(1)  # the launcher has closed its end
        except Exception as error:
            traceback.print_exc()
            tell(_failure(error))
            sys.exit(1)
    sys.stderr.flush()
    os._exit(0)  # everything is written; unloading the libraries takes a while


def _serve(tell: Callable[[Up], None]) -> None:
    job = from_line(sys.stdin.readline())
    assert isinstance(job, EvalJob)
    try:
        with nothing_of_it_is_garbage():
            from trtx.evals.session.asking import TopologyTasks
            from trtx.evals.session.loading import load_tasks
            from trtx.evals.session.model import ServedModel
    except ModuleNotFoundError as error:
        raise UsageError(
            f"trtx eval needs the package {error.name}, which is not installed; install it with pip install "
            "'trtx[eval]'"
        ) from error
    model = ServedModel(_tokenizer(job))
    tasks = load_tasks(job, model)
    tell(TasksLoaded({one.name: len(one.documents) for one in tasks.tasks}, tasks.metrics, tasks.shares))
    for line in sys.stdin:
        endpoint = from_line(line)
        assert isinstance(endpoint, Endpoint)
        asyncio.run(TopologyTasks(job, tasks, model, endpoint, tell).run())
        tell(TopologyScored(endpoint.topology))


def _tokenizer(job: EvalJob) -> Any:
    """The tokenizer, loaded as in lm-eval's hf model."""
    if job.tokenizer is None:
        return None
    with contextlib.nullcontext() if _may_need_torch(job) else torch_hidden():
        from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(job.tokenizer, use_fast=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"the tokenizer in {job.tokenizer} can't be read ({reason}); name another") from error


def _may_need_torch(job: EvalJob) -> bool:
    """Whether a metric, such as bert_score, may need torch; trtx's own tasks don't."""
    from trtx.evals.session.loaded_tasks import OWN_TASKS

    own = {"trtx", *(path.stem for path in OWN_TASKS.glob("*.yaml"))}
    return job.task_dir is not None or not own.issuperset(job.tasks) or "torch" in sys.modules


def _failure(error: Exception) -> EvalFailed:
    if type(error).__name__ == "ServerGone":
        return EvalFailed("gone", str(error))
    if isinstance(error, TrtxError):
        return EvalFailed("usage", str(error))
    return EvalFailed("crash", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
