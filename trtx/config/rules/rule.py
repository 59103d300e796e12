"""What a rule is, and what it looks at."""

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

# Counted over 852 worker configs, 423 prefill/decode pairs among them, of 429 recipe files.
RECIPES = "InferenceX@843c6254, srt-slurm@c88ef731"
PREFILL_DECODE: tuple[Role, ...] = ("prefill", "decode")
LLM_ROLES: tuple[Role, ...] = ("agg", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What rules ask of a model. ``context_length`` in tokens, prompt and output together."""

    architecture: str
    context_length: int | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """One role's resolved config under one version. ``overridden``: paths that ``--set`` gave. ``gpus``: names."""

    role: Role
    values: Mapping[str, Any]
    source: str
    version: SchemaVersion
    model: ModelFacts | None = None
    gpus: tuple[str, ...] = ()
    overridden: Collection[str] = ()

    def get(self, path: str) -> Any:
        """The value of ``a.b``, or the version's default where nothing sets it; None below a section that is off."""
        node: Any = self.values
        for depth, part in enumerate(path.split(".")):
            if not isinstance(node, Mapping):
                return None
            if part not in node:
                return schema.default(path, self.version, given=depth)
            node = node[part]
        return node

    def has(self, path: str) -> bool:
        """Whether the config itself says something here, ``null`` included."""
        node: Any = self.values
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return False
            node = node[part]
        return True

    def is_given(self, path: str) -> bool:
        """Whether ``--set`` gave it, or a section around it."""
        return self.has(path) and given_path(self.overridden, path) is not None

    def says(self, path: str) -> str:
        """``max_num_tokens 8192 (decode, engine_configs/qwen3/decode.yaml)``."""
        return f"{path} {self.value_of(path)}"

    def value_of(self, path: str) -> str:
        """``8192 (decode, --set)``: a value, whose it is, and where it is from."""
        origin = "--set" if self.is_given(path) else self.source if self.has(path) else "default"
        return f"{_yaml(self.get(path))} ({self.role}, {origin})"

    def set(self, path: str, value: object) -> str:
        """The option that sets a field of this role."""
        return f"--set {shlex.quote(f'{self.role}.{path}={_yaml(value)}')}"

    @property
    def batch_size(self) -> int | None:
        return _whole(self.get("max_batch_size"))

    @property
    def num_tokens(self) -> int | None:
        return _whole(self.get("max_num_tokens"))

    @property
    def draft_length(self) -> int:
        """Tokens that speculation drafts a step; 0 without speculation or where the engine chooses."""
        for name in ("max_draft_len", "num_nextn_predict_layers"):
            if length := _whole(self.get(f"speculative_config.{name}")):
                return length
        return 0

    @property
    def speculates(self) -> bool:
        return self.get("speculative_config") is not None

    @property
    def graph_batch(self) -> int:
        """The largest batch with a CUDA graph of its own; 0 where graphs are off. Unset sizes reach 128."""
        if self.has("cuda_graph_config") and self.get("cuda_graph_config") is None:
            return 0
        sizes = self.get("cuda_graph_config.batch_sizes")
        return max(sizes) if sizes else _whole(self.get("cuda_graph_config.max_batch_size")) or 128

    @property
    def transceiver_runtime(self) -> Literal["CPP", "PYTHON"] | None:
        """None where the version chooses (``auto``)."""
        runtime = self.get("cache_transceiver_config.transceiver_runtime") or "CPP"
        return "CPP" if runtime == "CPP" else "PYTHON" if runtime == "PYTHON" else None

    @property
    def world_size(self) -> int:
        """GPUs of one worker: expert parallelism does not multiply it."""
        if self.get("backend") == "_autodeploy":
            return _whole(self.get("world_size")) or 1
        names = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        sizes = [_whole(self.get(name)) or 1 for name in names]
        return sizes[0] * sizes[1] * sizes[2]

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt: what fits a sequence and, where prompts are not chunked, one step."""
        longest, step = self.longest_sequence, self.num_tokens
        if longest is None or step is None or self.get("enable_chunked_prefill"):
            return longest
        return min(longest, step)

    @property
    def longest_sequence(self) -> int | None:
        """Tokens of the longest sequence, prompt and output, that this worker takes, where that is known."""
        bounds = (_whole(self.get("max_seq_len")), self.model.context_length if self.model else None)
        return next((bound for bound in bounds if bound is not None), None)


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule broken at ``path``. ``fix`` is None for the paths that the rule calls unmendable, and for no other.
    ``severity`` softens the rule's own where a published config does the same."""

    path: str
    message: str
    fix: str | None
    severity: Severity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRule:
    """Holds for each role of ``roles`` by itself. ``unmendable``: the paths at which no option mends it, since a person
    has to choose. ``every_engine``: the embedded engine needs it as well; the others bind TensorRT-LLM alone and are
    notes elsewhere. ``only_engine``: with another one it would not even be true."""

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
        """Whose configs the check takes, each time that it is made."""
        return tuple((role,) for role in self.roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRule:
    """Holds between two roles that are served together."""

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
