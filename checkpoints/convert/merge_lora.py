"""Add LoRA adapters to the weights of their base, ``W + scale * B A``, a block at a time, with no model."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ...layers import lora_scale
from ...models import PEFT_PREFIX, AdaptedFamily, Site
from ...parallel_state import BadInput, Box
from ..source import Source
from .transfer import Change


class Merge:
    """Add a LoRA adapter to the tensors of its base, which go by their Hugging Face names.

    The sum is computed in at least fp32, whatever the stored dtypes. A thread holds the factors of one linear
    at a time, at most ``bytes_of_a_worker``.
    """

    def __init__(self, base: Source, adapter: Source) -> None:
        assert isinstance(adapter.family, AdaptedFamily), adapter.path
        self.adapter, self._lora = adapter, adapter.family.lora
        config = base.model_config
        self._sites = {f"{site.name}.weight": site for site in adapter.family.sites(config)}
        links, _ = adapter.family.base.links(config)
        self._turned = {link.hf for link in links if link.transpose}
        self._links, self._shapes = adapter.links(to_hf=True), adapter.family.links(config)[1]
        self._held = threading.local()

    @property
    def identity(self) -> object:
        """Return a value that differs whenever the adapter would add other numbers."""
        return self._lora, [file.state() for file in self.adapter.files]

    @property
    def bytes_of_a_worker(self) -> int:
        sites = self._sites.values()
        return max(4 * sum(Box.whole(self._shapes[name]).size for name in _names(site)) for site in sites)

    def change(self, name: str) -> Change | None:
        """Return the function that adds the adapter to this tensor; ``None`` if it has no adapter."""
        site = self._sites.get(name)
        if site is None:
            return None

        def add(numbers: Tensor, box: Box) -> Tensor:
            return self._add(name, site, numbers, box)

        return add

    def _add(self, name: str, site: Site, numbers: Tensor, box: Box) -> Tensor:
        dtype = torch.promote_types(numbers.dtype, torch.float32)
        a, b = self._factors(site, dtype)
        rows, columns = box.slices
        if name in self._turned:  # GPT-2's Conv1D is (in, out)
            delta = a[:, rows].T @ b[columns].T
        else:
            delta = b[rows] @ a[:, columns]
        rank, alpha = self._lora.rank_of(site.name), self._lora.alpha_of(site.name)
        merged = delta.mul_(lora_scale(rank, alpha, rslora=self._lora.use_rslora)).add_(numbers)
        if not bool(torch.isfinite(merged).all()):
            raise BadInput(self.adapter.path, name, expected="finite sums", found="a NaN or an infinity")
        return merged

    def _factors(self, site: Site, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        known: dict[str, tuple[Tensor, Tensor]] = self._held.__dict__
        if site.name not in known:
            known.clear()
            a, b = (
                self.adapter.read(name, Box.whole(self._shapes[name]), self._links).to(dtype)
                for name in _names(site)
            )
            known[site.name] = a, b
        return known[site.name]


def _names(site: Site) -> tuple[str, str]:
    return f"{PEFT_PREFIX}{site.name}.lora_A.weight", f"{PEFT_PREFIX}{site.name}.lora_B.weight"
