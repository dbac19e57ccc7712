"""Archives of ``torch.save`` read without running them: every tensor, any box, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trilith.parallel_state import BadInput, Box
from trilith.storage.torch_archive import TorchArchive, View, ViewFile


def opened(path):
    archive = TorchArchive.open(path)
    file = ViewFile.of(path)
    file.know(archive.entries)
    tensors = {name: one for name, one in archive.value.items() if isinstance(one, View)}
    for name, view in tensors.items():
        file.add(view, name)
    return tensors, file


BASE = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)
SAVED = {
    "whole": BASE,
    "slice": BASE[1:3, 2:, 1],
    "turned": BASE.permute(2, 0, 1),
    "stepped": BASE[:, ::2, :].transpose(0, 1),
    "bf16": torch.randn(3, 4).bfloat16(),
    "float8": torch.randn(3, 4).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "parameter": torch.nn.Parameter(torch.randn(2, 3)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "model.bin"
    torch.save({**SAVED, "step": 7, "note": "text"}, path)
    return path


def test_every_tensor_of_an_archive_is_found_with_its_bytes(saved):
    tensors, file = opened(saved)
    assert tensors.keys() == SAVED.keys()
    for name, wanted in SAVED.items():
        read = file.read(name)
        assert read.dtype == wanted.dtype and read.shape == wanted.shape
        assert torch.equal(
            read.view(-1).view(torch.uint8), wanted.detach().contiguous().view(-1).view(torch.uint8)
        )


@given(st.sampled_from(["whole", "slice", "turned", "stepped"]), st.data())
def test_any_box_of_any_view_is_that_of_the_tensor(saved, name, data):
    _, file = opened(saved)
    wanted = SAVED[name]
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in wanted.shape]
    box = Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
    assert torch.equal(file.read(name, box), wanted[box.slices])
    raw = saved.read_bytes()
    runs = b"".join(raw[at : at + length] for at, length in file.byte_ranges(name, box))
    assert runs == wanted[box.slices].contiguous().numpy().tobytes()


def test_the_stated_sums_are_those_of_the_stretches_that_hold_views(saved):
    import zlib

    _, file = opened(saved)
    raw = saved.read_bytes()
    assert len(file.sums) == len({one.untyped_storage().data_ptr() for one in SAVED.values()})
    assert all(zlib.crc32(raw[begin:end]) == crc for begin, end, crc in file.sums)


def test_a_view_that_reads_other_numbers_than_are_stored_is_refused(tmp_path):
    negated = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert negated.is_neg()
    torch.save({"a": negated}, tmp_path / "negated")
    with pytest.raises(BadInput, match=r"resolve_neg\(\)"):
        opened(tmp_path / "negated")
    torch.save({"a": negated.resolve_neg()}, tmp_path / "plain")
    assert opened(tmp_path / "plain")[1].read("a").tolist() == [-2.0, -4.0]
