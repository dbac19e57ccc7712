"""Check that saving memory changes no number: checkpointing none, chunked loss and offload within 1e-10.

An evaluation under a chunked loss makes no whole logits.
"""

import pytest
import torch
from support.configs import config
from support.families import model_of
from support.short_runs import tiny_recipe
from support.short_training import Case, first_difference, outcomes
from torch.distributed import fsdp
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import Layout, ParallelState
from trilith.recipes.recipe import parse_recipe
from trilith.recipes.sections import MemorySection
from trilith.testing import LiveBytes, run_parallel
from trilith.training import Precision, zero_on_fsdp
from trilith.training.build import build
from trilith.training.evaluation import held_out_loss
from trilith.training.run_data import open_held_out
from trilith.training.run_plan import plan

SEQUENCE, STAGES, ZERO = Layout.of(tensor=2, sequence=True), Layout.of(pipeline=2), Layout.of(data=2, zero=3)
RATES = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


ROWS = [
    ("gpt2", "full", SEQUENCE),
    ("gpt2", "selective", SEQUENCE),
    ("gpt2", "selective", STAGES),
    ("gpt2", "every", STAGES),
    ("gpt2", "selective", ZERO),
    ("llama-kv1", "selective", SEQUENCE),
    ("llama-kv1", "full", ZERO),
]


def case_of(model, mode, layout):
    raw = config(model, layers=2, **(RATES if model == "gpt2" else {}))
    return Case(raw, layout, memory=MemorySection(checkpointing=mode))


@pytest.fixture(scope="module")
def trained():
    """Return the outcome of each row's case, and of that without any saving of memory, by the case's text."""
    modes = {(model, mode, layout) for model, saves, layout in ROWS for mode in ("none", saves)}
    cases = [case_of(*row) for row in sorted(modes, key=str)]
    return dict(zip(map(repr, cases), outcomes(cases), strict=True))


@pytest.mark.parametrize(("model", "mode", "layout"), ROWS, ids=str)
def test_checkpointing_changes_no_bit(model, mode, layout, trained):
    """GPT-2 with dropout; against the same layout, since its masks depend on that."""
    plain, saving = (trained[repr(case_of(model, kind, layout))] for kind in ("none", mode))
    assert first_difference(plain, saving, tolerance=0.0) is None


def policies(offload):
    """Return each ``fully_shard``'s kind of offload policy in a model, and whether pages are pinned."""
    seen, shard = [], fsdp.fully_shard

    def noted(module, **options):
        seen.append(options["offload_policy"])
        return shard(module, **options)

    state = ParallelState.start(Layout.of(data=2, zero=3))
    model = model_of(MODEL, state=state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "fully_shard", noted)
        zero_on_fsdp.shard_over_data(model, state, Precision(), offload=offload)
    return [(type(policy).__name__, getattr(policy, "pin_memory", False)) for policy in seen]


MODEL = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}


def test_offload_reaches_fsdp_and_the_optimizer_steps_on_the_host():
    """Nothing is pinned where the device is the host itself."""
    assert run_parallel(policies, 2, True)[0] == [("CPUOffloadPolicy", False)] * 3
    assert run_parallel(policies, 2, False)[0] == [("OffloadPolicy", False)] * 3
    on_a_gpu = ParallelState(Layout(), 0, device=torch.device("cuda", 1))
    assert zero_on_fsdp.resting_device(on_a_gpu, offload=True) == torch.device("cpu")
    assert zero_on_fsdp.resting_device(on_a_gpu, offload=False) == torch.device("cuda", 1)


WIDE = config("tiny_llama", tie_word_embeddings=False, vocab_size=512)


def evaluated(raw):
    """Return the loss on held-out tokens with random weights, and the bytes alive at the worst moment."""
    recipe = parse_recipe(raw)
    step, _, _ = build(recipe, plan(recipe), ParallelState.start(recipe.layout))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.normal_(0.0, 0.1)
    held_out = open_held_out(recipe, WIDE["vocab_size"])
    with LiveBytes() as memory:
        loss = held_out_loss(step, held_out)
    return loss, memory.peak


@pytest.mark.parametrize("layout", [{}, {"data": 2, "zero": 3}], ids=str)
def test_an_evaluation_under_a_chunked_loss_makes_a_chunk_of_logits_at_a_time(tmp_path, layout):
    tokens = write_tokens(tmp_path / "tokens")
    data = {"sequence_length": 64, "global_batch": 8, "micro_batch": 4}
    raw = tiny_recipe(tmp_path / "run", tokens, data=data, layout=layout, model={"config": WIDE})
    raw["evaluation"] = {"tokens": str(tokens), "samples": 7}
    (whole, peak), (chunked, least) = (
        run_parallel(evaluated, len(layout) or 1, raw | {"memory": {"loss_chunk": chunk}})[0]
        for chunk in (0, 6)
    )
    assert chunked == pytest.approx(whole, rel=1e-12)
    logits = 4 * 64 * 512 * 8
    assert peak > logits and least < peak - 0.8 * logits
