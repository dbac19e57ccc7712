"""Compile a model's blocks with ``torch.compile``: few graphs, each without a graph break."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import compile as torch_compile
from torch import nn

from ..parallel_state.engine.autograd_and_compiler import allow_graphs, compiler_errors
from .dropout import Dropout
from .parallel_linear import ParallelLinear


def compile_blocks(
    blocks: Iterable[nn.Module], *, backend: str | Callable[..., Any] = "inductor", or_without: bool = False
) -> None:
    """Compile each block's forward with ``fullgraph=True``, in place; this happens when a block first runs.

    A block that cannot be one graph is compiled in its largest parts that can (see ``parts_in_one_graph``).
    No module is added, so no parameter changes its name. FSDP's hooks and activation checkpointing, which
    must come after this call, stay outside the graphs. On a CPU torch's inductor needs a C++ compiler.
    ``or_without``: if torch fails to compile a part, this part runs uncompiled after a warning.
    """
    parts = [part for block in blocks for part in parts_in_one_graph(block)]
    if backend == "inductor":
        keep_compiled_code()
    # Parts of one class share their code, and each may be a graph of its own: LoRA's ranks differ, say; and
    # with gradients, without, in training and in evaluation.
    allow_graphs(4 * len(parts))
    for part in parts:
        compiled = torch_compile(part.forward, fullgraph=True, backend=backend)
        part.forward = or_plain(part.forward, compiled, type(part).__name__) if or_without else compiled


def parts_in_one_graph(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module`` if it can be one graph, else the largest modules in it that can.

    A layer that cannot be in a graph says so (``one_graph``), and what it computes itself is not compiled:
    routers, experts, delta nets, mixing over context ranks, dropout with tensor ranks' own masks.
    """
    if isinstance(module, nn.Identity):
        return
    if all(_one_graph(part) for part in module.modules()):
        yield module
        return
    for child in module.children():
        yield from parts_in_one_graph(child)


def _one_graph(module: nn.Module) -> bool:
    if isinstance(module, Dropout):
        return not (module.p and module.state.sequence)
    if isinstance(module, ParallelLinear) and module.state.tensor.size > 1:
        return not any(getattr(adapter, "dropout", 0) for adapter in module.adapters)
    return bool(getattr(module, "one_graph", True))


def keep_compiled_code() -> None:
    """Let torch store compiled code in the user's cache folder, where it outlives a restart of the machine.

    Torch's own default, the folder for temporary files, stays where that one cannot be written to. A folder
    that the user has set stays.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trilith" / "inductor"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def or_plain(plain: Callable[..., Any], compiled: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that calls ``compiled`` or, after a warning, ``plain`` if torch fails to compile."""
    errors, failed = compiler_errors(), False

    def call(*args: Any, **named: Any) -> Any:
        nonlocal failed
        if not failed:
            try:
                return compiled(*args, **named)
            except errors as error:
                failed, reason = True, " ".join(str(error).split("\n")[:2])
                warnings.warn(f"torch does not compile {name}, which runs without: {reason}", stacklevel=2)
        return plain(*args, **named)

    return call
