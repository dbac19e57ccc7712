"""Checkpoints of thousands of ranks: what a rank computes, gathers, writes and opens, without processes."""

import json
import pickle
import shutil
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import TINIEST_LLAMA
from support.folders import bytes_read
from support.inputs import change_manifest, saver_of
from support.refusals import Refused, refusals
from support.short_runs import run_recipe, tiny_recipe
from torch import nn
from trilith.checkpoints import (
    Manifest,
    Progress,
    load,
    mirror,
    model_tensors,
    read_source,
    saver,
    verify,
)
from trilith.checkpoints.manifest import WITH_GRIDS
from trilith.checkpoints.optimizer_state import MOMENTS, moment_name
from trilith.checkpoints.rank_files import (
    checkpoint_catalog,
    checkpoint_files,
    files_to_come,
    stored_tensors,
    write_file,
)
from trilith.checkpoints.stored_tensor import Grid
from trilith.cli.app import run
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.models import family_of
from trilith.parallel_state import Box, Layout, ParallelState
from trilith.recipes import load_recipe
from trilith.storage.file_names import MANIFEST
from trilith.storage.safetensors_reader import TensorFile
from trilith.testing import run_parallel
from trilith.training.run_plan import plan

LAYOUT = Layout(tensor=2, data_shard=3, data_replicate=2, pipeline=2, zero=1)


def own_boxes(stated, layout, at):
    """Return the box of each parameter that a rank writes."""
    boxes = {
        name: Grid.of(declaration, layout, at.pipeline).box_of(layout.rank(at), declaration.shape)
        for name, declaration in stated.items()
        if not (declaration.ends and at.pipeline)
    }
    return {name: box for name, box in boxes.items() if box is not None}


def write_stand_in(folder, layout=LAYOUT):
    """Write a run's checkpoint as its ranks would, one after the other; return the whole tensors."""
    config = TINIEST_LLAMA | {"num_hidden_layers": 2}
    family = family_of(config)
    stages = family.declarations(family.from_hf(config), layout)
    tensors = stored_tensors(stages, layout, "F32", frozen=frozenset(), moments=dict.fromkeys(MOMENTS, ()))
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(one.shape, generator=generator) for name, one in tensors.items()}
    folder.mkdir(parents=True)
    files = []
    for rank, at in enumerate(layout.places()):
        mine = own_boxes(stages[at.pipeline], layout, at)
        parts = {name: whole[name][box.slices] for name, box in mine.items()}
        for moment in MOMENTS:
            names = {moment_name(moment, name): box for name, box in mine.items()}
            parts |= {name: whole[name][box.slices] for name, box in names.items()}
        if (written := write_file(folder, rank, layout.world, 1, parts, frozenset())) is not None:
            files.append(written[0])
    manifest = Manifest(
        version=WITH_GRIDS, kind="training", model_type="llama", config=config, layout=layout, step=1,
        state={"split": None, "memory": {"updates": 1}, "frozen": []},
        files=tuple(files), tensors=tensors,
    )  # fmt: skip
    assert [file.name for file in files] == [file.name for file in files_to_come(tensors, layout.world)]
    (folder / MANIFEST).write_bytes(manifest.accepted_bytes(folder))
    return whole


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "step-00000001"
    return folder, write_stand_in(folder)


def test_what_grids_say_is_read_verified_and_cut_anew_bit_for_bit(stand_in, tmp_path):
    folder, whole = stand_in
    assert json.loads((folder / MANIFEST).read_text())["version"] == 3
    source = read_source(folder)
    assert len(source.files) == 12  # of 24 ranks: the replicas write nothing
    for name, tensor in whole.items():
        assert torch.equal(source.ours[name].read(), tensor), name
    assert run(["verify", str(folder)]) == 0
    assert run(["reshard", str(folder), str(tmp_path / "cut"), "--tensor", "2"]) == 0
    assert run(["diff", str(folder), str(tmp_path / "cut")]) == 0
    assert json.loads((tmp_path / "cut" / MANIFEST).read_text())["version"] == 2
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load(folder).model.named_parameters())


def test_a_reader_opens_only_the_files_that_it_needs(stand_in):
    opened = []
    real = TensorFile.open

    def noting(path, **rest):
        opened.append(Path(path).name)
        return real(path, **rest)

    with mock.patch.object(TensorFile, "open", noting):
        source = read_source(stand_in[0])
        assert opened == []
        name = "layers.1.mlp.down.weight"  # cut by columns for tensor ranks, by rows for data ranks
        source.ours[name].read(Box((0, 0), (1, 1)))
        assert opened == ["rank-00012-of-00024.safetensors"]
        source.ours[name].read()
        assert len(opened) == len({*opened}) == 6


def grid(manifest):
    return manifest["tensors"]["layers.0.mlp.gate_up.up.weight"]["grid"]


UP = "'layers.0.mlp.gate_up.up.weight'"


def first(folder):
    return Manifest.load(folder / "step-00000001")


def damaged(why, change, says, read=first):
    """Return a row: a manifest is changed and sealed anew; the files stay."""

    def given(folder):
        write_stand_in(folder / "step-00000001")
        change_manifest(folder / "step-00000001", change)

    return Refused(why, read, says, code=4, given=given)


test_a_damaged_grid_is_refused_as_damaged_parts_are = refusals(
    damaged("a huge count", lambda m: grid(m)["cuts"][0].update(rows=1, count=1 << 60), f"{UP}: "),
    damaged("the file of a replica", lambda m: grid(m).update(first=6), f"{UP}: .*none of rank 6"),
    damaged("negative rank", lambda m: grid(m).update(first=-1), "first"),
    damaged("unknown field", lambda m: grid(m).update(surprise=1), "surprise"),
    damaged("a file missing", lambda m: m["files"].pop(), "none of rank 17"),
    damaged("two ways", lambda m: m["tensors"]["norm.weight"].update(
        parts=[{"file": 0, "start": [0], "stop": [1]}]), "parts or a grid, found both"),
    damaged("neither way", lambda m: m["tensors"]["norm.weight"].pop("grid"), "owned by nobody"),
    # Each tensor rank's first file would hold all rows.
    damaged("a box that is not the grid's", lambda m: grid(m)["cuts"][1].update(rows=1 << 40),
            "rank-0000.*layers.0.mlp.gate_up.up.weight",
            lambda folder: verify(folder / "step-00000001", first(folder))),
    damaged("of version 2", lambda m: m.update(version=2), "parts in version 2, found a grid"),
)  # fmt: skip


def test_the_manifest_of_405b_on_16384_ranks_is_small_and_says_a_million_parts():
    """In counts and bytes; benchmarks/manifests.py has the seconds."""
    recipe = load_recipe("llama-3.1-405b-16384gpus")
    made, layout = plan(recipe), replace(recipe.layout, data_shard=256, data_replicate=1)
    stages = made.family.declarations(made.config, layout, split=made.split)
    tensors = stored_tensors(stages, layout, "F32", frozen=frozenset(), moments=dict.fromkeys(MOMENTS, ()))
    ranks = files_to_come(tensors, layout.world)
    files = tuple(file.model_copy(update={"size": 10**10, "crc32": 2**32 - 1}) for file in ranks)
    manifest = Manifest(
        version=WITH_GRIDS, kind="training", model_type="llama", config=dict(made.hf_config),
        layout=layout, step=1, files=files, tensors=tensors,
    )  # fmt: skip
    catalog = checkpoint_catalog(manifest, range(len(files)))
    parts = sum(tensor.grid.number(tensor.shape) for tensor in tensors.values())
    corner = catalog["layers.0.mlp.down.weight"].near(Box((0, 0), (1, 1)))
    assert len([*corner]) == 1  # of 512: the others are not computed
    assert layout.world == len(files) == 16384 and parts > 10**6
    raw = manifest.to_bytes()
    assert len(raw) < 3 << 20
    again = Manifest.parse(raw, "405B")
    again.check("405B")
    assert again == manifest
    # A rank's own share is what the grids of the whole model give it.
    last = replace(layout.coordinates(layout.world - 1))
    mine = own_boxes(stages[last.pipeline], layout, last)
    stored = checkpoint_files(Path(), again)[-1].boxes
    assert {name: box for name, box in stored.items() if not name.startswith("optimizer.")} == mine


@pytest.mark.parametrize("layers", [1, 40])
def test_what_ranks_tell_each_other_of_a_save_does_not_grow_with_the_tensors(layers, tmp_path):
    told = []

    def noting(work, state):
        results = [work()]
        told.append(pickle.dumps(results))
        return results

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    with mock.patch.object(saver, "together", noting), saver_of(tmp_path / "m", model) as ours:
        ours.save(Progress(1, Layout()))
    assert len(told) == 4 and max(map(len, told)) < 400


def test_nobody_waits_for_the_deletion_of_the_oldest_checkpoint(tmp_path, blocked):
    """Saves return while a deletion is stuck; what is due is deleted before the saver is left."""
    lines, deletions = list[str](), blocked(mirror, "remove_checkpoint")
    with deletions as (begun, go), saver_of(tmp_path, nn.Linear(2, 2), keep=1, say=lines.append) as saver:
        for step in (1, 2, 3, 4):
            saver.save(Progress(step, Layout()))
            if step == 2:
                assert begun.wait(60)
        assert lines == [f"COMMITTED {tmp_path / f'step-{step:08d}'}" for step in (1, 2, 3, 4)]
        assert len([*tmp_path.glob("step-*")]) == 4
        go.set()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000004"]
    assert not [one for one in threading.enumerate() if one.name.startswith(("retention", "checkpoint"))]


class Looks:
    """Count how often all files of a checkpoint are looked at, and which files of weights are opened."""

    def __init__(self):
        self.whole, self.opened = 0, []

    @contextmanager
    def counted(self):
        check, open_file = Manifest._check_files, TensorFile.open.__func__

        def look(manifest, folder):
            self.whole += 1
            check(manifest, folder)

        def note(cls, path, **rest):
            self.opened.append(Path(path).name)
            return open_file(cls, path, **rest)

        looking = mock.patch.object(Manifest, "_check_files", look)
        with looking, mock.patch.object(TensorFile, "open", classmethod(note)):
            yield self


def start_from(folder, out, tokens):
    """Start in every way that there is from checkpoints of a run: how often this rank looked at all files,
    how often it opened one of them, and what it read beside its share of the sums, as a part of the weights
    and, if it resumes, of the moments.
    """
    layout = {"tensor": 2}
    model = load(folder, state=ParallelState.start(Layout(**layout))).model

    def begun(name, place, **more):
        model_keys = {"config": TINIEST_LLAMA | {"num_hidden_layers": 2}, "init_from": str(place)}
        return tiny_recipe(out / name, tokens, layout=layout, steps=1, model=model_keys, **more)

    adapted = begun("adapted", folder.parent, lora={"r": 2}, dtype="float32")
    run_recipe(begun("again", folder))
    starts = {}
    for name, start in {
        "load": lambda: load(folder, state=model.state),
        "restored": lambda: load(folder, model, torch.optim.AdamW(model.parameters())),
        "weights alone": lambda: load(folder, model),
        "load again": lambda: load(folder, model, state=model.state),
        "resume": lambda: run_recipe(begun("again", folder) | {"steps": 2}),
        "init_from": lambda: run_recipe(begun("checkpoint", folder)),
        "init_from of a run": lambda: run_recipe(begun("run", folder.parent)),
        "adapters": lambda: run_recipe(adapted),
        "adapters again": lambda: run_recipe(adapted | {"steps": 2}),
    }.items():
        place = folder if name != "resume" else out / "again/checkpoints/step-00000001"
        with Looks().counted() as looks, bytes_read(place) as read:
            start()
        sizes = [file.size for file in Manifest.load(place).files]
        needed = sum(sizes) if name in ("restored", "resume") else sum(sizes) / 3  # weights are a third
        part = (sum(read.values()) - sum(sizes[model.state.rank :: 2])) / needed
        starts[name] = looks.whole, max(Counter(looks.opened).values()), part
    return starts


def test_one_rank_looks_at_all_files_of_a_checkpoint_for_the_others(stand_in, tmp_path):
    """Each rank opens the files that it needs, once, and reads its part of them and its share of the sums."""
    tokens = write_tokens(tmp_path / "tokens")
    first, second = run_parallel(start_from, 2, stand_in[0], tmp_path, tokens)
    assert {looked for looked, *_ in second.values()} == {0}, second
    assert {looked for looked, *_ in first.values()} <= {1, 2, 3}, first
    for name in first:
        for _, opened, part in (first[name], second[name]):
            assert opened == 1 and 0.2 < part < 0.65, (name, opened, part)


@pytest.mark.parametrize("lora", [{}, {"lora": {"r": 2}}], ids=["weights", "adapters"])
def test_ranks_begin_with_the_checkpoint_that_rank_0_found_whole(stand_in, tmp_path, lora):
    for step in (1, 2):
        shutil.copytree(stand_in[0], newest := tmp_path / "from" / f"step-{step:08d}")
        change_manifest(newest, lambda m, step=step: m.update(step=step))
    max(newest.glob("*.safetensors")).unlink()
    model_keys = {"config": TINIEST_LLAMA | {"num_hidden_layers": 2}, "init_from": str(tmp_path / "from")}
    tokens, layout = write_tokens(tmp_path / "tokens"), {"tensor": 2}
    raw = tiny_recipe(tmp_path / "out", tokens, layout=layout, steps=1, model=model_keys, dtype="float32")
    alone = raw | {"out": str(tmp_path / "alone")}
    alone["model"] = model_keys | {"init_from": str(tmp_path / "from" / "step-00000001")}
    chosen, named = (run_parallel(run_recipe, 2, recipe | lora)[0] for recipe in (raw, alone))
    assert chosen[0].loss == named[0].loss


def hashed(raw):
    """Run the recipe; how many whole tensors of its folder were hashed to be compared."""
    with mock.patch.object(model_tensors, "sha256_of", wraps=model_tensors.sha256_of) as hashing:
        run_recipe(raw)
    return hashing.call_count


def test_one_rank_reads_an_output_layer_that_must_be_the_embedding_for_the_others(tmp_path):
    write_hf_folder(tmp_path / "hf", TINIEST_LLAMA | {"tie_word_embeddings": True})
    weights = load_file(file := tmp_path / "hf" / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    raw = tiny_recipe(
        tmp_path / "run", write_tokens(tmp_path / "tokens"), layout={"data": 2}, steps=1,
        model={"config": TINIEST_LLAMA | {"tie_word_embeddings": True}, "init_from": str(tmp_path / "hf")},
    )  # fmt: skip
    assert run_parallel(hashed, 2, raw) == [2, 0]


def test_a_save_looks_at_no_file_of_weights_of_the_checkpoints_that_stay(tmp_path):
    with Looks().counted() as looks, saver_of(tmp_path, nn.Linear(2, 2), keep=2) as saver:
        for step in (1, 2, 3, 4):
            saver.save(Progress(step, Layout()))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]
    assert (looks.whole, looks.opened) == (0, [])


def test_verifying_keeps_no_header_and_reads_each_byte_once(stand_in):
    folder = stand_in[0]
    with Looks().counted() as looks, bytes_read(folder) as read:
        assert run(["verify", str(folder)]) == 0
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert sorted(looks.opened) == sorted(sizes)
    assert read == sizes


@pytest.mark.parametrize(("words", "times"), [("convert {0} {1} --to dcp", 1), ("diff {0} {0}", 2)])
def test_a_checkpoint_that_is_verified_by_what_is_read_is_read_once(stand_in, tmp_path, words, times):
    with bytes_read(stand_in[0]) as read:
        assert run(words.format(stand_in[0], tmp_path / "dcp").split()) == 0
    assert read == {path.name: times * path.stat().st_size for path in stand_in[0].glob("*.safetensors")}


def test_what_cannot_be_deleted_is_told_and_ends_no_run(tmp_path):
    lines = []
    refusing = mock.patch.object(mirror, "remove_checkpoint", side_effect=PermissionError("not yours"))
    with refusing, saver_of(tmp_path, nn.Linear(2, 2), keep=1, say=lines.append) as saver:
        for step in (1, 2):
            saver.save(Progress(step, Layout()))
    assert lines[-1] == "old checkpoints stay: not yours"
    assert len([*tmp_path.glob("step-*")]) == 2
