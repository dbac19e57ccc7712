"""Compare what ranks send in a step with the plan, where the covering array cannot: axes, kinds, bytes.

Families that are not in the array, two precisions, three choices at once, and training of a part: a backward
ends at the first trained parameter; what comes before it sends nothing in the backward, is not gathered for
it and is not computed again. Drawn layouts are in ``test_drawn_layouts.py``.
"""

from itertools import product

import torch
from support.combinations import ADAPTERS, FROZEN
from support.configs import config
from support.layout_cases import SENT, Layouts, axes, row

MODES = ("none", "selective", "full")
BF16 = {"dtype": torch.float32, "compute": torch.bfloat16}
SLOW = SENT | {"slow": True}
FEW_EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SIXTEENS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
#: By name: a family and what differs. Products in float8 need widths of sixteens.
CHANGED = {
    "mtp": ("deepseek_v3", {"mtp": True, "num_nextn_predict_layers": 1}),
    "two-experts": ("glm4_moe", FEW_EXPERTS),
    "sixteens": ("llama", {**SIXTEENS, "attention_bias": False, "mlp_bias": False}),
}


def few(model, blocks):
    """Return a config of a few blocks."""
    family, changes = CHANGED.get(model, (model, {}))
    return config(family, layers=blocks, **changes)


def sent(model, layout, mode="none", *, blocks=2, asks=SENT, **more):
    """Return a row. Along tensor and context ranks each block sends for itself: two blocks do."""
    words = [model, *(f"{key}={value}" for key, value in axes(layout).items()), mode, f"{blocks}_blocks"]
    words += [f"{key}={value}" for key, value in more.items()]
    why, mtp = "-".join(words).replace("torch.", ""), 0.3 * (model == "mtp")
    return row(why, few(model, blocks), layout, mode, asks=asks, mtp=mtp, **more)


FOUR = {"blocks": 4, "rounds": 4}
ZBV, LOOP = FOUR | {"schedule": "zbv"}, FOUR | {"schedule": "interleaved-zero-bubble"}
#: Layout and checkpointing by model, of two blocks. A block that is computed again also sends all that one
#: sends which is not: such rows are slow.
ALWAYS = {
    "deepseek_v2": ("tp2-sp full",),
    "mtp": ("tp2-sp selective", "cp2-ring full"),
    "two-experts": ("dp4-zero1",),  # each expert is cut along its width
    # Experts are gathered and summed by themselves, over the ranks that hold the same ones.
    "glm4_moe": ("dp4-ep2-zero0", "dp4-ep2-zero2-copies2"),
}
#: Families that `test_families` asks in every run, in one layout; and what two of the rows above have apart.
SELDOM = {
    "mtp": ("tp2",),
    "glm4_moe": ("dp4-ep2-zero3",),
    "olmo2": ("tp2", "tp2 full", "tp2-sp selective"),
    "gpt_oss": ("tp2", "tp2 full", "cp2 full"),
    "cohere": ("tp2", "tp2-sp full", "tp2 selective"),
    "deepseek_v2": ("tp2", "tp2 selective"),
    "phi": ("tp2", "tp2 full"),
}
LAYOUTS = Layouts(
    *(sent(model, *words.split()) for model, every in ALWAYS.items() for words in every),
    *(sent(model, *words.split(), asks=SLOW) for model, every in SELDOM.items() for words in every),
    sent("mtp", "tp2-sp", chunk=5),
    sent("sixteens", "tp2", "full", float8="tensorwise"),
    sent("sixteens", "tp2", "full", float8="rowwise", asks=SLOW),
    sent("sixteens", "tp2-sp", "selective", float8="rowwise"),
    sent("sixteens", "tp2-sp", float8="tensorwise", asks=SLOW),
    sent("gpt2", "tp4-sp", **BF16),
    sent("llama", "dp2-zero3", **BF16),
    *(sent("llama", f"dp2-zero{zero}", asks=SLOW, **BF16) for zero in (0, 1, 2)),
    sent("llama-tied", "pp2-dp2-zero1", blocks=4, **BF16),
    sent("llama", "cp2-zero1", **BF16),
    # On a V's first rank both ends of the model use the root, and its sums are of what each end uses.
    *(sent("mtp", f"pp2-dp2-zero{zero}-v", **ZBV) for zero in (0, 2)),
    sent("mtp", "pp2-dp2-zero3-v", asks=SLOW, **ZBV),
    sent("llama", "pp2-dp2-zero3-copies2-loop2", asks=SLOW, **LOOP),
    *(sent("gpt_oss", f"pp2-cp2-{cut}", asks=SLOW, **ZBV) for cut in ("ring-v", "v")),
    sent("llama-tied", "pp2-dp2-zero3-v", schedule="dualpipev", blocks=4, rounds=5),
    sent("llama-tied", "pp2-dp2-zero3-loop2", schedule="interleaved", chunk=5, **FOUR),
)
test_a_step_sends_what_is_planned = LAYOUTS.send_what_is_planned()

#: What is trained, of models of four blocks.
TRAINS = {name: {"lora": {"r": 3} | lora} for name, lora in ADAPTERS.items()}
TRAINS |= {name: {"frozen": pattern} for name, pattern in FROZEN.items()}
OF_MOST = [name for name in TRAINS if name != "lora of experts"]


def part(trains, layout, mode="none", *, model="llama", blocks=4, rounds=2, asks=SENT, **case):
    """Return a row of training of a part."""
    cut = [f"{key}={value}" for key, value in axes(layout).items()]
    words = [model, trains, *case.values(), *cut, f"{blocks}_blocks", f"{rounds}_rounds", mode]
    case |= TRAINS[trains] | {"mtp": 0.3 * (model == "mtp"), "rounds": rounds}
    return row("-".join(map(str, words)), few(model, blocks), layout, mode, asks=asks, **case)


QUICK = [
    # Attention over context ranks, and experts, before which no backward runs.
    part("lora", "cp2", "full", asks=SLOW),
    part("lora", "cp2-ring", "selective"),
    part("lora of feed-forward", "cp2-ring", "full", asks=SLOW),
    part("lora of last blocks", "cp2", "full", model="qwen3_next"),
    part("lora of experts", "cp2", "full", model="mixtral"),
    part("lora of experts", "tp2-sp", "selective", model="mixtral", asks=SLOW),
    part("the output layer", "tp2", "full", chunk=5, asks=SLOW),
    # The bias is added after the sum over the tensor ranks.
    part("the bias of one product", "tp2", "full", asks=SLOW),
    part("the bias of one product", "tp2-sp"),
    part("frozen", "dp2-zero3", chunk=5, rounds=3),
    part("all but the first blocks", "dp2-zero1", asks=SLOW),
    part("lora of attention", "dp2", asks=SLOW),
    part("the output layer", "pp2-dp2-zero3", rounds=5),
    part("frozen", "pp2-dp2-zero3", chunk=5, rounds=3, asks=SLOW),
    part("frozen", "pp2-dp2-zero3-v", schedule="zbv", rounds=4),
    part("frozen", "pp2-dp2-zero3-loop4", schedule="interleaved", rounds=4, blocks=8),
    # Its last stage also looks tokens up.
    part("all but the embedding", "tp2-sp", "selective", model="mtp"),
    *(part("all but the embedding", "tp2-sp", mode, model="mtp", asks=SLOW) for mode in ("none", "full")),
    part("the output layer", "tp2-sp", "full", model="mtp", asks=SLOW),
]
#: Every part in every mode and layout, of which the array has some of each; other families; schedules.
WHERE = [(cut, {}) for cut in ("tp2", "tp2-sp", "cp2", "cp2-ring", "dp2-zero3", "dp2-zero2", "pp2")]
WHERE += [("pp2-dp2-zero3", {"rounds": 5}), ("pp2-dp2-zero3", {"chunk": 5, "rounds": 3})]
OTHERS = ("gpt2", "gemma2", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next", "granitemoehybrid")
OF_EXPERTS = ("lora", "lora of experts", "lora of last blocks", "frozen")
OF_A_V = ("lora", "lora of last blocks", "frozen", "the output layer")
IN_A_V = (("v", 4), ("v-tp2-sp", 4), ("v-dp2-zero3", 4), ("v-dp2-zero3", 7), ("v-cp2", 4))
#: The first stage has two blocks that no backward comes to, or one of its two.
OF_LAST = ("lora of last blocks", "all but the first blocks", "all but the first block")
SHAPES = [("zbv", "v"), ("dualpipev", "v"), ("interleaved", "loop2"), ("interleaved", "loop4")]
SHAPES += [("interleaved-zero-bubble", "loop2"), ("gpipe", "")]
MANY = [
    part(trains, cut, mode, asks=SLOW, **more) for trains, mode, (cut, more) in product(OF_MOST, MODES, WHERE)
]
for trains, model, mode, cut in product(
    ("lora", "frozen", "all but the first blocks"), OTHERS, MODES, ("tp2", "tp2-sp", "cp2")
):
    MANY.append(part(trains, cut, mode, model=model, asks=SLOW))
for trains, mode, zero in product(OF_EXPERTS, MODES, (0, 2, 3)):
    MANY.append(part(trains, f"dp4-ep2-zero{zero}", mode, model="mixtral", asks=SLOW))
for trains, name, (cut, rounds) in product(OF_A_V, ("zbv", "dualpipev"), IN_A_V):
    MANY.append(part(trains, f"pp2-{cut}", schedule=name, rounds=rounds, asks=SLOW))
for rounds, trains, (name, shape) in product((4, 6), OF_LAST, SHAPES):
    cut = f"pp2-dp2-zero3-{shape}"
    MANY.append(part(trains, cut, schedule=name, blocks=8, rounds=rounds, asks=SLOW))
NAMES = {one.why for one in QUICK}
PARTS = Layouts([*QUICK, *(one for one in MANY if one.why not in NAMES)])
test_training_of_a_part_sends_what_is_planned = PARTS.send_what_is_planned()
