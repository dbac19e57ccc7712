"""Define what a reader of another project's checkpoints gives: its tensors, and facts about the model.

Each format has one file here with one function that reads headers and returns a ``ForeignCheckpoint``; it
reads no weights. ``formats.py`` lists the formats. Everything after that is the same for all formats:
``rules.py`` says which foreign tensor is which tensor of Hugging Face, ``model_tensors.py`` takes the model's
out of the catalog, and the plan and the executor of a conversion then see a folder of Hugging Face's tensors.
So streaming, a resumed conversion and the checks need nothing from a format.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...models import ModelConfig
from ...parallel_state import BadInput, require
from ...storage.catalog import Catalog
from ...storage.torch_archive import ViewFile
from ...system import counted, literal


@dataclass(frozen=True, slots=True)
class Stated:
    """Hold a fact about the model that the checkpoint states: its value, and where, for the message.

    A range or a frozenset holds all values that would agree, such as the sizes of an unpadded vocabulary.
    """

    value: object
    where: str

    @property
    def text(self) -> str:
        """Return the value in words."""
        if isinstance(self.value, range):
            return f"{self.value.start} to {self.value.stop - 1}"
        if isinstance(self.value, frozenset):
            return f"one of {', '.join(sorted(map(str, self.value)))}"
        if isinstance(self.value, bool):
            return literal(self.value)
        return " ".join(map(str, self.value)) if isinstance(self.value, tuple) else str(self.value)


@dataclass
class ForeignCheckpoint:
    """Hold what a reader found in ``path``.

    ``form``: the format, by its name for the user. ``tensors``: the weights, by their foreign names.
    ``moments``: for ``exp_avg`` and ``exp_avg_sq`` the moment of each weight, by the weight's foreign name
    and in the weight's foreign shape; empty without an optimizer that can be read. ``updates``: how many
    updates the optimizer has made, where that is stated; ``updates_of``: of a weight that it has updated less
    often, by the weight's foreign name. ``step``: the step of the run. ``stated``: facts
    about the model by the attribute's name in a config of trilith, such as ``num_hidden_layers``; they are
    compared with the config that the user gives. ``skipped``: lines about tensors that are left out and why,
    for the user. ``names``: the table of names that this format implies, or ``None`` if the user chooses.
    """

    path: Path
    form: str
    tensors: Catalog
    moments: Mapping[str, Catalog] = field(default_factory=dict)
    updates: int | None = None
    updates_of: dict[str, int] = field(default_factory=dict)
    step: int | None = None
    stated: dict[str, Stated] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    names: str | None = None

    def summary(self) -> str:
        """Return one line that says what was found."""
        dtypes = sorted({tensor.dtype for tensor in self.tensors.values()})
        moments = "moments of AdamW" if self.moments else "no moments"
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.form}: {counted(len(self.tensors), 'weight')} in {', '.join(dtypes)}, {moments}{step}"

    def skip(self, names: Sequence[str], what: str) -> None:
        """Tell the user that these entries of a checkpoint, if there are any, are not read."""
        if names:
            self.skipped.append(f"not read: {counted(len(names), 'entry')} {what}, such as {names[0]}")


def refuse_copies(parts: Iterable[tuple[ViewFile, object]]) -> None:
    """Refuse a file that is a copy of one before it, in the place of another part of the model.

    ``parts``: files with the part that each holds; files of the same part may be alike.
    """
    files: dict[tuple[tuple[int, int, int], ...], tuple[ViewFile, object]] = {}
    for file, part in parts:
        first, its_part = files.setdefault(tuple(file.sums), (file, part))
        if part != its_part:
            actual, todo = f"a copy of {first.path}", "Copy the file of this rank again"
            raise BadInput(file.path, expected="its rank's part of the model", found=actual, todo=todo)


#: Relative difference of two numbers that are the same in fp32.
_SAME = 1e-6


def check_stated(checkpoint: ForeignCheckpoint, config: ModelConfig, where: Path) -> None:
    """Refuse a config that disagrees with a fact in the checkpoint; the message names both places.

    A fact about an attribute that this family's config has neither as a field nor fixed is not compared. A
    checkpoint that states nothing gets a line for the user: names and shapes alone do not show a wrong number
    of heads.
    """
    if not checkpoint.stated:
        checkpoint.skipped.append(
            "it states nothing about the model, so only names and shapes are compared with the config: "
            "a wrong number of attention heads, for example, is not noticed"
        )
    elif "sliding_window" not in checkpoint.stated and (window := getattr(config, "sliding_window", None)):
        checkpoint.skipped.append(f"it states no window: the config's is taken, {window} tokens")
    for name, argument in checkpoint.stated.items():
        no_choice = config.HARMLESS.get(name, ())  # the family's own value comes first
        if not hasattr(config, name) and not no_choice and name != "sliding_window":  # absent: no window
            continue
        ours: Any = getattr(config, name, next(iter(no_choice), None))
        if name == "rope_scaling" and not isinstance(argument.value, bool):
            scaling = () if ours is None else (ours.rope_type, ours.factor)
            if scaling[:1] == ("llama3",):
                scaling += (
                    ours.low_freq_factor,
                    ours.high_freq_factor,
                    ours.original_max_position_embeddings,
                )
            ours = scaling or "no scaling"
        expected = f"{argument.text}, as {argument.where} says"
        todo = "The config is of another model than the checkpoint"
        require(_same(argument.value, ours), where, name, expected, ours, todo)


def _same(a: object, b: object) -> bool:
    if isinstance(a, range | frozenset):
        return b in a
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, bool):  # something is there or not, such as a scaled rope
        return a == bool(b)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=_SAME)
    return a == b
