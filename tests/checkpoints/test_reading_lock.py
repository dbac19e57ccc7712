"""Retention deletes no checkpoint that is being read; a damaged checkpoint names an older one."""

import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.configs import TINIEST_LLAMA
from support.damage import flip_bit
from support.short_runs import run_recipe, tiny_recipe, train
from torch import nn
from trilith.checkpoints import convert, find, load, read_source, save, verify
from trilith.checkpoints.mirror import delete_old
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadCheckpoint
from trilith.storage.disk import hold, nobody_reads
from trilith.testing import RankError

pytestmark = pytest.mark.usefixtures("group_of_one")


def saved(root, *steps, keep=9):
    model = nn.Linear(3, 2)
    for step in steps:
        with torch.no_grad():
            model.weight.fill_(step)
        save(root, model, step=step, keep=keep)
    return model


def steps_in(root):
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_retention_leaves_what_is_read_and_deletes_it_with_the_next(tmp_path):
    saved(tmp_path, 1)
    source = read_source(tmp_path)
    saved(tmp_path, 2, keep=1)
    assert steps_in(tmp_path) == [1, 2]
    whole = source.ours["weight"].read()
    assert torch.equal(whole, torch.ones(2, 3))
    verify(source.path, source.manifest)
    del source, whole
    saved(tmp_path, 3, keep=1)
    assert steps_in(tmp_path) == [3]


def test_a_checkpoint_that_is_being_deleted_is_not_taken(tmp_path):
    saved(tmp_path, 1, 2)
    with nobody_reads(tmp_path / "step-00000002") as free:
        assert free
        with pytest.raises(BadCheckpoint, match="being deleted"):
            hold(tmp_path / "step-00000002")
        with pytest.warns(UserWarning, match="one that is being deleted; using step-00000001"):
            assert read_source(tmp_path).path.name == "step-00000001"
    assert read_source(tmp_path).path.name == "step-00000002"


def test_several_readers_hold_one_checkpoint_and_each_alone_keeps_it(tmp_path):
    saved(tmp_path, 1, 2)
    holds = [hold(tmp_path / "step-00000001") for _ in range(3)]
    for lock in holds:
        assert delete_old(tmp_path, 1, 2) == [tmp_path / "step-00000001"]
        lock.release()
    assert delete_old(tmp_path, 1, 2) == []
    assert steps_in(tmp_path) == [2]


def test_a_run_is_read_while_it_saves_and_keeps_one(tmp_path, capsys):
    """Each checkpoint replaces the one before; every read in the meantime succeeds."""
    root, scratch, done = tmp_path / "run", tmp_path / "out", threading.Event()
    saved(root, 1)

    def keep_saving():
        steps = count(2)
        while not done.is_set():
            saved(root, next(steps), keep=1)

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(keep_saving)
        try:
            for attempt in range(12):
                convert(root, scratch / f"{attempt}", to="sharded")
                verify(scratch / f"{attempt}", read_source(scratch / f"{attempt}").manifest)
                assert run(["inspect", str(root), "--tensor", "weight"]) == 0
                assert run(["verify", str(root)]) == 0
                assert run(["diff", str(root), str(root)]) in (0, 1)
                step = load(root, model := nn.Linear(3, 2)).step
                assert torch.equal(model.weight, torch.full((2, 3), float(step)))
        finally:
            done.set()
    writer.result()
    capsys.readouterr()
    saved(root, 10**6, keep=1)
    assert steps_in(root) == [10**6]  # what readers kept for a while is gone


def flip(directory, *, header=False):
    flip_bit(min(directory.glob("*.safetensors")), 20 if header else -3, bit=4)


@pytest.mark.parametrize("header", [False, True], ids=["data", "header"])
def test_a_damaged_newest_step_names_the_one_before_it_and_the_command(tmp_path, header, capsys):
    """The second newest is damaged too, which is known when it is used; the commands lead to a good one."""
    root = tmp_path / "checkpoints"
    saved(root, 1, 2, 3, 4)
    shutil.copytree(root / "step-00000004", root / "step-00000004.damaged")  # moved there before
    flip(root / "step-00000004", header=header)
    flip(root / "step-00000003")
    convert_words = ["convert", str(root), str(tmp_path / "out"), "--to", "sharded"]
    commands = [["verify", str(root)], ["diff", str(root), str(root)], convert_words]
    for step in (3, 2):
        named = f"The newest complete checkpoint before it is {root / f'step-0000000{step}'}:"
        for command in commands:
            assert run(command) == 4, command
            error = capsys.readouterr().err.splitlines()[-1]
            assert named in error
        with pytest.raises(BadCheckpoint, match=re.escape(named)):
            load(root, nn.Linear(3, 2))
        move = re.search(r"`mv -- (\S+) (\S+)`", error)
        assert move is not None and not Path(move[2]).exists()
        shutil.move(move[1], move[2])
    for command in commands:
        assert run(command) == 0, command


def test_no_byte_of_an_older_checkpoint_is_read_before_a_damaged_one_is_told(tmp_path):
    saved(tmp_path, 1, 2)
    flip(tmp_path / "step-00000002")
    opened, open_file = [], os.open

    def note(path, *flags, **named):
        opened.append(path)
        return open_file(path, *flags, **named)

    with mock.patch("os.open", note), pytest.raises(BadCheckpoint, match=r"before it is \S+step-00000001"):
        load(tmp_path, nn.Linear(3, 2))
    older = [path for path in map(str, opened) if "step-00000001" in path]
    assert older and all(path.endswith("manifest.json") for path in older)


def test_without_a_complete_checkpoint_none_is_named(tmp_path):
    saved(tmp_path, 1, 2)
    flip_bit(tmp_path / "step-00000001" / "manifest.json", 40)
    flip(tmp_path / "step-00000002")
    with pytest.raises(BadCheckpoint) as caught:
        load(tmp_path, nn.Linear(3, 2))
    assert "newest complete" not in str(caught.value)


def test_a_run_on_two_ranks_names_the_good_one_and_goes_on_from_it(tmp_path):
    out, tokens = tmp_path / "run", write_tokens(tmp_path / "tokens")
    beside = {"layout": {"data": 2, "zero": 1}, "checkpoint": {"every": 1, "keep": 9}}
    raw = tiny_recipe(out, tokens, steps=3, model={"config": TINIEST_LLAMA}, **beside)
    train(raw)
    newest = out / "checkpoints" / "step-00000003"
    flip(newest)
    older = r"newest complete checkpoint before it is \S+step-00000002: after `mv --"
    with pytest.raises(RankError, match=older):
        train(raw | {"steps": 4})
    newest.rename(newest.with_name("step-00000003.damaged"))
    train(raw | {"steps": 4})
    assert read_source(out).path.name == "step-00000004"


@pytest.mark.parametrize("use", ["init_from", "lora"])
def test_weights_are_taken_from_no_damaged_checkpoint(tmp_path, use):
    tokens = write_tokens(tmp_path / "tokens")
    run_recipe(tiny_recipe(tmp_path / "a", tokens, steps=1, model={"config": TINIEST_LLAMA}))
    flip(tmp_path / "a" / "checkpoints" / "step-00000001")
    raw = tiny_recipe(tmp_path / "b", tokens, steps=1)
    raw["model"] = {"init_from": str(tmp_path / "a")}
    if use == "lora":
        raw["lora"] = {"r": 2, "target_modules": ["q_proj"]}
    with pytest.raises(BadCheckpoint, match="CRC-32"):
        run_recipe(raw)


def test_a_checkpoint_that_is_deleted_while_it_is_looked_for_is_no_end_of_the_search(tmp_path):
    """After the names are listed and before they are opened, a run saves a step and deletes the last one."""
    saved(tmp_path, 1)
    listed = find._newest

    def late(root, whole):
        if steps_in(root) == [1]:
            saved(root, 2, keep=1)
            raise BadCheckpoint(root, expected="a complete checkpoint", found="none")
        return listed(root, whole)

    with mock.patch("trilith.checkpoints.find._newest", late):
        assert find.newest_checkpoint(tmp_path).directory.name == "step-00000002"
