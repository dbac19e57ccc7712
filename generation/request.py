"""Carry out ``trilith generate``: prompts to ids, a model in its layout, and text as it comes."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..checkpoints import Source
from ..data.text.tokenizer_loading import Tokenizer, load_tokenizer
from ..data.token_index import check_vocabulary
from ..parallel_state import BadInput, Layout, ParallelState
from ..storage.files_beside_weights import GENERATION_CONFIG
from ..storage.small_files import read_json
from ..system import counted
from .command import Weights
from .generate import Sampling, check_length, generate
from .text import Continuation, Prompt, prompt_ids


@dataclass(frozen=True)
class Request:
    """State what to generate. ``stop``: texts that end a row. ``batch``: number of rows computed at once."""

    source: str | Path
    prompts: Sequence[Prompt]
    tokenizer: Path | None = None
    chat: bool = False
    system: str | None = None
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    seed: int = 0
    batch: int = 16
    dtype: str = "float32"
    adapter: Path | None = None


@dataclass(frozen=True)
class Prepared(Weights):
    """Hold the prompts as ids and the ids that end a row, prepared before any rank starts."""

    tokenizer: Tokenizer
    ids: list[list[int]]
    stop: frozenset[int]


def prepare(request: Request, layout: Layout) -> Prepared:
    """Read everything but the weights. Raises ``BadInput`` for what cannot be generated from."""
    if "" in request.stop:
        raise BadInput("generate", "--stop", expected="text that ends a continuation", found="none")
    weights = Weights.of(request.source, request.adapter, layout, request.dtype, "generate")
    source, config = weights.source, weights.source.model_config
    tokenizer = load_tokenizer(request.tokenizer or source.path)
    check_vocabulary(tokenizer.vocab_size, config.vocab_size, request.tokenizer or source.path)
    ids = [
        prompt_ids(prompt, tokenizer, chat=request.chat, system=request.system, where=f"prompt {number}")
        for number, prompt in enumerate(request.prompts, 1)
    ]
    check_length(max(map(len, ids)), request.max_new_tokens, config.max_position_embeddings)
    stop = frozenset() if request.ignore_eos else stop_ids(source, tokenizer)
    return Prepared(**vars(weights), tokenizer=tokenizer, ids=ids, stop=stop)


def stop_ids(source: Source, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a text: ``eos_token_id`` of generation_config.json and config.json, and the
    tokenizer's.
    """
    raw = [source.config.get("eos_token_id"), tokenizer.eos_id]
    file = source.path / GENERATION_CONFIG
    if file.exists():
        raw.append(read_json(file).get("eos_token_id"))
    token_ids = [token_id for value in raw for token_id in (value if isinstance(value, list) else [value])]
    # A reduced or freshly made model may name ids that it has no rows for.
    return frozenset(i for i in token_ids if isinstance(i, int) and 0 <= i < source.model_config.vocab_size)


@dataclass(frozen=True)
class Figures:
    """Report the new tokens of all rows, and the seconds from the first prompt to the last token."""

    tokens: int
    seconds: float

    def __str__(self) -> str:
        rate = self.tokens / self.seconds
        return f"{counted(self.tokens, 'token')} in {self.seconds:.2f} s, {rate:.1f} tokens/s"


def continue_prompts(
    request: Request,
    prepared: Prepared,
    state: ParallelState,
    *,
    on_text: Callable[[str], None] | None = None,
    on_row: Callable[[Continuation], None] | None = None,
) -> Figures:
    """Generate for all prompts, on every rank. ``on_row`` is told each prompt's continuation when its batch
    is done; ``on_text``, for a single prompt, its pieces as they come.
    """
    model = prepared.load(state)
    began, tokens = time.perf_counter(), 0
    for first, rows in _batches(prepared.ids, request.batch):
        watch = [Continuation(prepared.tokenizer, ids, prepared.stop, request.stop) for ids in rows]

        def streamed(step: list[int | None], continuation: Continuation = watch[0]) -> None:
            if on_text is not None and step[0] is not None:
                on_text(continuation.grow(step[0]))

        continuations = generate(
            model,
            rows,
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=request.min_new_tokens,
            sampling=request.sampling,
            stop=prepared.stop,
            ends=partial(watch[0].ends, least=request.min_new_tokens) if request.stop else None,
            seed=request.seed,
            first=first,
            on_tokens=streamed if len(prepared.ids) == 1 else None,
        )
        for row, new in zip(watch, continuations, strict=True):
            row.close(new)
            tokens += len(new)
            if on_row is not None:
                on_row(row)
        if on_text is not None and len(prepared.ids) == 1:
            on_text(watch[0].rest())
    return Figures(tokens, max(time.perf_counter() - began, 1e-9))


def _batches(rows: list[list[int]], size: int) -> Iterator[tuple[int, list[list[int]]]]:
    if size < 1:
        raise BadInput("generate", "batch", expected="at least 1", found=size)
    for first in range(0, len(rows), size):
        yield first, rows[first : first + size]
