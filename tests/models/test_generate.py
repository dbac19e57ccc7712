"""Choosing tokens: the likeliest, or by chance from those that temperature, top_k and top_p leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trilith.models import family_of, generate
from trilith.models.generate import choose
from trilith.parallel_state import BadInput
from trilith.testing.runs import TINY_LLAMA

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]])


def frequencies(**how: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = choose(LOGITS.expand(20_000, -1), generator=generator, **how)
    return torch.bincount(drawn, minlength=5) / len(drawn)


def test_at_temperature_0_it_is_the_likeliest() -> None:
    assert choose(LOGITS).tolist() == [0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_above_it_draws_as_the_softmax_says(temperature: float) -> None:
    expected = (LOGITS[0] / temperature).softmax(-1)
    torch.testing.assert_close(frequencies(temperature=temperature), expected, atol=0.012, rtol=0)


def test_top_k_leaves_the_k_likeliest() -> None:
    found = frequencies(temperature=1.0, top_k=2)
    torch.testing.assert_close(found[:2], LOGITS[0, :2].softmax(-1), atol=0.012, rtol=0)
    assert not found[2:].any()


def test_top_p_leaves_the_smallest_set_that_holds_so_much() -> None:
    # 0.64, 0.24, 0.09, 0.03: two of them hold 0.7, and the likeliest alone holds 0.6
    found = frequencies(temperature=1.0, top_p=0.7)
    assert found[:2].all() and not found[2:].any()
    assert frequencies(temperature=1.0, top_p=0.6).tolist() == [1, 0, 0, 0, 0]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    family = family_of(TINY_LLAMA)
    return family.build(family.from_hf(TINY_LLAMA), device="cpu")


def test_one_seed_gives_one_text_and_another_another() -> None:
    start = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def text(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return generate(model(), start, max_new_tokens=20, temperature=1.0, generator=generator).tolist()

    assert text(1) == text(1) != text(2)


def test_a_row_that_ended_is_padded_and_all_ended_stop() -> None:
    start = torch.tensor([[1, 2, 3]])
    free = generate(model(), start, max_new_tokens=10)[0].tolist()
    end = free[5]
    stopped = generate(model(), start, max_new_tokens=10, eos_id=end)[0].tolist()
    assert stopped == free[: free.index(end, 3) + 1]


@pytest.mark.parametrize(
    ("tokens", "how", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), {}, "prompt: expected at least one token"),
        (torch.ones(1, 2, dtype=torch.int64), {"top_p": 0.0, "temperature": 1.0}, "top_p: expected above 0"),
        (torch.ones(1, 60, dtype=torch.int64), {}, "at most the model's 64 positions"),
    ],
)
def test_refusals(tokens: torch.Tensor, how: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        generate(model(), tokens, max_new_tokens=5, **how)
