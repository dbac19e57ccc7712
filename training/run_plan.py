"""Plan what a run will build, from its recipe, before any process starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoints import Source, StoredAdapter, check_plain, newest_in, read_source
from ..checkpoints.mirror import check_apart
from ..data.batches import GlobalBatches
from ..data.items import ItemBatches
from ..data.token_index import check_vocabulary
from ..layers import AttentionCall, attention_calls, automatic_chunk
from ..models import Family, ModelConfig, family_of
from ..parallel_state import BadInput, ParallelState, dtype_named, require
from ..parallel_state.collective_errors import together
from ..pipeline import schedule_kind
from ..recipes.checks import check_experts
from ..recipes.recipe import Recipe, read_config
from ..recipes.section import ParameterGroup
from ..runs.launch import device_here, own_rank
from ..runs.trackers import check_trackers
from ..simulation.kinds_of_blocks import one_block_of_each_kind
from ..simulation.model_flops import TokenFlops, flops_of_token, flops_per_token
from ..storage import companions_in
from ..storage.file_names import CHECKPOINTS, CONFIG
from ..storage.output_places import check_place
from ..storage.remote_folder import RemoteFolder
from ..system import counted
from ..system.addresses import file_in
from .lora import plan_adapters
from .optimizer import freeze, groups_of
from .own_module import OwnFamily, check_held_out, own_family
from .run_data import HeldOut, check_documents, check_tokenizer, open_data, open_held_out, tokenizer_of
from .stage_cut import StageCut, cut_stages


@dataclass(frozen=True)
class Plan:
    """Hold what a run will build, found out before any process starts."""

    family: Family
    config: ModelConfig
    hf_config: Mapping[str, Any]
    companions: list[Path]
    #: What ``model.init_from`` names. For LoRA these weights are frozen; ``family`` then has the adapters.
    source: Source | None = None
    adapter: StoredAdapter | None = None
    #: The group of each parameter, by our name, that a group of the recipe treats differently.
    groups: Mapping[str, ParameterGroup] = field(default_factory=dict)
    #: Which blocks each stage has.
    cut: StageCut = field(kw_only=True)
    #: Number of tokens whose logits exist at once; 0: those of a micro-batch.
    loss_chunk: int = field(kw_only=True)

    @property
    def own(self) -> OwnFamily | None:
        """Return the user's module, if the recipe names one, and what its run has beside it."""
        return self.family if isinstance(self.family, OwnFamily) else None

    @property
    def split(self) -> tuple[int, ...] | None:
        """Return the number of blocks of each stage; ``None`` without a pipeline."""
        return self.cut.counts if len(self.cut.counts) > 1 else None

    def let_go(self) -> None:
        """Let the run whose checkpoint ``model.init_from`` names delete it: nothing more is read."""
        if self.source is not None and self.source.hold is not None:
            self.source.hold.release()


def plan(recipe: Recipe) -> Plan:
    """Read the model's config and refuse a layout that cannot hold it; reads no weights, starts nothing."""
    companions: list[Path] = []
    source: Source | None = None
    inputs = (recipe.model.init_from, None if recipe.lora is None else recipe.lora.init_from)
    check_place(Path(recipe.out), [Path(path) for path in inputs if path is not None])
    check_trackers(recipe.watch.trackers)
    if recipe.checkpoint.mirror is not None:  # which also is a URL that an installed package understands
        check_apart(RemoteFolder(recipe.checkpoint.mirror), Path(recipe.out) / CHECKPOINTS)
    if recipe.model.module is not None:
        return _plan_own(recipe)
    if recipe.model.init_from is not None:
        mtp = recipe.model.mtp is not None
        source = read_source(
            recipe.model.init_from,
            mtp=mtp,
            implementation=recipe.model.implementation,
            whole=own_rank() == 0,
        )
        todo = f"`trilith merge-lora BASE {source.path} OUT` makes one, or name them as lora.init_from"
        whole = source.adapter is None
        require(whole, source.path, "model.init_from", "a whole model", "LoRA adapters", todo)
        raw: Mapping[str, Any] = source.config
        companions = list(source.companions)
        where = file_in(recipe.model.init_from, CONFIG)
    else:
        raw = read_config(recipe.model)
        where = recipe.model.config if isinstance(recipe.model.config, str) else "recipe: model.config"
    if recipe.model.tokenizer is not None:
        companions = tokenizer_files(Path(recipe.model.tokenizer))
    check_plain(dict(raw), where, "config")
    family = family_of(raw, where)
    config = family.from_hf(raw, where)
    if source is not None and recipe.model.config is not None:
        _check_stated(recipe, family, config, where)
    _check_mtp(recipe, config, where)
    length, positions = recipe.data.sequence_length, config.max_position_embeddings
    expected = f"at most the model's {positions} positions"
    require(length <= positions, "recipe", "data.sequence_length", expected, length)
    if recipe.experts is not None:
        check_experts(recipe.experts, family, config, adapters=recipe.lora is not None)
    adapter: StoredAdapter | None = None
    if recipe.lora is not None:
        if source is None:
            expected = "a model to attach adapters to"
            raise BadInput("recipe", "model.init_from", expected=expected, found="a model from scratch")
        family, adapter = plan_adapters(recipe.lora, source)
    layout = recipe.layout
    cut = cut_stages(family, config, layout, length, split=recipe.layout_section.split)
    one_block_of_each_kind(family, config, layout)  # and the ends: they refuse each cut that is not even
    hf_config = raw if recipe.model.init_from is not None else family.to_hf(config) | dict(raw)
    groups = groups_of(recipe.optimizer.groups, family, config)
    return Plan(
        family, config, hf_config, companions, source, adapter, groups,
        cut=cut, loss_chunk=loss_chunk_of(recipe, config),
    )  # fmt: skip


def _plan_own(recipe: Recipe) -> Plan:
    """Plan a run of the user's module that the recipe names."""
    layout, (family, config) = recipe.layout, own_family(recipe)
    family.check_layout(config, layout)
    if recipe.experts is not None:
        check_experts(recipe.experts, family, config, adapters=False)
    cut = cut_stages(family, config, layout, recipe.data.sequence_length, split=recipe.layout_section.split)
    folder = recipe.model.tokenizer
    return Plan(
        family, config, {}, [] if folder is None else tokenizer_files(Path(folder)),
        groups=family.groups, cut=cut, loss_chunk=0,
    )  # fmt: skip


def loss_chunk_of(recipe: Recipe, config: ModelConfig) -> int:
    """Return the number of tokens whose logits exist at once: the recipe's, or what suits the run's sizes."""
    chunk, layout, name = recipe.memory.loss_chunk, recipe.layout, recipe.layout_section.schedule
    if not config.head_is_last:  # what comes after the output layer is not known
        todo = "What this model computes after its output layer is transformers' own"
        require(chunk in ("auto", 0), "recipe", "memory.loss_chunk", "0 or auto", chunk, todo)
        return 0
    if chunk != "auto":
        return chunk
    if layout.pipeline > 1 and (name == "gpipe" or schedule_kind(name).two_backwards):
        return 0  # micro-batches wait for their backward, and each would hold a gradient of the output layer
    return automatic_chunk(
        recipe.data.micro_batch * (recipe.data.sequence_length // layout.context),
        config.embedding_width,
        config.vocab_size,
        compute=dtype_named(recipe.compute_dtype).itemsize,
        gpu=recipe.device == "cuda",
        sums=dtype_named(recipe.reduce).itemsize if recipe.reduce else 4,
        trained=recipe.lora is None,
        state=ParallelState.stand_in(layout, 0),
    )


@dataclass(frozen=True)
class RunPlan(Plan):
    """Hold a plan and the run's opened token files: what a process needs before it builds the model."""

    batches: GlobalBatches | ItemBatches = field(kw_only=True)
    #: The data of evaluation, if the recipe has one.
    held_out: HeldOut | None = field(kw_only=True)
    #: Each kind of attention, by its name in words; none over context ranks.
    attention: dict[str, AttentionCall] = field(kw_only=True)


def check_run(recipe: Recipe) -> RunPlan:
    """Plan a run and open its data, once for a process: every rank does so, and before them the process that
    starts them, so that bad input is said once and at once. Raises ``BadInput``.
    """
    recipe = recipe.on(device_here(recipe.device))
    planned = plan(recipe)
    items = None if planned.own is None else planned.own.items
    batches = items or open_data(recipe)
    held_out = open_held_out(recipe, planned.config.vocab_size)
    attention = check_data(recipe, planned, batches, held_out)
    if recipe.model.init_from is None and recipe.model.tokenizer is None:
        planned = replace(planned, companions=tokenizer_of(batches))
    return RunPlan(**vars(planned), batches=batches, held_out=held_out, attention=attention)


def check_data(
    recipe: Recipe, planned: Plan, batches: GlobalBatches | ItemBatches, held_out: HeldOut | None
) -> dict[str, AttentionCall]:
    """Refuse data that the model cannot compute with; return each kind of attention, by its name in words."""
    if isinstance(batches, GlobalBatches):
        check_vocabulary(batches.vocab_size, planned.config.vocab_size, "recipe: data.tokens")
    if (folder := recipe.model.tokenizer) is None and planned.source is not None:
        folder = str(planned.source.path)
    if folder is not None:
        check_tokenizer(batches, Path(folder), "recipe: data.tokens")
        if held_out is not None:
            check_tokenizer(held_out.batches, Path(folder), "recipe: evaluation.tokens")
    if planned.own is None:
        model = planned.family.on_meta(planned.config)
        model.check_attention(recipe.attention_backend)
        check_documents(batches, model, "recipe", "data.tokens")
        if held_out is not None:
            first = range(held_out.batches.global_batch)
            check_documents(held_out.batches, model, "recipe", "evaluation.tokens", first=first)
    elif held_out is not None:
        rows = held_out.batches.rows(0, range(1))
        named = rows if isinstance(rows, dict) else rows.samples()
        check_held_out(planned.own, planned.config, named, recipe.layout)
    if recipe.layout.context > 1:  # blocks of attention, which nothing chooses
        return {}
    return attention_calls(
        planned.family.on_meta(planned.config),
        recipe.device,
        dtype_named(recipe.compute_dtype),
        length=recipe.data.sequence_length,
        packed=isinstance(batches, GlobalBatches) and batches.packed,
        backend=recipe.attention_backend,
    )


def agree_on_weights(plan: RunPlan, recipe: Recipe, state: ParallelState) -> RunPlan:
    """Return the plan with the weights that rank 0 chose for ``model.init_from``: every rank planned by
    itself, and a run may have saved meanwhile. Collective.
    """
    source, place = plan.source, recipe.model.init_from
    if source is None or place is None:
        return plan
    with newest_in(place, state, opened=source.path) as chosen:
        if chosen not in (place, str(source.path)):
            source = read_source(chosen, mtp=recipe.model.mtp is not None, whole=False)
        adapters = together(lambda: plan.adapter, state)
    return replace(plan, source=source, adapter=adapters[0])


def flops_of(recipe: Recipe, plan: Plan) -> TokenFlops:
    """Count the FLOPs of one of the run's tokens; frozen parameters have no gradient to compute."""
    if not plan.groups:
        return flops_of_token(plan.family, plan.config, recipe.data.sequence_length)
    model = plan.family.build(plan.config)
    freeze(model, plan.groups)
    return flops_per_token(model, recipe.data.sequence_length)


def _check_mtp(recipe: Recipe, config: ModelConfig, where: str) -> None:
    """Refuse a factor for multi-token prediction without blocks for it, blocks without a factor, and LoRA."""
    factor, blocks = recipe.model.mtp, config.mtp_blocks
    if (factor is None) == (blocks == 0) and (recipe.lora is None or not blocks):
        return
    if recipe.lora is not None and blocks:
        expected = "absent with LoRA, which trains no blocks of multi-token prediction"
    elif blocks:
        expected = f"a factor: {where} states {counted(blocks, 'block')} of multi-token prediction"
    else:
        expected = f"absent: the model of {where} has no blocks of multi-token prediction"
    raise BadInput("recipe", "model.mtp", expected=expected, found="none" if factor is None else factor)


def _check_stated(recipe: Recipe, family: Family, config: ModelConfig, where: str) -> None:
    """Refuse weights of a model other than the recipe states, by the first field that differs."""
    raw = read_config(recipe.model)
    config_of_file = family_of(raw, "recipe: model.config").from_hf(raw, "recipe: model.config")
    actual, expected = config.model_dump(), config_of_file.model_dump()
    same = type(config_of_file) is type(config)
    require(same, where, "model_type", raw["model_type"], family.model_type)
    for key, value in expected.items():
        todo = "model.config in the recipe states what model.init_from must hold"
        require(actual[key] == value, where, key, value, actual[key], todo)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return a tokenizer folder's files, which are copied along with the weights."""
    require(folder.is_dir(), folder, None, "a tokenizer folder", "no folder")
    companions = companions_in(folder)
    require(companions, folder, None, "a tokenizer folder", "a folder without a tokenizer's files")
    return companions
