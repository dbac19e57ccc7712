"""Drawn layouts send what is planned: count and bytes of each axis and kind.

They have more choices at once than the pairs of the covering array, and multi-token prediction with a
backward in two parts.
"""

from random import Random

from support.combinations import blocks
from support.configs import MODELS, config
from support.layout_cases import SENT, Layouts, Row
from support.short_training import Case
from trilith.parallel_state import Layout
from trilith.pipeline import SCHEDULE_NAMES, schedule_kind
from trilith.recipes.sections import MemorySection

#: Blocks that predict further tokens, experts, recurrences, tied embeddings.
CONFIGS = {
    **{name: {} for name in ("llama", "llama-tied-kv1", "gpt2", "mixtral", "gpt_oss", "qwen3_next")},
    "deepseek_v3-mtp": {"mtp": True},
    "deepseek_v3-mtp2": {"mtp": True, "num_nextn_predict_layers": 2},
    "glm4_moe-tied-mtp": {"mtp": True, "tie_word_embeddings": True},
}
EXPERTS = {"mixtral", "gpt_oss", "qwen3_next", "deepseek_v3-mtp", "deepseek_v3-mtp2", "glm4_moe-tied-mtp"}
#: Their last stage uses the embedding several times: with ZeRO 3 and a backward in two parts FSDP gathers
#: more than is planned (docs/memory.md). Their numbers are compared in ``test_more_choices``.
TWICE = {"deepseek_v3-mtp2", "glm4_moe-tied-mtp"}


def drawn(ranks, number):
    """Draw the case of this number with a pipeline and data ranks; it depends on nothing else."""
    random = Random(f"{ranks} {number}")
    pick = random.choice
    schedule = pick(SCHEDULE_NAMES)
    kind = schedule_kind(schedule)
    name = pick(sorted(CONFIGS.keys() - (TWICE if kind.two_backwards else set())))
    model = name if name in MODELS else name.split("-")[0]
    pipeline = pick((2, 2, ranks // 2))
    rest = ranks // pipeline
    axis = pick(("tensor", "context", "data", "data"))
    beside = pick((1, 2)) if axis != "data" and rest > 2 else 1
    data, zero = rest // beside, pick((0, 1, 2, 3, 3))
    replicas = pick((1, 2)) if zero and data % 2 == 0 else 1
    virtual = pick((2, 3)) if kind.interleaved and pipeline == 2 else kind.virtual_stages
    layout = {"pipeline": pipeline, "data": data, "zero": zero, "data_replicate": replicas}
    layout |= {axis: beside} if beside > 1 else {}
    pool = data * layout.get("context", 1) // (replicas if zero else 1)
    layout["expert"] = pick([size for size in (1, 2, 4) if pool % size == 0]) if name in EXPERTS else 1
    stages = pipeline * virtual
    layers = max(stages, blocks(model)) if name in EXPERTS else stages + pick((0, 1))
    least, micro = kind.least_micro_batches(pipeline), pick((1, 2))
    rounds = pick([count for count in range(least, 2 * least + 2) if kind.runs(pipeline, count)])
    apart = kind.two_backwards
    memory = MemorySection(
        checkpointing="none" if apart else pick(("none", "selective", "full", "every")),
        loss_chunk=0 if apart or schedule == "gpipe" else pick((0, 5)),
    )
    cut = Layout.of(
        **layout,
        sequence=axis == "tensor" and beside > 1 and pick((False, True)),
        ring=axis == "context" and beside > 1 and pick((False, True)),
        virtual_stages=virtual,
        v_shape=kind.v_shape,
    )
    case = Case(
        config(model, layers=layers, **CONFIGS[name]),
        cut,
        schedule=schedule,
        mtp=0.3 if "mtp" in name else 0.0,
        samples=rounds * micro * data,
        micro_batch=micro,
        memory=memory,
    )
    words = [name, ranks, number, schedule, cut, memory.checkpointing, f"chunk{memory.loss_chunk}"]
    words.append(f"{case.samples}by{micro}")
    return Row("-".join(map(str, words)).replace(", ", "-"), case, slow=(ranks, number) not in QUICK, **SENT)


#: Backwards in two parts, one with replicas of shards and one through multi-token prediction. The others take
#: minutes.
QUICK = [(4, 3), (4, 7)]
LAYOUTS = Layouts([drawn(ranks, number) for ranks, count in ((4, 150), (8, 40)) for number in range(count)])
test_a_step_of_a_drawn_layout_sends_what_is_planned = LAYOUTS.send_what_is_planned()
