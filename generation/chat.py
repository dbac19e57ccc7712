"""A conversation with a model on one device: each message is answered after all that was said before."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..data.text.tokenizer_loading import Message
from ..parallel_state import BadInput, Layout, dtype_named
from ..runs.launch import check_launch, device_here, device_words, process_group
from .continuation import Continuation
from .generate import check_length, generate
from .prompts import prompt_ids
from .request import Request, loaded_model, prepare

#: The message that begins a new conversation.
ANEW = "/new"


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
    passed over. ``BadInput`` before the weights are read if there is no template.
    """
    device = device_here(device)
    check_launch(Layout(), device=device)
    prepared = prepare(replace(request, prompts=["Hello"], chat=True), Layout())
    most = prepared.source.model_config.max_position_embeddings
    with process_group(Layout(), device=device) as state:
        model = loaded_model(prepared.source, prepared.adapter, dtype=dtype_named(request.dtype), state=state)
        note(f"{request.source} on {device_words(device)}; {ANEW} begins anew, Ctrl-D ends")
        messages: list[Message] = []
        for number, line in enumerate(filter(str.strip, lines)):
            if line.strip() == ANEW:
                messages.clear()
                continue
            messages.append({"role": "user", "content": line})
            ids = prompt_ids(
                messages, prepared.tokenizer, chat=True, system=request.system, where=f"message {number + 1}"
            )
            try:
                check_length(len(ids), request.max_new_tokens, most)
            except BadInput as error:
                messages.pop()
                note(f"{error}; not answered. {ANEW} begins anew")
                continue
            answer = Continuation(prepared.tokenizer, ids, prepared.stop, request.stop)

            def grow(step: list[int | None], answer: Continuation = answer) -> None:
                if step[0] is not None:
                    write(answer.grow(step[0]))

            (tokens,) = generate(
                model,
                [ids],
                max_new_tokens=request.max_new_tokens,
                sampling=request.sampling,
                stop=prepared.stop,
                seed=request.seed,
                first=number,
                on_tokens=grow,
            )
            answer.close(tokens)
            write(f"{answer.rest()}\n")
            messages.append({"role": "assistant", "content": answer.text})
