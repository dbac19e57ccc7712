"""Compare what ranks send in a step with the plan, where the covering array cannot: axes, kinds, bytes.

Families that are not in the array, two precisions, three choices at once, and training of a part: a backward
ends at the first trained parameter; what comes before it sends nothing in the backward, is not gathered for
it and is not computed again. Drawn layouts are in ``test_drawn_layouts.py``.
"""

import torch
from support.combinations import ADAPTERS, FROZEN
from support.configs import config
from support.layout_cases import SENT, Layouts, row

MODES = ("none", "selective", "full")
LOOP, V = {"virtual_stages": 2}, {"virtual_stages": 2, "v_shape": True}
TENSOR, SEQUENCE, CONTEXT = {"tensor": 2}, {"tensor": 2, "sequence": True}, {"context": 2}
RING, STAGES, ZERO3 = {"context": 2, "ring": True}, {"pipeline": 2}, {"data": 2, "zero": 3}
BF16 = {"dtype": torch.float32, "compute": torch.bfloat16}
SLOW = SENT | {"slow": True}
#: By name: a family and what differs. Products in float8 need widths of sixteens.
CHANGED = {
    "mtp": ("deepseek_v3", {"mtp": True, "num_nextn_predict_layers": 1}),
    "two-experts": (
        "glm4_moe",
        {"n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    ),
    "sixteens": (
        "llama",
        {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
        | {"attention_bias": False, "mlp_bias": False},
    ),
}


def few(model, blocks):
    """Return a config of a few blocks."""
    family, changes = CHANGED.get(model, (model, {}))
    return config(family, layers=blocks, **changes)


def sent(model, layout, mode="none", *, blocks=2, asks=SENT, **more):
    """Return a row. Along tensor and context ranks each block sends for itself: two blocks do."""
    words = [model, *(f"{key}={value}" for key, value in layout.items()), mode, f"{blocks}_blocks"]
    words += [f"{key}={value}" for key, value in more.items()]
    why, mtp = "-".join(words).replace("torch.", ""), 0.3 * (model == "mtp")
    return row(why, few(model, blocks), layout, mode, asks=asks, mtp=mtp, **more)


FOUR = {"blocks": 4, "rounds": 4}
#: Families that are not in the array, and whose first layout in ``test_families`` is another one.
FAMILIES = ("olmo2", "cohere", "deepseek_v2", "gpt_oss", "phi")
LAYOUTS = Layouts(
    [
        *(sent(name, TENSOR) for name in FAMILIES),
        sent("olmo2", TENSOR, "full"),
        sent("olmo2", SEQUENCE, "selective"),
        sent("gpt_oss", TENSOR, "full"),
        sent("gpt_oss", CONTEXT, "full"),
        sent("cohere", SEQUENCE, "full"),
        sent("cohere", TENSOR, "selective"),
        sent("deepseek_v2", SEQUENCE, "full"),
        sent("deepseek_v2", TENSOR, "selective"),
        sent("phi", TENSOR, "full"),
        sent("mtp", TENSOR),
        sent("mtp", SEQUENCE, chunk=5),
        sent("mtp", SEQUENCE, "selective"),
        sent("mtp", RING, "full"),
        # Each expert is cut along its width.
        sent("two-experts", {"data": 4, "zero": 1}),
        *(sent("sixteens", TENSOR, "full", float8=scaling) for scaling in ("tensorwise", "rowwise")),
        sent("sixteens", SEQUENCE, "selective", float8="rowwise"),
        sent("sixteens", SEQUENCE, float8="tensorwise"),
        sent("gpt2", {"tensor": 4, "sequence": True}, **BF16),
        *(sent("llama", {"data": 2, "zero": zero}, **BF16) for zero in range(4)),
        sent("llama-tied", {**STAGES, "data": 2, "zero": 1}, blocks=4, **BF16),
        sent("llama", {**CONTEXT, "zero": 1}, **BF16),
        # On a V's first rank both ends of the model use the root, and its sums are of what each end uses.
        *(
            sent("mtp", {**STAGES, "data": 2, "zero": zero, **V}, schedule="zbv", **FOUR)
            for zero in (0, 2, 3)
        ),
        sent(
            "llama",
            {**STAGES, "data": 2, "zero": 3, "data_replicate": 2, **LOOP},
            schedule="interleaved-zero-bubble",
            **FOUR,
        ),
        *(
            sent("gpt_oss", {**STAGES, "context": 2, "ring": ring, **V}, schedule="zbv", **FOUR)
            for ring in (False, True)
        ),
        sent("llama-tied", {**STAGES, **ZERO3, **V}, schedule="dualpipev", blocks=4, rounds=5),
        sent("llama-tied", {**STAGES, **ZERO3, **LOOP}, schedule="interleaved", chunk=5, **FOUR),
        # Experts are gathered and summed by themselves, over the ranks that hold the same ones.
        *(sent("glm4_moe", {"data": 4, "expert": 2, "zero": zero}) for zero in (0, 3)),
        sent("glm4_moe", {"data": 4, "expert": 2, "zero": 2, "data_replicate": 2}),
        sent("mtp", {**STAGES, "data": 2, "zero": 1, **V}, schedule="zbv", asks=SLOW, **FOUR),
        # Every pair of these is in the array, whose rows are asked what they send as well.
        *(
            sent(name, layout, asks=SLOW)
            for name in (
                *("llama", "llama-tied", "gpt2", "gemma2", "glm4_moe", "granitemoehybrid", "qwen3_next"),
                "deepseek_v3",
            )
            for layout in (TENSOR, SEQUENCE)
        ),
        *(sent(name, SEQUENCE, asks=SLOW) for name in FAMILIES),
        sent("glm4_moe", SEQUENCE, "selective", asks=SLOW),
        sent("glm4_moe", TENSOR, "full", asks=SLOW),
        sent("gemma2", TENSOR, "full", asks=SLOW),
        sent("gemma2", SEQUENCE, "selective", asks=SLOW),
        sent("qwen3_next", SEQUENCE, "selective", asks=SLOW),
        sent("qwen3_next", TENSOR, "full", asks=SLOW),
        sent("qwen3_next", CONTEXT, asks=SLOW),
        sent("qwen3_next", RING, "full", asks=SLOW),
        sent("qwen3_next", CONTEXT, "selective", asks=SLOW),
        sent("glm4_moe", ZERO3, asks=SLOW),
        sent("llama", {"tensor": 4}, asks=SLOW),
        sent("llama", SEQUENCE, "selective", chunk=5, asks=SLOW),
        sent("gpt2", SEQUENCE, "full", asks=SLOW),
        sent("llama", TENSOR, "full", asks=SLOW),
        sent("llama", SEQUENCE, "every", asks=SLOW),
        sent("gpt2", ZERO3, chunk=5, asks=SLOW),
        sent("gpt2", {"data": 4, "zero": 2, "data_replicate": 2}, asks=SLOW),
        sent("llama", {**SEQUENCE, "data": 2, "zero": 1}, asks=SLOW),
        sent("gpt2", {**STAGES, **SEQUENCE}, blocks=4, asks=SLOW),
        sent("gpt2", RING, "full", asks=SLOW),
        sent("llama", {**CONTEXT, **SEQUENCE}, asks=SLOW),
        sent("llama", {**STAGES, "data": 2, "zero": 1}, blocks=4, asks=SLOW),
        sent("gpt2", {**STAGES, "data": 2, "zero": 2, "data_replicate": 2}, asks=SLOW, **FOUR),
        sent("gpt2", {**STAGES, **V}, schedule="zbv", asks=SLOW, **FOUR),
        sent("llama-tied", {**STAGES, **TENSOR, **V}, schedule="zbv", asks=SLOW, **FOUR),
        sent("llama", {**STAGES, **ZERO3, **V}, schedule="zbv", asks=SLOW, **FOUR),
        sent("llama", {**STAGES, **ZERO3, **LOOP}, schedule="interleaved-zero-bubble", asks=SLOW, **FOUR),
    ],
    at_once=10,
)
test_a_step_sends_what_is_planned = LAYOUTS.send_what_is_planned()

#: What is trained, of models of four blocks.
TRAINS = {
    **{name: {"lora": {"r": 3} | lora} for name, lora in ADAPTERS.items()},
    **{name: {"frozen": pattern} for name, pattern in FROZEN.items()},
}
OF_MOST = [name for name in TRAINS if name != "lora of experts"]


def part(trains, model="llama", mode="none", *, blocks=4, rounds=2, asks=SENT, **more):
    """Return a row; what ``Layout.of`` takes is of the layout, the rest of the case."""
    keys = ("chunk", "schedule")
    case = {key: more.pop(key) for key in keys if key in more}
    cut = [f"{key}={value}" for key, value in more.items()]
    words = [model, trains, *case.values(), *cut, f"{blocks}_blocks", f"{rounds}_rounds", mode]
    case |= TRAINS[trains] | {"mtp": 0.3 * (model == "mtp"), "rounds": rounds}
    return row("-".join(map(str, words)), few(model, blocks), more, mode, asks=asks, **case)


QUICK = [
    # Attention over context ranks, and experts, before which no backward runs.
    part("lora", mode="full", **CONTEXT),
    part("lora", mode="selective", **RING),
    part("lora of feed-forward", mode="full", **RING),
    part("lora of last blocks", "qwen3_next", "full", **CONTEXT),
    part("lora", "granitemoehybrid", "selective", **CONTEXT),
    part("lora of experts", "mixtral", "full", **CONTEXT),
    part("lora of experts", "mixtral", "selective", **SEQUENCE),
    part("the output layer", mode="full", chunk=5, **TENSOR),
    # The bias is added after the sum over the tensor ranks.
    part("the bias of one product", mode="full", **TENSOR),
    part("the bias of one product", **SEQUENCE),
    part("frozen", chunk=5, rounds=3, **ZERO3),
    part("all but the first blocks", data=2, zero=2),
    part("all but the first blocks", data=2, zero=1),
    part("lora of attention", data=2),
    part("the output layer", rounds=5, **STAGES, **ZERO3),
    part("frozen", chunk=5, rounds=3, **STAGES, **ZERO3),
    part("frozen", schedule="zbv", rounds=4, **STAGES, **ZERO3, **V),
    part("frozen", schedule="interleaved", rounds=4, blocks=8, **STAGES, **ZERO3, virtual_stages=4),
    # Its last stage also looks tokens up.
    *(part("all but the embedding", "mtp", mode, **SEQUENCE) for mode in MODES),
    part("the output layer", "mtp", "full", **SEQUENCE),
]
#: Every part in every mode and layout, of which the array has some of each; other families; schedules.
MANY = [
    *(
        part(trains, mode=mode, asks=SLOW, **layout)
        for trains in OF_MOST
        for mode in MODES
        for layout in (
            *(TENSOR, SEQUENCE, CONTEXT, RING, ZERO3, {"data": 2, "zero": 2}, STAGES),
            {**STAGES, **ZERO3, "rounds": 5},
            {**STAGES, **ZERO3, "chunk": 5, "rounds": 3},
        )
    ),
    *(
        part(trains, model, mode, asks=SLOW, **layout)
        for trains in ("lora", "frozen", "all but the first blocks")
        for model in (
            *("gpt2", "gemma2", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next", "granitemoehybrid"),
        )
        for mode in MODES
        for layout in (TENSOR, SEQUENCE, CONTEXT)
    ),
    *(
        part(trains, "mixtral", mode, data=4, expert=2, zero=zero, asks=SLOW)
        for trains in ("lora", "lora of experts", "lora of last blocks", "frozen")
        for mode in MODES
        for zero in (0, 2, 3)
    ),
    *(
        part(trains, schedule=schedule, rounds=rounds, asks=SLOW, **STAGES, **V, **layout)
        for trains in ("lora", "lora of last blocks", "frozen", "the output layer")
        for schedule in ("zbv", "dualpipev")
        for rounds, layout in ((4, {}), (4, SEQUENCE), (4, ZERO3), (7, ZERO3), (4, CONTEXT))
    ),
    # The first stage has two blocks that no backward comes to, or one of its two.
    *(
        part(trains, schedule=schedule, blocks=8, rounds=rounds, asks=SLOW, **STAGES, **ZERO3, **shape)
        for rounds in (4, 6)
        for trains in ("lora of last blocks", "all but the first blocks", "all but the first block")
        for schedule, shape in (
            ("zbv", V),
            ("dualpipev", V),
            ("interleaved", LOOP),
            ("interleaved", {"virtual_stages": 4}),
            ("interleaved-zero-bubble", LOOP),
            ("gpipe", {}),
        )
    ),
]
NAMES = {one.why for one in QUICK}
PARTS = Layouts([*QUICK, *(one for one in MANY if one.why not in NAMES)], at_once=16)
test_training_of_a_part_sends_what_is_planned = PARTS.send_what_is_planned()
