"""Stored checkpoints are loaded bit for bit, in the layout that wrote them and in others."""

from pathlib import Path

import pytest
from support.written_before import CONFIG, FOLDER, LORA, STEPS, WRITTEN, Embedder, differing
from trilith.checkpoints import load
from trilith.machine.random_files import write_hf_folder
from trilith.models import LoraConfig, adapted, family_of
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.testing import run_parallel
from trilith.training import Precision, make_adamw, shard_over_data

LAYOUTS = [Layout(), Layout(tensor=2), Layout(pipeline=2), Layout.of(data=2, zero=3)]


def loaded(kind, layout, place):
    """Load it into a model of other numbers; return what is not as it was stored."""
    state, written = ParallelState.start(layout), WRITTEN[kind]
    family = family_of(CONFIG)
    config = family.from_hf(CONFIG)
    if kind == "adapters":
        family = adapted(family, LoraConfig.model_validate(LORA))
    own = kind == "module_of_two"
    model = Embedder(state=state) if own else family.build(config, state=state, device="cpu")
    for name, parameter in model.named_parameters():
        if written.frozen in name:
            parameter.requires_grad_(False)
    shard_over_data(model, state, Precision())
    initialize(model, 1, state=state)
    optimizer = make_adamw(model, lr=0.1) if written.moments else None
    if kind == "adapters":
        base = Path(place) / f"{state.rank}"
        write_hf_folder(base, CONFIG)  # the same numbers as when the adapters were trained
        load(base, model)
    progress = load(FOLDER / kind, model, optimizer, state=state)
    assert progress.model is model and (progress.extra == {"at": 5} if own else True)
    assert (progress.step, progress.layout) == (STEPS, written.layout)
    if optimizer is not None:
        updates = {float(optimizer.state[each]["step"]) for each in optimizer.state}
        assert updates == {STEPS} and progress.memory["updates"] == STEPS
    wrong = differing(kind, model, optimizer, state)
    return [name for name in wrong if kind != "adapters" or "lora_" in name]


def all_loaded(kinds, layout, place):
    return {kind: loaded(kind, layout, f"{place}/{kind}") for kind in kinds}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_bit_is_there_in_any_layout(layout, tmp_path):
    # A module that is not cut into stages goes into no pipeline.
    kinds = [kind for kind in WRITTEN if kind != "module_of_two" or layout.pipeline == 1]
    wrong = run_parallel(all_loaded, layout.world, kinds, layout, str(tmp_path))
    assert wrong == [{kind: [] for kind in kinds}] * layout.world
