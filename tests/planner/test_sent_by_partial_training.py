"""Compare what ranks send with the plan where a run trains a part of the parameters: axes, kinds, bytes.

A backward ends at the first trained parameter. What comes before it sends nothing in the backward, is not
gathered for it and is not computed again.
"""

from dataclasses import dataclass

import pytest
from support.cases_on_ranks import CasesOnRanks
from support.configs import MODELS
from support.short_training import Case
from support.traffic import sent_and_planned
from trilith.parallel_state import Layout
from trilith.recipes.sections import MemorySection

#: What is trained: LoRA, or all but what a pattern finds. Most models have four blocks, from 0.
TRAINS = {
    "lora": {"lora": {"r": 3, "target_modules": "all-linear"}},
    "lora of attention": {"lora": {"r": 3, "target_modules": ["q_proj", "v_proj"]}},
    "lora of feed-forward": {"lora": {"r": 3, "target_modules": ["down_proj"]}},
    "lora of last blocks": {"lora": {"r": 3, "target_modules": "all-linear", "layers_to_transform": [2, 3]}},
    "lora of experts": {
        "lora": {"r": 3, "target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}
    },
    "all but the embedding": {"frozen": "embed|wte|wpe"},
    "all but the first blocks": {"frozen": r"embed|wte|wpe|(layers|h)\.[01]\."},
    "all but the first block": {"frozen": r"embed|wte|wpe|(layers|h)\.0\."},
    "one block": {"frozen": r"^(?!.*(layers|h)\.2\.)"},
    "norms of one block": {"frozen": r"^(?!.*layers\.2\..*norm)"},
    "the bias of one product": {"frozen": r"^(?!.*layers\.1\.mlp\.down(_proj)?\.bias)"},
    "the output layer": {"frozen": "^(?!.*head)"},
    "the last norm": {"frozen": r"^(?!(model\.)?norm\.)"},
    "the embedding": {"frozen": "^(?!.*(embed|wte))"},
}
MODES = ("none", "selective", "full")
V = {"virtual_stages": 2, "v_shape": True}


@dataclass(frozen=True)
class Partial:
    name: str
    case: Case
    blocks: int

    def __str__(self):
        one = self.case
        words = (
            self.name,
            one.schedule,
            f"{one.layout}",
            f"{self.blocks}_blocks",
            f"{one.samples}_samples",
            one.memory.checkpointing,
            f"{one.memory.loss_chunk}",
        )
        return "-".join(words).replace(", ", "-").replace(" ", "_")


def partial(trains, model="llama", mode="none", *, blocks=4, chunk=0, rounds=2, schedule="1f1b", **layout):
    config = dict(MODELS["deepseek_v3"] | {"mtp": True} if model == "mtp" else MODELS[model])
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    for listed in ("layer_types", "mlp_layer_types"):
        if listed in config:
            config[listed] = (list(config[listed]) * blocks)[:blocks]
    case = Case(
        config | {key: blocks},
        Layout.of(**layout),
        schedule=schedule,
        mtp=0.3 * (model == "mtp"),
        samples=rounds * layout.get("data", 1),
        memory=MemorySection.model_validate({"checkpointing": mode, "loss_chunk": chunk}),
        **TRAINS[trains],
    )
    return Partial(f"{model}-{trains}", case, blocks)


#: Each kind of training with tensor ranks and with ZeRO 3, each mode of checkpointing with both.
QUICK = [
    *(
        partial(trains, mode=MODES[(number + place) % 3], **layout)
        for number, trains in enumerate(TRAINS)
        if trains != "lora of experts"
        for place, layout in enumerate(
            ({"tensor": 2}, {"tensor": 2, "sequence": True}, {"data": 2, "zero": 3}, {"pipeline": 2})
        )
    ),
    partial("lora", mode="full", context=2),
    partial("lora", mode="selective", context=2, ring=True),
    partial("lora of feed-forward", mode="full", context=2, ring=True),
    partial("lora of last blocks", "qwen3_next", "full", context=2),
    partial("lora", "granitemoehybrid", "selective", context=2),
    partial("lora of experts", "mixtral", "full", context=2),
    partial("lora of experts", "mixtral", "selective", tensor=2, sequence=True),
    partial("the output layer", mode="full", chunk=5, tensor=2),
    partial("one block", chunk=5, data=2, zero=3, rounds=3),
    partial("all but the first blocks", data=2, zero=2),
    partial("all but the first blocks", data=2, zero=1),
    partial("lora of attention", data=2),
    partial("the output layer", pipeline=2, data=2, zero=3, rounds=5),
    partial("one block", pipeline=2, data=2, zero=3, chunk=5, rounds=3),
    partial("one block", schedule="zbv", rounds=4, pipeline=2, data=2, zero=3, **V),
    partial(
        "one block", schedule="interleaved", rounds=4, blocks=8, pipeline=2, data=2, zero=3, virtual_stages=4
    ),
    # Its last stage also looks tokens up.
    *(partial("all but the embedding", "mtp", mode, tensor=2, sequence=True) for mode in MODES),
    partial("the output layer", "mtp", "full", tensor=2, sequence=True),
]
#: Further combinations of the same.
SLOW = [
    one
    for one in (
        *(
            partial(trains, mode=mode, **layout)
            for trains in TRAINS
            if trains != "lora of experts"
            for mode in MODES
            for layout in (
                {"tensor": 2},
                {"tensor": 2, "sequence": True},
                {"context": 2},
                {"context": 2, "ring": True},
                {"data": 2, "zero": 3},
                {"data": 2, "zero": 2},
                {"pipeline": 2},
                {"pipeline": 2, "data": 2, "zero": 3, "rounds": 5},
                {"pipeline": 2, "data": 2, "zero": 3, "chunk": 5, "rounds": 3},
            )
        ),
        *(
            partial(trains, model, mode, **layout)
            for trains in ("lora", "one block", "all but the first blocks")
            for model in (
                "gpt2",
                "gemma2",
                "deepseek_v3",
                "glm4_moe",
                "gpt_oss",
                "qwen3_next",
                "granitemoehybrid",
            )
            for mode in MODES
            for layout in ({"tensor": 2}, {"tensor": 2, "sequence": True}, {"context": 2})
        ),
        *(
            partial(trains, "mixtral", mode, data=4, expert=2, zero=zero)
            for trains in ("lora", "lora of experts", "lora of last blocks", "one block")
            for mode in MODES
            for zero in (0, 2, 3)
        ),
        *(
            partial(trains, schedule=schedule, pipeline=2, rounds=rounds, **V, **layout)
            for trains in ("lora", "lora of last blocks", "one block", "the output layer")
            for schedule in ("zbv", "dualpipev")
            for rounds, layout in (
                (4, {}),
                (4, {"tensor": 2, "sequence": True}),
                (4, {"data": 2, "zero": 3}),
                (7, {"data": 2, "zero": 3}),
                (4, {"context": 2}),
            )
        ),
        # The first stage has two blocks that no backward comes to, or one of its two.
        *(
            partial(trains, schedule=schedule, blocks=8, pipeline=2, rounds=rounds, data=2, zero=3, **shape)
            for rounds in (4, 6)
            for trains in ("lora of last blocks", "all but the first blocks", "all but the first block")
            for schedule, shape in (
                ("zbv", V),
                ("dualpipev", V),
                ("interleaved", {"virtual_stages": 2}),
                ("interleaved", {"virtual_stages": 4}),
                ("interleaved-zero-bubble", {"virtual_stages": 2}),
                ("gpipe", {}),
            )
        ),
    )
    if one not in QUICK
]


QUICK_RUNS, SLOW_RUNS = (
    CasesOnRanks(sent_and_planned, [one.case for one in lane], at_once=20, timeout=200)
    for lane in (QUICK, SLOW)
)


@pytest.mark.parametrize("number", range(len(QUICK)), ids=map(str, QUICK))
def test_a_step_sends_what_is_planned(number):
    for sent, planned in QUICK_RUNS[number]:
        assert sent == planned


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SLOW)), ids=map(str, SLOW))
def test_a_step_of_further_cases_sends_what_is_planned(number):
    for sent, planned in SLOW_RUNS[number]:
        assert sent == planned


def test_each_case_has_a_name_of_its_own():
    every = [str(one) for one in (*QUICK, *SLOW)]
    assert len({*every}) == len(every)
