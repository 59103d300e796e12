from __future__ import annotations

import pytest

from trtx.config.secrets import is_secret, without_secrets


@pytest.mark.parametrize(
    "name",
    ["OPENAI_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "NATS_AUTH_TOKEN", "ETCD_AUTH_PASSWORD", "GITHUB_TOKEN",
     "AWS_SECRET_ACCESS_KEY", "NGC_API_KEY", "WANDB_API_KEY", "my_secret", "PASSWORD"],
)  # fmt: skip
def test_a_name_that_says_secret_is_one(name: str) -> None:
    assert is_secret(name) and without_secrets({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "PATH", "HF_HOME", "TRTX_TOPOLOGY", "KEYBOARD", "SSL_CERT_FILE", "TMPDIR",
             "CUDA_VISIBLE_DEVICES", "NATS_AUTH_USERNAME", "XDG_SESSION_ID"]
)  # fmt: skip
def test_what_processes_need_stays(name: str) -> None:
    assert not is_secret(name)
