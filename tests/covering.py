"""Find the covering array of ``support/combinations.py`` and write it to ``support/array.json``.

To be run when an axis, a family or a part that may be trained is new: `python tests/covering.py`; it takes
two minutes. Of a run whose rounding grows to more than the tests allow, as they then say, a value is changed
by hand that no pair needs.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support.combinations import ADAPTERS, ARRAY, FAMILIES, FROZEN, HAVE, Choice, cuts, draw, pairs

#: How many runs are drawn, and how often some of the array are taken out and others put in.
DRAWN, ROUNDS = 3000, 1500
Pair = tuple[object, ...]


def price(choice: Choice) -> float:
    """Return about what a run costs: to build a model and to pass blocks, on each of its ranks."""
    rounds = choice.samples // (choice.data * choice.micro_batch)
    again = 1.5 if choice.checkpointing != "none" else 1.0
    context = 1.4 if choice.context > 1 else 1.0
    return choice.world * (2 + rounds * choice.blocks / choice.pipeline * again * context)


class Covering:
    """Search for a cheap array among some choices that holds every pair which any of them holds."""

    def __init__(self, choices: Iterable[Choice], random: Random) -> None:
        self.random = random
        self.held = {choice: pairs(choice) for choice in choices}
        #: The choices that hold a pair.
        self.having: dict[Pair, list[Choice]] = {}
        for choice, its_pairs in self.held.items():
            for pair in its_pairs:
                self.having.setdefault(pair, []).append(choice)
        # Not in the order of a set, which differs between processes: the same array is found again.
        self.order = sorted(self.having, key=repr)

    def pairs_of(self, array: Iterable[Choice]) -> set[Pair]:
        return set[Pair]().union(*(self.held[choice] for choice in array))

    def completed(self, array: Iterable[Choice]) -> list[Choice]:
        """Return the array with what it lacks: for a pair that few choices hold, the one that adds most pairs
        for its price.
        """
        whole, uniform = [*array], self.random.uniform
        missing, base = self.having.keys() - self.pairs_of(whole), self.random.choice((0, 2, 5, 10))
        while missing:
            waiting = [pair for pair in self.order if pair in missing]
            rarest = min(waiting, key=lambda pair: len(self.having[pair]) * uniform(0.5, 1.5))
            gains = {
                choice: len(missing & self.held[choice]) / (base + price(choice)) * uniform(1, 1.05)
                for choice in self.having[rarest]
            }
            whole.append(max(gains, key=gains.__getitem__))
            missing -= self.held[whole[-1]]
        return whole

    def needed(self, array: Sequence[Choice]) -> list[Choice]:
        """Return the array without the choices whose pairs others hold, the dearest first."""
        rest = [*array]
        for choice in sorted(array, key=price, reverse=True):
            if self.held[choice] <= self.pairs_of(other for other in rest if other != choice):
                rest.remove(choice)
        return rest

    def cheapest(self) -> list[Choice]:
        """Return an array: in each round some leave, and what comes instead stays if it costs less."""
        best = self.needed(self.completed([]))
        for _ in range(ROUNDS):
            out = self.random.sample(best, self.random.randint(3, 9))
            other = self.needed(self.completed(choice for choice in best if choice not in out))
            if sum(map(price, other)) <= sum(map(price, best)):
                best = other
        return best


def with_parts(choices: Iterable[Choice]) -> Iterator[Choice]:
    """Give the choices that train a part all parts in turn: each meets as many kinds of cuts as can be."""
    met: dict[str, set[object]] = {part: set() for part in (*ADAPTERS, *FROZEN)}
    for choice in choices:
        parts = [*ADAPTERS] if choice.trains == "lora" else [*FROZEN] if choice.trains == "frozen" else []
        able = [part for part in parts if choice.model in HAVE.get(part, FAMILIES)]
        if able:
            part = max(able, key=lambda part: (len(cuts(choice) - met[part]), -len(met[part])))
            met[part] |= cuts(choice)
            choice = replace(choice, trains=part)
        yield choice


def best_first(array: Iterable[Choice]) -> list[Choice]:
    """Return the runs so that each adds the most new pairs for its number of ranks."""
    left, seen, ordered = [*array], set[Pair](), list[Choice]()
    while left:
        best = max(left, key=lambda choice: len(pairs(choice) - seen) / choice.world**0.5)
        left.remove(best)
        ordered.append(best)
        seen |= pairs(best)
    return ordered


def main() -> None:
    draws = Random(0)
    drawn = dict.fromkeys(draw(draws) for _ in range(DRAWN))
    array = best_first(with_parts(Covering(drawn, Random(1)).cheapest()))
    plain = asdict(Choice(""))
    rows = [{key: state for key, state in asdict(run).items() if state != plain[key]} for run in array]
    ARRAY.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(f"{len(array)} runs on {sum(run.world for run in array)} ranks, price {sum(map(price, array)):.0f}")


if __name__ == "__main__":
    main()
