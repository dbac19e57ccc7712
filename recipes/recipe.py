"""Read a run from one TOML file: model, layout, data, optimizer, checkpoints; with overrides."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator

from ..layers import PinnedBackend, Scaling
from ..models import family_of, implemented_by, published_size
from ..models.base.keys import DENIED, check_keys
from ..models.zoo import predicting
from ..parallel_state import TIMEOUT, BadInput, Layout, dtype_name, from_validation, require
from ..runs.requests import GRACE
from ..storage.small_files import parse_toml, read_json, read_toml
from ..storage.strict_json import DEEPEST
from ..system import literal, nearest_names
from . import sections
from .checks import check_recipe, compile_rules
from .section import LossScaleSection, OptimizerSection, PathText, Section, Wait, nearest_key

#: The recipes that come with trilith lie beside this file.
_SHIPPED = Path(__file__).parent


class Recipe(Section):
    """Describe one run: everything that a training run needs to know."""

    out: PathText
    """the run's folder: checkpoints, metrics.jsonl, status"""
    steps: int = Field(ge=1)
    """number of optimizer steps of the whole run"""
    stop_after: int | None = Field(default=None, ge=1)
    """stop after this step; the learning-rate schedule still spans `steps`"""
    seed: int = Field(default=0, ge=0)
    """seed of the initial weights, of dropout and of the data order"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device that each rank computes on; auto: a GPU of its own where the machine has GPUs, else the CPU;
    the run prints the choice"""
    deterministic: bool = False
    """use only algorithms that give the same bits on every run, on CUDA too; slower"""
    compile: bool | Literal["auto"] = "auto"
    """compile the blocks with torch.compile; auto: on a GPU, where nothing in the recipe forbids it; a CPU
    needs a C++ compiler"""
    attention_backend: PinnedBackend = "auto"
    """backend that computes attention; auto: for each layer the first one in the table of docs/attention.md
    that can compute it; the run prints the choice"""
    grace: Wait = GRACE
    """seconds within which the run saves and exits after SIGTERM or Ctrl-C"""
    timeout: Wait = TIMEOUT.total_seconds()
    """seconds to wait for a silent rank before it counts as failed"""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """data type of the weights and of the optimizer's moments"""
    compute: Literal["float32", "float64", "bfloat16", "float16", "float8"] | None = None
    """data type of forward and backward; bfloat16 or float16 with float32 weights is mixed precision; float8:
    bfloat16, and the blocks' linear layers multiply in float8; default: dtype"""
    float8_scaling: Scaling | None = None
    """for compute = float8: numbers that share a scale: those of a whole tensor (faster), or of one row or
    column of a factor (finer); default: tensorwise"""
    reduce: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    """data type in which gradients are summed over ranks and micro-batches; default: dtype"""
    loss_scale: LossScaleSection = LossScaleSection()
    """loss scaling, for compute = float16"""
    log_every: int = Field(default=10, ge=1)
    """steps between progress lines on the terminal"""
    model: sections.ModelSection
    """the model: pretrained weights, a config to start from scratch, or a module of your own"""
    loss: sections.LossSection | None = None
    """the loss of a module of your own"""
    lora: sections.LoraSection | None = None
    """LoRA: train adapters and leave the model as it is"""
    layout_section: sections.LayoutSection = Field(default=sections.LayoutSection(), alias="layout")
    """number of ranks along each parallel axis"""
    data: sections.DataSection
    """the token files or samples of your own, and the size of rows and batches"""
    optimizer: OptimizerSection = OptimizerSection()
    """AdamW and its learning-rate schedule"""
    experts: sections.ExpertsSection | None = None
    """load balancing of mixture-of-experts models"""
    memory: sections.MemorySection = sections.MemorySection()
    """trade time for memory"""
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    """when and how checkpoints are saved"""
    evaluation: sections.EvaluationSection | None = None
    """evaluation of the loss on held-out tokens"""
    watch: sections.WatchSection = sections.WatchSection()
    """further measurements to write while training"""
    debug: sections.DebugSection = sections.DebugSection()
    """extra checks while training; they slow the run"""

    @field_validator("dtype", "compute", "reduce", mode="before")
    @classmethod
    def _spelled_out(cls, value: object) -> object:
        return dtype_name(value) if isinstance(value, str) else value

    @property
    def layout(self) -> Layout:
        """Return the number of ranks along each axis."""
        return self.layout_section.layout

    @property
    def compute_dtype(self) -> str:
        """Return the data type of activations and gathered weights; that of float8's linears is bfloat16."""
        return "bfloat16" if self.compute == "float8" else self.compute or self.dtype

    @property
    def scaling(self) -> Scaling | None:
        """Return the scaling of linears that multiply in float8, if they do."""
        return (self.float8_scaling or "tensorwise") if self.compute == "float8" else None

    @property
    def compiles(self) -> bool:
        """Return whether the blocks are compiled."""
        return self.compile is True or (self.compile == "auto" and self.not_compiled is None)

    @property
    def not_compiled(self) -> str | None:
        """Return why ``compile = "auto"`` does not compile, or ``None`` if it does."""
        if self.device == "cpu":
            return 'device = "cpu"'
        rules = compile_rules(self, self.memory, self.layout, self.layout_section.schedule)
        return next((f"{rule.key} = {rule.actual}" for rule in rules if rule.broken), None)

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits that differ between recipes that say different things."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def on(self, device: str) -> Self:
        """Return the recipe with another ``device``, such as the one that ``auto`` is here."""
        return self.model_copy(update={"device": device})


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply ``section.key=value`` overrides, whose values are TOML (bare words are
    strings).

    A name that is not a file may be that of a recipe in ``shipped_recipes``. Paths in the recipe are relative
    to the working directory. Raises ``BadInput`` with the key, the value expected and the value found.
    """
    path = recipe_file(path)
    return parse_recipe(_changed(read_toml(path), overrides), str(path))


def parse_recipe(raw: dict[str, Any], where: str = "recipe") -> Recipe:
    """Return the checked recipe of plain data; raise ``BadInput`` with the key, the value expected and
    found.
    """
    check_keys(raw, where)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        raise from_validation(where, error, todo=nearest_key(Recipe, error)) from None
    check_recipe(recipe, where)
    return recipe


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return the recipe with ``section.key=value`` changes, checked again."""
    # A key that is given may mean something else than the same value by default.
    return parse_recipe(_changed(recipe.model_dump(exclude_unset=True, by_alias=True), overrides))


def _changed(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        key, equals, text = override.partition("=")
        require(equals and key, "override", override, "key=value, such as data.global_batch=64")
        set_key(raw, key, _value(text.strip(), key))
    return raw


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a key, dotted as in ``section.key``, in a recipe's plain data; make the sections that it lacks."""
    *names, last = key.strip().split(".")
    require(len(names) < DEEPEST, "override", f"{key[:40]}…", f"at most {DEEPEST} levels", "more")
    section = raw
    for name in names:
        section = section.setdefault(name, {})
        require(isinstance(section, dict), "override", key, "a section", f"{name}={literal(section)}")
    section[last] = value


def _value(text: str, key: str) -> Any:
    try:
        values = parse_toml(f"v = {text}", "override")
    except BadInput:
        return text
    require(len(values) <= 1, "override", key, "one key's value", f"{len(values)} keys")
    return values["v"]


def read_config(section: sections.ModelSection) -> dict[str, Any]:
    """Return the config.json's dict of a model that starts from scratch; refuse a key, written in the recipe,
    that the family does not know.
    """
    if isinstance(section.config, str):
        fields = read_json(Path(section.config))
    else:
        fields = dict(section.config or {})
        if section.size is not None:
            fields = published_size(section.size).with_fields(fields)
    fields = implemented_by(fields, section.implementation)
    where = section.config if isinstance(section.config, str) else "recipe: model.config"
    if not isinstance(section.config, str):
        family = family_of(fields, where)
        # In a config.json such a key gives a warning, since other programs write some; here it is a mistake.
        for key in family.config.unknown_keys(fields):
            if key not in DENIED:  # which is legal where it is off
                todo = nearest_names(key, map(family.config.spelled, family.config.model_fields))
                expected = f"a key that {family.model_type} reads"
                raise BadInput(where, key[:80], expected=expected, found="an unknown key", todo=todo)
    return fields if section.mtp is None else predicting(fields, where)


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with trilith, such as ``llama-3.1-8b-8gpus``."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def recipe_file(name: str | Path) -> Path:
    """Return the file at this path, or the shipped recipe of this name; else ``BadInput`` lists them."""
    path = Path(name)
    todo = f'A recipe trains the model in it: model = {{ init_from = "{name}" }}'
    require(not path.is_dir(), path, None, "a recipe, a TOML file", "a folder", todo)
    if path.exists() or path.suffix == ".toml" or len(path.parts) != 1:
        return path
    if path.name not in (names := shipped_recipes()):
        todo = f"These come with trilith: {', '.join(names)}"
        raise BadInput(path, expected="a recipe in TOML, or the name of one", found="neither", todo=todo)
    return _SHIPPED / f"{path.name}.toml"
