"""Check that saving memory changes no number: checkpointing none, chunked loss and offload within 1e-10."""

from dataclasses import replace

import pytest
import torch
from support.configs import config
from support.families import model_of
from support.short_training import Case, first_difference, outcome, train_rank
from torch.distributed import fsdp
from trilith.parallel_state import Layout, ParallelState
from trilith.recipes.sections import MemorySection
from trilith.testing import run_parallel
from trilith.training import Precision, zero_on_fsdp

SEQUENCE, STAGES, ZERO = Layout.of(tensor=2, sequence=True), Layout.of(pipeline=2), Layout.of(data=2, zero=3)
RATES = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def run(case):
    return outcome(run_parallel(train_rank, case.layout.world, case, timeout=120))


@pytest.fixture(scope="module")
def plain():
    """Return a case's outcome without any saving of memory, in its own layout; made once."""
    known = {}

    def get(case):
        case = replace(case, memory=MemorySection())
        if repr(case) not in known:
            known[repr(case)] = run(case)
        return known[repr(case)]

    return get


@pytest.mark.parametrize(
    ("model", "mode", "layout"),
    [
        ("gpt2", "full", SEQUENCE),
        ("gpt2", "selective", SEQUENCE),
        ("gpt2", "selective", STAGES),
        ("gpt2", "every", STAGES),
        ("gpt2", "selective", ZERO),
        ("llama-kv1", "selective", SEQUENCE),
        ("llama-kv1", "full", ZERO),
    ],
    ids=str,
)
def test_checkpointing_changes_no_bit(model, mode, layout, plain):
    """GPT-2 with dropout; against the same layout, since its masks depend on that."""
    raw = config(model, layers=2, **(RATES if model == "gpt2" else {}))
    case = Case(raw, layout, steps=2, memory=MemorySection(checkpointing=mode))
    assert first_difference(plain(case), run(case), tolerance=0.0) is None


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
