"""Read the request of a search: the model, the devices and the batch. The search chooses everything else."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...models import AdaptedFamily, Family, ModelConfig, family_of, published_size, published_sizes
from ...parallel_state import BadInput, require
from ...recipes.recipe import Recipe, load_recipe, parse_recipe, shipped_recipes
from ...simulation.model_flops import Parameters, parameters_of
from ...storage.file_names import CONFIG
from ...storage.small_files import read_json
from ...system import literal, nearest_names
from ..dry_run import plan_without_weights
from ..memory import runtime_of, usable
from ..time import Machine

#: Tokens of a step if nobody says how many rows: those of Llama 3 at first (Grattafiori et al. 2024, 3.4).
BATCH_TOKENS = 4 * 2**20
#: Rows of a step of LoRA if nobody says how many.
LORA_ROWS = 64
_LONGEST = 8192


@dataclass(frozen=True)
class Request:
    """State the model, the batch and the machine that a layout is searched for.

    ``recipe`` holds everything that the search does not change: model, data, data types. Its layout is that
    of one rank. ``room``: the bytes of a device that a rank may use. ``raw``: the recipe as plain data; the
    recipe of a found layout is written from it.
    """

    name: str
    recipe: Recipe
    raw: Mapping[str, Any]
    family: Family
    config: ModelConfig
    machine: Machine
    gpus: int
    room: int
    #: Tokens of the whole training, and the price of a GPU-hour, if the user states them.
    tokens: float | None = None
    price: float | None = None

    @property
    def base(self) -> Family:
        """Return the family of the model without adapters."""
        return self.family.base if isinstance(self.family, AdaptedFamily) else self.family

    @property
    def runtime(self) -> int:
        """Return the bytes of a device that no tensor has."""
        return runtime_of(self.recipe.device)

    @property
    def offloads(self) -> tuple[bool, ...]:
        """Return whether a host may hold weights, gradients and moments: not a CPU's, which is the device."""
        return (False,) if self.recipe.device == "cpu" else (False, True)

    @cached_property
    def parameters(self) -> Parameters:
        """Count the parameters of the whole model."""
        return parameters_of(self.family.build(self.config))

    @property
    def step_tokens(self) -> int:
        """Return the number of tokens of a step."""
        return self.recipe.data.global_batch * self.recipe.data.sequence_length


def read_request(
    model: str,
    machine: Machine,
    gpus: int | None,
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
    lora: int | None = None,
    headroom: float | None = None,
    tokens: float | None = None,
    price: float | None = None,
) -> Request:
    """Return the checked request for a model: a published size, a config.json, a Hugging Face folder, or a
    recipe.

    ``lora``: the rank of adapters, which are trained in place of the model. ``headroom``: share of a device's
    memory to leave free. ``price``: of a GPU-hour. A recipe's own batch, sequence length, headroom and number
    of ranks are the defaults. Raises ``BadInput`` for a model that cannot be read or trained so.
    """
    name, raw, ranks = _template(model)
    if gpus is None and ranks is None:
        raise BadInput("plan", "--gpus", expected="the number of GPUs", found="none")
    gpus = gpus or ranks or 1
    data = raw["data"]
    if not machine.asynchronous:  # a CPU that `trilith bench` measured
        raw = {key: value for key, value in raw.items() if key != "compute"} | {"device": "cpu"}
    if lora is not None:
        raw["lora"] = {"r": lora, "lora_alpha": 2 * lora, "target_modules": "all-linear"}
        raw["model"] = _as_base(raw["model"], name)
    if sequence_length is not None:
        data["sequence_length"] = sequence_length
    elif "sequence_length" not in data and data.get("module") is not None:
        data["sequence_length"] = 1  # as a recipe counts an item
    elif "sequence_length" not in data:
        data["sequence_length"] = min(_LONGEST, _positions(raw["model"]))
    if global_batch is not None:
        data["global_batch"] = global_batch
    elif "global_batch" not in data:
        data["global_batch"] = LORA_ROWS if lora else max(1, BATCH_TOKENS // data["sequence_length"])
    if tokens is not None:
        raw["steps"] = max(1, round(tokens / (data["global_batch"] * data["sequence_length"])))
    raw.setdefault("memory", {})["device_gb"] = machine.memory / 1e9
    if headroom is not None:
        raw["memory"]["headroom"] = headroom
    return replace(request_of(name, raw, machine, gpus), tokens=tokens, price=price)


def request_of(name: str, raw: dict[str, Any], machine: Machine, gpus: int) -> Request:
    """Return the request for a recipe as plain data, without what a search chooses."""
    recipe = parse_recipe(raw, f"plan {name}")
    todo = "Of these `trilith train RECIPE --dry-run` plans one layout at a time"
    check_searched(recipe, f"plan {name}", "MODEL", todo)
    machine.peak(recipe.compute_dtype)  # refuses a data type that it has no speed of
    planned, _ = plan_without_weights(recipe)
    room = usable(machine.memory, recipe.memory.headroom)
    return Request(name, recipe, raw, planned.family, planned.config, machine, gpus, room)


def check_searched(recipe: Recipe, where: str, key: str, todo: str) -> None:
    """Refuse a recipe with what the search does not plan."""
    groups = enumerate(recipe.optimizer.groups)
    frozen = [f"optimizer.groups[{number}].freeze" for number, group in groups if group.freeze]
    unplanned = ["compute = float8"] * (recipe.compute == "float8") + frozen
    expected = "a recipe without float8 and without frozen groups of parameters"
    require(not unplanned, where, key, expected, ", ".join(unplanned), todo)


def _template(model: str) -> tuple[str, dict[str, Any], int | None]:
    """Return the model's name, a recipe without its layout as plain data, and the ranks of a recipe."""
    path = Path(model)
    if path.suffix == ".toml" or model in shipped_recipes():
        recipe = load_recipe(model)
        raw = left_as_it_is(recipe) | {"device": "cuda"}
        return path.name.removesuffix(".toml"), raw, recipe.layout.world
    if path.is_dir():
        path = path / CONFIG
        if not path.is_file() and model.lower() not in published_sizes():
            raise BadInput("plan", model, expected=f"a {CONFIG} in this folder", found="none")
    if path.is_file():
        read_json(path)  # refuses what is none
        name = path.parent.resolve().name if path.name == CONFIG else path.stem
        return name, _from_scratch(name, {"config": str(path)}), None
    size = _size(model)
    return size, _from_scratch(size, {"size": size}), None


def left_as_it_is(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain data, without what a search chooses."""
    raw = recipe.model_dump(exclude_unset=True, by_alias=True)
    raw["layout"] = {}
    for section, *chosen in (
        ("memory", "checkpointing", "checkpoint_every", "offload"),
        ("data", "micro_batch"),
    ):
        raw[section] = {key: setting for key, setting in raw.get(section, {}).items() if key not in chosen}
    return raw


def _size(model: str) -> str:
    if model.lower() not in published_sizes():
        names = [*published_sizes(), *shipped_recipes()]
        listed = "`trilith models` lists the sizes"
        raise BadInput(
            "plan", "MODEL",
            expected="a published size, a config.json, a Hugging Face folder or a recipe",
            found=literal(model),
            todo=nearest_names(model.lower(), names, cutoff=0.4, also=listed),
        )  # fmt: skip
    return published_size(model).name


def _from_scratch(name: str, model: dict[str, Any]) -> dict[str, Any]:
    raw = {"out": f"runs/{name}", "steps": 1, "device": "cuda", "compute": "bfloat16"}
    return raw | {"model": model, "data": {"tokens": "tokens"}}


def _fields(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json's dict of the [model] section of a template."""
    if "size" in model:
        return published_size(model["size"]).with_fields(model.get("config", {}))
    config = model["config"]
    return dict(config) if isinstance(config, Mapping) else read_json(Path(config))


def _positions(model: Mapping[str, Any]) -> int:
    fields, where = _fields(model), model.get("config")
    # As the plan reads it again, so that Python prints a warning once.
    name = where if isinstance(where, str) else "config.json"
    return family_of(fields, name).from_hf(fields, name).max_position_embeddings


def _as_base(model: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the [model] section for adapters: they need weights, whose config a plan reads from here."""
    if "init_from" in model or "module" in model:
        return model
    config = model.get("config")
    folder = Path(config).parent if isinstance(config, str) and Path(config).name == CONFIG else None
    if folder is not None and any(folder.glob("*.safetensors*")):
        weights = str(folder)
    else:  # a name for the weights, which need not be here yet
        weights = f"{name}-weights" if Path(name).exists() else name
    return {"init_from": weights, "config": _fields(model)}
