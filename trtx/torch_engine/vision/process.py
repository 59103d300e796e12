"""The encoder's process: ``python -m trtx.torch_engine.vision.process <fd>``, started by ``EncoderClient``.

It loads the tower and encodes in its main thread. A second thread reads the socket; end of file means that the parent
is gone and ends this process at once, even in the middle of a batch.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import torch

from trtx.garbage import nothing_of_it_is_garbage
from trtx.ipc.child_messages import Progress, Shutdown
from trtx.ipc.encoder_messages import Cancel, Encode, EncoderArgs, EncoderReady, EncoderStart, ToEncoder
from trtx.torch_engine.channel import Channel
from trtx.torch_engine.device import device_memory_bytes
from trtx.torch_engine.embeddings.device import DeviceArena
from trtx.torch_engine.handoff.memory import MemoryUnreachable
from trtx.torch_engine.parent import die_with_parent, exits_after, read_parent

if TYPE_CHECKING:
    from trtx.torch_engine.vision.encoder import Encoder

log = logging.getLogger(__name__)


def main() -> None:
    die_with_parent()
    channel: Channel[ToEncoder] = Channel(socket.socket(fileno=int(sys.argv[1])), ToEncoder)
    inbox: SimpleQueue[ToEncoder] = SimpleQueue()
    threading.Thread(target=read_parent, args=(channel, inbox.put), name="encoder-socket", daemon=True).start()
    with exits_after(channel):
        start = inbox.get()
        assert isinstance(start, EncoderStart), f"the first message is {type(start).__name__}"
        with nothing_of_it_is_garbage():
            encoder = _build(start, channel)
        _loop(encoder, channel, inbox)


def _build(start: EncoderStart, channel: Channel[ToEncoder]) -> Encoder:
    channel.send(Progress(f"loading the vision tower of {start.args.model}"))
    # transformers' models import these for training, if they are installed: 0.9 of the 7 s of CPU time of this start.
    for unused in ("accelerate", "scipy"):
        sys.modules.setdefault(unused, None)  # type: ignore[arg-type]  # None: as if it was not installed
    from trtx.torch_engine.vision.encoder import Encoder
    from trtx.torch_engine.vision.load import load_tower

    tower = load_tower(start.args)
    arena = _arena(start.args, tower.device)
    dtype = str(tower.dtype).removeprefix("torch.")
    channel.send(EncoderReady(tower.width, dtype, device_memory_bytes(tower.device)))
    return Encoder(tower, start.args, arena)


def _arena(args: EncoderArgs, device: torch.device) -> DeviceArena | None:
    """Creates the device arena, on GPUs only: on a CPU, a mapped file is as fast."""
    if device.type != "cuda" or not args.arena_bytes:
        return None
    try:
        return DeviceArena(args.arena_bytes, device)
    except (MemoryUnreachable, OSError, torch.OutOfMemoryError) as error:
        log.warning("embeddings cross the host in files: no other process can open this GPU's memory (%s)", error)
        return None


def _loop(encoder: Encoder, channel: Channel[ToEncoder], inbox: SimpleQueue[ToEncoder]) -> None:
    """Encodes while items wait, and sleeps on the inbox while none do. Returns on ``Shutdown``."""
    while True:
        try:
            while True:
                message = inbox.get() if encoder.is_idle else inbox.get_nowait()
                if isinstance(message, Encode):
                    ended = encoder.submit(message)
                    if ended is not None:
                        channel.send(ended)
                elif isinstance(message, Cancel):
                    for dropped in encoder.cancel(message.item_ids):
                        channel.send(dropped)
                elif isinstance(message, Shutdown):
                    return
        except Empty:
            pass
        for answer in encoder.step():
            channel.send(answer)
        channel.send(encoder.stats())


if __name__ == "__main__":
    main()
