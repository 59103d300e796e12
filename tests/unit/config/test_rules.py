"""Each rule: a shipped recipe keeps it, one change breaks it, and the fix that it names mends it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

import pytest

from trtx.config import (
    Finding,
    ModelFacts,
    ResolvedEngineConfig,
    check_engine_configs,
    load_engine_config,
    recipe_files,
)
from trtx.config.rules import RULES


@dataclass(frozen=True)
class Case:
    """``change`` breaks ``rule`` in ``recipe``; ``given`` holds before and after."""

    rule: str
    recipe: str
    change: str
    given: tuple[str, ...] = ()
    version: str | None = None
    model: ModelFacts | None = None


_MTP = "deepseek-r1-mtp"
_PIPELINED = "prefill.cache_transceiver_config.enable_pipelined_transfer=true"
_AUTODEPLOY = ("backend=_autodeploy",)
_COLUMNS = ("agg.tensor_parallel_size=8", "agg.moe_expert_parallel_size=4", "agg.moe_tensor_parallel_size=2")
_HELIX = (
    "cp_config={cp_type: HELIX}",
    "tensor_parallel_size=4",
    "context_parallel_size=2",
    "moe_expert_parallel_size=8",
)
CASES = [
    Case("kv-dtype-equal", "deepseek-r1", "decode.kv_cache_config.dtype=auto"),
    Case("tokens-per-block-equal", "deepseek-r1", "prefill.kv_cache_config.tokens_per_block=64"),
    Case("transceiver-backend-equal", "deepseek-r1", "prefill.cache_transceiver_config.backend=NIXL"),
    Case("transceiver-runtime-equal", "deepseek-r1", "decode.cache_transceiver_config.transceiver_runtime=PYTHON"),
    Case("transfer-buffer-equal", "deepseek-r1", "decode.cache_transceiver_config.max_tokens_in_buffer=4096"),
    Case("decode-holds-prefill", "deepseek-r1", "decode.max_seq_len=4096"),
    Case("speculation-on-both", _MTP, "prefill.speculative_config=null"),
    Case(
        "encoder-shares-gpu",
        "qwen2.5-vl",
        "prefill.kv_cache_config.max_tokens=null",
        given=("kv_cache_config.max_tokens=100000", "encode.kv_cache_config=null"),
    ),
    Case("transceiver-backend-set", "deepseek-r1", "cache_transceiver_config.backend=null"),
    Case("python-transceiver-needs-nixl", "deepseek-r1", "cache_transceiver_config.transceiver_runtime=PYTHON"),
    Case("prefill-overlap", "deepseek-r1", "prefill.disable_overlap_scheduler=false"),
    Case("decode-overlap", "deepseek-r1", "decode.disable_overlap_scheduler=true"),
    Case("buffer-holds-prompt", "deepseek-r1", "cache_transceiver_config.max_tokens_in_buffer=4096"),
    Case("long-prompts-have-time", "deepseek-r1", "decode.max_seq_len=131072"),
    Case("bounce-buffer-needs-python", "deepseek-r1", "cache_transceiver_config.kv_cache_bounce_size_mb=512"),
    Case("pipelined-transfer", "deepseek-r1", _PIPELINED, version="1.3.0rc27"),
    Case("one-beam", "deepseek-r1", "max_beam_width=2"),
    Case("prefill-pipeline", "qwen3", "prefill.pipeline_parallel_size=2", version="1.3.0rc7"),
    Case("decode-graphs-cover-batch", "llama4", "decode.cuda_graph_config.max_batch_size=128"),
    Case("graph-sizes-agree", "deepseek-r1", "decode.cuda_graph_config.max_batch_size=512"),
    Case("prefill-graphs-off", "deepseek-r1", "prefill.cuda_graph_config={max_batch_size: 8}"),
    Case("graphs-within-mla-limit", "deepseek-r1", "agg.cuda_graph_config.max_batch_size=2048"),
    Case("autodeploy-graphs-fit", "qwen3", "agg.cuda_graph_config.max_batch_size=512", given=_AUTODEPLOY),
    Case("tokens-cover-batch", _MTP, "decode.max_num_tokens=511"),
    Case("prompts-fit-a-step", "llama4", "agg.enable_chunked_prefill=false"),
    Case("kv-dtype-auto", "qwen3", "kv_cache_config.dtype=bfloat16"),
    Case("block-power-of-two", "qwen3", "kv_cache_config.tokens_per_block=48"),
    Case("windows-without-reuse", "gemma3", "agg.kv_cache_config.enable_block_reuse=true"),
    Case("images-without-reuse", "llama4", "prefill.kv_cache_config.enable_block_reuse=true"),
    Case("offload-needs-reuse", "deepseek-r1", "agg.kv_cache_config.host_cache_size=1000000000"),
    Case("events-need-reuse", "deepseek-r1", "agg.kv_cache_config.event_buffer_max_size=100000"),
    Case("decode-reuse", "deepseek-r1", "decode.kv_cache_config.enable_block_reuse=true"),
    Case("helix-blocks", "deepseek-r1", "agg.cp_config={cp_type: HELIX, tokens_per_block: 64}"),
    Case("moe-backend-for-gpu", "deepseek-r1", "agg.moe_config.backend=TRTLLM"),
    Case("experts-fill-tp", "qwen3-235b-a22b", "decode.moe_tensor_parallel_size=2"),
    Case("experts-fill-tp", "qwen3-235b-a22b", "agg.moe_tensor_parallel_size=1", given=_COLUMNS),
    Case("experts-fill-tp", "deepseek-r1", "moe_expert_parallel_size=32", given=_HELIX),
    Case("experts-fill-tp", "deepseek-r1", "cp_config.cp_type=ULYSSES", given=_HELIX),
    Case("expert-slots-divide", "deepseek-r1-wide-ep", "decode.moe_config.load_balancer.num_slots=290"),
    Case("balancer-on-decode", "deepseek-r1-wide-ep", "prefill.moe_config.load_balancer={num_slots: 288}"),
    Case("batch-per-rank", "deepseek-r1", "agg.enable_attention_dp=true", given=("prefill.enable_attention_dp=false",)),
    Case("attention-dp-has-ranks", "qwen3-30b-a3b", "agg.enable_attention_dp=true"),
    Case("autodeploy-fields", "qwen3", "agg.tensor_parallel_size=2", given=_AUTODEPLOY),
    Case("autodeploy-one-beam", "qwen3", "agg.max_beam_width=4", given=_AUTODEPLOY),
    Case("sleep-has-one-rank", "deepseek-r1", "agg.sleep_config={}"),
    Case("gms-without-balancer", "deepseek-r1-wide-ep", "agg.load_format=GMS"),
    Case("speculation-is-whole", "llama4-eagle3", "agg.speculative_config.max_draft_len=null"),
    Case("speculation-is-whole", "llama4-eagle3", "agg.speculative_config.speculative_model=null"),
    Case("draft-schedule", _MTP, "agg.speculative_config.draft_len_schedule={64: 3}"),
    Case(
        "draft-schedule",
        _MTP,
        "agg.speculative_config.max_concurrency=32",
        given=("agg.speculative_config.draft_len_schedule={64: 1}",),
    ),
    Case(
        "draft-within-context",
        "qwen3",
        "agg.speculative_config={decoding_type: NGram, max_draft_len: 4095}",
        model=ModelFacts("Qwen3ForCausalLM", context_length=4096),
    ),
    Case("lora-targets", "qwen3", "agg.enable_lora=true"),
    Case("kv-consolidator", "qwen3", "agg.kv_connector_config.connector=kvbm"),
    Case("early-first-token", "llama4-eagle3", "agg.enable_early_first_token_response=true"),
    Case("encoder-batch", "qwen3-vl", "encode.max_batch_size=null"),
    Case("encoder-sections", "qwen3-vl", "encode.kv_cache_config={free_gpu_memory_fraction: 0.5}"),
    Case("one-encoder-mode", "qwen3-vl", "encode.mm_encoder_only=true", given=("encode.encode_only=true",)),
    Case(
        "one-encoder-overlap",
        "qwen3-vl",
        "agg.multimodal_config.encoder_side_stream_max_ahead=2",
        given=("agg.multimodal_config={encoder_cuda_graph: {image: {}}}",),
    ),
    Case("no-python-objects", "qwen3", "agg.checkpoint_loader=mine"),
]


def check(case: Case, *overrides: str, engine: str = "tensorrt-llm") -> list[Finding]:
    """Findings of every topology that the recipe's files make."""
    configs = {
        role: load_engine_config(
            role, family=case.recipe, path=path, overrides=(*case.given, *overrides), engine="tensorrt-llm"
        )
        for role, path in recipe_files(case.recipe).items()
    }
    return list(check_engine_configs(configs, engine=engine, version=case.version, model=case.model))


def of_rule(findings: list[Finding], rule: str) -> list[Finding]:
    return [finding for finding in findings if finding.rule == rule]


def fix_of(finding: Finding) -> tuple[str, ...]:
    """The assignments of a fix, as a shell would pass them."""
    assert finding.fix is not None
    words = shlex.split(finding.fix)
    assert set(words[::2]) == {"--set"}
    return tuple(words[1::2])


def assert_mended_or_said(finding: Finding) -> None:
    rule = next(rule for rule in RULES if rule.id == finding.rule)
    said = finding.path in rule.unmendable
    assert (finding.fix is None) == said, (
        f"{rule.id} has {'a' if said else 'no'} fix at {finding.path!r}: give its Breach the --set that mends it, or "
        f"name the path in the rule's unmendable, where a person has to choose; {finding}"
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.recipe}")
def test_a_rule_is_kept_broken_by_one_change_and_mended_by_its_fix(case: Case) -> None:
    assert of_rule(check(case), case.rule) == []
    broken = of_rule(check(case, case.change), case.rule)
    assert broken
    rule = next(rule for rule in RULES if rule.id == case.rule)
    for finding in broken:
        assert (finding.reason, finding.evidence) == (rule.reason, rule.evidence)
        assert finding.path
        assert_mended_or_said(finding)
    mended = [finding.path for finding in broken if finding.fix is not None]
    fixes = [assignment for finding in broken if finding.fix is not None for assignment in fix_of(finding)]
    left = of_rule(check(case, case.change, *fixes), case.rule)
    assert not [finding for finding in left if finding.path in mended], f"the fix of {case.rule} does not mend it"


def test_every_rule_is_broken_by_some_case() -> None:
    needs_a_model = {"encoder-exists"}
    lacking = {rule.id for rule in RULES} - {case.rule for case in CASES} - needs_a_model
    assert not lacking, f"give each a Case, with one change that breaks it: {sorted(lacking)}"


def test_an_encoder_needs_a_model_that_has_one() -> None:
    case = Case("encoder-exists", "qwen3-vl", "", model=ModelFacts("Llama4ForConditionalGeneration"))
    (finding,) = of_rule(check(case), "encoder-exists")
    assert_mended_or_said(finding)
    assert finding.severity == "error"
    assert "Llama4ForConditionalGeneration has no encoder of its own" in finding.message


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_says_why_and_who_says_so(rule: object) -> None:
    assert rule.reason and rule.evidence and rule.severity  # type: ignore[attr-defined]


PYTHON = ("cache_transceiver_config.backend=NIXL", "cache_transceiver_config.transceiver_runtime=PYTHON")


def test_the_python_transceiver_lets_prefill_overlap_and_decode_speculate_alone() -> None:
    case = Case("", _MTP, "", given=(*PYTHON, "prefill.disable_overlap_scheduler=false"))
    findings = check(case, "prefill.speculative_config=null")
    assert of_rule(findings, "prefill-overlap") == []
    assert [finding.severity for finding in of_rule(findings, "speculation-on-both")] == ["note"]


def test_overlap_off_is_worth_a_warning_under_the_python_transceiver() -> None:
    (finding,) = of_rule(check(Case("", _MTP, "", given=PYTHON)), "prefill-overlap")
    assert finding.severity == "warning"


def test_from_the_version_where_python_is_the_default_prefill_may_overlap() -> None:
    change = "prefill.disable_overlap_scheduler=false"
    assert of_rule(check(Case("", "deepseek-r1", "", version="1.3.0rc24"), change), "prefill-overlap")
    assert not of_rule(check(Case("", "deepseek-r1", "", version="1.4.0rc1"), change), "prefill-overlap")


def test_buffers_that_differ_and_both_hold_the_longest_prompt_are_a_warning() -> None:
    change = "decode.cache_transceiver_config.max_tokens_in_buffer=32768"
    (finding,) = of_rule(check(Case("", "deepseek-r1", ""), change), "transfer-buffer-equal")
    assert finding.severity == "warning"


def test_decode_without_any_graph_is_refused_with_the_graphs_that_it_needs() -> None:
    case = Case("", "deepseek-r1", "")
    (finding,) = of_rule(check(case, "decode.cuda_graph_config=null"), "decode-graphs-cover-batch")
    assert finding.severity == "error"
    assert of_rule(check(case, "decode.cuda_graph_config=null", *fix_of(finding)), "decode-graphs-cover-batch") == []


@pytest.mark.parametrize(("stated", "severity"), [({}, "warning"), ({"max_batch_size": 32}, "error")])
def test_graphs_below_a_batch_that_nothing_states_are_a_warning(stated: dict[str, int], severity: str) -> None:
    values = {"max_num_tokens": 8192, "cuda_graph_config": {"max_batch_size": 16}, **stated}
    config = ResolvedEngineConfig("decode", values, "decode.yaml", ())
    (found,) = of_rule(list(check_engine_configs({"decode": config})), "decode-graphs-cover-batch")
    assert (found.severity, found.path) == (severity, "cuda_graph_config.max_batch_size")


def test_a_finding_names_both_values_and_where_they_are_from() -> None:
    case = Case("", "deepseek-r1", "")
    (finding,) = of_rule(check(case, "decode.kv_cache_config.dtype=auto"), "kv-dtype-equal")
    assert finding.message == (
        "kv_cache_config.dtype fp8 (prefill, engine_configs/deepseek-r1/prefill.yaml) but auto (decode, --set)"
    )
    assert finding.roles == ("prefill", "decode")


def test_a_finding_comes_back_from_plan_json_as_it_was() -> None:
    for finding in check(Case("", "deepseek-r1", ""), "decode.kv_cache_config.dtype=auto"):
        assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding


def test_what_binds_tensorrt_llm_alone_is_a_note_for_the_embedded_engine() -> None:
    case = Case("", "deepseek-r1", "")
    changes = ("decode.kv_cache_config.dtype=auto", "prefill.disable_overlap_scheduler=false")
    severities = {finding.rule: finding.severity for finding in check(case, *changes, engine="torch")}
    assert severities["kv-dtype-equal"] == "error"
    assert severities["prefill-overlap"] == "note"
    needed = {rule.id for rule in RULES if rule.every_engine}
    assert needed == {"kv-dtype-equal", "tokens-per-block-equal", "draft-within-context"}


def test_a_rule_that_is_false_for_the_embedded_engine_is_not_checked_there() -> None:
    case = next(case for case in CASES if case.rule == "sleep-has-one-rank")
    assert of_rule(check(case, case.change), "sleep-has-one-rank")
    assert not of_rule(check(case, case.change, engine="torch"), "sleep-has-one-rank")
