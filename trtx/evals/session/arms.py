"""Asks a task with JSON schemas free, constrained, or both. The constrained arm sends each sample's schema."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

from lm_eval.api.instance import Instance

from trtx.config.wording import a_kind, shown
from trtx.errors import UsageError
from trtx.evals import schemas, structured
from trtx.evals.forms import Arm, SampleRequest
from trtx.evals.messages import StructuredOutput
from trtx.evals.session.client import ServerRefusal
from trtx.evals.session.loaded_tasks import LoadedTask, TaskDocument, documents_of
from trtx.evals.session.model import Chat, ServedModel, refused_request

_FIELDS = ("json_schema", "schema")  # fields of a row with its schema: lm-eval's name, and trtx's
_ARMS: dict[StructuredOutput, tuple[Arm, ...]] = {
    "free": ("free",),
    "constrained": ("constrained",),
    "both": ("free", "constrained"),
}


def with_arms(tasks: Iterable[LoadedTask], asked: StructuredOutput | None, model: ServedModel) -> list[LoadedTask]:
    """The tasks, each as its arms if its rows have schemas.

    ``asked`` None: both arms of the tasks whose purpose is the comparison; the other tasks are asked as they define.
    Raises UsageError if no task has schemas, or if a row's schema can't be read.
    """
    loaded = list(tasks)
    with_schemas = [one.name for one in loaded if _field_of(one) is not None]
    if asked is not None and not with_schemas:
        raise UsageError(
            f"--structured-output {asked} has no effect, because no task has JSON schemas "
            f"({', '.join(one.name for one in loaded)}); name one that has, such as trtx_json, or leave the option out"
        )
    found: list[LoadedTask] = []
    for one in (_of_rows(task, model) for task in loaded):
        arms = asked or ("both" if one.name in schemas.TASKS else None)
        if arms is None or one.name not in with_schemas:
            found.append(one)
        else:
            found += [_arm(one, arm, model) for arm in _ARMS[arms]]
    return found


def of_arm(
    loaded: LoadedTask, instance: Instance, found: SampleRequest | ServerRefusal
) -> SampleRequest | ServerRefusal:
    """The answer; a refused schema is an answer of the constrained arm too, since asking again would not change it."""
    if loaded.arm != "constrained" or not isinstance(found, ServerRefusal):
        return found
    if found.is_of_request:
        return refused_request(instance, found.reason)
    if found.reason.startswith("HTTP 500") and not isinstance(instance.args[0], Chat):
        # An attached server of Dynamo 1.4.2 answers so on /v1/completions if a worker refuses a request.
        return ServerRefusal(f"{found.reason}; if the schema was refused, --endpoint-type chat shows the reason")
    return found


def _of_rows(loaded: LoadedTask, model: ServedModel) -> LoadedTask:
    """The task with each row's own messages and length of answers, which lm-eval's requests can't express."""
    if loaded.name != schemas.TASK:
        return loaded
    instances = [instance for document in loaded.documents for instance in document.instances]
    for instance in instances:
        prompt, parameters = instance.args[:2]
        messages, most = instance.doc["messages"], instance.doc["max_tokens"]
        instance.arguments = (
            prompt if messages is None else Chat(messages),
            parameters if most is None else {**parameters, "max_gen_toks": most},
        )
    return LoadedTask(loaded.name, loaded.task, list(documents_of(instances, model)))


def _field_of(loaded: LoadedTask) -> str | None:
    """The field of the task's rows that holds the schema; None if it has none."""
    if loaded.task.OUTPUT_TYPE != "generate_until" or structured.VALID not in loaded.task.aggregation():
        return None
    return next((name for name in _FIELDS if all(name in one.doc for one in loaded.documents)), None)


def _arm(loaded: LoadedTask, arm: Arm, model: ServedModel) -> LoadedTask:
    name = structured.arm_name(loaded.name, arm)
    if arm == "free":
        return LoadedTask(name, loaded.task, loaded.documents, arm)
    field = _field_of(loaded)
    assert field is not None
    instances = []
    for document in loaded.documents:
        schema = _schema(document, field, loaded.name)
        instances += [_constrained(instance, schema) for instance in document.instances]
    return LoadedTask(name, loaded.task, list(documents_of(instances, model)), arm)


def _schema(document: TaskDocument, field: str, task: str) -> dict[str, Any]:
    found = document.doc[field]
    try:
        schema = json.loads(found) if isinstance(found, str) else found
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"task {task}: row {document.doc_id} of its dataset has a {field} that is not JSON ({shown(error)}); mend "
            "or remove the row"
        ) from error
    if not isinstance(schema, dict):
        raise UsageError(
            f"task {task}: row {document.doc_id} of its dataset has {a_kind(schema)} as {field}; expected an object; "
            "mend or remove the row"
        )
    return schema


def _constrained(instance: Instance, schema: dict[str, Any]) -> Instance:
    """The same request with the schema and without stop strings, which might be part of a valid document."""
    prompt, parameters = instance.args[:2]
    found = copy.copy(instance)
    found.resps, found.filtered_resps = [], {}
    found.arguments = (prompt, {**parameters, "until": [], **_request_field(prompt, schema)})
    return found


def _request_field(prompt: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """The request field for a schema. ``/v1/completions`` of Dynamo 1.6.1 has no ``response_format``."""
    if isinstance(prompt, Chat):
        of_chat = {"name": "answer", "strict": True, "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": of_chat}}
    return {"guided_json": schema}
