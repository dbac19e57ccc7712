"""A conversation with a model on one device: each message is answered after all that was said before."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..data.text.tokenizer_loading import Message
from ..parallel_state import Layout
from ..runs.launch import check_launch, device_here, device_words, process_group
from ..system import counted
from .request import Request, continue_rows, prepare
from .text import prompt_ids

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
    passed over. An answer has at most the tokens that the model's positions leave, and a message that leaves
    none is not answered. ``BadInput`` before the weights are read if there is no template.
    """
    device = device_here(device)
    check_launch(Layout(), device=device)
    prepared = prepare(replace(request, prompts=["Hello"], chat=True, max_new_tokens=1), Layout())
    positions = prepared.source.model_config.max_position_embeddings
    with process_group(Layout(), device=device) as state:
        model = prepared.load(state)
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
