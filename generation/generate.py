"""Text from a model in any layout: a batch of prompts, read once, then one token of each row a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..layers import KeyValueCache, gather_logits
from ..layers.host_numbers import send
from ..parallel_state import require, seed_of
from ..parallel_state.engine.gathered_weights import gathered_once
from ..pipeline import Stages, evaluating

if TYPE_CHECKING:
    from ..models import CausalLM


@dataclass(frozen=True)
class Sampling:
    """State how the next token is chosen.

    ``temperature`` 0 takes the likeliest token. Above 0 the token is drawn from the ``top_k`` likeliest
    tokens (0: all) and from the smallest set of tokens that holds ``top_p`` of the probability (Holtzman et
    al. 2020). Before all that, the logits of tokens that the row has already, its prompt included, are
    divided by ``repetition_penalty`` where they are positive, and multiplied by it where they are negative
    (Keskar et al. 2019).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        finite = 0 <= self.temperature < float("inf")
        require(finite, "generate", "temperature", "a number from 0 up", self.temperature)
        require(self.top_k >= 0, "generate", "top_k", "0 or more", self.top_k)
        require(0 < self.top_p <= 1, "generate", "top_p", "above 0 and at most 1", self.top_p)
        penalty = self.repetition_penalty
        finite = 0 < penalty < float("inf")
        require(finite, "generate", "repetition_penalty", "a number above 0; 1 changes nothing", penalty)


def choose(
    logits: Tensor,
    sampling: Sampling,
    *,
    uniform: Tensor | None = None,
    banned: Collection[int] = (),
    present: Tensor | None = None,
) -> Tensor:
    """Choose one token id for each row, from logits (B, V); never one that is ``banned``. -1 stands for none,
    where the largest of a row's logits, by the temperature, is no finite number.

    ``present`` (B, V), bool: the tokens that each row has already, which ``repetition_penalty`` is for.

    ``uniform`` (B), numbers from [0, 1), gives each row's draw in the cumulated probabilities: the same
    number gives the same token, on any device and whatever the other rows are.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # rounded, a penalty makes ties
    if present is not None:
        penalty = sampling.repetition_penalty
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(present, penalized, logits)
    if banned:
        logits = logits.clone()
        logits[:, sorted(banned)] = float("-inf")
    if sampling.temperature:
        logits = logits / sampling.temperature
    none = ~logits.amax(-1).isfinite()  # the largest is NaN if any is
    if sampling.temperature == 0.0:
        return logits.argmax(-1).masked_fill(none, -1)
    assert uniform is not None, "sampling needs its random numbers"
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(descending=True, stable=True)
        chances = ordered.softmax(-1)
        before = chances.cumsum(-1) - chances
        drop = (before >= sampling.top_p).scatter(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    cumulated = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    total = cumulated[:, -1:]
    drawn = (cumulated <= uniform.unsqueeze(1) * total).sum(-1)
    # The last one that has a probability: the product above may have been rounded up to the total.
    return torch.minimum(drawn, (cumulated < total).sum(-1)).masked_fill(none, -1)


Tokens = Sequence[int]


@torch.no_grad()
def generate(
    model: CausalLM,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    sampling: Sampling | None = None,
    stop: Collection[int] = (),
    seed: int = 0,
    first: int = 0,
    cached: bool = True,
    on_tokens: Callable[[list[int | None]], Collection[int] | None] | None = None,
) -> list[list[int]]:
    """Return the new token ids of each prompt: up to ``max_new_tokens``, the last one possibly a token of
    ``stop``.

    Prompts may have different lengths; a row is what it would be alone. Random numbers follow from ``seed``
    and the number of the prompt, which is ``first`` for the first one, and not from the batch. A stop token
    cannot come before ``min_new_tokens``. ``on_tokens`` is called with each step's token of each row,
    ``None`` for a row that has ended, and may return the numbers of rows that end now; ``min_new_tokens``
    binds them too. Without ``cached`` the whole sequence is computed again for each token.

    Collective: all ranks of the model's layout make the same call, and all get the same result. Data ranks
    may have their own prompts only if the weights are not sharded over them. Raises ``BadInput``.
    """
    sampling = sampling or Sampling()
    _check(model, prompts, max_new_tokens, min_new_tokens, stop)
    cached = cached and model.can_cache
    device = model.state.device if model.state.mesh is not None else next(model.parameters()).device
    tokens_BT, positions_BT = left_padded(prompts, device)
    longest = tokens_BT.shape[1]
    room = longest + max_new_tokens - 1  # the last token is never read

    def new_caches() -> dict[int, KeyValueCache | None]:
        """Return a cache for each stage of this rank: a forward through a stage advances only its own."""
        return {
            stage.number: KeyValueCache(len(prompts), room) if cached else None for stage in model.stage.parts
        }

    dtype, caches = next(model.parameters()).dtype, new_caches()
    stages = Stages(model, model.state, dtype=dtype, of_stage=lambda number: {"cache": caches[number]})
    numbers = range(first, first + len(prompts)) if sampling.temperature else ()
    generators = [torch.Generator().manual_seed(seed_of(seed, "row", number)) for number in numbers]
    texts: list[list[int]] = [[] for _ in prompts]
    present_BV = None
    if sampling.repetition_penalty != 1.0:
        present_BV = torch.zeros(len(prompts), model.config.vocab_size, dtype=torch.bool, device=device)
        for present_V, prompt in zip(present_BV, prompts, strict=True):
            present_V[[*prompt]] = True
    ended = [False] * len(prompts)
    with evaluating(model, head_in_loss=False), gathered_once(model):
        read = 0
        for number in range(max_new_tokens):
            samples = {"input_ids": tokens_BT[:, read:], "positions": positions_BT[:, read:]}
            stages.fit(samples)
            y = stages.forward(samples)
            new_B = torch.empty(len(prompts), dtype=torch.int64, device=device)
            if y is not None:
                logits_BV = gather_logits(y[:, -1:], model.config.vocab_size, state=model.state)[:, -1]
                draws = [torch.rand(1, generator=g, dtype=torch.float64) for g in generators]
                uniform_B = torch.cat(draws).to(device) if draws else None
                banned = stop if number < min_new_tokens else ()
                new_B = choose(logits_BV, sampling, uniform=uniform_B, banned=banned, present=present_BV)
            layout = model.state.layout
            if layout.pipeline > 1:
                last = layout.rank_of_stage(layout.stages - 1)
                dist.broadcast(new_B, group=model.state.pipeline.group, group_src=last)
            step: list[int | None] = [None if ended[i] else token for i, token in enumerate(new_B.tolist())]
            expected, todo = (
                "finite numbers",
                "Try a wider dtype or a higher temperature, or check the weights",
            )
            require(-1 not in step, "generate", "logits", expected, "a NaN or an infinity", todo)
            over = (on_tokens and on_tokens(step)) or ()
            for i, token in enumerate(step):
                if token is not None:
                    texts[i].append(token)
                    ended[i] = token in stop or (number + 1 >= min_new_tokens and i in over)
            if all(ended):
                break
            read = tokens_BT.shape[1] if cached else 0
            new_B = new_B.clamp(min=0)  # a row that has ended may have none
            if present_BV is not None:
                present_BV.scatter_(1, new_B.unsqueeze(1), value=True)
            tokens_BT = torch.cat((tokens_BT, new_B.unsqueeze(1)), dim=1)
            positions_BT = torch.cat((positions_BT, positions_BT[:, -1:] + 1), dim=1)
            if cached and not model.rope_changes_at.isdisjoint(positions_BT[:, -1].tolist()):
                caches, read = new_caches(), 0  # a row's keys are rotated anew
    return texts


def left_padded(prompts: Sequence[Tokens], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and positions (B, longest) of prompts that end together.

    Padding stands before a prompt. Each padding token has position 0, and so is a document of its own: no
    token of the prompt sees it.
    """
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts], device=device)
    before = torch.tensor([[longest - len(prompt)] for prompt in prompts])
    return tokens, send((torch.arange(longest) - before).clamp(min=0), device)


def check_counts(most: int, least: int) -> None:
    """Refuse a largest number of new tokens below 1, or below the smallest."""
    expected = f"from 1 up, and min_new_tokens={least} or more"
    require(most >= max(1, least), "generate", "max_new_tokens", expected, most)


def check_length(longest: int, most: int, positions: int) -> None:
    """Refuse a prompt of ``longest`` tokens and ``most`` new ones that need more positions than there are."""
    needed, expected = longest + most - 1, f"at most the model's {positions} positions"
    require(needed <= positions, "generate", "prompt and new tokens", expected, needed)


def _check(model: CausalLM, prompts: Sequence[Tokens], most: int, least: int, stop: Collection[int]) -> None:
    require(prompts and all(map(len, prompts)), "generate", "prompt", "at least one token", "none")
    check_counts(most, least)
    expected, todo = "prompts of one length: this model keeps nothing of earlier tokens", "Give one at a time"
    any_lengths = model.can_cache or len({*map(len, prompts)}) == 1
    require(any_lengths, "generate", "prompts", expected, "several lengths", todo)
    vocabulary, positions = model.config.vocab_size, model.config.max_position_embeddings
    outside = [token for ids in (*prompts, stop) for token in ids if not 0 <= token < vocabulary]
    expected = f"ids below the model's vocab_size={vocabulary}"
    require(not outside, "generate", "tokens", expected, outside and outside[0])
    check_length(max(map(len, prompts)), most, positions)
    of_sequence = {"context": (model.state.context.size, 1), "sequence": (model.state.sequence, False)}
    for axis, (size, whole) in of_sequence.items():
        expected = f"{str(whole).lower()}: one token at a time cannot be cut along the sequence"
        todo = "Load the weights in the same layout without it"
        require(size == whole, "generate", f"layout.{axis}", expected, size, todo)
