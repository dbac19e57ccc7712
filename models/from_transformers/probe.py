"""Make transformers' model without memory, whose tensors know how they start and what they hold; and watch
one forward of it: what runs before, in and after its blocks.
"""

import re
from collections.abc import Callable, Sequence, Set
from functools import lru_cache, partial
from inspect import BoundArguments, signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...parallel_state import OWN, BadInput, Constant, Initial, Normal, Uniform
from ..base.family import making
from .attention import ATTENTION, attention, of_whole_rows, watched
from .config import AdoptedConfig, in_one_line, model_class, quiet

_TOKENS = 16
#: How the reasons begin for which no forward is seen.
UNSEEN = NO_BLOCKS, NO_RUN = "no list of", "its code does not run without memory"


def on_meta(cfg: AdoptedConfig, *, ours: bool) -> Any:
    """Make the model in torch's default dtype. ``ours``: whether our attention computes its attention.

    ``initial_of`` says how its parameters start, and ``constants`` of modules what buffers hold that no file
    does. Raises ``BadInput`` if it cannot be made on the meta device, or has tensors that cannot be declared.
    """
    from transformers import AttentionInterface

    config, kind, dtype = cfg.in_transformers(), cfg.model_type, torch.get_default_dtype()
    AttentionInterface.register(ATTENTION, attention)
    # torch's grouped products have no fp64.
    experts = "eager" if dtype == torch.float64 else "grouped_mm"
    with quiet(), in_one_line(kind, expected="a model that transformers makes without memory"):
        with torch.device("meta"):
            implementation = ATTENTION if ours else None
            model = model_class(kind)._from_config(config, dtype=dtype, attn_implementation=implementation)
        # After the model has checked it: most have none.
        model.config.get_text_config(decoder=True)._experts_implementation = experts
        with torch.device("cpu"), torch.no_grad():
            _initialize(model, kind)
    return model


def initial_of(tensor: Tensor) -> Initial:
    """Return how a tensor of the model starts; ``OWN`` where transformers does what no ``Initial`` does."""
    initial: Initial = vars(tensor).get("initial", OWN)
    return initial


def _initialize(model: Any, kind: str) -> None:
    """Let transformers' code initialize what it has made, which fills buffers and leaves notes elsewhere."""
    from transformers import initialization

    for path, module in model.named_modules():
        for name, member in vars(module).items():
            if isinstance(member, Tensor):
                todo = "transformers' code keeps a tensor that is neither parameter nor buffer"
                raise BadInput(kind, f"{path}.{name}", expected="no tensor", found="one", todo=todo)
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.numel():
                todo = "Some count in config.json is 0, such as that of shared experts, and may not be"
                expected, actual = "a parameter with elements", f"shape {tuple(parameter.shape)}"
                raise BadInput(kind, f"{path}.{name}", expected=expected, found=actual, todo=todo)
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                unset = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full_like(buffer, unset, device="cpu")
            elif not buffer.is_floating_point() and buffer.dtype != torch.int64:
                expected = "floating numbers or int64: transformers keeps others in its files"
                raise BadInput(kind, f"{path}.{name}", expected=expected, found=str(buffer.dtype))
    notes: dict[str, Any] = {
        name: _noting(name, function)
        for name, function in vars(initialization).items()
        if name.endswith("_") and not name.startswith("_")
    }
    with patch.multiple(initialization, **notes):
        model.initialize_weights()
    for module in model.modules():
        buffers, transient = dict(module.named_buffers(recurse=False)), module._non_persistent_buffers_set
        constants = vars(module)["constants"] = {name: buffers[name] for name in transient & buffers.keys()}
        for name, numbers in constants.items():
            if numbers.is_floating_point() and bool(numbers.isnan().any()):
                where = f"{type(module).__name__}.{name}"
                expected = "values that transformers' _init_weights sets"
                raise BadInput(kind, where, expected=expected, found="a buffer that it leaves as it is")
            module._buffers[name] = numbers.to("meta")


def _noting(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what stands for a function of ``transformers.initialization``: on a tensor without memory it
    notes what the function would do.
    """

    def note(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        if not tensor.is_meta:
            return original(tensor, *args, **named)
        vars(tensor)["initial"] = _law(name, signature(original).bind(tensor, *args, **named))
        return tensor

    return note


def _law(name: str, call: BoundArguments) -> Initial:
    """Return how the call of an initialization lets its tensor start."""
    call.apply_defaults()
    match name, call.arguments:
        case "zeros_" | "ones_", _:
            return Constant(float(name == "ones_"))
        case "constant_", {"val": value}:
            return Constant(float(value))
        case "normal_", {"mean": 0, "std": std}:
            return Normal(float(std))
        case "trunc_normal_", {"mean": 0, "std": std, "a": a, "b": b} if min(-a, b) >= 6 * std:
            return Normal(float(std))
        case "uniform_", {"a": a, "b": b} if a == -b:
            return Uniform(float(b))
        case "copy_", {"other": other} if not other.is_meta and len(other.unique()) == 1:
            return Constant(float(other.flatten()[0]))
    return OWN


class _LastPlace(TorchFunctionMode):
    """Say which of the places without memory is the last: rotations ask for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        alone = func in (torch.max, Tensor.max) and len(args) == 1
        if alone and args[0].is_meta and not args[0].is_floating_point():
            return torch.tensor(_TOKENS - 1, device="cpu")
        return func(*args, **kwargs or {})


class Probed:
    """State what one forward showed, and why the model cannot be cut into stages or over context ranks.

    ``blocks``: path of the list of blocks; ``exit``: modules outside with parameters that run after them.
    ``outputs``: how many members the tuple has that a block returns, 0 for a bare tensor. ``idle``:
    parameters that logits of tokens alone do not depend on, such as those of an image encoder. ``in_part``:
    those between linears that the plan cuts, which meet a tensor rank's own heads or features alone.
    ``unseen``: why neither is known.
    """

    def __init__(self, cfg: AdoptedConfig) -> None:
        self.no_pipeline, self.no_context, self.unseen, self.outputs = "", "", "", 0
        self.entry, self.exit, self.idle, self.in_part = set[str](), set[str](), set[str](), set[str]()
        model, count = on_meta(cfg, ours=False), cfg.num_hidden_layers
        self.blocks = path_of_blocks(model, count)
        if not self.blocks:
            self.no_pipeline = self.no_context = self.unseen = f"{NO_BLOCKS} {count} blocks in its code"
            return
        if not getattr(type(model), "_supports_attention_backend", False):
            self.no_context = "its attention is not transformers' common one"
        elif "position_ids" not in signature(model.forward).parameters:
            self.no_context = "its forward takes no position_ids"
        problems = list[str]()
        for ours in (False,) if self.no_context else (True, False):
            watched_model = on_meta(cfg, ours=True) if ours else model
            try:
                with watched(problems):
                    self.no_pipeline, self.unseen = self._watch(watched_model, cfg), ""
                break
            except Exception as error:  # whatever its code raises
                first = str(error).strip().partition("\n")[0][:120]
                self.no_pipeline = self.unseen = f"{NO_RUN} ({type(error).__name__}: {first})"
                problems[:] = [self.no_pipeline]
        self.no_context = self.no_context or _why_not_ours(model, self.blocks, problems)

    def _watch(self, model: Any, cfg: AdoptedConfig) -> str:
        """Run a forward, note what runs when, and return why its blocks cannot be cut into stages."""
        number_of = {block: number for number, block in enumerate(model.get_submodule(self.blocks))}
        order, shapes, besides, shared = list[int](), set[tuple[int, ...]](), list[Tensor](), list[str]()
        self.entry.clear()
        self.exit.clear()

        def left(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            order.append(number_of[block])
            named = dict(zip(signature(block.forward).parameters, args, strict=False)) | kwargs
            entering, *others = named.items()
            for name, member in others:
                of_block = any(member is tensor for tensor in besides)
                if isinstance(member, Tensor) and (of_block or member.requires_grad):
                    shared.append(name)
            members = [output] if isinstance(output, Tensor) else [*output]
            self.outputs = 0 if isinstance(output, Tensor) else len(members)
            read = _read_by(members[:1], until={entering[1].grad_fn})  # in what it is given, or finds
            if elsewhere := {names[weight] for weight in read - {*block.parameters()}}:
                shared.append(f"what {max(elsewhere)} makes")
            besides.extend(member for member in members[1:] if isinstance(member, Tensor))
            shapes.update(tuple(x.shape) if isinstance(x, Tensor) else () for x in (entering[1], members[0]))

        def noting(path: str) -> Any:
            return lambda *_: (self.exit if order else self.entry).add(path)

        def planned(style: str, linear: nn.Module, args: Any, output: Tensor) -> None:
            made_whole.extend(args if style == "rowwise" else ())
            cut_here.add(output.grad_fn)

        names = {parameter: name for name, parameter in model.named_parameters()}
        plan, made_whole, cut_here = plan_of(model), list[Tensor](), set[Any]()
        inner, bare = {module for block in number_of for module in block.modules()}, list[str]()
        for path, module in model.eval().named_modules():
            own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
            if path in plan and isinstance(module, nn.Linear):
                module.register_forward_hook(partial(planned, plan[path]))
            if module in number_of:
                module.register_forward_hook(left, with_kwargs=True)
            elif module not in inner and own:
                bare += own
                module.register_forward_pre_hook(noting(path))
        with torch.device("meta"), of_whole_rows(), _LastPlace():
            tokens = torch.zeros((2, _TOKENS), dtype=torch.int64)
            logits = model(input_ids=tokens, use_cache=False).logits
        read, in_part = _read_by([logits]), _read_by(made_whole, until=cut_here)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.idle = {name for name, p in trained.items() if p not in read}
        self.in_part = {name for name, p in trained.items() if p in in_part}
        if order != [*range(cfg.num_hidden_layers)]:
            return "its blocks do not run once each, in order"
        if shapes != {(2, _TOKENS, cfg.hidden_size)}:
            return "what its blocks pass on is not (batch, sequence, hidden_size)"
        if shared:
            return f"its blocks are given {shared[0]} beside hidden states, which alone stages send"
        if both := self.entry & self.exit:
            return f"{min(both)} runs before and after blocks"
        called = {path for path in self.entry | self.exit if not self.blocks.startswith(f"{path}.")}
        for name in bare:
            if name.rpartition(".")[0] not in called and name not in self.idle:
                return f"{name} is used outside the blocks, and no module of its own is called"
        return ""


@lru_cache(maxsize=32)
def probed(cfg: AdoptedConfig) -> Probed:
    """Return what a forward of the model shows."""
    with making(torch.bfloat16, "cpu"):  # without memory, grouped products of experts have no other dtype
        return Probed(cfg)


#: What transformers' plans of attention lack, by type.
_SINKS = {"model.layers.*.self_attn.sinks": "local_params"}
_OWN_STYLES = {"granite_swa": _SINKS, "granitemoe_swa": _SINKS}


def plan_of(model: Any) -> dict[str, str]:
    """Return the styles of transformers' plan, and ours beside it, by paths of modules and parameters."""
    styles = dict(getattr(model, "_tp_plan", None) or {}) | _OWN_STYLES.get(model.config.model_type, {})
    paths = [path for path, _ in (*model.named_modules(), *model.named_parameters())]
    style_of = {path: styles.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)) for path in paths}
    return {path: style for path, style in style_of.items() if style is not None}


def path_of_blocks(model: Any, count: int) -> str:
    """Return the path of the first list of as many modules with parameters as the config states blocks, in
    what transformers calls the decoder, or anywhere.
    """
    of_decoder = {*model.get_decoder().modules()}
    for path, module in sorted(model.named_modules(), key=lambda named: named[1] not in of_decoder):
        holds = isinstance(module, nn.ModuleList) and len(module) == count
        if holds and all(next(block.parameters(), None) is not None for block in module.children()):
            return str(path)
    return ""


def _read_by(outputs: Sequence[Tensor], until: Set[Any] = frozenset()) -> set[Tensor]:
    """Return the parameters that a backward would come to, without running it; it ends at nodes ``until``."""
    queue, nodes, read = [output.grad_fn for output in outputs], {*until}, set[Tensor]()
    while queue:
        node: Any = queue.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            queue += [before for before, _ in node.next_functions]
            read |= {node.variable} if hasattr(node, "variable") else set()
    return read


#: In names of classes that mix tokens otherwise than by attention; transformers' Conv1D is a linear.
_OTHER_MIXERS = re.compile(
    "Mamba|SSM|Ssm|Recurrent|LinearAttention|Lightning|DeltaNet|DeltaAttention|Indexer|Conv(?!1D)|R[Ww][Kk][Vv]|"
    "LSTM|[Nn]gram"
)


def _why_not_ours(model: nn.Module, blocks: str, problems: Sequence[str]) -> str:
    for module in model.get_submodule(blocks).modules():
        if _OTHER_MIXERS.search(type(module).__name__):
            return f"{type(module).__name__} mixes tokens outside of attention"
    for module in model.modules():  # of which transformers computes some anew by the positions that are there
        rope_type = vars(module).get("rope_type")
        for rope in rope_type.values() if isinstance(rope_type, dict) else [rope_type]:
            if rope in ("dynamic", "longrope"):
                return f"its rotation of type {rope} depends on the longest row that a rank has"
    if not problems:
        return "its blocks do not call transformers' common attention"
    return next(filter(None, problems), "")
