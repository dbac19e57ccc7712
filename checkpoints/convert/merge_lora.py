"""Add LoRA adapters to the weights of their base, ``W + scale * B A``, a block at a time, with no model."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layers import lora_scale
from ...models import PEFT_PREFIX, AdaptedFamily, ModelConfig
from ...parallel_state import BadInput, Box
from ...storage.dtypes import look_at
from ..source import Source

#: Takes numbers as they are stored, and their box of the whole tensor; returns the numbers to write instead.
Change = Callable[[Tensor, Box], Tensor]


@dataclass(frozen=True, slots=True)
class Product:
    """State which part of a product B A is added to one tensor of the base.

    ``adapted``: the name that patterns for the rank are matched with. ``holder``: the module of A and B in
    PEFT's files. The tensor gets the rows of B from ``start`` up to ``stop``. It belongs to one ``expert``
    out of ``experts`` (1 for a linear layer). If ``expert`` is ``None``, the tensor is the stack of all
    experts, (E, out, in), or (E, in, out) if ``transposed``.
    """

    adapted: str
    holder: str
    expert: int | None = 0
    experts: int = 1
    start: int = 0
    stop: int | None = None
    transposed: bool = False

    @property
    def factors(self) -> tuple[str, str]:
        """Return the names of A and B in PEFT's files."""
        a, b = (f"{PEFT_PREFIX}{self.holder}.{factor}.weight" for factor in ("lora_A", "lora_B"))
        return a, b


def products(family: AdaptedFamily, config: ModelConfig) -> dict[str, Product]:
    """Return the product for each tensor of the base that the adapters change, by Hugging Face's names."""
    by_name = {f"{site.name}.weight": Product(site.name, site.name) for site in family.sites(config)}
    for stack in family.stacks(config):
        if not stack.files:
            product = Product(stack.name, stack.holder, None, stack.experts, transposed=stack.transposed)
            by_name[stack.stored] = product
        for expert, modules in enumerate(stack.files):
            for (_, start, stop), module in zip(stack.outputs, modules, strict=True):
                product = Product(stack.name, stack.holder, expert, len(stack.files), start, stop)
                by_name[f"{module}.weight"] = product
    return by_name


class Merge:
    """Add a LoRA adapter to the tensors of its base, which go by their Hugging Face names.

    The sum is computed in at least fp32, whatever the stored dtypes. A thread holds the factors of one linear
    at a time.
    """

    def __init__(self, base: Source, adapter: Source) -> None:
        assert isinstance(adapter.family, AdaptedFamily), adapter.path
        self.adapter, self._lora = adapter, adapter.family.lora
        config = base.model_config
        self._products = products(adapter.family, config)
        links, _ = adapter.family.base.links(config)
        self._turned = {link.hf for link in links if link.transpose}
        self._held = threading.local()

    @property
    def identity(self) -> object:
        """Return a value that differs whenever the adapter would add other numbers."""
        return self._lora, [file.state() for file in self.adapter.files]

    def change(self, name: str) -> Change | None:
        """Return the function that adds the adapter to this tensor, or ``None`` if it has no adapter."""
        product = self._products.get(name)
        if product is None:
            return None

        def add(numbers: Tensor, box: Box) -> Tensor:
            return self._add(name, product, numbers, box)

        return add

    def _add(self, name: str, product: Product, numbers: Tensor, box: Box) -> Tensor:
        dtype = torch.promote_types(numbers.dtype, torch.float32)
        a, b = self._factors(product, dtype)
        rank = self._lora.rank_of(product.adapted)
        if product.expert is None:
            stack, first, second = box.slices
            rows, columns = (second, first) if product.transposed else (first, second)
            a_ERI = a.unflatten(0, (product.experts, rank))[stack, :, columns]
            b_ORE = b.unflatten(1, (rank, product.experts))[rows, :, stack]
            form = "ore,eri->eio" if product.transposed else "ore,eri->eoi"
            delta = torch.einsum(form, b_ORE, a_ERI).contiguous()
            return self._sum(name, product, delta, numbers)
        a = a[product.expert * rank : (product.expert + 1) * rank]
        b = b[product.start : product.stop, product.expert :: product.experts]
        rows, columns = box.slices
        if name in self._turned:  # GPT-2's Conv1D is (in, out)
            delta = a[:, rows].T @ b[columns].T
        else:
            delta = b[rows] @ a[:, columns]
        return self._sum(name, product, delta, numbers)

    def _sum(self, name: str, product: Product, delta: Tensor, numbers: Tensor) -> Tensor:
        """Return the base's numbers and what the adapter adds."""
        rank, alpha = self._lora.rank_of(product.adapted), self._lora.alpha_of(product.adapted)
        merged = delta.mul_(lora_scale(rank, alpha, rslora=self._lora.use_rslora)).add_(numbers)
        if not look_at(merged.contiguous()).finite:
            raise BadInput(self.adapter.path, name, expected="finite sums", found="a NaN or an infinity")
        return merged

    def _factors(self, product: Product, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        known: dict[str, tuple[Tensor, Tensor]] = self._held.__dict__
        if product.holder not in known:
            known.clear()
            a, b = (self.adapter.hf[name].read().to(dtype) for name in product.factors)
            known[product.holder] = a, b
        return known[product.holder]
