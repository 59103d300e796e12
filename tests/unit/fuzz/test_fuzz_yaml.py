"""Odd YAML, wherever YAML comes in: engine configs, --set, headers, sweeps."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import ODD_TEXTS, ODD_VALUES, ask, cases, judge

from trtx.config.families import CONFIG_ROOT
from trtx.config.schema import known_fields
from trtx.config.strict_yaml import MAX_LEVELS, parse_yaml
from trtx.errors import UsageError

pytestmark = pytest.mark.slow

SHIPPED = sorted(CONFIG_ROOT.glob("*/*.yaml"))
SWEEPS = sorted((CONFIG_ROOT.parent / "sweeps").glob("*.yaml"))
_SWEEP = {
    "name": "x",
    "modes": ["agg", "disagg"],
    "topology": {"model": "synthetic:tiny", "engine": "paced", "overrides": ["max_batch_size=8"], "workers": 1},
    "load": {"concurrency": [1, 8], "isl": 64, "osl": 32, "extra_inputs": {"temperature": 0}},
}
_SPLICES = (
    "&a ", "*a", "<<: ", "? ", "- ", ": ", "!!int ", "!!set ", "!x ", "|\n", ">-\n", "'", '"', "{", "}", "[", "]", "\t",
    "%YAML 1.1\n", "---\n", "...\n", "\0", "\x85", "\ud800", "#", "# trtx: {", "@", "`", "\r", "\\x", "2001-99-99",
    "12:30", "010", ".inf", "9" * 500, "[" * 200, "- " * 200, "\n? ", "on", "~", "=", "é", "\U0001f600", " ",
)  # fmt: skip


def bomb() -> str:
    """Ten to the power of twelve values in a few lines."""
    rows = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 12)]
    return "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x, x]", *rows])


WHOLE = {
    "an alias bomb": bomb(),
    "an alias bomb of merges": "a: &a {x: 1}\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} {{<<: [{', '.join([f'*{chr(97 + n)}'] * 9)}]}}\n" for n in range(12)
    ),
    "an anchor within itself": "kv_cache_config: &a\n  b: *a\n",
    "3,000 levels of lists": "[" * 3000,
    "3,000 levels of mappings": "{a: " * 3000,
    "3,000 levels of indentation": "".join(f"{' ' * n}a:\n" for n in range(600)),
    "a number of 4,300 digits": f"max_batch_size: {'9' * 4300}",
    "a number of 5,000 digits": f"max_batch_size: {'9' * 5000}",
    "a date that is none": "max_batch_size: 2001-99-99",
    "a date": "max_batch_size: 2001-01-01",
    "a key twice": "max_batch_size: 1\nmax_batch_size: 2\n",
    "a key twice, nested": "kv_cache_config: {dtype: fp8, dtype: auto}",
    "a key that is a list": "? [a]\n: 1",
    "a key that is null": "~: 1",
    "not a number": "kv_cache_config: {free_gpu_memory_fraction: .nan}",
    "a Python object": "max_batch_size: !!python/object/apply:os.getcwd []",
    "two documents": "a: 1\n---\na: 2\n",
    "bytes": "\ud800",
    "nothing but a tab": "\t",
    "more than any config": "a: 1\n" * 60_000,
}  # fmt: skip


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


@pytest.mark.parametrize("text", WHOLE.values(), ids=WHOLE)
def test_a_config_that_is_none_is_refused_with_its_path_and_line(text: str, odd_directory: Path) -> None:
    for argv in (
        ["serve", "--dry-run", "--port", "0", "--engine", "paced", "--config", "agg=odd.yaml"],
        ["build", "--check", "--config", "agg=odd.yaml"],
        ["bench", "--dry-run", "--sweep", "odd.yaml"],
    ):
        write(Path("odd.yaml"), text)
        answer = ask(argv)
        assert answer.code == 2
        judge(argv, answer)
        assert "odd.yaml, line " in answer.err or "odd.yaml is larger than" in answer.err


@pytest.mark.hypothesis  # make proof has all cases, as of a property test
def test_what_the_strict_reader_takes_is_what_pyyaml_reads() -> None:
    """Differences are refusals, so no published config means something else here."""
    taken = 0
    for draw in cases(1500, "text"):
        text = _mutated_text(draw, draw.choice(SHIPPED + SWEEPS).read_text(encoding="utf-8")[:1500])
        try:
            value = parse_yaml(text, "odd.yaml")
        except UsageError as refusal:
            assert str(refusal).startswith("odd.yaml, line "), text
            assert len(str(refusal)) < 500, text
        else:
            taken += 1
            assert value == yaml.safe_load(text), text
    assert taken > 50


def test_levels_up_to_the_bound_are_read() -> None:
    assert parse_yaml("[" * MAX_LEVELS + "]" * MAX_LEVELS, "x") is not None
    with pytest.raises(UsageError, match="levels"):
        parse_yaml("[" * (MAX_LEVELS + 1) + "]" * (MAX_LEVELS + 1), "x")


@pytest.mark.hypothesis  # make proof has all cases, as of a property test
def test_odd_values_in_engine_configs_are_refused_with_a_sentence_or_honoured(odd_directory: Path) -> None:
    names = sorted(known_fields())
    for draw in cases(130, "engine config"):
        path = draw.choice(SHIPPED)
        values = _mutated(draw, yaml.safe_load(path.read_text(encoding="utf-8")), names)
        write(Path("odd.yaml"), yaml.safe_dump(values, sort_keys=False))
        role = path.stem
        mode = "agg" if role in ("agg", "encode") else "disagg"
        argv = draw.choice(
            [
                ["build", "--check", "--config", f"{role}=odd.yaml"],
                ["build", "--check", "--config", f"{role}=odd.yaml", "--trtllm-version", draw.choice(_VERSIONS)],
                ["build", "--check", "synthetic:qwen3-8b", "--gpu", "H100", "--config", f"{role}=odd.yaml"],
                ["serve", "--dry-run", "--port", "0", "--mode", mode, "--config", f"{role}=odd.yaml"],
                [
                    "serve",
                    "--dry-run",
                    "--port",
                    "0",
                    "--mode",
                    mode,
                    "--engine",
                    "paced",
                    "--config",
                    f"{role}=odd.yaml",
                ],
                [
                    "serve",
                    "--dry-run",
                    "--port",
                    "0",
                    "--engine",
                    "simulated",
                    "--mode",
                    mode,
                    "--config",
                    f"{role}=odd.yaml",
                ],
            ]
        )
        judge(argv, ask(argv))


_VERSIONS = ("1.2.1", "1.3.0rc14", "1.3.0rc22", "1.3.0rc24", "2.0", "1.3.0rc7.post9")


@pytest.mark.hypothesis  # make proof has all cases, as of a property test
def test_odd_overrides_are_refused_with_a_sentence_or_honoured(odd_directory: Path) -> None:
    names = sorted(known_fields())
    for draw in cases(80, "override"):
        field = draw.choice(names) + draw.choice(["", "", ".dtype", ".backend", ".max_tokens", ".batch_sizes", ".x.y"])
        value = draw.choice([*ODD_TEXTS, *(yaml.safe_dump(odd, default_flow_style=True) for odd in ODD_VALUES)])
        argv = ["build", "--check", "synthetic:qwen3-8b", "--gpu", "H100", "--set", f"{field}={value}"]
        if draw.random() < 0.4:
            argv = ["serve", "--dry-run", "--port", "0", "--set", f"{field}={value}"]
        judge(argv, ask(argv))


@pytest.mark.hypothesis  # make proof has all cases, as of a property test
def test_odd_sweeps_are_refused_with_a_sentence_or_honoured(odd_directory: Path) -> None:
    fields = ["name", "modes", "topology", "load", "attach", "url", "model", "engine", "gpus", "isl", "seed", "host"]
    for draw in cases(80, "sweep"):
        write(Path("odd.yaml"), yaml.safe_dump(_mutated(draw, copy.deepcopy(_SWEEP), fields), sort_keys=False))
        argv = ["bench", "--dry-run", "--sweep", "odd.yaml"]
        judge(argv, ask(argv))


def _mutated(draw: random.Random, document: Any, names: list[str]) -> Any:
    """One to three places of a document are other values, other keys, or gone."""
    for _ in range(draw.randint(1, 3)):
        node = document
        while True:
            if not isinstance(node, (dict, list)) or not node:
                break
            key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if isinstance(node[key], (dict, list)) and node[key] and draw.random() < 0.6:
                node = node[key]
                continue
            change = draw.random()
            if change < 0.65:
                node[key] = draw.choice([*ODD_VALUES, *(text for text in ODD_TEXTS if text.isprintable())])
            elif change < 0.75:
                del node[key]
            elif isinstance(node, dict):
                node[draw.choice([*names, "x", 5])] = draw.choice(ODD_VALUES)
            break
    return document


def _mutated_text(draw: random.Random, text: str) -> str:
    for _ in range(draw.randint(0, 4)):
        at = draw.randint(0, len(text))
        change = draw.random()
        if change < 0.5:
            text = text[:at] + draw.choice(_SPLICES) + text[at:]
        elif change < 0.75:
            text = text[:at] + text[at + draw.randint(1, 12) :]
        else:
            begin = draw.randint(0, len(text))
            text = text[:at] + text[begin : begin + draw.randint(1, 80)] + text[at:]
    return text
