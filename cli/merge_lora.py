"""``trilith merge-lora BASE ADAPTER OUT``."""

from pathlib import Path
from typing import Annotated

from .convert import write_weights
from .shared.options import WORKERS, Strict
from .shared.parameters import Count, Place


def merge_lora(
    base: Annotated[Place, "Hugging Face folder, Hugging Face model id, or checkpoint of the base model"],
    adapter: Annotated[Place, "PEFT folder, a LoRA run's folder, or a checkpoint of a LoRA run"],
    out: Annotated[Path, "new Hugging Face folder"],
    *,
    workers: Annotated[Count, WORKERS] = 2,
    strict: Strict = False,
) -> None:
    """Add LoRA adapters to the weights of their base model.

    Each adapted weight W becomes W + scale * B A, computed in float32 and rounded once to the data type of W.
    All other tensors stay byte for byte. The command loads no model and needs no GPU, and its memory does not
    grow with the model. If it is killed, the same command continues.

    Examples:

        trilith merge-lora Llama-3.2-1B lora-run merged
        trilith merge-lora Llama-3.2-1B adapter merged
    """
    from ..checkpoints import plan_merge
    from ..system import check_workers
    from .shared.model_card import model_card

    check_workers(workers, "merge-lora")
    plan = plan_merge(base, adapter)
    assert plan.merge is not None
    card = model_card(plan.merge.adapter, base=base)
    write_weights(plan, out, f"{base} + {adapter} -> {out}", card, workers)
