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

import torch
from measure import Row, in_turn, ratio, seconds_of
from torch import Tensor
from torch.nn import functional as F
from trilith.layers import Tokens, automatic_chunk, chunked_cross_entropy, vocab_parallel_cross_entropy
from trilith.testing import LiveBytes

MIB = 2**20
VOCABULARY = 128256
ON_GPU = torch.cuda.is_available()
TOKENS, WIDTH = (8192, 4096) if ON_GPU else (2048, 512)
DTYPES = (torch.bfloat16,) if ON_GPU else (torch.float32, torch.bfloat16)
#: A mean over the tokens, as in training.
SCALE = 1 / TOKENS


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
    tokens = Tokens(1, TOKENS, WIDTH, hidden.dtype.itemsize, fused=ON_GPU)
    chunk = automatic_chunk(tokens, VOCABULARY)

    def ours(chunk: int, sums: torch.dtype | None = None) -> Tensor:
        return chunked_cross_entropy(
            hidden[None],
            weight,
            labels[None],
            VOCABULARY,
            chunk=chunk,
            scale=hidden.new_tensor(SCALE, dtype=torch.float32),
            sums=sums,
            compiled=ON_GPU,
        )

    def plain() -> Tensor:
        logits = F.linear(hidden, weight)[None]
        return vocab_parallel_cross_entropy(logits, labels[None], VOCABULARY, compiled=ON_GPU).sum() * SCALE

    def torchs() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    found: dict[str, Callable[[], Tensor]] = {f"ours, {chunk:,} tokens at once (auto)": partial(ours, chunk)}
    if ON_GPU:
        found["ours, 1,024 tokens at once, sums in bf16"] = partial(ours, 1024, torch.bfloat16)
    found["ours, whole logits"] = plain
    found["F.cross_entropy"] = torch.compile(torchs) if ON_GPU else torchs
    if hasattr(F, "linear_cross_entropy"):  # since torch 2.13; its value is right in fp32, not in bf16
        found["F.linear_cross_entropy"] = partial(F.linear_cross_entropy, hidden, weight, labels)
        options = torch.nn.LinearCrossEntropyOptions()
        found["F.linear_cross_entropy, in chunks"] = partial(
            F.linear_cross_entropy, hidden, weight, labels, options=options
        )
    return found


def of_dtype(problem: Problem, rounds: int) -> list[Row]:
    """Run all contenders in turn and return their rows."""
    kind, ways = str(problem.hidden.dtype).removeprefix("torch."), contenders(problem)
    wanted = in_fp64(problem)
    peaks, errors = {}, {}
    for name, way in ways.items():
        if ON_GPU:
            backward(problem, way)  # compiles
        peaks[name], loss = peak_of(problem, way)
        errors[name] = distances((loss, problem.hidden.grad, problem.weight.grad), wanted)
    mine, theirs = next(iter(ways)), "F.linear_cross_entropy"
    theirs = "F.cross_entropy" if ON_GPU or theirs not in ways else theirs
    timed = [*ways] if ON_GPU else [mine, theirs]  # some 10 s each on two cores
    taken = in_turn(
        {name: partial(seconds_of, partial(backward, problem, ways[name])) for name in timed}, rounds
    )
    gradients = problem.hidden.nbytes + problem.weight.nbytes
    rows = []
    for name in ways:
        at_most = {"ours, 1,024 tokens at once, sums in bf16": 286} if ON_GPU else {mine: 350}
        extra = (peaks[name] - gradients * ON_GPU) / MIB
        goal = at_most.get(name)
        reach, good = ("", None) if goal is None else (f"<= {goal}", extra <= goal)
        what = "peak beyond inputs and gradients" if ON_GPU else "peak beyond inputs"
        rows.append(Row(f"{kind}: {name}, {what}", extra, extra, extra, unit="MiB", goal=reach, good=good))
    rows.append(Row(f"{kind}: the gradients", *[gradients / MIB] * 3, unit="MiB"))
    limit = 1 / 1.05 if ON_GPU else 1 / 1.1
    for name in timed:
        if name != theirs:
            goal = round(limit, 2) if name == mine else None
            rows.append(ratio(f"{kind}: {name}, as fast as {theirs}", taken[name], taken[theirs], goal=goal))
    for name, (loss, hidden, weight) in errors.items():
        details = {"loss": loss, "hidden": hidden, "weight": weight}
        usual = errors["F.cross_entropy"][2]
        good = weight <= 1.01 * usual if name == mine and kind == "bfloat16" else None
        reach = "" if good is None else "<= F.cross_entropy's"
        of = f"{kind}: {name}, distance of the weight's gradient to fp64"
        rows.append(Row(of, weight, weight, weight, unit="", goal=reach, good=good, details=details))
    return rows


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
