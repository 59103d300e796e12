"""Which blocks hold a draft model's KV of their whole content, on the device and in host memory.

The draft model's KV has the block ids of the engine's pools. It is written when the model drafts, so a block can hold
its content's KV and lack the draft model's. A wrong entry here costs acceptance, never a token.
"""

from __future__ import annotations


class DraftKv:
    """Notes for each block of both pools to which content its draft KV belongs. Contents are known by their names."""

    def __init__(self) -> None:
        self._device: dict[int, bytes] = {}
        self._host: dict[int, bytes] = {}

    def is_whole(self, device_id: int, name: bytes) -> bool:
        return self._device.get(device_id) == name

    def written(self, device_id: int, name: bytes | None) -> None:
        """A draft pass wrote into a block. ``name``: the content whose draft KV is whole now; None: not whole."""
        if name is None:
            self._device.pop(device_id, None)
        else:
            self._device[device_id] = name

    def storing(self, device_id: int, host_id: int, name: bytes) -> None:
        """A copy to host memory starts. Draft passes that write into the block later begin after it on the device."""
        if self.is_whole(device_id, name):
            self._host[host_id] = name
        else:
            self._host.pop(host_id, None)

    def copy_lacks(self, host_id: int, device_id: int, name: bytes) -> bool:
        """Whether the copy of a content lacks draft KV that the block on the device has."""
        return self.is_whole(device_id, name) and self._host.get(host_id) != name

    def loading(self, device_id: int) -> None:
        """A copy to the device starts."""
        self._device.pop(device_id, None)

    def loaded(self, host_id: int, device_id: int, name: bytes) -> None:
        """The copy has ended."""
        if self._host.get(host_id) == name:
            self._device[device_id] = name

    def forget(self) -> None:
        """The contents of both pools are gone."""
        self._device.clear()
        self._host.clear()
