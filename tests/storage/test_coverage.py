"""Each element owned exactly once: the sweep over boxes against counting every element."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trilith.parallel_state import BadCheckpoint, Box
from trilith.storage.coverage import check_coverage, first_flaw


@st.composite
def tilings(draw):
    """Draw a shape and boxes that tile it; perhaps one is dropped, doubled or replaced."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        if not shape:
            break
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        boxes += [box.narrow(dim, 0, at), box.narrow(dim, at, box.shape[dim])]
    for _ in range(draw(st.integers(0, 2))):
        which = draw(st.integers(0, len(boxes) - 1)) if boxes else 0
        act = draw(st.sampled_from(["drop", "double", "random"]))
        if act == "drop" and boxes:
            boxes.pop(which)
        elif act == "double" and boxes:
            boxes.append(boxes[which])
        else:
            bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
            boxes.append(Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds)))
    return shape, boxes


@given(tilings())
def test_flaw_is_what_counting_finds(case):
    shape, boxes = case
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices] += 1
    flaw = first_flaw(Box.whole(shape), boxes)
    if (counts == 1).all():
        assert flaw is None
    else:
        assert flaw is not None and flaw.times != 1
        assert flaw.box.size and (counts[flaw.box.slices] == flaw.times).all()


def test_messages_name_tensor_and_box():
    whole = Box.whole((8, 6))
    halves = [whole.narrow(1, 0, 3), whole.narrow(1, 3, 6)]
    check_coverage("here", "w", (8, 6), halves)
    with pytest.raises(BadCheckpoint, match=r"here: w: .*\[0:8, 3:6\] owned by nobody"):
        check_coverage("here", "w", (8, 6), halves[:1])
    with pytest.raises(BadCheckpoint, match=r"here: w: .*\[0:8, 3:6\] owned 2 times"):
        check_coverage("here", "w", (8, 6), [*halves, halves[1]])
    with pytest.raises(BadCheckpoint, match=r"boxes inside \[8, 6\]"):
        check_coverage("here", "w", (8, 6), [Box.whole((9, 6))])
    with pytest.raises(BadCheckpoint, match="boxes inside"):
        check_coverage("here", "w", (8, 6), [Box.whole((8,))])


def test_empty_tensors_and_empty_shards_are_covered():
    assert first_flaw(Box.whole((0, 4)), []) is None
    assert first_flaw(Box.whole(()), [Box.whole(())]) is None
    rows = [Box((i, 0), (i + 1, 4)) for i in range(8)] + [Box((8, 0), (8, 4))] * 56
    assert first_flaw(Box.whole((8, 4)), rows) is None


def test_thousands_of_shards_take_milliseconds():
    whole = Box.whole((16_384 * 4, 64))
    rows = [whole.narrow(0, i * 4, i * 4 + 4) for i in range(16_384)]
    begin = time.process_time()
    assert first_flaw(whole, rows) is None
    assert first_flaw(whole, rows[:-1]) is not None
    assert time.process_time() - begin < 2
