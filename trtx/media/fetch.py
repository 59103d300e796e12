"""Fetches the bytes behind a client's URL."""

from __future__ import annotations

from trtx.config.media import MediaLimits
from trtx.media import files, inline
from trtx.media.addresses import Resolver, look_up
from trtx.media.blob import Blob, Kind, label_of
from trtx.media.errors import MediaError
from trtx.media.held import HeldMedia


async def fetch(
    url: str,
    limits: MediaLimits,
    *,
    kind: Kind = "image",
    held: HeldMedia | None = None,
    resolve: Resolver = look_up,
) -> Blob:
    """The bytes behind an http:, https:, data: or file: URL, within ``limits``. Raises MediaError.

    While it is being fetched, a file takes up to twice ``limits.max_media_bytes`` of memory; the caller limits the
    number of concurrent calls. ``held`` counts the file afterwards. ``resolve`` is called once per connection, which
    then goes to one of the returned addresses.
    """
    label = label_of(url)
    if held is not None:
        held.check()
    scheme = url[:9].partition(":")[0].lower()
    if scheme in ("http", "https"):
        from trtx.media import http  # imported late: httpx takes 0.2 s, and a text worker imports this module too

        data = await http.get(url, label, limits, resolve)
    elif scheme == "data":
        data = await inline.decode(url, label, limits)
    elif scheme == "file":
        data = await files.read(url, label, limits)
    else:
        raise MediaError(400, f"{label} is not a supported URL; expected https:, http:, data: or file:")
    if not data:
        raise MediaError(400, f"{label} holds no bytes")
    blob = Blob(data, label, kind)
    return blob if held is None else held.hold(blob)
