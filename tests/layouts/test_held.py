"""Compare the bytes that a rank holds with the plan: a step's peak within 97% to 101%, the rest exactly.

The peak is also compared with that of the same step on the simulated device, within 0.1%.

Sizes at which the parts of a plan are of the same order: each row has another worst instant.
"""

from dataclasses import replace
from itertools import product

import torch
from support.combinations import Choice
from support.configs import config
from support.layout_cases import HELD, Layouts, Row, row

SLOW = HELD | {"slow": True}
LORA = {"r": 8, "lora_dropout": 0.05}
ZEROS = "dp2-zero0 dp2-zero1 dp2-zero2 dp2-zero3"
ONCE, THRICE = {"micro_batch": 1, "rounds": 1}, {"micro_batch": 1, "rounds": 3}
BF16, GPIPE = {"bf16": True}, {"rounds": 4, "schedule": "gpipe"}


def held(why, model, layout="", mode="none", *, bf16=False, asks=HELD, **more):
    """Return a row in fp32, or computed in bf16, of 128 tokens; most have two micro-batches of two rows."""
    compute = torch.bfloat16 if bf16 else torch.float32
    mtp = 0.3 * ("mtp" in model)
    more = {"length": 128, "dtype": torch.float32, "micro_batch": 2, "rounds": 2, "mtp": mtp} | more
    return row(why, config(f"held/{model}"), layout, mode, compute=compute, asks=asks, **more)


def further(model, layout="", mode="none", **more):
    """Return a row that differs from one of those with a reason in one choice."""
    words = [model, layout, mode] if layout else [model, mode]
    words += [f"{key}={'yes' if key == 'lora' else value}" for key, value in more.items()]
    return held("-".join(words), model, layout, mode, asks=SLOW, **more)


def each(models, layouts, modes, *options):
    """Return a row of each model in each layout, mode and options; ``-`` is one device."""
    every = product(models.split(), layouts.split(), modes.split(), options or ({},))
    return [further(model, cut.strip("-"), mode, **more) for model, cut, mode, more in every]


def frozen(*names):
    return {"frozen": rf"^({'|'.join(names)})\b"}


def of_array(why, choice, *ratios, asks=HELD):
    """Return the row of a choice of the covering array, in fp32 and with rows of 128 tokens."""
    longer = {key: 256 for key in ("max_position_embeddings", "n_positions") if key in choice.config}
    case = replace(choice.case, config=choice.config | longer, length=128, dtype=torch.float32)
    return Row(why, case, **asks | ({"holds": ratios} if ratios else {}))


STAGES = {"pipeline": 2, "micro_batch": 2}
SELECTIVE = {"checkpointing": "selective"}
INTERLEAVED = Choice("llama-tied-kv1", schedule="interleaved", split=True, **SELECTIVE, **STAGES)
MIXED = {"tensor": 2, "data": 2, "zero": 2, "sequence": True, "loss_chunk": 5, **SELECTIVE}
BUBBLES = {"pipeline": 2, "data": 2, "replicas": 2, "zero": 1, "schedule": "interleaved-zero-bubble"}
ONE_NORM = {"tensor": 2, "sequence": True, "schedule": "interleaved", "loss_chunk": 5, **SELECTIVE, **STAGES}
ONE_BIAS = {"pipeline": 2, "schedule": "gpipe", "checkpointing": "every"}
#: Each pair of choices is in the covering array; the rows above have none of these three at once.
OF_ARRAY = [
    of_array("zero bubbles of shards with replicas", Choice("gpt2", **BUBBLES)),
    of_array("interleaved and selective with tied weights", INTERLEAVED),
    of_array("a part in ranks of both kinds", Choice("mistral", trains="all but the first blocks", **MIXED)),
    of_array("a recurrence over context ranks", Choice("qwen3_next", context=2, zero=3, micro_batch=2)),
    of_array(
        "a ring in both directions of a V",
        Choice("gemma2", context=2, zero=1, ring=True, schedule="dualpipev", split=True, **STAGES),
    ),
]
#: Where the plan is wrong, by its cause, and by how much: what a rank holds over what is planned.
WRONG = [
    of_array("wrong: masks of documents", replace(INTERLEAVED, documents=True), 1.20, 1.08),
    of_array(
        "wrong: a first stage without a backward under gpipe",
        Choice("gemma2", schedule="gpipe", split=True, trains="all but the first block", **STAGES),
        *(0.966, 0.999),
        asks=SLOW,
    ),
    of_array(
        "wrong: a first stage that trains one bias under gpipe",
        Choice("llama-tied-kv1", trains="the bias of one product", **ONE_BIAS),
        *(0.929, 1.014),
        asks=SLOW,
    ),
    of_array(
        "wrong: the last norm alone under an interleaved schedule",
        Choice("mixtral", trains="the last norm", **ONE_NORM),
        *(1.016, 1.016, 1.021, 1.021),
        asks=SLOW,
    ),
]


TABLE = [
    *OF_ARRAY,
    *WRONG,
    held("replicas", "llama", "dp2-zero0", asks=SLOW),
    held("replicas of shards", "llama", "dp4-zero2-copies2", bf16=True, micro_batch=1),
    held("shards on the host", "llama", "dp2-zero3", bf16=True, micro_batch=1, offload=True),
    held("recurrence and experts", "granitemoehybrid", "dp2-zero1", asks=SLOW),
    held("latent attention", "deepseek_v3", "dp2-zero3", asks=SLOW),
    held("a padded vocabulary", "three", "tp3"),
    held("stages that compute again", "llama", "pp2", "full", micro_batch=4, rounds=4, asks=SLOW),
    held("sequence and selective", "llama", "tp2-sp", "selective", bf16=True, micro_batch=4),
    held("logits in chunks", "llama", bf16=True, chunk=64, micro_batch=4),
    held("gated delta rule", "qwen3_next", asks=SLOW),
    # Its gradient is written over the logits.
    held("one loss over the logits of all blocks", "mtp", "pp2", micro_batch=4, rounds=4),
    held("adapters and logits in chunks", "llama", chunk=64, lora=LORA, asks=SLOW),
    held("adapters on a sharded base", "llama", "dp2-zero3", "full", bf16=True, chunk=64, lora=LORA),
    held("frozen weights computed with as they are stored", "wide", mode="full", bf16=True, lora=LORA),
    held(
        "worst in the first forward with what FSDP received for the last block",
        "wide",
        "dp2-zero2",
        bf16=True,
        micro_batch=1,
        lora=LORA,
    ),
    held("transformers' code of its blocks", "arcee", "tp2", asks=SLOW),
    *each("arcee", "- cp2 tp2-sp", "none"),
    further("arcee", "pp2", rounds=4),
    held("transformers' code over shards", "arcee", "dp2-zero3", asks=SLOW | {"holds": (0.96,)}),
    held("ring and selective", "llama", "cp2-zero1-ring", "selective", asks=SLOW),
    held("interleaved", "llama", "pp2-loop2", rounds=4, schedule="interleaved", asks=SLOW),
    held("interleaved zero bubble", "llama", "pp2-loop2", rounds=4, schedule="interleaved-zero-bubble"),
    held("scores written out", "gemma2", "tp2-sp", "selective", asks=SLOW),
    held("scores of a window", "gpt_oss", micro_batch=4, asks=SLOW),
    held("zbv over shards", "llama", "dp2-zero3-pp2-v", rounds=4, schedule="zbv"),
    held("worst where the first backward begins", "llama", "pp2", rounds=4, schedule="gpipe"),
    held("worst where the first backward ends", "wide", rounds=1, asks=SLOW),
    held("worst in a product with the gradient of its weight", "wide", "pp2", micro_batch=1),
    held("one micro-batch", "wide", "dp2-zero2", bf16=True, micro_batch=1, rounds=1),
    held("worst where weights are copied from what FSDP received", "wide_experts", "dp2-zero3", **ONCE),
    held(
        "worst in the mixer beside the gradients of experts behind it",
        "qwen3_next",
        "dp2-zero3",
        "full",
        asks=SLOW,
    ),
    # It adds up the two gradients of its weight.
    held("worst in the backward of the embedding", "tied", micro_batch=1),
    held("worst in the backward of a sharded embedding", "tied", "dp2-zero1", micro_batch=1, rounds=1),
    *each("mtp", "-", "full selective"),
    *each("mtp", "-", "none", {"bf16": True}, {"chunk": 64}),
    *each("mtp_2", "-", "none full", {"rounds": 1}),
    *each("mtp_2", "dp2-zero2", "none", {"micro_batch": 1}),
    *each("mtp_2", "dp2-zero3", "full", {"micro_batch": 1}),
    *each("mtp", "pp2", "full", {"micro_batch": 4, "rounds": 4}),
    further("llama", mode="full", bf16=True, chunk=64, micro_batch=16, float8="tensorwise"),
    *each("llama", "- dp2-zero1 dp2-zero3", "none"),
    *each("deepseek_v3 qwen3_next granitemoehybrid gpt2", "tp2-sp", "none"),
    further("deepseek_v3", mode="full", chunk=64, micro_batch=4),
    further("qwen3_next", "tp2-sp", "selective", bf16=True, micro_batch=4),
    further("granitemoehybrid", "cp2", "selective"),
    further("gpt2", mode="every"),
    *each("gpt2", "dp2-zero2 cp2", "none"),
    further("glm4_moe", "dp2-zero3"),
    further("llama", "cp2-zero3", micro_batch=4),
    held("a block reduced behind the root", "llama", "dp2-zero2", **frozen("embed", "layers.[012]")),
    # The forward of frozen blocks, which are larger than those that are trained.
    further("moe_first", "dp2-zero3", micro_batch=1, **frozen("embed", "layers.0", "layers.1")),
    held("only frozen blocks", "wide", "dp2-zero3", micro_batch=1, **frozen("embed", "layers", "norm")),
    further("mtp_wide", "dp2-zero3", "full", micro_batch=1),
    further("mtp_wide", "dp2-zero2", **ONCE),
    further("gemma2", micro_batch=4),
    further("gpt2", "pp2", rounds=4),
    *each("llama", "dp2-zero2-pp2 dp2-zero3-pp2", "none", {"rounds": 4}),
    further("llama", "pp2-v", rounds=4, schedule="zbv"),
    further("llama", "dp2-zero2-pp2-v", rounds=4, schedule="dualpipev"),
    *each("wide", ZEROS, "none", ONCE, THRICE, THRICE | BF16),
    *each("wide", "dp2-zero0 dp2-zero1 dp2-zero3", "none", ONCE | BF16),
    further("wide", "dp2-zero1", micro_batch=1, lora=LORA),
    *each("deepseek_v3 gpt_oss", "-", "none", {"rounds": 1}),
    *each("tied", "dp2-zero0 dp2-zero3", "none", THRICE),
    *each("tied", "dp2-zero2", "none", ONCE),
    *each("tied", f"- tp2 {ZEROS}", "none", ONCE | BF16, THRICE | BF16),
    *each("wide_experts", "dp2-zero2", "none", ONCE, THRICE),
    *each("wide_experts", "dp2-zero3", "none", THRICE),
    *each("wide_experts", "dp2-zero3", "selective full", ONCE),
    *each("wide_experts", "dp2-zero3", "none full", ONCE | BF16),
    *each("wide_experts", "dp2-zero2", "none full", ONCE | BF16, THRICE | BF16),
    *each("even_experts", "dp2-zero0-ep2 dp2-zero1-ep2 dp2-zero2-ep2", "none", ONCE, THRICE),
    *each("qwen3_next", "dp2-zero3", "none full", {"rounds": 1}),
    further("qwen3_next", "dp2-zero3", "selective"),
    *each("granitemoehybrid", "dp2-zero2 dp2-zero3", "full", THRICE),
    further("wide", mode="full", rounds=1),
    further("wide", chunk=64, bf16=True, rounds=1),
    further("llama", "pp2-loop2", rounds=2, schedule="interleaved"),
    # In the second part of the first stage's backward the gradients of its blocks wait for the end.
    further("deep", "dp2-zero2-pp2-v", micro_batch=1, rounds=4, schedule="zbv"),
    *each("llama", "pp2-dp2-zero1 pp2-dp2-zero2 pp2-dp2-zero3", "none", GPIPE),
]
#: Which every run simulates too: of each kind of axis, schedule, precision and loss one, and not those with
#: thousands of operators in a step. The others are simulated by the nightly tests.
SIMULATED = (
    *("sequence and selective", "logits in chunks", "interleaved zero bubble", "zbv over shards"),
    *("frozen weights computed with as they are stored", "zero bubbles of shards with replicas"),
    "worst in the first forward with what FSDP received for the last block",
    "worst where weights are copied from what FSDP received",
    "worst in the backward of a sharded embedding",
)
QUICK = [one for one in TABLE if not one.slow]
assert {row.why for row in QUICK} >= {*SIMULATED}
LAYOUTS = Layouts(
    [replace(one, simulates=one.slow or one.why in SIMULATED) for one in TABLE],
    [replace(one, why=f"{one.why}, simulated", slow=True) for one in QUICK if one.why not in SIMULATED],
)
test_a_rank_holds_what_is_planned = LAYOUTS.hold_what_is_planned()
