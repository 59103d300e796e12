"""Engines that share one copy of the weights: what they answer, what they hold, and what is left of killed ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import HTTP, until
from topology_clients import nothing_left, post, trtx_serve

from trtx.checkpoint import resolve_checkpoint
from trtx.topology import Plan
from trtx.torch_engine.llmapi import LLM, RequestError, SamplingParams

CONFIG: dict[str, Any] = {
    "max_seq_len": 256, "max_batch_size": 8, "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 4096},
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[(at * 37 + number * 101) % 3000 + 5 for at in range(20 + number)] for number in range(3)]
MAPPED = "/memfd:trtx-weights"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights, 211 MB, are well above what two processes of one program differ by."""
    directory = tmp_path_factory.mktemp("models") / "model"
    shutil.copytree(resolve_checkpoint("synthetic:tiny").path, directory)
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 3072, "trtx_synthetic": {"seed": 1, "init_std": 0.02}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def engine(model: Path, group: Path, name: str, **changes: Any) -> LLM:
    return LLM(model, weight_group={"directory": str(group), "name": name}, **CONFIG, **changes)


def answers(llm: LLM) -> list[Any]:
    return [llm.generate(prompt, GREEDY).outputs[0].token_ids for prompt in PROMPTS]


def source(llm: LLM) -> str | None:
    assert llm.shared_weights is not None
    return llm.shared_weights.mapped_from


def memory(pid: int) -> dict[str, int]:
    """Bytes of /proc/PID/smaps_rollup by field, and under ``weights`` the share (PSS) of shared weights."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = {row.split(":")[0]: int(row.split()[1]) << 10 for row in rows}
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)
    shares = [re.search(r"^Pss: +(\d+) kB", one, re.MULTILINE) for one in maps if MAPPED in one]
    return found | {"weights": sum(int(share[1]) << 10 for share in shares if share)}


def test_two_engines_hold_one_copy_and_answer_as_two_whichever_is_killed(model: Path, tmp_path: Path) -> None:
    group = tmp_path / "group"
    with LLM(model, **CONFIG) as own:
        expected, alone = answers(own), memory(own.engine_pid)
        assert own.shared_weights is None and not alone["weights"]
    with ExitStack() as stack:
        first = stack.enter_context(engine(model, group, "first"))
        second = stack.enter_context(engine(model, group, "second"))
        assert (source(first), source(second)) == (None, "first")
        assert answers(first) == answers(second) == expected
        assert first.shared_weights is not None
        size = first.shared_weights.num_bytes
        assert size > 150_000_000
        for llm in (first, second):
            held = memory(llm.engine_pid)
            assert abs(held["weights"] - size // 2) < size // 50, "each has half of one copy"
            assert held["Pss_Anon"] < alone["Pss_Anon"] - size * 3 // 4, "and no copy of its own"

        is_over, wrong, right = threading.Event(), [], [0]

        def ask() -> None:
            while not is_over.is_set():
                found = answers(second)
                right[0] += 1
                if found != expected:
                    wrong.append(found)

        thread = threading.Thread(target=ask)
        thread.start()
        os.kill(first.engine_pid, signal.SIGKILL)
        until("the first has ended", lambda: not Path(f"/proc/{first.engine_pid}").exists())
        count = right[0]
        until("answers after that", lambda: right[0] > count + 2)
        again = stack.enter_context(engine(model, group, "first"))
        assert source(again) == "second"
        assert answers(again) == expected
        is_over.set()
        thread.join()
        assert not wrong

        for llm in (again, second):
            os.kill(llm.engine_pid, signal.SIGKILL)
            until("it has ended", lambda llm=llm: not Path(f"/proc/{llm.engine_pid}").exists())  # type: ignore[misc]
        assert not [path for path in Path("/dev/shm").iterdir() if path.stat().st_size == size]
        assert {path.name for path in group.iterdir()} == {"lock", "first.sock", "second.sock"}
        third = stack.enter_context(engine(model, group, "third"))
        assert source(third) is None, "nothing is left of the weights"
        assert answers(third) == expected


def test_of_engines_that_start_at_once_one_loads(tmp_path: Path) -> None:
    model = resolve_checkpoint("synthetic:tiny").path
    with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        starts = [pool.submit(engine, model, tmp_path / "group", name) for name in "abc"]
        running = [stack.enter_context(start.result()) for start in starts]
        assert [source(llm) is None for llm in running].count(True) == 1
        assert len({str(answers(llm)) for llm in running}) == 1


def test_an_engine_of_another_dtype_loads_a_copy_and_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = resolve_checkpoint("synthetic:tiny").path
    with engine(model, tmp_path, "first", dtype="float32") as first:
        expected = answers(first)
        with engine(model, tmp_path, "second", dtype="bfloat16") as second:
            assert source(second) is None
            assert len(answers(second)) == len(expected)
        assert (
            "second does not use the weights of first, because its dtype is float32, and bfloat16 here; it loads a copy"
            in capfd.readouterr().err
        )
        with pytest.raises(RequestError, match="the weights are shared with other engines"):
            first.update_weights(str(model))
        assert answers(first) == expected


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"sleep_config": {}}, "sleep_config would release weights that other workers use"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, and weights are shared on one GPU only"),
        ({"weight_group": {"directory": "d"}}, "missing required field `name`"),
        ({"weight_group": {"directory": "d", "name": "a/b"}}, "expected a directory, a name of 1 to 64 letters"),
        ({"weight_group": {"directory": "d", "name": "a\0b"}}, "expected a directory, a name of 1 to 64 letters"),
        ({"weight_group": {"directory": "d", "name": "a" * 65}}, "expected a directory, a name of 1 to 64 letters"),
        ({"weight_group": {"directory": "d\0", "name": "a"}}, "expected a directory, a name of 1 to 64 letters"),
        ({"weight_group": {"directory": "d", "name": "a", "engines": 1}}, "and 2 to 8 engines"),
        ({"weight_group": {"directory": "d", "name": "a", "engines": 9}}, "and 2 to 8 engines"),
        ({"weight_group": 3}, "expected a mapping with directory, name and engines"),
        ({"weight_group": "d"}, "expected a mapping with directory, name and engines"),
    ],
)
def test_arguments_that_do_not_go_with_shared_weights_are_refused(changes: dict[str, Any], because: str) -> None:
    given = {"weight_group": {"directory": "d", "name": "a"}} | changes
    with pytest.raises(ValueError, match=because):
        LLM("synthetic:tiny", **CONFIG, **given)


def shared_bytes(plan: Plan) -> dict[str, tuple[str, int]]:
    """For each worker that answers, how it got the weights, and their bytes."""
    found = {}
    for worker in plan.workers:
        text = HTTP.get(f"http://127.0.0.1:{worker.system_port}/metrics").text
        if (
            sample := re.search(r'^trtx_shared_weight_bytes\{.*source="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        ) is not None:
            found[worker.name] = sample[1], int(float(sample[2]))
    return found


def test_a_topology_shares_weights_over_the_deaths_of_both_workers() -> None:
    options = ("--model", "synthetic:tiny", "--engine", "torch", "--mode", "disagg", "--share-weights", "2")
    with trtx_serve(*options, "--set", "max_seq_len=512", "--set", "max_batch_size=8") as serve:
        plan = serve.wait_ready(90)
        body = {"model": plan.model, "prompt": "the quick brown fox " * 12, "max_tokens": 8, "temperature": 0}

        def answer() -> str | None:
            code, document = post(plan.url, "/v1/completions", body)
            return str(document["choices"][0]["text"]) if code == 200 else None

        expected = answer()
        assert expected is not None
        sources = shared_bytes(plan)
        assert sorted(source for source, _ in sources.values()) == ["loaded", "mapped"]
        assert len({size for _, size in sources.values()}) == 1
        names = sorted(sources, key=lambda name: sources[name][0])  # first the worker that loaded them
        for name in names:
            worker = next(one for one in plan.workers if one.name == name)
            assert worker.status_file is not None
            pid = json.loads(worker.status_file.read_text())["engine_pid"]
            os.kill(pid, signal.SIGKILL)

            def is_back(worker: Any = worker, pid: int = pid) -> bool:
                if not worker.status_file.exists():
                    return False
                status = json.loads(worker.status_file.read_text())
                return status["state"] == "serving" and status["engine_pid"] not in (None, pid)

            until(f"{name} is back", is_back)
            until("the same answer", lambda: answer() == expected)
        assert {source for source, _ in shared_bytes(plan).values()} == {"mapped"}, "one was always there"
        os.kill(serve.process.pid, signal.SIGKILL)
        serve.wait(10)
        until("nothing is left", lambda: nothing_left(plan))
