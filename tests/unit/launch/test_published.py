"""What is taken from etcd of a topology: what a person could have typed, and nothing that is run, read or written."""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.checkpoint import resolve_checkpoint
from trtx.config import TopologySpec
from trtx.config.hosts import HostsSpec
from trtx.config.wording import LIST_ITEM
from trtx.errors import LaunchError, UsageError
from trtx.launch.host_preparation import plan_again, prepare_hosts
from trtx.launch.published import Published, PublishedInputs, find_published
from trtx.topology import Credentials, EtcdService, Machine, Plan, settle

MODEL = "synthetic:tiny-trained"
PATH = resolve_checkpoint(MODEL).path
FILES = Credentials(username="ada", password_file=Path("/secret/nats"))


def prepared(
    run_dir: Path, *, engine: str = "paced", of_file: dict[str, Any] | None = None, **spec: Any
) -> tuple[Plan, PublishedInputs]:
    hosts = HostsSpec.model_validate(
        {
            "name": "t",
            "etcd": ["http://10.0.0.1:2379"],
            "nats": "nats://10.0.0.1:4222",
            "hosts": [{"name": f"node{n}", "address": f"10.0.0.{n}", "device": "eth1"} for n in (1, 2)],
        }
        | (of_file or {})
    )
    asked = TopologySpec.model_validate({"engine": engine, "model": MODEL, "workers": 2} | spec)
    return prepare_hosts(asked, hosts, run_dir=run_dir)


PLAN, ASKED = prepared(Path("/runs/first"))
HONEST: dict[str, Any] = json.loads(Published.of(ASKED, PATH).to_bytes())


def joined(document: Any, run_dir: Path = Path("/runs/joined"), **files: Any) -> Plan:
    """The plan as a joining host makes it."""
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    found = Published.from_bytes(content, "t", **files)
    return plan_again(found.asked, model_path=found.check_here(None), this_host="node1", run_dir=run_dir)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"mode": "disagg", "prefill": 2, "decode": 2, "overrides": ("max_batch_size=7", "decode.max_num_tokens=512")},
        {"engine": "torch", "router_mode": "kv", "router_args": ("--router-temperature", "0.5")},
        {"engine": "simulated", "served_model_name": "mine", "port": 9000},
    ],
)
def test_who_joins_makes_the_very_share_that_was_planned(tmp_path: Path, spec: dict[str, Any]) -> None:
    first, asked = prepared(tmp_path / "first", **spec)
    again = joined(json.loads(Published.of(asked, PATH).to_bytes()), tmp_path / "joined")
    machine = Machine(cpu_cores=8, gpus=())
    for host in ("node1", "node2"):
        here, there = (
            settle(one.share(host), machine, model_path=PATH, run_dir=tmp_path / "here", scratch_parent=tmp_path)
            for one in (first, again)
        )
        assert here.processes == there.processes and here.engine_configs == there.engine_configs
        assert (here.etcd, here.nats, here.model, here.url) == (there.etcd, there.nats, there.model, there.url)


def test_who_joins_is_told_what_the_engine_does_not_act_on_too(tmp_path: Path) -> None:
    first, asked = prepared(tmp_path / "first", engine="torch", overrides=("moe_config.backend=CUTLASS",))
    again = joined(json.loads(Published.of(asked, PATH).to_bytes()), tmp_path / "joined")
    assert any("moe_config.backend (--set)" in one for one in first.all_warnings)
    assert "engine torch does not act on moe_config.backend of the published plan" in again.reasons
    for plan in (first, again):
        share = plan.share("node2")
        assert [one.path for one in share.left_out] == ["moe_config.backend"]
        assert "moe_config" not in share.engine_configs["agg"]


def test_it_is_small_and_has_no_command_and_no_secret(tmp_path: Path) -> None:
    auth = {"username": "ada", "password_file": "/secret/nats"}
    first, asked = prepared(tmp_path, of_file={"nats_auth": auth, "etcd_auth": auth})
    content = Published.of(asked, PATH).to_bytes()
    assert len(content) < 4096
    for word in ("argv", "env", "/secret", "ada", "python", str(tmp_path)):
        assert word.encode() not in content
    with pytest.raises(UsageError, match="name them with --nats-auth"):
        Published.from_bytes(content, "t")
    again = joined(content, etcd_files=FILES, nats_files=FILES)
    assert again.nats == first.nats and again.etcd == first.etcd


TAMPERED: dict[str, tuple[tuple[str, ...], Any]] = {
    "commands": (("plan",), PLAN.to_json()),
    "environment": (("env",), {"LD_PRELOAD": "/tmp/x.so"}),
    "another topology's": (("hosts", "name"), "u"),
    "a secret file for its NATS": (("hosts", "nats_auth"), {"username": "a", "password_file": "/root/.ssh/id_rsa"}),
    "an engine of others": (("engine",), "os.system"),
    "an override": (("spec", "overrides"), ["max_batch_size=7"]),
    "a config file": (("spec", "engine_configs"), {"agg": "/etc/passwd"}),
    "a module for the frontend": (("spec", "router_args"), ["--frontend-route-extension", "os:system"]),
    "the same, cut short": (("spec", "router_args"), ["--frontend-route=os:system"]),
    "a file to write": (("spec", "router_args"), ["--dump-config-to", "/etc/cron.d/x"]),
    "a model's code": (("engine_configs", "agg", "trust_remote_code"), True),
    "an environment for the engine": (("engine_configs", "agg", "env_overrides"), {"LD_PRELOAD": "x"}),
    "a class for the engine": (("engine_configs", "agg", "kv_connector_config"), {"connector_module": "os"}),
    "a path for the engine": (("engine_configs", "agg", "dtype"), "/etc/passwd"),
    "a field that is none": (("engine_configs", "agg", "max_batch_sizes"), 7),
    "a value that is none": (("engine_configs", "agg", "max_batch_size"), "seven"),
    "the older version": (("schema_version",), 1),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_what_was_tampered_with_is_refused(what: str) -> None:
    path, value = TAMPERED[what]
    document = copy.deepcopy(HONEST)
    node = document
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    with pytest.raises(UsageError) as refused:
        joined(document)
    assert "\n" not in str(refused.value)
    joined(HONEST)  # by which the refusal is for what was done to it


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"[[]]", b"\xff", b"[" * 100_000, b'{"a":1,"a":2}', b"NaN"])
def test_what_is_no_plan_is_refused_in_one_sentence(content: bytes) -> None:
    with pytest.raises(UsageError, match=r"^the plan of topology 't' in etcd can't be read by this trtx \(") as refused:
        Published.from_bytes(content, "t")
    told = str(refused.value)
    assert "\n" not in told and "NoneType" not in told and "indices" not in told and len(told) < 600


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, entry in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(entry, (*path, key))


WRONG = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=8),
    st.lists(st.integers(-1, 3), max_size=3), st.dictionaries(st.text(max_size=5), st.integers(-1, 3), max_size=2),
    st.sampled_from(["../../etc/x", "\x1b[2J", "x" * 5000, "-1", "http://a,b:2379"]),
)  # fmt: skip


@given(st.sampled_from([path for path in places(HONEST) if path]), WRONG)
def test_a_wrong_shape_anywhere_is_a_sentence_and_never_a_traceback(path: tuple[Any, ...], wrong: Any) -> None:
    document = copy.deepcopy(HONEST)
    node = document
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = wrong
    try:
        plan = joined(document)
    except UsageError as error:
        assert "\n" not in str(error).replace(LIST_ITEM, "") and "\x1b" not in str(error)
    else:  # another value that is one: still processes of ours alone
        for process in plan.processes:
            assert process.argv[1:3] in (("-m", "trtx.frontend"), ("-m", "trtx.worker"))
            assert process.env.keys() == next(one for one in PLAN.processes if one.role == process.role).env.keys()


def test_an_etcd_that_does_not_answer_is_told_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            LaunchError, match=f"does not answer .*; expected an etcd at {url}: start it, open its port"
        ):
            find_published(EtcdService((url,), lease_ttl_s=30), "t")


def test_a_chat_template_in_a_file_is_refused_over_hosts(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    with pytest.raises(UsageError, match="--chat-template .* can't be used over hosts"):
        prepared(tmp_path / "run", chat_template=tmp_path / "chat.jinja")
