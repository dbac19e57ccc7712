"""Make batches of a user's data sets: a length, and an item by its number, which is a dict of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..parallel_state import BadInput, require
from ..system.user_errors import asked
from .sample_order import Interleave, SampleOrder


class ItemBatches(SampleOrder):
    """Make batches of ``global_batch`` items, in the order of the samples of token files.

    ``sources``: data sets, each with a fingerprint of what its items follow from. ``sequence_length``: what
    the recipe says of an item's tokens. All items have the names, shapes and dtypes of the first one;
    ``BadInput`` names the item that has not. ``key``: what to call the data sets in messages.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Any, str]],
        weights: Sequence[float] | None,
        sequence_length: int,
        global_batch: int,
        seed: int,
        *,
        key: str = "data.module",
    ) -> None:
        self._key, self._sources, lengths = key, [source for source, _ in sources], list[int]()
        self._fingerprints = [fingerprint for _, fingerprint in sources]
        self.sequence_length = sequence_length
        for source in self._sources:
            length = asked(lambda source=source: len(source), key, "a data set with a length")
            require(length >= 1, "recipe", key, "a data set with at least one item", "none")
            lengths.append(length)
        interleave = Interleave(weights or [float(length) for length in lengths])
        super().__init__(interleave, lengths, global_batch, seed)
        self.first = self._item(0, 0)
        for source in range(1, len(self._sources)):
            self._checked(self._item(source, 0), source, 0)

    @property
    def fingerprint(self) -> str:
        """Return what a manifest keeps: of each data set its file, arguments and length, and its share."""
        pairs = zip(self._fingerprints, self._lengths, strict=True)
        return self._shared([f"{length} items of {fingerprint}" for fingerprint, length in pairs])

    def rows(self, step: int, rows: range) -> dict[str, Tensor]:
        """Return these items, which follow one another, of the global batch of ``step``, on dim 0."""
        sources, numbers = self.sample_ids(step, rows)
        places = zip(sources.tolist(), numbers.tolist(), strict=True)
        samples = [self._checked(self._item(source, number), source, number) for source, number in places]
        return {name: torch.stack([sample[name] for sample in samples]) for name in self.first}

    def _place(self, source: int, number: int) -> str:
        return f"{self._key}{f'[{source}]' if len(self._sources) > 1 else ''}: item {number}"

    def _item(self, source: int, number: int) -> dict[str, Tensor]:
        """Return an item; ``BadInput`` for what is not a dict of tensors."""
        where = self._place(source, number)
        sample = asked(lambda: self._sources[source][number], where, "an item")
        expected = "a dict of tensors by name"
        if not isinstance(sample, Mapping) or not sample:
            kind = "an empty one" if isinstance(sample, Mapping) else type(sample).__name__
            raise BadInput("recipe", where, expected=expected, found=kind)
        for name, tensor in sample.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise BadInput(
                    "recipe", where, expected=expected, found=f"{name!r}: {type(tensor).__name__}",
                    todo="torch.as_tensor makes one of a number or an array",
                )  # fmt: skip
        return {name: tensor.detach() for name, tensor in sample.items()}

    def _checked(self, sample: dict[str, Tensor], source: int, number: int) -> dict[str, Tensor]:
        """Return an item that is like the first one."""
        if (form := _form(sample)) != (like := _form(self.first)):
            differs = next(name for name in {**like, **form} if form.get(name) != like.get(name))
            raise BadInput(
                "recipe", self._place(source, number),
                expected=f"{differs}: {like.get(differs, 'absent')}, as in the first item",
                found=form.get(differs, "none"), todo="Pad items to one length, or cut them",
            )  # fmt: skip
        return sample


def _form(sample: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"
        for name, tensor in sample.items()
    }
