"""What is said of a job is taken as it is, or refused with the name of its option."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trtx.cli.app import run
from trtx.export.slurm.script import _RUNTIME

DOCUMENT = Path(__file__).parents[4] / "docs" / "slurm.md"
CALL = ("export", "slurm", "--model", "synthetic:tiny-trained", "--engine", "torch", "--gpus-per-node", "0")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--name", "No Name"), "--name 'No Name' is not a name"),
        (("--time", "soon"), "--time 'soon' is not a Slurm time limit"),
        (("--time", "99:99:99"), "--time '99:99:99' is not a Slurm time limit"),
        (("--time", "1-24"), "--time '1-24' is not a Slurm time limit"),
        (("--time", "1"), "--time '1' is too short to serve anything: Slurm signals the job 105 s"),
        (("--time", "00:00:00"), "--time '00:00:00' is too short to serve anything"),
        (("--time", "00:02:45"), "expected more than 165 s"),
        (
            ("--time", "10", "--drain-s", "600"),
            "--time '10' is too short to serve anything: Slurm signals the job 690 s",
        ),
        (("--sbatch=--mem=1G",), "--sbatch '--mem=1G' is what the file sets itself"),
        (("--sbatch=--exclusive",), "--sbatch '--exclusive' is what the file sets itself"),
        (("--sbatch=--qos=a", "--sbatch=--qos=b"), "--sbatch names --qos twice"),
        (("--sbatch=--comment=a'b",), "has a quote or a backslash"),
        (("--container-image", "c", "--container-mounts", "x"), "--container-mounts 'x' is not a list of mounts"),
        (("--container-image", "c", "--container-mounts", "/a:/b,/c"), "expected FROM:TO"),
        (("--port", "17000"), "--port 17000 is one of the ports 17000 to 17002 of etcd and NATS"),
        (("--port", "17002"), "--port 17002 is one of the ports 17000 to 17002 of etcd and NATS"),
        (("--port", "17003"), "--port 17003 is one of the ports 17003 to"),
        (("--first-port", "7998"), "--port 8000 is one of the ports 7998 to 8000 of etcd and NATS"),
        (("--partition", "a b"), "--partition 'a b' is not a Slurm name"),
        (("--sbatch=--nodes=3",), "--sbatch '--nodes=3' is what the file sets itself"),
        (("--sbatch=--node=3",), "--sbatch '--node=3' is what the file sets itself"),
        (("--sbatch=-N3",), "--sbatch '-N3' is not an sbatch flag"),
        (("--interface", "lo"), "--interface 'lo' is loopback"),
        (("--ucx-devices", "mlx5_0:1,lo"), "is loopback, which leads to no other node"),
        (("--ucx-devices", "a b"), "--ucx-devices 'a b' is not a network device"),
        (("--local-dir", "tmp"), "--local-dir 'tmp' is not an absolute path"),
        (("--nodes", "0"), "--nodes 0: expected"),
        (("--first-port", "80"), "--first-port 80: expected"),
        (("--bench", "--concurency 3"), "No such option: --concurency"),
        (("--bench", "--concurrency"), "--concurrency' requires an argument; see trtx bench --help"),
        (("--bench", "--max-cells x"), "see trtx bench --help"),
        (("--bench", "--concurrency 0"), "--bench: "),
        (("--bench", "--concurrency x"), "--bench: --concurrency 'x' is not a list of whole numbers"),
        (("--bench", "--concurrency 1 --slo nonsense"), "--bench: --slo nonsense: it has 1 of 4 parts"),
        (("--bench", "--concurrency 1 --request-rate 3"), "--bench: --concurrency has no effect with --request-rate"),
        (("--bench", "--input-file no-such.jsonl"), "can't be read"),
        (("--bench", "no-such-sweep.yaml"), "--bench: "),
        (("--bench", "--help"), "--bench holds --help"),
        (("--bench", "--url http://x"), "--bench holds --url, which the job gives by itself"),
        (("--bench", "--workers 3"), "--bench holds --workers, which describes what trtx bench would serve"),
        (
            ("--bench", "--etcd http://10.0.0.1:2379"),
            "--bench holds --etcd, and the job's frontends tell of its workers",
        ),
        (
            ("--bench", "--isl 100000 --osl 8"),
            "--bench: isl 100000 and osl 8 make 100008 tokens, but the context length of",
        ),
        (
            ("--set", "max_seq_len=64", "--bench", "--isl 40 --osl 30"),
            "--bench: isl 40 and osl 30 make 70 tokens, and agg workers of tiny-trained take max_seq_len 64",
        ),
        (("--bench", "--baseline nobody --max-regression 5%"), "--bench: 'nobody' is not a run directory or"),
        (("--bench", "--baseline ./a.json --max-regression 5%"), "--bench: './a.json' does not exist; expected a run"),
        (("--bench", "--save-baseline a/b"), "--bench: "),
        (("--bench", "--concurrency '3"), "--bench \"--concurrency '3\" can't be split into words"),
        (("--container-image", "c", "--model-dir", "/m:1"), "--model-dir '/m:1' can't be mounted in a container"),
        (("--container-image", "c", "--model-dir", "/m,1"), "--model-dir '/m,1' can't be mounted in a container"),
        (("--container-mounts", "/a:/a"), "--container-mounts has no effect without --container-image"),
    ],
)
def test_what_can_not_be_is_refused_in_a_sentence(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*CALL, *words]) == 2
    said = capsys.readouterr()
    assert told in said.err and said.err.count("\n") == 1 and said.out == ""


@pytest.mark.parametrize(
    "words",
    [("--time", "00:02:46"), ("--time", "1440"), ("--time", "2:46"), ("--time", "1-00"), ("--first-port", "8001")],
)
def test_what_a_job_has_time_and_ports_for_is_written(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*CALL, *words]) == 0
    flag = {"--time": "#SBATCH --time=", "--first-port": "REGISTRY_PORT="}[words[0]]
    assert f"{flag}{words[1]}\n" in capsys.readouterr().out


def test_a_sweep_file_of_the_benchmark_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("load: {concurrency: [1, 2]}\n")
    assert run([*CALL, "--bench", str(sweep)]) == 0
    assert str(sweep) in capsys.readouterr().out
    sweep.write_text("load: {concurrency: [0]}\n")
    assert run([*CALL, "--bench", str(sweep)]) == 2
    assert "concurrency" in capsys.readouterr().err


def test_files_of_the_benchmark_are_named_from_the_root_and_looked_for_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job runs in the directory of sbatch, which need not be this one."""
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text("load: {concurrency: [1, 2], input_file: of-sweep.jsonl}\n")
    for name in ("of-sweep.jsonl", "typed.jsonl", "8"):
        Path(name).write_text('{"text": "a"}\n' * 2)

    def words_and_files(bench: str) -> tuple[list[str], list[str]]:
        assert run([*CALL, "--bench", bench]) == 0
        out = capsys.readouterr().out
        words, files = (
            shlex.split(re.search(rf"^BENCH_{name}=\((.*?)\n?\)$", out, re.MULTILINE | re.DOTALL)[1])  # type: ignore[index]
            for name in ("WORDS", "FILES")
        )
        return words, files

    sweep, first, second = (str(tmp_path / name) for name in ("sweep.yaml", "of-sweep.jsonl", "typed.jsonl"))
    words, files = words_and_files("--osl 8 ./sweep.yaml --request-count 8")
    assert words == ["--osl", "8", "--request-count", "8", "--sweep", sweep, "--input-file", first]
    assert files == [sweep, first]
    words, files = words_and_files("--sweep=sweep.yaml --input-file typed.jsonl")
    assert words == ["--sweep", sweep, "--input-file", second] and files == [sweep, second]
    words, files = words_and_files("--request-count 8 --input-file 8")
    assert words == ["--request-count", "8", "--input-file", str(tmp_path / "8")]
    words, files = words_and_files("--concurrency 2 --save-baseline mine")
    assert words == ["--concurrency", "2", "--save-baseline", "mine", "--baseline-dir", str(tmp_path / "baselines")]
    assert files == []
    Path("sweep.yaml").write_text("load: {concurrency: [1]}\nattach: {url: 'http://a', gpu_count: 4}\n")
    assert run([*CALL, "--bench", "sweep.yaml"]) == 2
    assert "--bench: attach.gpu_count of the sweep describes what others serve" in capsys.readouterr().err


def test_a_further_flag_of_sbatch_stays_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*CALL, "--sbatch=--comment=a b", "--sbatch=--wckey=a#b", "--sbatch=--qos=high"]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --comment='a b'\n#SBATCH --wckey='a#b'\n#SBATCH --qos=high\n" in out


def test_without_a_directory_the_file_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*CALL]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=trtx-serve\n")


def test_a_directory_gets_one_file_that_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*CALL, "--name", "qwen3", "--output", str(tmp_path / "job")]) == 0
    (file,) = (tmp_path / "job").iterdir()
    assert file.name == "qwen3.sbatch" and file.stat().st_mode & 0o111
    assert "Run with: sbatch qwen3.sbatch" in capsys.readouterr().out


def test_the_document_has_every_flag_that_the_file_gives_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*CALL, "--partition", "a", "--account", "b", "--container-image", "c"]) == 0
    text = capsys.readouterr().out
    document = DOCUMENT.read_text(encoding="utf-8")
    flags = set(re.findall(r"^#SBATCH (--[a-z-]+)", text, re.MULTILINE))
    srun = _RUNTIME.read_text(encoding="utf-8").partition("SRUN=(")[2].partition(")\n")[0]
    flags |= {*re.findall(r"--[a-z-]+", srun)} - {"--nodelist", "--ntasks"}
    flags |= set(re.findall(r"--container-[a-z-]+|--no-container-[a-z-]+", text))
    missing = sorted(flag for flag in flags if flag not in document)
    assert not missing, f"give each a row, with its reason, in {DOCUMENT.name}: {missing}"
