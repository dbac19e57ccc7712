"""Each pair of choices that a run may have, in one covering array: families, axes, schedules, memory.

Axes are of two ranks, two axes at most, so that a run has four ranks; one axis of four has a list of its own.
More choices at once, and eight ranks, are drawn in ``test_drawn_layouts.py``; ``torch.compile`` costs ten
times as much and has ``test_compiled.py``.
"""

from dataclasses import asdict
from random import Random

import pytest
from support.combinations import ADAPTERS, FROZEN, LONG, Choice, covering_array, cuts, draw, pairs
from support.layout_cases import Layouts, Row, refused
from trilith.parallel_state import Layout

COVERING = covering_array()
HELD = frozenset[tuple[object, ...]]().union(*map(pairs, COVERING))


def first_runs(part):
    """Return the first runs of the array, of which the best come first, that hold this part of all pairs."""
    held, count = set(), 0
    while len(held) < part * len(HELD):
        held |= pairs(COVERING[count])
        count += 1
    return COVERING[:count]


#: What every suite trains. Each of the other runs holds a few pairs more: they are nightly.
OFTEN = first_runs(0.93)
#: Some go on from a checkpoint. Only a run saves adapters: see the tests of training.
SAVED = [choice for choice in OFTEN if choice.kind == "all"][::5]


def row(choice):
    resumes = Layout.of(tensor=choice.world) if choice in SAVED else None
    return Row(str(choice), choice.case, slow=choice in COVERING[len(OFTEN) :], resumes=resumes)


LAYOUTS = Layouts([row(choice) for choice in (*COVERING, *LONG)])
test_every_pair_of_choices_equals_one_device = LAYOUTS.equal_one_device()
test_every_pair_of_choices_sends_what_is_planned = LAYOUTS.send_what_is_planned()
test_resuming_is_bitwise = LAYOUTS.resume_bitwise()
test_resuming_in_another_layout_is_as_if_the_run_had_not_stopped = LAYOUTS.resume_in_another_layout()


def refusal(choice):
    """Why a recipe may not choose this."""
    data = {"tokens": "-", "sequence_length": 16, "micro_batch": choice.micro_batch}
    raw = {"out": "-", "steps": 1, "model": {"config": choice.config}, "layout": choice.section}
    return refused(raw | {"memory": choice.memory, "data": data | {"global_batch": choice.samples}})


@pytest.mark.parametrize("choice", [*COVERING, *LONG], ids=str)
def test_a_recipe_may_choose_this(choice):
    assert (error := refusal(choice)) is None, error


@pytest.mark.parametrize("part", [*ADAPTERS, *FROZEN])
def test_every_part_that_may_be_trained_is_cut_along_an_axis_and_computed_again(part):
    met = set().union(*(cuts(choice) for choice in COVERING if choice.trains == part))
    assert len(met & {"tensor", "pipeline", "context", "data"}) >= 2
    assert len(met & {"none", "selective", "every", "full"}) >= 1


def test_the_array_is_small_and_holds_every_pair_that_is_drawn():
    assert len(COVERING) <= 80
    random = Random(1)
    for _ in range(5000):
        choice = draw(random)
        assert not (missing := pairs(choice) - HELD), (str(choice), missing)


def test_the_array_holds_every_pair_that_a_recipe_may_choose():
    """The draws omit nothing legal: here every value is drawn by itself, and recipes decide on it."""
    random, legal = Random(2), 0
    while legal < 100:
        values = {key: random.choice(sorted({value for name, value in SEEN if name == key})) for key in KEYS}
        choice = Choice(**values)
        if 1 < choice.world <= 4 and not means_nothing(choice) and refusal(choice) is None:
            legal += 1
            assert not (missing := pairs(choice) - HELD), (str(choice), missing)


SEEN = {value for pair in HELD for value in pair}
KEYS = [*asdict(COVERING[0])]


def means_nothing(choice):
    """Return whether one of the choices changes no run: nothing is cut or sent along an axis of one rank."""
    return bool(
        (choice.zero and choice.data * choice.context == 1)
        or (choice.replicas > 1 and not choice.zero)
        or (choice.sequence and choice.tensor == 1)
        or (choice.ring and choice.context == 1)
        or (choice.pipeline == 1 and (choice.schedule != "1f1b" or choice.split))
    )
