"""Config values that follow from the topology: one dtype for all roles, and one image per batch for determinism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trtx.config import ResolvedEngineConfig, Role
from trtx.errors import UsageError
from trtx.memory.processor import cpu_dtype, cpu_dtype_reason
from trtx.memory.torch_engine import compute_dtype


def with_cpu_dtype(configs: Mapping[Role, ResolvedEngineConfig], own: str) -> dict[Role, ResolvedEngineConfig]:
    """The configs of a topology without GPUs, with dtype ``auto`` resolved for the CPU. ``own``: the checkpoint's
    dtype.

    A float32 checkpoint is computed in float32, so the configs stay unchanged and no reason is added.
    """
    if own == "float32":
        return dict(configs)
    found, dtype = {}, cpu_dtype(own)
    for role, config in configs.items():
        if config.values.get("dtype") in (None, "auto"):
            because = f"{role}: dtype = {dtype!r} because {cpu_dtype_reason(own)}"
            config = replace(config, values={**config.values, "dtype": dtype}, reasons=(*config.reasons, because))
        found[role] = config
    return found


def with_embedding_dtype(
    configs: Mapping[Role, ResolvedEngineConfig], own: str, *, is_gpu: bool
) -> dict[Role, ResolvedEngineConfig]:
    """The configs of one topology with the same dtype for all roles.

    An encoder's own default is the checkpoint's dtype (on a CPU, the torch engine's), whatever the other roles use. If
    role ``encode`` states no dtype, it gets that of the other roles, with a reason. ``own`` is the checkpoint's dtype,
    for ``auto``.

    Raises UsageError if two roles have different dtypes: decode would read KV of another layout or continue prefill's
    sequences in another precision, and an engine refuses embeddings of another dtype than its own.
    """
    found = dict(configs)
    stated = {role: config.values.get("dtype") for role, config in found.items()}
    resolved = {role: compute_dtype(dtype or "auto", own, is_gpu=is_gpu) for role, dtype in stated.items()}
    takers = [role for role in found if role != "encode"]
    taker = takers[0]
    wanted = resolved[taker]
    for role in takers[1:]:
        if resolved[role] != wanted:
            raise UsageError(
                f"{taker} computes in {wanted} ({_origin(found[taker])}) and {role} in {resolved[role]} "
                f"({_origin(found[role])}), but {role} continues the sequences of {taker}; set {taker}.dtype "
                f"and {role}.dtype to the same with --set"
            )
    if "encode" not in found or resolved["encode"] == wanted:
        return found
    if stated["encode"] is not None:
        raise UsageError(
            f"encode makes embeddings in {resolved['encode']} ({_origin(found['encode'])}), but {taker} accepts them "
            f"only in {wanted} ({_origin(found[taker])}); leave encode.dtype out, or --set encode.dtype={wanted}"
        )
    encode = found["encode"]
    who = (
        f"{takers[0]}, which takes its embeddings, computes"
        if len(takers) == 1
        else (f"{' and '.join(takers)}, which take its embeddings, compute")
    )
    because = f"encode: dtype = {wanted!r} because {who} in it"
    found["encode"] = replace(encode, values={**encode.values, "dtype": wanted}, reasons=(*encode.reasons, because))
    return found


def with_lone_images(configs: Mapping[Role, ResolvedEngineConfig]) -> dict[Role, ResolvedEngineConfig]:
    """The configs with one image per encoder batch, for ``--deterministic``.

    Raises UsageError if ``--set`` says otherwise. Other images in a batch change the last bits of an embedding
    (docs/multimodal.md).
    """
    found = dict(configs)
    if (encode := found.get("encode")) is None:
        return found
    if "max_batch_size" in encode.overridden and encode.values["max_batch_size"] != 1:
        raise UsageError(
            f"encode.max_batch_size is {encode.values['max_batch_size']} (--set), but --deterministic encodes "
            "each image alone, because others in its batch change the last bits of its embedding; leave one of them out"
        )
    because = "encode: max_batch_size = 1 because --deterministic encodes each image alone"
    found["encode"] = replace(encode, values={**encode.values, "max_batch_size": 1}, reasons=(*encode.reasons, because))
    return found


def _origin(config: ResolvedEngineConfig) -> str:
    if "dtype" in config.overridden:
        return "--set"
    return config.source if "dtype" in config.values else "default"
