"""Define the sections of a recipe: each key, its help, and its allowed values."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ..data.rows import Documents, Overlong, Samples
from ..layers import Checkpointing
from ..models import Implementation, LoraConfig
from ..parallel_state import FILES_TIMEOUT, Layout
from ..pipeline import ScheduleName, schedule_kind
from ..runs.trackers import TrackerName
from .section import MOST_AHEAD, Blocks, CodeName, PathOrAddress, PathText, Ranks, Rows, Stages, Step, Wait
from .section import Section as Section

TokenFiles = Annotated[list[PathOrAddress], Field(min_length=1)]
CodeNames = Annotated[list[CodeName], Field(min_length=1)]
#: Keywords of a constructor or a function.
Arguments = dict[str, Any]


class ModelSection(Section):
    """The model: weights of a folder or checkpoint, or a config or published size to start from scratch."""

    init_from: PathOrAddress | None = None
    """Hugging Face folder or trilith checkpoint whose weights to start from"""
    config: PathText | dict[str, Any] | None = None
    """a config.json, or its fields, of a model to start from scratch; together with init_from it must agree
    with that model's config; together with size it replaces fields of the size"""
    size: str | None = None
    """the name of a published size of a model to start from scratch; `trilith models` lists them"""
    implementation: Implementation = "auto"
    """whose code computes the blocks: auto, the zoo's if it has the family, else transformers'; transformers,
    its code also for a family of the zoo (docs/any_model.md)"""
    mtp: float | None = Field(default=None, gt=0, le=10)
    """factor of the loss of multi-token prediction, whose blocks are then read and trained (DeepSeek-V3: 0.3,
    later 0.1); default: these blocks are left out"""
    tokenizer: PathText | None = None
    """tokenizer folder to copy into checkpoints and exports; default: that of init_from, or of the token file
    where it still is"""
    module: CodeName | None = None
    """a model of your own, `file.py:Class`: an nn.Module whose keyword `state` is its place in the layout;
    the file is run (docs/your_model.md)"""
    arguments: Arguments = Field(default={})
    """keywords of that class"""


class LossSection(Section):
    """A loss of your own, for a model of your own; see docs/your_model.md."""

    module: CodeName
    """`file.py:name` of a `Loss`, its class, or a function of (output, samples) that returns a sum and a
    count; the file is run"""
    arguments: Arguments = Field(default={})
    """keywords of that class or function"""


class LoraSection(LoraConfig):
    """LoRA: train adapters on the model of ``model.init_from``, which stays as it is; the keys are PEFT's."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    init_from: PathOrAddress | None = None
    """adapters to continue with: a PEFT folder or a LoRA run; all other keys but lora_dropout then come from
    there"""


class LayoutSection(Section):
    """Set the number of ranks along each parallel axis; see `trilith.parallel_state.Layout`."""

    tensor: Ranks = 1
    """tensor parallelism: number of ranks that share each matrix product"""
    pipeline: Ranks = 1
    """pipeline parallelism: number of ranks that each hold a part of the blocks"""
    data: Ranks = 1
    """data parallelism: number of replicas; each trains on different rows"""
    data_replicate: Ranks = 1
    """hybrid sharding: number of whole copies among the data ranks; zero shards inside each copy"""
    expert: Ranks = 1
    """expert parallelism: number of ranks that the experts are distributed over; it divides context x data /
    data_replicate"""
    zero: int = Field(default=0, ge=0, le=3)
    """ZeRO stage, what data ranks shard: 0 nothing; 1 moments; 2 moments and gradients; 3 weights too"""
    sequence: bool = False
    """sequence parallelism: split norms and dropout over the tensor ranks along the sequence"""
    context: Ranks = 1
    """context parallelism: number of ranks that share each row, for long rows; cut into 2 x context chunks"""
    ring: bool = False
    """pass keys and values around the context ranks, piece by piece; default: gather them"""
    split: list[Blocks] | None = None
    """number of blocks of each pipeline stage; default: balanced by the cost of blocks, embedding and output
    layer"""
    schedule: ScheduleName = "1f1b"
    """pipeline schedule; see docs/pipeline.md"""
    virtual_stages: Stages | None = None
    """number of stages that each pipeline rank holds; default: 2, or 1 with gpipe and 1f1b"""

    @property
    def layout(self) -> Layout:
        """Return the layout: all keys except those that say how a pipeline cuts and runs the blocks."""
        kind, several = schedule_kind(self.schedule), self.pipeline > 1
        return Layout.of(
            **self.model_dump(exclude={"split", "schedule", "virtual_stages"}),
            virtual_stages=(self.virtual_stages or kind.virtual_stages) if several else 1,
            v_shape=several and kind.v_shape,
        )


class DataSection(Section):
    """Choose the data to train on: token files written by `trilith tokenize`, or samples of your own."""

    tokens: PathOrAddress | TokenFiles | None = None
    """token file, or a list of token files to mix; names have no suffix"""
    module: CodeName | CodeNames | None = None
    """in place of tokens, for a model of your own: `file.py:Class` of a data set, or a list of them to mix;
    it has a length, and each item is a dict of tensors; the file is run (docs/your_model.md)"""
    arguments: Arguments | list[Arguments] = Field(default={})
    """keywords of the data sets' classes: the same for all, or a list with those of each"""
    weights: list[float] | None = None
    """share of each token file or data set in the mixture; default: its size"""
    sequence_length: int = Field(default=1, ge=1, le=2**30)
    """number of tokens in a row; required with tokens; with module: number of tokens that an item counts for
    in tokens a second, and that context ranks cut"""
    global_batch: Rows
    """number of rows in a step, over all ranks"""
    micro_batch: Rows = 1
    """number of rows that a rank computes at once"""
    documents: Documents = "joined"
    """running text: joined, attention and positions run across the documents of a row; separate, they restart
    at each document"""
    samples: Samples = "packed"
    """chat data: packed, as many whole samples in a row as fit; single, one sample in a row"""
    overlong: Overlong = "refuse"
    """chat data: what to do with a sample that is longer than sequence_length"""
    prefetch: int = Field(default=2, ge=0, le=MOST_AHEAD)
    """number of micro-batches to prepare ahead in a thread; 0: none"""


class MemorySection(Section):
    """Trade time for memory; docs/memory.md says what each key saves and costs."""

    checkpointing: Checkpointing = "none"
    """activation checkpointing. none: keep everything; selective: recompute everything except matrix products
    and attention; every: recompute each n-th block; full: recompute all blocks"""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """n of checkpointing = every; default: 2"""
    loss_chunk: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """number of tokens whose logits exist at once; 0: those of a whole micro-batch, kept for backward; auto:
    0 if these take at most 64 MiB, else the number that needs least memory"""
    offload: bool = False
    """keep weights, gradients and moments in the host's memory and run the optimizer there"""
    device_gb: float | None = Field(default=None, gt=0, le=10**9)
    """memory of a device in 10^9 bytes, for a dry run; default: that of the GPU here"""
    headroom: float = Field(default=0.08, ge=0, le=0.9)
    """share of a device's memory that `trilith plan` and a dry run leave free"""

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

    balance: float | None = Field(default=None, ge=0)
    """factor of the load-balancing loss, a mean over rows and routers; default: router_aux_loss_coef of the
    model's config if its output_router_logits is true, else 0"""
    z_loss: float = Field(default=0.0, ge=0)
    """factor of the routers' z-loss, a mean over rows and routers"""
    bias_rate: float = Field(default=0.0, ge=0)
    """step by which a router's bias rises for an expert with fewer tokens than the mean, and falls for one
    with more; only for models whose routers have biases, without adapters"""


class CheckpointSection(Section):
    """Choose when and how checkpoints are saved, and how many are kept."""

    every: int = Field(default=0, ge=0)
    """number of steps between checkpoints; 0: save only at the end"""
    keep: int = Field(default=2, ge=1)
    """number of complete checkpoints to keep"""
    background: bool = False
    """continue while a copy of weights and moments is written; needs memory for the copy"""
    mirror: PathOrAddress | None = None
    """a second place for the newest checkpoints, a folder or a URL of fsspec such as s3://bucket/run; they
    are copied there in the background"""
    restore: bool = False
    """if the run's folder has no checkpoint, copy the newest one of mirror into it first"""
    timeout: Wait = FILES_TIMEOUT.total_seconds()
    """seconds to wait for a rank that writes or checks its part before it counts as failed"""


class EvaluationSection(Section):
    """Compute the loss on data that is not trained on."""

    tokens: PathOrAddress | TokenFiles | None = None
    """held-out token file or files, cut into rows as those of [data]"""
    module: CodeName | CodeNames | None = None
    """where [data] has a module: the held-out data set or sets, `file.py:Class`"""
    arguments: Arguments | list[Arguments] = Field(default={})
    """keywords of the data sets' classes"""
    every: int = Field(default=100, ge=1)
    """number of steps between evaluations; the last step is evaluated too"""
    samples: int = Field(default=64, ge=1)
    """number of rows to evaluate, the same ones each time; at most all rows"""


class WatchSection(Section):
    """Further measurements that a run writes while training; see docs/watching.md."""

    trackers: list[TrackerName] = Field(default=[])
    """show the run in tensorboard, wandb, mlflow or trackio; each needs its own package and `accelerate`"""
    project: str = Field(default="trilith", min_length=1)
    """name under which a tracker lists runs together"""
    peak_flops: float | None = Field(default=None, gt=0)
    """peak FLOP/s of one device in the compute data type, for MFU; default: looked up by the device's name"""
    slow_rank: float | None = Field(default=None, ge=0)
    """name the slowest rank if its own work in a step, without waiting for others, takes more than this many
    times the median; measured every log_every steps; 0: not measured; default: 1.5, and not measured on CPU
    ranks of one host, which take its cores from each other"""
    norms: int = Field(default=0, ge=0)
    """number of steps between norms of every weight and gradient in norms.jsonl; 0: none"""
    activation_norms: bool = False
    """beside the norms, write the root mean square of each block's output"""
    trace_steps: list[Step] = Field(default=[])
    """steps, counted from 1, that torch.profiler records as a Chrome trace"""
    trace_ranks: list[int] = Field(default=[0])
    """ranks that write traces"""


class DebugSection(Section):
    """Extra checks while training, which slow the run; see docs/watching.md."""

    collectives: bool = False
    """compare the collectives of the ranks and name the first that differs"""
    every: int | None = Field(default=None, ge=1)
    """compare every n-th collective of each process group; default: 1"""
