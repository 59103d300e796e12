"""file: URLs: one directory, and no way out of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trtx.media import MediaError, MediaLimits
from trtx.media.fetch import fetch

INSIDE, OUTSIDE = b"inside", b"outside"


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """A directory with a file, a folder with a file, and files beside it."""
    folder = tmp_path / "allowed"
    (folder / "deeper").mkdir(parents=True)
    (folder / "a picture.png").write_bytes(INSIDE)
    (folder / "deeper" / "b.png").write_bytes(INSIDE)
    (tmp_path / "outside.png").write_bytes(OUTSIDE)
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "allowed-too" / "c.png").write_bytes(OUTSIDE)
    return folder


def limits(allowed: Path | None, **more: object) -> MediaLimits:
    return MediaLimits(allowed_media_path=allowed, **more)  # type: ignore[arg-type]


async def refusal(url: str, given: MediaLimits) -> MediaError:
    with pytest.raises(MediaError) as refused:
        await fetch(url, given)
    assert len(str(refused.value)) < 300
    return refused.value


async def test_a_file_below_the_directory_is_read(allowed: Path) -> None:
    for url in (
        (allowed / "a picture.png").as_uri(),
        f"file://localhost{allowed}/deeper/b.png",
        f"FILE://LOCALHOST{allowed}/deeper/b.png",
        f"FILE://{allowed}/deeper/../deeper/./b.png",
        f"file:{allowed}/deeper/b.png",
    ):
        assert (await fetch(url, limits(allowed))).data == INSIDE


async def test_no_file_is_read_without_a_directory(allowed: Path) -> None:
    error = await refusal((allowed / "a picture.png").as_uri(), limits(None))
    assert (error.status, "--allowed-media-path" in str(error)) == (403, True)


@pytest.mark.parametrize(
    "path",
    ["../outside.png", "../allowed-too/c.png", "deeper/../../outside.png", "%2e%2e/outside.png", "../no-such-file"],
)
async def test_what_is_outside_is_refused_whether_it_is_there_or_not(allowed: Path, path: str) -> None:
    assert (await refusal(f"file://{allowed}/{path}", limits(allowed))).status == 403


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file:///proc/self/environ", "file:///", "file:////etc/passwd"])
async def test_the_rest_of_the_machine_is_refused(allowed: Path, url: str) -> None:
    assert (await refusal(url, limits(allowed))).status == 403


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("file://host.example{}/deeper/b.png", 400),
        ("file://{}/deeper/b.png%00.jpg", 400),
        ("file://{}/deeper/b.png%ff", 400),
        ("file://{}/deeper/b.png?x", 400),
        ("file://{}/deeper/b.png#x", 400),
        ("file:deeper/b.png", 400),
        ("file://[::1{}/b.png", 400),
        ("file://{}/missing.png", 404),
        ("file://{}/" + "x" * 300, 404),
        ("file://{}/" + "x/" * 3000, 404),
        ("file://{}/deeper", 403),
        ("file://{}", 403),
    ],
)
async def test_what_names_no_file_is_refused(allowed: Path, url: str, status: int) -> None:
    error = await refusal(url.replace("{}", str(allowed)), limits(allowed))
    assert error.status == status, str(error)


async def test_links_lead_within_the_directory_and_not_out_of_it(allowed: Path) -> None:
    (allowed / "in.png").symlink_to("deeper/b.png")
    (allowed / "out.png").symlink_to("../outside.png")
    (allowed / "out").symlink_to("..")
    (allowed / "circle").symlink_to("circle")
    assert (await fetch(f"file://{allowed}/in.png", limits(allowed))).data == INSIDE
    assert (await refusal(f"file://{allowed}/out.png", limits(allowed))).status == 403
    assert (await refusal(f"file://{allowed}/out/outside.png", limits(allowed))).status == 403
    assert (await refusal(f"file://{allowed}/circle", limits(allowed))).status == 404


async def test_the_directory_itself_may_be_a_link(allowed: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("allowed")
    assert (await fetch(f"file://{tmp_path}/link/deeper/b.png", limits(tmp_path / "link"))).data == INSIDE


async def test_pipes_and_devices_are_refused_without_waiting_for_them(allowed: Path) -> None:
    os.mkfifo(allowed / "pipe.png")
    assert (await refusal(f"file://{allowed}/pipe.png", limits(allowed))).status == 403
    assert (await refusal("file:///dev/zero", limits(Path("/dev")))).status == 403


async def test_a_file_is_read_up_to_the_limit(allowed: Path) -> None:
    (allowed / "large.png").write_bytes(bytes(1001))
    (allowed / "sparse.png").touch()
    os.truncate(allowed / "sparse.png", 1 << 40)
    assert (await refusal(f"file://{allowed}/large.png", limits(allowed, max_media_bytes=1000))).status == 413
    assert (await refusal(f"file://{allowed}/sparse.png", limits(allowed))).status == 413
    assert len((await fetch(f"file://{allowed}/large.png", limits(allowed, max_media_bytes=1001))).data) == 1001
    # One whose size says nothing: files of the kernel's are 0 bytes long.
    assert (await refusal("file:///proc/self/maps", limits(Path("/proc"), max_media_bytes=100))).status == 413


_SWAPPED = textwrap.dedent("""
    import asyncio, os, sys
    from pathlib import Path
    from trtx.media import MediaError, MediaLimits
    from trtx.media.fetch import fetch
    allowed, name, link = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    swapped = False
    def swap(event, arguments):
        global swapped
        if event == "open" and not swapped and str(arguments[0]) == str(allowed.resolve()):
            swapped = True
            (allowed / name).rename(allowed / "gone")
            (allowed / name).symlink_to(link)
    sys.addaudithook(swap)
    try:
        print(asyncio.run(fetch(f"file://{allowed}/deeper/b.png", MediaLimits(allowed_media_path=allowed))).data)
    except MediaError as error:
        print(swapped, error.status)
""")


@pytest.mark.parametrize(("name", "link"), [("deeper", "../evil"), ("deeper/b.png", "../../outside.png")])
def test_a_link_that_is_put_there_after_the_check_leads_nowhere(
    allowed: Path, tmp_path: Path, name: str, link: str
) -> None:
    """At the moment when the directory is opened, in which the path has been checked already."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "b.png").write_bytes(OUTSIDE)
    done = subprocess.run(
        [sys.executable, "-c", _SWAPPED, allowed, name, link], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "True 404\n"
