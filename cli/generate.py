"""``trilith generate DIR --prompt TEXT``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import FORCE
from .say import say


def generate(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(help="a Hugging Face folder or a trilith checkpoint", metavar="DIR")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="the text to continue; may be given again")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="a file of prompts: one a line, or .jsonl with prompt or messages in each"),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="prompts are a user's messages, put into the tokenizer's chat template"),
    ] = False,
    system: Annotated[str | None, typer.Option(help="the system's message of a chat")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=2**20, help="how many tokens to add at most")
    ] = 64,
    min_new_tokens: Annotated[int, typer.Option(min=0, help="and at least, before it may stop")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="sample from the k likeliest tokens; 0: from all")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="sample from this much probability")] = 1.0,
    seed: Annotated[int, typer.Option(help="of the sampling; no prompt changes another's")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="a text that ends it, besides the model's own tokens; repeatable")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="only --stop and the most tokens end it")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="prompts computed at once")] = 16,
    out: Annotated[Path | None, typer.Option(help="write one JSON object a prompt into this file")] = None,
    force: Annotated[bool, typer.Option("--force", help=FORCE)] = False,
    tensor: Annotated[int, typer.Option(min=1, help="cut each layer over so many local processes")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="and the blocks over so many stages")] = 1,
    dtype: Annotated[str, typer.Option(help="of weights and arithmetic: float32, bfloat16, ...")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    tokenizer: Annotated[Path | None, typer.Option(help="a tokenizer folder, if DIR has none")] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(help="LoRA adapters for DIR: PEFT's, or a run's, which may be DIR itself"),
    ] = None,
    status: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Continue texts with a model, on one device or in a layout.

    One prompt is written out as it grows; of several, one JSON object each: prompt, text, tokens, finish
    (stop or length). Any layout gives the same text. Ranks may also be started by torchrun.
    """
    from ..generation import Sampling
    from ..generation.prompts import read_prompts
    from ..generation.ranks import run_generation
    from ..generation.request import Request
    from ..parallel_state import Layout

    request = Request(
        source,
        read_prompts(prompt or [], prompts),
        tokenizer=tokenizer,
        chat=chat,
        system=system,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        sampling=Sampling(temperature, top_k, top_p),
        stop=stop or [],
        ignore_eos=ignore_eos,
        seed=seed,
        batch=batch,
        dtype=dtype,
        adapter=adapter,
    )
    layout = Layout.of(tensor=tensor, pipeline=pipeline)
    code = run_generation(
        request,
        layout,
        words=context.obj,
        write=lambda text: say(text, nl=False),
        note=lambda text: say(text, err=True),
        device=device,
        out=out,
        force=force,
        status=status,
    )
    raise typer.Exit(code)
