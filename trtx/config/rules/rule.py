"""The types of the rules: the subject of a check, a violation, and the rule records."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from trtx.config import schema
from trtx.config.engine_config import given_path
from trtx.config.findings import Severity
from trtx.config.topology import Role
from trtx.config.versions import SchemaVersion

# The counts in the evidence are over 429 recipe files: 852 worker configs, with 423 prefill/decode pairs among them.
RECIPES = "InferenceX@843c6254, srt-slurm@c88ef731"
PREFILL_DECODE: tuple[Role, ...] = ("prefill", "decode")
LLM_ROLES: tuple[Role, ...] = ("agg", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model that rules use. ``context_length``: tokens of prompt and output together."""

    architecture: str
    context_length: int | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """The resolved config of one role under one version.

    ``overridden``: the paths that ``--set`` assigned. ``gpus``: the names of the GPUs.
    """

    role: Role
    values: Mapping[str, Any]
    source: str
    version: SchemaVersion
    model: ModelFacts | None = None
    gpus: tuple[str, ...] = ()
    overridden: Collection[str] = ()

    def get(self, path: str) -> Any:
        """Returns the value at ``a.b``, or the version's default if it is unset; None inside a disabled section."""
        node: Any = self.values
        for depth, part in enumerate(path.split(".")):
            if not isinstance(node, Mapping):
                return None
            if part not in node:
                return schema.default(path, self.version, given=depth)
            node = node[part]
        return node

    def has(self, path: str) -> bool:
        """Returns whether the config itself sets ``path``, even to ``null``."""
        node: Any = self.values
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return False
            node = node[part]
        return True

    def is_given(self, path: str) -> bool:
        """Returns whether ``--set`` assigned ``path`` or a section around it."""
        return self.has(path) and given_path(self.overridden, path) is not None

    def says(self, path: str) -> str:
        """Formats a field, such as ``max_num_tokens 8192 (decode, engine_configs/qwen3/decode.yaml)``."""
        return f"{path} {self.value_of(path)}"

    def value_of(self, path: str) -> str:
        """Formats a field's value with its role and its source, such as ``8192 (decode, --set)``."""
        origin = "--set" if self.is_given(path) else self.source if self.has(path) else "default"
        return f"{_yaml(self.get(path))} ({self.role}, {origin})"

    def set(self, path: str, value: object) -> str:
        """Returns the ``--set`` option that assigns ``value`` to a field of this role, quoted for a shell."""
        return f"--set {shlex.quote(f'{self.role}.{path}={_yaml(value)}')}"

    @property
    def batch_size(self) -> int | None:
        return _whole(self.get("max_batch_size"))

    @property
    def num_tokens(self) -> int | None:
        return _whole(self.get("max_num_tokens"))

    @property
    def draft_length(self) -> int:
        """The number of draft tokens per step; 0 without speculation, or if the engine chooses the number."""
        for name in ("max_draft_len", "num_nextn_predict_layers"):
            if length := _whole(self.get(f"speculative_config.{name}")):
                return length
        return 0

    @property
    def speculates(self) -> bool:
        return self.get("speculative_config") is not None

    @property
    def graph_batch(self) -> int:
        """The largest batch size with a CUDA graph; 0 if graphs are disabled. The default sizes go up to 128."""
        if self.has("cuda_graph_config") and self.get("cuda_graph_config") is None:
            return 0
        sizes = self.get("cuda_graph_config.batch_sizes")
        return max(sizes) if sizes else _whole(self.get("cuda_graph_config.max_batch_size")) or 128

    @property
    def transceiver_runtime(self) -> Literal["CPP", "PYTHON"] | None:
        """The transceiver's runtime; None if the version chooses it (``auto``)."""
        runtime = self.get("cache_transceiver_config.transceiver_runtime") or "CPP"
        return "CPP" if runtime == "CPP" else "PYTHON" if runtime == "PYTHON" else None

    @property
    def world_size(self) -> int:
        """The number of GPUs of one worker. Expert parallelism uses the same GPUs and does not increase it."""
        if self.get("backend") == "_autodeploy":
            return _whole(self.get("world_size")) or 1
        names = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        sizes = [_whole(self.get(name)) or 1 for name in names]
        return sizes[0] * sizes[1] * sizes[2]

    @property
    def longest_prompt(self) -> int | None:
        """The longest prompt in tokens: it must fit in a sequence and, without chunked prefill, in one step."""
        longest, step = self.longest_sequence, self.num_tokens
        if longest is None or step is None or self.get("enable_chunked_prefill"):
            return longest
        return min(longest, step)

    @property
    def longest_sequence(self) -> int | None:
        """The longest sequence in tokens, prompt and output, that this worker accepts; None if it is not known."""
        bounds = (_whole(self.get("max_seq_len")), self.model.context_length if self.model else None)
        return next((bound for bound in bounds if bound is not None), None)


@dataclass(frozen=True, slots=True)
class Breach:
    """A violation of a rule at ``path``.

    ``fix`` is None exactly for the paths that the rule lists as unmendable. ``severity`` lowers the rule's own severity
    if a published config has the same violation.
    """

    path: str
    message: str
    fix: str | None
    severity: Severity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRule:
    """A rule for the config of each role in ``roles`` by itself.

    ``unmendable``: the paths where no single option resolves a violation, because the user has to choose.
    ``every_engine``: the torch engine needs the rule as well; a violation of any other rule is an error only on
    TensorRT-LLM and a note elsewhere. ``only_engine``: the rule is false for every other engine and is not checked
    there.
    """

    id: str
    roles: tuple[Role, ...]
    severity: Severity
    reason: str
    evidence: str
    check: Callable[[Subject], Iterable[Breach]]
    unmendable: tuple[str, ...] = ()
    every_engine: bool = False
    only_engine: str | None = None

    @property
    def sides(self) -> tuple[tuple[Role, ...], ...]:
        """The roles whose configs are the arguments of ``check``, one tuple for each call."""
        return tuple((role,) for role in self.roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRule:
    """A rule between the configs of two roles in the same topology. The fields mean the same as in RoleRule."""

    id: str
    pairs: tuple[tuple[Role, Role], ...] = (("prefill", "decode"),)
    severity: Severity = "error"
    reason: str
    evidence: str
    check: Callable[[Subject, Subject], Iterable[Breach]]
    unmendable: tuple[str, ...] = ()
    every_engine: bool = False
    only_engine: str | None = None

    @property
    def sides(self) -> tuple[tuple[Role, ...], ...]:
        return self.pairs


Rule = RoleRule | PairRule


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...").strip()


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
