"""A topology's name is as long as what is made of it allows: no longer one is written, and no shorter one refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from examples import first_of
from test_schemas import graph_problems

from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.export.kubernetes import KubernetesTarget, export

pytestmark = pytest.mark.slow
MODEL, IMAGE = "synthetic:qwen3-0.6b", "registry.example/trtx:1.4.2"
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "agg": {},
    "disagg": {"mode": "disagg"},
    "agg over nodes": {"tp": 16},
    "disagg over nodes": {"mode": "disagg", "tp": 16},
}
LONGEST = {"agg": 37, "disagg": 37, "agg over nodes": 35, "disagg over nodes": 27}
SERVED = "a-model-with-a-name-that-is-far-longer-than-any-name-of-the-cluster"


def graph_of(name: str | None, topology: dict[str, Any], **more: Any) -> dict[str, Any]:
    spec = TopologySpec(model=MODEL, engine="tensorrt-llm", **topology, **more)
    given = {} if name is None else {"name": name}
    files = export(spec, KubernetesTarget(image=IMAGE, **given)).files
    manifests = [one for file in files for one in yaml.safe_load_all(file.text)]
    (found,) = [one for one in manifests if one["kind"] == "DynamoGraphDeployment"]
    return dict(found)


@pytest.mark.parametrize("kind", first_of(2, ["agg", "disagg over nodes", "disagg", "agg over nodes"]))
def test_every_name_that_is_written_is_one_that_the_operator_takes(kind: str) -> None:
    taken = []
    for length in range(LONGEST[kind] - 1, 41):
        try:
            written = graph_of("n" * length, TOPOLOGIES[kind])
        except UsageError as error:
            assert f"has {length} characters, and Dynamo's operator takes {LONGEST[kind]} with" in str(error)
        else:
            taken.append(length)
            assert graph_problems(written) == []
    assert taken == [LONGEST[kind] - 1, LONGEST[kind]]


@pytest.mark.parametrize("kind", first_of(2, ["agg", "disagg over nodes", "disagg", "agg over nodes"]))
def test_a_name_that_is_made_of_the_model_is_cut_to_what_the_operator_takes(kind: str) -> None:
    written = graph_of(None, TOPOLOGIES[kind], served_model_name=SERVED)
    mode = TOPOLOGIES[kind].get("mode", "agg")
    assert graph_problems(written) == []
    assert written["metadata"]["name"].startswith("a-model") and written["metadata"]["name"].endswith(f"-{mode}")


def test_without_the_operator_a_name_has_40_characters_whatever_the_roles() -> None:
    spec = TopologySpec(model=MODEL, engine="tensorrt-llm", mode="disagg")
    made = export(spec, KubernetesTarget(form="plain", name="n" * 40, image=IMAGE))
    assert any(f"name: {'n' * 40}-frontend" in file.text for file in made.files)
