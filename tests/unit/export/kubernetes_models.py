"""Manifests against the models of the ``kubernetes`` client: unknown fields, wrong types, required fields.

The client itself drops a field that it does not know without a word, so its tables are walked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import kubernetes.client.models as models

_OF_KIND = {
    "ConfigMap": models.V1ConfigMap,
    "CustomResourceDefinition": models.V1CustomResourceDefinition,
    "Deployment": models.V1Deployment,
    "Job": models.V1Job,
    "NetworkPolicy": models.V1NetworkPolicy,
    "PersistentVolumeClaim": models.V1PersistentVolumeClaim,
    "Role": models.V1Role,
    "RoleBinding": models.V1RoleBinding,
    "Service": models.V1Service,
    "ServiceAccount": models.V1ServiceAccount,
}
_PLAIN: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "object": (object,),
    "datetime": (str,),
}


def problems(manifest: dict[str, Any]) -> list[str]:
    """Of a whole manifest of a kind that the client knows."""
    return list(_of_model(manifest, _OF_KIND[manifest["kind"]], manifest["kind"]))


def problems_of_pod(template: dict[str, Any]) -> list[str]:
    return list(_of_model(template, models.V1PodTemplateSpec, "podTemplate"))


def _of_model(value: Any, model: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path} is {value!r}, no object"
        return
    fields = {name: attribute for attribute, name in model.attribute_map.items()}
    for name, entry in value.items():
        if name not in fields:
            yield f"{path}.{name} is not a field of {model.__name__}"
        else:
            yield from _of_type(entry, model.openapi_types[fields[name]], f"{path}.{name}")
    given = {fields[name]: entry for name, entry in value.items() if name in fields}
    try:
        model(**given)  # refuses what is required and None
    except ValueError as error:
        yield f"{path}: {error}"


def _of_type(value: Any, wanted: str, path: str) -> Iterator[str]:
    if found := re.fullmatch(r"list\[(.+)\]", wanted):
        if not isinstance(value, list):
            yield f"{path} is {value!r}, no list"
            return
        for index, entry in enumerate(value):
            yield from _of_type(entry, found[1], f"{path}[{index}]")
    elif found := re.fullmatch(r"dict\(str, (.+)\)", wanted):
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            yield f"{path} is {value!r}, no map of texts"
            return
        for key, entry in value.items():
            yield from _of_type(entry, found[1], f"{path}.{key}")
    elif wanted in _PLAIN:
        if not isinstance(value, _PLAIN[wanted]) or (wanted == "int" and isinstance(value, bool)):
            yield f"{path} is {value!r}, expected {wanted}"
    else:
        yield from _of_model(value, getattr(models, wanted), path)
