"""Compare the bytes that a rank holds with the plan: a step's peak within 97% to 101%, the rest exactly.

Sizes at which the parts of a plan are of the same order: each row has another worst instant.
"""

from dataclasses import replace

import torch
from support.combinations import Choice
from support.configs import config
from support.layout_cases import HELD, Layouts, Row, row

SLOW = HELD | {"slow": True}
LORA = {"r": 8, "lora_dropout": 0.05}
LOOP, SHAPED = {"virtual_stages": 2}, {"virtual_stages": 2, "v_shape": True}
SEQUENCE = {"tensor": 2, "sequence": True}


def zero(stage, **more):
    return {"data": 2, "zero": stage, **more}


def held(why, model, layout=None, mode="none", *, bf16=False, asks=HELD, **more):
    """Return a row in fp32, or computed in bf16, of 128 tokens; most have two micro-batches of two rows."""
    compute = torch.bfloat16 if bf16 else torch.float32
    mtp = 0.3 * ("mtp" in model)
    more = {"length": 128, "dtype": torch.float32, "micro_batch": 2, "rounds": 2, "mtp": mtp} | more
    return row(why, config(f"held/{model}"), layout or {}, mode, compute=compute, asks=asks, **more)


def further(model, layout=None, mode="none", **more):
    """Return a row that differs from one of those with a reason in one choice."""
    words = [model, *(f"{key}={value}" for key, value in (layout or {}).items()), mode]
    words += [f"{key}={'yes' if key == 'lora' else value}" for key, value in more.items()]
    return held("-".join(words), model, layout, mode, asks=SLOW, **more)


def frozen(*names):
    return {"frozen": rf"^({'|'.join(names)})\b"}


def of_array(why, choice, *ratios):
    """Return the row of a choice of the covering array, in fp32 and with rows of 128 tokens."""
    longer = {key: 256 for key in ("max_position_embeddings", "n_positions") if key in choice.config}
    case = replace(choice.case, config=choice.config | longer, length=128, dtype=torch.float32)
    return Row(why, case, **HELD | ({"holds": ratios} if ratios else {}))


STAGES = {"pipeline": 2, "micro_batch": 2}
INTERLEAVED = Choice(
    "llama-tied-kv1", schedule="interleaved", split=True, checkpointing="selective", **STAGES
)
#: Each pair of choices is in the covering array; the rows above have none of these three at once.
OF_ARRAY = [
    of_array("interleaved and selective with tied weights", INTERLEAVED),
    of_array(
        "a part in ranks of both kinds",
        Choice(
            "mistral",
            **{"tensor": 2, "data": 2, "zero": 2, "sequence": True, "loss_chunk": 5},
            **{"trains": "all but the first blocks", "checkpointing": "selective"},
        ),
    ),
    of_array(
        "a ring in both directions of a V",
        Choice("gemma2", context=2, zero=1, ring=True, schedule="dualpipev", split=True, **STAGES),
    ),
]
#: Where the plan is wrong, by its cause, and by how much: what a rank holds over what is planned.
WRONG = [
    of_array("wrong: masks of documents", replace(INTERLEAVED, documents=True), 1.21, 1.11),
    of_array(
        "wrong: a first stage without a backward under gpipe",
        Choice("gemma2", schedule="gpipe", split=True, trains="all but the first block", **STAGES),
        *(1.845, 0.941),
    ),
    of_array(
        "wrong: a first stage that trains one bias under gpipe",
        Choice(
            "llama-tied-kv1",
            **{"pipeline": 2, "schedule": "gpipe", "checkpointing": "every"},
            trains="the bias of one product",
        ),
        *(0.57, 1.004),
    ),
    of_array(
        "wrong: a recurrence over context ranks",
        Choice("qwen3_next", context=2, zero=3, micro_batch=2),
        0.827,
    ),
    of_array(
        "wrong: zero bubbles of shards with replicas",
        Choice(
            "gpt2",
            **{"pipeline": 2, "data": 2, "replicas": 2, "zero": 1, "schedule": "interleaved-zero-bubble"},
        ),
        *(0.881, 0.881, 0.922, 0.922),
    ),
    of_array(
        "wrong: the last norm alone under an interleaved schedule",
        Choice(
            "mixtral",
            **{"tensor": 2, "sequence": True, "schedule": "interleaved", "trains": "the last norm"},
            **{"checkpointing": "selective", "loss_chunk": 5},
            **STAGES,
        ),
        *(1.145, 1.145, 1.136, 1.136),
    ),
]


LAYOUTS = Layouts(
    [
        *OF_ARRAY,
        *WRONG,
        held("replicas", "llama", zero(0)),
        held("recurrence and experts", "granitemoehybrid", zero(1)),
        held("latent attention", "deepseek_v3", zero(3)),
        held("a padded vocabulary", "three", {"tensor": 3}),
        held("stages that compute again", "llama", {"pipeline": 2}, "full", micro_batch=4, rounds=4),
        held("sequence and selective", "llama", SEQUENCE, "selective", bf16=True, micro_batch=4),
        held("logits in chunks", "llama", bf16=True, chunk=64, micro_batch=4),
        held("gated delta rule", "qwen3_next"),
        # Its gradient is written over the logits.
        held("one loss over the logits of all blocks", "mtp", {"pipeline": 2}, micro_batch=4, rounds=4),
        held("adapters and logits in chunks", "llama", chunk=64, lora=LORA),
        held("adapters on a sharded base", "llama", zero(3), "full", bf16=True, chunk=64, lora=LORA),
        held("frozen weights computed with as they are stored", "wide", mode="full", bf16=True, lora=LORA),
        held(
            "worst in the first forward with what FSDP received for the last block",
            "wide",
            zero(2),
            bf16=True,
            micro_batch=1,
            lora=LORA,
        ),
        held("ring and selective", "llama", {"context": 2, "zero": 1, "ring": True}, "selective"),
        held("interleaved", "llama", {"pipeline": 2, **LOOP}, rounds=4, schedule="interleaved"),
        held(
            "interleaved zero bubble",
            "llama",
            {"pipeline": 2, **LOOP},
            rounds=4,
            schedule="interleaved-zero-bubble",
        ),
        held("scores written out", "gemma2", SEQUENCE, "selective"),
        held("scores of a window", "gpt_oss", micro_batch=4),
        held("zbv over shards", "llama", zero(3, pipeline=2, **SHAPED), rounds=4, schedule="zbv"),
        held("worst where the first backward begins", "llama", {"pipeline": 2}, rounds=4, schedule="gpipe"),
        held("worst where the first backward ends", "wide", rounds=1),
        held("worst in a product with the gradient of its weight", "wide", {"pipeline": 2}, micro_batch=1),
        held("one micro-batch", "wide", zero(2), bf16=True, micro_batch=1, rounds=1),
        held(
            "worst where weights are copied from what FSDP received",
            "wide_experts",
            zero(3),
            micro_batch=1,
            rounds=1,
        ),
        held("worst in the mixer beside the gradients of experts behind it", "qwen3_next", zero(3), "full"),
        # It adds up the two gradients of its weight.
        held("worst in the backward of the embedding", "tied", micro_batch=1),
        held("worst in the backward of a sharded embedding", "tied", zero(1), micro_batch=1, rounds=1),
        further("mtp", mode="full"),
        further("mtp", mode="selective"),
        further("mtp", bf16=True),
        further("mtp", chunk=64),
        *(further("mtp_2", mode=mode, rounds=1) for mode in ("none", "full")),
        *(further("mtp_2", zero(stage), mode, micro_batch=1) for stage, mode in ((2, "none"), (3, "full"))),
        further("mtp", {"pipeline": 2}, "full", micro_batch=4, rounds=4),
        further("llama", mode="full", bf16=True, chunk=64, micro_batch=16, float8="tensorwise"),
        *(further("llama", zero(stage)) for stage in (1, 3)),
        further("llama"),
        *(further(model, SEQUENCE) for model in ("deepseek_v3", "qwen3_next", "granitemoehybrid", "gpt2")),
        further("deepseek_v3", mode="full", chunk=64, micro_batch=4),
        further("qwen3_next", SEQUENCE, "selective", bf16=True, micro_batch=4),
        further("granitemoehybrid", {"context": 2}, "selective"),
        further("gpt2", zero(2)),
        *(further("wide", zero(stage), micro_batch=1, rounds=3) for stage in range(4)),
        further("gpt2", mode="every"),
        further("glm4_moe", zero(3)),
        further("gpt2", {"context": 2}),
        further("llama", {"context": 2, "zero": 3}, micro_batch=4),
        further("llama", zero(2), **frozen("embed", *(f"layers.{number}" for number in range(3)))),
        # The forward of frozen blocks, which are larger than those that are trained.
        further("moe_first", zero(3), micro_batch=1, **frozen("embed", "layers.0", "layers.1")),
        further("wide", zero(3), micro_batch=1, **frozen("embed", "layers", "norm")),
        further("mtp_wide", zero(3), "full", micro_batch=1),
        further("mtp_wide", zero(2), micro_batch=1, rounds=1),
        further("llama", {"pipeline": 2, **SHAPED}, rounds=4, schedule="zbv"),
        further("gpt2", {"pipeline": 2}, rounds=4),
        further("gemma2", micro_batch=4),
        *(further("llama", zero(stage, pipeline=2), rounds=4) for stage in (2, 3)),
        further("llama", zero(2, pipeline=2, **SHAPED), rounds=4, schedule="dualpipev"),
        *(
            further("wide", zero(stage), micro_batch=1, rounds=rounds, bf16=bf16)
            for stage in range(4)
            for bf16, rounds in ((True, 3), (True, 1), (False, 1))
            if (stage, bf16, rounds) != (2, True, 1)
        ),
        *(further(model, rounds=1) for model in ("deepseek_v3", "gpt_oss")),
        *(
            further("tied", zero(stage), micro_batch=1, rounds=rounds)
            for stage, rounds in ((0, 3), (2, 1), (3, 3))
        ),
        *(
            further("tied", layout, bf16=True, micro_batch=1, rounds=rounds)
            for layout in (None, {"tensor": 2}, *map(zero, range(4)))
            for rounds in (1, 3)
        ),
        further("wide", zero(1), micro_batch=1, lora=LORA),
        *(
            further("wide_experts", zero(stage), micro_batch=1, rounds=rounds)
            for stage, rounds in ((2, 1), (2, 3), (3, 3))
        ),
        *(
            further("wide_experts", zero(stage), mode, bf16=bf16, micro_batch=1, rounds=rounds)
            for stage, mode, bf16, rounds in (
                *((3, mode, False, 1) for mode in ("selective", "full")),
                *((3, mode, True, 1) for mode in ("none", "full")),
                *((2, mode, True, rounds) for mode in ("none", "full") for rounds in (1, 3)),
            )
        ),
        *(
            further("even_experts", zero(stage, expert=2), micro_batch=1, rounds=rounds)
            for stage in range(3)
            for rounds in (1, 3)
        ),
        *(
            further("qwen3_next", zero(3), mode, rounds=rounds)
            for mode, rounds in (("none", 1), ("selective", 2), ("full", 1))
        ),
        *(further("granitemoehybrid", zero(stage), "full", micro_batch=1, rounds=3) for stage in (2, 3)),
        further("wide", mode="full", rounds=1),
        further("wide", chunk=64, bf16=True, rounds=1),
        further("llama", {"pipeline": 2, **LOOP}, rounds=2, schedule="interleaved"),
        # In the second part of the first stage's backward the gradients of its blocks wait for the end.
        further("deep", zero(2, pipeline=2, **SHAPED), micro_batch=1, rounds=4, schedule="zbv"),
        *(further("llama", zero(stage, pipeline=2), rounds=4, schedule="gpipe") for stage in (1, 2, 3)),
    ],
    at_once=6,
)
test_a_rank_holds_what_is_planned = LAYOUTS.hold_what_is_planned()
