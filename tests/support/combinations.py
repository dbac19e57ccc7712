"""Combine each pair of a run's choices in one covering array: families, axes, schedules, memory.

``tests/covering.py`` finds the array, which stands in ``array.json``, a run a line. Axes are of two ranks,
two axes at most, so that a run has four ranks; one axis of four has a list of its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from trilith.pipeline import SCHEDULE_NAMES, schedule_kind
from trilith.recipes.sections import LayoutSection, MemorySection

from support.configs import EXPERTS, MODELS
from support.short_training import Case

ARRAY = Path(__file__).parent / "array.json"
# The array has one of several families with the same blocks and layers; test_families has every family.
FAMILIES = (
    *("llama", "llama-tied-kv1", "gpt2", "mistral", "gemma2", "mixtral", "glm4_moe"),
    *("deepseek_v3", "qwen3_next", "granitemoehybrid"),
)


#: What may be trained instead of all: adapters, or what a pattern does not freeze. Blocks count from 0.
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "lora of attention": {"target_modules": ["q_proj", "v_proj"]},
    "lora of feed-forward": {"target_modules": ["down_proj"]},
    "lora of last blocks": {"target_modules": "all-linear", "layers_to_transform": [2, 3]},
    "lora of experts": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
}
FROZEN = {
    "frozen": r"^(?!.*(layers|h)\.2\.)",  # all but one block
    "all but the embedding": "embed|wte|wpe",
    "all but the first blocks": r"embed|wte|wpe|(layers|h)\.[01]\.",
    "all but the first block": r"embed|wte|wpe|(layers|h)\.0\.",
    "norms of one block": r"^(?!.*layers\.2\..*norm)",
    "the bias of one product": r"^(?!.*layers\.1\.mlp\.down(_proj)?\.bias)",
    "the output layer": "^(?!.*head)",
    "the last norm": r"^(?!(model\.)?norm\.)",
    "the embedding": "^(?!.*(embed|wte))",
}
_DENSE = {"llama", "llama-tied-kv1", "mistral", "gemma2"}
#: The families of the array in which a part is; the others are parts of every one.
HAVE = {
    "lora of attention": _DENSE | {"mixtral", "glm4_moe"},
    "lora of feed-forward": _DENSE,
    "lora of experts": {"mixtral", "glm4_moe", "qwen3_next"},
    "norms of one block": {*FAMILIES} - {"gpt2"},
    "the bias of one product": {"llama", "llama-tied-kv1"},
    "the output layer": {"llama", "mistral", "mixtral", "glm4_moe", "deepseek_v3", "qwen3_next"},
    "the last norm": {*FAMILIES} - {"gpt2"},
}


@dataclass(frozen=True)
class Choice:
    """Describe one run. The defaults are those of a run that chooses nothing."""

    model: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    replicas: int = 1
    expert: int = 1
    zero: int = 0
    sequence: bool = False
    ring: bool = False
    schedule: str = "1f1b"
    split: bool = False  # stages cut by hand
    micro_batch: int = 1
    smoothing: float = 0.0
    documents: bool = False  # several a row
    trains: str = "all"  # or a part, see PARTS
    checkpointing: str = "none"
    loss_chunk: int = 0
    offload: bool = False

    @property
    def kind(self) -> str:
        """Return of which kind the training is: of all, of what is not frozen, or of adapters."""
        return "lora" if self.trains in ADAPTERS else "frozen" if self.trains in FROZEN else "all"

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def stages(self) -> int:
        return self.pipeline * (schedule_kind(self.schedule).virtual_stages if self.pipeline > 1 else 1)

    @property
    def blocks(self) -> int:
        """Return how many blocks the model has here: three if each stage can have one, or else all."""
        return min(3, blocks(self.model)) if self.stages < 3 else blocks(self.model)

    @property
    def config(self) -> dict[str, Any]:
        """Return the model's config.json as a dict."""
        return MODELS[self.model] | {_key(self.model): self.blocks}

    @property
    def samples(self) -> int:
        """Return the rows of a step: two micro-batches a data rank, or as many as the schedule needs."""
        return (
            self.data
            * self.micro_batch
            * max(2, schedule_kind(self.schedule).least_micro_batches(self.pipeline))
        )

    @property
    def section(self) -> dict[str, Any]:
        """Return the recipe's section ``layout``."""
        section: dict[str, Any] = {
            key: getattr(self, key) for key in ("tensor", "pipeline", "data", "context")
        }
        section |= {"data_replicate": self.replicas, "expert": self.expert, "zero": self.zero}
        section |= {"sequence": self.sequence, "ring": self.ring}
        if self.pipeline > 1:
            section["schedule"] = self.schedule
        if self.split:
            rest = self.blocks - self.stages + 1
            section["split"] = [1, rest] if self.stages == 2 else [1, rest, *[1] * (self.stages - 2)]
        return section

    @property
    def memory(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("checkpointing", "loss_chunk", "offload")}

    @property
    def case(self) -> Case:
        """Return what to train."""
        section = LayoutSection.model_validate(self.section)
        return Case(
            self.config,
            section.layout,
            split=None if section.split is None else tuple(section.split),
            schedule=self.schedule,
            micro_batch=self.micro_batch,
            samples=self.samples,
            label_smoothing=self.smoothing,
            z_loss=self.smoothing / 10,
            documents=self.documents,
            clip=0.05 if self.trains == "all" else 1e-3 if self.trains == self.kind else 1e-5,
            frozen=FROZEN.get(self.trains),
            lora={"r": 3} | ADAPTERS[self.trains] if self.trains in ADAPTERS else None,
            memory=MemorySection.model_validate(self.memory),
        )

    def __str__(self) -> str:
        chosen = {key: value for key, value in asdict(self).items() if value != getattr(Choice, key, None)}
        words = (f"{value}" if key == "model" else f"{key}={value}" for key, value in chosen.items())
        return "-".join(words).replace(" ", "_")


def blocks(model: str) -> int:
    return int(MODELS[model][_key(model)])


def _key(model: str) -> str:
    return "num_hidden_layers" if "num_hidden_layers" in MODELS[model] else "n_layer"


def draw(random: Random) -> Choice:
    """Draw a choice that a recipe may make, and of which each value changes the run."""
    pick, model = random.choice, random.choice(FAMILIES)
    two = random.sample(("tensor", "pipeline", "data", "context"), random.choice((1, 2, 2)))
    sizes: dict[str, Any] = {axis: 2 for axis in two}
    data, context = sizes.get("data", 1), sizes.get("context", 1)
    more: dict[str, Any] = {}
    if "pipeline" in sizes:
        kinds = [name for name in SCHEDULE_NAMES if 2 * schedule_kind(name).virtual_stages <= blocks(model)]
        more |= {"schedule": pick(kinds), "split": pick((False, True))}
    if data * context > 1:
        more["zero"] = pick((0, 1, 2, 3))
        more["replicas"] = pick((1, 2)) if data > 1 and more["zero"] else 1
        if model in EXPERTS:
            shards = data * context // more["replicas"]
            more["expert"] = pick([size for size in (1, 2, 4) if shards % size == 0])
    schedule = more.get("schedule", "1f1b")
    if not schedule_kind(schedule).two_backwards:
        more["checkpointing"] = pick(("none", "selective", "every", "full"))
        more["loss_chunk"] = 0 if schedule == "gpipe" else pick((0, 5))
    return Choice(
        model,
        **sizes,
        **more,
        sequence="tensor" in sizes and pick((False, True)),
        ring="context" in sizes and pick((False, True)),
        micro_batch=pick((1, 2)),
        smoothing=pick((0.0, 0.1)),
        documents=pick((False, True)),
        trains=pick(("all", "frozen", "lora")),
        offload=pick((False, True)),
    )


def pairs(choice: Choice) -> frozenset[tuple[object, ...]]:
    """Return every two of the choice's values, each with its name; of training its kind counts."""
    return frozenset(combinations((vars(choice) | {"trains": choice.kind}).items(), 2))


@cache
def covering_array() -> tuple[Choice, ...]:
    """Return the array that ``tests/covering.py`` has found; the tests of the array see what it lacks."""
    rows = json.loads(ARRAY.read_text())
    return tuple(Choice(**row) for row in rows)


def cuts(choice: Choice) -> set[object]:
    """Return of what may change what a part's training sends: how the model is cut and computed again."""
    found = {key for key in ("tensor", "pipeline", "context", "data") if getattr(choice, key) > 1}
    return {*found, f"zero{choice.zero}", choice.checkpointing, choice.sequence, choice.expert > 1}


#: One axis of four ranks; and one device, where micro-batches alone differ.
LONG = (
    Choice("gpt2"),
    Choice("llama-kv1", tensor=4, sequence=True),
    Choice("llama-tied", pipeline=4, documents=True),
    Choice("mixtral", data=4, zero=3, expert=4),
    Choice("llama", data=4, zero=2, replicas=2, trains="lora"),
    Choice("qwen2", context=4, ring=True, checkpointing="full", loss_chunk=5, smoothing=0.1),
    Choice("mistral", context=4, checkpointing="selective", documents=True),
)
