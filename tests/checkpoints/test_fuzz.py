"""Headers, indexes and configs with random damage: accepted or refused in one line, never anything else."""

import copy
import json
import struct
from random import Random

import pytest
from safetensors.torch import load_file
from support.configs import TINY_GPT2, TINY_LLAMA
from support.damage import damaged, fuzz, is_accepted
from trilith.checkpoints import read_source
from trilith.machine.random_files import write_hf_folder
from trilith.models.from_transformers.config import adopted_types
from trilith.storage import TensorFile

STRANGE = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e308, 1e-320),
    *("", "x", "F32", "BF16", "../x", "/etc/passwd", "a\0b", "\ud800", "é" * 300, "1", "nan"),
    *("llama", "gpt2"),
    *([], [0], [1, 2], [[]], [None], [-1, 2], [0, 2**63], {}, {"a": 1}, {"rope_type": "yarn", "factor": -1}),
]
#: Tried this often in CI, and this often with `-m slow`.
SHORT, LONG = 400, 10_000


def places(value):
    """Return every container of a JSON value with each of its keys."""
    keys = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def damaged_json(value, random):
    made = copy.deepcopy(value)
    for _ in range(random.randint(1, 3)):
        known = places(made)
        if not known:
            break
        holder, key = random.choice(known)
        match random.randrange(4):
            case 0 | 1:
                holder[key] = copy.deepcopy(random.choice(STRANGE))
            case 2:
                del holder[key]
            case 3:
                other, from_key = random.choice(known)
                if isinstance(other, dict) and from_key in other:
                    holder[key] = copy.deepcopy(other[from_key])
    raw = json.dumps(made).encode()
    return damaged(raw, random) if random.random() < 0.3 else raw


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
}


def read_as_the_library(path):
    """What is accepted, as with another letter in a name, has one meaning."""
    file = TensorFile.open(path)
    theirs = {name: tuple(tensor.shape) for name, tensor in load_file(path).items()}
    assert theirs == {name: entry.shape for name, entry in file.tensors.items()}


def with_flipped_bit(raw, bit):
    return raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :]


def read_its_folder(path):
    return read_source(path.parent)


COUNTS = [
    pytest.param(SHORT, id="short"),
    pytest.param(LONG, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
]


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_headers_are_read_or_refused(tmp_path, count):
    random = Random(1)

    def file(body):
        return struct.pack("<Q", len(body)) + body + bytes(40)

    def make():
        whole = file(json.dumps(HEADER).encode())
        return random.choice([
            lambda: file(damaged_json(HEADER, random)),
            lambda: damaged(whole, random),
            lambda: with_flipped_bit(whole, random.randrange(8 * (len(whole) - 40))),
        ])()  # fmt: skip

    accepted = fuzz(read_as_the_library, tmp_path / "f.safetensors", count, make)
    assert 0 < accepted < count / 2


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("name", "config", "most"),
    [
        pytest.param("model.safetensors.index.json", TINY_LLAMA, 0.5, id="index"),
        pytest.param("config.json", TINY_LLAMA, 1.0, id="llama"),
        pytest.param("config.json", TINY_GPT2, 1.0, id="gpt2"),
    ],
)
def test_damaged_files_of_json_are_read_or_refused(tmp_path, count, name, config, most):
    write_hf_folder(tmp_path / "hf", config, max_shard_size=20_000)
    path = tmp_path / "hf" / name
    assert is_accepted(read_its_folder, path)
    random, original = Random(2), json.loads(path.read_text())
    adopted_types()  # imports transformers' models, which write to no file later
    count //= 1 if name.endswith("index.json") else 2
    accepted = fuzz(read_its_folder, path, count, lambda: damaged_json(original, random))
    assert 0 < accepted < most * count
