"""One engine's share in the weights of its group: mapped from another engine, or loaded here and offered to others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from trtx.checkpoint.identity import identify_model
from trtx.torch_engine.llm_args import WeightGroup
from trtx.torch_engine.runner.cuda_regions import MappingRefused
from trtx.torch_engine.runner.regions import SharedRegion, create_shared_region, map_shared_region
from trtx.torch_engine.runner.weight_group import WeightPeer, WeightServer, weight_peers
from trtx.torch_engine.runner.weight_offer import WeightOffer, placed
from trtx.torch_engine.runner.weights import DecoderWeights

log = logging.getLogger(__name__)


class SharedWeights:
    """The memory of a group's weights in this process."""

    def __init__(
        self,
        group: WeightGroup,
        made_from: Mapping[str, str],
        device: torch.device,
        expect: Callable[[], DecoderWeights],
    ) -> None:
        """Maps the weights of the first engine of the group that has the same ones; else :attr:`weights` stays None.

        Call it within :func:`~trtx.torch_engine.runner.weight_group.sole_start`. ``made_from``: see
        :func:`described`. ``expect``: returns the weights that this engine needs, on the device ``meta``.
        """
        self.weights: DecoderWeights | None = None
        self.mapped_from: str | None = None  # name of the engine; None: this engine loaded the weights
        self._group = group
        self._made_from = dict(made_from)
        self._device = device
        self._regions: list[SharedRegion] = []
        self._offer: WeightOffer | None = None
        self._server: WeightServer | None = None
        with weight_peers(group) as peers:
            self.num_running = len(peers)  # engines of the group that have their KV pool already
            for peer in peers:
                expected = expect()
                if (problem := peer.offer.mismatch(made_from, expected) or self._map(peer)) is None:
                    peer.offer.place(expected, [region.bytes for region in self._regions])
                    self.weights, self.mapped_from, self._offer = expected, peer.name, peer.offer
                    log.warning("%s uses the weights of %s: %d MiB", group.name, peer.name, self.num_bytes >> 20)
                    return
                log.warning(
                    "%s does not use the weights of %s, because %s; it loads a copy", group.name, peer.name, problem
                )

    def _map(self, peer: WeightPeer) -> str | None:
        """Maps the regions of ``peer``. Returns a clause that says why they can't be mapped, or None."""
        descriptors = peer.descriptors()
        if descriptors is None:
            return "it has ended"
        for size in peer.offer.region_bytes:
            try:
                self._regions.append(map_shared_region(size, self._device, descriptors.pop(0)))
            except (MappingRefused, ValueError) as error:
                for descriptor in descriptors:
                    os.close(descriptor)
                self._close_regions()
                return f"they can't be mapped ({error})"
        return None

    @property
    def num_bytes(self) -> int:
        return sum(region.bytes.numel() for region in self._regions)

    @property
    def pools_to_come(self) -> int:
        """The number of KV pools that the free memory of the device is for, this engine's among them."""
        return max(1, self._group.engines - self.num_running)

    def new_region(self, num_bytes: int, device: torch.device) -> SharedRegion:
        """Creates memory for weights that this engine has loaded."""
        self._regions.append(region := create_shared_region(num_bytes, device))
        return region

    def serve(self, tensors: Mapping[str, Tensor], region_of: Mapping[str, int]) -> None:
        """Offers the weights to the other engines. Call it once the KV pool is allocated. Raises UsageError.

        ``tensors``: all weights by name; ``region_of``: the index of the region of each.
        """
        offer = self._offer
        if offer is None:
            begins = [region.bytes.data_ptr() for region in self._regions]
            offer = WeightOffer(
                self._made_from,
                tuple(region.bytes.numel() for region in self._regions),
                {name: placed(value, region_of[name], begins[region_of[name]]) for name, value in tensors.items()},
            )
            for region in self._regions:
                region.seal()
        self._server = WeightServer(self._group, offer, [region.descriptor for region in self._regions])

    def close(self) -> None:
        """Ends this engine's use of the weights; other engines keep theirs."""
        if self._server is not None:
            self._server.close()
        self._close_regions()

    def _close_regions(self) -> None:
        while self._regions:
            self._regions.pop().close()


def described(
    model_dir: Path, device: torch.device, dtype: torch.dtype, *, scaled_products: frozenset[str]
) -> dict[str, str]:
    """Returns what decides about the values, the form and the place of weights, by its name in messages.

    Reads samples of the weight files, which takes seconds. Raises UsageError if they can't be read.
    """
    on = "CPU" if device.type == "cpu" else f"GPU {torch.cuda.get_device_properties(device).uuid}"
    return {
        "device": on,
        "checkpoint": identify_model(model_dir).sampled_sha256[:16],
        "dtype": str(dtype).removeprefix("torch."),
        "FP8 scales of matmuls": ", ".join(sorted(scaled_products)) or "none",
        "trtx": f"{metadata.version('trtx')} with torch {torch.__version__}",
    }
