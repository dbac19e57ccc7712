"""The planner's collectives against those that ranks launch: axes, kinds, numbers and bytes, exactly."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.cases_on_ranks import CasesOnRanks
from support.traffic import added, sent_by
from trilith.data import Batch
from trilith.layers import Scaling, cost_of, use_float8
from trilith.models import family_of
from trilith.parallel_state import Layout, ParallelState, clip_gradients, initialize
from trilith.parallel_state.engine import fsdp_modules
from trilith.planner import Traffic, Work, block_traffic, step_traffic
from trilith.recipes.sections import MemorySection
from trilith.training import Precision, TrainStep, shard_over_data
from trilith.training.build import spare_memory

LLAMA = {
    "model_type": "llama",
    "vocab_size": 503,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 503,
    "n_embd": 24,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 16,
}
MODELS = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False},
}
MODELS["gemma2"] = LLAMA | {"model_type": "gemma2", "head_dim": 8, "tie_word_embeddings": True}
MODELS["glm4_moe"] = LLAMA | {
    "model_type": "glm4_moe",
    "head_dim": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS["olmo2"] = LLAMA | {"model_type": "olmo2", "head_dim": 8}
MODELS["cohere"] = LLAMA | {"model_type": "cohere", "use_qk_norm": True}
MODELS["deepseek_v2"] = {
    **{
        key: value
        for key, value in MODELS["glm4_moe"].items()
        if key not in ("head_dim", "num_key_value_heads")
    },
    **{"model_type": "deepseek_v2", "q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 4},
    **{"qk_rope_head_dim": 2, "v_head_dim": 3},
}
#: Its last stage also predicts one token further.
MODELS["deepseek_v3"] = MODELS["deepseek_v2"] | {
    **{"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    **{"first_k_dense_replace": 1, "mtp": True},
}
MODELS["granitemoehybrid"] = LLAMA | {
    **{"model_type": "granitemoehybrid", "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"layer_types": ["mamba", "attention"] * 2, "intermediate_size": 8, "shared_intermediate_size": 16},
    **{"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 4, "mamba_expand": 2},
}
MODELS["gpt_oss"] = LLAMA | {
    **{"model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "sliding_window": 5,
}
MODELS["phi"] = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {
    "model_type": "phi",
    "num_attention_heads": 2,
}
MODELS["qwen3_next"] = LLAMA | {
    **{"model_type": "qwen3_next", "head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 3},
    **{"linear_value_head_dim": 2, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 8, "shared_expert_intermediate_size": 16},
}
LENGTH, SAMPLES = 12, 2


@dataclass(frozen=True)
class Case:
    model: str
    layout: Layout
    memory: MemorySection = field(default_factory=MemorySection)
    compute: torch.dtype = torch.float32
    micro_batches: int = 2
    schedule: str = "1f1b"
    float8: Scaling | None = None

    @property
    def config(self):
        """Return the model's config. Along tensor and context ranks each block sends for itself: two do."""
        config = (MODELS | SPECIAL)[self.model]
        if self.layout.pipeline > 1 or self.layout.data > 1:
            return config
        kinds = {key: config[key][:2] for key in ("layer_types",) if key in config}
        return config | kinds | {"n_layer" if "n_layer" in config else "num_hidden_layers": 2}


def all_measured(cases):
    return [measured_and_planned(case) for case in cases]


def measured_and_planned(case):
    """Return, measured and planned for a step, the collectives of each axis and kind and their bytes."""
    state = ParallelState.start(case.layout)
    family = family_of(case.config)
    config = family.from_hf(case.config)
    model = family.build(config, state=state)
    if case.float8 is not None:
        assert use_float8(model, case.float8) == []
    work = Work(
        state,
        config.hidden_size,
        LENGTH,
        SAMPLES,
        case.micro_batches,
        schedule=case.schedule,
        compute=case.compute.itemsize,
        checkpointing=case.memory.checkpointing,
        checkpoint_every=case.memory.every,
        loss_chunk=case.memory.stated_chunk,
    )
    plan = added(step_traffic(work, model))
    spare_memory(model, case.memory, case.memory.stated_chunk)
    shard_over_data(model, state, Precision(torch.float32, case.compute, torch.float32))
    model.to_empty(device="cpu")
    initialize(model, 0, state=state)
    step = TrainStep(
        model,
        micro_batch=SAMPLES,
        schedule=case.schedule,
        dtype=case.compute,
        loss_chunk=case.memory.stated_chunk,
        mtp=0.3,
        reduce=torch.float32,
    )
    ids = torch.randint(500, (SAMPLES * case.micro_batches, LENGTH))

    def run():
        step.launch(Batch(ids, ids))
        clip_gradients(model, 1.0, state=state)

    if fsdp_modules(model) or case.layout.pipeline > 1:  # which make themselves ready in their first step
        run()
        model.zero_grad()
    return sent_by(run, state), plan


def of_kinds(every):
    found = {}
    for one in every:
        count, size = found.get(one.kind, (0, 0))
        found[one.kind] = (count + one.count, size + one.bytes)
    return found


#: Models for some cases alone.
SPECIAL = {
    "sixteens": LLAMA | {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2},
    "two-experts": MODELS["glm4_moe"] | {"n_routed_experts": 2},
}
V = {"virtual_stages": 2, "v_shape": True}
SEQUENCE, TENSOR = Layout.of(tensor=2, sequence=True), Layout.of(tensor=2)
CASES = [
    *(Case(model, layout) for model in MODELS for layout in (TENSOR, SEQUENCE)),
    Case("sixteens", TENSOR, MemorySection(checkpointing="full"), float8="tensorwise"),
    Case("sixteens", SEQUENCE, MemorySection(checkpointing="selective"), float8="rowwise"),
    Case("sixteens", SEQUENCE, float8="tensorwise"),
    Case("sixteens", TENSOR, MemorySection(checkpointing="full"), float8="rowwise"),
    Case("glm4_moe", SEQUENCE, MemorySection(checkpointing="selective")),
    Case("glm4_moe", TENSOR, MemorySection(checkpointing="full")),
    Case("gemma2", TENSOR, MemorySection(checkpointing="full")),
    Case("gemma2", SEQUENCE, MemorySection(checkpointing="selective")),
    Case("olmo2", TENSOR, MemorySection(checkpointing="full")),
    Case("olmo2", SEQUENCE, MemorySection(checkpointing="selective")),
    Case("gpt_oss", TENSOR, MemorySection(checkpointing="full")),
    Case("gpt_oss", Layout.of(context=2), MemorySection(checkpointing="full")),
    Case("cohere", SEQUENCE, MemorySection(checkpointing="full")),
    Case("cohere", TENSOR, MemorySection(checkpointing="selective")),
    Case("deepseek_v2", SEQUENCE, MemorySection(checkpointing="full")),
    Case("deepseek_v2", TENSOR, MemorySection(checkpointing="selective")),
    Case("deepseek_v3", SEQUENCE, MemorySection(loss_chunk=5)),
    Case("deepseek_v3", SEQUENCE, MemorySection(checkpointing="selective")),
    Case("deepseek_v3", Layout.of(context=2, ring=True), MemorySection(checkpointing="full")),
    # Experts are gathered and summed by themselves, over the ranks that hold the same ones.
    *(Case("glm4_moe", Layout.of(data=4, expert=2, zero=zero)) for zero in (0, 3)),
    Case("glm4_moe", Layout.of(data=4, expert=2, zero=2, data_replicate=2)),
    Case("two-experts", Layout.of(data=4, zero=1)),  # each is cut along its width
    Case("phi", TENSOR, MemorySection(checkpointing="full")),
    Case("qwen3_next", SEQUENCE, MemorySection(checkpointing="selective")),
    Case("qwen3_next", TENSOR, MemorySection(checkpointing="full")),
    Case("qwen3_next", Layout.of(context=2)),
    Case("qwen3_next", Layout.of(context=2, ring=True), MemorySection(checkpointing="full")),
    Case("qwen3_next", Layout.of(context=2), MemorySection(checkpointing="selective")),
    Case("glm4_moe", Layout.of(data=2, zero=3)),
    Case("llama", Layout.of(tensor=4)),
    Case("gpt2", Layout.of(tensor=4, sequence=True), compute=torch.bfloat16),
    Case("llama", SEQUENCE, MemorySection(checkpointing="selective", loss_chunk=5)),
    Case("gpt2", SEQUENCE, MemorySection(checkpointing="full")),
    Case("llama", TENSOR, MemorySection(checkpointing="full")),
    Case("llama", SEQUENCE, MemorySection(checkpointing="every")),
    *(Case("llama", Layout.of(data=2, zero=zero), compute=torch.bfloat16) for zero in range(4)),
    Case("gpt2", Layout.of(data=2, zero=3), MemorySection(loss_chunk=5)),
    Case("gpt2", Layout.of(data=4, zero=2, data_replicate=2)),
    Case("llama", Layout.of(tensor=2, data=2, zero=1, sequence=True)),
    Case("gpt2", Layout.of(pipeline=2, tensor=2, sequence=True)),
    Case("llama-tied", Layout.of(pipeline=2, data=2, zero=1), compute=torch.bfloat16),
    Case("llama", Layout.of(context=2, zero=1), compute=torch.bfloat16),
    Case("gpt2", Layout.of(context=2, ring=True), MemorySection(checkpointing="full")),
    Case("llama", Layout.of(context=2, tensor=2, sequence=True)),
    Case("llama", Layout.of(pipeline=2, data=2, zero=1)),
    Case("gpt2", Layout.of(pipeline=2, data=2, zero=2, data_replicate=2), micro_batches=4),
    Case(
        "llama",
        Layout.of(pipeline=2, data=2, zero=3, data_replicate=2, virtual_stages=2),
        schedule="interleaved-zero-bubble",
        micro_batches=4,
    ),
    Case("gpt2", Layout.of(pipeline=2, virtual_stages=2, v_shape=True), schedule="zbv", micro_batches=4),
    # On a V's first rank both ends of the model use the root, and its sums are of what each end uses.
    *(
        Case("deepseek_v3", Layout.of(pipeline=2, data=2, zero=zero, **V), schedule="zbv", micro_batches=4)
        for zero in range(4)
    ),
    Case("llama-tied", Layout.of(pipeline=2, tensor=2, **V), schedule="zbv", micro_batches=4),
    *(
        Case("gpt_oss", Layout.of(pipeline=2, context=2, ring=ring, **V), schedule="zbv")
        for ring in (False, True)
    ),
    Case("llama-tied", Layout.of(pipeline=2, data=2, zero=3, **V), schedule="dualpipev", micro_batches=5),
    Case("llama", Layout.of(pipeline=2, data=2, zero=3, **V), schedule="zbv", micro_batches=4),
    Case(
        "llama",
        Layout.of(pipeline=2, data=2, zero=3, virtual_stages=2),
        schedule="interleaved-zero-bubble",
        micro_batches=4,
    ),
    Case(
        "llama-tied",
        Layout.of(pipeline=2, data=2, zero=3, virtual_stages=2),
        MemorySection(loss_chunk=5),
        schedule="interleaved",
        micro_batches=4,
    ),
]


def name_of(case):
    name = f"{case.model}-{case.layout}-{case.memory.checkpointing}-{case.memory.loss_chunk}"
    return name if case.float8 is None else f"{name}-{case.float8}"


RUNS = CasesOnRanks(all_measured, CASES, at_once=10, timeout=120)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(name_of, CASES))
def test_a_step_sends_exactly_what_is_planned(number):
    for measured, planned in RUNS[number]:
        assert measured == planned


def test_a_block_s_table_is_the_formula():
    """docs/communication.md, evaluated: each cell is what a block says that it sends."""
    text = (Path(__file__).parents[2] / "docs" / "communication.md").read_text()
    rows = re.findall(r"^\| (tensor(?: and sequence)?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["tensor", "tensor and sequence"]
    for (name, *cells), sequence in zip(rows, (False, True), strict=True):
        state = ParallelState.stand_in(Layout.of(tensor=4, sequence=sequence))
        work = Work(state, 24, LENGTH, SAMPLES, 1, compute=2)
        block = family_of(LLAMA).build(_CONFIG, state=state).layers["0"]
        sent = block_traffic(work, cost_of(block, work.tokens))
        numbers = {"N D": SAMPLES * LENGTH * 24, "N D / t": SAMPLES * LENGTH * 24 // 4}
        for cell, forward in zip(cells, (True, False), strict=True):
            stated = {}
            for count, kind, size in re.findall(
                r"(\d) (all-reduce|all-gather|reduce-scatter)s of ([^,]+)", cell
            ):
                stated[kind.replace("-", "_")] = (int(count), int(count) * numbers[size] * 2)
            here = [one for one in sent if one.what == ("forward" if forward else "backward")]
            assert stated and of_kinds(here) == stated, name


_CONFIG = family_of(LLAMA).from_hf(LLAMA)


def test_over_one_rank_of_an_axis_nothing_is_sent():
    family = family_of(LLAMA)
    model = family.build(_CONFIG, state=ParallelState.stand_in(Layout()))
    work = Work(model.state, 24, LENGTH, SAMPLES, 2)
    assert step_traffic(work, model) == []


def test_a_ring_sends_the_shares_of_the_others():
    wires = {
        kind: Traffic("tensor", kind, "", 1, 1000, 4).wire
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
    }
    assert wires == {"all_reduce": 1500, "all_gather": 3000, "reduce_scatter": 750, "send": 1000}
