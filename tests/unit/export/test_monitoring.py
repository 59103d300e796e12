"""The files for Prometheus and Grafana: whom they scrape, what their queries use, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from called import call
from certificates import make

from trtx.config import TopologySpec
from trtx.config.hosts import read_hosts
from trtx.export.monitoring.dashboard import NO_GPUS, dashboard
from trtx.export.monitoring.rules import ALERTS, RECORDING
from trtx.launch.host_preparation import prepare_hosts
from trtx.launch.preparation import HOLDER, prepare
from trtx.topology import Plan
from trtx.worker.served_families import FAMILIES
from trtx.worker.upstream_families import UPSTREAM

HOSTS = """
etcd: [http://10.77.0.9:2379]
nats: nats://10.77.0.9:4222
hosts:
- {name: node1, address: 10.77.0.1, device: eth1, frontends: 2, roles: {prefill: 1}}
- {name: node2, address: 10.77.0.2, device: eth1, frontends: 1, roles: {decode: 1}}
"""
FUNCTIONS = {
    "sum", "max", "min", "count", "by", "rate", "increase", "deriv", "and", "or", "min_over_time", "count_over_time",
    "histogram_quantile", "label_values",
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Plan], Path]:
    def write(plan: Plan) -> Path:
        HOLDER.release((*(plan.http_of(one)[1] for one in plan.frontends), *plan.internal_ports))
        directory = tmp_path / plan.namespace
        directory.mkdir()
        (directory / "plan.json").write_text(json.dumps(plan.to_json()))
        return directory

    return write


def planned(tmp_path: Path, **options: Any) -> Plan:
    return prepare(TopologySpec(engine="paced", port=0, **options), run_dir=tmp_path / "run")


def targets(output: Path) -> dict[str, dict[str, str]]:
    """Address -> its labels."""
    document = yaml.safe_load((output / "prometheus.yml").read_text())
    parts = [part for job in document["scrape_configs"] for part in job["static_configs"]]
    return {address: part["labels"] for part in parts for address in part["targets"]}


def test_each_process_of_the_plan_is_a_target(tmp_path: Path, written: Callable[[Plan], Path]) -> None:
    plan = planned(tmp_path, mode="disagg", prefill=2, decode=1)
    done = call("export", "prometheus", str(written(plan)), "--interval", "3", "--output", str(tmp_path / "out"))
    assert (done.code, done.out.count("\n")) == (0, 2), done.err
    found = targets(tmp_path / "out")
    assert found == {
        f"127.0.0.1:{plan.port}": {"topology": plan.namespace, "role": "frontend", "name": "frontend"},
        **{
            f"127.0.0.1:{worker.system_port}": {"topology": plan.namespace, "role": worker.role, "name": worker.name}
            for worker in plan.workers
        },
    }
    assert len(found) == 4
    assert yaml.safe_load((tmp_path / "out" / "prometheus.yml").read_text())["global"]["scrape_interval"] == "3s"


def test_a_topology_over_hosts_is_scraped_at_its_hosts_addresses(
    tmp_path: Path, written: Callable[[Plan], Path]
) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text(HOSTS)
    spec = TopologySpec(engine="paced", mode="disagg")
    plan, _ = prepare_hosts(spec, read_hosts(file), run_dir=tmp_path / "run")
    assert call("export", "prometheus", str(written(plan)), "-o", str(tmp_path / "out")).code == 0
    hosts = {labels["name"]: address.partition(":")[0] for address, labels in targets(tmp_path / "out").items()}
    assert {hosts[worker.name] for worker in plan.workers if worker.host == "node1"} == {"10.77.0.1"}
    assert {hosts[worker.name] for worker in plan.workers if worker.host == "node2"} == {"10.77.0.2"}
    assert len(hosts) == len(plan.processes)


def test_frontends_with_tls_are_scraped_with_it_and_workers_without(
    tmp_path: Path, written: Callable[[Plan], Path]
) -> None:
    own = make(tmp_path, "own", ["localhost", "127.0.0.1"])
    plan = planned(tmp_path, tls_cert=own.certificate, tls_key=own.key)
    assert call("export", "prometheus", str(written(plan)), "-o", str(tmp_path / "out")).code == 0
    frontends, workers = yaml.safe_load((tmp_path / "out" / "prometheus.yml").read_text())["scrape_configs"]
    assert (frontends["scheme"], frontends["tls_config"]) == ("https", {"ca_file": str(own.certificate)})
    assert "scheme" not in workers


def test_several_topologies_are_told_apart(tmp_path: Path, written: Callable[[Plan], Path]) -> None:
    plans = [planned(tmp_path), planned(tmp_path)]
    runs = [str(written(plan)) for plan in plans]
    assert call("export", "prometheus", *runs, "-o", str(tmp_path / "out")).code == 0
    assert {labels["topology"] for labels in targets(tmp_path / "out").values()} == {one.namespace for one in plans}
    again = call("export", "prometheus", runs[0], runs[0])
    assert (again.code, again.err.count("\n")) == (2, 1) and "give each topology once" in again.err


def test_without_gpus_the_export_says_so_once(tmp_path: Path, written: Callable[[Plan], Path]) -> None:
    run = str(written(planned(tmp_path)))
    done = call("export", "prometheus", run)
    assert done.err.count("\n") == 1 and "no alerts about GPUs" in done.err
    assert "TrtxGpu" not in done.out
    assert NO_GPUS in call("export", "grafana", run).out
    assert NO_GPUS not in call("export", "grafana").out


REFUSED = {
    "nothing": ("", None, "RUN is missing"),
    "no such file": ("runs/absent", None, "'runs/absent' does not exist"),
    "an empty directory": (".", None, "has no plan.json"),
    "no JSON": ("plan.json", "{", "is not JSON"),
    "a list": ("plan.json", "[]", "is not a plan of trtx serve"),
    "another document": ("plan.json", '{"schema_version": 2}', "is not a plan of trtx serve"),
    "a later trtx": ("plan.json", '{"schema_version": 99}', "is not a plan of trtx serve"),
    "a benchmark": ("plan.json", '{"topologies": {}}', "is a run of trtx bench"),
}


@pytest.mark.parametrize("verb", ["prometheus", "grafana"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_run_of_serve_is_refused_in_one_sentence(verb: str, case: str, tmp_path: Path) -> None:
    path, content, because = REFUSED[case]
    if verb == "grafana" and not path:
        return  # a dashboard needs no run
    if content is not None:
        (tmp_path / path).write_text(content)
    arguments = [path, "-o", "out"] if path else ["-o", "out"]
    done = call("export", verb, *arguments, directory=tmp_path)
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert because in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("option", "value"), [("--kubernetes", "Demo_1"), ("--namespace", "a;b")])
def test_a_name_that_kubernetes_does_not_take_is_refused(option: str, value: str) -> None:
    rest = [] if option == "--kubernetes" else ["--kubernetes", "demo"]
    done = call("export", "prometheus", *rest, option, value)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"{option} '{value}' is refused" in done.err


def names_in(query: str) -> set[str]:
    """The metrics that a query uses: its words without functions, labels, strings, ranges and variables."""
    bare = re.sub(r"\{[^{}]*\}|\[[^\]]*\]|\bby \([^()]*\)", " ", re.sub(r'"(?:[^"\\]|\\.)*"', '""', query))
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - FUNCTIONS


KNOWN = {name for family in (*FAMILIES.values(), *UPSTREAM.values()) for name in family.sample_names} | {"up"}
RECORDED = {rule.name for rule in RECORDING}


def expressions(document: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]


def test_rules_use_only_families_of_the_records() -> None:
    for rule in RECORDING:
        assert names_in(rule.query) <= KNOWN, rule.name
    for alert in ALERTS:
        assert names_in(alert.query) <= KNOWN | RECORDED, alert.name
    assert {alert.name for alert in ALERTS if alert.needs_gpu} == {
        alert.name for alert in ALERTS if "trtx_gpu_" in alert.query
    }


def test_panels_use_only_families_of_the_records() -> None:
    document = json.loads(dashboard(has_gpus=True).text)
    used = {name for query in expressions(document) for name in names_in(query)}
    assert used <= KNOWN, used - KNOWN
    assert len(used) > 40
    for variable in document["templating"]["list"][1:]:
        assert names_in(variable["definition"]) - {"topology", "model"} <= KNOWN


def test_each_family_of_upstream_is_used() -> None:
    """Or the record would list families of Dynamo that nothing relies on."""
    queries = [*expressions(json.loads(dashboard(has_gpus=True).text)), *(rule.query for rule in RECORDING)]
    used = {name for query in queries for name in names_in(query)}
    unused = {family.name for family in UPSTREAM.values() if not used & {*family.sample_names}}
    assert unused <= {"dynamo_frontend_model_ready"}, unused  # of a variable


@pytest.mark.parametrize("has_gpus", [True, False])
def test_the_dashboard_has_each_row_and_no_panels_overlap(has_gpus: bool) -> None:
    document = json.loads(dashboard(has_gpus=has_gpus).text)
    rows = [panel["title"] for panel in document["panels"] if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency by stage", "KV cache", "GPUs", "KV handoff", "Speculation", "Workers"]
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in document["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    texts = [panel for panel in document["panels"] if panel["type"] == "text"]
    assert len(texts) == (not has_gpus)
    assert ("trtx_gpu_" in "".join(expressions(document))) == has_gpus


def test_each_panel_is_what_grafana_needs_to_draw_it() -> None:
    """Fields that Grafana's dashboard schema (kind Dashboard, version 39) requires of time series."""
    document = json.loads(dashboard(has_gpus=True).text)
    assert document["schemaVersion"] == 39 and len(document["uid"]) <= 40
    for panel in document["panels"]:
        assert {"id", "type", "title", "gridPos"} <= panel.keys()
        if panel["type"] != "timeseries":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"] in {
            "short", "s", "reqps", "ops", "percentunit", "bytes", "Bps", "hertz", "watt", "joule", "celsius",
        }  # fmt: skip
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
