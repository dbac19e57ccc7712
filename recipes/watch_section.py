"""Define the section of a recipe about measurements and trackers: each key, its help, its allowed values."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from ..runs.named_trackers import TrackerName
from .section import Section, Step


class WatchSection(Section):
    """Further measurements that a run writes while training; see docs/watching.md."""

    trackers: list[TrackerName] = Field(
        default=[],
        description="show the run in tensorboard, wandb, mlflow or trackio; each needs its own package and "
        "`accelerate`",
    )
    project: str = Field(
        default="trilith", min_length=1, description="name under which a tracker lists runs together"
    )
    peak_flops: float | None = Field(
        default=None,
        gt=0,
        description="peak FLOP/s of one device in the compute data type, for MFU; default: looked up by "
        "the device's name",
    )
    slow_rank: float = Field(
        default=1.5,
        ge=0,
        description="name the slowest rank if its own work in a step, without waiting for others, takes more "
        "than this many times the median; measured every log_every steps; 0: not measured",
    )
    norms: int = Field(
        default=0,
        ge=0,
        description="number of steps between norms of every weight and gradient in norms.jsonl; 0: none",
    )
    activation_norms: bool = Field(
        default=False, description="beside the norms, write the root mean square of each block's output"
    )
    trace_steps: list[Step] = Field(
        default=[], description="steps, counted from 1, that torch.profiler records as a Chrome trace"
    )
    trace_ranks: list[int] = Field(default=[0], description="ranks that write traces")

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        if isinstance(given, dict) and "tensorboard" in given:
            raise PydanticCustomError(
                "renamed", "Input should be trackers = ['tensorboard'] in the place of the key tensorboard"
            )
        return given
