"""Read LoRA adapters from PEFT's folders, find the base model that they belong to, and add them to it.

The sum ``W + scale * B A`` is computed a block at a time, with no model.
"""

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..layers import lora_scale
from ..models import (
    PEFT_PREFIX,
    AdaptedFamily,
    Implementation,
    LoraConfig,
    ModelConfig,
    adapted,
    implementation_of,
)
from ..parallel_state import BadCheckpoint, BadInput, Box, require
from ..storage.catalog import Catalog, in_one_file
from ..storage.dtypes import WEIGHTS, look_at
from ..storage.file_names import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    ADAPTERS,
    OLD_ADAPTER_MODEL,
    FolderKind,
    kind_of_folder,
)
from ..storage.files_beside_weights import companions_in
from ..storage.safe_open import contained
from ..storage.safetensors_reader import TensorFile
from ..storage.small_files import read_json
from ..storage.torch_archive import open_state_dict
from .find import local_folder
from .manifest import StoredAdapter
from .source import Source, read_source
from .stored_tensor import check_same_shapes

_SAMPLE = 256
#: Takes numbers as they are stored, and their box of the whole tensor; returns the numbers to write instead.
Change = Callable[[Tensor, Box], Tensor]


def fingerprint(base: Source) -> str:
    """Return 16 hexadecimal digits of a model: config, each tensor's name, dtype and shape, some numbers.

    The numbers are the first ones of the first, the middle and the last row. They tell other weights without
    reading all; a single number changed elsewhere is not noticed. The same in every form and layout.
    """
    digest = hashlib.sha256(base.model_config.model_dump_json(exclude={"initializer_range"}).encode())
    for name, shape in base.family.links(base.model_config)[1].items():
        digest.update(repr((name, base.hf[name].dtype, shape)).encode())
        whole = Box.whole(shape)
        if shape:
            whole = whole.narrow(len(shape) - 1, 0, min(shape[-1], _SAMPLE))
        for row in sorted({0, shape[0] // 2, shape[0] - 1}) if len(shape) > 1 else (0,):
            box = whole.narrow(0, row, row + 1) if len(shape) > 1 else whole
            numbers = base.hf[name].read(box, finite=False).contiguous()
            digest.update(numbers.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def stored_adapter(family: AdaptedFamily, base: Source, *, whole: bool = True) -> StoredAdapter:
    """Return what a checkpoint states of these adapters and their base, with ``whole`` its fingerprint."""
    lora, taken = family.lora.model_dump(mode="json"), fingerprint(base) if whole else None
    return StoredAdapter(lora=lora, base=os.path.abspath(base.path), fingerprint=taken)


def read_adapter(path: str | Path, base: Source, *, whole: bool = True) -> Source:
    """Open the adapters in a PEFT folder or in a checkpoint of a LoRA run, to go with ``base``.

    The base must be a model's weights, not adapters. ``whole``: as for ``read_source``, and look whether they
    were trained on these weights. Raises ``BadInput`` or ``BadCheckpoint`` for a source that is not an
    adapter, is not supported, or does not fit the base: tensors missing, left over or of another shape, or
    another model's weights.
    """
    require(base.adapter is None, base.path, None, "the weights of a whole model", "LoRA adapters")
    path, source = _adapters_in(path, whole=whole)
    if source is None:
        return _peft_folder(path, base)
    if whole and source.adapter is not None and source.adapter.fingerprint is not None:
        check_same_base(source.adapter, base.path, fingerprint(base), source.path)
    return source


def base_implementation(adapter: str | Path) -> Implementation | None:
    """Return whose code computed the base of adapters' checkpoint; ``None`` for a PEFT folder, which fits
    either.
    """
    _, source = _adapters_in(adapter, whole=False)
    return None if source is None else implementation_of(source.config)


def read_lora(path: str | Path) -> LoraConfig:
    """Return the LoRA config of a PEFT folder or a LoRA checkpoint; reads neither weights nor base."""
    path, source = _adapters_in(path)
    if source is None or source.adapter is None:
        return _peft_config(path)[0]
    return LoraConfig.model_validate(source.adapter.lora)


def _adapters_in(path: str | Path, *, whole: bool = True) -> tuple[Path, Source | None]:
    """Return the folder that ``path`` names, and the checkpoint of adapters in it; ``None``: it is PEFT's."""
    path, kind = kind_of_folder(local_folder(path), ADAPTERS)
    source = None if kind is FolderKind.ADAPTER else read_source(path, whole=whole)
    if source is not None and source.adapter is None:
        raise BadInput(source.path, expected="LoRA adapters", found="the weights of a whole model")
    return path, source


def _peft_config(path: Path) -> tuple[LoraConfig, dict[str, Any]]:
    where = path / ADAPTER_CONFIG
    raw = read_json(contained(path, ADAPTER_CONFIG))
    lora = LoraConfig.from_peft(raw, str(where))
    lora.check_patterns(str(where))
    return lora, raw


def read_converted(path: Path, source: Source) -> Source:
    """Open the result of a conversion of ``source``, in any form."""
    if kind_of_folder(path)[1] is FolderKind.ADAPTER:
        return _peft_folder(path, replace(source, adapter=None))
    return read_source(path, module=source.module, implementation=implementation_of(source.config))


def check_same_base(trained: StoredAdapter, base: object, digits: str | None, where: object) -> None:
    """Refuse adapters that were trained on another model than ``base``, of the fingerprint ``digits``."""
    if trained.fingerprint not in (None, digits):
        expected = f"the model that the adapters were trained on ({trained.base}, {trained.fingerprint})"
        actual = f"{base}, whose config or weights are others ({digits})"
        raise BadCheckpoint(where, "base", expected=expected, found=actual)


def _peft_folder(path: Path, base: Source) -> Source:
    lora, raw = _peft_config(path)
    named = raw.get("base_model_name_or_path")
    stored = StoredAdapter(lora=lora.model_dump(mode="json"), base=named if isinstance(named, str) else None)
    try:
        _, shapes = adapted(base.family, lora).links(base.model_config)
    except BadInput as error:  # whose place is a recipe's
        raise BadInput(
            path / ADAPTER_CONFIG, error.key, expected=error.expected, found=error.found, todo=error.todo
        ) from None
    if (archive := contained(path, OLD_ADAPTER_MODEL)).exists() and not (path / ADAPTER_MODEL).exists():
        file: TensorFile = open_state_dict(archive)
    else:
        file = TensorFile.open(contained(path, ADAPTER_MODEL), expected=shapes)
    todo = (
        "LoRA on embeddings, norms, routers and the output layer is not supported, or the adapter is for "
        "another model than target_modules and rank of adapter_config.json say"
    )
    in_file = {name: entry.shape for name, entry in file.tensors.items()}
    check_same_shapes(file.path, shapes, in_file, todo=todo, kind=BadInput)
    for name, entry in file.tensors.items():
        require(entry.dtype in WEIGHTS, file.path, name, f"one of {', '.join(WEIGHTS)}", entry.dtype)
    catalog = Catalog({name: in_one_file(file, name) for name in shapes})
    return replace(
        base, path=path, companions=companions_in(path), files=[file], catalog=catalog, manifest=None,
        warnings=[], adapter=stored,
    )  # fmt: skip


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


def products(family: AdaptedFamily, config: ModelConfig) -> dict[str, Product]:
    """Return the product for each tensor of the base that the adapters change, by Hugging Face's names."""
    by_name = {site.stored: Product(site.name, site.name) for site in family.sites(config)}
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

    The sum is computed in at least fp32, whatever the stored dtypes. A thread holds one linear's factors.
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
        return None if product is None else partial(self._add, name, product)

    def _add(self, name: str, product: Product, numbers: Tensor, box: Box) -> Tensor:
        a, b = self._factors(product.holder, torch.promote_types(numbers.dtype, torch.float32))
        rank, alpha = self._lora.rank_of(product.adapted), self._lora.alpha_of(product.adapted)
        if product.expert is None:
            stack, first, second = box.slices
            rows, columns = (second, first) if product.transposed else (first, second)
            a_ERI = a.unflatten(0, (product.experts, rank))[stack, :, columns]
            b_ORE = b.unflatten(1, (rank, product.experts))[rows, :, stack]
            form = "ore,eri->eio" if product.transposed else "ore,eri->eoi"
            delta = torch.einsum(form, b_ORE, a_ERI).contiguous()
        else:
            a = a[product.expert * rank : (product.expert + 1) * rank]
            b = b[product.start : product.stop, product.expert :: product.experts]
            rows, columns = box.slices
            # GPT-2's Conv1D is (in, out)
            delta = a[:, rows].T @ b[columns].T if name in self._turned else b[rows] @ a[:, columns]
        merged = delta.mul_(lora_scale(rank, alpha, rslora=self._lora.use_rslora)).add_(numbers)
        if not look_at(merged.contiguous()).finite:
            raise BadInput(self.adapter.path, name, expected="finite sums", found="a NaN or an infinity")
        return merged

    def _factors(self, holder: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        factors: dict[str, tuple[Tensor, Tensor]] = self._held.__dict__
        if holder not in factors:
            factors.clear()
            names = (f"{PEFT_PREFIX}{holder}.{factor}.weight" for factor in ("lora_A", "lora_B"))
            a, b = (self.adapter.hf[name].read().to(dtype) for name in names)
            factors[holder] = a, b
        return factors[holder]
