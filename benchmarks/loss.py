"""Measure output layer and loss together against torch's: memory, time, distance of the gradients to fp64.

On a CPU: 2,048 tokens, 512 wide, a vocabulary of 128,256, in fp32 and bf16. On a GPU: 8,192 tokens, 4,096
wide, the same vocabulary, in bf16, the arithmetic compiled on both sides. Peaks do not count the inputs; on a
CPU they are counted exactly (`trilith.testing.LiveBytes`). Distances are those of all numbers together.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Row, at_most, in_turn, ratio, seconds_of
from torch import Tensor
from torch.nn import functional as F
from trilith.layers import automatic_chunk, chunked_cross_entropy, vocab_parallel_cross_entropy
from trilith.testing import LiveBytes

MIB = 2**20
VOCABULARY = 128256
ON_GPU = torch.cuda.is_available()
TOKENS, WIDTH = (8192, 4096) if ON_GPU else (2048, 512)
DTYPES = (torch.bfloat16,) if ON_GPU else (torch.float32, torch.bfloat16)
#: A mean over the tokens, as in training.
SCALE = 1 / TOKENS
AUTO, IN_BF16 = "ours, in chunks (auto)", "ours, 1,024 tokens at once, sums in bf16"
#: Goals: the MiB of a contender's peak, and how many times as fast as torch's the first one is.
PEAKS, SPEED = ({IN_BF16: 286}, 0.95) if ON_GPU else ({AUTO: 350}, 0.91)


@dataclass
class Problem:
    """Hold hidden states, the output layer's weight and labels; the logits' standard deviation is 2."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor

    @classmethod
    def draw(cls, dtype: torch.dtype) -> Problem:
        device = "cuda" if ON_GPU else "cpu"
        torch.manual_seed(0)
        hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH) * (2 / WIDTH**0.5)
        leaves = (one.to(device, dtype).requires_grad_() for one in (hidden, weight))
        return cls(*leaves, torch.randint(VOCABULARY, (TOKENS,)).to(device))


def main(folder: Path, rounds: int) -> list[Row]:
    return [row for dtype in DTYPES for row in of_dtype(Problem.draw(dtype), rounds)]


def contenders(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    hidden, weight, labels = problem.hidden, problem.weight, problem.labels
    chunk = automatic_chunk(TOKENS, WIDTH, VOCABULARY, compute=hidden.dtype.itemsize, gpu=ON_GPU)

    def ours(chunk: int, sums: torch.dtype | None = None) -> Tensor:
        scale = hidden.new_tensor(SCALE, dtype=torch.float32)
        how: dict[str, Any] = {"chunk": chunk, "scale": scale, "sums": sums, "compiled": ON_GPU}
        return chunked_cross_entropy(hidden[None], weight, labels[None], VOCABULARY, **how)

    def plain() -> Tensor:
        logits = F.linear(hidden, weight)[None]
        return vocab_parallel_cross_entropy(logits, labels[None], VOCABULARY, compiled=ON_GPU).sum() * SCALE

    def torchs() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    found: dict[str, Callable[[], Tensor]] = {AUTO: partial(ours, chunk)}
    if ON_GPU:
        found[IN_BF16] = partial(ours, 1024, torch.bfloat16)
    found["ours, whole logits"] = plain
    found["F.cross_entropy"] = torch.compile(torchs) if ON_GPU else torchs
    if hasattr(F, "linear_cross_entropy"):  # since torch 2.13; its value is right in fp32, not in bf16
        found["F.linear_cross_entropy"] = partial(F.linear_cross_entropy, hidden, weight, labels)
        chunks = torch.nn.LinearCrossEntropyOptions()
        found["F.linear_cross_entropy, in chunks"] = partial(found["F.linear_cross_entropy"], options=chunks)
    return found


@dataclass
class Measured:
    """Hold a contender's peak in MiB beyond the inputs (on a GPU also the gradients), and the distances to
    fp64 of its loss, of the hidden states' gradient and of the weight's.
    """

    peak: float
    apart: list[float]


def of_dtype(problem: Problem, rounds: int) -> list[Row]:
    """Run all contenders, time those that are timed in turn, and return the rows."""
    kind = str(problem.hidden.dtype).removeprefix("torch.")
    ways, wanted = contenders(problem), in_fp64(problem)
    found = {name: measured(problem, way, wanted) for name, way in ways.items()}
    mine, other = next(iter(ways)), "F.linear_cross_entropy"
    other = "F.cross_entropy" if ON_GPU or other not in ways else other
    timed = [*ways] if ON_GPU else [mine, other]  # some 10 s each on two cores
    turns = {name: partial(seconds_of, partial(backward, problem, ways[name])) for name in timed}
    taken = in_turn(turns, rounds)
    usual = found["F.cross_entropy"].apart[2]
    peak = f"peak beyond inputs{' and gradients' if ON_GPU else ''}"
    rows = [
        at_most(f"{kind}: {name}, {peak}", one.peak, PEAKS.get(name), "MiB") for name, one in found.items()
    ]
    rows.append(at_most(f"{kind}: the gradients", gradient_bytes(problem) / MIB, unit="MiB"))
    for name in timed:
        if name != other:
            goal = SPEED if name == mine else None
            rows.append(ratio(f"{kind}: {name}, as fast as {other}", taken[name], taken[other], goal=goal))
    for name, one in found.items():
        most = 1.01 * usual if name == mine and kind == "bfloat16" else None
        what = f"{kind}: {name}, distance of the weight's gradient to fp64"
        row = at_most(what, one.apart[2], most, "", "F.cross_entropy's")
        row.details = dict(zip(("loss", "hidden", "weight"), one.apart, strict=True))
        rows.append(row)
    return rows


def measured(problem: Problem, way: Callable[[], Tensor], wanted: tuple[Tensor, ...]) -> Measured:
    if ON_GPU:
        backward(problem, way)  # compiles
    peak, loss = peak_of(problem, way)
    peak -= gradient_bytes(problem) * ON_GPU
    assert problem.hidden.grad is not None and problem.weight.grad is not None
    return Measured(peak / MIB, distances((loss, problem.hidden.grad, problem.weight.grad), wanted))


def gradient_bytes(problem: Problem) -> int:
    return problem.hidden.nbytes + problem.weight.nbytes


def backward(problem: Problem, way: Callable[[], Tensor]) -> Tensor:
    problem.hidden.grad = problem.weight.grad = None
    loss = way()
    loss.backward()
    if ON_GPU:
        torch.cuda.synchronize()
    return loss.detach()


def peak_of(problem: Problem, way: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Return the largest number of bytes beyond the inputs, the gradients counted, and the loss."""
    problem.hidden.grad = problem.weight.grad = None
    gc.collect()
    if not ON_GPU:
        with LiveBytes() as memory:
            loss = backward(problem, way)
        return memory.peak, loss
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = backward(problem, way)
    return torch.cuda.max_memory_allocated() - before, loss


def in_fp64(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss and gradients computed in fp64, 256 tokens at a time."""
    weight, loss, hidden = problem.weight.detach().double(), 0.0, []
    total = torch.zeros_like(weight)
    for x, y in zip(problem.hidden.detach().double().split(256), problem.labels.split(256), strict=True):
        logits, each = x @ weight.T, torch.arange(len(y), device=y.device)
        logs = logits.log_softmax(-1)
        loss = loss - logs[each, y].sum() * SCALE
        gradient = logs.exp_()
        gradient[each, y] -= 1
        hidden.append(gradient @ weight * SCALE)
        total.addmm_(gradient.T, x, alpha=SCALE)
    return torch.as_tensor(loss), torch.cat(hidden), total


def distances(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
