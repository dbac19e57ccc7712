"""Draw samples by number: a data set for a recipe has a length, and each item is a dict of tensors."""

import torch
from torch import Tensor


class Reversed:
    """Words, and the same words from the last to the first."""

    def __init__(self, items: int = 64, length: int = 6, vocab: int = 31, seed: int = 0) -> None:
        self.items, self.length, self.vocab, self.seed = items, length, vocab, seed

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * self.items + number)
        words = torch.randint(1, self.vocab, (self.length,), generator=generator)
        answer = torch.cat([words.new_zeros(1), words.flip(0)])
        return {"source": words, "tokens": answer[:-1], "labels": answer[1:]}


class Stripes:
    """Images with stripes, and of which kind these are: how far they lie apart."""

    def __init__(self, items: int = 64, size: int = 6, kinds: int = 5, seed: int = 0) -> None:
        self.items, self.size, self.kinds, self.seed = items, size, kinds, seed

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * self.items + number)
        kind = torch.tensor(number % self.kinds)
        stripes = (torch.arange(self.size) % (kind + 2) == 0).float()
        return {
            "images": stripes + 0.3 * torch.randn(3, self.size, self.size, generator=generator),
            "kind": kind,
        }
