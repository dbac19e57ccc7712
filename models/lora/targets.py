"""The linears of Hugging Face's model as places for adapters, found from the family's table of names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from ...layers import linears
from ...parallel_state import Box
from ..base.config import ModelConfig
from ..base.family import Family
from ..base.names import Link

#: PEFT's prefix of a module's name in the files of an adapter.
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Site:
    """Describe a linear layer of Hugging Face's model and the products of the trilith linear that make it up.

    ``layer``: name of trilith's linear. ``outputs``: its products that Hugging Face stores as one (none: the
    layer is one product). ``parts``: pieces of these: module, rows, and where they begin in the whole.
    """

    name: str
    layer: str
    outputs: tuple[str, ...]
    parts: tuple[tuple[str, tuple[int, int], int], ...]
    in_features: int

    @property
    def inner(self) -> str:
        """Return the name of the trilith module that holds A."""
        return self.layer if self.outputs[1:] else self.parts[0][0]

    def links(self, r: int) -> list[Link]:
        """Return the links of A and B to PEFT's tensors."""
        a, b = (f"{PEFT_PREFIX}{self.name}.{factor}.weight" for factor in ("lora_A", "lora_B"))
        whole = Box.whole((r, self.in_features))
        found = [Link(f"{self.inner}.lora_A", whole, a, whole)]
        for module, (start, stop), at in self.parts:
            box, place = Box((start, 0), (stop, r)), Box((at, 0), (at + stop - start, r))
            found.append(Link(f"{module}.lora_B", box, b, place))
        return found


@cache
def linear_sites(family: Family, config: ModelConfig) -> tuple[Site, ...]:
    """Return every linear of Hugging Face's model that is made of our tensors: what ``all-linear`` means."""
    layers = dict(linears(family.build(config)))
    links: dict[str, list[Link]] = {}
    for link in family.links(config)[0]:
        links.setdefault(link.hf, []).append(link)
    found = []
    for name, those in links.items():
        modules = [link.ours.removesuffix(".weight") for link in those]
        owners = {module if module in layers else module.rpartition(".")[0] for module in modules}
        if not name.endswith(".weight") or not owners <= layers.keys():
            continue
        (layer,) = owners
        parts = []
        for module, link in zip(modules, those, strict=True):
            rows = (link.ours_box.start[0], link.ours_box.stop[0])
            parts.append((module, rows, link.hf_box.start[1 if link.transpose else 0]))
        outputs = tuple(
            module.removeprefix(f"{layer}.") for module in dict.fromkeys(modules) if module != layer
        )
        found.append(
            Site(name.removesuffix(".weight"), layer, outputs, tuple(parts), those[0].ours_box.shape[1])
        )
    return tuple(found)


def leaves(sites: Iterable[Site]) -> str:
    """Return the last words of the names, for a message."""
    return ", ".join(sorted({site.name.rpartition(".")[2] for site in sites}))
