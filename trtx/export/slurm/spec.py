"""The user's description of a job besides its topology: nodes, limits, containers, the network between nodes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from trtx.config.wording import quoted

FIRST_PORT = 17_000
"""The default first port of the planned range. System ports must stay below 32768, because Dynamo 1.6.1 reads them as
signed 16-bit numbers."""
DEFAULT_MPI = "pmix"
"""srun's --mpi type in TensorRT-LLM's and Dynamo's own examples."""
_LAST_PORT = 32_000  # the maximum of first_port; the ports of 256 workers fit between it and 32768
_TIMES = (
    r"(?P<m>\d{1,6})", r"(?P<m>\d{1,6}):(?P<s>[0-5]?\d)", r"(?P<h>\d{1,5}):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)",
    r"(?P<d>\d{1,4})-(?P<h>[01]?\d|2[0-3])", r"(?P<d>\d{1,4})-(?P<h>[01]?\d|2[0-3]):(?P<m>[0-5]?\d)",
    r"(?P<d>\d{1,4})-(?P<h>[01]?\d|2[0-3]):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)",
)  # fmt: skip
"""The time formats of sbatch(1). Only ASCII digits match."""
_SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_READY_S = 1800
_EARLY_S = 60  # Slurm may send a job's signal up to this much too early
_MORE_THAN_DRAIN_S = 90
"""The time that an orderly shutdown takes before the time limit, in addition to the drain of the workers."""
MOUNT_MARKS = ":,"
"""Characters that a path mounted in a container can't contain."""
_MOUNT = re.compile(r"[^:,]+:/[^:,]*(:[a-zA-Z+=-]+)?")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,-]*")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_DEVICE = re.compile(r"[A-Za-z0-9_.:-]{1,200}(,[A-Za-z0-9_.:-]{1,200})*")
_OWN_FLAGS = (
    "--nodes", "--ntasks", "--ntasks-per-node", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gres", "--signal",
    "--job-name", "--output", "--error", "--array", "--requeue", "--no-requeue", "--time", "--partition", "--account",
    "--wrap", "--chdir", "--export", "--export-file", "--cpus-per-task", "--overcommit", "--wait", "--exclusive",
    "--oversubscribe", "--mem", "--mem-per-cpu", "--mem-per-gpu", "--time-min",
)  # fmt: skip
"""sbatch flags that the file sets itself, or that would break it."""


def _time(value: str, info: ValidationInfo) -> str:
    if _seconds(value) is None:
        raise ValueError(
            f"{info.field_name} {quoted(value)} is not a Slurm time limit; expected one such as 04:00:00 or 1-12"
        )
    return value


def _seconds(time: str) -> int | None:
    """Parses a time in sbatch's syntax into seconds; None if it is invalid."""
    for form in _TIMES:
        if found := re.fullmatch(form, time, re.ASCII):
            return sum(_SECONDS[unit] * int(digits) for unit, digits in found.groupdict().items())
    return None


def _plain(value: str, info: ValidationInfo) -> str:
    if not _PLAIN.fullmatch(value):
        raise ValueError(
            f"{info.field_name} {quoted(value)} is not a Slurm name; expected letters, digits, - _ . and ,"
        )
    return value


def _job_name(value: str, info: ValidationInfo) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{info.field_name} {quoted(value)} is not a name; expected up to 32 lower-case letters, digits and dashes"
        )
    return value


def _device(value: str, info: ValidationInfo) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError(
            f"{info.field_name} {quoted(value)} is not a network device; expected one such as eth1 or mlx5_0:1"
        )
    if "lo" in value.split(","):
        raise ValueError(f"{info.field_name} {quoted(value)} is loopback, which leads to no other node; name another")
    return value


def _printable(value: str, info: ValidationInfo) -> str:
    if not value.isprintable():
        raise ValueError(f"{info.field_name} {quoted(value)} holds a line end or a control character; leave it out")
    return value


def _directory(value: Path, info: ValidationInfo) -> Path:
    if not value.is_absolute() or not str(value).isprintable():
        raise ValueError(f"{info.field_name} {quoted(str(value))} is not an absolute path; give one that starts with /")
    return value


def _mounts(value: str, info: ValidationInfo) -> str:
    if not all(_MOUNT.fullmatch(one) for one in value.split(",")):
        raise ValueError(
            f"{info.field_name} {quoted(value)} is not a list of mounts; expected FROM:TO, such as /data:/data, with "
            "commas between several"
        )
    return value


def _sbatch(values: tuple[str, ...]) -> tuple[str, ...]:
    seen: set[str] = set()
    for value in values:
        flag = value.partition("=")[0]
        if not value.startswith("--") or not value.isprintable() or " " in flag:
            raise ValueError(
                f"sbatch {quoted(value)} is not an sbatch flag; expected the long form with its value after ="
            )
        if any(own == flag or (len(flag) > 2 and own.startswith(flag)) for own in _OWN_FLAGS):
            raise ValueError(
                f"sbatch {quoted(value)} is what the file sets itself; leave it out, or use trtx's own option"
            )
        if any(mark in value for mark in "'\"\\"):
            raise ValueError(
                f"sbatch {quoted(value)} has a quote or a backslash, which sbatch does not read as part of a value; "
                "expected one without"
            )
        if flag in seen:
            raise ValueError(f"sbatch names {flag} twice; leave one of them out")
        seen.add(flag)
    return values


_Plain = Annotated[str, AfterValidator(_plain)]
_Line = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_printable)]
_Device = Annotated[str, AfterValidator(_device)]
_Directory = Annotated[Path, AfterValidator(_directory)]


class JobSpec(BaseModel):
    """A job as requested, not yet resolved.

    Its fields have the names of the options of ``trtx export slurm``, except ``bench_files``, which follows from
    ``--bench``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, AfterValidator(_job_name)] = "serve"
    nodes: int | None = Field(default=None, ge=1, le=64)  # None: as few as possible
    gpus_per_node: int = Field(default=8, ge=0, le=64)  # 0: workers run on the CPU
    frontends: int = Field(default=1, ge=1, le=16)  # one on each of the first nodes
    time: Annotated[str, AfterValidator(_time)] = "04:00:00"
    partition: _Plain | None = None
    account: _Plain | None = None
    sbatch: Annotated[tuple[str, ...], AfterValidator(_sbatch)] = ()
    container_image: _Line | None = None
    container_mounts: Annotated[_Line, AfterValidator(_mounts)] | None = None
    python: _Line | None = None  # None: the running interpreter; in a container python3
    model_dir: _Directory | None = None  # None: the model's path on this machine
    local_dir: _Directory = Path("/tmp")
    interface: _Device | None = None  # None: the interface that Slurm uses between nodes
    ucx_devices: _Device | None = None  # None: the interface
    first_port: int = Field(default=FIRST_PORT, ge=1024, le=_LAST_PORT)
    etcd: _Line = "etcd"
    nats: _Line = "nats-server"
    mpi: _Plain | None = None  # srun's --mpi type, for engines over several nodes; None: pmix
    bench: tuple[_Line, ...] | None = None  # arguments of trtx bench; None: serve until the job ends
    bench_files: tuple[_Directory, ...] = ()  # files and directories that trtx bench reads on the first node
    lease_ttl_s: int = Field(default=600, ge=5, le=600)  # a process's lease; etcd outages may total half of it
    ready_timeout_s: int | None = Field(default=None, ge=1, le=86_400)  # None: 1800, or the remaining time if less
    drain_s: int = Field(default=15, ge=1, le=600)  # the time in which a worker completes its running requests

    @property
    def lead_s(self) -> int:
        """The time before its limit at which a job receives the signal to end."""
        return self.drain_s + _MORE_THAN_DRAIN_S

    @property
    def left_s(self) -> int:
        """The time from the start of a job to the earliest moment of the signal to end."""
        return (_seconds(self.time) or 0) - self.lead_s - _EARLY_S

    @property
    def ready_within_s(self) -> int:
        """How long the job waits until all workers serve."""
        return min(_READY_S, self.left_s) if self.ready_timeout_s is None else self.ready_timeout_s

    @model_validator(mode="after")
    def _is_mounted(self) -> JobSpec:
        if self.container_image is not None and any(mark in str(self.model_dir or "") for mark in MOUNT_MARKS):
            raise ValueError(
                f"model_dir {quoted(str(self.model_dir))} can't be mounted in a container, as it has a colon or a "
                "comma in it; name another"
            )
        return self

    @model_validator(mode="after")
    def _has_time_to_serve(self) -> JobSpec:
        least = self.lead_s + _EARLY_S
        if (_seconds(self.time) or 0) <= least:
            raise ValueError(
                f"time {quoted(self.time)} is too short to serve anything: Slurm signals the job {self.lead_s} s "
                f"before its end, or up to {_EARLY_S} s earlier; expected more than {least} s"
            )
        if self.ready_timeout_s is not None and self.ready_timeout_s > self.left_s:
            raise ValueError(
                f"ready_timeout_s {self.ready_timeout_s} is longer than the job, which Slurm signals to end "
                f"{self.left_s} s after its start (--time {self.time}); expected at most {self.left_s}, or a longer "
                "--time"
            )
        return self
