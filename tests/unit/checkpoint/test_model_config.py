"""A config.json is read whole, or refused in one sentence that names the file, the field and its value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trtx.checkpoint import ModelConfig, read_end_ids, read_model_config
from trtx.checkpoint.facts import read_checkpoint, text_config
from trtx.checkpoint.model_config import LARGEST
from trtx.checkpoint.shapes import SHAPES
from trtx.errors import UsageError
from trtx.memory import MemoryDevice, UnknownShapeError, plan_memory

QWEN3 = dict(SHAPES["tiny"].config)
LLAMA = dict(SHAPES["tiny-llama"].config)
QWEN2 = dict(SHAPES["tiny-qwen2"].config)
LLAMA3 = dict(LLAMA["rope_scaling"])
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
GPU = MemoryDevice("H100", 80 << 30, 80 << 30)


def read(directory: Path, config: Any) -> ModelConfig:
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return read_model_config(directory)


def refusal(directory: Path, config: Any) -> str:
    with pytest.raises(UsageError) as refused:
        read(directory, config)
    said = str(refused.value)
    assert str(directory) in said and len(said) < 1000 and "\n" not in said
    return said.replace(str(directory / "config.json"), "FILE")


# --- files ---


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "FILE is not JSON"),
        (b"{", "FILE is not JSON"),
        (b"[]", "FILE holds a list; expected a Hugging Face config: a JSON object"),
        (b"null", "FILE holds null"),
        (b"5", "FILE holds a int"),
        (b'{"a": "\xff"}', "FILE is not UTF-8"),
        (b"\xef\xbb\xbf{}", "FILE is not JSON"),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, "FILE nests too deep to be read"),
        (b'{"hidden_size": 8, "hidden_size": 16}', "FILE has the key 'hidden_size' twice"),
        (b'{"rope_scaling": {"factor": 2, "factor": 4}}', "FILE has the key 'factor' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "FILE is not JSON"),
        (b"{}", "FILE has no architectures"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    for reader in (read_model_config, lambda path: read_checkpoint(path, "m")):
        with pytest.raises(UsageError) as refused:
            reader(tmp_path)
        said = str(refused.value).replace(str(tmp_path / "config.json"), "FILE")
        assert len(said) < 1000
        assert said.startswith(says if content != b"{}" else "FILE has no ")


def test_a_directory_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    for reader in (read_model_config, lambda path: read_checkpoint(path, "m")):
        with pytest.raises(UsageError, match=r"config\.json is not a file; expected a Hugging Face config"):
            reader(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "generation_config.json is not JSON"),
        ("[2]", "generation_config.json holds a list"),
        ('{"eos_token_id": "two"}', "generation_config.json: eos_token_id is 'two'; expected a token id, or a list"),
        ('{"eos_token_id": [1, null]}', r"eos_token_id is [1, None]; expected"),
        ('{"eos_token_id": -1}', "eos_token_id is -1; expected"),
        ('{"eos_token_id": true}', "eos_token_id is True; expected"),
    ],
)
def test_end_ids_that_are_none_are_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UsageError) as refused:
        read_end_ids(tmp_path)
    assert says in str(refused.value)


def test_end_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read_end_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert read_end_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read_end_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert read_end_ids(tmp_path) == (3, 4)


# --- fields ---


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": "four"}, "num_attention_heads is 'four'; expected an integer from 1 to 4096"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected an integer from 1 to 4096"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None; expected an integer"),
        ({"hidden_size": -64}, "hidden_size is -64; expected"),
        ({"hidden_size": 256.0}, "hidden_size is 256.0; expected"),
        ({"vocab_size": True}, "vocab_size is True; expected"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_key_value_heads is 2; expected a divisor of"),
        ({"head_dim": 31}, "head_dim is 31; expected heads of an even size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a finite number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; expected a finite number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; expected a number of at least 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; expected a finite number"),
        ({"torch_dtype": "nonsense"}, "torch_dtype is 'nonsense'; expected one of float32, bfloat16, float16"),
        ({"torch_dtype": ["float32"]}, "torch_dtype is ['float32']; expected one of"),
        ({"dtype": "bfloat16"}, "torch_dtype is 'float32'; expected 'bfloat16' as in dtype"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({"architectures": None}, "architectures is None; expected a list of one name"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures is 'Qwen3ForCausalLM'; expected a list"),
        ({"architectures": ["Qwen3ForCausalLM", "Other"]}, "expected a list of one name"),
        ({"architectures": [{}]}, "architectures is [{}]; expected a list of one name"),
        ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM is not known to the torch"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2'; expected 'qwen3', as architectures says Qwen3ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        ({"mlp_bias": True}, "mlp_bias is True; expected False"),
        ({"is_causal": False}, "is_causal is False; expected True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; expected no such field in a Qwen3For"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]; expected no such field"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar is 256; expected no such field"),
        ({"a_field_of_tomorrow": "x" * 100_000}, "a_field_of_tomorrow is 'xxx"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "throughout, or a sliding_window that is switche",
        ),
        ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "'sliding_attention' of every layer"),
        ({"layer_types": ["full_attention"]}, "expected a list of 4 names"),
        ({"layer_types": "full_attention"}, "expected a list of 4 names"),
        (
            {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 2},
            "sliding_window is 0; expected a who",
        ),
        ({"use_sliding_window": True, "sliding_window": True, "max_window_layers": 2}, "at least 1, or null"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": "2"},
            "expected a whole number of layers",
        ),
        ({"quantization_config": [1]}, "quantization_config is [1]; expected an object with quant_method"),
        ({"quantization_config": {"quant_method": 5}}, "quant_method is 5; expected a name"),
        ({"quantization_config": {"quant_method": "abacus"}}, "does not load abacus weights"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": 5}}, "ignore is 5"),
        ({"trtx_synthetic": {"seed": "zero"}}, "trtx_synthetic.seed is 'zero'; expected an integer"),
        ({"trtx_synthetic": 5}, "trtx_synthetic is 5; expected a JSON object"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_field_that_is_no_such_value_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(tmp_path, QWEN3 | changes)


@pytest.mark.parametrize("name", ["architectures", "model_type"])
def test_what_the_model_is_has_to_be_said(tmp_path: Path, name: str) -> None:
    """Sizes that are missing are those of the config class: test_class_defaults.py."""
    config = {key: value for key, value in QWEN3.items() if key != name}
    assert f"FILE has no {name}; expected" in refusal(tmp_path, config)


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
     "max_position_embeddings", "head_dim", "rope_theta"],
)  # fmt: skip
def test_what_the_model_needs_can_not_be_null(tmp_path: Path, name: str) -> None:
    assert f"FILE: {name} is None; expected" in refusal(tmp_path, QWEN3 | {name: None})


@pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_a_window_that_is_switched_on_and_not_stated_is_transformers_own(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    silent = {key: value for key, value in config.items() if key != "sliding_window"} | {"max_window_layers": 1}
    wide = silent | {"use_sliding_window": True, "max_position_embeddings": 32768}
    assert read(tmp_path, wide).windows == (None, *[4096] * (config["num_hidden_layers"] - 1))
    assert read(tmp_path, wide | {"max_position_embeddings": 4096}).windows == ()
    assert read(tmp_path, silent | {"max_position_embeddings": 32768}).windows == ()


GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 32, "max_position_embeddings": 512, "query_pre_attn_scalar": 32, "sliding_window": 16,
    "rope_theta": 1000000, "rope_local_base_freq": 10000, "dtype": "float32", "sliding_window_pattern": 3,
}  # fmt: skip


def test_gemma_3_has_two_rotary_bases_by_layer(tmp_path: Path) -> None:
    found = read(tmp_path, GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert found.windows == (16, 16, None, 16)
    assert found.gemma3 is not None and found.gemma3.is_local == (True, True, False, True)
    assert (found.rope.theta, found.rope.kind, found.rope.factor) == (1e6, "linear", 8.0)
    assert (found.gemma3.local_rope.theta, found.gemma3.local_rope.kind) == (1e4, "default")
    assert (found.embedding_scale, found.gemma3.query_scale) == (8.0, 1.0)
    covered = read(tmp_path, GEMMA3 | {"sliding_window": 512})
    assert covered.windows == () and covered.gemma3 == found.gemma3, "the base of a layer whose window covers all"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; expected null: the torch engine caps no"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'; expected 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; expected false"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; expected an integer from 1"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "expected an object with full_attention and sliding_attention"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 5.0}}},
            "rope_local_base_freq is 10000; expected 5 as in rope_parameters",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "expected a default rotary setting of sliding_attention",
        ),
        (
            {"rope_parameters": {"full_attention": {}}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "expected no such field beside rope_parameters",
        ),
    ],
)  # fmt: skip
def test_what_is_not_computed_of_gemma_3_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, GEMMA3 | changes)


def test_listed_layers_go_before_the_number_of_the_first_one_with_a_window(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    listed = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0, "layer_types": kinds}
    assert read(tmp_path, QWEN3 | listed).windows == (64, None, 64, None)


@pytest.mark.parametrize("name", sorted(set(LARGEST) - {"head_dim"}))
@pytest.mark.parametrize("value", [0, -1, 1 << 40])
def test_both_readers_of_a_size_say_the_same_bounds(tmp_path: Path, name: str, value: int) -> None:
    config = LLAMA | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError) as strict:
        read_model_config(tmp_path)
    with pytest.raises(UsageError) as lenient:
        read_checkpoint(tmp_path, "model")
    assert str(strict.value) == str(lenient.value)


def test_heads_that_do_not_divide_the_hidden_size_are_refused_unless_their_size_is_stated(tmp_path: Path) -> None:
    odd = {"num_attention_heads": 3, "num_key_value_heads": 1}
    assert "num_attention_heads is 3; expected a divisor of hidden_size, 256" in refusal(tmp_path, LLAMA | odd)
    assert "a divisor of hidden_size" in refusal(tmp_path, QWEN2 | odd)
    assert read(tmp_path, QWEN2 | odd | {"head_dim": 64}).q_size == 192


# --- rotary positions ---


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_parameters": 5}, "rope_parameters is 5; expected a JSON object"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected a JSON object"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": {"rope_type": "yarn"}},
            "expected one of them, or the same in both",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": {"type": "default"}},
            "put the scaling with its rope_theta into rope_parameters, and delete rope_scaling",
        ),
        ({"rope_scaling": {"rope_type": "nonsense"}}, "expected one of default, linear, llama3, yarn, the types that"),
        ({"rope_scaling": {"rope_type": 5}}, "rope_scaling.rope_type is 5; expected one of default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "has no rope_scaling.factor; expected a finite number above 0"),
        ({"rope_scaling": YARN | {"factor": 1e9}}, "factor is 1000000000.0; expected at most 16777216 positions in"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor is 0; expected a number above 0"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast is 0.5; expected at least beta_slow, 1"),
        ({"rope_scaling": YARN | {"beta_slow": 40}}, "beta_slow is 40; expected at most beta_fast, 32"),
        ({"rope_scaling": YARN | {"beta_slow": -1}}, "beta_slow is -1; expected a number of at least 0"),
        ({"rope_scaling": YARN | {"truncate": None}}, "truncate is None; expected true or false, or no such field"),
        ({"rope_scaling": YARN | {"mscale": "1"}}, "rope_scaling.mscale is '1'; expected a finite number of at least"),
        ({"rope_scaling": YARN | {"low_freq_factor": 1.0}}, "expected no such field for rope type 'yarn'"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta is 1.0; expected a number above 1 for rope type"),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "rope_scaling.type is 'linear'; expected 'def"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no rope_scaling.factor; expected"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor is 4.0; expected no such field for rope type 'defaul"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor is 0; expected a number above 0"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "rope_scaling.factor is None; expected"),
        ({"rope_scaling": LLAMA3 | {"factor": float("nan")}}, "rope_scaling.factor is nan; expected a finite"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor is 1.0; expected more than low_freq"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}}, "original_max_position_embeddings is"),
        ({"original_max_position_embeddings": 2048}, "original_max_position_embeddings is 2048; expected 1024 as in"),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 1.0}, "rope_scaling": None}, "rope_theta is 500000.0; expected 1"),
        ({"rope_theta": None}, "rope_theta is None; expected a number above 0"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'; expected a finite number"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1"),
        ({"rope_scaling": LLAMA3 | {"partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor is 0.5"),
        (
            {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters.full_attention is {'rope_type': 'default'}; expected one rotary setting for all layers",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_rotary_settings_that_are_incomplete_doubtful_or_not_computed_are_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    assert says in refusal(tmp_path, LLAMA | changes)


@pytest.mark.parametrize("kind", sorted({*ROPE_INIT_FUNCTIONS, "default", "axial"}))
def test_each_rope_type_of_transformers_is_honoured_or_refused_by_name(tmp_path: Path, kind: str) -> None:
    scaling = {"default": {}, "linear": {"factor": 2.0}, "llama3": LLAMA3, "yarn": YARN}
    if kind in scaling:
        assert read(tmp_path, LLAMA | {"rope_scaling": scaling[kind] | {"rope_type": kind}}).rope.kind == kind
        return
    for name in ("rope_type", "type"):
        said = refusal(tmp_path, LLAMA | {"rope_scaling": {name: kind, "factor": 4.0}})
        assert f"rope_scaling.{name} is {kind!r}; expected one of default, linear, llama3, yarn: the torch" in said
        assert "does not compute this type, as it" in said or "does not compute this type, as its" in said, (
            "name it in _NOT_COMPUTED of trtx/checkpoint/rope.py with the reason, or compute it"
        )


def test_llama3_without_its_original_positions_is_refused_and_the_outer_field_is_one_place_of_them(
    tmp_path: Path,
) -> None:
    rope = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
    said = refusal(tmp_path, LLAMA | {"rope_scaling": rope})
    assert "has no rope_scaling.original_max_position_embeddings; expected the positions that" in said
    outer = {"rope_scaling": rope, "original_max_position_embeddings": 2048}
    assert read(tmp_path, LLAMA | outer).rope.original_max_position == 2048


def test_two_places_that_mean_the_same_are_one(tmp_path: Path) -> None:
    twice = {"rope_parameters": LLAMA3 | {"rope_theta": 500000}, "original_max_position_embeddings": 1024}
    assert read(tmp_path, LLAMA | twice) == read(tmp_path, LLAMA)


# --- published files ---

LLAMA_1 = {
    "_name_or_path": "", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 2048, "max_sequence_length": 2048, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "pad_token_id": 0, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.28.0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
DEEPSEEK_CODER = LLAMA_1 | {
    "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000, "num_key_value_heads": 32,
    "max_position_embeddings": 16384, "pretraining_tp": 1,
}  # fmt: skip
QWEN25 = QWEN2 | {"sliding_window": 131072, "max_window_layers": 28, "use_mrope": False, "unsloth_version": "2025.1"}


@pytest.mark.parametrize(
    ("config", "theta", "kv_heads", "head_dim"),
    [
        (LLAMA_1, 10000.0, 32, 128),
        (SMOLLM2, 100000.0, 3, 64),
        (DEEPSEEK_CODER, 100000.0, 32, 128),
        (QWEN25, 10000.0, 2, 64),
    ],
    ids=["Llama 1", "SmolLM2", "DeepSeek Coder", "Qwen2.5"],
)
def test_published_files_of_every_age_are_read(
    tmp_path: Path, config: dict[str, Any], theta: float, kv_heads: int, head_dim: int
) -> None:
    found = read(tmp_path, config)
    assert (found.rope.theta, found.num_kv_heads, found.head_dim) == (theta, kv_heads, head_dim)


@pytest.mark.parametrize("base", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_null_is_absent_and_what_computes_nothing_is_let_pass(tmp_path: Path, base: dict[str, Any]) -> None:
    plain = read(tmp_path, base)
    for name in ("attention_bias", "mlp_bias", "use_sliding_window", "max_window_layers", "is_causal", "hidden_act"):
        without = {key: value for key, value in base.items() if key != name}
        assert read(tmp_path, base | {name: None}) == read(tmp_path, without)
    assert read(tmp_path, base | {"use_flash_attn": True, "layer_norm_eps": 1e-5}) == plain
    assert "dual_chunk_attention_config is" in refusal(tmp_path, base | {"dual_chunk_attention_config": {"chunk": 8}})


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_this_package_is_read(tmp_path: Path, name: str) -> None:
    config = SHAPES[name].config
    assert read(tmp_path, dict(config)).num_layers == text_config(config)["num_hidden_layers"]


# --- nothing but sentences ---

_BAD: list[Any] = [
    None, "four", "", -1, 0, 1, 3, 10**9, 10**30, 1.5, -1.5, float("nan"), float("inf"), True, False, [], [1], [None],
    {}, {"a": 1}, {"rope_type": "llama3"}, "x" * 5000, [[[[[[]]]]]], "sliding_attention", ["sliding_attention"] * 4,
]  # fmt: skip


@pytest.mark.parametrize(
    "base", [pytest.param(QWEN3, id="qwen3"), pytest.param(LLAMA, id="llama", marks=pytest.mark.proof)]
)
def test_any_value_in_any_field_gives_a_model_or_a_sentence(tmp_path: Path, base: dict[str, Any]) -> None:
    """Of all three readers: the strict one, the tolerant one and the memory plan."""
    names = [
        *base,
        "rope_parameters",
        "quantization_config",
        "layer_types",
        "trtx_synthetic",
        "text_config",
        "dtype",
        "y" * 5000,
    ]
    for name in names:
        for value in _BAD:
            (tmp_path / "config.json").write_text(json.dumps(base | {name: value}))
            for reader in (
                lambda: read_model_config(tmp_path),
                lambda: read_checkpoint(tmp_path, "m"),
                lambda: plan_memory(tmp_path, "agg", {}, engine="tensorrt-llm", device=GPU),
            ):
                try:
                    reader()
                except (UsageError, UnknownShapeError) as refused:
                    assert len(str(refused)) < 1000, (name, value)


def test_modelopts_file_and_the_config_must_agree(tmp_path: Path) -> None:
    own = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    stated = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    found = read(tmp_path, QWEN3 | {"quantization_config": stated}).quantization
    assert found is not None and found.algorithm == "FP8"
    said = refusal(tmp_path, QWEN3 | {"quantization_config": stated | {"quant_algo": "NVFP4"}})
    assert "says 'FP8' and" in said and "says 'NVFP4'; expected the same in both" in said


@pytest.mark.parametrize("content", ["", "[]", '{"quantization": []}', '{"quantization": {"quant_algo": 5}}', "\udcff"])
def test_a_broken_quantization_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "hf_quant_config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=r"hf_quant_config\.json"):
        read(tmp_path, QWEN3)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}'])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    from trtx.checkpoint.weight_index import weight_files

    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UsageError, match=r"index\.json .*(not JSON|holds a list|no weight_map)"):
        weight_files(tmp_path)
