"""The source of the model in pods: a volume that contains it, or an init container that downloads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trtx.checkpoint import Checkpoint, hub_revision
from trtx.config.wording import quoted
from trtx.errors import UsageError
from trtx.export.kubernetes.target import KubernetesTarget

MOUNT = PurePosixPath("/models")
_VOLUME = "model"
TOKEN_KEY = "HF_TOKEN"
"""The key in the hub's Secret, and the environment variable that huggingface_hub reads."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a model. ``path``: the model's directory in every container that needs it."""

    path: PurePosixPath
    claim: str | None  # the volume claim; None: the model is downloaded
    fetched: str | None = None  # the model to download: a hub name, or synthetic:<shape>
    revision: str | None = None  # the revision on the hub
    secret: str | None = None

    @property
    def volume(self) -> dict[str, Any]:
        if self.claim is None:
            return {"name": _VOLUME, "emptyDir": {}}
        return {"name": _VOLUME, "persistentVolumeClaim": {"claimName": self.claim, "readOnly": True}}

    @property
    def mount(self) -> dict[str, Any]:
        return {"name": _VOLUME, "mountPath": str(MOUNT), "readOnly": True}

    def init_containers(self, image: str, *, with_weights: bool = True) -> list[dict[str, Any]]:
        """Returns the init container that downloads the model; empty if a volume contains it."""
        if self.fetched is None:
            return []
        words = ["--directory", str(self.path)]
        words += ["--revision", self.revision] if self.revision else []
        words += [] if with_weights else ["--without-weights"]
        variables: list[dict[str, Any]] = [{"name": "HF_HOME", "value": str(MOUNT / ".cache")}]
        if self.secret is not None:
            token = {"secretKeyRef": {"name": self.secret, "key": TOKEN_KEY}}
            variables.append({"name": TOKEN_KEY, "valueFrom": token})
        return [
            {
                "name": "fetch-model",
                "image": image,
                "command": ["python3", "-m", "trtx.checkpoint.fetch"],
                "args": [self.fetched, *words],
                "env": variables,
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "seccompProfile": {"type": "RuntimeDefault"},
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": _VOLUME, "mountPath": str(MOUNT)}],
            }
        ]


def source_of(named: str, checkpoint: Checkpoint, target: KubernetesTarget) -> ModelSource:
    """Returns the source of a model. Raises UsageError for a local directory without a claim: pods can't access it."""
    if target.model_claim is not None:
        claim, path = target.claim
        return ModelSource(MOUNT / path, claim)
    if Path(named).expanduser().exists():
        raise UsageError(
            f"--model {quoted(named)} is a directory of this machine, which no pod sees; name the claim that holds it "
            "with --model-claim CLAIM/DIRECTORY, or give its name on the hub"
        )
    if named.startswith("synthetic:"):
        if target.hub_secret is not None:
            raise UsageError(
                f"--hub-secret has no effect with --model {named}, which is fetched from nowhere; leave it out"
            )
        return ModelSource(MOUNT / "model", None, fetched=named)
    return ModelSource(
        MOUNT / "model", None, fetched=named, revision=hub_revision(checkpoint.path), secret=target.hub_secret
    )
