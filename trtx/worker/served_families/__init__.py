"""Every metric family that a worker serves, one record each, in one file for each subject.

The collectors of a worker make their families from these records, and ``docs/reference/served-metrics.md`` lists them.
``upstream_families`` has those of Dynamo that trtx relies on.
"""

from __future__ import annotations

from trtx.engine.served_family import ServedFamily
from trtx.worker.served_families import (
    gpu_and_process_families,
    kv_families,
    media_families,
    request_families,
    speculation_families,
    step_families,
    trtllm_families,
)

FAMILIES: dict[str, ServedFamily] = {
    name: family
    for subject in (
        request_families,
        step_families,
        speculation_families,
        kv_families,
        media_families,
        gpu_and_process_families,
        trtllm_families,
    )
    for name, family in subject.FAMILIES.items()
}
"""Every family of a worker, by name."""
