"""Compare what ranks send in layouts of all kinds with the plan: count and bytes of each axis and kind.

The covering array has every pair of choices that a recipe may make. Drawn cases have more choices at once,
and multi-token prediction with a backward in two parts, which recipes refuse and the library does not.
"""

from dataclasses import dataclass
from random import Random

import pytest
from support.cases_on_ranks import CasesOnRanks
from support.combinations import LONG, covering_array
from support.configs import MODELS
from support.short_training import Case
from support.traffic import sent_and_planned
from trilith.parallel_state import Layout
from trilith.pipeline import SCHEDULE_NAMES, schedule_kind
from trilith.recipes.sections import MemorySection

#: Blocks that predict further tokens, experts, recurrences, tied embeddings.
CONFIGS = {
    **{
        name: MODELS[name] for name in ("llama", "llama-tied-kv1", "gpt2", "mixtral", "gpt_oss", "qwen3_next")
    },
    "deepseek_v3-mtp": MODELS["deepseek_v3"] | {"mtp": True},
    "deepseek_v3-mtp2": MODELS["deepseek_v3"] | {"mtp": True, "num_nextn_predict_layers": 2},
    "glm4_moe-tied-mtp": MODELS["glm4_moe"] | {"mtp": True, "tie_word_embeddings": True},
}
EXPERTS = {"mixtral", "gpt_oss", "qwen3_next", "deepseek_v3-mtp", "deepseek_v3-mtp2", "glm4_moe-tied-mtp"}
#: Their last stage uses the embedding more than once, which is refused with a backward in two parts.
WHOLE = {"deepseek_v3-mtp2", "glm4_moe-tied-mtp"}


@dataclass(frozen=True)
class Drawn:
    name: str
    case: Case

    def __str__(self):
        one, memory = self.case, self.case.memory
        words = [self.name, one.schedule, f"{one.layout}", memory.checkpointing, f"chunk{memory.loss_chunk}"]
        words += [f"{one.samples}x{one.length}by{one.micro_batch}", f"{one.split}"]
        return "-".join(words).replace(", ", "-").replace(" ", "")


def drawn(ranks, number):
    """Draw the case of this number with a pipeline and data ranks; it depends on nothing else."""
    random = Random(f"{ranks} {number}")
    pick = random.choice
    schedule = pick(SCHEDULE_NAMES)
    kind = schedule_kind(schedule)
    name = pick(sorted(CONFIGS.keys() - (WHOLE if kind.two_backwards else set())))
    config = dict(CONFIGS[name])
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
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    stages = pipeline * virtual
    blocks = max(stages, config[key]) if name in EXPERTS else stages + pick((0, 1))
    for listed in ("layer_types", "mlp_layer_types"):
        if listed in config:
            config[listed] = (list(config[listed]) * blocks)[:blocks]
    least, micro = kind.least_micro_batches(pipeline), pick((1, 2))
    rounds = pick([count for count in range(least, 2 * least + 2) if kind.runs(pipeline, count)])
    apart = kind.two_backwards
    memory = MemorySection(
        checkpointing="none" if apart else pick(("none", "selective", "full", "every")),
        loss_chunk=0 if apart or schedule == "gpipe" else pick((0, 5)),
    )
    return Drawn(
        f"{name}-{number}",
        Case(
            config | {key: blocks},
            Layout.of(
                **layout,
                sequence=axis == "tensor" and beside > 1 and pick((False, True)),
                ring=axis == "context" and beside > 1 and pick((False, True)),
                virtual_stages=virtual,
                v_shape=kind.v_shape,
            ),
            schedule=schedule,
            mtp=0.3 if "mtp" in name else 0.0,
            samples=rounds * micro * data,
            micro_batch=micro,
            memory=memory,
        ),
    )


COVERING = [Drawn(str(choice), choice.case) for choice in [*covering_array(), *LONG] if choice.world > 1]
DRAWN = [*(drawn(4, number) for number in range(150)), *(drawn(8, number) for number in range(40))]
#: The others take minutes.
QUICK = [*COVERING[::6], *DRAWN[:8]]
SLOW = [*(one for one in COVERING if one not in QUICK), *DRAWN[8:]]


QUICK_RUNS, SLOW_RUNS = (
    CasesOnRanks(sent_and_planned, [one.case for one in lane], at_once=8, timeout=200)
    for lane in (QUICK, SLOW)
)


@pytest.mark.parametrize("number", range(len(QUICK)), ids=map(str, QUICK))
def test_a_step_sends_what_is_planned(number):
    for sent, planned in QUICK_RUNS[number]:
        assert sent == planned


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SLOW)), ids=map(str, SLOW))
def test_a_step_of_further_layouts_sends_what_is_planned(number):
    for sent, planned in SLOW_RUNS[number]:
        assert sent == planned
