"""The part of an eval specification that names what is scored: topologies that trtx serves, or a server."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from trtx.bench.documents import problem
from trtx.config import Mode, TopologySpec
from trtx.errors import UsageError
from trtx.experiment.bench.axes import NamedTopology, expand
from trtx.experiment.bench.spec import ATTACHED, Attach
from trtx.experiment.scoring_spec import as_option, refuse_twice


class TopologiesSpec(BaseModel):
    """Served topologies, or an attached server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    modes: tuple[Mode, ...] = Field(default=("agg",), min_length=1)
    topology: TopologySpec = Field(default_factory=lambda: TopologySpec.model_validate({"port": 0}))
    attach: Attach | None = None

    @field_validator("modes")
    @classmethod
    def _distinct(cls, value: tuple[Mode, ...]) -> tuple[Mode, ...]:
        refuse_twice("--mode", value)
        return value

    @property
    def topologies(self) -> tuple[NamedTopology, ...]:
        """The topologies that trtx serves in turn; empty for an attached run."""
        return () if self.attach is not None else expand(self.modes, self.topology, {})

    @property
    def labels(self) -> tuple[str, ...]:
        return (ATTACHED,) if self.attach is not None else tuple(one.label for one in self.topologies)

    def to_json(self) -> dict[str, Any]:
        """Plain values, including the labels that result from the modes."""
        return {**self.model_dump(mode="json"), "topologies": list(self.labels)}


Kind = TypeVar("Kind", bound=TopologiesSpec)


def spec_of_options(kind: type[Kind], fields: dict[str, Any]) -> Kind:
    """Validates typed values. Raises UsageError that names the option."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise UsageError(as_option(problem(error), kind)) from error
