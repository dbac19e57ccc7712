"""Define a family's table of names, trilith's and Hugging Face's, module by module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .hugging_face_names import Rule

#: Hugging Face's name of a module or tensor, or a rule that begins below both names.
Entry = str | Rule


def fused(hf: str, parts: str, *, transpose: bool = False, groups: str = "", dim: int = 0) -> Entry:
    """Name modules inside ours, such as "q k v", that Hugging Face stores as one; see ``Rule``."""
    return Rule(tuple(parts.split()), hf, transpose, groups, dim)


def transposed(hf: str) -> Entry:
    """Name a module whose matrix Hugging Face stores as (in, out)."""
    return Rule("", hf, transpose=True)


def per_expert(hf: str) -> Entry:
    """Name a stack of experts that Hugging Face stores one by one, with ``{e}``."""
    return Rule("", hf)


@dataclass(frozen=True, eq=False)
class Names(Sequence[Rule]):
    """List a family's rules: of a block's modules, with Hugging Face's below ``prefix``, and of all others.

    The entry of a module holds for its weight and its bias, and that of a module which a config leaves out
    does nothing. ``first`` comes before the blocks in files, and ``last`` after them.
    """

    prefix: str
    first: Mapping[str, Entry]
    block: Mapping[str, Entry]
    last: Mapping[str, Entry]

    def but(self, block: Mapping[str, Entry | None], **last: Entry) -> Names:
        """Return these names with others for some modules of a block, or with none (``None``)."""
        changed = {ours: entry for ours, entry in {**self.block, **block}.items() if entry is not None}
        return replace(self, block=changed, last={**self.last, **last})

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Return the rules in the order of files."""
        return (
            *_rules(self.first, "", ""),
            *_rules(self.block, "layers.{i}.", f"{self.prefix}."),
            *_rules(self.last, "", ""),
        )

    def __getitem__(self, place: Any) -> Any:
        return self.rules[place]

    def __len__(self) -> int:
        return len(self.rules)


def _rules(table: Mapping[str, Entry], ours_at: str, at: str) -> Iterator[Rule]:
    for name, entry in table.items():
        ours = f"{ours_at}{name}"
        if isinstance(entry, str):
            yield Rule(ours, f"{at}{entry}")
        else:
            parts = ours if isinstance(entry.ours, str) else tuple(f"{ours}.{part}" for part in entry.ours)
            yield replace(entry, ours=parts, stored=f"{at}{entry.stored}")


def multi_token_rules(rules: Iterable[Rule], *, tied: bool) -> list[Rule]:
    """Return the rules of such a block: those of the other blocks, its own tensors, and its copies of the
    embedding and the output layer.
    """
    at = "model.layers.{i}."
    own = [Rule(f"mtp.{{i}}.{module}", f"{at}{module}") for module in ("enorm", "hnorm", "eh_proj")]
    copies = [
        Rule("embed.weight", f"{at}embed_tokens.weight", copy=True),
        Rule("embed.weight" if tied else "head.weight", f"{at}shared_head.head.weight", copy=True),
    ]
    own += [Rule("mtp.{i}.norm", f"{at}shared_head.norm")]
    for rule in rules:
        if "i" in rule.numbers:
            ours = tuple(name.replace("layers.{i}.", "mtp.{i}.block.", 1) for name in rule.our_names)
            own.append(replace(rule, ours=ours))
    return [*copies, *own]
