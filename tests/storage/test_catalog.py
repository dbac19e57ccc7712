"""Lazy tensors: made of pieces under any names, read in as few reads as there are stretches, or refused."""

from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from trilith.parallel_state import BadCheckpoint, BadInput, Box, Piece
from trilith.storage import TensorFile
from trilith.storage.catalog import Catalog, Key, LazyTensor, check_covered, in_one_file, renamed

PAIRS = torch.arange(16.0).view(8, 2)


@pytest.fixture
def stored(tmp_path):
    save_file({"pairs": PAIRS, "other": torch.ones(8, 2, dtype=torch.float16)}, tmp_path / "f")
    file = TensorFile.open(tmp_path / "f")
    return Catalog({name: in_one_file(file, name) for name in file.tensors})


def halves(*others):
    """Return the pieces of a matrix whose even rows come first and then the odd ones."""
    rows = (Box((0, 0), (4, 2)), Box((4, 0), (8, 2)))
    return [Piece(box, "pairs", (odd, 0), (0, 1), (2, 1)) for odd, box in enumerate(rows)] + [*others]


def test_rows_that_take_turns_are_read_in_one_go_and_only_their_own_numbers_are_looked_at(stored):
    tensor = renamed(stored, {"w": halves()})["w"]
    with mock.patch.object(TensorFile, "read", autospec=True, side_effect=TensorFile.read) as reads:
        assert torch.equal(tensor.read(), torch.cat([PAIRS[::2], PAIRS[1::2]]))
    assert reads.call_count == 1
    flawed = PAIRS.clone()
    flawed[1] = float("nan")
    save_file({"pairs": flawed}, path := next(iter(tensor.near(tensor.box))).stored.file.path)
    tensor = renamed({"pairs": in_one_file(TensorFile.open(path), "pairs")}, {"w": halves()})["w"]
    assert torch.equal(tensor.read(Box((0, 0), (4, 2))), PAIRS[::2])
    with pytest.raises(BadInput, match="w: expected finite numbers"):
        tensor.read()


def test_tensors_that_are_not_there_whole_are_refused(stored):
    assert "w" not in renamed(stored, {"w": [Piece.plain(Box((0,), (1,)), "missing")]})
    with pytest.raises(BadCheckpoint, match="w: expected a tensor"):
        Catalog()["w"]
    both = halves(Piece.plain(Box((8, 0), (16, 2)), "other"))
    with pytest.raises(BadInput, match="here: w: expected one dtype, found F16, F32"):
        renamed(stored, {"w": both}, "here")
    key = next(iter(stored["pairs"].near(Box((0, 0), (1, 1))))).stored
    holed = LazyTensor("w", "F32", (8, 2), (Piece.plain(Box((0, 0), (7, 2)), Key(*key)),))
    with pytest.raises(BadCheckpoint, match="w: expected each of 16 elements once, found 14"):
        holed.read()
    with pytest.raises(BadInput, match="here: w: expected each element once"):
        check_covered("here", {"w": holed})
