"""Train the benchmark's Llama as transformers has it, in stages under torch's own 1F1B."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from trainers import CONFIG, LENGTH, MICRO, Step, adamw, mean_loss, planned


def staged(folder: str, dtype: torch.dtype, layout: dict[str, Any], rows: int) -> Step:
    """Return a step of this rank's stage; the model is cut as this library cuts it in the same layout."""
    from transformers import AutoModelForCausalLM

    rank, ranks = dist.get_rank(), dist.get_world_size()
    blocks, (first, last) = planned(dtype, layout, rows)[1].split, (rank == 0, rank == ranks - 1)
    count = CONFIG["num_hidden_layers"]
    blocks = blocks or [count * (one + 1) // ranks - count * one // ranks for one in range(ranks)]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    held, begins = model.model, sum(blocks[:rank])
    held.layers = held.layers[begins : begins + blocks[rank]]
    if not first:
        held.embed_tokens = None
    if not last:
        held.norm, model.lm_head = nn.Identity(), None
    floats: dict[str, Any] = {"dtype": dtype, "device": "meta", "requires_grad": True}
    ids = torch.empty(MICRO, LENGTH, dtype=torch.int64, device="meta")
    between = torch.empty(MICRO, LENGTH, CONFIG["hidden_size"], **floats)
    logits = torch.empty(MICRO, LENGTH, CONFIG["vocab_size"], **floats)
    shapes = {"input_args": ids if first else between, "output_args": logits if last else between}
    stage = PipelineStage(_HeldStage(model, first), rank, ranks, torch.device("cpu"), **shapes)
    schedule = Schedule1F1B(stage, rows // MICRO, loss_fn=mean_loss)
    optimizer = adamw(model)

    def step(tokens: Tensor) -> float:
        losses: list[Tensor] = []
        given = (tokens[:, :-1].contiguous(),) if first else ()
        wanted = tokens[:, 1:].contiguous() if last else None
        schedule.step(*given, target=wanted, losses=losses, return_outputs=False)
        trained = [one for one in model.parameters() if one.grad is not None]
        square = nn.utils.get_total_norm([one.grad for one in trained]) ** 2
        told = torch.stack([square, torch.stack(losses).detach().mean() if last else torch.zeros(())])
        dist.all_reduce(told)
        nn.utils.clip_grads_with_norm_(trained, 1.0, told[0].sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return float(told[1])

    return step


class _HeldStage(nn.Module):
    """Compute the part of transformers' Llama that a stage holds, from token ids or from hidden states."""

    def __init__(self, model: Any, first: bool) -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, x: Tensor) -> Tensor:
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        hidden: Tensor = self.model.model(**given, use_cache=False).last_hidden_state
        return hidden if self.model.lm_head is None else self.model.lm_head(hidden)
