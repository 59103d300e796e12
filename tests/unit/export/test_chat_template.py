"""A chat template and parsers in pods: the text is in the ConfigMap that workers mount, at the path of their flag."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trtx.config import TopologySpec
from trtx.export.kubernetes import KubernetesTarget, export

TEXT = "{% if tools %}<tool_call>{% endif %}{{ messages }}\n"


@pytest.mark.parametrize("form", ["plain", "operator"])
def test_workers_in_pods_get_the_template_and_its_parsers(form: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEXT)
    asked = TopologySpec(model="synthetic:qwen3-0.6b", engine="torch", chat_template=tmp_path / "chat.jinja")
    target = KubernetesTarget(form=form, name="shown", image="registry.example/trtx:1.4.2", gpus_per_node=1)
    made = export(asked, target)
    found = [one for file in made.files for one in yaml.safe_load_all(file.text)]
    (config_map,) = [one for one in found if one["kind"] == "ConfigMap"]
    assert config_map["data"]["chat_template.jinja"] == TEXT
    if form == "plain":
        pods = [one["spec"]["template"] for one in found if one["kind"] == "Deployment"]
    else:
        (graph,) = [one for one in found if one["kind"] == "DynamoGraphDeployment"]
        pods = [one["podTemplate"] for one in graph["spec"]["components"]]
    workers = 0
    for container in (pod["spec"]["containers"][0] for pod in pods):
        words = container["args"]
        assert "--prompts-template" not in words
        if "--role" in words:
            workers += 1
            (mount,) = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "engine-configs"]
            assert words[words.index("--chat-template") + 1] == f"{mount}/chat_template.jinja"
            assert words[words.index("--tool-call-parser") + 1] == "hermes"
    assert workers == 1
    assert "tool calls: Dynamo's parser hermes because the chat template contains <tool_call>" in made.reasons
