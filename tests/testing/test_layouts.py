"""The one rule by which a layout is compared with one device: what differs, and what is rounding."""

import pytest
import torch
from trilith.parallel_state import Box
from trilith.testing import assemble, differences
from trilith.testing.layouts import as_pieces, zero_share

LARGE = torch.tensor([-4.0, 2.0], dtype=torch.float64)


def piece(start, *numbers, owner=True):
    return Box((start,), (start + len(numbers),)), owner, torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("found", "relative"),
    [
        ([-4.0, 2.0], 0.0),
        ([-4.0, 2.1], 0.1 / 4),
        ([-4.0, float("nan")], float("inf")),
        ([-4.0, 2.0, 0.0], float("inf")),
    ],
)
def test_a_difference_is_relative_to_the_largest_element_and_nan_and_other_shapes_are_infinite(
    found, relative
):
    ranks = [as_pieces({"a": LARGE}), as_pieces({"a": torch.tensor(found, dtype=torch.float64)})]
    assert dict(differences({"a": LARGE}, ranks)) == {"a": pytest.approx(relative)}


def test_names_on_one_side_only_differ_and_the_last_tensor_comes_first():
    one, other = {"a": LARGE, "b": LARGE}, {"b": LARGE, "c": LARGE}
    assert [*differences(one, [as_pieces(other)])] == [("c", float("inf")), ("b", 0.0), ("a", float("inf"))]


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float64, 1.3e-7), (torch.float32, 9e-4), (torch.bfloat16, 0.12)]
)
def test_a_tensor_that_is_zero_but_for_rounding_counts_as_a_share_of_the_largest(dtype, share):
    large, nothing = torch.tensor([8.0], dtype=dtype), torch.tensor([1e-20], dtype=dtype)
    found = as_pieces({"large": large, "nothing": nothing + 1e-10})
    apart = dict(differences({"large": large, "nothing": nothing}, [found]))
    assert zero_share(dtype) == pytest.approx(share, rel=0.1)
    assert apart["nothing"] == pytest.approx(1e-10 / (8 * zero_share(dtype)), rel=0.01)


def test_pieces_are_put_together_if_each_element_is_owned_once_and_copies_are_equal():
    ranks = [{"a": piece(0, 1.0, 2.0)}, {"a": piece(2, 3.0)}, {"a": piece(1, 2.0, owner=False)}]
    assert assemble(ranks)["a"].tolist() == [1.0, 2.0, 3.0]
    for wrong, says in (
        (piece(1, 2.5, owner=False), "copies differ"),
        (piece(1, 2.0), "exactly one owner"),
        (piece(3, 4.0, owner=False), "exactly one owner"),
    ):
        with pytest.raises(AssertionError, match=says):
            assemble([*ranks[:2], {"a": wrong}])
