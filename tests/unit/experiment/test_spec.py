from __future__ import annotations

from pathlib import Path

import pytest

from trtx.errors import UsageError
from trtx.experiment import load_sweep

SWEEPS = sorted((Path(__file__).parents[3] / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_every_shipped_sweep_is_valid(path: Path) -> None:
    assert load_sweep(path, {}).name == path.stem


def test_the_demo_measures_both_modes_at_three_loads() -> None:
    spec = load_sweep(next(path for path in SWEEPS if path.name == "demo.yaml"), {})
    assert (spec.modes, spec.load.concurrency) == (("agg", "disagg"), (1, 8, 64))


def test_what_was_typed_wins_over_the_file_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("modes: [agg, disagg]\nload: {concurrency: [1, 8], isl: 100, osl: 50}\ntopology: {decode: 2}\n")
    spec = load_sweep(file, {"load": {"isl": 300}, "topology": {"engine": "paced"}})
    assert (spec.load.isl, spec.load.osl, spec.load.concurrency) == (300, 50, (1, 8))
    assert (spec.topology.engine, spec.topology.decode) == ("paced", 2)
    assert spec.topology_of("disagg").mode == "disagg"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("load: {concurency: [1]}", ["load.concurency", "did you mean concurrency?"]),
        ("load: {isl: -5}", ["load.isl is -5"]),
        ("load: {concurrency: [8, 8]}", ["concurrency 8,8", "once"]),
        ("modes: [agg, split]", ["modes.1", "split"]),
        ("modes: [agg, agg]", ["modes agg,agg", "once"]),
        ("modes: [agg, disagg]\ntopology: {port: 8001}", ["port 8001", "agg and disagg"]),
        ("attach: {url: localhost}", ["'localhost'", "http://"]),
        ("- agg", ["list", "modes"]),
        ("modes: agg", ['"agg"', "expected a list"]),
        ("topology: 3", ["topology is 3", "expected a map"]),
        ("load: [", ["not YAML"]),
    ],
)
def test_a_mistake_in_a_sweep_is_named_with_its_value(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_sweep(file, {})
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_sweep_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        load_sweep(tmp_path / "none.yaml", {})


def test_an_identical_spec_gives_an_identical_document() -> None:
    assert load_sweep(None, {}).to_json() == load_sweep(None, {}).to_json()
    assert load_sweep(None, {}).to_json() != load_sweep(None, {"load": {"seed": 8}}).to_json()
