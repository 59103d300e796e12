"""Any config of a known family: the same tokens as transformers, which reads the same file, or a refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runner_player import Player, random_prompt
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trtx.checkpoint import read_model_config
from trtx.checkpoint.families import FAMILIES as KNOWN_FAMILIES
from trtx.checkpoint.known_fields import ONLY, PREFIXES_WITHOUT_EFFECT, WITHOUT_EFFECT
from trtx.checkpoint.model_config import KNOWN
from trtx.errors import UsageError
from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.runner import RunnerArgs, create_runner

pytestmark = pytest.mark.slow

VOCAB, PROMPT, COUNT = 61, 40, 4
FAMILIES = {architecture: family.model_type for architecture, family in KNOWN_FAMILIES.items()}


EXPERTS: dict[str | None, dict[str, Any]] = {
    None: {},
    "qwen3_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    # A limit that clamps some of the gates, and a window that the prompt exceeds.
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 0.7, "sliding_window": 9},
}  # fmt: skip


# Bases so short that every pair turns, queries that are scaled by another size, and a window that the prompt exceeds.
GEMMA3: dict[str, Any] = {"rope_local_base_freq": 20.0, "query_pre_attn_scalar": 12, "sliding_window": 9}


def base(architecture: str) -> dict[str, Any]:
    """As its publisher would write it, tiny; with so short a theta that every pair turns within the prompt."""
    return {
        **EXPERTS[KNOWN_FAMILIES[architecture].experts], "architectures": [architecture],
        "model_type": FAMILIES[architecture], "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 50.0,
        "hidden_act": KNOWN_FAMILIES[architecture].defaults.get("hidden_act", "silu"), "tie_word_embeddings": False,
        "dtype": "float32", **(GEMMA3 if KNOWN_FAMILIES[architecture].is_gemma3 else {}),
    }  # fmt: skip


class Checkpoints:
    """Writes configs, and the weights that transformers expects of them: the same for the same name and shape."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.count = 0
        self.accepted = 0

    def write(self, config: dict[str, Any]) -> Path:
        self.count += 1
        path = self.directory / str(self.count)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        return path

    def check(self, config: dict[str, Any]) -> str | None:
        """The refusal; None where it is accepted, and then every probability and token is transformers'."""
        path = self.write(config)
        try:
            read_model_config(path)
        except UsageError as refusal:
            assert str(path / "config.json") in str(refusal)
            assert len(str(refusal)) < 1000 and "\n" not in str(refusal)
            return str(refusal)
        self.accepted += 1
        model = self.reference(path)
        prompt = random_prompt(PROMPT, seed=self.count)
        prompt = [token % VOCAB for token in prompt]
        try:
            runner = create_runner(
                RunnerArgs(model_dir=path, device="cpu", tokens_per_block=8, num_blocks=64, max_batch_size=1)
            )
        except UsageError as refusal:
            pytest.fail(
                f"trtx accepts the config {config}, and refuses the weights that transformers' model of it has; "
                f"correct the row of {config['architectures'][0]} in trtx/checkpoint/families.py (qkv_bias, qk_norm, "
                f"arithmetic), or what trtx/checkpoint/model_config.py makes of it: {refusal}"
            )
        player = Player(runner)
        playing = player.add(prompt, room=COUNT, sampling=SamplingParams(prompt_logprobs=1))
        player.finish([playing], COUNT)
        with torch.no_grad():
            sequence = torch.tensor([prompt + playing.output])
            expected = torch.log_softmax(model(sequence).logits[0].float(), dim=-1)
        entries = playing.results[0].prompt_logprobs or []
        found = [entry[token].logprob for entry, token in zip(entries, prompt[1:], strict=True)]
        wanted = expected[:-1].gather(1, sequence[0, 1:, None])[: PROMPT - 1, 0].tolist()
        differing = (
            f"trtx and transformers compute other values with the config {config}; correct arithmetic, qk_norm, theta "
            f"or window in the row of {config['architectures'][0]} in trtx/checkpoint/families.py"
        )
        assert found == pytest.approx(wanted, abs=2e-3), differing
        assert playing.output == expected[PROMPT - 1 : -1].argmax(dim=-1).tolist(), differing
        return None

    @staticmethod
    def reference(path: Path) -> torch.nn.Module:
        """transformers' model of the file; its weights are written beside it."""
        try:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32).eval()
        except Exception as error:
            pytest.fail(
                f"trtx accepts {path / 'config.json'}, and transformers makes no model of it ({error}); let the row "
                "of the family in trtx/checkpoint/families.py refuse it, and list it in REFUSED of this file"
            )
        weights: dict[str, torch.Tensor] = {}
        for name, value in model.named_parameters():
            drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(sum(name.encode())))
            weights[name] = drawn * (0.2 if value.ndim == 1 else 0.35) + (1.0 if "norm" in name else 0.0)
        model.load_state_dict(weights, strict=False)
        save_file(weights, path / "model.safetensors")
        return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    transformers.logging.set_verbosity_error()
    yield Checkpoints(tmp_path_factory.mktemp("configs"))
    transformers.logging.set_verbosity_warning()


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = LLAMA3 | {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
HALF = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
ALTERNATING = {
    "use_sliding_window": True, "sliding_window": 13, "layer_types": ["sliding_attention", "full_attention"]
}  # fmt: skip

# Changes that other families accept, and that make a config of this family wrong or another model.
REFUSED: dict[str, tuple[dict[str, Any], ...]] = {
    "MistralForCausalLM": (
        {"num_key_value_heads": None},
        {"layer_types": ["full_attention", "full_attention"]},
        ALTERNATING,
    ),
    "LlamaForCausalLM": (WINDOW, HALF, ALTERNATING),
    "Qwen3MoeForCausalLM": ({"num_key_value_heads": None}, ALTERNATING),
    "GptOssForCausalLM": (
        {"num_key_value_heads": None},
        {"sliding_window": None, "partial_rotary_factor": 1.0},
        {"max_position_embeddings": 8192, "sliding_window": None},
    ),
    "Gemma3ForCausalLM": (
        {"num_key_value_heads": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}},
        {"rope_parameters": SCALED | {"rope_theta": 50.0}, "rope_scaling": SCALED},
        {"rope_parameters": YARN | {"rope_theta": 50.0}},
        {"sliding_window": None, "partial_rotary_factor": 1.0},
        {"max_position_embeddings": 8192, "sliding_window": None},
    ),
}


CHANGES: list[dict[str, Any]] = [
    {},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": SCALED},
    {"rope_parameters": SCALED | {"rope_theta": 50.0}, "rope_scaling": SCALED},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    {"rope_parameters": YARN | {"rope_theta": 50.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": YARN, "max_position_embeddings": 32},
    {"rope_scaling": YARN, "max_position_embeddings": 16},
    {"rope_scaling": YARN | {"factor": None}, "max_position_embeddings": 64},
    {"rope_scaling": YARN | {"attention_factor": 0.7}},
    {"rope_scaling": YARN | {"beta_fast": 4, "beta_slow": 0.5, "truncate": False}},
    {"rope_scaling": YARN | {"beta_fast": 0, "beta_slow": 0}},
    {"rope_scaling": YARN | {"mscale": 1.4, "mscale_all_dim": 0.7}},
    {"rope_scaling": YARN | {"mscale": 1.4, "mscale_all_dim": 0}},
    {"rope_scaling": YARN | {"factor": 0.5}},
    {"rope_scaling": YARN | {"factor": 8.0}, "head_dim": 6},
    {"head_dim": 16},
    {"num_key_value_heads": None},
    {"tie_word_embeddings": True},
    {"attention_bias": True},
    {"hidden_act": "swish"},
    {"rms_norm_eps": 0.1},
    {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    {"layer_types": ["full_attention", "full_attention"]},
    {"sliding_window": None, "partial_rotary_factor": 1.0},
    {"max_position_embeddings": 8192},
    {"max_position_embeddings": 8192, "sliding_window": None},
    WINDOW,
    HALF,
    ALTERNATING,
]


def _each_for_one_family(
    cases: list[Any], *, also: Callable[[str, Any], bool] = lambda architecture, case: False
) -> Any:
    """Each case with one family in turn, and with the others in make proof. ``also``: which are never left out."""
    return [
        pytest.param(
            architecture,
            case,
            id=f"{architecture}-{case}",
            marks=() if (place + number) % len(FAMILIES) == 0 or also(architecture, case) else pytest.mark.proof,
        )
        for number, case in enumerate(cases)
        for place, architecture in enumerate(FAMILIES)
    ]


@pytest.mark.parametrize(
    ("architecture", "changes"),
    _each_for_one_family(CHANGES, also=lambda architecture, changes: changes in REFUSED.get(architecture, ())),
)
def test_what_is_accepted_means_what_it_means_to_transformers(
    checkpoints: Checkpoints, architecture: str, changes: dict[str, Any]
) -> None:
    refused = changes in REFUSED.get(architecture, ())
    found = checkpoints.check(base(architecture) | changes)
    assert (found is not None) == refused, (
        f"{changes}: {found or 'accepted'}; correct the row of {architecture} in FAMILIES of "
        f"trtx/checkpoint/families.py, or add this change to its row of REFUSED in {Path(__file__).name}"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 6},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 3},
        {"mlp_only_layers": [0]},
        {"mlp_only_layers": None},
        {"num_experts": None, "num_local_experts": 5},
    ],
    ids=str,
)
def test_fields_of_experts_mean_what_they_mean_to_transformers(
    checkpoints: Checkpoints, changes: dict[str, Any]
) -> None:
    changed = base("Qwen3MoeForCausalLM") | changes
    assert checkpoints.check({name: value for name, value in changed.items() if value is not None}) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts_per_tok": 6},
        {"num_local_experts": None, "num_experts": 5},
        {"swiglu_alpha": 0.8},
        {"swiglu_limit": 0.3},
        {"swiglu_limit": 0.0},
        {"sliding_window": 9, "use_sliding_window": False},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": None},
        {"attention_bias": False},
        {"rope_parameters": {}},
        {"experts_per_token": 2, "initial_context_length": 4096},
        {"head_dim": None, "num_key_value_heads": 4},
    ],
    ids=str,
)
def test_fields_of_a_gpt_oss_mean_what_they_mean_to_transformers(
    checkpoints: Checkpoints, changes: dict[str, Any]
) -> None:
    changed = base("GptOssForCausalLM") | changes
    assert checkpoints.check({name: value for name, value in changed.items() if value is not None}) is None


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        (
            "Qwen3MoeForCausalLM",
            {"num_experts_per_tok": 7},
            "num_experts_per_tok is 7; expected at most num_experts, 6",
        ),
        ("Qwen3MoeForCausalLM", {"num_local_experts": 4}, "num_local_experts is 4; expected 6 as in num_experts"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 1}, "mlp_only_layers is 1; expected a list of layers"),
        (
            "Qwen3MoeForCausalLM",
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*"]}},
            "quantizes experts to NVFP4, and the torch engine computes experts in full precision or FP8",
        ),
        (
            "Qwen3MoeForCausalLM",
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*.experts.2.*"]}},
            "excludes model.layers.0.mlp.experts.2.gate_proj; the torch engine expects all experts of a layer in one",
        ),
        ("GptOssForCausalLM", {"num_experts": 4}, "num_local_experts is 6; expected 4 as in num_experts"),
        ("GptOssForCausalLM", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; expected at most num_local_exp"),
        ("GptOssForCausalLM", {"experts_per_token": 3}, "experts_per_token is 3; expected 2 as in num_experts_per_tok"),
        (
            "GptOssForCausalLM",
            {"initial_context_length": 9},
            "initial_context_length is 9; expected 4096 as original_m",
        ),
        ("GptOssForCausalLM", {"swiglu_limit": None}, "swiglu_limit is None; expected a finite number of at least 0"),
        ("GptOssForCausalLM", {"swiglu_alpha": 2}, "swiglu_alpha is 2; expected a number with a decimal point, as"),
        ("GptOssForCausalLM", {"moe_intermediate_size": 8}, "moe_intermediate_size is 8; expected no such field in a"),
        ("GptOssForCausalLM", {"sliding_window": None}, "sliding_window is None; expected a number of positions, or"),
        (
            "GptOssForCausalLM",
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*self_attn*"]}},
            "to FP8, and the torch engine computes experts in full precision or in MXFP4 as published",
        ),
        (
            "GptOssForCausalLM",
            {
                "quantization_config": {
                    "quant_method": "mxfp4",
                    "modules_to_not_convert": ["model.layers.0.mlp.experts"],
                }
            },
            "excludes experts from MXFP4, and the torch engine expects all experts of a gpt-oss in one format",
        ),
        (
            "GptOssForCausalLM",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "intermediate_size is 48; expected a multiple of 32, the block of MXFP4",
        ),
        ("Qwen3ForCausalLM", {"num_experts": 4}, "num_experts is 4; expected no such field in a Qwen3ForCausalLM"),
    ],
)
def test_fields_of_experts_that_fit_no_model_are_refused(
    checkpoints: Checkpoints, architecture: str, changes: dict[str, Any], words: str
) -> None:
    assert words in (checkpoints.check(base(architecture) | changes) or "accepted")


def _rope() -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "rope_type": st.sampled_from(["default", "linear", "llama3", "yarn", "yarn", "dynamic", "nonsense"]),
            "type": st.sampled_from(["linear", "llama3", "yarn"]),
            "rope_theta": st.sampled_from([50.0, 500.0]),
            "factor": st.sampled_from([1.0, 4, 8.0]),
            "low_freq_factor": st.sampled_from([1.0, 2.0]),
            "high_freq_factor": st.sampled_from([4.0, 1.0]),
            "original_max_position_embeddings": st.sampled_from([16, 64, 512]),
            **_yarn_fields(),
            "partial_rotary_factor": st.sampled_from([1.0, 0.5]),
            "full_attention": st.just({"rope_type": "default", "rope_theta": 500.0}),
        },
    )


def _yarn_fields() -> dict[str, st.SearchStrategy[Any]]:
    return {
        "attention_factor": st.sampled_from([0.7, 1.0, None]),
        "beta_fast": st.sampled_from([32, 8.0, 0, None]),
        "beta_slow": st.sampled_from([1, 0.5, 0, None]),
        "mscale": st.sampled_from([1.0, 1.4, 0]),
        "mscale_all_dim": st.sampled_from([1.0, 0.7, None]),
        "truncate": st.sampled_from([True, False, None]),
    }


def _scaled() -> st.SearchStrategy[Any]:
    """Complete ones, of which drawing field by field makes few."""
    yarn = st.fixed_dictionaries({name: st.just(value) for name, value in YARN.items()}, optional=_yarn_fields())
    complete = st.one_of(
        st.sampled_from([SCALED, {"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"}]), yarn, yarn
    )
    theta = st.sampled_from([{}, {"rope_theta": 50.0}, {"rope_theta": 500.0}])
    return st.builds(lambda rope, theta: rope | theta, complete, theta)


def _of_layers() -> st.SearchStrategy[Any]:
    """Gemma 3's, by the kind of a layer."""
    local = st.sampled_from([{"rope_type": "default"}, {"rope_type": "default", "rope_theta": 20.0}])
    return st.fixed_dictionaries({}, optional={"full_attention": _scaled(), "sliding_attention": local})


def _fields() -> dict[str, st.SearchStrategy[Any]]:
    rope = st.one_of(st.none(), _scaled(), _scaled(), _rope())
    windows = [["full_attention"] * 2, ["full_attention", "sliding_attention"], ["sliding_attention"] * 2]
    return {
        "rope_parameters": st.one_of(rope, _of_layers()),
        "rope_scaling": rope,
        "rope_theta": st.sampled_from([50.0, 500.0, 10000]),
        "original_max_position_embeddings": st.sampled_from([16, 32, 64]),
        "partial_rotary_factor": st.sampled_from([1.0, 1.0, 0.5]),
        "head_dim": st.sampled_from([2, 6, 7, 8, 16]),
        "num_key_value_heads": st.sampled_from([1, 2, 3, 4, None]),
        "attention_bias": st.booleans(),
        "mlp_bias": st.sampled_from([False, False, False, True]),
        "tie_word_embeddings": st.booleans(),
        "hidden_act": st.sampled_from(["silu", "silu", "swish", "gelu"]),
        "rms_norm_eps": st.sampled_from([1e-6, 1e-5, 0.5]),
        "use_sliding_window": st.booleans(),
        "sliding_window": st.sampled_from([None, 8, 64]),
        "max_window_layers": st.sampled_from([0, 1, 2, 28]),
        "layer_types": st.sampled_from([None, windows[0], windows[0], *windows]),
        "is_causal": st.sampled_from([True, True, False]),
        "pretraining_tp": st.sampled_from([1, 2]),
        "swiglu_alpha": st.sampled_from([1.702, 0.8]),
        "swiglu_limit": st.sampled_from([7.0, 0.3]),
        "experts_per_token": st.sampled_from([2, 3]),
        "initial_context_length": st.sampled_from([16, 4096]),
        "attn_logit_softcapping": st.sampled_from([None, None, 30.0]),
        "final_logit_softcapping": st.sampled_from([None, None, 30.0]),
        "hidden_activation": st.sampled_from(["gelu_pytorch_tanh", "silu"]),
        "query_pre_attn_scalar": st.sampled_from([8, 30]),
        "use_bidirectional_attention": st.sampled_from([None, False, True]),
        "rope_local_base_freq": st.sampled_from([20.0, 300.0]),
        "sliding_window_pattern": st.sampled_from([1, 2, 3]),
    }  # fmt: skip


def _changes() -> st.SearchStrategy[dict[str, Any]]:
    fields = _fields()
    # Few at a time: of many at once nearly all are refused, and nothing is compared.
    names = st.sets(st.sampled_from(sorted(fields)), max_size=4)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in sorted(chosen)}))


@settings(
    max_examples=examples(100), derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    architecture=st.sampled_from(sorted(FAMILIES)),
    changes=_changes(),
    dropped=st.sets(
        st.sampled_from(["rope_theta", "head_dim", "num_key_value_heads", "tie_word_embeddings"]), max_size=2
    ),
)
def test_a_generated_config_is_refused_or_has_transformers_tokens(
    checkpoints: Checkpoints, architecture: str, changes: dict[str, Any], dropped: set[str]
) -> None:
    kept = {name: value for name, value in base(architecture).items() if name not in dropped}
    checkpoints.check(kept | changes)


@pytest.mark.parametrize(("architecture", "missing"), _each_for_one_family(list(base("Qwen3ForCausalLM"))))
def test_a_config_without_a_field_is_refused_or_means_what_it_means_to_transformers(
    checkpoints: Checkpoints, architecture: str, missing: str
) -> None:
    kept = {name: value for name, value in base(architecture).items() if name != missing}
    try:
        checkpoints.check(kept)
    except (AssertionError, UsageError, RuntimeError) as error:
        pytest.fail(
            f"{architecture} without {missing} is another model here than to transformers ({str(error)[:200]}): put "
            "its row in FAMILIES of trtx/checkpoint/families.py right, which says what it takes then, or "
            "refuse the config"
        )


def test_every_field_that_is_computed_is_drawn() -> None:
    drawn = set().union(*map(base, FAMILIES)) | _fields().keys() | {"num_local_experts"}
    lacking = sorted(KNOWN - drawn - {"quantization_config"})  # whose values test_runner_quantized.py has
    assert not lacking, (
        f"{', '.join(lacking)} in KNOWN of trtx/checkpoint/model_config.py is compared with transformers nowhere: give "
        f"it values in _fields of {Path(__file__).name}"
    )


def test_the_generated_configs_are_not_all_refused(checkpoints: Checkpoints) -> None:
    """Runs after the others of this module, and counts what they compared."""
    assert checkpoints.accepted > 30


def _foreign() -> dict[str, dict[str, Any]]:
    """Decoder configs of every other family of transformers, as its classes write them, by model type."""
    found = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type in FAMILIES.values():
            continue
        try:
            config = CONFIG_MAPPING[model_type]()
            whole = json.loads(json.dumps(config.get_text_config(decoder=True).to_dict(), default=str))
        except Exception:  # families whose packages are not here
            continue
        found[model_type] = whole
    return found


def test_foreign_families_are_refused_and_under_a_dense_name_refused_or_computed(checkpoints: Checkpoints) -> None:
    foreign = _foreign()
    assert len(foreign) >= 100
    accepted = []
    for index, (model_type, fields) in enumerate(foreign.items()):
        own = fields | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]], "model_type": model_type}
        assert checkpoints.check(own) is not None, model_type
        architecture = sorted(FAMILIES)[index % len(FAMILIES)]
        kept = {name: value for name, value in base(architecture).items() if name != "rope_theta"}
        relabelled = fields | kept | {"pad_token_id": None}  # an id of its own, larger vocabulary
        if isinstance(kinds := fields.get("layer_types"), list):
            relabelled["layer_types"] = kinds[:2]
        if checkpoints.check(relabelled) is None:
            accepted.append(model_type)
    assert len(accepted) > 3, "those whose fields are all known here"


_MODULES = [kind.removesuffix("_text") for kind in FAMILIES.values()]
_MODELING = (*(f"models/{kind}/modeling_{kind}" for kind in _MODULES), "masking_utils")
_ATTRIBUTE = re.compile(r"""\bconfig\.([a-z]\w*)\b(?!\()|getattr\((?:self\.)?config,\s*["'](\w+)["']""")
# What transformers derives or sets itself, or asks of families other than these.
_NOT_OF_A_FILE = {
    "per_layer_config",  # of heterogeneous models; refused as unknown
    "attention_chunk_size",  # of layer types other than full attention; refused as unknown
    "get_text_config",
    # of Gemma 3 with images, another architecture; refused as unknown
    "text_config", "vision_config", "image_token_id", "mm_tokens_per_image",
}  # fmt: skip


WHERE_KNOWN = (
    "name it in WITHOUT_EFFECT of trtx/checkpoint/known_fields.py where tokens don't depend on it, or in ONLY with the "
    "values that change none; else read it in trtx/checkpoint/model_config.py and name it in KNOWN there"
)


def test_every_field_that_transformers_code_of_these_families_reads_is_known_here() -> None:
    """A release of transformers that reads another field breaks this test, and not somebody's answers."""
    root = Path(transformers.__file__).parent
    read = {
        name
        for file in _MODELING
        for match in _ATTRIBUTE.finditer((root / f"{file}.py").read_text(encoding="utf-8"))
        for name in match.groups()
        if name
    }
    assert {"rms_norm_eps", "sliding_window", "is_causal", "layer_types"} <= read
    known = KNOWN | ONLY.keys() | WITHOUT_EFFECT | _NOT_OF_A_FILE
    unknown = {name for name in read if name not in known and not name.startswith(PREFIXES_WITHOUT_EFFECT)}
    assert not unknown, f"transformers' code of these families reads {sorted(unknown)} of a config: {WHERE_KNOWN}"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_field_of_transformers_own_classes_is_known_here(architecture: str) -> None:
    written = CONFIG_MAPPING[FAMILIES[architecture]]().to_dict()
    known = KNOWN | ONLY.keys() | WITHOUT_EFFECT
    unknown = {name for name in written if name not in known and not name.startswith(PREFIXES_WITHOUT_EFFECT)}
    assert not unknown, f"transformers writes {sorted(unknown)} into a config of {architecture}: {WHERE_KNOWN}"
