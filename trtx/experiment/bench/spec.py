"""The specification of a run: modes, topology, load and gate, from a sweep file and flags."""

from __future__ import annotations

import json
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trtx.bench import LoadSpec
from trtx.bench.documents import problem
from trtx.config import Mode, TopologySpec
from trtx.config.hosts import Certificates, Password, parse_auth
from trtx.config.option_field import OptionField
from trtx.config.strict_json import validate_strictly
from trtx.config.strict_yaml import read_yaml
from trtx.config.topology import Name, in_topology, refuse_idle
from trtx.config.wording import a_kind, quoted, shown, shown_address
from trtx.errors import UsageError
from trtx.experiment.bench.axes import Axes, NamedTopology, expand, refuse_replaced
from trtx.experiment.gate_spec import GateSpec
from trtx.experiment.scoring_spec import ScoringSpec, in_keys
from trtx.planes.credentials import EtcdAuth, check_endpoints
from trtx.planes.secret_files import judge_secrets, look_at_secrets
from trtx.topology import body_mib

MAX_GPUS = 100_000  # at one address
MAX_CELLS = 10_000  # limits the cost of a typing mistake
ATTACHED = "attached"  # mode of a deployment that trtx doesn't serve


Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]  # used as a directory name


class Attach(BaseModel):
    """A deployment that trtx measures but doesn't serve."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    model: Name | None = None  # the served model name; None: the only one in /v1/models
    tokenizer: Name | None = None  # directory or Hugging Face name; None: the model's name
    gpu_count: int | None = Field(default=None, ge=0, le=MAX_GPUS)  # None: as published by the deployment
    # Endpoints at which its workers are registered; empty: not queried.
    etcd: Annotated[tuple[str, ...], OptionField(since=7, before=[])] = Field(default=(), max_length=16)
    # Files in the format of trtx serve join.
    etcd_auth: Annotated[str | None, OptionField(since=7, before=None)] = None

    @model_validator(mode="after")
    def _etcd_and_its_files(self) -> Self:
        if self.etcd_auth is not None and not self.etcd:
            raise ValueError("etcd_auth means nothing without etcd; add it, or leave it out")
        if self.etcd:
            try:
                auth = self.etcd_files()
                check_endpoints(self.etcd, uses_tls=auth is not None and auth.ca is not None)
            except UsageError as error:
                raise ValueError(str(error)) from error
        return self

    def etcd_files(self) -> EtcdAuth | None:
        """The credentials for etcd. Raises UsageError for a kind that etcd doesn't accept."""
        if self.etcd_auth is None:
            return None
        match parse_auth("etcd_auth (--etcd-auth)", self.etcd_auth, Path.cwd()):
            case Certificates(ca=ca, certificate=certificate, key=key):
                return EtcdAuth(ca=ca, certificate=certificate, key=key)
            case Password(username=username, password_file=file):
                return EtcdAuth(username=username, password_file=file)
        raise UsageError("etcd_auth has a token, which etcd does not accept; use certificates or a password")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings if other users of this machine can access the files of ``etcd_auth``. Raises UsageError as above."""
        amiss = judge_secrets(look_at_secrets(self.etcd_files(), None))
        return tuple(str(one) for one in amiss if one.severity == "warning")

    @field_validator("url")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if "@" in value.rpartition("//")[2].partition("/")[0]:  # the URL isn't shown, because it contains a password
            raise ValueError("url has a user name or password, which would appear in every report; leave them out")
        if not _is_address(value):
            raise ValueError(
                f"url {shown_address(value)} is not an address; expected for example http://127.0.0.1:8000"
            )
        if "?" in value or "#" in value:
            address = value.partition("#")[0].partition("?")[0]
            raise ValueError(f"url {quoted(address)} has a query, which is not sent with requests; leave it out")
        return value.rstrip("/").removesuffix("/v1").rstrip("/")  # OpenAI clients are configured with the suffix /v1


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # urlsplit validates the port only on access
    except ValueError:  # such as http://[::1 or an invalid port
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable() and " " not in url


class ExperimentSpec(BaseModel):
    """The content of a sweep file; flags of the same names override it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="bench", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    modes: tuple[Mode, ...] = Field(default=("agg",), min_length=1)
    topology: TopologySpec = Field(
        default_factory=lambda: TopologySpec.model_validate({"port": 0})
    )  # its mode is set from modes, one after the other
    axes: Axes = Field(default_factory=dict)  # topology fields with several values
    arms: dict[Label, TopologySpec] = Field(default_factory=dict)  # topologies by label, instead of modes and axes
    order: Literal["in turn", "abba"] = "in turn"  # abba: each block restarts every topology, in alternating order
    max_cells: int = Field(default=64, ge=1, le=MAX_CELLS)
    load: LoadSpec = Field(default_factory=LoadSpec)
    attach: Attach | None = None
    gate: GateSpec = Field(default_factory=GateSpec)
    # Scores every topology after its cells.
    eval: Annotated[ScoringSpec | None, OptionField(since=4, before=None)] = None

    @field_validator("modes")
    @classmethod
    def _distinct(cls, value: tuple[Mode, ...]) -> tuple[Mode, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"modes {','.join(value)} names a mode twice; expected each once")
        return value

    @model_validator(mode="after")
    def _sound(self) -> ExperimentSpec:
        if self.attach is not None:
            if shaped := [name for name, said in (("axes", self.axes), ("arms", self.arms)) if said]:
                raise ValueError(
                    f"{shaped[0]} configure what trtx serves, but attach measures a running server; leave them out"
                )
        elif self.topology.port and len(self.topologies) > 1:
            raise ValueError(
                f"port {self.topology.port} can't serve {' and '.join(one.label for one in self.topologies)} of one "
                "run; leave the port out, and each topology takes a free one"
            )
        for one in self.topologies if self.load.image_batch_size else ():
            self._refuse_images_beyond(one)
        self._refuse_unstreamed()
        if self.cell_count > self.max_cells:
            raise ValueError(
                f"{len(self.labels)} topologies at {self.load.load_count} loads make {self.cell_count} cells, and "
                f"max_cells is {self.max_cells}; remove values from an axis, or raise max_cells"
            )
        return self

    def _refuse_unstreamed(self) -> None:
        """Raises ValueError if the gate judges a streaming metric although the load doesn't stream."""
        judged = [objective.metric for objective in self.gate.objectives]
        judged += self.gate.compared if self.gate.limit is not None else ()
        if not self.load.streaming and (lacking := [metric.name for metric in judged if metric.figure.of_stream]):
            raise ValueError(
                f"gate judges {', '.join(lacking)}, which only streamed answers have, but load.streaming is false; "
                "judge request_latency or a throughput, or set load.streaming to true"
            )

    def _refuse_images_beyond(self, topology: NamedTopology) -> None:
        """Raises ValueError if requests have more or larger images than the topology's workers accept."""
        load, media = self.load, topology.spec.media
        count = load.image_batch_size * load.session_turns_mean  # a turn's prompt includes all earlier turns
        if count > media.max_images:
            raise ValueError(
                f"load.image_batch_size makes requests of {count} images, and media.max_images of {topology.label} is "
                f"{media.max_images}; ask for fewer, or allow more"
            )
        pixels = load.image_width_mean * load.image_height_mean
        if pixels > media.max_image_pixels:
            raise ValueError(
                f"load.image_width_mean and image_height_mean make images of {pixels} pixels, and "
                f"media.max_image_pixels of {topology.label} is {media.max_image_pixels}; ask for smaller ones, or "
                "allow more"
            )
        self._refuse_bytes_beyond(topology, count)

    def _refuse_bytes_beyond(self, topology: NamedTopology, images: int) -> None:
        """Raises ValueError if image files are too large: aiperf sends each in its request, as a data: URL."""
        media, least = topology.spec.media, self.load.least_image_bytes
        if least > media.max_media_bytes:
            raise ValueError(
                f"load.image_width_mean and image_height_mean make files of {least} bytes at least, and "
                f"media.max_media_bytes of {topology.label} is {media.max_media_bytes}; ask for smaller images, or for "
                "image_format jpeg, or allow more"
            )
        body, most = images * (-(-least // 3) * 4), body_mib(media)
        if body > most << 20:
            raise ValueError(
                f"load.image_batch_size makes requests of {body} bytes at least, with {images} images in each, and the "
                f"frontend of {topology.label} takes bodies of {most} MiB; ask for fewer or smaller images, or raise "
                "media.max_media_bytes, from which that limit follows"
            )

    @property
    def topologies(self) -> tuple[NamedTopology, ...]:
        """The topologies that trtx serves and measures in turn; empty for an attached run."""
        if self.attach is not None:
            return ()
        if self.arms:
            return tuple(NamedTopology(label, spec) for label, spec in self.arms.items())
        return expand(self.modes, self.topology, self.axes)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of everything that is measured, as in the report."""
        return (ATTACHED,) if self.attach is not None else tuple(one.label for one in self.topologies)

    @property
    def cell_count(self) -> int:
        return len(self.labels) * self.load.load_count

    def to_json(self) -> dict[str, Any]:
        """Plain values, including the loads that result from defaults."""
        document = self.model_dump(mode="json")
        document["load"]["cells"] = [asdict(load) for load in self.load.loads]
        document["load"]["prompts"] = self.load.said
        document["topologies"] = list(self.labels)
        return document


def _refuse_what_yaml_blurs(document: dict[str, Any], path: Path | None) -> None:
    """Refuses two YAML pitfalls: an ``eval:`` whose lines are all commented out, and ``true`` in place of a number."""
    if "eval" in document and document["eval"] is None:
        raise UsageError(f"{_source(path)}eval is empty; expected tasks below it, such as tasks: [trtx], or no eval")
    models: dict[str, type[BaseModel]] = {"load": LoadSpec, "gate": GateSpec, "eval": ScoringSpec}
    for part, model in models.items():
        said = document.get(part)
        for name, value in said.items() if isinstance(said, dict) else ():
            field = model.model_fields.get(name)
            takes = "" if field is None else str(field.annotation)
            values = value if isinstance(value, list) else [value]
            if any(isinstance(one, bool) for one in values) and not any(kind in takes for kind in ("bool", "Any")):
                said_so = shown(json.dumps(value, default=str, ensure_ascii=False))
                raise UsageError(f"{_source(path)}{part}.{name} is {said_so}; expected no boolean")


def load_sweep(path: Path | None, overrides: dict[str, Any]) -> ExperimentSpec:
    """Reads a sweep file, or uses the defaults, and merges ``overrides`` into it. Raises UsageError that names
    the key.
    """
    document: Any = (
        None if path is None else read_yaml(path, "sweep file", "a YAML file with keys such as modes and load")
    )
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise UsageError(f"sweep file {shown(path)} holds {a_kind(document)}; expected keys such as modes and load")
    if path is not None:
        _refuse_unused(document, path, narrowed="modes" in overrides)
    refuse_replaced(document, overrides, _source(path))
    document = _laid_over(document, overrides)
    _refuse_unencoded(document, path)
    if document.get("attach") is not None and (unused := [key for key in ("modes", "topology") if key in document]):
        raise UsageError(
            f"{_source(path)}attach measures a running server, and {unused[0]} configures what trtx serves; "
            "leave one of them out"
        )
    if document.get("arms") and (unused := [key for key in ("modes", "topology", "axes") if key in document]):
        raise UsageError(
            f"{_source(path)}arms are complete topologies, so {unused[0]} would have no effect; leave one of them out"
        )
    _refuse_what_yaml_blurs(document, path)
    topology = document.get("topology") or {}
    if isinstance(topology, dict):  # other types are refused by the model
        document["topology"] = {"port": 0, **topology}
    if isinstance(arms := document.get("arms"), dict):
        document["arms"] = {label: {"port": 0, **arm} if isinstance(arm, dict) else arm for label, arm in arms.items()}
    try:
        if isinstance(document.get("eval"), dict):  # its own errors use the wording of trtx eval
            try:
                ScoringSpec.model_validate(document["eval"])
            except UsageError as error:
                raise UsageError(f"{_source(path)}{in_keys(str(error))}") from error
            except ValidationError:
                pass  # reported below, with the position in the file
        spec = validate_strictly(ExperimentSpec, document)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise UsageError(
                f"{_source(path)}it has a text with half a Unicode character (a lone surrogate); write the text again"
            ) from error
        raise UsageError(_sentence(error, path)) from error
    for one in spec.topologies:
        refuse_idle(one.spec, in_topology, _source(path))
    if spec.eval is not None and "max_drop" in spec.eval.model_fields_set and spec.gate.baseline is None:
        raise UsageError(
            f"{_source(path)}eval.max_drop means nothing without a baseline (--baseline); name one, or leave it out"
        )
    return spec


_COUNTED = {"workers": "agg", "prefill": "disagg", "decode": "disagg"}  # topology field -> the only mode that has it
_ROLE_MODES = {"agg": "agg", "prefill": "disagg", "decode": "disagg"}


def _refuse_unused(document: dict[str, Any], path: Path, *, narrowed: bool) -> None:
    """Raises UsageError for topology settings in a sweep file that none of its topologies would use.

    ``narrowed``: modes were given on the command line, so the modes of the file don't apply.
    """
    topology = document.get("topology")
    if not isinstance(topology, dict):
        return
    if "mode" in topology:
        raise UsageError(f"{_source(path)}topology.mode is not a field of a sweep; modes at the top is")
    modes = document.get("modes", ["agg"])
    if narrowed or not isinstance(modes, list):
        return
    configs, sets = topology.get("engine_configs"), topology.get("overrides")
    said = [(f"topology.{name}", mode) for name, mode in _COUNTED.items() if name in topology]
    for role, mode in _ROLE_MODES.items():
        said += [(f"topology.engine_configs.{role}", mode)] if isinstance(configs, dict) and role in configs else []
        said += [
            (f"topology.overrides {quoted(text)}", mode)
            for text in (sets if isinstance(sets, list) else ())
            if isinstance(text, str) and text.startswith(f"{role}.")
        ]
    for name, mode in said:
        if mode not in modes:
            raise UsageError(
                f"{_source(path)}{name} belongs to mode {mode}, and modes are {shown(', '.join(map(str, modes)))}; "
                "leave it out, or add the mode"
            )


_COUNTS_ENCODERS = ("encode", "encode_shared")


def _refuse_unencoded(document: dict[str, Any], path: Path | None) -> None:
    """Raises UsageError for encode-worker configs if no topology has encode workers."""
    topology, axes = document.get("topology"), document.get("axes")
    if not isinstance(topology, dict) or (isinstance(axes, dict) and axes.keys() & _COUNTS_ENCODERS):
        return
    if any(map(topology.get, _COUNTS_ENCODERS)):
        return
    configs, sets = topology.get("engine_configs"), topology.get("overrides")
    said = ["topology.engine_configs.encode"] if isinstance(configs, dict) and "encode" in configs else []
    said += [
        f"topology.overrides {quoted(text)}"
        for text in (sets if isinstance(sets, list) else ())
        if isinstance(text, str) and text.startswith("encode.")
    ]
    if said:
        raise UsageError(
            f"{_source(path)}{said[0]} is for encode workers, and topology.encode counts none; leave it out, or say "
            "encode: 1"
        )


_JOINED = ("overrides", "router_args")  # command-line values are appended to those of the file; the last one wins


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        before = merged.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[key] = _laid_over(before, value)
        elif key in _JOINED and isinstance(before, list):
            merged[key] = [*before, *value]
        else:
            merged[key] = value
    return merged


def _source(path: Path | None) -> str:
    return "" if path is None else f"{shown(path)}: "


def _sentence(error: ValidationError, path: Path | None) -> str:
    first = error.errors()[0]
    if first["type"] != "extra_forbidden":
        told = problem(error)
        return f"{_source(path)}{in_keys(told) if first['loc'][:1] == ('eval',) else told}"
    said = ".".join(str(part) for part in first["loc"])
    places, section = _places(), said.rpartition(".")[0]
    near = get_close_matches(str(first["loc"][-1]), places, n=1)
    hint = ""
    if near:
        is_here = any(place.rpartition(".")[0] == section for place in places[near[0]])
        hint = f"; did you mean {near[0] if is_here else places[near[0]][0]}?"
    return f"{_source(path)}{shown(said)} is not a field of a sweep{hint}"


def _places() -> dict[str, list[str]]:
    """Of each name of a field, its paths in a sweep file."""
    sections: dict[str, type[BaseModel]] = {
        "": ExperimentSpec,
        "topology.": TopologySpec,
        "load.": LoadSpec,
        "attach.": Attach,
        "gate.": GateSpec,
        "eval.": ScoringSpec,
    }
    found: dict[str, list[str]] = {}
    for section, model in sections.items():
        for name in model.model_fields:
            found.setdefault(name, []).append(f"{section}{name}")
    return found
