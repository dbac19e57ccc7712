"""Batches made ahead: the same ones, an error at its own step, and no thread left behind."""

import threading
import time

import numpy as np
import pytest
import torch
from support.short_runs import run_recipe, tiny_recipe
from trilith.data import Batch
from trilith.data.prefetch import Prefetch
from trilith.data.token_writer import TokenWriter
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput
from trilith.runs.metrics import read_metrics
from trilith.testing import RankError, run_parallel

CPU = torch.device("cpu")


def numbered(step):
    return Batch(torch.tensor([[step]]), torch.tensor([[step + 1]]))


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_every_step_gets_its_batch(ahead):
    with Prefetch(numbered, 4, 20, ahead=ahead, device=CPU) as batch_of:
        assert [int(batch_of(step).input_ids) for step in range(4, 20)] == list(range(4, 20))
        assert bool(threads()) == bool(ahead)
    assert not threads()


def test_batches_are_made_while_the_caller_computes_and_no_further_than_asked():
    made = []

    def make(step):
        made.append(step)
        return numbered(step)

    with Prefetch(make, 0, 100, ahead=3, device=CPU) as batch_of:
        batch_of(0)
        deadline = time.monotonic() + 30
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        assert made == [0, 1, 2, 3]


def test_an_error_reaches_the_loop_at_its_step_and_ends_the_thread():
    def make(step):
        if step == 2:
            raise BadInput("tokens", found="damage")
        return numbered(step)

    with (
        pytest.raises(BadInput, match="damage"),
        Prefetch(make, 0, 10, ahead=5, device=CPU) as batch_of,
    ):
        assert [int(batch_of(step).input_ids) for step in (0, 1)] == [0, 1]
        batch_of(2)
    assert not threads()


@pytest.fixture
def chat(tmp_path):
    """Write samples of 2 to 17 tokens, some of them to be learnt."""
    random = np.random.default_rng(1)
    with TokenWriter(tmp_path / "chat", vocab_size=131, template_sha256="t") as writer:
        for length in random.integers(2, 18, 60):
            writer.add_documents(random.integers(0, 131, length), [length], random.integers(0, 2, length))
        writer.commit()
    return tmp_path / "chat"


def losses(out):
    return [float(step["loss"]) for step in read_metrics(out / "metrics.jsonl")]


def test_a_packed_run_is_bitwise_the_same_without_prefetch_resumed_and_close_in_another_layout(
    tmp_path, chat
):
    text = write_tokens(tmp_path / "text", count=400)

    def go(name, world=1, *, prefetch, layout=None, **more):
        data = {"tokens": [str(chat), str(text)], "documents": "separate", "prefetch": prefetch}
        run_parallel(
            run_recipe, world, tiny_recipe(tmp_path / name, chat, data=data, layout=layout or {}, **more)
        )

    go("plain", prefetch=0)
    go("ahead", prefetch=3)
    go("resumed", prefetch=3, stop_after=3)
    go("resumed", prefetch=1)
    whole = losses(tmp_path / "plain")
    assert len(whole) == 6 and len(set(whole)) == 6
    assert losses(tmp_path / "ahead") == losses(tmp_path / "resumed") == whole
    go("pairs", 2, prefetch=2, layout={"data": 2, "zero": 1})
    assert losses(tmp_path / "pairs") == pytest.approx(whole, rel=1e-10)


def test_f12_a_run_does_not_go_on_with_rows_made_otherwise(tmp_path, chat):
    run_parallel(run_recipe, 1, tiny_recipe(tmp_path / "run", chat, stop_after=2))
    with pytest.raises(RankError, match=r"data\.fingerprint: expected packed samples.*found single samples"):
        run_parallel(run_recipe, 1, tiny_recipe(tmp_path / "run", chat, data={"samples": "single"}))
