"""Add LoRA to stacked experts; ``layers/lora.py`` says how the factors are cut."""

from collections.abc import Sequence

from ...parallel_state import BadInput, declarations
from ..lora import LowRank, declare_factors, factors_of, lora_scale
from ..parallel_linear import OutputPart
from .experts import Experts
from .grouped_matmul import grouped_mm


def attach_expert_lora(
    experts: Experts, outputs: Sequence[str], *, r: int, alpha: float, rslora: bool = False
) -> None:
    """Add one LoRA adapter of rank ``r`` to each expert, in place; it adds zero until B is trained.

    ``outputs``: the products that share one A: ``("gate", "up")``, or one of them, or ``("down",)``. The
    parameters are ``lora_A_<outputs, joined by _>`` (E, r, in) and for each output ``lora_B_<output>``
    (E, out, r). The factors start as those of ``attach_lora``. Raises ``BadInput`` for a rank below 1,
    outputs that do not share an input, or a second adapter at one place.
    """
    legal = [*experts.products, *((name,) for names in experts.products if names[1:] for name in names)]
    if r >= 1 and tuple(outputs) not in legal:
        expected = " or ".join(", ".join(names) for names in legal)
        raise BadInput("lora", "outputs", expected=expected, found=", ".join(outputs))
    stacks, name = declarations(experts), f"lora_A_{'_'.join(outputs)}"
    pairs = [factors_of(stacks[output], r, ("tensor",), experts.transposed) for output in outputs]
    part, scale = OutputPart(experts, None, r), lora_scale(r, alpha, rslora=rslora)
    added = {output: (part, f"lora_B_{output}") for output in outputs}
    declare_factors(
        [(experts, name, pairs[0][0])]
        + [(experts, f"lora_B_{output}", b) for output, (_, b) in zip(outputs, pairs, strict=True)],
        experts.state,
    )
    experts.adapters.append(LowRank(part, name, added, scale, grouped_mm))
