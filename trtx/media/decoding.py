"""The pool's side of one decoding process: starts it, sends it one file at a time, and ends it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from trtx.config.secrets import without_secrets
from trtx.errors import LaunchError, UsageError
from trtx.media.messages import LENGTH, Answer, DecoderReady, MediaJob, Rgb, Setup, Taken, Unusable, Up, frame

_START_S = 120.0  # a start takes a second of CPU time, on a machine that is busy loading a model
_REAP_S = 5.0
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_MESSAGE = msgspec.msgpack.Decoder(Up)
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "OMP_NUM_THREADS": "1"}


class ProcessEnded(Exception):
    """The process can't be used any more. ``had_taken``: it had received the whole file."""

    def __init__(self, text: str, *, had_taken: bool) -> None:
        super().__init__(text)
        self.had_taken = had_taken


class DecodingProcess:
    """A decoding process, made by :meth:`start`. After any exception of ``ask`` it must be killed."""

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket) -> None:
        self._process = process
        self._socket = end

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU seconds that it has used since its start, in user and kernel mode; 0 once it is gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return 0.0
        user, kernel = stat.rpartition(")")[2].split()[11:13]  # after the name, which may contain anything: proc(5)
        return (int(user) + int(kernel)) / _TICKS_A_SECOND

    @classmethod
    async def start(cls, setup: Setup) -> DecodingProcess:
        """Starts a process and waits until it can take a file.

        Raises UsageError for a setup with which no process could work, LaunchError if this process did not start.

        Call it in a thread that lives as long as the process may: the kernel kills the process when that thread ends.
        """
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            process = subprocess.Popen(
                [sys.executable, "-m", "trtx.media.decoder.process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
            )
        except OSError as error:
            ours.close()
            raise LaunchError(f"no process that decodes images can be started: {error}") from error
        finally:
            theirs.close()
        started = cls(process, ours)
        try:
            async with asyncio.timeout(_START_S):
                await started._send(frame(setup))
                first = await started._message()
            if isinstance(first, Unusable):
                raise UsageError(first.text)
            assert isinstance(first, DecoderReady), f"the first message is {type(first).__name__}"
        except (TimeoutError, OSError) as error:
            await started.kill()
            code = process.returncode
            raise LaunchError(f"a process that decodes images did not start (exit code {code}); see the log") from error
        except BaseException:
            await started.kill()
            raise
        return started

    async def ask(self, job: MediaJob, data: bytes) -> tuple[Answer, bytes | bytearray]:
        """Sends one job. Returns the answer and the bytes that follow it. Raises ProcessEnded."""
        had_taken = False
        try:
            await self._send(frame(job))
            await self._send(data)
            taken = await self._message()
            assert isinstance(taken, Taken), f"a file is answered by {type(taken).__name__}"
            had_taken = True
            answer = await self._message()
            assert not isinstance(answer, DecoderReady | Unusable | Taken), f"an answer is {type(answer).__name__}"
            size = answer.height * answer.width * 3 if isinstance(answer, Rgb) else 0
            return answer, await self._receive(size)
        except OSError as error:
            raise ProcessEnded(f"{type(error).__name__}: {error}", had_taken=had_taken) from error

    async def kill(self) -> None:
        """Kills the process and waits until it is gone."""
        self._socket.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # the process hangs in the kernel
            await asyncio.to_thread(self._process.wait, _REAP_S)

    async def _send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def _message(self) -> Up:
        (size,) = LENGTH.unpack(await self._receive(LENGTH.size))
        message: Up = _MESSAGE.decode(await self._receive(size))
        return message

    async def _receive(self, size: int) -> bytearray:
        loop = asyncio.get_running_loop()
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = await loop.sock_recv_into(self._socket, view)
            if not count:
                raise ConnectionResetError("end of file")
            view = view[count:]
        return data


def _environment() -> dict[str, str]:
    """The worker's environment, by which launcher and guardian recognise all processes of a topology."""
    environment = {**without_secrets(os.environ), **_QUIET}
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return environment
