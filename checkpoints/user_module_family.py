"""Store a user's module, which no family describes, as data: its declarations and its table of names."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue
from torch import nn

from ..layers import all_stages
from ..models import Family, Link, Rule, family_of
from ..models.base.hugging_face_names import expand
from ..parallel_state import (
    BadInput,
    Cut,
    Declaration,
    Layout,
    Piece,
    buffer_names,
    declarations,
    require,
)
from ..storage.strict_json import StrictRecord

#: The model type in a checkpoint if the module's config has no ``model_type``.
MODULE = "module"


class StoredCut(StrictRecord):
    """Record a cut of a parameter, with the fields of ``parallel_state.Cut``."""

    dim: int
    axis: str
    unit: int


class StoredDeclaration(StrictRecord):
    """Record how a parameter is cut over the ranks (see ``parallel_state.Declaration``), and its stages."""

    shape: tuple[int, ...]
    cut: StoredCut | None = None
    multiple: int | None = Field(default=None, ge=1, le=2**24)
    partial: tuple[str, ...] = ()
    ends: bool = False
    experts: bool = False
    buffer: bool = False
    integer: bool = False
    stages: tuple[int, ...] = (0,)
    #: The stages that hold it where each stage has one block; empty if that is not known.
    blocks: tuple[int, ...] = ()

    def restored(self) -> Declaration:
        fields = self.model_dump(exclude={"stages", "blocks"})
        return Declaration(**fields | {"cut": None if self.cut is None else Cut(**fields["cut"])})


class StoredRule(StrictRecord):
    """Say that Hugging Face's tensor ``hf`` is made of ``ours``: one line of the table of names."""

    kind: Literal["rename", "transpose", "split", "stack"]
    ours: tuple[str, ...]
    hf: str
    transpose: bool = False

    def restored(self) -> Rule:
        return Rule(self.ours, self.hf, transpose=self.transpose or self.kind == "transpose")

    @classmethod
    def of(cls, rule: Rule) -> Self:
        """Record a rule that needs no config, as all but ``groups`` and the like."""
        ours, (hf, *others) = rule.our_names, rule.stored_names
        kind = "split" if ours[1:] else "stack" if "e" in rule.numbers else "rename"
        if rule.transpose and kind == "rename":
            kind = "transpose"
        stored = cls.model_validate(
            {"kind": kind, "ours": ours, "hf": hf, "transpose": rule.transpose and kind == "split"}
        )
        if others or replace(rule, ours=ours, stored=hf) != stored.restored():
            expected = "a name, or tensors that lie one after the other: a module has no config to count by"
            raise BadInput("names", hf, expected=expected, found=f"{rule}")
        return stored


class StoredModule(StrictRecord):
    """Describe a user's module: its checkpoint can be cut anew, compared and exported without its code.

    ``blocks``: number of blocks, if it is known which stage holds what for any number of stages.
    """

    pipeline: int = 1
    blocks: int = Field(default=0, ge=0, le=2**16)
    declarations: dict[str, StoredDeclaration]
    names: tuple[StoredRule, ...] = ()

    @classmethod
    def of(
        cls,
        stages: Sequence[Mapping[str, Declaration]],
        names: Iterable[Rule],
        blocks: Sequence[Collection[str]] = (),
    ) -> Self:
        """Record each stage's declarations; ``blocks``: the names of each stage of one block."""
        stored: dict[str, StoredDeclaration] = {}
        for number, stage in enumerate(stages):
            for name, declaration in stage.items():
                where = stored[name].stages if name in stored else ()
                record = StoredDeclaration.model_validate(declaration, from_attributes=True)
                stored[name] = record.model_copy(update={"stages": (*where, number)})
        rules = tuple(map(StoredRule.of, names))
        if {name for block in blocks for name in block} != stored.keys():
            blocks = ()
        for name in stored if blocks else ():
            holders = tuple(number for number, block in enumerate(blocks) if name in block)
            stored[name] = stored[name].model_copy(update={"blocks": holders})
        return cls(pipeline=len(stages), blocks=len(blocks), declarations=stored, names=rules)


@dataclass(frozen=True)
class ModuleFamily:
    """Act as the ``Family`` of a user's module: declarations and links, of no config, and no model."""

    model_type: str
    rules: Sequence[Rule]
    module: StoredModule
    # What a family may say of Hugging Face's folders; a table of names says all.
    ignorable: ClassVar[tuple[str, ...]] = ()
    tied_head: ClassVar[str] = ""
    optional_prefix: ClassVar[str] = ""
    adopted: ClassVar[bool] = False

    def module_pieces(self, config: object) -> dict[str, list[Piece[str]]]:
        return {}

    def left_out(self, config: object, names: Collection[str]) -> set[str]:
        return set()

    def declarations(
        self, config: object, layout: Layout | None = None, *, split: Sequence[int] | None = None
    ) -> list[dict[str, Declaration]]:
        """Return each stage's declarations: for one stage, for as many as the run that wrote the checkpoint,
        and where the module was described with its ``build`` for any number.
        """
        layout, module = layout or Layout(), self.module
        as_written = layout.pipeline == module.pipeline and split is None
        anew = bool(module.blocks) and layout.pipeline > 1 and not as_written
        if not anew and (layout.pipeline not in (1, module.pipeline) or split is not None):
            raise BadInput(
                "layout", "pipeline" if split is None else "split",
                expected="1" + (f" or {module.pipeline}, as it was written" if module.pipeline > 1 else ""),
                found=layout.pipeline if split is None else list(split),
                todo="The module's own code says what its stages hold: load cuts it in any layout; "
                "describe_module(model, build=...) lets commands do so too",
            )  # fmt: skip
        cut = all_stages(module.blocks, layout.pipeline, split) if anew else ()
        stage_of = {block: stage.number for stage in cut for block in stage.blocks}
        stages: list[dict[str, Declaration]] = [{} for _ in range(layout.pipeline)]
        for name, stored in module.declarations.items():
            declaration = stored.restored()
            declaration.check(layout, name)
            holders = {stage_of[block] for block in stored.blocks} if anew else stored.stages
            for number in holders if layout.pipeline > 1 else (0,):
                stages[number][name] = declaration
        return stages

    def links(self, config: object) -> tuple[Sequence[Link], Mapping[str, tuple[int, ...]]]:
        shapes = {name: stored.shape for name, stored in self.module.declarations.items()}
        todo = "Give names=[Rule(ours, stored)] to describe_module"
        require(self.rules, self.model_type, "names", "a table of Hugging Face's names", "none", todo)
        numbers = (int(number) for name in shapes for number in re.findall(r"(?<=\.)\d+(?=\.)", name))
        blocks = 1 + max(numbers, default=-1)
        check_names(self.rules, shapes, blocks)
        return expand(self.rules, shapes, blocks)

    def declared(self, model: nn.Module) -> dict[str, Declaration]:
        return declarations(model)

    links_of_all = links

    def to_hf(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the module's config.json, or whatever its owner gave for one."""
        return dict(config)


@dataclass(frozen=True)
class Described:
    """Bind what a checkpoint says of a model: its family and config (of a user's module, its config.json)."""

    family: Family | ModuleFamily
    config: Any

    @classmethod
    def of(cls, config: Mapping[str, Any], where: object) -> Self:
        """Return what a config.json, found at ``where``, describes: a model of the zoo."""
        family = family_of(config, str(where))
        return cls(family, family.from_hf(config, str(where)))

    @property
    def model_type(self) -> str:
        return self.family.model_type

    @property
    def module(self) -> StoredModule | None:
        """Return what is stored of a module that no family describes."""
        return self.family.module if isinstance(self.family, ModuleFamily) else None

    def declarations(
        self, layout: Layout | None = None, *, split: Sequence[int] | None = None
    ) -> list[dict[str, Declaration]]:
        """Return the declarations of each pipeline stage; ``BadInput`` for a layout that cannot cut it."""
        return self.family.declarations(self.config, layout, split=split)

    def links(self) -> tuple[Sequence[Link], Mapping[str, tuple[int, ...]]]:
        """Return the links to Hugging Face's tensors, and the shapes of these."""
        return self.family.links(self.config)

    def buffers(self, *, of_hf: bool = False) -> frozenset[str]:
        """Return trilith's names of buffers, or those of Hugging Face's files: no gradient moves them, and
        casts leave them in fp32, as transformers does.
        """
        (declared,) = self.declarations()
        buffers = buffer_names(declared)
        if not of_hf:
            return buffers
        return frozenset(link.hf for link in self.links()[0] if link.ours in buffers)


def described_module(module: StoredModule, config: Mapping[str, JsonValue]) -> Described:
    """Return what describes a checkpoint that itself says how its tensors are cut."""
    rules = [rule.restored() for rule in module.names]
    return Described(ModuleFamily(str(config.get("model_type", MODULE)), rules, module), config)


def check_names(rules: Sequence[Rule], shapes: Mapping[str, tuple[int, ...]], blocks: int) -> None:
    """Refuse a table of names that leaves out a parameter, names one twice, or names an unknown one."""
    covered: dict[str, str] = {}
    for rule in rules:
        hf, matched = rule.stored_names[0], False
        for i in range(max(blocks, 1)) if "i" in rule.numbers else (0,):
            for parameter_name in (template.replace("{i}", str(i)) for template in rule.our_names):
                if parameter_name not in shapes:
                    continue
                matched = True
                if parameter_name in covered:
                    both = f"{covered[parameter_name]} and {hf}"
                    raise BadInput("names", parameter_name, expected="one rule", found=both)
                covered[parameter_name] = hf
        if not matched:
            near = f"The parameters are {', '.join(list(shapes)[:4])}, ..."
            expected, names = "a rule for a parameter", " and ".join(rule.our_names)
            raise BadInput("names", hf, expected=expected, found=f"none named {names}", todo=near)
    for name in shapes:
        require(name in covered, "names", name, "a rule for every parameter", "none for this one")
