"""The command line of a worker: it takes every flag that a plan gives it, and acts on it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from other_values import another

from trtx.config import TopologySpec
from trtx.topology.commands import worker_command
from trtx.worker.options import WorkerOptions, parse

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("field", TopologySpec.model_fields)
def test_a_worker_takes_the_flags_of_its_plan(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "engine.yaml").write_text("max_batch_size: 1\n")
    value = another(field, TopologySpec.model_fields[field])
    spec = TopologySpec() if value is None else TopologySpec.model_validate({field: value})
    command = worker_command(
        spec, "agg", "agg-0", engine="torch", model_path=tmp_path, model="tiny", config=tmp_path / "engine.yaml",
        status_file=tmp_path / "status.json", prompts_by_frontend=True, chat_template=tmp_path / "chat.jinja",
    )  # fmt: skip
    try:
        options = parse([*command[command.index("--role") :]])
    except SystemExit:
        pytest.fail(
            "a worker ends at once with a flag that trtx/topology/commands.py gives it; add the flag to "
            f"trtx/worker/options.py: {capsys.readouterr().err.splitlines()[-1]}"
        )
    assert (options.name, options.llm_args) == ("agg-0", {"max_batch_size": 1})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(WorkerOptions)])
def test_a_worker_acts_on_each_option(name: str) -> None:
    read = re.compile(rf"\boptions\.{name}\b")
    files = (ROOT / "trtx" / "worker").rglob("*.py")
    assert any(read.search(file.read_text(encoding="utf-8")) for file in files), (
        f"WorkerOptions.{name} of trtx/worker/options.py is read nowhere in trtx/worker, so its flag does nothing: act "
        "on it, or take it out"
    )
