"""The specification of a ``trtx eval fidelity`` run, and its form in the manifest."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from trtx.config.topology import Name
from trtx.engine import MODEL_ENGINES
from trtx.evals.fidelity.prompts import DEFAULT_COUNT, MOST
from trtx.experiment.directory import read_manifest
from trtx.experiment.scoring_spec import MOST_CONCURRENT
from trtx.experiment.topologies_spec import TopologiesSpec, spec_of_options


class FidelitySpec(TopologiesSpec):
    """The typed options, with defaults resolved."""

    name: str = "fidelity"
    check: Literal["fidelity"] = "fidelity"  # the trtx eval check that the run performs
    reference: Name | None = None  # None: the checkpoint from which the engine was built, else the model itself
    # Number of prompts to generate; None: those of the file.
    prompts: Annotated[int, Field(ge=1, le=MOST)] | None = DEFAULT_COUNT
    prompt_file: Path | None = None
    osl: int = Field(default=64, ge=1, le=32_768)  # maximum tokens of the reference's text after each prompt
    concurrency: int = Field(default=8, ge=1, le=MOST_CONCURRENT)  # requests in flight
    max_kl: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # nats per token
    min_agreement: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)  # share of tokens

    @field_validator("prompt_file")
    @classmethod
    def _found_from_anywhere(cls, value: Path | None) -> Path | None:
        return None if value is None else value.absolute()  # a run may be resumed from another directory

    @model_validator(mode="after")
    def _has_probabilities(self) -> FidelitySpec:
        if self.attach is not None and self.reference is None:
            raise ValueError(
                "reference is needed with --url, because the checkpoint of a running server is not known; name it"
            )
        if self.topology.engine not in ("auto", *MODEL_ENGINES):
            raise ValueError(
                f"engine is {self.topology.engine}, which computes no probabilities; expected torch, tensorrt-llm or "
                "auto"
            )
        return self


def read_fidelity_spec(run_dir: Path) -> FidelitySpec:
    """Reads the spec from a run's manifest. Raises UsageError if it isn't a run of ``trtx eval fidelity``, or is
    unreadable.
    """
    return read_manifest(run_dir, "trtx eval fidelity", FidelitySpec)


fidelity_of = partial(spec_of_options, FidelitySpec)
