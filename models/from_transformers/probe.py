"""Watch one forward of transformers' model without memory: what runs before, in and after its blocks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ..base.family import making
from .attention import ATTENTION, watched
from .config import AdoptedConfig, text_of
from .meta import on_meta

_TOKENS = 16


@dataclass(frozen=True)
class Probed:
    """State what one forward showed, and why the model cannot be cut into stages or over context ranks.

    ``blocks``: path of the list of blocks; ``exit``: modules outside with parameters that run after them.
    ``outputs``: how many members the tuple has that a block returns, 0 for a bare tensor. ``idle``:
    parameters that logits of tokens alone do not depend on, such as those of an image encoder.
    """

    blocks: str
    exit: frozenset[str] = frozenset()
    outputs: int = 0
    takes_positions: bool = True
    no_pipeline: str = ""
    no_context: str = ""
    idle: frozenset[str] = frozenset()


@lru_cache(maxsize=32)
def probed(cfg: AdoptedConfig) -> Probed:
    """Return what a forward of the model shows."""
    with making(torch.bfloat16, "cpu"):  # without memory, grouped products of experts have no other dtype
        return _probed(cfg)


def _probed(cfg: AdoptedConfig) -> Probed:
    model = on_meta(cfg, attention=None)
    blocks = path_of_blocks(model, cfg.num_hidden_layers)
    takes = "position_ids" in signature(model.forward).parameters
    if not blocks:
        why = f"no list of {cfg.num_hidden_layers} blocks in its code"
        return Probed("", no_pipeline=why, no_context=why, takes_positions=takes)
    no_context = ""
    if not getattr(type(model), "_supports_attention_backend", False):
        no_context = "its attention is not transformers' common one"
    elif not takes:
        no_context = "its forward takes no position_ids"
    problems = list[str]()
    try:
        if not no_context:
            model = on_meta(cfg, attention=ATTENTION)
        with watched(problems):
            calls = _Calls(model, blocks)
    except Exception as error:  # whatever its code raises
        first = str(error).strip().partition("\n")[0][:120]
        why = f"its code does not run without memory ({type(error).__name__}: {first})"
        return Probed(blocks, no_pipeline=why, no_context=no_context or why, takes_positions=takes)
    no_context = no_context or _why_not_ours(model.get_submodule(blocks), problems, cfg)
    no_pipeline = calls.problem(cfg)
    return Probed(blocks, frozenset(calls.exit), calls.outputs, takes, no_pipeline, no_context, calls.idle)


def path_of_blocks(model: nn.Module, count: int) -> str:
    """Return the path of the first list of as many modules with parameters as the config states blocks, in
    what transformers calls the decoder, or anywhere.
    """
    inside = {*cast(Any, model).get_decoder().modules()}
    for path, module in sorted(model.named_modules(), key=lambda named: named[1] not in inside):
        holds = isinstance(module, nn.ModuleList) and len(module) == count
        if holds and all(next(block.parameters(), None) is not None for block in module.children()):
            return str(path)
    return ""


class _Calls:
    """Run a forward, and note the order of calls around the blocks."""

    def __init__(self, model: Any, blocks: str) -> None:
        self.blocks = blocks
        self.number_of = {block: number for number, block in enumerate(model.get_submodule(blocks))}
        inner = {module for block in self.number_of for module in block.modules()}
        self.order: list[int] = []
        self.entry, self.exit = set[str](), set[str]()
        self.outputs, self.shapes = 0, set[tuple[int, ...]]()
        self.besides: list[Tensor] = []
        self.shared, self.idle = "", frozenset[str]()
        self.bare = list[str]()
        for path, module in model.eval().named_modules():
            own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
            if module in self.number_of:
                module.register_forward_hook(self._left_block, with_kwargs=True)
            elif module not in inner and own:
                self.bare += own
                module.register_forward_pre_hook(self._noting(path))
        self._run(model)

    def _run(self, model: Any) -> None:
        tokens = torch.zeros((2, _TOKENS), dtype=torch.int64, device="meta")
        with (
            torch.device("meta"),
            patch("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None),
            patch("transformers.masking_utils._ignore_causal_mask_sdpa", lambda *args, **named: False),
        ):  # they read places and masks, which have no values here
            logits = model(input_ids=tokens, use_cache=False).logits
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        read = _read_by(logits)
        self.idle = frozenset(name for name, p in trained.items() if p not in read)

    def _noting(self, path: str) -> Any:
        return lambda module, args: (self.exit if self.order else self.entry).add(path)

    def _left_block(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.order.append(self.number_of[module])
        named = dict(zip(signature(module.forward).parameters, args, strict=False)) | kwargs
        entering, *others = named.items()
        for name, member in others:
            of_block = any(member is tensor for tensor in self.besides)
            if isinstance(member, Tensor) and (of_block or member.requires_grad):
                self.shared = self.shared or name
        members = [output] if isinstance(output, Tensor) else [*output]
        self.outputs = 0 if isinstance(output, Tensor) else len(members)
        self.besides += [member for member in members[1:] if isinstance(member, Tensor)]
        for x in (entering[1], members[0]):
            self.shapes.add(tuple(x.shape) if isinstance(x, Tensor) else ())

    def problem(self, cfg: AdoptedConfig) -> str:
        """Return why the blocks cannot be cut into stages, or nothing."""
        if self.order != [*range(cfg.num_hidden_layers)]:
            return "its blocks do not run once each, in order"
        if self.shapes != {(2, _TOKENS, cfg.hidden_size)}:
            return "what its blocks pass on is not (batch, sequence, hidden_size)"
        if self.shared:
            return f"its blocks are given {self.shared} beside hidden states, which alone stages send"
        if both := self.entry & self.exit:
            return f"{min(both)} runs before and after blocks"
        called = {path for path in self.entry | self.exit if not self.blocks.startswith(f"{path}.")}
        for name in self.bare:
            if name.rpartition(".")[0] not in called and name not in self.idle:
                return f"{name} is used outside the blocks, and no module of its own is called"
        return ""


def _read_by(output: Tensor) -> set[Tensor]:
    """Return the parameters that a backward from ``output`` would come to, without running it."""
    left, nodes, read = [output.grad_fn], set[Any](), set[Tensor]()
    while left:
        node: Any = left.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            left += [before for before, _ in node.next_functions]
            read |= {node.variable} if hasattr(node, "variable") else set()
    return read


def _rope_by_length(config: Any) -> str:
    """Return the type of a rotation that transformers computes anew by the positions that are there."""
    stated = getattr(text_of(config), "rope_parameters", None) or {}
    tables = [stated, *(table for table in stated.values() if isinstance(table, dict))]
    types = [table.get("rope_type") for table in tables]
    return next((kind for kind in ("dynamic", "longrope") if kind in types), "")


#: In names of classes that mix tokens otherwise than by attention; transformers' Conv1D is a linear.
_OTHER_MIXERS = re.compile(
    "Mamba|SSM|Ssm|Recurrent|LinearAttention|Lightning|DeltaNet|DeltaAttention|Indexer|Conv(?!1D)|R[Ww][Kk][Vv]|"
    "LSTM|[Nn]gram"
)


def _why_not_ours(blocks: nn.Module, problems: Sequence[str], cfg: AdoptedConfig) -> str:
    """Return why our attention does not compute the model's, or nothing."""
    for module in blocks.modules():
        if _OTHER_MIXERS.search(type(module).__name__):
            return f"{type(module).__name__} mixes tokens outside of attention"
    if rope := _rope_by_length(cfg.in_transformers()):
        return f"its rotation of type {rope} depends on the longest row that a rank has"
    if not problems:
        return "its blocks do not call transformers' common attention"
    return next(filter(None, problems), "")
