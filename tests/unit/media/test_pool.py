"""The pool: a process that dies, hangs or runs out of memory costs one file, and none outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import picture_files as files
import psutil
import pytest
import video_files
from PIL import Image
from processes import freeze
from safetensors.numpy import save
from without_videos import pythonpath_without_pyav

from trtx.checkpoint import resolve_checkpoint
from trtx.media import Blob, MediaError, MediaLimits, PicturePool

pytestmark = pytest.mark.slow
PICTURE = Blob(files.saved(Image.fromarray(files.drawing()), "PNG"), "a picture")
PATIENT = MediaLimits(decode_processes=1, decode_timeout_s=300)
OWN = os.getpriority(os.PRIO_PROCESS, 0)  # these tests' own, which their processes inherit
LATER = min(19, OWN + 10)
_WAIT_S = 60.0  # for what happens at once on a machine that does nothing else


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(_WAIT_S):
        while not holds():
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def slow_file(pool: PicturePool) -> tuple[int, asyncio.Task[np.ndarray]]:
    """A file that keeps one process busy until that is killed: the process, stopped with the file in it."""
    (pid,) = pool.pids
    freeze(pid)
    # More than fits into a socket's buffer, so that the file can't be there before the process goes on.
    task = asyncio.create_task(pool.rgb(Blob(PICTURE.data + bytes(8 << 20), "a slow file")))
    await asyncio.sleep(0)
    return pid, task


async def in_decoding(pool: PicturePool) -> tuple[int, asyncio.Task[np.ndarray]]:
    """The pool's one process in the middle of a file that it has whole, stopped at a third of the work."""
    (pid,) = pool.pids
    process = psutil.Process(pid)
    blob = Blob(
        files.saved(Image.effect_noise((3000, 3000), 90).convert("RGB"), "PNG", compress_level=1), "a large one"
    )

    def worked_s() -> float:
        return sum(process.cpu_times()[:2])

    begun_s = worked_s()
    await pool.rgb(blob)
    third_s = (worked_s() - begun_s) / 3
    for _ in range(5):  # a machine that is busy elsewhere may look too late
        stop_s = worked_s() + third_s
        task = asyncio.create_task(pool.rgb(blob))
        async with asyncio.timeout(_WAIT_S):
            while worked_s() < stop_s and not task.done():
                await asyncio.sleep(0.01)
        freeze(pid)
        if not task.done():
            return pid, task
        os.kill(pid, signal.SIGCONT)
    raise AssertionError("no picture was caught while it was decoded; make it larger")


async def works(pool: PicturePool) -> None:
    np.testing.assert_array_equal(await pool.rgb(PICTURE), files.drawing())


async def refusal(answer: Awaitable[object]) -> MediaError:
    async with asyncio.timeout(_WAIT_S):
        with pytest.raises(MediaError) as refused:
            await answer
    return refused.value


async def test_a_process_that_is_killed_at_work_costs_the_file_that_it_had() -> None:
    async with PicturePool(None, PATIENT) as pool:
        pid, task = await in_decoding(pool)
        others = [asyncio.create_task(works(pool)) for _ in range(3)]
        os.kill(pid, signal.SIGKILL)
        error = await refusal(task)
        assert (error.status, "a large one ended the process" in str(error)) == (422, True)
        await asyncio.gather(*others)
        assert pool.pids and pid not in pool.pids


async def test_processes_that_decode_let_the_worker_go_first() -> None:
    async with PicturePool(None, PATIENT) as pool:
        (pid,) = pool.pids
        assert os.getpriority(os.PRIO_PROCESS, pid) == LATER
        os.kill(pid, signal.SIGKILL)
        await until(lambda: pool.pids != (pid,) or gone(pid))
        await works(pool)
        assert [os.getpriority(os.PRIO_PROCESS, one) for one in pool.pids] == [LATER]


NOTES_PRIORITY = """
import importlib.abc, os, sys
class Noting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "transformers.models.auto.image_processing_auto":
            with open(os.environ["NOTED"], "a") as file:
                print(os.getpriority(os.PRIO_PROCESS, 0), file=file)
sys.meta_path.insert(0, Noting())
"""


@pytest.mark.proof
async def test_first_pictures_do_not_wait_for_imports_at_a_low_priority_but_where_a_file_ended_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "noted"
    (tmp_path / "sitecustomize.py").write_text(NOTES_PRIORITY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTED", str(noted))
    async with PicturePool(resolve_checkpoint("synthetic:tiny-vl").path, PATIENT) as pool:
        assert noted.read_text().split() == [str(OWN)]
        os.kill(*pool.pids, signal.SIGKILL)
        await works(pool)
    assert noted.read_text().split() == [str(OWN), str(LATER)]


async def test_a_process_that_is_killed_while_idle_costs_nothing() -> None:
    async with PicturePool(None, PATIENT) as pool:
        for _ in range(2):
            (pid,) = pool.pids
            os.kill(pid, signal.SIGKILL)
            await works(pool)


async def test_a_process_that_is_killed_before_it_has_the_file_costs_nothing() -> None:
    async with PicturePool(None, PATIENT) as pool:
        pid, task = await slow_file(pool)
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        np.testing.assert_array_equal(await task, files.drawing())


async def test_a_process_that_hangs_is_replaced_and_the_machine_is_told_to_be_busy() -> None:
    limits = PATIENT.model_copy(update={"decode_timeout_s": 2.0})
    async with PicturePool(None, limits, patience=2) as pool:
        pid, task = await slow_file(pool)
        error = await refusal(task)
        told = "a slow file was not decoded after 4 s, in which its process got 0.0 s of a core"
        assert (error.status, told in str(error)) == (429, True), str(error)
        assert gone(pid)
        await works(pool)


async def test_a_picture_that_takes_too_much_computing_is_refused_and_its_process_replaced() -> None:
    """By what was computed, however long that takes on a machine that does other things too."""
    large = Blob(files.saved(Image.new("RGB", (7000, 7000)), "PNG"), "a large picture")
    async with PicturePool(None, PATIENT.model_copy(update={"decode_timeout_s": 0.1}), patience=600) as pool:
        (pid,) = pool.pids
        error = await refusal(pool.rgb(large))
        told = "a large picture was not decoded in 0.1 s of computing; send a smaller one"
        assert (error.status, str(error)) == (408, told)
        assert gone(pid)
        await works(pool)


@pytest.mark.proof
async def test_a_picture_is_not_judged_by_how_long_its_process_waited_for_a_core() -> None:
    limits = PATIENT.model_copy(update={"decode_timeout_s": 2.0})
    async with PicturePool(None, limits, patience=100) as pool:
        pid, task = await in_decoding(pool)
        await asyncio.sleep(2.5)  # longer than it may compute
        assert not task.done()
        os.kill(pid, signal.SIGCONT)
        assert (await task).shape == (3000, 3000, 3)
        assert pool.pids == (pid,)


async def test_where_no_process_comes_up_a_picture_is_refused_and_the_next_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with PicturePool(None, PATIENT) as pool:
        monkeypatch.setattr(sys, "executable", "/nowhere")
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        error = await refusal(pool.rgb(PICTURE))
        assert (error.status, "a picture was not decoded: no process" in str(error)) == (429, True), str(error)
        monkeypatch.undo()
        await works(pool)


async def test_one_that_hangs_does_not_hold_up_the_others() -> None:
    async with PicturePool(None, PATIENT.model_copy(update={"decode_processes": 2})) as pool:
        freeze(pool.pids[0])
        answers = [asyncio.create_task(pool.rgb(PICTURE)) for _ in range(6)]
        await until(lambda: sum(one.done() for one in answers) == 5)
        os.kill(pool.pids[0], signal.SIGCONT)
        await asyncio.gather(*answers)


async def test_a_picture_that_takes_too_much_memory_is_refused_and_the_next_is_not() -> None:
    limits = PATIENT.model_copy(update={"decode_memory_bytes": 64 << 20})
    async with PicturePool(None, limits) as pool:
        large = files.saved(Image.new("RGB", (7000, 7000)), "PNG")  # 147 MB of pixels below the limit of 50 million
        error = await refusal(pool.rgb(Blob(large, "a large picture")))
        assert error.status == 413
        assert f"needs more than {64 << 20} bytes of memory" in str(error) and "--decode-memory-bytes" in str(error)
        await works(pool)


async def test_no_more_wait_than_may() -> None:
    async with PicturePool(None, PATIENT.model_copy(update={"decode_queue": 2})) as pool:
        pid, first = await slow_file(pool)
        others = [asyncio.create_task(works(pool)) for _ in range(2)]
        await asyncio.sleep(0)
        for _ in range(3):
            error = await refusal(pool.rgb(PICTURE))
            assert (error.status, "2 images already wait" in str(error)) == (429, True)
        os.kill(pid, signal.SIGCONT)
        await asyncio.gather(first, *others)
        await works(pool)


async def test_a_caller_that_leaves_takes_its_place_with_it_once_its_file_is_done() -> None:
    async with PicturePool(None, PATIENT.model_copy(update={"decode_queue": 2})) as pool:
        pid, first = await slow_file(pool)
        others = [asyncio.create_task(works(pool)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in (first, *others):
            task.cancel()
        os.kill(pid, signal.SIGCONT)
        await until(lambda: pool.waiting == 0)
        await asyncio.gather(*(works(pool) for _ in range(3)))
        assert pool.pids == (pid,), "nobody's leaving is a fault of the process"


async def test_a_caller_that_leaves_when_its_answer_is_there_already_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled between the answer and its own next step, of which it hears by the future that it made first."""
    loop, answers = asyncio.get_running_loop(), list[asyncio.Future[object]]()
    future = loop.create_future

    def watched() -> asyncio.Future[object]:
        monkeypatch.undo()
        answers.append(future())
        answers[0].add_done_callback(lambda _: asked.cancel())
        return answers[0]

    blob = Blob(save({"rows": np.ones((3, 4), np.float32)}), "an embedding", "embedding")
    async with PicturePool(None, PATIENT, directory=tmp_path) as pool:
        await asyncio.sleep(0)  # its own tasks wait, each for a future
        monkeypatch.setattr(loop, "create_future", watched)
        asked = asyncio.create_task(pool.embedding(blob, hidden=4))
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert not answers[0].cancelled(), "it was answered"
        assert not [*tmp_path.iterdir()]
        given = await pool.embedding(blob, hidden=4)
        assert [Path(given.rows.path)] == [*tmp_path.iterdir()]


async def test_pictures_are_not_mixed_up() -> None:
    """300 of four sizes at three processes, a third of the callers leaving; each gets its own or none."""
    async with PicturePool(None, PATIENT.model_copy(update={"decode_processes": 3, "decode_queue": 300})) as pool:

        async def one(number: int) -> None:
            picture = Image.new("RGB", (10 + number % 4, 7), (number % 256, number // 256, 77))
            found = await pool.rgb(Blob(files.saved(picture, "PNG"), str(number)))
            np.testing.assert_array_equal(found, np.asarray(picture))

        tasks = [asyncio.create_task(one(number)) for number in range(300)]
        await asyncio.sleep(0.01)
        for task in tasks[::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert sum(result is None for result in results) >= 200


def most_memory(pid: int) -> int:
    """The most that a process ever had, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


@pytest.mark.proof
async def test_memory_stays_bounded_over_large_pictures() -> None:
    """Of the process that decodes, and of the one that asks, which gets pixels that it does not keep."""
    async with PicturePool(None, PATIENT) as pool:
        (pid,) = pool.pids
        data = files.saved(Image.new("RGB", (3000, 3000), (1, 2, 3)), "PNG")  # 27 MB of pixels
        for _ in range(3):
            await pool.rgb(Blob(data, "a large picture"))
        before = [most_memory(one) for one in (pid, os.getpid())]
        for _ in range(6):
            await pool.rgb(Blob(data, "a large picture"))
        assert pool.pids == (pid,)
        grown = [most_memory(one) - was for one, was in zip((pid, os.getpid()), before, strict=True)]
        assert max(grown) < 40 << 20, f"grew by {grown} bytes over 6 pictures of 27 MB"


async def test_closing_ends_all_processes_and_answers_everybody() -> None:
    pool = PicturePool(None, PATIENT)
    await pool.start()
    pid, first = await slow_file(pool)
    waiting = asyncio.create_task(pool.rgb(PICTURE))
    await asyncio.sleep(0)
    await pool.close()
    for task in (first, waiting):
        error = await refusal(task)
        assert (error.status, "stopping" in str(error)) == (429, True)
    assert gone(pid)
    assert (await refusal(pool.rgb(PICTURE))).status == 429


async def test_a_start_that_is_given_up_leaves_no_process() -> None:
    before = {child.pid for child in psutil.Process().children()}
    pool = PicturePool(None, PATIENT.model_copy(update={"decode_processes": 2}))
    starting = asyncio.create_task(pool.start())
    await until(lambda: len({child.pid for child in psutil.Process().children()} - before) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: {child.pid for child in psutil.Process().children() if not gone(child.pid)} <= before)


_PARENT = textwrap.dedent("""
    import asyncio, sys
    from trtx.media import Blob, MediaLimits, PicturePool
    from pathlib import Path
    async def main():
        pool = PicturePool(None, MediaLimits(decode_processes=2))
        await pool.start()
        busy = asyncio.create_task(pool.rgb(Blob(Path(sys.argv[1]).read_bytes(), "x")))
        print(*pool.pids, flush=True)
        await asyncio.Event().wait()
    asyncio.run(main())
""")


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
async def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path, stopped: bool) -> None:
    """One of the two has a file, and may be in a state in which it reads no socket."""
    (tmp_path / "picture").write_bytes(PICTURE.data)
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, tmp_path / "picture"], stdout=subprocess.PIPE, text=True)
    pids: list[int] = []
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in (await asyncio.to_thread(parent.stdout.readline)).split()]
        assert len(pids) == 2 and not any(map(gone, pids))
        if stopped:
            for pid in pids:
                freeze(pid)
        parent.kill()
        await until(lambda: all(map(gone, pids)))
    finally:
        parent.kill()
        parent.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if not gone(pid):
                    os.kill(pid, signal.SIGKILL)


async def test_an_interrupt_of_the_terminal_is_left_to_the_parent() -> None:
    async with PicturePool(None, PATIENT) as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        await works(pool)
        assert pool.pids == (pid,)


def test_the_callers_process_imports_no_decoder(tmp_path: Path) -> None:
    program = """
        import asyncio, sys
        from pathlib import Path
        from trtx.media import Blob, MediaLimits, PicturePool, content_key
        from trtx.media.fetch import fetch
        async def main():
            async with PicturePool(None, MediaLimits(decode_processes=1)) as pool:
                await pool.rgb(Blob(Path(sys.argv[1]).read_bytes(), "x"))
        asyncio.run(main())
        assert not {"torch", "transformers", "PIL", "safetensors"} & set(sys.modules)
    """
    path = tmp_path / "picture"
    path.write_bytes(PICTURE.data)
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), path], check=True, timeout=120)


@pytest.mark.proof
@pytest.mark.proof
async def test_a_process_maps_no_memory_anew_for_each_picture(tmp_path: Path) -> None:
    """To clear it took as long as all that is computed of a picture."""
    picture = Blob(files.saved(Image.new("RGB", (1008, 1008), (9, 99, 200)), "JPEG"), "a picture")

    def faults(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])

    async with PicturePool(resolve_checkpoint("synthetic:tiny-qwen2.5-vl").path, PATIENT, directory=tmp_path) as pool:
        for _ in range(3):
            await pool.prepare(picture)
        (pid,) = pool.pids
        before = faults(pid)
        for _ in range(4):
            await pool.prepare(picture)
        assert pool.pids == (pid,)
        assert faults(pid) - before < 4000, "of 4 KiB, where 12 MiB of pixels four times would be 12,000"


async def test_a_video_is_refused_in_one_sentence_where_nothing_decodes_it_and_pictures_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", pythonpath_without_pyav(tmp_path))
    video = Blob(video_files.saved(video_files.drawn(4)), "clip.mp4", "video")
    async with PicturePool(resolve_checkpoint("synthetic:tiny-qwen2.5-vl").path, PATIENT, videos="each") as pool:
        with pytest.raises(MediaError, match=r"^clip.mp4 can't be decoded: .* pip install 'trtx\[video\]'$") as refused:
            await pool.prepare(video)
        assert refused.value.status == 415
        await works(pool)
