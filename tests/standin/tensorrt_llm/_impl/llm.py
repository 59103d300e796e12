"""``BaseLLM`` and ``LLM`` (tensorrt_llm/llmapi/llm.py): arguments, requests, life."""

from __future__ import annotations

import atexit
import os
import socket
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorrt_llm._facts import dataclass, follows, public, signature
from tensorrt_llm._impl import args as llm_args
from tensorrt_llm._impl.executor import GenerationExecutor, RequestError
from tensorrt_llm._impl.multimodal import InputProcessor, MultimodalParams, create_input_processor, params_of
from tensorrt_llm._impl.ranks import refuse_launcher_variables
from tensorrt_llm._impl.results import Feed, RequestOutput, check_positions, request_output, torch_state
from tensorrt_llm._impl.sampling import SamplingParams, for_torch_engine, stop_strings
from tensorrt_llm._standin import absent

PreprocessedInputs = dataclass("PreprocessedInputs")
_NOT_DECODER_KEYS = ("encoder_inputs", "encoder_input_token_ids", "decoder_input_token_ids")
_NO_TRANSCEIVER = (
    "kv_cache_transceiver is disabled, please set 'cache_transceiver_config: backend:<backend_type>` in config file "
    "for disaggregated serving"
)


@public
class BaseLLM:
    """Everything that LLM, AutoDeploy's LLM and MultimodalEncoder share."""

    _backend = "pytorch"

    @follows("BaseLLM.__init__")
    def __init__(self, model: Any, tokenizer: Any, **given: Any) -> None:
        backend = given.pop("backend", self._backend)
        named = signature("BaseLLM.__init__").parameters
        changed = {name: value for name, value in given.items() if name not in named or value != named[name].default}
        self._executor: GenerationExecutor | None = None
        self._llm_id: str | None = None
        self._hf_tokenizer: Any = None
        self.args = llm_args.resolve(type(self).__name__, backend, {"model": model, "tokenizer": tokenizer, **changed})
        for name, value in (getattr(self.args, "env_overrides", None) or {}).items():
            os.environ[name] = str(value)
        if not Path(model).is_dir():
            raise absent(f"download of {model!r}")
        refuse_launcher_variables(os.environ)
        self._build_model()
        atexit.register(_shut_down, weakref.ref(self))

    def _build_model(self) -> None:
        self.input_processor = create_input_processor(
            str(self.args.model), None if self.args.skip_tokenizer_init else self._fast_tokenizer()
        )
        if isinstance(self.input_processor, InputProcessor):
            self.input_processor.dtype = self.args.dtype
        self._executor = GenerationExecutor(str(self.args.model), self.args.tokenizer, self.args)

    @property
    def llm_id(self) -> str:
        if self._llm_id is None:
            self._llm_id = f"{socket.gethostname()}-{os.getpid()}-{int(time.time() * 1000)}"
        return self._llm_id

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer. The real LLM has loaded it by now; here it waits for the first look."""
        from trtx.text import load_hf_tokenizer

        given = self.args.tokenizer
        if self.args.skip_tokenizer_init or not (given is None or isinstance(given, (str, Path))):
            return given
        if self._hf_tokenizer is None:
            directory = Path(given or self.args.model)
            self._hf_tokenizer = load_hf_tokenizer(directory, trust_remote_code=self.args.trust_remote_code)
        return self._hf_tokenizer

    @property
    def disaggregated_params(self) -> dict[str, Any]:
        return {}

    @property
    def _engine(self) -> Any:
        assert self._executor is not None
        return self._executor._engine

    # --- requests ---

    def generate(self, inputs: Any, **options: Any) -> Any:
        is_one = not isinstance(inputs, list) or (bool(inputs) and isinstance(inputs[0], int))
        options.pop("use_tqdm", None)
        if options.get("priority", 0) is None:
            options["priority"] = 0.5
        prompts = [inputs] if is_one else inputs
        outputs = [
            self.generate_async(prompt, **{name: _item(value, index) for name, value in options.items()})
            for index, prompt in enumerate(prompts)
        ]
        for output in outputs:
            output.result()
        return outputs[0] if is_one else outputs

    def generate_async(
        self,
        inputs: Any,
        sampling_params: Any,
        lora_request: Any,
        prompt_adapter_request: Any,
        streaming: bool,
        disaggregated_params: Any,
        cache_salt: str | None,
        priority: float = 0.5,
        **hints: Any,  # tracing, scheduling, conversation: nothing the tokens depend on
    ) -> RequestOutput:
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        sampling = self._prepare_sampling_params(sampling_params)
        kind = disaggregated_params.request_type if disaggregated_params is not None else None
        if kind == "context_only":
            sampling.max_tokens = 1  # the caller's own object, as in the real one
        prompt, prompt_token_ids, media = self._preprocess(inputs, sampling, disaggregated_params)
        self._check_arguments(len(prompt_token_ids), is_generation_only=kind == "generation_only")
        if not 0 <= priority <= 1:
            raise ValueError(f"priority must be in [0, 1], got {priority}")
        if lora_request is not None or prompt_adapter_request is not None:
            raise absent("lora_request and prompt_adapter_request")
        for name in ("kv_cache_retention_config", "_postproc_params"):
            if hints.get(name) is not None:
                raise absent(name)
        self._check_disaggregation(disaggregated_params)
        stop_words = self._stop_words(sampling)
        max_tokens = self._max_tokens(sampling, len(prompt_token_ids))
        taken, given = self._taken(prompt_token_ids, media, disaggregated_params)
        inner = self._executor._submit(
            given,
            for_torch_engine(sampling, max_tokens=max_tokens),
            streaming=streaming,
            disaggregated_params=_for_torch_engine(disaggregated_params),
            cache_salt=cache_salt,
            priority=priority,
        )
        has_text = sampling.detokenize and not self.args.skip_tokenizer_init
        return request_output(
            Feed(
                inner=inner,
                sampling=sampling,
                streaming=streaming,
                prompt=prompt,
                disaggregated_params=disaggregated_params,
                stop_words=stop_words,
                decode=self._fast_tokenizer().decode if has_text else None,
                fail=self._executor._error,
                seen=self._executor._step_was_seen,
                block_size=self.args.kv_cache_config.tokens_per_block,
                media=taken,
            )
        )

    def preprocess(self, inputs: Any, sampling_params: Any, disaggregated_params: Any) -> Any:
        sampling = self._prepare_sampling_params(sampling_params)
        _, token_ids, media = self._preprocess(inputs, sampling, disaggregated_params)
        return PreprocessedInputs(token_ids, multimodal_params=media)

    def encode(self, **_: Any) -> Any:
        raise RuntimeError("encode() requires encode_only=True. Set encode_only=True in the LLM() constructor.")

    def _prepare_sampling_params(self, sampling_params: Any) -> Any:
        sampling = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(sampling_params)}")
        if sampling.end_id is None:
            if self.args.skip_tokenizer_init:
                raise ValueError(
                    "tokenizer is required to reset end_id if it is None, or you can explicitly specify the end_id "
                    "for sampling_params"
                )
            # With end_id given the real one never encodes the stop strings either.
            encode = self._fast_tokenizer().encode
            sampling._stop_word_ids = [encode(s, add_special_tokens=False).ids for s in stop_strings(sampling)]
        sampling.return_perf_metrics = sampling.return_perf_metrics or self.args.return_perf_metrics
        return sampling

    def _preprocess(self, inputs: Any, sampling: Any, params: Any) -> tuple[str | None, list[int], Any]:
        """The prompt's text, if it is one, its tokens, and what its pictures are."""
        if isinstance(inputs, PreprocessedInputs):
            return None, list(inputs.prompt_token_ids), inputs.multimodal_params
        if isinstance(inputs, str):
            inputs = {"prompt": inputs}
        elif isinstance(inputs, Sequence):
            inputs = {"prompt_token_ids": list(inputs)}
        if not isinstance(inputs, dict) or ("prompt" not in inputs and "prompt_token_ids" not in inputs):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        for key in _NOT_DECODER_KEYS:
            if key in inputs:
                raise ValueError(f"{key} is not supported. Pass encoder input as inputs.")
        if params is not None and params.multimodal_embedding_handles is not None:
            return inputs.get("prompt"), *self._from_handles(inputs, params)
        if inputs.get("multi_modal_embeddings") is not None:
            raise absent("multi_modal_embeddings on LLM")
        data = inputs.get("multi_modal_data")
        if inputs.get("prompt_token_ids") is not None:
            prompt, token_ids = None, list(inputs["prompt_token_ids"])
        else:
            prompt, token_ids = inputs["prompt"], self._tokens(inputs["prompt"], sampling)
        if not data:
            return prompt, token_ids, None
        if not isinstance(inputs.get("mm_processor_kwargs", {}), dict):
            raise TypeError("argument after ** must be a mapping, not NoneType")
        if inputs.get("mm_processor_kwargs"):
            raise absent("mm_processor_kwargs")
        if not isinstance(self.input_processor, InputProcessor):
            raise absent("multi_modal_data for a text model")
        expanded, made = self.input_processor.with_pictures(token_ids, data)
        if params is not None and (config := made.multimodal_data.get("mrope_config")) is not None:
            params.mrope_position_ids_handle = config["mrope_position_ids"]  # the caller's own object, as there
            params.mrope_position_deltas_handle = config["mrope_position_deltas"]
        return prompt, expanded, made

    def _from_handles(self, inputs: Any, params: Any) -> tuple[list[int], MultimodalParams]:
        """Prefill of what an encoder made."""
        if self.args.backend == "_autodeploy":
            raise ValueError("Multimodal disaggregated inference is not supported with the AutoDeploy backend.")
        if not self.input_processor.support_mm_disagg:
            raise ValueError("Multimodal disaggregated inference is not supported for this model")
        handles = params.multimodal_embedding_handles
        expanded = self.input_processor.build_disagg_prefill_multimodal_inputs(inputs, handles)
        if params.request_type == "generation_only":
            raise ValueError("Generation-only mode should not need multimodal parameters")
        positions, deltas = params.mrope_position_ids_handle, params.mrope_position_deltas_handle
        assert positions is None or deltas is not None
        return expanded, params_of(handles, positions, deltas)

    def _tokens(self, prompt: str, sampling: Any) -> list[int]:
        if self.args.skip_tokenizer_init:
            raise ValueError("tokenizer is required to tokenize string prompt")
        token_ids = list(self._fast_tokenizer().encode(prompt, add_special_tokens=sampling.add_special_tokens).ids)
        if sampling.truncate_prompt_tokens is not None:
            token_ids = token_ids[-sampling.truncate_prompt_tokens :]
        return token_ids

    def _taken(self, token_ids: list[int], media: Any, params: Any) -> tuple[Any, Any]:
        """What the executor reads of handles, and the torch engine's inputs. What is wrong here ends the engine."""
        assert self._executor is not None
        try:
            if media is not None:
                taken = self.input_processor.take(token_ids, media)
                return taken, {"prompt_token_ids": token_ids, "multi_modal_embeddings": taken.embeddings}
            if params is not None and params.request_type == "generation_only":
                check_positions(params)
        except Exception as error:
            self._executor._fail(error)
            raise RuntimeError(str(error)) from error
        return None, token_ids

    def _check_arguments(self, prompt_length: int, *, is_generation_only: bool) -> None:
        args = self.args
        if args.backend != "pytorch" or args.enable_chunked_prefill or is_generation_only:
            return
        limit = args.max_num_tokens
        if limit and prompt_length / args.context_parallel_size > limit:
            raise RequestError(
                f"The sum of prompt length ({prompt_length / args.context_parallel_size}), query length (0) should not "
                f"exceed max_num_tokens ({limit})"
            )

    def _check_disaggregation(self, params: Any) -> None:
        """Without a transceiver the assertion falls in the rank's main loop, so it ends the engine."""
        if params is None or params.request_type == "context_and_generation":
            return
        assert self._executor is not None
        config = self.args.cache_transceiver_config
        if config is None or config.backend is None:
            self._executor._fail(AssertionError(_NO_TRANSCEIVER))
            return
        if params.request_type is None:
            raise RequestError(
                "Unknown request type: None. Must be context_only, generation_only or context_and_generation"
            )
        is_python = getattr(config, "transceiver_runtime", None) == "PYTHON"
        if is_python and params.disagg_request_id is None:
            raise RequestError("disagg_request_id is required by the Python transceiver; got None")

    def _stop_words(self, sampling: Any) -> list[tuple[str, list[int]]]:
        if not sampling.stop:
            return []
        if sampling._stop_word_ids is None:
            raise RequestError(
                f"SamplingParams.stop ({sampling.stop}) is not processed by tokenizer, please call the setup method."
            )
        words = zip(stop_strings(sampling), sampling._stop_word_ids, strict=True)
        return [] if sampling.ignore_eos else list(words)

    def _max_tokens(self, sampling: Any, prompt_length: int) -> int:
        """Clamped to the context, as in ``_deduce_max_tokens``."""
        room = self._engine.max_seq_len - prompt_length
        if room <= 0:
            raise RequestError(
                f"`default_max_tokens` ({room}) must be greater than 0, `default_max_tokens` ({room}) = max_seq_len "
                f"({self._engine.max_seq_len}) - `splited_prompt_len` ({prompt_length})"
            )
        wanted = room if sampling.max_tokens is None else sampling.max_tokens
        if wanted <= 0:
            raise RequestError(f"`max_tokens` ({wanted}) must be greater than 0")
        return min(wanted, room)

    def _fast_tokenizer(self) -> Any:
        from trtx.text import fast_tokenizer, load_tokenizer

        if not hasattr(self, "_tokenizer"):
            given = self.args.tokenizer
            is_path = given is None or isinstance(given, (str, Path))
            self._tokenizer = load_tokenizer(Path(given or self.args.model)) if is_path else fast_tokenizer(given)
        return self._tokenizer

    # --- what the engine says about itself ---

    def get_stats(self, timeout: float | None) -> list[dict[str, Any]]:
        return self._executor.get_stats(timeout)

    def get_stats_async(self, timeout: float | None) -> Any:
        return self._executor.aget_stats(timeout)

    def get_kv_cache_events(self, timeout: float | None) -> list[dict[str, Any]]:
        return self._executor.get_kv_events(timeout)

    def get_kv_cache_events_async(self, timeout: float | None) -> Any:
        return self._executor.aget_kv_events(timeout)

    def get_kv_cache_capacity(self) -> dict[str, int]:
        return self._executor.get_kv_cache_capacity()

    def _check_health(self) -> bool:
        return self._executor is not None and self._executor.check_health()

    def _collective_rpc(self, **_: Any) -> Any:
        raise absent("_collective_rpc")

    # --- the end ---

    def shutdown(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self.input_processor.close()
            self._executor = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> bool:
        self.shutdown()
        return False

    def __getstate__(self) -> Any:
        raise RuntimeError("LLM object can not be pickled.")


class LLM(BaseLLM):
    """On the PyTorch backend (here: the torch engine)."""


LLM.__module__ = "tensorrt_llm.llmapi.llm"


class AutoDeployLLM(BaseLLM):
    """``tensorrt_llm._torch.auto_deploy.LLM``: a class of its own, ``world_size`` instead of the parallel sizes."""

    _backend = "_autodeploy"


AutoDeployLLM.__name__ = AutoDeployLLM.__qualname__ = "LLM"
AutoDeployLLM.__module__ = "tensorrt_llm._torch.auto_deploy.llm"


def _shut_down(reference: Any) -> None:
    if (llm := reference()) is not None:
        llm.shutdown()


def _item(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) else value


def _for_torch_engine(params: Any) -> Any:
    if params is None:
        return None
    from trtx.torch_engine.llmapi import DisaggregatedParams as TorchParams
    from trtx.torch_engine.llmapi import Logprob

    given = params.first_gen_log_probs
    logprobs = [{t: Logprob(e.logprob, e.rank) for t, e in position.items()} for position in given] if given else None
    return TorchParams(
        request_type=params.request_type,
        first_gen_tokens=params.first_gen_tokens,
        first_gen_log_probs=logprobs,
        ctx_request_id=params.ctx_request_id,
        disagg_request_id=getattr(params, "disagg_request_id", None),
        **torch_state(params.opaque_state),
    )
