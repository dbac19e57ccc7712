"""Find the places for adapters, linear layers and stacks of experts, by Hugging Face's names."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain

from ...layers import Experts, linears
from ...parallel_state import Box, Piece
from ..base.config import ModelConfig
from ..base.family import Family
from ..base.hugging_face_names import Link

#: PEFT's prefix of a module's name in the files of an adapter.
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Site:
    """Describe a linear layer of Hugging Face's model and the products of the trilith linear that make it up.

    ``name``: as transformers' module and PEFT have it. ``layer``: name of trilith's linear. ``outputs``: its
    products that Hugging Face stores as one (none: the layer is one product). ``parts``: pieces of these:
    module, rows, and where they begin in the whole. ``stored``: name of its weight in Hugging Face's files.
    """

    name: str
    layer: str
    outputs: tuple[str, ...]
    parts: tuple[tuple[str, tuple[int, int], int], ...]
    in_features: int
    stored: str

    @property
    def inner(self) -> str:
        """Return the name of the trilith module that holds A."""
        return self.layer if self.outputs[1:] else self.parts[0][0]

    def links(self, r: int) -> list[Link]:
        """Return the links of A and B to PEFT's tensors."""
        a, b = (f"{PEFT_PREFIX}{self.name}.{factor}.weight" for factor in ("lora_A", "lora_B"))
        whole = Box.whole((r, self.in_features))
        links = [Link(f"{self.inner}.lora_A", Piece.plain(whole, a))]
        for module, (start, stop), at in self.parts:
            links.append(Link(f"{module}.lora_B", Piece.plain(Box((start, 0), (stop, r)), b, (at, 0))))
        return links


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """Describe a stack of experts of transformers' model, one parameter (E, out, in) or (E, in, out).

    ``layer``: name of trilith's ``Experts``. ``outputs``: its products that transformers holds as one, and
    their rows. ``files``: of each expert and output, the module in Hugging Face's files; none where the files
    hold the stack as one tensor, which is then ``stored``, (E, in, out) if it is ``transposed``.
    """

    name: str
    layer: str
    outputs: tuple[tuple[str, int, int], ...]
    files: tuple[tuple[str, ...], ...]
    in_features: int
    experts: int
    #: The module that holds A and B in PEFT's files.
    holder: str
    stored: str = ""
    transposed: bool = False

    def links(self, r: int) -> list[Link]:
        """Return the links of A and B to PEFT's tensors.

        A (E, r, in) is PEFT's (E r, in). B (E, out, r) is PEFT's (out, r E), in which the experts' columns
        take turns: of each rank the first column of every expert, then the second ones.
        """
        a, b = (f"{PEFT_PREFIX}{self.holder}.{factor}.weight" for factor in ("lora_A", "lora_B"))
        width, experts = self.in_features, self.experts
        ours = f"{self.layer}.lora_A_{'_'.join(output for output, _, _ in self.outputs)}"
        links = []
        for e in range(experts):
            box = Box((e, 0, 0), (e + 1, r, width))
            links.append(Link(ours, Piece(box, a, (e * r, 0), (None, 0, 1), (1, 1, 1))))
        for output, start, stop in self.outputs:
            for k in range(r):
                box = Box((0, 0, k), (experts, stop - start, k + 1))
                piece = Piece(box, b, (start, k * experts), (1, 0, None), (1, 1, 1))
                links.append(Link(f"{self.layer}.lora_B_{output}", piece))
        return links


@lru_cache(maxsize=16)
def expert_sites(family: Family, config: ModelConfig) -> tuple[ExpertSite, ...]:
    """Return every stack of experts, whose matrices Hugging Face's files hold one by one, or as one stack."""
    modules = family.on_meta(config).named_modules()
    layers = {name: module for name, module in modules if isinstance(module, Experts)}
    files: dict[str, list[Link]] = {}
    for link in family.links(config)[0]:
        if link.ours.rpartition(".")[0] in layers:
            files.setdefault(link.ours, []).append(link)
    sites = []
    for layer, experts in layers.items():
        holder = family.experts_module.format(i=layer.split(".")[1])
        for names in experts.products:
            links = [files.get(f"{layer}.{name}", []) for name in names]
            stacked = any(len(link.ours_box.start) == len(link.hf_box.start) for link in chain(*links))
            shape, turned = links[0][0].hf_box.shape, experts.transposed
            inner, outer = (shape[-2], -1) if turned else (shape[-1], -2)
            ends = [0, *accumulate(module_links[0].hf_box.shape[outer] for module_links in links)]
            outputs = tuple(zip(names, ends, ends[1:], strict=False))
            name = f"{holder}.{'_'.join(names)}_proj"
            by_expert = () if stacked else zip(*links, strict=True)
            in_files = tuple(tuple(link.hf.removesuffix(".weight") for link in own) for own in by_expert)
            count, stored = (shape[0], links[0][0].hf) if stacked else (len(in_files), "")
            site = name, layer, outputs, in_files, inner, count, holder, stored
            sites.append(ExpertSite(*site, transposed=stacked and turned))
    return tuple(sites)


@lru_cache(maxsize=16)
def linear_sites(family: Family, config: ModelConfig) -> tuple[Site, ...]:
    """Return every linear of Hugging Face's model that is made of our tensors: what ``all-linear`` means."""
    layers = dict(linears(family.build(config)))
    links: dict[str, list[Link]] = {}
    for link in family.links(config)[0]:
        links.setdefault(link.hf, []).append(link)
    sites = list[Site]()
    for name, those in links.items():
        modules = [link.ours.removesuffix(".weight") for link in those]
        owners = {module if module in layers else module.rpartition(".")[0] for module in modules}
        if not name.endswith(".weight") or not owners <= layers.keys():
            continue
        (layer,) = owners
        parts = tuple(
            (module, (link.ours_box.start[0], link.ours_box.stop[0]), link.hf_box.start[int(link.transpose)])
            for module, link in zip(modules, those, strict=True)
        )
        products, width = dict.fromkeys(modules), those[0].ours_box.shape[1]
        outputs = tuple(module.removeprefix(f"{layer}.") for module in products if module != layer)
        sites.append(Site(name.removesuffix(".weight"), layer, outputs, parts, width, name))
    if not family.adopted:
        return tuple(sites)
    # Their modules keep transformers' names, which files may have otherwise.
    tensors = Counter(site.layer for site in sites)
    return tuple(replace(site, name=site.layer) if tensors[site.layer] == 1 else site for site in sites)


def leaves(sites: Iterable[Site]) -> str:
    """Return the last words of the names, for a message."""
    return ", ".join(sorted({site.name.rpartition(".")[2] for site in sites}))
