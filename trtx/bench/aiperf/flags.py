"""Checks a load's aiperf flags with aiperf's own parser, before anything is started."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from trtx.bench.aiperf.command import command
from trtx.bench.load import LoadSpec, Target
from trtx.bench.load_field import load_flags
from trtx.bench.sent_dataset import dataset_of, is_readable
from trtx.config.option_field import field_records
from trtx.config.wording import quoted, shown
from trtx.errors import UsageError

# Fields of aiperf 0.13.0's CLIConfig that trtx sets itself, or that would make aiperf measure something other than a
# cell. Each maps to the LoadSpec field that sets it, or to None. The keys are field names, since a flag may have
# several names. Flags that a LoadSpec field declares are added by :func:`owned`.
_OWNED: Mapping[str, str | None] = {
    "model_names": None, "urls": None, "endpoint_type": None, "api_key": None, "tokenizer_name": None,
    "apply_chat_template": None, "use_server_token_count": None, "artifact_directory": None, "ui_type": None,
    "no_gpu_telemetry": None, "no_server_metrics": None, "workers_max": None, "config_file": None,
    "profile_export_prefix": None, "export_level": None, "model_selection_strategy": None,
    "streaming": "streaming", "timeout_seconds": "request_timeout_s", "extra_inputs": "extra_inputs",
    "random_seed": "seed", "concurrency": "concurrency", "request_rate": "request_rate", "arrival_pattern": "arrival",
    "arrival_smoothness": "burstiness", "request_count": "request_count",
    "warmup_request_count": "warmup_request_count", "conversation_num_dataset_entries": "request_count",
    "prompt_input_tokens_mean": "isl", "prompt_output_tokens_mean": "osl",
    "prompt_prefix_pool_size": "num_prefix_prompts", "image_batch_size": "image_batch_size",
    "image_width_mean": "image_width_mean", "image_height_mean": "image_height_mean", "image_format": "image_format",
    "image_source": "image_source", "image_source_sampling": None,
    # Fields that change lengths, the end of a trial or send times, or that run several trials in one call.
    "prompt_sequence_distribution": "isl", "isl_osl_pairs": "isl", "prompt_random_range_ratio": "isl_stddev",
    "prompt_batch_size": None, "system_prompt": "shared_system_prompt_length",
    "system_prompt_file": "shared_system_prompt_length", "prompt_prefix_user_context_length": None,
    "conversation_num": "request_count", "benchmark_duration": "request_count", "warmup_duration": None,
    "warmup_num_sessions": None, "fixed_schedule": "fixed_schedule", "disable_auto_fixed_schedule": "fixed_schedule",
    "user_centric_rate": "request_rate", "num_users": "concurrency", "request_rate_series": "request_rate",
    "unsafe_override": "scenario", "num_profile_runs": "trials", "search_space": None, "search_recipe": None,
    "sweep_variants": None, "accuracy_benchmark": None, "custom_endpoint": None,
}  # fmt: skip
# For fields without a LoadSpec field: the trtx option to use instead.
_OPTION_INSTEAD = {
    "model_names": "--model", "urls": "--url", "tokenizer_name": "--tokenizer", "artifact_directory": "-o",
    "api_key": "the variable OPENAI_API_KEY",
}  # fmt: skip
_TYPED_OTHERWISE = ("extra_inputs",)  # LoadSpec fields whose options are declared by hand
_SECRET = re.compile(r"auth|cookie|token|secret|password|api-?key", re.IGNORECASE)  # credential header names
_NOBODY = Target("http://127.0.0.1:9", "model", Path("tokenizer"), "agg")
_DETAILS = re.compile(r"^\d+ validation errors? for \w+\s+| \[type=.*", re.DOTALL)  # noise in pydantic's messages


@functools.cache
def owned() -> Mapping[str, str | None]:
    """Fields of aiperf's CLIConfig that ``--aiperf-args`` must not set -> the LoadSpec field to use instead, or None.

    Imports aiperf.
    """
    own = {flag: name for name, flag in load_flags(LoadSpec).items()}
    return {**_OWNED, **{name: own[flag] for flag, name in _fields_by_flag().items() if flag in own}}


def check_load(spec: LoadSpec) -> None:
    """Raises UsageError for a load that aiperf would refuse or fail on, before anything is started.

    Imports aiperf (one to four seconds) only if the load has additional arguments or a dataset, which trtx can't fully
    check by itself.
    """
    if not spec.aiperf_args and spec.dataset is None:
        return
    if spec.input_file is not None and not is_readable(spec.input_file):
        raise UsageError(
            f"input_file {quoted(str(spec.input_file))} can't be read; expected a file of records, or a directory"
        )
    from aiperf.config.flags.resolver import resolve_config
    from aiperf.config.loader import build_benchmark_plan

    _refuse_owned(spec.aiperf_args)
    dataset = dataset_of(spec)
    if dataset is not None and dataset.has_all_lengths and spec.osl:
        raise UsageError(
            f"osl has no effect with input_file {quoted(str(dataset.path))}, because each record sets the "
            "length of its answer; leave it out"
        )
    sent = spec if dataset is None else spec.model_copy(update={"custom_dataset_type": dataset.sent_as})
    argv = command(_NOBODY, sent, spec.loads[0], 1, Path("trial"))
    try:
        build_benchmark_plan(resolve_config(_parsed(argv[2:])))
    except Exception as error:  # any error at which aiperf would stop
        what = f"--aiperf-args {_names(spec.aiperf_args)}" if spec.aiperf_args else f"dataset {spec.dataset}"
        raise UsageError(
            f"{what}: aiperf refuses it ({_reason(error)}); correct it, or leave it out (aiperf profile --help lists "
            "its flags)"
        ) from error


def _refuse_owned(words: tuple[str, ...]) -> None:
    if not words:
        return
    # Check flag names first: if a flag lacks its value, aiperf's parser may drop it or consume the next word.
    flags = _fields_by_flag()
    fields = {flags[flag] for word in words if (flag := word.partition("=")[0]) in flags}
    _refuse_fields(fields)
    try:
        given = _parsed(("--model", "model", *words))
    except Exception as error:
        if "headers" in fields:  # aiperf's message would show the header's value
            raise UsageError(
                "--aiperf-args has a header, but aiperf can't parse all of its arguments; expected --header "
                "NAME:VALUE, and flags that aiperf profile --help lists"
            ) from error
        return  # the check of the whole command line reports this
    fields = given.model_fields_set - {"model_names"}
    if len(given.model_names) > 1:
        fields |= {"model_names"}
    for name, _ in given.headers or ():
        if _SECRET.search(str(name)):
            raise UsageError(
                f"--aiperf-args has the header {shown(name)}, which every report would show; leave it out, and export "
                "the server's key as OPENAI_API_KEY"
            )
    _refuse_fields(fields)


def _refuse_fields(fields: Set[str]) -> None:
    for name in sorted(fields & owned().keys()):
        raise UsageError(
            f"--aiperf-args sets {name}, which trtx sets itself or which would change what is measured; "
            f"{_way_out(name)}"
        )


def _way_out(name: str) -> str:
    if (field := owned()[name]) is None:
        return f"use {_OPTION_INSTEAD[name]}" if name in _OPTION_INSTEAD else "leave it out"
    if field_records(LoadSpec)[field].help or field in _TYPED_OTHERWISE:
        return f"use --{field.replace('_', '-')}, or load.{field} of a sweep file"
    return f"use load.{field} of a sweep file"


@functools.cache
def _fields_by_flag() -> Mapping[str, str]:
    """aiperf's flags as typed -> the CLIConfig field that they set. Imports aiperf."""
    from aiperf.config.flags import CLIConfig

    return {
        str(flag): name
        for name, field in CLIConfig.model_fields.items()
        for entry in field.metadata
        for flag in getattr(entry, "name", None) or ()  # cyclopts' Parameter
    }


def _names(words: tuple[str, ...]) -> str:
    """The flag names without their values, because a value may be a secret."""
    return shown(" ".join(word.partition("=")[0] for word in words if word.startswith("-")) or "without a flag")


def _parsed(words: tuple[str, ...]) -> Any:
    """aiperf's CLIConfig for the words after ``aiperf profile``."""
    from aiperf.cli import app

    _, bound, *_ = app.parse_args(("profile", *words), exit_on_error=False, print_error=False)
    return bound.arguments["cli_config"]


def _reason(error: Exception) -> str:
    text = " ".join(_DETAILS.sub("", str(error)).split())
    return shown(text or type(error).__name__, 400)
