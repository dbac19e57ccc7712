"""Run ``trilith evaluate`` on its ranks: the loss of stored weights on a token file, as a run computes it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints import Source, read_source, with_adapter
from ..data.batches import GlobalBatches
from ..data.token_file import TokenFile
from ..data.token_index import check_vocabulary
from ..generation.request import loaded_model
from ..parallel_state import BadInput, Layout, dtype_named
from ..runs.command_ranks import leave_figures, start_ranks
from ..runs.guard import watched
from ..runs.heartbeat import this_start
from ..runs.launch import check_launch, check_local, device_here, own_rank, process_group, ranks_are_started
from .evaluation import Evaluator, perplexity
from .run_data import HeldOut, check_tokenizer
from .step import Step
from .token_loss import TokenLoss

#: The length of a row unless another one is asked for, a run trained with another, or the model takes less.
_LENGTH = 2048


@dataclass(frozen=True)
class Question:
    """State what to evaluate, on which rows. ``batch``: number of rows computed at once."""

    source: str | Path
    tokens: Path
    sequence_length: int | None = None
    rows: int | None = None
    batch: int = 4
    dtype: str = "float32"
    adapter: Path | None = None


@dataclass(frozen=True)
class Figures:
    """Report the mean loss in nats over the tokens that count, and its perplexity, ``None`` if too large."""

    loss: float
    perplexity: float | None
    tokens: int
    rows: int
    sequence_length: int


@dataclass(frozen=True)
class _Opened:
    source: Source
    adapter: Source | None
    batches: GlobalBatches
    samples: int


def run_evaluation(
    question: Question,
    layout: Layout,
    *,
    words: Sequence[str],
    show: Callable[[Figures], str],
    note: Callable[[str], None],
    device: str = "auto",
    status: Path | None = None,
) -> int:
    """Give ``note`` the figures as ``show`` writes them; return the exit code.

    ``words`` are the command's own, with which a layout of several ranks starts them; ``status`` is the
    folder that they were then given.
    """
    device = device_here(device)
    if not ranks_are_started():
        check_local(layout, device=device)
        if layout.world > 1:
            _open(question, layout)  # bad input is said once and at once, before any rank starts
            return start_ranks(words, layout.world, note)
    check_launch(layout, device=device)
    with ExitStack() as stack:
        if status is not None:
            stack.enter_context(watched(status, own_rank(), layout.world, run=this_start()))
        opened = _open(question, layout)
        batches, samples = opened.batches, opened.samples
        # A run may save meanwhile, and each rank chooses its newest checkpoint.
        alike = {"device": device, "question": repr(question), "source": str(opened.source.path)}
        state = stack.enter_context(process_group(layout, device=device, alike=alike))
        dtype = dtype_named(question.dtype)
        model = loaded_model(opened.source, opened.adapter, dtype=dtype, state=state)
        loss = Evaluator(
            Step(model, TokenLoss(model), micro_batch=question.batch), HeldOut(batches, samples)
        )()
        tokens = batches.count_labels(0, range(samples))
        figures = Figures(loss, perplexity(loss), tokens, samples, batches.sequence_length)
        if own_rank() == 0:
            leave_figures(show(figures), note, status)
    return 0


def _open(question: Question, layout: Layout) -> _Opened:
    """Read everything but the weights. Raises ``BadInput`` for what cannot be evaluated."""
    first = own_rank() == 0
    source, adapter = with_adapter(read_source(question.source, whole=first), question.adapter, whole=first)
    config, most = source.model_config, source.model_config.max_position_embeddings
    (adapter or source).family.declarations(config, layout)  # refuses a layout that cannot cut the model
    dtype_named(question.dtype, "evaluate", "--dtype")
    file = TokenFile.open(question.tokens)
    check_vocabulary(file.vocab_size, config.vocab_size, question.tokens)
    length = question.sequence_length or _trained_length(adapter or source) or min(_LENGTH, most)
    if length > most:
        raise BadInput("evaluate", "--sequence-length", expected=f"at most {most:,}", found=f"{length:,}")
    batches = GlobalBatches(file, length, 1, 0)
    check_tokenizer(batches, source.path, "evaluate")
    rows = batches.samples if question.rows is None else min(question.rows, batches.samples)
    return _Opened(source, adapter, batches.resized(rows), rows)


def _trained_length(source: Source) -> int | None:
    """Return ``data.sequence_length`` of the run that wrote a checkpoint; ``None`` for other weights."""
    position = None if source.manifest is None else source.manifest.data_position
    length = position.get("sequence_length") if isinstance(position, dict) else None
    return length if isinstance(length, int) and length > 0 else None
