"""Compares the metrics of a running process with the records of trtx/worker/served_families."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from trtx.engine.served_family import RANK, ServedFamily
from trtx.frontend.queue_metrics import QUEUE_FAMILIES
from trtx.worker.served_families import FAMILIES
from trtx.worker.upstream_families import UPSTREAM

# What Dynamo adds to each family of a worker.
_AUTOMATIC = {"dynamo_namespace", "dynamo_component", "dynamo_endpoint", "model", "model_name", "worker_id"}
# Families that a torch worker on a CPU, with a dense text model and without guided decoding, does not serve.
_ABSENT = (
    "trtx_gpu_", "trtx_media_", "trtx_encoder_", "trtx_embedding_", "trtx_grammar", "trtx_draft", "trtx_accepted_draft",
    "trtx_kv_tier_", "trtx_expert_", "trtx_shared_weight",
    "trtllm_spec_decode_",
)  # fmt: skip
_ON_GPU = {
    "trtx_step_device_wait_seconds_total", "trtx_graph_misses_total", "trtllm_gpu_memory_usage_bytes",
    "trtllm_pinned_memory_usage_bytes",
}  # fmt: skip


def check_queue(text: str) -> None:
    """Asserts that ``text``, the answer of a frontend whose queue is bounded, holds each family as recorded."""
    kinds = dict(line.split(" ")[2:4] for line in text.splitlines() if line.startswith("# TYPE "))
    assert kinds == {name: family.kind for name, family in QUEUE_FAMILIES.items()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert set(sample.labels) == set(QUEUE_FAMILIES[sample.name].labels)


def check_served(text: str, role: str, *, has_images: bool = False) -> None:
    """Asserts that ``text``, the metrics of a torch topology's process, holds each family of ``role`` as recorded.

    The process has served requests.
    """
    kinds: dict[str, str] = {}
    labels: dict[str, set[frozenset[str]]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).add(frozenset(sample.labels))
    own = {name for name in kinds if name.startswith(("trtx_", "process_", "trtllm_"))}
    assert own <= FAMILIES.keys(), f"without a record: {sorted(own - FAMILIES.keys())}"
    records = {**FAMILIES, **UPSTREAM}
    expected = {name for name, family in records.items() if role in family.by and not _is_absent(family, has_images)}
    assert expected <= kinds.keys(), f"{role} does not serve {sorted(expected - kinds.keys())}"
    for name in expected:
        record = records[name]
        assert kinds[name] == record.kind, f"{name} is a {kinds[name]}"
        for sample in record.sample_names:
            for found in labels.get(sample, ()):
                added = _AUTOMATIC if name in FAMILIES else set[str]()
                assert found - added - {"le", RANK} == set(record.labels) - {RANK}, f"{sample}: {sorted(found)}"


def _is_absent(family: ServedFamily, has_images: bool) -> bool:
    if family.name in _ON_GPU:
        return True
    return family.name.startswith(_ABSENT) and not (has_images and family.when.startswith("for a model with images"))
