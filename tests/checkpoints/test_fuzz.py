"""Headers, indexes and configs with random damage: accepted or refused in one line, never anything else."""

import copy
import json
import os
import shutil
import struct
import sys
import time
import warnings
from contextlib import contextmanager
from random import Random

import pytest
from support.configs import TINY_GPT2, TINY_LLAMA
from trilith.checkpoints import read_source
from trilith.machine.random_files import write_hf_folder
from trilith.parallel_state import BadInput
from trilith.storage import TensorFile

STRANGE = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e308, 1e-320),
    *(
        "",
        "x",
        "F32",
        "BF16",
        "../x",
        "/etc/passwd",
        "a\0b",
        "\ud800",
        "é" * 300,
        "1",
        "nan",
        "llama",
        "gpt2",
    ),
    *([], [0], [1, 2], [[]], [None], [-1, 2], [0, 2**63], {}, {"a": 1}, {"rope_type": "yarn", "factor": -1}),
]
#: Tried this often in CI, and this often with `-m slow`.
SHORT, LONG = 400, (10_000, 5_000, 5_000)


def damaged_bytes(raw, random):
    data = bytearray(raw)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1)
        span = random.randint(1, 12)
        match random.randrange(5):
            case 0:
                data[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                del data[at : at + span]
            case 2:
                data[at:at] = random.randbytes(span)
            case 3:
                data[at:at] = data[max(0, at - span) : at]
            case 4:
                data = data[: max(1, at)]
    return bytes(data)


def places(value, found):
    """List every container of a JSON value with each of its keys."""
    for key in (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        found.append((value, key))
        places(value[key], found)
    return found


def damaged_json(value, random):
    made = copy.deepcopy(value)
    for _ in range(random.randint(1, 3)):
        known = places(made, [])
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
    return damaged_bytes(raw, random) if random.random() < 0.3 else raw


@contextmanager
def opened_for_writing():
    """Collect paths that are opened for writing during the ``with`` block, and programs that are started."""
    paths = []
    active = True

    def hook(event, arguments):
        if not active:
            return
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            paths.append(str(arguments[0]))
        elif event in ("exec", "os.system", "subprocess.Popen", "pickle.find_class"):
            paths.append(event)

    sys.addaudithook(hook)
    try:
        yield paths
    finally:
        active = False


def tried(read, path):
    """Return whether the file was accepted; any error but ``BadInput``, or a second of computing, fails."""
    began = time.thread_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read(path)
            accepted = True
        except BadInput as error:
            accepted = False
            assert "\n" not in str(error), str(error)
    assert time.thread_time() - began < 1.0
    return accepted


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
}


def fuzz_headers(folder, count):
    random, path, results = Random(1), folder / "f.safetensors", []
    raw = json.dumps(HEADER).encode()
    whole = struct.pack("<Q", len(raw)) + raw + bytes(40)
    with opened_for_writing() as written:
        for _ in range(count):
            if random.random() < 0.5:
                body = damaged_json(HEADER, random)
                data = struct.pack("<Q", len(body)) + body + bytes(40)
            else:
                data = damaged_bytes(whole, random)
            path.write_bytes(data)
            written.clear()
            results.append(tried(TensorFile.open, path))
            assert not written
    return results


def fuzz_json(folder, name, count, seed):
    random, results = Random(seed), []
    original = json.loads((folder / name).read_text())
    with opened_for_writing() as written:
        for _ in range(count):
            (folder / name).write_bytes(damaged_json(original, random))
            written.clear()
            results.append(tried(read_source, folder))
            assert not written
    return results


def model_folder(folder, config):
    write_hf_folder(folder, config, max_shard_size=20_000)
    assert tried(read_source, folder)
    return folder


COUNTS = [
    pytest.param((SHORT, SHORT, SHORT), id="short"),
    pytest.param(LONG, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
]


@pytest.mark.parametrize("counts", COUNTS)
def test_damaged_headers(tmp_path, counts):
    results = fuzz_headers(tmp_path, counts[0])
    assert 0 < sum(results) < len(results) / 2


@pytest.mark.parametrize("counts", COUNTS)
def test_damaged_indexes(tmp_path, counts):
    folder = model_folder(tmp_path / "hf", TINY_LLAMA)
    results = fuzz_json(folder, "model.safetensors.index.json", counts[1], 2)
    assert 0 < sum(results) < len(results) / 2


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_GPT2], ids=["llama", "gpt2"])
def test_damaged_configs(tmp_path, counts, config):
    folder = model_folder(tmp_path / "hf", config)
    results = fuzz_json(folder, "config.json", counts[2] // 2, 3)
    assert 0 < sum(results) < len(results)
    shutil.rmtree(folder)
