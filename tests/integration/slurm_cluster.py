"""Two Slurm nodes on one machine: slurmctld and two slurmd from the distribution's packages, each node in network and
UTS namespaces of its own, joined by a veth pair.

Needs root, and the packages slurmctld, slurmd, slurm-client and munge; :func:`lacks` says what is missing. All daemons
run in the foreground as children of the test, and the namespaces live by their holders: nothing outlives :meth:`close`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

NODES = ("node1", "node2")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
DEVICE = "fabric0"
_PORTS = {"slurmctld": 6827, "slurmd": 6828}  # in the namespaces: nobody else's
_CONF = """\
ClusterName=trtx
SlurmctldHost=node1(10.78.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPort={slurmctld}
SlurmdPort={slurmd}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=30
MessageTimeout=30
{nodes}
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE
"""
# UCX looks for devices in /sys, which shows those of the namespace that mounted it; slurmd wants its cgroups there.
_PREPARE = """\
hostname "$1"
ip link set lo up
mkdir -p "$2/cgroup-$1"
mount --rbind /sys/fs/cgroup "$2/cgroup-$1"
mount -t sysfs sysfs /sys
mount --rbind "$2/cgroup-$1" /sys/fs/cgroup
echo
exec sleep infinity
"""
_CGROUP = """\
CgroupPlugin=cgroup/v1
ConstrainCores=no
ConstrainDevices=no
ConstrainRAMSpace=no
ConstrainSwapSpace=no
"""


def lacks() -> str | None:
    """What this machine has not that two Slurm nodes need, in a sentence; None where it has all."""
    packages = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
    packages |= {"etcd": "etcd-server", "nats-server": "nats-server", "ip": "iproute2", "curl": "curl"}
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [package for name, package in packages.items() if shutil.which(name, path=path) is None]:
        return f"the packages {', '.join(missing)} are not installed"
    if os.geteuid() != 0:
        return "namespaces, slurmd and munged need root here"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"namespaces can't be made ({tried.stderr.strip()})"


class SlurmCluster:
    """Started by the constructor; ``directory`` gets its configuration, state and logs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._holders: list[subprocess.Popen[bytes]] = []
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        (self.directory / "state").mkdir(parents=True)
        for name in NODES:
            (self.directory / f"spool-{name}").mkdir()
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-ec", _PREPARE, "sh", name, str(self.directory)],
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self._holders.append(holder)
            assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        one, two = (str(holder.pid) for holder in self._holders)
        _run(["ip", "link", "add", DEVICE, "netns", one, "type", "veth", "peer", "name", DEVICE, "netns", two])
        for index, address in enumerate(ADDRESSES):
            _run(self.inside(index, "ip", "address", "add", f"{address}/24", "dev", DEVICE))
            _run(self.inside(index, "ip", "link", "set", DEVICE, "up"))
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs=8 RealMemory=1000 Gres=gpu:2 State=UNKNOWN"
            for name, address in zip(NODES, ADDRESSES, strict=True)
        )
        self.conf.write_text(_CONF.format(directory=self.directory, nodes=nodes, **_PORTS))
        (self.directory / "cgroup.conf").write_text(_CGROUP)
        (self.directory / "gres.conf").write_text("".join(f"Name=gpu File={self._gpu(index)}\n" for index in (0, 1)))
        at = self.directory
        self._daemon(
            "munged",
            [
                *("munged", "--foreground", "--force", f"--socket={at}/munge.socket", f"--key-file={key}"),
                *(f"--pid-file={at}/munged.pid", f"--log-file={at}/munged.log", f"--seed-file={at}/munged.seed"),
            ],
        )
        self._until("munged answers", lambda: (at / "munge.socket").exists())
        self._daemon("slurmctld", self.inside(0, "slurmctld", "-D", "-f", str(self.conf)))
        for index, name in enumerate(NODES):
            self._daemon(f"slurmd-{name}", self._inside_whole(index, "slurmd", "-D", "-N", name, "-f", str(self.conf)))
        self._until("both nodes are idle", lambda: self.tell("sinfo", "-h", "-o", "%t %D").split() == ["idle", "2"])

    def _gpu(self, index: int) -> Path:
        """What Slurm takes for a GPU: any device will do, as it counts them and hands out their indices."""
        path = self.directory / f"gpu{index}"
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        return path

    @property
    def conf(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}

    def inside(self, node: int, *command: str) -> list[str]:
        """``command`` in the network of a node, under its name."""
        return ["nsenter", "--target", str(self._holders[node].pid), "--net", "--uts", "--", *command]

    def _inside_whole(self, node: int, *command: str) -> list[str]:
        """With its /sys too, which changes the working directory."""
        return ["nsenter", "--target", str(self._holders[node].pid), "--net", "--uts", "--mount", "--", *command]

    def tell(self, *command: str) -> str:
        """What one of Slurm's commands answers on the first node; empty where it fails."""
        done = subprocess.run(
            self.inside(0, *command), env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout if done.returncode == 0 else ""

    def submit(self, file: Path, directory: Path, environment: Mapping[str, str], *flags: str) -> str:
        """``sbatch``; the job's id."""
        done = subprocess.run(
            self.inside(0, "sbatch", "--parsable", *flags, str(file)),
            env={**self.environment, **environment},
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Such as RUNNING, or COMPLETED."""
        return self.tell("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()

    def exit_code(self, job: str) -> str:
        """``CODE:SIGNAL`` of the batch script."""
        words = self.tell("scontrol", "-o", "show", "job", job).split()
        return next((word.partition("=")[2] for word in words if word.startswith("ExitCode=")), "")

    def processes(self) -> dict[int, str]:
        """Command lines of all processes in the nodes' namespaces but Slurm's own daemons and the holders."""
        spaces = {_space(holder.pid) for holder in self._holders}
        own = {child.pid for child in (*self._holders, *self._daemons)}
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in own:
                continue
            with contextlib.suppress(OSError):
                if _space(int(entry.name)) in spaces:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line and not line.startswith(("slurmd", "slurmctld")):
                        found[int(entry.name)] = line
        return found

    def close(self) -> None:
        """Ends all daemons and what is left in the namespaces, by pid; the namespaces end with their holders."""
        for child in reversed(self._daemons):
            _end(child)
        if self._holders:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for holder in self._holders:
            _end(holder)
            if holder.stdout is not None:
                holder.stdout.close()

    def _daemon(self, name: str, command: Sequence[str]) -> None:
        with (self.directory / f"{name}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _until(self, what: str, ask: object, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not ask():  # type: ignore[operator]
            if time.monotonic() >= deadline or any(child.poll() is not None for child in self._daemons):
                logs = "\n".join(
                    f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}"
                    for path in sorted(self.directory.iterdir())
                    if path.suffix in (".log", ".out")
                )
                raise AssertionError(f"not within {seconds:g} s: {what}\n{logs}")
            time.sleep(0.1)


@contextlib.contextmanager
def slurm_cluster(directory: Path) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(directory)
    try:
        yield cluster
    finally:
        cluster.close()


def _space(pid: int) -> int:
    return (Path("/proc") / str(pid) / "ns" / "net").stat().st_ino


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
