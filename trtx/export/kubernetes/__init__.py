"""Exports a topology as Kubernetes manifests: a ``DynamoGraphDeployment``, or plain Deployments without the operator.

Owns the translation of a plan for one machine into pods, and every field of the manifests; docs/kubernetes.md explains
each of them. Does not talk to a cluster: the user applies the files with ``kubectl``.
Enter through :func:`export`.
Invariants: commands are lists, no secret is written, and every variable and flag of the plan has an explicit rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtx.export.kubernetes.exported import export
    from trtx.export.kubernetes.target import Form, KubernetesTarget

_HOMES = {"Form": "target", "KubernetesTarget": "target", "export": "exported"}
__all__ = ["Form", "KubernetesTarget", "export"]


def __getattr__(name: str) -> object:
    """Imports a public name on first access, because the verb's help page needs only the fields of the target."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
