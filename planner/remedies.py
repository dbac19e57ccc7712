"""Find the changes of a recipe with which its plan fits the device; what costs least time comes first."""

from collections.abc import Callable
from dataclasses import dataclass

from ..parallel_state import BadInput
from ..recipes.recipe import Recipe, with_overrides

#: Overrides of a recipe that belong together, such as ``("memory.checkpointing=full",)``.
Change = tuple[str, ...]


@dataclass(frozen=True)
class Remedy:
    """State a change, or several together, and the bytes that the heaviest rank then needs."""

    changes: tuple[Change, ...]
    total: int

    @property
    def overrides(self) -> str:
        return " ".join(text for change in self.changes for text in change)


def keys_of(change: Change) -> list[str]:
    """Return the keys of a recipe that a change sets."""
    return [text.partition("=")[0] for text in change]


def remedies(recipe: Recipe, total: Callable[[Recipe], int], room: int, *, most: int = 3) -> list[Remedy]:
    """Return the changes that bring ``total``, the bytes of the heaviest rank of a recipe, down to ``room``:
    at most ``most``, each enough alone, or else several together.

    If no single change is enough, changes are added one after the other until they are enough; a change that
    does not lower the bytes is left out, and so is one that a recipe cannot have.
    """

    def tried(*together: Change) -> Remedy | None:
        overrides = [text for change in together for text in change]
        try:
            return Remedy(together, total(with_overrides(recipe, overrides)))
        except BadInput:
            return None

    changes = changes_of(recipe)
    alone = [fit for fit in map(tried, changes) if fit is not None]
    if enough := [fit for fit in alone if fit.total <= room]:
        return enough[:most]
    best = Remedy((), total(recipe))
    for change in changes:
        others = [other for other in best.changes if not {*keys_of(other)} & {*keys_of(change)}]
        fit = tried(*others, change)
        if fit is not None and fit.total < best.total:
            best = fit
            if best.total <= room:
                return [best]
    return []


def changes_of(recipe: Recipe) -> list[Change]:
    """Return what saves memory, by what it costs in time."""
    layout, memory, changes = recipe.layout, recipe.memory, list[Change]()
    if memory.loss_chunk in ("auto", 0):
        changes.append(("memory.loss_chunk=1024",))
    if memory.checkpointing == "none":
        changes.append(("memory.checkpointing=selective",))
    if layout.data > 1:
        changes += [(f"layout.zero={zero}",) for zero in range(layout.zero + 1, 4)]
    if recipe.data.micro_batch > 1:
        changes.append((f"data.micro_batch={recipe.data.micro_batch // 2}",))
    if memory.checkpointing == "every":
        changes += [("memory.checkpoint_every=1",)] if memory.every > 1 else []
    elif memory.checkpointing != "full":
        changes.append(("memory.checkpointing=full",))
    if layout.tensor < 8 and layout.data % 2 == 0:
        halved = f"layout.data={layout.data // 2}"
        changes.append((f"layout.tensor={2 * layout.tensor}", "layout.sequence=true", halved))
    if not memory.offload:
        changes.append(("memory.offload=true",))
    return changes
