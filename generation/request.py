"""Run ``trilith generate``: prompts to ids, a model in its layout, text that the first rank writes. And
``trilith chat``, on one device: each message is answered after all that was said before.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, TextIO

from ..checkpoints import Source
from ..data.text.chat_formats import Conversation
from ..data.text.tokenizer_loading import Message, Tokenizer, load_tokenizer
from ..data.token_index import check_vocabulary
from ..parallel_state import Layout, ParallelState, require
from ..runs.launch import check_launch, device_here, device_words, own_rank, process_group
from ..storage.disk import writing
from ..storage.file_names import CONFIG
from ..storage.files_beside_weights import GENERATION_CONFIG
from ..storage.output_places import check_output_file
from ..storage.small_files import read_json
from ..storage.staging import output_file
from ..system import counted, literal
from .command import Ranks, Weights
from .generate import Sampling, check_counts, check_length, generate
from .text import Continuation, Prompt, prompt_ids

if TYPE_CHECKING:
    from ..models import CausalLM


#: The message that begins a new conversation.
ANEW = "/new"


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
    require("" not in request.stop, "generate", "--stop", "text that ends a continuation", "none")
    check_counts(request.max_new_tokens, request.min_new_tokens)
    used = request.system is None or request.chat or any(not isinstance(x, str) for x in request.prompts)
    require(used, "generate", "--system", "--chat with it, or conversations as prompts", "neither")
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
    configs, token_ids = {CONFIG: source.config}, [tokenizer.eos_id]
    if (file := source.path / GENERATION_CONFIG).exists():
        configs[GENERATION_CONFIG] = read_json(file)
    for name, config in configs.items():
        value = config.get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        expected = "a token's number, a list of them or null"
        fits = all(type(token_id) in (int, NoneType) for token_id in listed)
        require(fits, source.path / name, "eos_token_id", expected, literal(value))
        token_ids += listed
    # A reduced or freshly made model may name ids that it has no rows for.
    return frozenset(i for i in token_ids if i is not None and 0 <= i < source.model_config.vocab_size)


def not_applied(source: Source, sampling: Sampling) -> str:
    """Return a line about settings of generation_config.json that transformers would apply, with the options
    that do; empty without any. An option that was given stands for the file's setting.
    """
    file, default = source.path / GENERATION_CONFIG, Sampling()
    config = read_json(file) if file.exists() else {}
    names = ["repetition_penalty"]
    if config.get("do_sample") is True:
        names += ["temperature", "top_k", "top_p"]
        config.setdefault("temperature", 1.0)
    settings = {
        name: setting
        for name in names
        if isinstance(setting := config.get(name), int | float)
        and getattr(sampling, name) == getattr(default, name) != setting
    }
    if not settings:
        return ""
    options = " ".join(f"--{name.replace('_', '-')} {setting}" for name, setting in settings.items())
    return f"{file} has {', '.join(settings)}, which only options set: {options}"


def continue_rows(
    request: Request,
    prepared: Prepared,
    model: CausalLM,
    rows: Sequence[Sequence[int]],
    *,
    first: int,
    most: int,
    on_text: Callable[[str], None] | None,
) -> list[Continuation]:
    """Return the continuations of prompts, of which the first has the number ``first``, by ``most`` tokens.

    ``on_text`` is told the pieces of a single prompt's.
    """
    continuations = [Continuation(prepared.tokenizer, ids, prepared.stop, request.stop) for ids in rows]

    def grow(step: list[int | None]) -> list[int]:
        for row, token in zip(continuations, step, strict=True):
            piece = "" if token is None else row.grow(token)
            if on_text is not None:
                on_text(piece)
        return [number for number, row in enumerate(continuations) if row.end is not None]

    tokens = generate(
        model,
        rows,
        max_new_tokens=most,
        min_new_tokens=request.min_new_tokens,
        sampling=request.sampling,
        stop=prepared.stop,
        seed=request.seed,
        first=first,
        on_tokens=grow if request.stop or on_text is not None else None,  # it decodes each token
    )
    for row, row_tokens in zip(continuations, tokens, strict=True):
        row.tokens = row_tokens
    if on_text is not None:
        on_text(continuations[0].rest())
    return continuations


def converse(
    request: Request,
    lines: Iterable[str],
    *,
    write: Callable[[str], None],
    note: Callable[[str], None],
    device: str = "auto",
) -> None:
    """Answer each line as a user's message; ``write`` gets the pieces of the answers as they come.

    The tokenizer's chat template writes the conversation. The request's prompts do not count. A blank line is
    passed over. An answer has at most the tokens that the model's positions leave, and a message that leaves
    none is not answered. ``BadInput`` before the weights are read if there is no template.
    """
    device = device_here(device)
    check_launch(Layout(), device=device)
    prepared = prepare(
        replace(request, prompts=["Hello"], chat=True, max_new_tokens=1, min_new_tokens=0), Layout()
    )
    positions = prepared.source.model_config.max_position_embeddings
    with process_group(Layout(), device=device) as state:
        model = prepared.load(state)
        note(f"{request.source} on {device_words(device)}; {ANEW} begins anew, Ctrl-D ends")
        if line := not_applied(prepared.source, request.sampling):
            note(line)
        messages: list[Message] = []
        for number, line in enumerate(filter(str.strip, lines)):
            if line.strip() == ANEW:
                messages.clear()
                continue
            messages.append({"role": "user", "content": line})
            conversation, where = Conversation(messages), f"message {number + 1}"
            ids = prompt_ids(conversation, prepared.tokenizer, chat=True, system=request.system, where=where)
            room = positions + 1 - len(ids)  # the last token is never read
            if room < 1:
                messages.pop()
                full = f"{len(ids)} tokens do not fit the model's {positions} positions"
                note(f"the conversation is too long: {full}; not answered. {ANEW} begins anew")
                continue
            most = min(room, request.max_new_tokens)
            (answer,) = continue_rows(request, prepared, model, [ids], first=number, most=most, on_text=write)
            write("\n")
            messages.append({"role": "assistant", "content": answer.text})
            if answer.finish == "length" and most == request.max_new_tokens:
                note(f"the answer is cut at {counted(most, 'token')}: --max-new-tokens allows more")
            elif answer.finish == "length":
                note(f"the conversation fills the model's {positions} positions: {ANEW} begins anew")


def run_generation(
    request: Request,
    ranks: Ranks,
    *,
    write: Callable[[str], None],
    out: Path | None = None,
    force: bool = False,
) -> int:
    """Write what the request asks for; the exit code.

    ``write`` gets text or, for several prompts, lines of JSON, unless these go into the file ``out``, where
    ``force`` replaces what another command wrote.
    """
    read = (request.source, request.tokenizer, request.adapter)
    inputs = [Path(name) for name in read if name is not None]
    if out is not None:
        check_output_file(out, ours=_is_ours, force=force, inputs=inputs)

    def work(prepared: Prepared, state: ParallelState, device: str) -> str:
        first, file, tokens = own_rank() == 0, None, 0
        streams, most = first and out is None and len(prepared.ids) == 1, request.max_new_tokens
        prompts = iter(request.prompts)
        require(request.batch >= 1, "generate", "batch", "at least 1", request.batch)
        with ExitStack() as stack:
            if out is not None and first:
                path = stack.enter_context(output_file(out, ours=_is_ours, force=force, inputs=inputs))
                file = stack.enter_context(path.open("w", encoding="utf-8"))
            if streams and isinstance(request.prompts[0], str) and not request.chat:
                write(request.prompts[0])
            model, on_text = prepared.load(state), write if streams else None
            any_lengths = model.can_cache or len({*map(len, prepared.ids)}) == 1
            at_once = request.batch if any_lengths else 1
            began = time.perf_counter()
            for start in range(0, len(prepared.ids), at_once):
                ids = prepared.ids[start : start + at_once]
                for row in continue_rows(
                    request, prepared, model, ids, first=start, most=most, on_text=on_text
                ):
                    tokens += len(row.tokens)
                    if first and not streams:
                        _write_line(next(prompts), row, file, write)
            seconds = max(time.perf_counter() - began, 1e-9)
            if streams:
                write("\n")
        rate = f"{counted(tokens, 'token')} in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s"
        return f"{rate} on {device_words(device)}"

    def prepare_here() -> Prepared:
        prepared = prepare(request, ranks.layout)
        # Ranks that were started here have the command before them, which says it.
        if (
            ranks.status is None
            and own_rank() == 0
            and (line := not_applied(prepared.source, request.sampling))
        ):
            ranks.note(line)
        return prepared

    asked = sha256(repr(request).encode()).hexdigest()
    return ranks.run(prepare_here, work, asked=asked)


def _is_ours(contents: bytes) -> bool:
    """Tell whether a file begins and ends as the lines that ``_write_line`` writes, which may be long."""
    ends = re.search(rb', "tokens": \d+, "finish": "(stop|length)"}\n\Z', contents)
    return ends is not None and contents.startswith(b'{"prompt": ')


def _write_line(prompt: Prompt, row: Continuation, file: TextIO | None, write: Callable[[str], None]) -> None:
    """Write a prompt's continuation as a line of JSON, into ``file`` if there is one."""
    shown_prompt = prompt if isinstance(prompt, str) else prompt.messages
    record = {"prompt": shown_prompt, "text": row.text, "tokens": len(row.tokens), "finish": row.finish}
    text = json.dumps(record, ensure_ascii=False) + "\n"
    if file is None:
        write(text)
    else:
        with writing(Path(file.name)):
            file.write(text)
            file.flush()
