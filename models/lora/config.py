"""State which LoRA adapters a model gets, in PEFT's terms: rank, scale, modules by Hugging Face's names."""

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from ...parallel_state import BadInput, from_validation
from ...system import literal
from ..base.keys import MOST_BLOCKS, DropoutRate, Factor, names
from ..patterns import checked, compiled

Names = str | Annotated[tuple[str, ...], Strict(False)]  # a list of a file becomes a tuple
Rank = Annotated[int, Field(ge=1, le=2**16)]
Block = Annotated[int, Field(ge=0, lt=MOST_BLOCKS)]

_Number = TypeVar("_Number", int, float)

ALL_LINEAR = "all-linear"

#: Keys of an adapter_config.json that do not change what its adapter computes on a model of known weights.
_INERT = names("""
    auto_mapping base_model_name_or_path eva_config fan_in_fan_out inference_mode megatron_core peft_version
    qalora_group_size revision runtime_config
""")
#: Ways to draw A and B that leave the base as it is; others (pissa, olora, ...) change the base at the start.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


class LoraConfig(BaseModel):
    """State LoRA adapters under the names and with the meaning of PEFT's ``LoraConfig``.

    ``target_modules`` are ends of names (``q_proj``), whole names, one regular expression, or ``all-linear``.
    ``target_parameters`` are ends of the names that transformers gives to stacks of experts.
    Source: Hu et al. 2021.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    r: Rank = Field(default=8, description="rank of the adapters")
    lora_alpha: Factor = Field(default=8, description="the adapters' output is scaled by lora_alpha / r")
    lora_dropout: DropoutRate = Field(
        default=0.0, description="dropout of the adapters' input while training"
    )
    use_rslora: bool = Field(default=False, description="scale by lora_alpha / sqrt(r) instead")
    target_modules: Names = Field(
        default=ALL_LINEAR,
        description="layers with adapters: ends of Hugging Face's module names, a regular expression, or "
        "all-linear",
    )
    target_parameters: Annotated[tuple[str, ...], Strict(False)] | None = Field(
        default=None,
        description="stacks of experts with adapters, in every block: ends of transformers' parameter names, "
        "such as mlp.experts.gate_up_proj; target_modules = [] adapts nothing beside them",
    )
    exclude_modules: Names | None = Field(
        default=None, description="layers to leave out, named as in target_modules"
    )
    layers_to_transform: Block | Annotated[tuple[Block, ...], Strict(False)] | None = Field(
        default=None, description="numbers of the blocks that get adapters; default: all"
    )
    layers_pattern: Names | None = Field(
        default=None, description="the part of a module's name before the block's number"
    )
    rank_pattern: dict[str, Rank] = Field(
        default={}, description="ranks of single layers, by a pattern of their names"
    )
    alpha_pattern: dict[str, Factor] = Field(
        default={}, description="lora_alpha of single layers, by a pattern of their names"
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any], where: str = "adapter_config.json") -> Self:
        """Read the dict of an adapter_config.json. Raises ``BadInput`` for a key that is set and not
        supported.
        """
        for key, value, choices in (
            ("peft_type", raw.get("peft_type"), ("LORA",)),
            ("task_type", raw.get("task_type"), ("CAUSAL_LM", None)),
            ("bias", raw.get("bias", "none"), ("none",)),
            ("init_lora_weights", raw.get("init_lora_weights"), _PLAIN_STARTS),
        ):
            if value not in choices:
                expected = " or ".join(map(literal, choices))
                todo = "Nothing else is supported"
                raise BadInput(where, key, expected=expected, found=literal(value), todo=todo)
        read = {"peft_type", "task_type", "bias", "init_lora_weights"} | _INERT | set(cls.model_fields)
        for key in sorted(set(raw) - read):
            if raw[key] not in (None, False, "", [], {}):
                expected = "absent: it changes the adapter and is not supported"
                raise BadInput(where, key, expected=expected, found=literal(raw[key]))
        fields = {key: value for key, value in raw.items() if key in cls.model_fields and value is not None}
        if not fields.get("target_modules") and fields.get("target_parameters"):
            fields["target_modules"] = ()
        elif not fields.get("target_modules"):
            raise BadInput(where, "target_modules", expected="names of modules, or a pattern", found="none")
        if isinstance(fields["target_modules"], str):  # even all-linear, which peft spells out as it saves
            _check_no_blocks(where, fields)
        try:
            return cls(**fields)
        except ValidationError as error:
            raise from_validation(where, error) from None

    def to_peft(self) -> dict[str, Any]:
        """Return the fields as an adapter_config.json has them; whole numbers have no decimal point."""
        fields = self.model_dump(mode="json")
        fields["lora_alpha"] = _plain(self.lora_alpha)
        fields["alpha_pattern"] = {key: _plain(alpha) for key, alpha in self.alpha_pattern.items()}
        return fields

    def targets(self, module: str) -> bool:
        """Tell whether the linear layer of this Hugging Face name gets an adapter, as PEFT's
        ``check_target_module_exists``.
        """
        excluded = self.exclude_modules and _matches(self.exclude_modules, module)
        if excluded or not (self.all_linear or _matches(self.target_modules, module)):
            return False
        named_whole = isinstance(self.target_modules, tuple) and module in self.target_modules
        return named_whole or self._is_in_a_wanted_block(module)

    def targets_stack(self, parameter: str) -> bool:
        """Tell whether this stack of experts gets an adapter, as PEFT's ``_inject_parameters``."""
        return _matches(self.target_parameters or (), parameter)

    @property
    def all_linear(self) -> bool:
        """Tell whether ``target_modules`` is ``all-linear``."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR

    def rank_of(self, module: str) -> int:
        """Return the rank of the adapter on this module."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> float:
        """Return the alpha of the adapter on this module."""
        return _by_pattern(self.alpha_pattern, module, self.lora_alpha)

    def check_patterns(self, where: str) -> None:
        """Refuse a text that is not a regular expression, and options that PEFT refuses together with one."""
        if isinstance(self.target_modules, str) and not self.all_linear:
            _check_no_blocks(where, self.model_dump())
        if self.layers_pattern and self.layers_to_transform is None:
            expected = "layers_to_transform beside it: peft refuses it alone"
            raise BadInput(where, "layers_pattern", expected=expected, found=literal(self.layers_pattern))
        if self.target_parameters and self.lora_dropout:
            expected = "0 beside target_parameters, as in peft"
            raise BadInput(where, "lora_dropout", expected=expected, found=self.lora_dropout)
        for key in ("rank_pattern", "alpha_pattern", "layers_pattern", "target_modules", "exclude_modules"):
            patterns = getattr(self, key) or ()
            if isinstance(patterns, tuple) and key != "layers_pattern":
                continue  # names
            for pattern in (patterns,) if isinstance(patterns, str) else patterns:
                checked(pattern, where, key)

    def _is_in_a_wanted_block(self, module: str) -> bool:
        numbers, patterns = self.layers_to_transform, self.layers_pattern or ()
        if numbers is None or numbers == ():
            return True
        patterns = (patterns,) if isinstance(patterns, str) else patterns
        before = [rf"(?:^|.*?\.){pattern}" for pattern in patterns] or [r".*?\.[^.]*"]
        matches = (compiled(rf"{start}\.(?P<idx>\d+)\.").find("match", module) for start in before)
        first = next(filter(None, matches), None)
        blocks = (numbers,) if isinstance(numbers, int) else numbers
        return first is not None and int(first["idx"]) in blocks


def _check_no_blocks(where: str, fields: Mapping[str, Any]) -> None:
    for key in ("layers_to_transform", "layers_pattern"):
        if fields.get(key) is not None:
            expected = "absent: peft refuses it where target_modules is a string and no list"
            todo = "List the modules, or let the pattern say the blocks"
            raise BadInput(where, key, expected=expected, found=literal(fields[key]), todo=todo)


def _matches(names: Names, module: str) -> bool:
    if isinstance(names, str):
        return compiled(names).find("fullmatch", module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, _Number], module: str, otherwise: _Number) -> _Number:
    """Return the value of the first pattern that the name ends with, or ``otherwise``."""
    return next((value for pattern, value in patterns.items() if ends_with(module, pattern)), otherwise)


def ends_with(module: str, pattern: str) -> bool:
    """Tell whether a pattern of ``rank_pattern`` or ``alpha_pattern`` takes this module, as PEFT's do."""
    return compiled(rf"(.*\.)?({pattern})$").find("match", module) is not None


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number
