"""The environment and the command line of a plan's process in a job, whose nodes are not known when the plan is made.

The plan is made with placeholder addresses, devices and directories, which are replaced by variables of the script.
``trtx/export/plan_variables.py`` has a row for each variable of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from trtx.export.plan_variables import Job, fate_in_job
from trtx.export.slurm.quoting import Shell
from trtx.export.slurm.spec import JobSpec
from trtx.topology import CHAT_TEMPLATE, ProcessSpec

ADDRESSES = tuple(f"192.0.2.{index}" for index in range(1, 255))
"""Placeholder addresses from RFC 5737, which are reserved for documentation and never assigned to a machine."""
DEVICE = "trtx0"
RUN_DIR = Path("/stand-in-for-the-run")
SCRATCH_DIR = Path("/stand-in-for-the-node")

_SERVICES: Mapping[Job, Shell] = {
    "etcd": Shell("http://${HEAD}:${REGISTRY_PORT}"),
    "NATS": Shell("nats://${HEAD}:${EVENTS_PORT}"),
}
_FLAGS: Mapping[str, Shell] = {
    "--http-host": Shell("${ADDRESS}"),
    "--model": Shell("${MODEL}"),
    "--namespace": Shell("${NAMESPACE}"),
}
"""Flags of a plan's command lines whose values are variables of the script."""


def variables(process: ProcessSpec, job: JobSpec) -> dict[str, str]:
    """Returns the environment of ``process`` in a job. Raises LookupError for a variable without a row."""
    environment: dict[str, str] = {}
    for name, value in process.env.items():
        fate = fate_in_job(name)
        if fate == "kept" or (fate == "chosen on the node" and process.role == "frontend"):  # empty for frontends
            environment[name] = value
        elif fate != "chosen on the node":
            environment[name] = _SERVICES.get(fate) or Shell(fate)
    if job.ucx_devices is not None and "UCX_NET_DEVICES" in environment:
        environment["UCX_NET_DEVICES"] = job.ucx_devices
    _check_no_stand_in(process, environment.values())
    return environment


def arguments(process: ProcessSpec) -> list[str]:
    """Returns the command of ``process`` in a job."""
    words: list[str] = [Shell("${PYTHON}")]
    before = ""
    for word in process.argv[1:]:
        if before in _FLAGS:
            words.append(_FLAGS[before])
        elif before == "--engine-config":
            words.append(Shell("${TRTX_RUN}/configs/" + f"{process.role}.yaml"))
        elif before == "--chat-template":
            words.append(Shell("${TRTX_RUN}/configs/" + CHAT_TEMPLATE))
        elif before == "--status-file":
            words.append(Shell("${TRTX_RUN}/status/" + f"{process.name}.json"))
        else:
            words.append(word)
        before = word
    if process.role != "frontend":
        words += ["--drain-seconds", Shell("${DRAIN_SECONDS}")]
    _check_no_stand_in(process, words)
    return words


def _check_no_stand_in(process: ProcessSpec, words: Iterable[str]) -> None:
    stand_ins = (str(RUN_DIR), str(SCRATCH_DIR), DEVICE, *ADDRESSES[:1])
    for word in words:
        if not isinstance(word, Shell) and any(one in word for one in stand_ins):
            raise LookupError(
                f"{process.name} would get {word!r}, a stand-in: replace it in trtx/export/slurm/stand_ins.py"
            )
