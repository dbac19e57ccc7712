"""Define the sections of a recipe: each key, its help, and its allowed values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ..data.rows import Documents, Overlong, Samples
from ..layers import Checkpointing
from ..models import LoraConfig
from ..parallel_state import FILES_TIMEOUT, Layout
from ..pipeline import ScheduleName, schedule_kind
from .section import MOST_AHEAD, Blocks, PathOrAddress, PathText, Ranks, Rows, Stages, Wait
from .section import Section as Section

TokenFiles = Annotated[list[PathOrAddress], Field(min_length=1)]


class ModelSection(Section):
    """The model: weights of a folder or checkpoint, or a config or published size to start from scratch."""

    init_from: PathOrAddress | None = Field(
        default=None, description="Hugging Face folder or trilith checkpoint whose weights to start from"
    )
    config: PathText | dict[str, Any] | None = Field(
        default=None,
        description="a config.json, or its fields, of a model to start from scratch; together with init_from "
        "it must agree with that model's config; together with size it replaces fields of the size",
    )
    size: str | None = Field(
        default=None,
        description="the name of a published size of a model to start from scratch; "
        "`trilith models` lists them",
    )
    mtp: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="factor of the loss of multi-token prediction, whose blocks are then read and trained "
        "(DeepSeek-V3: 0.3, later 0.1); default: these blocks are left out",
    )
    tokenizer: PathText | None = Field(
        default=None, description="tokenizer folder to copy into checkpoints and exports"
    )


class LoraSection(LoraConfig):
    """LoRA: train adapters on the model of ``model.init_from``, which stays as it is; the keys are PEFT's."""

    init_from: PathOrAddress | None = Field(
        default=None,
        description="adapters to continue with: a PEFT folder or a LoRA run; all other keys but "
        "lora_dropout then come from there",
    )


class LayoutSection(Section):
    """Set the number of ranks along each parallel axis; see `trilith.parallel_state.Layout`."""

    tensor: Ranks = Field(
        default=1, description="tensor parallelism: number of ranks that share each matrix product"
    )
    pipeline: Ranks = Field(
        default=1, description="pipeline parallelism: number of ranks that each hold a part of the blocks"
    )
    data: Ranks = Field(
        default=1, description="data parallelism: number of replicas; each trains on different rows"
    )
    data_replicate: Ranks = Field(
        default=1,
        description="hybrid sharding: number of whole copies among the data ranks; zero shards inside "
        "each copy",
    )
    expert: Ranks = Field(
        default=1,
        description="expert parallelism: number of ranks that the experts are distributed over; it divides "
        "context x data / data_replicate",
    )
    zero: int = Field(
        default=0,
        ge=0,
        le=3,
        description="ZeRO stage, what data ranks shard: 0 nothing; 1 moments; 2 moments and gradients; 3 "
        "weights too",
    )
    sequence: bool = Field(
        default=False,
        description="sequence parallelism: split norms and dropout over the tensor ranks along the sequence",
    )
    context: Ranks = Field(
        default=1,
        description="context parallelism: number of ranks that share each row, for long rows; cut into 2 "
        "x context chunks",
    )
    ring: bool = Field(
        default=False,
        description="pass keys and values around the context ranks, piece by piece; default: gather them",
    )
    split: list[Blocks] | None = Field(
        default=None,
        description="number of blocks of each pipeline stage; default: balanced by the cost of blocks, "
        "embedding and output layer",
    )
    schedule: ScheduleName = Field(default="1f1b", description="pipeline schedule; see docs/pipeline.md")
    virtual_stages: Stages | None = Field(
        default=None,
        description="number of stages that each pipeline rank holds; default: 2, or 1 with gpipe and 1f1b",
    )

    @property
    def layout(self) -> Layout:
        """Return the layout: all keys except those that say how a pipeline cuts and runs the blocks."""
        return Layout.of(
            **self.model_dump(exclude={"split", "schedule", "virtual_stages"}),
            virtual_stages=self.stages_of_a_rank,
            v_shape=self.pipeline > 1 and schedule_kind(self.schedule).v_shape,
        )

    @property
    def stages_of_a_rank(self) -> int:
        """Return the number of stages of a pipeline rank: 1 without a pipeline, whatever the schedule."""
        if self.pipeline == 1:
            return 1
        return self.virtual_stages or schedule_kind(self.schedule).virtual_stages


class DataSection(Section):
    """Choose the data to train on: token files written by `trilith tokenize`, named without their suffix."""

    tokens: PathOrAddress | TokenFiles = Field(
        description="token file, or a list of token files to mix; names have no suffix"
    )
    weights: list[float] | None = Field(
        default=None, description="share of each token file in the mixture; default: its size"
    )
    sequence_length: int = Field(ge=1, le=2**30, description="number of tokens in a row")
    global_batch: Rows = Field(description="number of rows in a step, over all ranks")
    micro_batch: Rows = Field(default=1, description="number of rows that a rank computes at once")
    documents: Documents = Field(
        default="joined",
        description="running text: joined, attention and positions run across the documents of a row; "
        "separate, "
        "they restart at each document",
    )
    samples: Samples = Field(
        default="packed",
        description="chat data: packed, as many whole samples in a row as fit; single, one sample in a row",
    )
    overlong: Overlong = Field(
        default="refuse",
        description="chat data: what to do with a sample that is longer than sequence_length",
    )
    prefetch: int = Field(
        default=2,
        ge=0,
        le=MOST_AHEAD,
        description="number of micro-batches to prepare ahead in a thread; 0: none",
    )


class MemorySection(Section):
    """Trade time for memory; docs/memory.md says what each key saves and costs."""

    checkpointing: Checkpointing = Field(
        default="none",
        description="activation checkpointing. none: keep everything; selective: recompute everything except "
        "matrix products and attention; every: recompute each n-th block; full: recompute all blocks",
    )
    checkpoint_every: int | None = Field(
        default=None, ge=1, description="n of checkpointing = every; default: 2"
    )
    loss_chunk: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="number of tokens whose logits exist at once; 0: those of a whole micro-batch, kept for "
        "backward; auto: 0 if these take at most 64 MiB, else the number that needs least memory",
    )
    offload: bool = Field(
        default=False,
        description="keep weights, gradients and moments in the host's memory and run the optimizer there",
    )
    device_gb: float | None = Field(
        default=None,
        gt=0,
        description="memory of a device in 10^9 bytes, for a dry run; default: that of the GPU here",
    )
    headroom: float = Field(
        default=0.08,
        ge=0,
        le=0.9,
        description="share of a device's memory that `trilith plan` and a dry run leave free",
    )

    @property
    def stated_chunk(self) -> int:
        """Return ``loss_chunk`` if it is a number, and 0 if it is "auto"."""
        return 0 if self.loss_chunk == "auto" else self.loss_chunk

    @property
    def every(self) -> int:
        """Return n if checkpointing is "every": one of n blocks recomputes its activations."""
        return self.checkpoint_every or 2


class ExpertsSection(Section):
    """Load balancing of mixture-of-experts models; see docs/experts.md."""

    balance: float | None = Field(
        default=None,
        ge=0,
        description="factor of the load-balancing loss, a mean over rows and routers; default: "
        "router_aux_loss_coef of the model's config if its output_router_logits is true, else 0",
    )
    z_loss: float = Field(
        default=0.0, ge=0, description="factor of the routers' z-loss, a mean over rows and routers"
    )
    bias_rate: float = Field(
        default=0.0,
        ge=0,
        description="step by which a router's bias rises for an expert with fewer tokens than the mean, "
        "and falls for one with more; only for models whose routers have biases, without adapters",
    )


class CheckpointSection(Section):
    """Choose when and how checkpoints are saved, and how many are kept."""

    every: int = Field(
        default=0, ge=0, description="number of steps between checkpoints; 0: save only at the end"
    )
    keep: int = Field(default=2, ge=1, description="number of complete checkpoints to keep")
    background: bool = Field(
        default=False,
        description="continue while a copy of weights and moments is written; needs memory for the copy",
    )
    mirror: PathOrAddress | None = Field(
        default=None,
        description="a second place for the newest checkpoints, a folder or a URL of fsspec such as "
        "s3://bucket/run; they are copied there in the background",
    )
    restore: bool = Field(
        default=False,
        description="if the run's folder has no checkpoint, copy the newest one of mirror into it first",
    )
    timeout: Wait = Field(
        default=FILES_TIMEOUT.total_seconds(),
        description="seconds to wait for a rank that writes or checks its part before it counts as failed",
    )


class EvaluationSection(Section):
    """Compute the loss on tokens that are not trained on."""

    tokens: PathOrAddress | TokenFiles = Field(
        description="held-out token file or files, cut into rows as those of [data]"
    )
    every: int = Field(
        default=100, ge=1, description="number of steps between evaluations; the last step is evaluated too"
    )
    samples: int = Field(
        default=64, ge=1, description="number of rows to evaluate, the same ones each time; at most all rows"
    )


class DebugSection(Section):
    """Extra checks while training, which slow the run; see docs/watching.md."""

    collectives: bool = Field(
        default=False, description="compare the collectives of the ranks and name the first that differs"
    )
    every: int | None = Field(
        default=None, ge=1, description="compare every n-th collective of each process group; default: 1"
    )
