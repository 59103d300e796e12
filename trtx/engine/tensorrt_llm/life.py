"""Starts a TensorRT-LLM engine: environment, import, arguments, construction."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtx.checkpoint.facts import architecture_of, read_config
from trtx.checkpoint.weight_index import check_read_by_pattern
from trtx.engine.api import Engine, EngineApi, Fault
from trtx.engine.tensorrt_llm import arguments, environment, versions
from trtx.engine.tensorrt_llm.adapter import TensorRtEngine, facts_of_encoder, facts_of_llm
from trtx.engine.tensorrt_llm.installed import installed_version, needs_gpu
from trtx.engine.tensorrt_llm.multimodal import PreparationFailed
from trtx.errors import UsageError

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 60.0
"""Timeout of ``LLM.shutdown``, which may never return if ranks are dead (PR #16312). Dynamo's timeout is the same."""


def load_api() -> EngineApi:
    """Prepares the environment and imports the package. Raises UsageError if the import fails."""
    if cleared := environment.prepare():
        logger.warning("variables of a Slurm or MPI job were cleared for this one-node start: %s", ", ".join(cleared))
    try:
        from tensorrt_llm.executor.result import Logprob
        from tensorrt_llm.executor.utils import RequestError
        from tensorrt_llm.llmapi import DisaggregatedParams, GuidedDecodingParams
        from tensorrt_llm.llmapi.llm import SamplingParams
    except ImportError as error:
        raise UsageError(
            f"engine tensorrt-llm needs the package tensorrt_llm ({error}); install trtx[tensorrt-llm], "
            "or choose --engine torch"
        ) from error
    return EngineApi(
        kind="tensorrt-llm",
        engine_type="trtllm",
        start=start,
        SamplingParams=SamplingParams,
        DisaggregatedParams=DisaggregatedParams,
        Logprob=Logprob,
        fault=lambda error: _fault(error, RequestError),
        new_request_ids=versions.new_request_ids,
        GuidedDecodingParams=GuidedDecodingParams,
        versions={} if (version := installed_version()) is None else {"tensorrt_llm": version},
        start_encoder=start_encoder,
        gpus_of=arguments.world_size,
        aborts_transfers=False,  # ai-dynamo/dynamo #7489
        dies_of_stalls=True,  # TensorRT-LLM #17665, #14414
        shutdown_seconds=SHUTDOWN_SECONDS,
    )


def _fault(error: Exception, request_error: type[Exception]) -> Fault:
    """Classifies an exception of TensorRT-LLM.

    RequestError is one request's fault. After any other exception, its executor is shutting down or in an unknown
    state, whatever its health call returns (Dynamo's own backend ends its process too). A failure of the input
    processor does not affect the executor.
    """
    if isinstance(error, PreparationFailed):
        return "failed"
    return "refused" if isinstance(error, request_error) else "fatal"


def start(model: Path, config: Mapping[str, Any]) -> Engine:
    """Loads ``model`` with one rank per GPU.

    The ranks are this process's children on the GPUs that it sees, or have been started by trtllm-llmapi-launch on one
    or more nodes.
    """
    _check_gpus(config)
    check_read_by_pattern(model)
    llm = versions.llm_class(arguments.backend_of(config))(model=str(model), **arguments.for_llm(config))
    return TensorRtEngine(llm, facts_of_llm(llm, model, config))


def start_encoder(model: Path, config: Mapping[str, Any]) -> Engine:
    """Loads only the vision encoder of ``model``."""
    from tensorrt_llm import MultimodalEncoder

    _check_gpus(config)
    architecture = architecture_of(read_config(model))
    encoder = MultimodalEncoder(model=str(model), **arguments.for_encoder(config, architecture))
    return TensorRtEngine(encoder, facts_of_encoder(encoder, model))


def _check_gpus(config: Mapping[str, Any]) -> None:
    """Raises UsageError if the worker has too few GPUs.

    TensorRT-LLM itself notices that only once its ranks run, minutes later, and with an unclear message.
    """
    version = installed_version()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or version is None or not needs_gpu(version):
        return
    count = len([entry for entry in visible.split(",") if entry.strip()])
    ranks = arguments.world_size(config)
    if environment.has_launched_ranks():
        if (here := arguments.ranks_here(config)) > count:
            raise UsageError(
                f"the engine config asks for {ranks} GPUs a worker, {here} of them on this node, and "
                f"CUDA_VISIBLE_DEVICES has {count}; set gpus_per_node to those that each node has"
            )
    elif ranks > count:
        raise UsageError(
            f"the engine config asks for {ranks} GPUs a worker and CUDA_VISIBLE_DEVICES has {count}; "
            "give the worker more, or lower tensor_parallel_size, pipeline_parallel_size or context_parallel_size"
        )
