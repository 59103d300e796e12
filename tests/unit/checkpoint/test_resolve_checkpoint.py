"""Names become complete directories, or a sentence that says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trtx.checkpoint import Checkpoint, default_model, list_shapes, resolve_checkpoint
from trtx.errors import UsageError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(cache: Path) -> Checkpoint:
    return resolve_checkpoint("synthetic:tiny", cache_dir=cache)


@pytest.fixture
def copy_of_tiny(tiny: Checkpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.path, tmp_path / "my-model"))


def test_a_synthetic_checkpoint_is_made_once(tiny: Checkpoint, cache: Path) -> None:
    weights = tiny.path / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert resolve_checkpoint("synthetic:tiny", cache_dir=cache) == tiny
    assert weights.stat().st_mtime_ns == before
    assert [entry.name for entry in cache.iterdir() if entry.name.startswith(".")] == []


def test_the_same_shape_has_the_same_bytes_in_another_process(tiny: Checkpoint, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from trtx.checkpoint import resolve_checkpoint as r;"
        "print(r('synthetic:tiny', cache_dir=pathlib.Path(sys.argv[1])).path); assert 'torch' not in sys.modules"
    )
    argv = [sys.executable, "-c", program, str(tmp_path)]
    other = Path(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip())
    assert other.name == tiny.path.name
    names = sorted(file.name for file in tiny.path.iterdir())
    assert names == sorted(file.name for file in other.iterdir())
    for name in names:
        assert (other / name).read_bytes() == (tiny.path / name).read_bytes(), name


def test_processes_that_make_it_at_once_all_get_it_whole(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from trtx.checkpoint import resolve_checkpoint as r;"
        "c = r('synthetic:tiny-llama', cache_dir=pathlib.Path(sys.argv[1]));"
        "print(c.path, (c.path / 'model.safetensors').stat().st_size)"
    )
    argv = [sys.executable, "-c", program, str(tmp_path)]
    makers = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {maker.communicate(timeout=60)[0] for maker in makers}
    assert [maker.returncode for maker in makers] == [0, 0, 0]
    assert len(answers) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_process_left_is_neither_used_nor_kept(tmp_path: Path) -> None:
    name = resolve_checkpoint("synthetic:tiny", cache_dir=tmp_path).path.name
    shutil.rmtree(tmp_path / name)
    left = tmp_path / f".{name}-abcdefgh"
    left.mkdir()
    (left / "config.json").write_text("{")
    os.utime(left, (0, 0))
    assert resolve_checkpoint("synthetic:tiny", cache_dir=tmp_path).has_weights
    assert not left.exists()


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTX_CACHE", str(tmp_path))
    assert resolve_checkpoint("synthetic:tiny").path.parent == tmp_path / "checkpoints"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written.*TRTX_CACHE"):
        resolve_checkpoint("synthetic:tiny", cache_dir=tmp_path / "file" / "cache")


def test_a_shape_without_stored_weights_says_how_to_draw_them(cache: Path) -> None:
    checkpoint = resolve_checkpoint("synthetic:qwen3-8b", cache_dir=cache)
    assert not checkpoint.has_weights
    config = json.loads((checkpoint.path / "config.json").read_text())
    assert config["trtx_synthetic"] == {"seed": 0, "init_std": 0.02}
    assert checkpoint.weight_bytes == 2 * 8_190_735_360  # Qwen3-8B's own count, bfloat16
    assert checkpoint.context_length == 40_960


def test_an_unknown_shape_gets_the_nearest_names() -> None:
    with pytest.raises(UsageError, match="synthetic:qwen3-7b.*did you mean .*synthetic:qwen3-8b"):
        resolve_checkpoint("synthetic:qwen3-7b")


def test_a_local_directory_is_served_under_its_own_name(copy_of_tiny: Path, tiny: Checkpoint) -> None:
    checkpoint = resolve_checkpoint(str(copy_of_tiny))
    assert checkpoint.path == copy_of_tiny.resolve()
    assert checkpoint.served_model_name == "my-model"
    assert checkpoint.weight_bytes == tiny.weight_bytes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer.json"),
    ],
)
def test_a_directory_that_lacks_a_file_is_refused_by_its_name(copy_of_tiny: Path, name: str, said: str) -> None:
    (copy_of_tiny / name).unlink()
    with pytest.raises(UsageError, match=f"lacks {said}; pass a directory .* or one of synthetic:tiny"):
        resolve_checkpoint(str(copy_of_tiny))


def test_a_directory_without_weights_says_what_is_there_in_their_place(copy_of_tiny: Path) -> None:
    (copy_of_tiny / "model.safetensors").rename(copy_of_tiny / "consolidated.safetensors")
    with pytest.raises(UsageError, match=r"has no safetensors weights.*it holds consolidated\.safetensors"):
        resolve_checkpoint(str(copy_of_tiny))


def test_a_second_copy_of_the_weights_is_not_counted(copy_of_tiny: Path, tiny: Checkpoint) -> None:
    for name in ("consolidated", "adapter_model", "optimizer"):
        shutil.copyfile(copy_of_tiny / "model.safetensors", copy_of_tiny / f"{name}.safetensors")
    assert resolve_checkpoint(str(copy_of_tiny)).weight_bytes == tiny.weight_bytes


def test_a_missing_shard_is_named(copy_of_tiny: Path) -> None:
    (copy_of_tiny / "model.safetensors").rename(copy_of_tiny / "model-00001-of-00002.safetensors")
    shard = "model-00002-of-00002.safetensors"
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": shard}}
    (copy_of_tiny / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=f"lacks {shard}"):
        resolve_checkpoint(str(copy_of_tiny))


def test_a_config_of_another_kind_of_model_is_refused(copy_of_tiny: Path) -> None:
    (copy_of_tiny / "config.json").write_text('{"architectures": ["BertModel"], "hidden_size": 8}')
    with pytest.raises(UsageError, match="has no hidden_size or num_hidden_layers.*expected a text model"):
        resolve_checkpoint(str(copy_of_tiny))


def test_the_decoder_of_a_multimodal_checkpoint_is_in_its_text_config(copy_of_tiny: Path) -> None:
    text = {"hidden_size": 8, "num_hidden_layers": 2, "max_position_embeddings": 4096, "torch_dtype": "float16"}
    config = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    (copy_of_tiny / "config.json").write_text(json.dumps(config))
    checkpoint = resolve_checkpoint(str(copy_of_tiny))
    assert (checkpoint.architecture, checkpoint.context_length) == ("Llama4ForConditionalGeneration", 4096)
    assert checkpoint.dtype == "float16"


def test_a_file_is_no_model_directory(copy_of_tiny: Path) -> None:
    with pytest.raises(UsageError, match="is a file; expected the directory"):
        resolve_checkpoint(str(copy_of_tiny / "config.json"))


def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub() -> None:
    with pytest.raises(UsageError, match="not a directory on this machine"):
        resolve_checkpoint("./no-such-model")


def test_a_name_that_is_not_cached_says_both_ways_out(tmp_path: Path) -> None:
    program = (
        "from trtx.checkpoint import resolve_checkpoint\n"
        "from trtx.errors import UsageError\n"
        "try: resolve_checkpoint('nobody/no-model')\n"
        "except UsageError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "not in the Hugging Face cache" in run.stdout
    assert "pass a directory" in run.stdout
    assert "synthetic:tiny" in run.stdout


def test_a_cached_hub_name_is_found_without_a_network(tiny: Checkpoint, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--small"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(tiny.path, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    program = (
        "from trtx.checkpoint import resolve_checkpoint as r;c = r('someone/small'); print(c.served_model_name, c.path)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["someone/small", str((repository / "snapshots" / commit).resolve())]


def test_a_variable_of_the_hub_that_is_no_number_is_one_sentence() -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "soon"}
    for words in (["bench", "--dry-run", "--model", "someone/small"], ["build", "someone/small", "--check"]):
        command = [sys.executable, "-m", "trtx", *words]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stderr
        assert "'soon'" in run.stderr and "HF_HUB_DOWNLOAD_TIMEOUT" in run.stderr


def test_the_default_model_depends_on_the_gpu() -> None:
    names = [name for name, _ in list_shapes()]
    assert default_model(on_gpu=True) == "synthetic:qwen3-0.6b"
    assert {default_model(on_gpu=True), default_model(on_gpu=False)} <= set(names)
