"""Ask each family what it can do: its tiny model is built, or refused, for every axis and feature."""

from collections.abc import Callable
from dataclasses import dataclass

from ...generation import generate
from ...models import Family, tiny_config
from ...models.lora.targets import expert_sites, linear_sites
from ...parallel_state import BadInput, Layout, ParallelState, initialize

#: A layout that has ranks along one axis.
AXES: dict[str, Layout] = {
    "tensor": Layout.of(tensor=2),
    "sequence": Layout.of(tensor=2, sequence=True),
    "pipeline": Layout.of(pipeline=2),
    "context": Layout.of(context=2),
    "expert": Layout.of(data=2, expert=2),
}


@dataclass(frozen=True)
class Features:
    """Hold what a family can do. ``lora``: what gets adapters, ``linears`` and ``experts``."""

    axes: tuple[str, ...]
    lora: tuple[str, ...]
    generation: bool


def features_of(family: Family) -> Features:
    """Find the features of a family by trying them on its tiny model, in a fraction of a second."""
    config = family.from_hf(tiny_config(family.model_type))

    def builds(layout: Layout) -> bool:
        state = ParallelState.stand_in(layout, 0)
        return _accepts(lambda: family.build(config, state=state))

    def writes() -> object:
        model = family.build(config, device="cpu")
        initialize(model, 0)
        return generate(model, [[1, 2, 3]], max_new_tokens=2)

    sites = {"linears": linear_sites(family, config), "experts": expert_sites(family, config)}
    return Features(
        axes=tuple(axis for axis, layout in AXES.items() if builds(layout)),
        lora=tuple(kind for kind, targets in sites.items() if targets),
        generation=_accepts(writes),
    )


def _accepts(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except BadInput:
        return False
    return True
