"""Decides which parts of a plan may pass through etcd: none that names code, environment variables or files.

Anyone with write access to etcd could otherwise make every joining host load code. So such parts are refused when a
plan is published, and again when it is read, because the writer is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trtx.config import Role, TopologySpec
from trtx.config.wording import quoted, shown
from trtx.errors import UsageError

# Flags of dynamo.frontend 1.6.1 that tune routing. Others load code (--frontend-route-extension), trust a model's code
# (--trust-remote-code), or name files (--dump-config-to, --router-policy-config, --router-tracking-key-file).
_ROUTER_FLAGS = frozenset(
    {
        "--active-decode-blocks-threshold", "--active-prefill-tokens-threshold",
        "--active-prefill-tokens-threshold-frac", "--admission-control", "--enforce-disagg", "--kv-cache-block-size",
        "--load-aware", "--migration-limit", "--migration-max-seq-len", "--router-assume-kv-reuse",
        "--router-decode-active-request-weight", "--router-disk-cache-hit-weight", "--router-event-threads",
        "--router-host-cache-hit-weight", "--router-kv-events", "--router-kv-overlap-score-credit",
        "--router-kv-overlap-score-credit-decay", "--router-kv-overlap-score-weight", "--router-min-initial-workers",
        "--router-predicted-ttl-secs", "--router-prefill-load-model", "--router-prefill-load-scale",
        "--router-queue-policy", "--router-queue-threshold", "--router-replica-sync",
        "--router-session-affinity-ttl-secs", "--router-temperature", "--router-track-active-blocks",
        "--router-track-output-blocks", "--router-track-prefill-tokens", "--router-tracking-hash",
        "--router-tracking-key-id", "--router-ttl-secs", "--shared-cache-multiplier", "--shared-cache-type",
    }
)  # fmt: skip
# TensorRT-LLM arguments that are refused, at any depth.
_ENGINE_FIELDS = frozenset(
    {
        "batched_logits_processor", "calibration_file_path", "checkpoint_loader", "connector_module",
        "connector_scheduler_class", "connector_worker_class", "custom_tokenizer", "decoding_config",
        "disk_cache_path", "draft_checkpoint_loader", "drafter", "env_overrides", "file_prefix", "lora_dir",
        "lora_prefetch_dir", "model", "model_factory", "model_kwargs", "mpi_session", "output_directory",
        "post_processor_hook", "postprocess_tokenizer_dir", "ray_worker_extension_cls", "resource_manager", "revision",
        "server_url", "socket_path", "speculative_model_kwargs", "tokenizer", "tokenizer_kwargs", "tokenizer_revision",
        "transforms", "trust_remote_code", "yaml_extra",
    }
)  # fmt: skip
_WORD = re.compile(r"[\w.:*+-]{0,100}(/[\w.-]{1,100})?")  # a choice, a number as text, a model name of the hub; no path
_NUMBER = re.compile(r"-?[0-9.]+(e-?[0-9]+)?")
_WAY_OUT = (
    "a plan in etcd must not name code or files, because others may write to etcd; leave it out, or start the hosts "
    "without it by trtx export"
)


def refuse_file_of_chat(spec: TopologySpec) -> None:
    """Raises UsageError for a chat template in a file, which is code to Jinja."""
    if spec.chat_template is not None:
        raise UsageError(
            f"--chat-template {shown(spec.chat_template)} can't be used over hosts, because a plan in etcd must not "
            "name code or files; save it as chat_template.jinja in the model's directory on every host"
        )


def check_publishable(spec: TopologySpec, engine_configs: Mapping[Role, Mapping[str, Any]]) -> None:
    """Raises UsageError for router arguments and engine config fields that hosts must not accept from one another."""
    refuse_file_of_chat(spec)
    for word in spec.router_args:
        flag = word.partition("=")[0]
        # exact names only: an abbreviation may mean another flag
        known = {flag, f"--{flag.removeprefix('--no-')}"} & _ROUTER_FLAGS
        if flag.startswith("-") and not known and not _NUMBER.fullmatch(flag):
            raise UsageError(f"--router-args has {shown(flag)}, but {_WAY_OUT}")
    for role, values in engine_configs.items():
        _check(values, role)


def _check(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for name, entry in value.items():
            _check_text(str(name), where)
            # False or null means that the feature is not used.
            if name in _ENGINE_FIELDS and entry not in (None, False):
                raise UsageError(f"the engine config has {shown(where)}.{name}, and {_WAY_OUT}")
            _check(entry, f"{where}.{name}")
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _check(entry, where)
    elif isinstance(value, str):
        _check_text(value, where)


def _check_text(text: str, where: str) -> None:
    if not _WORD.fullmatch(text) or text.startswith(".") or ".." in text:
        raise UsageError(f"the engine config has {quoted(text)} in {shown(where)}, and {_WAY_OUT}")
