"""A rank's whole step on a device that is not there: nothing is mixed, and no wait is new.

Forward, backward, clip, update, in bf16. A few layouts and families run always, the whole covering array and
every family in the nightly tests.
"""

import traceback
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.combinations import LONG, Choice, covering_array
from support.configs import MODELS, TINIEST_LLAMA
from support.short_runs import tiny_recipe
from support.short_training import Case, build_rank
from support.simulated_steps import step_counts
from torch import nn
from torch.nn import functional as F
from trilith.checkpoints import Described, begin_moments, load
from trilith.checkpoints.rank_files import write_file
from trilith.checkpoints.saver import Contents, Saver
from trilith.generation import Sampling, generate
from trilith.layers.host_numbers import on_host
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import Layout
from trilith.pipeline import driver
from trilith.pipeline.relay import Travels
from trilith.recipes.recipe import parse_recipe
from trilith.recipes.sections import MemorySection
from trilith.simulation import WAITS, Wait, simulated_rank
from trilith.simulation.backend import FakeTensor, Module, register
from trilith.training import Step
from trilith.training.trainer import Trainer

BF16 = {"dtype": torch.float32, "compute": torch.bfloat16}

#: Between them every schedule, axis and stage of ZeRO.
SOME = [
    Choice("llama-kv1", tensor=2, data=2, zero=3, sequence=True, documents=True, checkpointing="selective"),
    Choice("mixtral", data=2, zero=2, expert=2, trains="lora", offload=True),
    Choice("gpt2", pipeline=2, data=2, zero=1, schedule="gpipe", trains="frozen", checkpointing="full"),
    Choice("llama-tied", pipeline=2, smoothing=0.1, loss_chunk=5),
    Choice("mistral", pipeline=2, schedule="interleaved"),
    Choice("gpt2", tensor=2, pipeline=2, schedule="interleaved-zero-bubble"),
    Choice("gpt2", pipeline=2, data=2, zero=3, schedule="zbv"),
    Choice("gpt2", pipeline=2, schedule="dualpipev", offload=True),
    Choice("phi3", context=2, micro_batch=2, ring=True, documents=True),
]


def step(case, rank):
    step_counts(replace(case, **BF16), rank)


def few_blocks(choice):
    """Return the run with two blocks, or one a stage; three, where all but the third are frozen."""
    blocks = max(2 if choice.trains != "frozen" else 3, choice.stages)
    key = next(key for key in ("num_hidden_layers", "n_layer") if key in choice.config)
    return replace(choice.case, config=choice.config | {key: blocks})


@pytest.mark.slow  # five minutes
@pytest.mark.parametrize("choice", [*covering_array(), *LONG], ids=str)
def test_every_layout_of_the_covering_array_runs_there(choice, alone):
    for rank in {0, choice.case.layout.world - 1}:
        alone(step, choice.case, rank)


@pytest.mark.slow  # a minute
@pytest.mark.parametrize("model", MODELS)
def test_every_family_runs_there(model, alone):
    alone(step, Case(MODELS[model], samples=2), 0)


#: Of a step of two micro-batches and two blocks on the first rank: how often the host waits, and the bytes
#: that kernels read and write as a part of those on one device, from and to. On two tensor ranks half of the
#: products are here and all of the norms' weights; a stage of two has half of the blocks and one end; ZeRO 3
#: also copies what it gathers.
COUNTED = {
    Layout(): (1, 1.0, 1.0),
    Layout.of(data=2, zero=3): (1, 1.2, 1.6),
    Layout.of(tensor=2, sequence=True): (1, 0.5, 0.65),
    Layout.of(pipeline=2): (1, 0.3, 0.5),
}


def counted_step(model, layout):
    config = MODELS[model] | {"num_hidden_layers": 2}
    return step_counts(Case(config, layout, samples=2 * layout.data, **BF16))


def compare():
    """A layout waits no more than one device and moves its part of the bytes."""
    one = counted_step("llama", Layout())
    for layout, (waits, least, most) in COUNTED.items():
        counts = counted_step("llama", layout)
        assert counts.waits == waits, layout
        assert least <= counts.moved / one.moved <= most, (layout, counts.moved / one.moved)
        # No layout has kernels for each parameter or each rank: a stage has half, collectives add a tenth.
        assert 0.4 <= counts.launched / one.launched <= 1.2, (layout, counts.launched / one.launched)
    # Each block asks once a micro-batch how many rows each rank has; and the step, whether it is finite.
    assert counted_step("mixtral", Layout.of(data=2, expert=2)).waits == 1 + 2 * 2


#: In its layers rows of bf16 have a multiple of 16 bytes, as the one kernel for all experts needs.
EXPERTS = Case(MODELS["mixtral"] | {"num_hidden_layers": 2}, samples=2, **BF16)


def experts_of_one_rank():
    """Compare a device that multiplies the rows of all experts at once, as new GPUs do, and an old one."""
    counts = step_counts(EXPERTS)
    assert counts.launches["aten::_grouped_mm"] > 0
    assert [*counts.waited] == [("training/update.py: Update.__call__", "read")], counts.waited
    assert counts.waits == 1
    with mock.patch.object(Module, "get_device_capability", lambda module, device: (7, 5)):
        waited = step_counts(EXPERTS).waited
    blocks, micro_batches = 2, 2
    sizes = ("layers/experts/grouped_matmul.py: GroupSizes.sizes", "read")
    assert waited.pop(sizes) == blocks * micro_batches and waited == counts.waited


def sums_of_replicas():
    """Their buffers are kept for the stream that fills them and for that of the sum, beside the one of
    backward."""
    kept = {}
    register()

    def keep(buffer, stream):
        kept.setdefault(id(buffer), (buffer, []))[1].append(stream)

    with mock.patch.object(FakeTensor, "record_stream", keep):
        step_counts(Case(MODELS["gpt2"], Layout.of(data=2), samples=2, **BF16))
    assert kept and all(len(set(streams)) == 2 for _, streams in kept.values())


def float16():
    """With a loss scale."""
    step_counts(Case(MODELS["gpt2"], samples=2, dtype=torch.float32, compute=torch.float16))


def neighbours():
    """Ranks of a pipeline meet once, before the first step of its schedule."""
    with mock.patch.object(driver, "greet", wraps=driver.greet) as met:
        step_counts(Case(MODELS["gpt2"], Layout.of(pipeline=2), samples=2, **BF16))
    (call,) = met.call_args_list
    assert call.args[0] == [1]


def dropout():
    """In attention and between blocks, from streams of the tensor ranks' own; and computed again."""
    config = MODELS["gpt2"] | {"n_layer": 2, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
    memory = MemorySection(checkpointing="selective")
    step(Case(config, Layout.of(tensor=2, sequence=True), samples=2, memory=memory), 1)


class TwoStages(nn.Module):
    """Give the last stage what the first one made of ``x``."""

    def __init__(self, state):
        super().__init__()
        self.part, self.first = nn.Linear(6, 6), state.at.pipeline == 0

    def forward(self, given=None, *, x):
        return F.dropout(self.part(x if self.first else given), 0.1)


def stages_of_a_user():
    """What the host knows of the samples that a loss takes is found without waiting."""

    def loss(y, samples):
        target = samples["target"]
        assert on_host(target) is not None
        return (y - target).square().sum(), len(target)

    def told(stated, **named):
        stated[0] = stated[0] or (Travels((1, 6), torch.float32),)

    places = "loss.py: wrong_growth", "step.py: Step.refuse"
    reads = [
        Wait(f"training/{place}", kind, "a step of one's own reads each loss", 9, "step")
        for place in places
        for kind in ("read", "upload")
    ]
    waits, group = (*WAITS, *reads), mock.patch.object(dist, "broadcast_object_list", told)
    names = mock.patch.object(dist, "all_gather_object")  # the other rank's are its own
    with simulated_rank(Layout.of(pipeline=2), 1, waits) as (state, _), group, names:
        with state.device:
            model = TwoStages(state)
        samples = {"x": torch.empty(2, 6, device=state.device), "target": torch.zeros(2, 6)}
        Step(model, loss, micro_batch=1, state=state)(samples)


def each(folder):
    """Run all in one process, which has imported all and has the device after the first."""
    for name, function in STEPS.items():
        try:
            function()
            (folder / name).touch()
        except BaseException:
            (folder / name).write_text(traceback.format_exc())


STEPS = {
    "float16": float16,
    "counts": compare,
    "dropout": dropout,
    "a user's stages": stages_of_a_user,
    "neighbours": neighbours,
    "sums of replicas": sums_of_replicas,
    "experts": experts_of_one_rank,
    **{str(choice): partial(step, few_blocks(choice), choice.world - 1) for choice in SOME},
}


@pytest.fixture(scope="module")
def outcomes(alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("outcomes")
    alone(each, folder)
    return {name: (folder / name).read_text() for name in STEPS}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_mixes_no_devices_and_waits_where_the_list_says(name, outcomes):
    assert outcomes[name] == ""


def run(raw):
    """Run a recipe on one rank; the number of its steps."""
    with simulated_rank(Layout(), 0, WAITS) as (state, _):
        steps = []
        Trainer(parse_recipe(raw), state, quiet=True).run(steps.append)
        return len(steps)


def whole_run(folder):
    tokens = write_tokens(folder / "tokens")
    raw = tiny_recipe(
        folder / "run",
        tokens,
        steps=4,
        dtype="float32",
        compute="bfloat16",
        model={"config": TINIEST_LLAMA},
        data={"global_batch": 4, "prefetch": 1},
        evaluation={"tokens": str(tokens), "every": 2, "samples": 3},
        watch={"norms": 2},
    )
    assert run(raw | {"stop_after": 3}) == 3
    assert run(raw) == 1  # goes on from the checkpoint of the third
    newest = folder / "run/checkpoints/step-00000004"
    for layout in (Layout.of(tensor=2, data=2, zero=3), Layout.of(pipeline=2)):
        load_and_save(newest, layout, folder)


def load_and_save(checkpoint, layout, folder):
    """Load a checkpoint on the last rank of a layout, and write that rank's file of a new one."""
    with simulated_rank(layout, layout.world - 1, WAITS) as (state, _):
        parts = build_rank(Case(TINIEST_LLAMA, layout, dtype=torch.float32), state)
        begin_moments(parts.model, parts.optimizer)
        progress = load(checkpoint, parts.model, parts.optimizer)
        assert progress.step == 4
        contents = Contents(Described(parts.family, parts.config), TINIEST_LLAMA)
        saver = Saver(folder / str(layout), parts.model, parts.optimizer, contents)
        written = write_file(folder, state.rank, layout.world, 4, saver._own_tensors(), frozenset())
        assert written is not None and written[0].size > 1000


def text():
    for layout in (Layout(), Layout.of(tensor=2), Layout.of(pipeline=2)):
        with simulated_rank(layout, layout.world - 1, WAITS) as (state, _):
            model = build_rank(Case(TINIEST_LLAMA, layout, dtype=torch.float32), state).model
            prompts = [[1, 2, 3], [4]]
            for sampling in (Sampling(), Sampling(temperature=0.8, top_k=5, top_p=0.9)):
                rows = generate(model, prompts, max_new_tokens=3, sampling=sampling)
                assert [len(row) for row in rows] == [3, 3]
            generate(model, prompts, max_new_tokens=2, cached=False)


def test_a_run_starts_evaluates_saves_and_resumes(alone, tmp_path):
    alone(whole_run, tmp_path)


def test_text_is_generated_on_one_rank_and_on_several(alone):
    alone(text)
