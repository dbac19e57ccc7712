"""The sections of a recipe: what each key says, and what it may be."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from ..data.rows import Documents, Overlong, Samples
from ..layers import Checkpointing
from ..models import LoraConfig
from ..parallel_state import FILES_TIMEOUT, Layout
from ..pipeline import ScheduleName, schedule_kind
from .experts_section import ExpertsSection as ExpertsSection
from .section import MOST_AHEAD, Betas, Blocks, Ranks, Rows, Stages, Step, Wait
from .section import Section as Section


class ModelSection(Section):
    """Where the model comes from: weights of a Hugging Face folder or checkpoint, or a config to start from
    scratch.
    """

    init_from: str | None = Field(
        default=None, description="a Hugging Face folder or a trilith checkpoint to start from"
    )
    config: str | dict[str, Any] | None = Field(
        default=None,
        description="a config.json, or its fields, to start from scratch; beside init_from: what that holds",
    )
    tokenizer: str | None = Field(
        default=None, description="a tokenizer folder to carry along into checkpoints and exports"
    )


class LoraSection(LoraConfig):
    """LoRA: the model of ``model.init_from`` stays as it is, and adapters are trained; PEFT's keys."""

    init_from: str | None = Field(
        default=None,
        description="adapters to go on with: PEFT's folder or a LoRA run's; it says all but lora_dropout",
    )


class LayoutSection(Section):
    """How the model lies on the ranks; see `trilith.parallel_state.Layout`."""

    tensor: Ranks = Field(default=1, description="ranks that each linear is cut over")
    pipeline: Ranks = Field(default=1, description="stages of blocks, one after the other")
    data: Ranks = Field(default=1, description="ranks, or groups of them, with rows of their own")
    data_replicate: Ranks = Field(
        default=1, description="of the data ranks: whole copies, inside each of which zero shards"
    )
    expert: Ranks = Field(
        default=1,
        description="ranks that the experts are dealt out over; a divisor of the data ranks that zero shards "
        "over, without zero of data",
    )
    zero: int = Field(
        default=0,
        ge=0,
        le=3,
        description="what data ranks share out: 0 nothing, 1 moments, 2 gradients too, 3 weights too",
    )
    sequence: bool = Field(default=False, description="what tensor ranks repeat is cut along the row")
    context: Ranks = Field(
        default=1, description="ranks that each row is cut over, into 2 x context chunks; for long rows"
    )
    context_attention: Literal["all-gather", "ring"] = Field(
        default="all-gather",
        description="how context ranks get keys and values: all at once, or piece by piece around a ring",
    )
    split: list[Blocks] | None = Field(
        default=None, description="blocks of each pipeline stage; default: by what blocks and ends cost"
    )
    schedule: ScheduleName = Field(default="1f1b", description="of the pipeline; docs/pipeline.md")
    virtual_stages: Stages | None = Field(
        default=None,
        description="stages of a pipeline rank, for interleaved schedules; default: 2, or 1 with gpipe, 1f1b",
    )

    @property
    def layout(self) -> Layout:
        return Layout.of(
            tensor=self.tensor,
            pipeline=self.pipeline,
            data=self.data,
            data_replicate=self.data_replicate,
            expert=self.expert,
            zero=self.zero,
            sequence=self.sequence,
            virtual_stages=self.stages_of_a_rank,
            v_shape=self.pipeline > 1 and schedule_kind(self.schedule).v_shape,
            context=self.context,
            ring=self.context_attention == "ring",
        )

    @property
    def stages_of_a_rank(self) -> int:
        """Without a pipeline one, whatever the schedule: it says nothing then."""
        if self.pipeline == 1:
            return 1
        return self.virtual_stages or schedule_kind(self.schedule).virtual_stages


class DataSection(Section):
    """What to train on: token files written by `trilith tokenize`, named without their suffix."""

    tokens: str | list[str] = Field(description="the token file, or several to mix")
    weights: list[float] | None = Field(
        default=None, description="how often each token file is drawn from; default: by size"
    )
    sequence_length: int = Field(ge=1, le=2**30, description="tokens of a row")
    global_batch: Rows = Field(description="rows of sequence_length a step, over all ranks")
    micro_batch: Rows = Field(default=1, description="rows that a rank computes at once")
    documents: Documents = Field(
        default="joined",
        description="of running text: attention and positions run over the documents in a row, or, separate, "
        "start anew with each",
    )
    samples: Samples = Field(
        default="packed", description="of chat sets: as many whole samples a row as fit, or a single one"
    )
    overlong: Overlong = Field(
        default="refuse", description="of chat sets: what becomes of a sample longer than sequence_length"
    )
    prefetch: int = Field(
        default=2, ge=0, le=MOST_AHEAD, description="batches made ahead, in a thread; 0: none"
    )


class ParameterGroup(Section):
    """What is different for the parameters whose name matches; the first group that matches counts."""

    match: str = Field(
        min_length=1, description="a regular expression, searched in Hugging Face's name and in ours"
    )
    lr_scale: float = Field(
        default=1.0, ge=0, description="their learning rate, as a multiple of the others'"
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="instead of the usual; also of vectors"
    )
    freeze: bool = Field(default=False, description="never updated; no gradient and no moments")


class SpikeSection(Section):
    """Which steps are skipped because their loss or gradient norm leaps."""

    deviations: float = Field(
        default=6.0,
        gt=0,
        description="standard deviations above the window's mean from which a step is a spike",
    )
    window: int = Field(
        default=128,
        ge=4,
        le=2**20,
        description="steps that are looked back on; nothing is skipped before half of them",
    )


class LossScaleSection(Section):
    """By what the loss is multiplied under float16; all numbers are powers of two."""

    initial: float = Field(default=2.0**16, gt=0, description="at the first step")
    growth_interval: int = Field(
        default=2000, ge=0, description="steps without overflow after which it doubles; 0: never"
    )
    minimum: float = Field(default=1.0, gt=0, description="an overflow at this scale stops the run")
    maximum: float = Field(default=2.0**24, gt=0, description="it doubles no further")


class OptimizerSection(Section):
    """AdamW and the learning rate's course."""

    lr: float = Field(default=3e-4, gt=0, description="the highest learning rate")
    betas: Betas = Field(default=(0.9, 0.95), description="AdamW's")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's")
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices; biases, norms have none")
    clip: float = Field(
        default=1.0, ge=0, description='largest global gradient norm; 0 or "none": no clipping'
    )
    schedule: Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"] = Field(
        default="cosine", description="of the learning rate"
    )
    warmup: int = Field(default=0, ge=0, description="steps of a straight line up to lr")
    minimum_ratio: float = Field(
        default=0.1, ge=0, le=1, description="the last learning rate, as a share of lr; not of constant"
    )
    decay: int | None = Field(
        default=None, ge=1, description="steps of wsd's last phase; default: a tenth of the run"
    )
    decay_shape: Literal["1-sqrt", "linear", "cosine"] = Field(
        default="1-sqrt", description="of wsd's last phase"
    )
    scale_lr: Literal["sqrt", "linear"] | None = Field(
        default=None, description="how lr follows data.global_batch from reference_batch"
    )
    reference_batch: int | None = Field(
        default=None, ge=1, description="samples a step for which lr was found good"
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="share spread over the vocabulary")
    groups: tuple[ParameterGroup, ...] = Field(
        default=(), strict=False, description="parameters with a rate or decay of their own, or frozen"
    )
    skip_spikes: SpikeSection | None = Field(
        default=None, description="skip steps that leap; {} for the defaults"
    )

    @field_validator("clip", mode="before")
    @classmethod
    def _none_is_zero(cls, value: object) -> object:
        return 0.0 if value == "none" else value


class MemorySection(Section):
    """What is given up for memory: time, mostly. docs/memory.md has what each saves and costs."""

    checkpointing: Checkpointing = Field(
        default="none",
        description="what blocks forget and compute again in backward: none; selective, all but products and "
        "attention; every, every n-th block all; full, all blocks all",
    )
    checkpoint_every: int | None = Field(
        default=None, ge=1, description="the n of checkpointing = every; default: 2"
    )
    loss_chunk: int = Field(
        default=0, ge=0, description="tokens whose logits there are at once; 0: those of a micro-batch"
    )
    offload: bool = Field(
        default=False,
        description="weights, gradients and moments rest in the host's memory, where the optimizer steps",
    )
    device_gb: float | None = Field(
        default=None,
        gt=0,
        description="of a device, in 10^9 bytes, for a dry run; default: the GPU here",
    )

    @property
    def every(self) -> int:
        """Every how many blocks one forgets, where checkpointing is "every"."""
        return self.checkpoint_every or 2


class CheckpointSection(Section):
    """When checkpoints are written, and how many stay."""

    every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(default=2, ge=1, description="how many complete checkpoints stay")
    background: bool = Field(
        default=False,
        description="go on while a copy of weights and moments is written; needs room for the copy",
    )
    timeout: Wait = Field(
        default=FILES_TIMEOUT.total_seconds(),
        description="seconds after which a rank that still writes or checks its part counts as failed",
    )


class EvaluationSection(Section):
    """The loss on tokens that are not trained on."""

    tokens: str | list[str] = Field(description="held-out token files, cut into samples as the data's are")
    every: int = Field(default=100, ge=1, description="steps between evaluations; the last step has one too")
    samples: int = Field(default=64, ge=1, description="the same ones each time; at most all there are")


class DebugSection(Section):
    """What looks for mistakes and slows the run; docs/watching.md."""

    collectives: bool = Field(default=False, description="compare what ranks send, name where it differs")
    every: int | None = Field(default=None, ge=1, description="of a group, from one to the next; default: 1")


class WatchSection(Section):
    """What else a run writes down about itself."""

    tensorboard: bool = Field(
        default=False,
        description="event files in the run's folder; needs `pip install 'trilith[tensorboard]'`",
    )
    peak_flops: float | None = Field(
        default=None,
        gt=0,
        description="FLOP/s of one device in the compute format, for MFU; default: by the device's name",
    )
    norms: int = Field(
        default=0,
        ge=0,
        description="steps between norms of each weight and gradient in norms.jsonl; 0: none",
    )
    activation_norms: bool = Field(
        default=False, description="with the norms also each block's output, as a root mean square"
    )
    trace_steps: list[Step] = Field(
        default=[], description="steps, counted from 1, of which torch.profiler writes a Chrome trace"
    )
    trace_ranks: list[int] = Field(default=[0], description="ranks that write the traces")
