"""Reading boxes of tensors: the right bytes, into the right memory, and no more of it than promised."""

import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from trilith.parallel_state import Box
from trilith.storage import TensorFile
from trilith.storage import safetensors_reader as tensor_file
from trilith.storage.dtypes import TORCH


def random_box(shape, rng):
    bounds = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 7), max_size=4), st.sampled_from(["BF16", "F64", "I8"]), st.randoms())
def test_any_box_of_any_tensor(tmp_path, shape, dtype, rng):
    whole = torch.randint(0, 100, tuple(shape)).to(TORCH[dtype])
    save_file({"w": whole, "before": torch.zeros(3)}, tmp_path / "t.safetensors")
    file = TensorFile.open(tmp_path / "t.safetensors")
    for _ in range(4):
        box = random_box(tuple(shape), rng)
        assert torch.equal(file.read("w", box), whole[box.slices])
    raw = (tmp_path / "t.safetensors").read_bytes()
    ranges = b"".join(raw[at : at + n] for at, n in file.byte_ranges("w", box))
    assert ranges == whole[box.slices].contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("columns", [3, 512, 5000])
@pytest.mark.parametrize("width", [10_000, 600_000])
def test_columns_by_runs_and_by_scratch(tmp_path, columns, width):
    whole = torch.randn(24, width).bfloat16()
    save_file({"w": whole}, tmp_path / "t.safetensors")
    file = TensorFile.open(tmp_path / "t.safetensors")
    box = Box((5, 77), (20, 77 + columns))
    assert torch.equal(file.read("w", box), whole[5:20, 77 : 77 + columns])


@pytest.mark.parametrize("name", sorted(TORCH))
def test_every_type_that_torch_holds(tmp_path, name):
    whole = torch.randint(0, 255, (6, 16), dtype=torch.uint8)
    whole = whole.bool() if name == "BOOL" else whole.view(TORCH[name])
    save_file({"w": whole}, tmp_path / "t.safetensors")
    file = TensorFile.open(tmp_path / "t.safetensors")
    assert file.tensors["w"].dtype == name
    assert torch.equal(file.read("w").view(torch.uint8), whole.view(torch.uint8))


def test_reading_into_memory_of_the_caller(tmp_path):
    whole = torch.randn(8, 6)
    save_file({"w": whole}, tmp_path / "t.safetensors")
    out = torch.zeros(10, 6)
    got = TensorFile.open(tmp_path / "t.safetensors").read("w", Box((2, 0), (6, 6)), out=out[1:5])
    assert got.data_ptr() == out[1:].data_ptr()
    assert torch.equal(out[1:5], whole[2:6]) and not out[5:].any() and not out[0].any()


def test_columns_take_constant_extra_memory(tmp_path):
    save_file({"w": torch.zeros(2048, 4096)}, tmp_path / "t.safetensors")  # 32 MB
    file = TensorFile.open(tmp_path / "t.safetensors")
    box = Box((0, 8), (2048, 16))
    out = torch.empty(box.shape)
    tracemalloc.start()
    file.read("w", box, out=out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * tensor_file._SCRATCH
