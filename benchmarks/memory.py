"""Measure what `[memory]` saves and costs (loss in chunks, checkpointing), and how long a plan takes.

Bytes are counted exactly (`trilith.testing.LiveBytes`). Seconds are the process's own on the processor, on
one thread, so that other work on the machine disturbs them less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Row, in_turn, ratio
from torch import Tensor
from torch.nn import functional as F
from trilith.layers import (
    Checkpointing,
    checkpoint_blocks,
    chunked_cross_entropy,
    vocab_parallel_cross_entropy,
)
from trilith.models import family_of
from trilith.recipes import load_recipe
from trilith.testing import LiveBytes
from trilith.training.dry_run import dry_run

MIB = 2**20
MODES: tuple[Checkpointing, ...] = ("none", "selective", "every", "full")
MODEL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}


def processor_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main(folder: Path, rounds: int) -> list[Row]:
    torch.set_num_threads(1)
    return [*planning(), *checkpointing(rounds), *loss(rounds)]


def loss(rounds: int) -> list[Row]:
    """Measure forward and backward of the loss: 2,048 tokens, 512 wide, a vocabulary of 128,256, fp32."""
    vocab, tokens, dim = 128256, 2048, 512
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, dim, requires_grad=True)
    weight = (torch.randn(vocab, dim) / dim**0.5).requires_grad_()
    labels = torch.randint(vocab, (1, tokens))

    def chunked() -> Tensor:
        return chunked_cross_entropy(hidden, weight, labels, vocab, chunk=128)

    def plain() -> Tensor:
        return vocab_parallel_cross_entropy(F.linear(hidden, weight), labels, vocab).sum()

    def torchs() -> Tensor:
        """Since torch 2.13; its value is right in fp32, not in bf16."""
        return F.linear_cross_entropy(hidden[0], weight, labels[0], reduction="sum")

    ways = {"chunked": chunked, "plain": plain}
    if hasattr(F, "linear_cross_entropy"):
        ways["torch"] = torchs
    peaks: dict[str, int] = {}
    values: dict[str, float] = {}

    def run(name: str) -> Callable[[], float]:
        def once() -> float:
            hidden.grad = weight.grad = None
            with LiveBytes() as memory:
                seconds = processor_seconds(lambda: values.__setitem__(name, _back(ways[name]())))
            peaks[name] = memory.peak
            return seconds

        return once

    taken = in_turn({name: run(name) for name in ways}, rounds)
    assert all(abs(value / values["plain"] - 1) < 1e-5 for value in values.values())
    gradient = weight.nbytes / MIB
    rows = [
        _bytes("chunked loss, peak beyond inputs, with the weight's gradient", peaks["chunked"], 350),
        Row("of this the weight's gradient", gradient, gradient, gradient, unit="MiB"),
        _bytes("plain vocabulary-parallel loss", peaks["plain"]),
        ratio("chunked loss, as fast as the plain one", taken["chunked"], taken["plain"], goal=0.91),
    ]
    if "torch" in ways:
        rows.append(_bytes("F.linear_cross_entropy", peaks["torch"]))
        rows.append(ratio("chunked loss, as fast as it", taken["chunked"], taken["torch"], goal=0.91))
    return rows


def checkpointing(rounds: int) -> list[Row]:
    """Measure a step's forward and backward: a model of 26 M parameters, 2 samples of 512 tokens, fp32."""
    family = family_of(MODEL)
    tokens = torch.randint(4096, (2, 512))
    models, alive = {}, {}
    for mode in MODES:
        torch.manual_seed(0)
        models[mode] = family.build(family.from_hf(MODEL), device="cpu")
        checkpoint_blocks([(int(n), b) for n, b in models[mode].layers.items()], mode, every=2)

    def step(mode: str) -> Callable[[], float]:
        def once() -> float:
            def work() -> None:
                vocab_parallel_cross_entropy(models[mode](tokens), tokens, 4096).mean().backward()

            return processor_seconds(work)

        return once

    for mode, model in models.items():
        with LiveBytes() as memory:
            model.head_in_loss = True
            hidden = model(tokens)
            alive[mode] = memory.now
            hidden.sum().backward()
            model.head_in_loss = False
    taken = in_turn({mode: step(mode) for mode in MODES}, rounds)
    rows = []
    for mode in MODES:
        rows.append(_bytes(f"activations up to the output layer, checkpointing = {mode}", alive[mode]))
        if mode != "none":
            rows.append(ratio(f"speed of a step, {mode}, of none", taken[mode], taken["none"]))
    return rows


def planning() -> list[Row]:
    """Measure a dry run of 405B on 16,384 ranks, all stages, and on 256."""
    recipe = Path(__file__).parents[1] / "recipes" / "llama-3.1-405b-16384gpus.toml"
    rows = []
    for data in (2, 128):
        overrides = [f"layout.data={data}", f"data.global_batch={16 * data}"]
        loaded = load_recipe(recipe, overrides)
        took = processor_seconds(lambda loaded=loaded: dry_run(loaded))
        rows.append(Row(f"dry run of 405B on {128 * data:,} ranks", took, took, took, unit="s"))
    return rows


def _back(loss: Tensor) -> float:
    loss.backward()
    return float(loss.detach())


def _bytes(name: str, size: int, goal: float | None = None) -> Row:
    mib = size / MIB
    reach = "" if goal is None else f"<= {goal}"
    return Row(name, mib, mib, mib, unit="MiB", goal=reach, good=None if goal is None else mib <= goal)
