"""Each family trains in every kind of layout as on one device: two fp64 steps, to 1e-10."""

from random import Random

from support.combinations import FAMILIES as IN_COMBINATIONS
from support.configs import EXPERTS, MODELS, config
from support.layout_cases import COMPARED, Layouts, Row, axes, row
from support.models_page import axes_of
from support.short_training import Case
from trilith.models import FAMILIES
from trilith.parallel_state import Layout
from trilith.pipeline import SCHEDULE_NAMES, schedule_kind

ALL = [
    Layout.of(**axes(cut))
    for cut in ("tp2-sp", "tp2-cp2-sp", "tp4-sp", "tp2-pp2", "dp2-zero3", "pp2-dp2-zero1")
]
MIXED = [Layout.of(**axes(cut)) for cut in ("tp2-dp2-ep2-zero3-sp", "dp2-ep2-zero2", "cp2-ep2-zero1")]
FIRST = {
    family: next(name for name, raw in MODELS.items() if raw["model_type"] == family) for family in FAMILIES
}
#: Families that the covering array of ``test_array`` trains in many layouts.
IN_ARRAY = {MODELS[name]["model_type"] for name in IN_COMBINATIONS}
#: Families of kinds of blocks that the array does not have: ``test_traffic`` has them in other layouts.
SENDS = ("olmo2", "cohere", "deepseek_v2", "gpt_oss", "phi", "bloom", "gpt_neox")
#: Of the families whose kinds of blocks the array has, half are in every run.
OTHERS = sorted(FIRST.keys() - IN_ARRAY - {*SENDS})
OFTEN = {*SENDS, *Random(0).sample(OTHERS, len(OTHERS) // 2)}


def of_family(family, name):
    """Yield the family's rows; at most the first is in every run, the others are slow."""
    for number, layout in enumerate([*(MIXED if name in EXPERTS else []), *ALL]):
        slow = bool(number or family not in OFTEN)
        asks = {"measures": (family, axes_of(layout)), "slow": slow, "sends": not slow and family in SENDS}
        yield Row(f"{name}-{layout}", Case(MODELS[name], layout), **asks)


#: Families with kinds of blocks of which the array cuts none into several stages a rank.
STAGED = ("bloom", "cohere", "falcon", "gpt_neox", "gptj", "granitemoehybrid", "opt", "phi")
STAGED += ("qwen3_5_text", "qwen3_next")
LOOPS, SHAPED = ("interleaved", "interleaved-zero-bubble"), ("zbv", "dualpipev")


def in_stages(family, name):
    """Yield a row of four blocks for each schedule. Of ``STAGED``, a loop or a V is in every run."""
    of_every_run = (LOOPS + SHAPED)[STAGED.index(family) % 4] if family in STAGED else ""
    for schedule in SCHEDULE_NAMES:
        kind = schedule_kind(schedule)
        layout = Layout.of(pipeline=2, virtual_stages=kind.virtual_stages, v_shape=kind.v_shape)
        case = Case(config(name, layers=4), layout, schedule=schedule, samples=kind.least_micro_batches(2))
        yield Row(f"{name}-{schedule}", case, slow=schedule != of_every_run, sends=False)


LAYOUTS = Layouts(
    [case for family, name in FIRST.items() for case in (*of_family(family, name), *in_stages(family, name))],
)
test_each_family_equals_one_device = LAYOUTS.equal_one_device()
test_blocks_that_the_array_does_not_have_send_what_is_planned = LAYOUTS.send_what_is_planned()

#: Torch's compiler traces and differentiates each block, or its parts that can be one graph.
COMPILED = {name: Case(MODELS[name], ALL[0], compiled="aot_eager") for name in FIRST.values()}
test_compiled_blocks_of_each_family_equal_one_device = Layouts(
    [
        Row(name, COMPILED[name], measures=(family, ["compile"]), slow=True, sends=False)
        for family, name in FIRST.items()
    ],
    at_once=1,
).equal_one_device()

SLOW = COMPARED | {"slow": True}
BIASES = "biases-by-distance-of-positions-in-documents-over-context-ranks"
SPECIAL = Layouts(
    [
        # The bias of the output layer is cut with the vocabulary in the chunked loss, too.
        row("bias-of-the-output-layer-in-a-chunked-loss", "gptj", ALL[0], chunk=5, z_loss=0.01),
        row("embeddings-narrower-than-hidden-states", "opt-350m", ALL[0], chunk=5),
        *(
            row(f"embeddings-narrower-than-hidden-states-{layout}", "opt-350m", layout, asks=SLOW)
            for layout in (*ALL[1:], Layout.of(pipeline=2, context=2))
        ),
        row(BIASES, "falcon-rw", "cp2-tp2-ring", documents=True),
    ]
)
test_what_few_families_have_equals_one_device = SPECIAL.equal_one_device()
test_what_few_families_have_sends_what_is_planned = SPECIAL.send_what_is_planned()
