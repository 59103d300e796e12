"""A topology as manifests of Kubernetes: Dynamo's ``DynamoGraphDeployment``, or plain Deployments without the operator.

Owns what of a plan holds in a pod and what does not, and every field of the manifests; docs/kubernetes.md has the
reason of each. Does not talk to a cluster: files are applied by ``kubectl``.
Enter through :func:`export`.
Always holds: commands are lists, no secret is written, and each variable and flag of the plan has been decided about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtx.export.kubernetes.exported import export
    from trtx.export.kubernetes.target import Form, KubernetesTarget

_HOMES = {"Form": "target", "KubernetesTarget": "target", "export": "exported"}
__all__ = ["Form", "KubernetesTarget", "export"]


def __getattr__(name: str) -> object:
    """Loads a name when it is first asked for: help of the verb needs the target's fields alone."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
