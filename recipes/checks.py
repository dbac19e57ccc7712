"""State the rules about several keys of a recipe, in the order in which they are checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ..layers import routers
from ..models import Family, ModelConfig, published_size
from ..parallel_state import BadInput, Layout, nearest_multiples, require
from ..pipeline import check_recomputation, check_schedule, schedule_kind
from ..system import counted
from .section import OptimizerSection
from .sections import DataSection, EvaluationSection, ExpertsSection, MemorySection

if TYPE_CHECKING:
    from .recipe import Recipe


class Rule(NamedTuple):
    """Refuse ``key``, which has the value ``actual``, if ``broken``."""

    broken: bool
    key: str
    expected: str
    actual: object
    todo: str = ""


def check_rules(rules: Iterable[Rule], where: str) -> None:
    """Raise ``BadInput`` for the first rule that is broken."""
    for rule in rules:
        require(not rule.broken, where, rule.key, rule.expected, rule.actual, rule.todo)


def check_recipe(recipe: Recipe, where: str) -> None:
    """Refuse numbers that do not fit each other, before anything is read or started."""
    first = chain(_model(recipe, where), _data(recipe), _own_model(recipe))
    check_rules(chain(first, _optimizer(recipe.optimizer, recipe.steps), _precision(recipe)), where)
    layout, name = recipe.layout, recipe.layout_section.schedule
    check_rules(chain(float8_rules(recipe, layout, name), _idle(recipe)), where)
    check_schedule(name, layout, check_batch(recipe.data, layout, where), where)
    check_memory_of_pipeline(recipe.memory, layout, name, where)
    check_rules(_ranks(recipe, layout), where)
    of_tokens = recipe.data.module is None or "sequence_length" in recipe.data.model_fields_set
    if of_tokens or layout.context > 1:
        layout.check_length(recipe.data.sequence_length, where, "data.sequence_length")


def _model(recipe: Recipe, where: str) -> Iterator[Rule]:
    """Yield the rules by which a recipe names exactly one model."""
    model = recipe.model
    size, config = model.size, model.config
    missing = size is None and model.init_from is None and config is None and model.module is None
    yield Rule(missing, "model", "init_from, config, size or module", "none of them")
    if size is not None:
        published_size(size, f"{where}: model.size")
        todo = "Leave size out: the weights have a config of their own"
        yield Rule(model.init_from is not None, "model.size", "no init_from beside it", size, todo)
        todo = "Fields in [model.config] replace those of the size"
        yield Rule(isinstance(config, str), "model.size", "no path in model.config beside it", size, todo)


def _data(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules by which a recipe names its data, token files or data sets of the user's own."""
    sections: dict[str, DataSection | EvaluationSection] = {"data": recipe.data}
    if recipe.evaluation is not None:
        sections["evaluation"] = recipe.evaluation
    for name, section in sections.items():
        both = section.tokens is not None and section.module is not None
        neither = section.tokens is None and section.module is None
        yield Rule(neither, f"{name}.tokens", "a token file, or data sets of your own in module", "neither")
        yield Rule(both, f"{name}.module", "none beside tokens", section.module)
        idle = bool(section.arguments) and section.module is None
        yield Rule(idle, f"{name}.arguments", f"{name}.module beside it", "none")
        count = len(section.module) if isinstance(section.module, list) else 1
        several = isinstance(section.arguments, list)
        expected = f"a table, or a list of {count}, one a data set"
        uneven = several and len(section.arguments) != count
        yield Rule(uneven, f"{name}.arguments", expected, f"a list of {len(section.arguments)}")
    rows, keys = recipe.data, recipe.data.model_fields_set
    names = rows.module or rows.tokens
    sources, weights = len(names) if isinstance(names, list) else 1, rows.weights
    expected = f"{counted(sources, 'number')}, one for each source, each above 0"
    uneven = weights is not None and (len(weights) != sources or min(weights) <= 0)
    yield Rule(uneven, "data.weights", expected, weights)
    unstated = rows.tokens is not None and "sequence_length" not in keys
    yield Rule(unstated, "data.sequence_length", "the number of tokens in a row", "none")
    for key in ("documents", "samples", "overlong"):
        idle = rows.module is not None and key in keys
        yield Rule(idle, f"data.{key}", "absent with data.module, whose items are rows", getattr(rows, key))
    if recipe.evaluation is not None:
        other = (recipe.evaluation.module is None) != (rows.module is None)
        expected = "module, as in [data]" if rows.module is not None else "tokens, as in [data]"
        yield Rule(other, "evaluation", expected, "the other")


def _own_model(recipe: Recipe) -> Iterator[Rule]:
    """Yield what only a module of the user's own has, and what it cannot have."""
    model, own = recipe.model, recipe.model.module is not None
    expected = "model.module, a model of your own, beside it"
    yield Rule(bool(model.arguments) and not own, "model.arguments", expected, "none")
    yield Rule(recipe.loss is not None and not own, "loss", expected, "none")
    yield Rule(recipe.data.module is not None and not own, "data.module", expected, "none")
    if not own:
        return
    todo = 'module = "my_loss.py:MyLoss" in [loss], or the function that your own loop would give Step'
    yield Rule(recipe.loss is None, "loss", "the loss of model.module", "none", todo)
    optimizer, absent = recipe.optimizer, "absent beside model.module"
    for key in ("config", "size", "mtp"):
        setting = getattr(model, key)
        yield Rule(setting is not None, f"model.{key}", absent, setting)
    expected, chosen = absent.replace("absent", "auto"), model.implementation
    yield Rule(chosen != "auto", "model.implementation", expected, chosen)
    yield Rule(recipe.lora is not None, "lora", f"{absent}, whose code may attach adapters", "one")
    for key in ("label_smoothing", "z_loss"):
        factor = getattr(optimizer, key)
        yield Rule(factor > 0, f"optimizer.{key}", f"0: {_LOSS}", factor)
    chunk = recipe.memory.loss_chunk
    yield Rule(chunk not in ("auto", 0), "memory.loss_chunk", f"auto or 0: {_LOSS}", chunk)
    norms = recipe.watch.activation_norms
    yield Rule(norms, "watch.activation_norms", f"false {absent}".replace("absent ", ""), norms)


#: Why a key of the loss of the next token does nothing.
_LOSS = "a module's loss is its own"


def _optimizer(section: OptimizerSection, steps: int) -> Iterator[Rule]:
    """Yield the rules by which a schedule fits the run, and ``scale_lr`` has its ``reference_batch``."""
    expected = 'schedule = "wsd", the only one with a last phase'
    wsd, schedule = section.schedule == "wsd", f'schedule = "{section.schedule}"'
    yield Rule(section.decay is not None and not wsd, "optimizer.decay", expected, schedule)
    decay, room = decay_steps(section, steps), steps - section.warmup
    expected = f"at most the {counted(max(0, room), 'step')} after the warm-up"
    actual = f"{decay}, a tenth of the run" if section.decay is None else decay
    todo = f"Raise steps = {steps} or lower optimizer.warmup = {section.warmup}"
    yield Rule(wsd and decay > room, "optimizer.decay", expected, actual, todo)
    half = (section.scale_lr is None) != (section.reference_batch is None)
    pair = f"scale_lr = {section.scale_lr}, reference_batch = {section.reference_batch}"
    yield Rule(half, "optimizer.scale_lr", "scale_lr and reference_batch together, or neither", pair)


def decay_steps(section: OptimizerSection, steps: int) -> int:
    """Return the length of wsd's last phase: a tenth of the run, unless the recipe says it."""
    return max(1, steps // 10) if section.decay is None else section.decay


def _precision(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules of ``checkpoint.restore``, of the weights' dtype under float16, and of loss scales."""
    saving, scale, dtype = recipe.checkpoint, recipe.loss_scale, recipe.dtype
    nowhere = saving.restore and saving.mirror is None
    yield Rule(nowhere, "checkpoint.restore", "checkpoint.mirror, the place to restore from", "none")
    narrow = recipe.compute == "float16" and dtype == "bfloat16"
    yield Rule(narrow, "dtype", "float32 with compute = float16", dtype)
    for key in ("initial", "minimum", "maximum"):
        value = getattr(scale, key)
        yield Rule(math.frexp(value)[0] != 0.5, f"loss_scale.{key}", "a power of two", value)
    outside = not scale.minimum <= scale.initial <= scale.maximum
    expected = f"between minimum={scale.minimum:g} and maximum={scale.maximum:g}"
    yield Rule(outside, "loss_scale.initial", expected, scale.initial)


def check_batch(data: DataSection, layout: Layout, where: str) -> int:
    """Return the number of micro-batches of a rank in a step; refuse unequal ones."""
    unit, rows = layout.data * data.micro_batch, data.global_batch
    expected = f"a multiple of data={layout.data} x micro_batch={data.micro_batch}"
    if rows % unit:
        todo = nearest_multiples("data.global_batch", unit, rows)
        raise BadInput(where, "data.global_batch", expected=expected, found=rows, todo=todo)
    return rows // unit


def float8_rules(recipe: Recipe, layout: Layout, schedule: str) -> Iterator[Rule]:
    """Yield what float8 cannot be combined with, in this layout, and a scaling without float8."""
    float8, expected = recipe.compute == "float8", 'compute = "float8" beside it'
    idle = recipe.float8_scaling is not None and not float8
    yield Rule(idle, "float8_scaling", expected, f"compute = {recipe.compute}")
    wide = float8 and recipe.dtype == "float64"
    yield Rule(wide, "dtype", "float32 or bfloat16 with compute = float8", recipe.dtype)
    expected = "gpipe, 1f1b or interleaved with compute = float8"
    todo = "Its backward comes in two parts, and each would compute all products of both"
    halves = layout.pipeline > 1 and schedule_kind(schedule).two_backwards
    yield Rule(float8 and halves, "layout.schedule", expected, schedule, todo)


def _idle(recipe: Recipe) -> Iterator[Rule]:
    """Yield keys that do nothing because another is not set."""
    memory, debug, watch = recipe.memory, recipe.debug, recipe.watch
    expected, mode = 'checkpointing = "every" beside it', f'checkpointing = "{memory.checkpointing}"'
    idle = memory.checkpoint_every is not None and memory.checkpointing != "every"
    yield Rule(idle, "memory.checkpoint_every", expected, mode)
    idle = debug.every is not None and not debug.collectives
    yield Rule(idle, "debug.every", "collectives = true beside it", "collectives = false")
    expected = "watch.norms, the steps between norms, beside it"
    idle = watch.activation_norms and not watch.norms
    yield Rule(idle, "watch.activation_norms", expected, "watch.norms = 0")
    expected, todo = "compute = float16 beside it", "Drop it (loss_scale={})"
    for key, field in type(scale := recipe.loss_scale).model_fields.items():
        idle = recipe.compute_dtype != "float16" and getattr(scale, key) != field.default
        yield Rule(idle, f"loss_scale.{key}", expected, recipe.compute_dtype, todo)


def without_effect(recipe: Recipe) -> list[str]:
    """Return a line for each key that does nothing on so few ranks, or on a CPU; more ranks, or a GPU, may be
    chosen on the command line, so they are not refused.
    """
    layout = recipe.layout_section
    needs = {
        "sequence": (layout.sequence, "tensor", layout.tensor),
        "ring": (layout.ring, "context", layout.context),
        "virtual_stages": (layout.virtual_stages is not None, "pipeline", layout.pipeline),
    }
    lines = [
        f"layout.{key} has no effect with {axis} = 1"
        for key, (is_set, axis, ranks) in needs.items()
        if is_set and ranks == 1
    ]
    if recipe.memory.offload and recipe.device == "cpu":
        lines.append("memory.offload saves nothing on a CPU, whose memory is the host's")
    return lines


def check_memory_of_pipeline(memory: MemorySection, layout: Layout, name: str, where: str) -> None:
    """Refuse what saves memory elsewhere, but not under the schedule ``name``, or at twice the cost."""
    waits = layout.pipeline > 1 and (name == "gpipe" or schedule_kind(name).two_backwards)
    if memory.stated_chunk and waits:
        expected = f"auto or 0 with layout.schedule={name}, or 1f1b or interleaved"
        todo = (
            "Several micro-batches wait for their backward after their losses, and each would hold a "
            "gradient of the output layer"
        )
        raise BadInput(where, "memory.loss_chunk", expected=expected, found=memory.loss_chunk, todo=todo)
    if memory.checkpointing != "none" and layout.pipeline > 1:
        check_recomputation(name, memory.checkpointing, where)


def _ranks(recipe: Recipe, layout: Layout) -> Iterator[Rule]:
    """Yield what the number of ranks, or a graph, makes impossible."""
    backend = recipe.attention_backend
    expected = "auto with several context ranks, which compute blocks of attention"
    yield Rule(backend != "auto" and layout.context > 1, "attention_backend", expected, backend)
    if recipe.compile is True:
        yield from compile_rules(recipe, recipe.memory, layout, recipe.layout_section.schedule)
    absent = [rank for rank in recipe.watch.trace_ranks if not 0 <= rank < layout.world]
    expected = f"ranks from 0 to {layout.world - 1}"
    yield from (Rule(True, "watch.trace_ranks", expected, rank) for rank in absent)
    late = [step for step in recipe.watch.trace_steps if step > recipe.steps]
    yield from (Rule(True, "watch.trace_steps", f"steps from 1 to {recipe.steps}", step) for step in late)


def compile_rules(recipe: Recipe, memory: MemorySection, layout: Layout, schedule: str) -> Iterator[Rule]:
    """Yield what needs a block's operators one by one, which a graph hides."""
    expected = "none, every or full with compile = true"
    yield Rule(memory.checkpointing == "selective", "memory.checkpointing", expected, "selective")
    expected = "gpipe, 1f1b or interleaved with compile = true"
    halves = layout.pipeline > 1 and schedule_kind(schedule).two_backwards
    yield Rule(halves, "layout.schedule", expected, schedule)
    yield Rule(recipe.debug.collectives, "debug.collectives", "false with compile = true", "true")


def check_experts(section: ExpertsSection, family: Family, config: ModelConfig, *, adapters: bool) -> None:
    """Refuse what is said of experts, or of their routers' biases, for a model that has none."""
    models_routers = [router for _, router in routers(family.on_meta(config))]
    rate, unbiased = section.bias_rate, all(router.bias is None for router in models_routers)
    expected = f"0: the routers of {family.model_type} have no biases"
    todo = "experts.balance keeps such experts evenly used"
    frozen = "0 with [lora]: the biases belong to the base, which is frozen"
    of_zoo = "a model of the zoo: transformers' code gives no losses of its routers"
    rules = (
        Rule(family.adopted, "experts", of_zoo, family.model_type),
        Rule(not models_routers, "experts", "a model with experts", family.model_type),
        Rule(rate > 0 and unbiased, "experts.bias_rate", expected, rate, todo),
        Rule(rate > 0 and adapters, "experts.bias_rate", frozen, rate),
    )
    check_rules(rules, "recipe")
