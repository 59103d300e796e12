"""nginx of the distribution as a process of a test, on loopback, with an exported configuration in it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import until
from services import needs

_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass(frozen=True)
class Nginx:
    directory: Path

    @property
    def tried(self) -> list[tuple[str, str, str, str]]:
        """Of each request that has ended: its URI, status, and the addresses and statuses of the frontends asked."""
        lines = (self.directory / "access.log").read_text().splitlines()
        return [tuple(line.split("|")) for line in lines]  # type: ignore[misc]

    def errors(self) -> str:
        return (self.directory / "error.log").read_text()


@contextlib.contextmanager
def running_nginx(directory: Path, exported: Path, port: int) -> Iterator[Nginx]:
    """nginx with the file ``exported``, which has it listen on ``port``, until the block is left."""
    program = needs("nginx", "nginx-light")
    directory.mkdir()
    temporary = "".join(f"    {name}_temp_path {directory}/{name};\n" for name in _TEMPORARY)
    main = directory / "nginx.conf"
    main.write_text(
        f"daemon off;\nworker_processes 2;\npid {directory}/pid;\nerror_log {directory}/error.log info;\n"
        + ("user root;\n" if os.geteuid() == 0 else "")
        + "events { worker_connections 256; }\nhttp {\n"
        + temporary
        + "    log_format tried '$request_uri|$status|$upstream_addr|$upstream_status';\n"
        + f"    access_log {directory}/access.log tried;\n"
        + f"    include {exported};\n}}\n"
    )
    process = subprocess.Popen(
        [program, "-c", str(main), "-p", str(directory), "-e", str(directory / "error.log")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:

        def listens() -> bool:
            if process.poll() is not None:
                assert process.stderr is not None
                raise AssertionError(f"nginx ended:\n{process.stderr.read().decode()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
            return False

        until("nginx listens", listens)
        yield Nginx(directory)
    finally:
        process.terminate()  # at once; its workers end with it
        process.wait(20)
        assert process.stderr is not None
        process.stderr.close()
