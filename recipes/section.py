"""Define what every section of a recipe shares, and the sections about the update: the optimizer, its groups,
spikes, the loss's scale.
"""

from collections.abc import Callable
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from ..models.base.keys import MOST_BLOCKS
from ..system import nearest_names
from ..system.addresses import address_of

#: No whole number of a recipe may be larger: up to here a float and any reader of JSON hold it exactly.
LARGEST = 2**53

#: More ranks on one axis, stages of a pipeline rank, rows of a step and batches made ahead are a slip of the
#: keyboard: they would be counted out one by one.
MOST_RANKS, MOST_STAGES, MOST_ROWS, MOST_AHEAD = 2**20, 2**10, 2**24, 2**10
#: Seconds that anything may be waited for: 48 days.
LONGEST_WAIT = 2**22


def _text(form: str, is_legal: Callable[[str], bool]) -> AfterValidator:
    """Return what refuses every other text; ``form`` says which is legal."""

    def check(text: str) -> str:
        if not is_legal(text):
            raise PydanticCustomError("form", f"Input should be {form}")
        return text

    return AfterValidator(check)


def _names_code(text: str) -> bool:
    file, _, name = text.rpartition(":")
    return file.endswith(".py") and name.isidentifier() and "\0" not in text


# Empty text would be the working directory, and an address would become a folder of that name.
_PATH = _text("a path, not empty and without a NUL character", lambda text: bool(text) and "\0" not in text)
_LOCAL = _text(
    "a path of this machine, not an address (checkpoint.mirror may be one)",
    lambda text: address_of(text) is None,
)
_WHOLE = _text(
    "a whole address, such as s3://bucket/folder", lambda text: not (address_of(text) or "").endswith("://")
)

PathText = Annotated[str, _PATH, _LOCAL]
#: What is read may also be at an address, such as ``s3://bucket/run``; checkpoints are copied to one.
PathOrAddress = Annotated[str, _PATH, _WHOLE]
#: Something in a Python file of the user's own, which is run.
CodeName = Annotated[str, _text("file.py:Name, such as my_model.py:MyModel", _names_code), _LOCAL]
_Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[_Beta, _Beta], Strict(False)]  # from a list
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Blocks = Annotated[int, Field(ge=0, le=MOST_BLOCKS)]
Stages = Annotated[int, Field(ge=1, le=MOST_STAGES)]
Wait = Annotated[float, Field(gt=0, le=LONGEST_WAIT)]
Step = Annotated[int, Field(ge=1)]
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)]


class Section(BaseModel):
    """Unknown keys, NaN and infinity are refused, and so is ``true``, ``"3"`` or ``3.0`` for the whole number
    3; a section never changes.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # a key's help stands below it
    )

    @field_validator("*")
    @classmethod
    def _not_too_large(cls, value: object) -> object:
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int) and number > LARGEST:
                raise PydanticCustomError("too_large", f"Input should be at most {LARGEST}")
        return value


class ParameterGroup(Section):
    """Set options for the parameters whose name matches; the first group that matches applies."""

    match: str = Field(min_length=1)
    """regular expression to search for in a parameter's Hugging Face name and in its name here"""
    lr_scale: float = Field(default=1.0, ge=0)
    """factor of the learning rate of these parameters"""
    weight_decay: float | None = Field(default=None, ge=0)
    """weight decay of these parameters, vectors included; default: optimizer.weight_decay, for matrices
    only"""
    freeze: bool = False
    """leave these parameters as they are: no gradient, no moments"""


class SpikeSection(Section):
    """Skip steps whose loss or gradient norm is far above that of recent steps."""

    deviations: float = Field(default=6.0, gt=0)
    """number of standard deviations above the mean of recent steps from which a step is skipped"""
    window: int = Field(default=128, ge=4, le=2**20)
    """number of recent steps to compare with; nothing is skipped before half of them were taken"""


class LossScaleSection(Section):
    """Set the factor of the loss under float16, against underflow; all factors are powers of two."""

    initial: float = Field(default=2.0**16, gt=0, le=2.0**64)
    """factor at the first step"""
    growth_interval: int = Field(default=2000, ge=0)
    """number of steps without overflow after which the factor doubles; 0: never"""
    minimum: float = Field(default=1.0, gt=0)
    """smallest factor; an overflow at this factor stops the run"""
    maximum: float = Field(default=2.0**24, gt=0, le=2.0**64)
    """largest factor"""


class OptimizerSection(Section):
    """Set AdamW and its learning-rate schedule."""

    lr: float = Field(default=3e-4, gt=0)
    """peak learning rate"""
    betas: Betas = (0.9, 0.95)
    """AdamW's beta 1 and beta 2"""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon"""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW's weight decay of matrices; biases and norms have none"""
    clip: float = Field(default=1.0, ge=0)
    """largest global gradient norm; larger ones are scaled to it; 0 or "none": no clipping"""
    schedule: Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"] = "cosine"
    """shape of the learning-rate schedule after the warm-up"""
    warmup: int = Field(default=0, ge=0)
    """number of steps in which the learning rate rises linearly to lr"""
    minimum_ratio: float = Field(default=0.1, ge=0, le=1)
    """last learning rate as a share of lr; not used by constant"""
    decay: int | None = Field(default=None, ge=1)
    """number of steps of the wsd schedule's final decay; default: a tenth of the run"""
    decay_shape: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    """shape of the wsd schedule's final decay"""
    scale_lr: Literal["sqrt", "linear"] | None = None
    """how lr grows with data.global_batch / reference_batch; default: it does not"""
    reference_batch: int | None = Field(default=None, ge=1)
    """global batch size for which lr was tuned"""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """label smoothing: share of the target that is spread over the vocabulary"""
    z_loss: float = Field(default=0.0, ge=0)
    """factor of the squared log-sum-exp of a token's logits, which is added to its loss and keeps the logits
    small; PaLM: 1e-4"""
    groups: tuple[ParameterGroup, ...] = Field(default=(), strict=False)
    """groups of parameters with another learning rate or weight decay, or frozen"""
    skip_spikes: SpikeSection | None = None
    """skip steps whose loss or gradient norm leaps; {} for the defaults"""

    @field_validator("clip", mode="before")
    @classmethod
    def _none_is_zero(cls, value: object) -> object:
        return 0.0 if value == "none" else value


#: Keys as other trainers write them, and how they are written here.
COMMON_NAMES = {
    "learning_rate": "lr",
    "batch_size": "global_batch",
    "max_steps": "steps",
    "seq_length": "sequence_length",
}


def nearest_key(model: type[BaseModel], error: ValidationError) -> str:
    """Return what to do about an unknown key of ``model``: where other sections have this key, or the known
    keys of its section nearest to it, or else all keys of its section.
    """
    *sections, key = (str(part) for part in error.errors(include_url=False)[0]["loc"])
    section = model
    for name in sections:
        section = sections_of(section).get(name) or section
    elsewhere = [
        f"{name}.{key}"
        for name, kind in sections_of(model).items()
        if kind is not None and key in sections_of(kind)
    ]
    if (common_name := COMMON_NAMES.get(key)) and common_name in sections_of(section):
        return f"Nearest: {'.'.join([*sections, common_name])}"
    if elsewhere:
        return f"Nearest: {', '.join(elsewhere)}"
    all_keys = f"The keys of {'.'.join(sections)}: {', '.join(sections_of(section))}" if sections else ""
    prefix = "".join(f"{name}." for name in sections)
    return nearest_names(key, sections_of(section), prefix=prefix) or all_keys


def sections_of(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Return the keys of a section as users write them, each with its own section if it is one."""
    keys: dict[str, type[BaseModel] | None] = {}
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        sections = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
        keys[field.alias or name] = next(sections, None)
    return keys
