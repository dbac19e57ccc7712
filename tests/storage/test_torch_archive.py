"""Archives of ``torch.save`` read without running them: every tensor, any box, and what is refused."""

import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trilith.parallel_state import BadCheckpoint, BadInput, Box
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


def test_an_altered_pickle_and_a_compressed_or_cut_archive_are_refused(saved, tmp_path):
    raw = bytearray(saved.read_bytes())
    raw[raw.index(b"whole")] ^= 1
    (tmp_path / "altered").write_bytes(raw)
    with pytest.raises(BadCheckpoint, match="CRC-32"):
        TorchArchive.open(tmp_path / "altered")
    (tmp_path / "cut").write_bytes(saved.read_bytes()[:-100])
    with pytest.raises(BadInput, match="cut short"):
        TorchArchive.open(tmp_path / "cut")
    with (
        zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as packed,
        zipfile.ZipFile(saved) as old,
    ):
        for name in old.namelist():
            packed.writestr(name, old.read(name))
    with pytest.raises(BadInput, match="compressed"):
        TorchArchive.open(tmp_path / "packed")


def test_the_form_before_zip_archives_is_refused_with_the_way_out(tmp_path):
    torch.save({"a": BASE}, tmp_path / "old", _use_new_zipfile_serialization=False)
    with pytest.raises(BadInput, match=r"before torch 1.6.*torch.save or as safetensors"):
        TorchArchive.open(tmp_path / "old")


def test_a_view_that_reads_other_numbers_than_are_stored_is_refused(tmp_path):
    negated = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert negated.is_neg()
    torch.save({"a": negated}, tmp_path / "negated")
    with pytest.raises(BadInput, match=r"resolve_neg\(\)"):
        opened(tmp_path / "negated")
    torch.save({"a": negated.resolve_neg()}, tmp_path / "plain")
    assert opened(tmp_path / "plain")[1].read("a").tolist() == [-2.0, -4.0]


def test_a_view_whose_elements_share_bytes_is_refused(tmp_path):
    torch.save({"a": torch.ones(3, 1).expand(3, 4)}, tmp_path / "wide")
    with pytest.raises(BadInput, match=r"contiguous\(\)"):
        opened(tmp_path / "wide")
