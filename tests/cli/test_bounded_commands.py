"""No command starts, or computes, more than one machine can: the limit is said before anything is touched."""

import subprocess
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import TINY_LLAMA
from support.folders import contents
from trilith.checkpoints import ConversionOptions
from trilith.cli.app import run
from trilith.data.text import tokenizer_training
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.parallel_state import BadInput, Layout
from trilith.pipeline import layout_of, timetable
from trilith.pipeline.schedule_actions import MOST_FORWARDS, ORDERS
from trilith.ranks import processes
from trilith.runs import launch
from trilith.runs.launch import check_local
from trilith.system import check_workers, most_at_once
from trilith.testing import run_fresh, run_parallel

#: Of each option that multiplies work, one number that no machine takes. Options that bound work by
#: themselves (a batch holds no more rows than there are prompts) are not here.
WORDS = [
    ("train recipe.toml layout.data=1000000 data.global_batch=1000000 data.micro_batch=1", "at most"),
    ("train recipe.toml layout.tensor=1000000", "at most"),
    ("train recipe.toml --nproc 1000000", "1000000"),
    ("generate hf --prompt a --tensor 1000000", "at most"),
    ("generate hf --prompt a --pipeline 1000000", "at most"),
    ("generate hf --prompt a --max-new-tokens 1000000000000", "1048576"),
    ("parity hf --data 1000000", "at most"),
    ("parity hf --tensor 10000000", "--tensor"),
    ("parity hf --pipeline 1000", "at most"),
    ("schedule 1f1b --pipeline 1000000 --out a.svg", "stages x micro-batches"),
    ("schedule zbv --micro-batches 1000000000", "stages x micro-batches"),
    ("schedule interleaved --virtual-stages 1000000", "stages x micro-batches"),
    (f"plan llama-3.2-1b --gpus {','.join(map(str, range(1, 500)))}", "at most 64 numbers"),
    ("convert hf out --workers 1000000", "workers"),
    ("merge-lora hf hf out --workers 1000000", "workers"),
    ("tokenize a.txt --tokenizer hf --out out --workers 1000000", "workers"),
    ("train recipe.toml --dry-run memory.device_gb=1e300", "memory.device_gb"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bounded")
    write_hf_folder(path / "hf", TINY_LLAMA)
    (path / "a.txt").write_text("a b c\n" * 40)
    write_tokens(path / "tokens", vocab_size=TINY_LLAMA["vocab_size"])
    (path / "recipe.toml").write_text(
        'out = "run"\nsteps = 1\n[model]\ninit_from = "hf"\n[data]\ntokens = "tokens"\nsequence_length = 8\n'
        "global_batch = 8\n"
    )
    return path


def no_process(*arguments, **more):
    raise AssertionError("a process was started")


@pytest.mark.parametrize(("line", "says"), WORDS)
def test_what_no_machine_can_run_is_refused_in_one_line_before_anything_is_touched(
    line, says, folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    monkeypatch.setattr(processes.templates, "start", no_process)
    before = contents(folder)
    assert run(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err and len(said.err) < 400
    assert "unexpected" not in said.err and contents(folder) == before


@given(over=st.integers(1, 2**40))
def test_more_ranks_than_the_limit_are_refused_by_every_way_to_start_them(over):
    world = most_at_once() + over
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_process)
        patch.setattr(processes.templates, "start", no_process)
        for way in (
            lambda: run_parallel(no_process, world),
            lambda: run_fresh(no_process, world),
            lambda: launch.launch([], world, Path("/no/such/folder")),
            lambda: check_local(Layout.of(data=world), device="cpu"),
        ):
            with pytest.raises(BadInput, match=f"at most {most_at_once():,} .*several hosts with torchrun"):
                way()


def test_a_dry_run_plans_any_number_of_ranks(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    line = "train recipe.toml --dry-run layout.data=1000000 data.global_batch=1000000 data.micro_batch=1"
    assert run(line.split()) == 0
    assert "1,000,000" in capsys.readouterr().out.replace("1000000", "1,000,000")


@given(workers=st.one_of(st.integers(max_value=0), st.integers(min_value=most_at_once() + 1)))
def test_no_worker_and_too_many_workers_are_refused(workers):
    with pytest.raises(BadInput, match="workers: expected from 1 to"):
        check_workers(workers, "convert")
    with pytest.raises(BadInput, match="workers"):
        ConversionOptions(workers=workers)


@settings(deadline=None, max_examples=50)
@given(
    name=st.sampled_from(sorted(ORDERS)),
    stages=st.integers(2, 2**30),
    virtual=st.integers(1, 2**30) | st.none(),
    over=st.integers(1, 2**30),
)
def test_a_timetable_beyond_the_limit_is_not_computed(name, stages, virtual, over):
    layout = layout_of(name, stages, virtual)
    with mock.patch.dict(ORDERS, dict.fromkeys(ORDERS, no_process)), pytest.raises(BadInput):
        timetable(name, layout, MOST_FORWARDS // stages + over)


def test_more_text_than_the_limit_is_refused_by_the_training_of_a_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokenizer_training, "MOST_CHARACTERS", 1000)
    (tmp_path / "a.txt").write_text("some words again\n\n" * 100)
    assert run(f"train-tokenizer {tmp_path}/a.txt --vocab-size 270 --out {tmp_path}/t".split()) == 2
    said = capsys.readouterr().err
    assert "at most 1,000 characters" in said and "sample" in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
