"""Loads tasks by name with their datasets and requests. Missing parts are reported before anything is served."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from trtx.config.wording import shown
from trtx.errors import UsageError
from trtx.evals.messages import EvalJob
from trtx.evals.session.arms import with_arms
from trtx.evals.session.loaded_tasks import OWN_TASKS, LoadedTask, LoadedTasks, documents_of
from trtx.evals.session.local_files import FORMATS, problem_of, problem_of_yaml
from trtx.evals.session.model import ServedModel
from trtx.evals.session.own_rows import OWN, own_rows

logger = logging.getLogger(__name__)

# Names in TensorRT-LLM's `trtllm-eval` -> lm-eval's names.
ALIASES = {
    "cnn_dailymail": "cnn_dailymail_abisee",
    "gpqa_diamond": "gpqa_diamond_cot_zeroshot",
    "gpqa_main": "gpqa_main_cot_zeroshot",
    "gpqa_extended": "gpqa_extended_cot_zeroshot",
    "json_mode_eval": "jsonschema_bench_easy",
    "longbench_v2": "longbench2",
}
_OF_LONGBENCH = ("fuzzywuzzy", "jieba", "rouge")
_SEED = 1234  # lm-eval's seed for few-shot examples
_NEAREST = 3
_TOLD = 8  # maximum number of a folder's task names in a sentence


def load_tasks(job: EvalJob, model: ServedModel) -> LoadedTasks:
    """All tasks of ``job``, in order, with their requests. Raises UsageError with the task, what is missing, and a
    remedy.

    Reading lm-eval's 14,000 task names takes seconds and happens only if a name belongs neither to trtx nor to the task
    folder.
    """
    if job.endpoint_type == "chat" and model.tokenizer is not None and not model.tokenizer.chat_template:
        raise UsageError(
            f"the model in {model.tokenizer_name} has no chat template, which --endpoint-type chat needs; leave it "
            "out to send the prompts unchanged"
        )
    folders = [OWN_TASKS, *([_folder(job.task_dir)] if job.task_dir else [])]
    about: tuple[tuple[str, Any], ...] = () if job.tokenizer is None else (("tokenizer", job.tokenizer),)
    if any(name in OWN for name in job.tasks):
        about += (("rows", own_rows(job, model)),)
    manager = near = task_manager(tuple(map(str, folders)), about, include_defaults=False)
    if any(name not in near.all_tasks for name in job.tasks):
        manager = task_manager(tuple(map(str, folders)), about, include_defaults=True)
    found: dict[str, Task] = {}
    named: dict[str, str] = {}  # by task: the name in --tasks that led to it
    loaded = LoadedTasks()
    folder = Path(job.task_dir).resolve() if job.task_dir else None
    for name in [name if name in near.all_tasks else _known(name, manager, folder) for name in job.tasks]:
        file = _file_of(manager.task_index.get(name))
        if folder in file.parents and (problem := problem_of_yaml(file)) is not None:
            raise UsageError(f"task {name}: {problem}")
        of_name = _load(name, manager)
        loaded.groups += of_name["groups"].values()
        for task_name, task in of_name["tasks"].items():
            if task_name in found:
                raise UsageError(f"task {task_name} would be scored twice: {_twice(task_name, named[task_name], name)}")
            found[str(task_name)], named[str(task_name)] = task, name
    asked = [_with_requests(name, task, job, model) for name, task in found.items()]
    loaded.tasks += with_arms(asked, job.structured_output, model)
    return loaded


def _twice(task: str, one: str, other: str) -> str:
    """Returns why a task is loaded twice. ``one`` and ``other`` are the names in ``--tasks`` that led to it."""
    if one == other:
        return "--tasks names it by two of its names; leave one of them out"
    groups = [name for name in (one, other) if name != task]
    told = f"part of {groups[0]}, and " + ("named by itself" if len(groups) == 1 else f"of {groups[1]}")
    return f"it is {told}; leave one of them out"


@cache
def task_manager(paths: tuple[str, ...], about: tuple[tuple[str, Any], ...], *, include_defaults: bool) -> TaskManager:
    """lm-eval's task manager. ``about``: data for tasks that generate prompts. Raises UsageError for unreadable
    files.
    """
    try:
        return TaskManager(include_path=list(paths), include_defaults=include_defaults, metadata=dict(about))
    except Exception as error:  # an error of YAML, of the file system, or in a task file
        logger.exception("task folders")
        raise UsageError(f"the task files in {paths[-1]} can't be read ({_short(error)}); correct them") from error


def _folder(path: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"--task-dir {path!r} is not a directory; expected one with lm-eval's YAML files")
    return folder


def _known(name: str, manager: TaskManager, folder: Path | None) -> str:
    for candidate in (ALIASES.get(name), name):  # lm-eval's own cnn_dailymail needs a library that isn't installed
        if candidate in manager.all_tasks:
            return str(candidate)
    if folder is not None and (
        problem := next(filter(None, map(problem_of_yaml, sorted(folder.rglob("*.yaml")))), None)
    ):
        raise UsageError(f"no task is called {name!r}, and a file of --task-dir can't be read: {problem}")
    known = [*manager.all_tasks, *ALIASES]
    near = get_close_matches(name, known, n=_NEAREST, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "a folder of tasks of your own is named with --task-dir"
    if folder is not None and not near:
        own = [task for task, entry in manager.task_index.items() if folder in _file_of(entry).parents]
        hint = (
            f"--task-dir {shown(folder)} has {', '.join(sorted(own)[:_TOLD]) or 'no task'}; expected one of its names"
        )
    raise UsageError(f"no task is called {name!r}; {hint}")


def _file_of(entry: Any) -> Path:
    """The file of a task; an empty path if there is none."""
    return Path(getattr(entry, "yaml_path", None) or "")


def _load(name: str, manager: TaskManager) -> dict[str, Any]:
    try:
        found: dict[str, Any] = manager.load([name])
    except Exception as error:
        if isinstance(error, ImportError) and (package := _missing_package(error)) is not None:
            extra = "longbench" if package in _OF_LONGBENCH else "eval"
            raise UsageError(
                f"task {name} needs the package {package}, which is not installed; install it in addition to "
                f"trtx[{extra}]"
            ) from error
        # datasets and huggingface_hub (5.2, 1.x) raise errors of a dozen classes for missing data.
        logger.exception("task %s", name)
        raise UsageError(_why_not_loaded(name, manager, error)) from error
    return found


def _missing_package(error: BaseException | None) -> str | None:
    """The package that an import didn't find, also if the task raised another exception because of it."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            return error.name
        error = error.__cause__ or error.__context__
    return None


def _why_not_loaded(name: str, manager: TaskManager, error: Exception) -> str:
    """A message chosen by where in lm-eval the error was raised, since lm-eval has no exception classes of its own."""
    reason, raised_in = _short(error), {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if raised_in & {"doc_to_text", "doc_to_target", "doc_to_choice"}:
        return f"task {name}: row 0 of its dataset can't be asked ({reason}); expected every field that the task names"
    if "download" not in raised_in:
        return f"task {name} can't be loaded ({reason}); mend its file"
    if (problem := problem_of(_config_of(name, manager))) is not None:
        return f"task {name}: {problem}"
    dataset = _dataset_of(name, manager)
    cache_path = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return (
        f"task {name} needs the dataset {dataset}, which is neither in the cache {cache_path} nor to be had from the "
        f"hub ({reason}); run `hf download --repo-type dataset {dataset.split(' ')[0]}` where there is a network and "
        "bring the cache here, or name a local file: a task folder whose YAML includes the task, with dataset_path: "
        "json and dataset_kwargs: {data_files: …}"
    )


def _config_of(name: str, manager: TaskManager) -> dict[str, Any]:
    return dict(getattr(manager.task_index.get(name), "cfg", None) or {})


def _dataset_of(name: str, manager: TaskManager) -> str:
    config = _config_of(name, manager)
    path, part = config.get("dataset_path"), config.get("dataset_name")
    return f"{path} ({part})" if path and part else str(path or f"of {name}")


def _with_requests(name: str, task: Task, job: EvalJob, model: ServedModel) -> LoadedTask:
    if getattr(task, "MULTIMODAL", False):
        raise UsageError(f"task {name} has images or sound, which trtx eval does not support yet; leave it out")
    if getattr(task, "UNSAFE_CODE", False):
        raise UsageError(f"task {name} runs code that the model writes, which trtx does not allow; leave it out")
    if task.OUTPUT_TYPE != "generate_until" and model.tokenizer is None:
        raise UsageError(
            f"task {name} scores log-probabilities of tokens, and no tokenizer is on this machine; give its "
            "directory with --tokenizer"
        )
    # As in lm-eval: a task may require zero examples.
    if job.num_fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config("num_fewshot", job.num_fewshot)
    elif task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(_SEED)
    _check_rows(name, task, job.limit)
    try:
        task.build_all_requests(
            limit=job.limit,
            apply_chat_template=job.endpoint_type == "chat",
            fewshot_as_multiturn=True,
            chat_template=_template(task, job, model),
            tokenizer_name=model.tokenizer_name,
        )
    except Exception as error:
        logger.exception("task %s", name)
        raise UsageError(_why_not_built(name, task, job.limit, error)) from error
    for instance in task.instances:
        if (problem := model.problem_of(instance)) is not None:
            raise UsageError(f"task {name}: row {instance.doc_id} of its dataset can't be scored: {problem}")
    return LoadedTask(name, task, list(documents_of(task.instances, model)))


def _template(task: Task, job: EvalJob, model: ServedModel) -> Callable[..., Any] | None:
    if job.endpoint_type != "chat":
        return None
    return model.messages if task.OUTPUT_TYPE == "generate_until" else model.apply_chat_template


def _check_rows(name: str, task: Task, limit: int | None) -> None:
    """Refuses rows of a local file that lack a field. Such a field would be null, and the prompt would contain
    "None".
    """
    if task.get_config("dataset_path") not in FORMATS:
        return
    settings = {part: task.get_config(part) for part in ("dataset_path", "dataset_kwargs")}
    if (problem := problem_of(settings)) is not None:
        raise UsageError(f"task {name}: {problem}")
    wanted = sorted(set().union(*(_fields(task.get_config(part)) for part in ("doc_to_text", "doc_to_target"))))
    for row, doc in task.doc_iterator(limit=limit):
        for one in wanted:
            if one in doc and doc[one] is None:
                raise UsageError(
                    f"task {name}: row {row} of its dataset has no value for {one!r}, which the task's prompts need. "
                    "Add it, or leave the row out"
                )


def _fields(template: Any) -> set[str]:
    """Names of the row fields that a template uses."""
    if not isinstance(template, str):
        return set()
    if "{" not in template:
        return {template}
    try:
        return set(meta.find_undeclared_variables(Environment().parse(template)))
    except TemplateSyntaxError:
        return set()


def _why_not_built(name: str, task: Task, limit: int | None, error: Exception) -> str:
    """A message with the row, if processing that row alone raises an error."""
    if "larger than population" in str(error):  # from random.sample in lm-eval's sampler
        return (
            f"task {name} has fewer examples than the {task.get_config('num_fewshot')} to show before each question; "
            "ask for less with --num-fewshot"
        )
    for row, doc in task.doc_iterator(limit=limit):
        for part in (task.doc_to_text, task.doc_to_target):
            try:
                part(doc)
            except Exception as of_row:
                return f"task {name}: row {row} of its dataset can't be asked ({_short(of_row)}); mend or remove it"
    return f"task {name}: its requests can't be built ({_short(error)}); its prompts are in the session's log"


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {text[:200]}"
