"""Define the model that transformers' code computes in our layout, or a pipeline stage of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import AttentionInputs, KeyValueCache, PinnedBackend, Stage, default_positions
from ...parallel_state import BadInput, ParallelState, alone_or, initialize
from ..base.causal_lm import CausalLM
from .attention import ATTENTION, carrier
from .config import AdoptedConfig, first_place
from .cut import Fused, cut_modules
from .layers import TiedHead, put
from .meta import on_meta
from .probe import Probed, probed
from .sequence import without_sequence


class Through(nn.Module):
    """Stand in the place of a block or an end that another rank computes: give back what is given.

    ``received``: what it gives instead. ``noted``: what it was given last. ``length``: if not 0, it gives
    zeros for so many tokens, where code behind the blocks expects whole rows.
    """

    def __init__(self, block: nn.Module, *, outputs: int = 0) -> None:
        super().__init__()
        # What transformers' code reads of a block before it calls it, such as its kind of attention.
        self.__dict__.update({key: own for key, own in vars(block).items() if not key.startswith("_")})
        self.others = [None] * (outputs - 1) if outputs else None
        self.received: Tensor | None = None
        self.noted: Any = None
        self.length = 0

    def forward(self, *args: Any, **named: Any) -> Any:
        x = args[0] if args else named.get("hidden_states")
        self.noted = x
        if self.received is not None:
            x = self.received
        elif x is not None and self.length:
            x = x.new_zeros(len(x), self.length, x.shape[-1])
        return x if self.others is None else (x, *self.others)


class NoTable(nn.Module):
    """Stand in the place of a table of another stage: give zeros of its width, of any token and place."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.embedding_dim, self.padding_idx = table.embedding_dim, table.padding_idx
        self.register_buffer("zeros", torch.zeros(1, 1, table.embedding_dim, device="meta"), persistent=False)

    zeros: Tensor

    def forward(self, *args: Any, **named: Any) -> Tensor:
        return self.zeros


class Adopted(CausalLM):
    """Run transformers' code of a model type; its modules and parameters keep their names.

    ``forward`` is that of ``CausalLM``. Embedding, output layer and linears are ours, cut over the tensor
    ranks; attention is ours where the family has proved that it is the model's (``probe``).
    """

    in_pieces = False
    rotary: dict[str, Any]
    #: transformers' model, whose modules are also this one's, and what its parameters are in pieces.
    hf: Any
    fused: Fused
    embedding_width: int

    def __init__(
        self, cfg: AdoptedConfig, *, split: Sequence[int] | None = None, state: ParallelState | None = None
    ) -> None:
        nn.Module.__init__(self)
        target = torch.empty(0).device
        self.config, self.state = cfg, alone_or(state)
        self.stage = stage = Stage.of(cfg.num_hidden_layers, split=split, state=state)
        self.whole = without_sequence(self.state)
        self.shown = shown = probed(cfg)
        self.own_attention = not shown.no_context
        made = on_meta(cfg, attention=ATTENTION if self.own_attention else None)
        hf = made.model
        with torch.device("meta"):
            self.fused = cut_modules(made, cfg, shown, stage, state)
        blocks = hf.get_submodule(shown.blocks) if shown.blocks else nn.ModuleList()
        for number, block in enumerate(blocks):
            if number not in stage.blocks:
                blocks._modules[str(number)] = Through(block, outputs=shown.outputs)
        self._drop_ends(hf, shown)
        here = {*hf.modules()}
        for table in (module for module in here if isinstance(module, NoTable)):
            made.constants.append((table, "zeros", torch.zeros(1, 1, table.embedding_dim, device="cpu")))
        constants = [(module, name, numbers) for module, name, numbers in made.constants if module in here]
        self.__dict__.update(hf=hf, blocks=blocks, constants=constants)
        self.rotary, self.attentions, self.mtp = {}, (), nn.ModuleDict()
        self.__dict__["first_place"] = first_place(hf.config)
        for name, child in hf.named_children():
            self.add_module(name, child)
        self._restore()
        if target.type != "meta":
            self.to_empty(device=target)
            self._fill()

    def _drop_ends(self, hf: Any, shown: Probed) -> None:
        """Free what runs before the blocks on all but the first stage, and what runs behind on others."""
        dropped = [] if self.stage.first else [*shown.entry, *shown.idle_ends]
        dropped += [] if self.stage.last else [*shown.exit]
        embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
        self.__dict__["embedding_width"] = embedding.embedding_dim
        for path in dropped:
            if any(path.startswith(f"{other}.") for other in dropped):
                continue
            module = hf.get_submodule(path)
            if module is embedding and self.stage.last and isinstance(head, TiedHead):
                continue
            put(hf, path, NoTable(module) if isinstance(module, nn.Embedding) else Through(module))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Adopted:
        super()._apply(fn, recurse)
        self._restore()
        return self

    def _restore(self) -> None:
        """Fill the buffers that no file holds, on the device where they are."""
        for module, name, numbers in self.__dict__.get("constants", ()):
            device = next((p.device for p in self.parameters()), numbers.device)
            module._buffers[name] = numbers.to(device)

    @torch.no_grad()
    def _fill(self) -> None:
        """Draw initial weights, as layers do that are made on a device; NaN where none is declared."""
        from ...parallel_state import OWN, declarations

        stated = declarations(self)
        for name, parameter in self.named_parameters():
            if stated[name].initial == OWN:
                parameter.fill_(float("nan"))
        seed = int(torch.randint(2**62, (), device="cpu"))
        drawn = {name for name, declaration in stated.items() if declaration.initial != OWN}
        initialize(self, seed, among=drawn, state=self.state)

    def train(self, mode: bool = True) -> Adopted:
        """Set the mode, also that of transformers' outermost modules."""
        super().train(mode)
        self.__dict__["hf"].training = mode
        return self

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        stage: Stage | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """Return logits on the last stage, hidden states on the others."""
        stage, hf = stage or self.stage, self.__dict__["hf"]
        assert ahead is None, "no multi-token prediction"
        named: dict[str, Any] = {"use_cache": False}
        length = x.shape[1] * (1 if stage.first or not self.state.sequence else self.state.tensor.size)
        like = x.new_empty((len(x), length, 0), dtype=torch.float32)
        inputs = AttentionInputs(positions, cache, like=like, state=self.whole)
        if self.own_attention:
            named["attention_mask"] = carrier(inputs, len(x))
        elif cache is not None or inputs.documents is not None:
            what = "one document a row" if cache is None else "no cache of keys"
            raise BadInput(
                self.config.model_type, "positions", expected=what, found="others", todo=self.shown.no_context
            )
        if self.shown.takes_positions:
            places = positions
            if places is None:
                places = default_positions(like, self.whole, embedded=True).unsqueeze(0)
            named["position_ids"] = places + self.__dict__["first_place"]
        if stage.first:
            named["input_ids"] = x
        else:
            # The first own block is given x in the place of what the model makes of these.
            named["inputs_embeds"] = x.new_zeros(len(x), length, self.embedding_width)
        run = hf if stage.last else hf.base_model
        behind = length if self.state.sequence else 0
        with self._only(stage, None if stage.first else x, behind) as noted:
            out = run(**named)
            if not stage.last:
                return noted()
        logits: Tensor = out.logits
        return logits if cache is None else logits[:, -1:]

    @contextmanager
    def _only(self, stage: Stage, received: Tensor | None, length: int) -> Iterator[Callable[[], Tensor]]:
        """Let the blocks of one stage run, on what was received; yield what gives what they made. ``length``:
        of the zeros that code behind them is given, or 0.
        """
        places, shown = self.__dict__["blocks"]._modules, self.__dict__["shown"]
        before_this = dict(places)
        for number in self.stage.blocks:
            if number not in stage.blocks:
                places[str(number)] = Through(before_this[str(number)], outputs=shown.outputs)
        before = places.get(str(stage.blocks[0] - 1)) if stage.blocks else None
        behind = places.get(str(stage.blocks[-1] + 1)) if stage.blocks else None
        if received is not None:
            assert isinstance(before, Through)
            before.received = received
        if isinstance(behind, Through):
            behind.length = length

        def noted() -> Tensor:
            assert isinstance(behind, Through)
            hidden: Tensor = behind.noted
            return hidden

        try:
            yield noted
        finally:
            for module in (before, behind):
                if isinstance(module, Through):
                    module.received, module.noted, module.length = None, None, 0
            places.update(before_this)

    def pin_attention(self, backend: PinnedBackend) -> None:
        """Let ``backend`` compute all attention, if attention is ours."""
        if backend != "auto" and not self.own_attention:
            kind, why = self.config.model_type, self.shown.no_context
            raise BadInput(kind, "attention_backend", expected="auto", found=backend, todo=why)
        for module in self.modules():
            vars(module)["trilith_backend"] = backend

    @property
    def can_cache(self) -> bool:
        """Tell whether keys and values of earlier tokens can be kept."""
        return self.own_attention

    @property
    def layers(self) -> dict[str, nn.Module]:  # type: ignore[override]  # no attribute: blocks have one parent
        """Return this rank's blocks by their numbers."""
        places = self.__dict__["blocks"]._modules
        return {str(number): places[str(number)] for number in self.stage.blocks if str(number) in places}

    @property
    def head_name(self) -> str:
        """Return the name of the output layer's weight, on the last stage."""
        wanted = self.hf.get_output_embeddings().weight
        return next(name for name, parameter in self.named_parameters() if parameter is wanted)

    def uses(self, stage: Stage) -> list[nn.Module]:
        """Return the modules that one stage of this rank computes with."""
        inner = {module for block in self.layers.values() for module in block.modules()}
        ends = [
            module for module in self.modules()
            if module not in inner and next(module.parameters(recurse=False), None) is not None
        ]  # fmt: skip
        return [*self.blocks_of(stage), *(ends if stage.first or stage.last else ())]
