"""A tensor goes through a file as it is, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.ipc.shared_tensor import (
    DTYPE_BYTES,
    SharedTensor,
    SharedTensorError,
    SharedTensorGone,
    open_shared,
    remove_left,
    remove_shared,
    share,
    take_over,
)

pytestmark = pytest.mark.slow


@given(
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    shape=st.lists(st.integers(0, 5), max_size=4),
    transposed=st.booleans(),
    data=st.data(),
)
@settings(max_examples=examples(60), deadline=None)
def test_every_tensor_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, shape: list[int], transposed: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shared")
    elements = int(np.prod(shape)) * DTYPE_BYTES[dtype]
    raw = data.draw(st.binary(min_size=elements, max_size=elements))
    bits = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    tensor = bits.view(getattr(torch, dtype)).view(shape)
    if transposed and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)  # not contiguous
    shared = share(tensor, folder)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shared), type=SharedTensor) == shared
    opened = open_shared(shared)
    assert opened.dtype == tensor.dtype and opened.shape == tensor.shape
    # Bits, so that a NaN equals itself.
    assert opened.contiguous().flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8))
    assert [path.name for path in folder.iterdir()] == [Path(shared.path).name]
    remove_shared(shared)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8])
def test_numpy_arrays_are_shared_too(tmp_path: Path, dtype: type) -> None:
    array = np.arange(24, dtype=dtype).reshape(2, 3, 4)[:, ::-1]
    assert np.array_equal(open_shared(share(array, tmp_path)).numpy(), array)


def test_what_is_open_outlives_its_file_and_writes_nothing_back(tmp_path: Path) -> None:
    shared = share(torch.arange(4, dtype=torch.float32), tmp_path)
    first, second = open_shared(shared), open_shared(shared)
    first += 1
    assert second.tolist() == [0, 1, 2, 3]
    remove_shared(shared)
    remove_shared(shared)  # a second time is nothing
    assert second.tolist() == [0, 1, 2, 3] and first.tolist() == [1, 2, 3, 4]
    with pytest.raises(SharedTensorGone, match="is gone; expected it to be kept"):
        open_shared(shared)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"dtype": "float16", "shape": (8,)}, "is float32 of shape \\[4\\]; expected float16 of shape \\[8\\]"),
        ({"shape": (2, 2)}, "expected float32 of shape \\[2, 2\\]"),
        ({"shape": (3,)}, "expected float32 of shape \\[3\\]"),
        ({"dtype": "int64"}, "can't be shared; expected one of"),
        ({"dtype": "__class__"}, "can't be shared; expected one of"),
        ({"shape": (-4,)}, "none negative"),
        ({"shape": (1,) * 9}, "at most 8"),
        ({"path": "/dev/zero"}, "not a regular file"),
        ({"path": "a\0b"}, "can't open"),
    ],
)
def test_another_tensor_than_expected_is_refused(tmp_path: Path, changed: dict[str, object], expected: str) -> None:
    shared = share(torch.zeros(4), tmp_path)
    with pytest.raises(SharedTensorError, match=expected):
        open_shared(msgspec.structs.replace(shared, **changed))


def test_a_short_a_long_and_a_foreign_file_a_link_and_a_pipe_are_refused(tmp_path: Path) -> None:
    shared = share(torch.zeros(4), tmp_path)
    path = Path(shared.path)
    whole = path.read_bytes()
    for size in (0, 100, 256, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(SharedTensorError):
            open_shared(shared)
    path.write_bytes(whole + b"\0")
    with pytest.raises(SharedTensorError, match="17 bytes of data; expected 16"):
        open_shared(shared)
    path.write_bytes(b"x" * len(whole))
    with pytest.raises(SharedTensorError, match="no header"):
        open_shared(shared)
    path.write_bytes(whole[:14] + b"\x10" + b"\xff" * (len(whole) - 15))
    with pytest.raises(SharedTensorError, match="no header"):
        open_shared(shared)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SharedTensorError, match="not a regular file"):
        open_shared(shared)
    path.unlink()
    other = share(torch.zeros(4), tmp_path)
    path.symlink_to(other.path)
    with pytest.raises(SharedTensorError, match="can't open"):
        open_shared(shared)


def test_what_cannot_be_shared_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for value in (torch.zeros(2, dtype=torch.int64), np.zeros(2, dtype=np.float64), np.zeros(2, dtype=">f4")):
        with pytest.raises(SharedTensorError, match="can't be shared"):
            share(value, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SharedTensorError, match="set TMPDIR to a directory"):
        share(torch.zeros(2), tmp_path / "not there")


def test_a_full_disk_leaves_no_half_of_a_tensor(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the write stops short, then fails."""
    script = (
        "import resource, signal, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from trtx.ipc.shared_tensor import SharedTensorError, share\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    share(np.zeros(4096, dtype=np.uint8), Path(sys.argv[1]))\n"
        "except SharedTensorError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "can't write a tensor of 4096 bytes" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


def test_what_a_killed_session_left_is_removed_and_what_the_living_have_stays(tmp_path: Path) -> None:
    """A worker and its children are a session: one that was killed removes nothing, and a child's files stay as long
    as any of them lives. What somebody else has taken over is theirs."""
    script = (
        "import os, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from trtx.ipc.shared_tensor import lend, share\n"
        "directory = Path(sys.argv[1])\n"
        "handed = share(np.zeros(4, dtype=np.uint8), directory)\n"
        "lend(share(np.zeros(4, dtype=np.uint8), directory))\n"
        "(directory / Path(handed.path).with_suffix('.partial').name).touch()\n"
        "print(handed.path, flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = tmp_path / "a name of somebody else.tensor"
    other.touch()
    own = share(torch.zeros(4), tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        handed = SharedTensor(process.stdout.readline().strip(), "uint8", (4,))
        before = set(tmp_path.iterdir())
        assert remove_left(tmp_path) == ()
        assert set(tmp_path.iterdir()) == before and len(before) == 6
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tempfile.tempdir", str(tmp_path))
            taken = take_over(handed)
        process.kill()
        # It has ended, and nobody has asked for its exit code: of orphans some containers' first process asks late.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert remove_left(tmp_path) == ()
    assert {str(path) for path in tmp_path.iterdir()} == {str(other), own.path, taken.path}


def test_only_this_user_reads_it_and_nothing_is_pickled(tmp_path: Path) -> None:
    shared = share(torch.zeros(4), tmp_path)
    assert Path(shared.path).stat().st_mode & 0o777 == 0o600
    # Neither is torch needed to share pixels: the processes that prepare pictures have none.
    script = (
        "import sys, numpy\n"
        "from trtx.ipc.shared_tensor import share\n"
        "share(numpy.zeros(3, numpy.float32))\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.stdout.strip() == "False"
    assert len(list(tmp_path.iterdir())) == 2
