"""The manifest: nothing but a whole checkpoint is accepted."""

import os
from zlib import crc32

import pytest
import torch
from safetensors.torch import save_file
from support.damage import flip_bit, truncate
from support.inputs import change_manifest
from support.refusals import Refused, refusals
from trilith.checkpoints import (
    Manifest,
    complete_checkpoints,
    load,
    newest_checkpoint,
    save,
    step_directory,
    verify,
)
from trilith.checkpoints.find import step_of
from trilith.checkpoints.stored_tensor import Part, StoredTensor
from trilith.parallel_state import BadCheckpoint, Box, Layout, ParallelState
from trilith.storage import TensorWriter
from trilith.storage.file_names import MANIFEST
from trilith.storage.strict_json import StoredFile

UP, NORM = torch.arange(32.0).reshape(8, 4), torch.arange(4.0)


def write_checkpoint(directory):
    """Write a checkpoint of two tensor ranks: ``up`` cut on dim 0, ``norm`` on both, and a tokenizer."""
    directory.mkdir(parents=True)
    files, parts = [], []
    for rank in range(2):
        name = f"tensor-{rank:02d}-of-02.safetensors"
        writer = TensorWriter(directory / name, {"up": ("F32", (4, 4)), "norm": ("F32", (4,))})
        writer.write("up", Box.whole((4, 4)), UP[rank * 4 : rank * 4 + 4])
        writer.write("norm", Box.whole((4,)), NORM)
        files.append(writer.close())
        parts.append(Part(file=rank, start=(rank * 4, 0), stop=(rank * 4 + 4, 4)))
    (directory / "tokenizer.json").write_bytes(b"{}")
    norms = (Part(file=0, start=(0,), stop=(4,)), Part(file=1, start=(0,), stop=(4,), role="replica"))
    manifest = Manifest(
        kind="training", model_type="llama", layout=Layout(tensor=2), files=tuple(files),
        config={"model_type": "llama", "rope_scaling": None, "rms_norm_eps": 1e-5, "name": "é"},
        step=int(directory.name.removeprefix("step-")), seeds={"data": 1}, data_position={"sample": 96},
        companions=(StoredFile(name="tokenizer.json", size=2, crc32=crc32(b"{}")),),
        tensors={
            "up": StoredTensor(dtype="F32", shape=(8, 4), parts=tuple(parts)),
            "norm": StoredTensor(dtype="F32", shape=(4,), parts=norms),
        },
    )  # fmt: skip
    (directory / MANIFEST).write_bytes(manifest.to_bytes())
    return manifest


@pytest.fixture
def checkpoint(tmp_path):
    write_checkpoint(tmp_path / "step-00000003")
    return tmp_path / "step-00000003"


def test_what_is_written_is_read(checkpoint):
    manifest = Manifest.load(checkpoint)
    assert manifest.layout == Layout(tensor=2) and manifest.config["name"] == "é" and manifest.step == 3
    assert Manifest.parse(manifest.to_bytes(), "again") == manifest
    assert [part.role for part in manifest.tensors["norm"].parts if part.file == 1] == ["replica"]
    verify(checkpoint, manifest)
    text = (checkpoint / MANIFEST).read_text()  # a line for each tensor and file, for people
    starts = (*(f'"{name}": ' for name in manifest.tensors),)
    starts += (*(f'{{"name": "{name}", ' for name in (FIRST, SHARD, TOKENIZER)),)
    assert all(f"\n  {start}" in text for start in starts)


def edited(change, **how):
    return lambda directory: change_manifest(directory, change, **how)


def raw(change):
    return lambda directory: (directory / MANIFEST).write_bytes(change((directory / MANIFEST).read_bytes()))


SHARD, TOKENIZER = "tensor-01-of-02.safetensors", "tokenizer.json"
FIRST = "tensor-00-of-02.safetensors"
SWAPS = ((SHARD, "c"), (FIRST, SHARD), ("c", FIRST))


def test_every_single_flipped_bit_of_a_manifest_is_refused(checkpoint):
    whole = (checkpoint / MANIFEST).read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            with pytest.raises(BadCheckpoint):
                Manifest.parse(bytes(flipped), "manifest.json")


def link_out(directory):
    (directory / SHARD).rename(directory.parent / "out")
    (directory / SHARD).symlink_to("../out")


def named(name):
    return edited(lambda m: m["files"][0].update(name=name))


def part(**changes):
    return edited(lambda m: m["tensors"]["up"]["parts"][0].update(changes))


def field(**changes):
    return edited(lambda m: m.update(changes))


def layout(**changes):
    return edited(lambda m: m["layout"].update(changes))


def left_out(key):
    return edited(lambda m: m.pop(key))


def header(new):
    def edit(directory):
        (directory / SHARD).write_bytes((directory / SHARD).read_bytes().replace(b'"norm"', new))

    return edit


def replica_differs(directory):
    """Write a replica that differs already when it is written, so that its checksum is right."""
    manifest = Manifest.load(directory)
    (directory / SHARD).unlink()
    writer = TensorWriter(directory / SHARD, {"up": ("F32", (4, 4)), "norm": ("F32", (4,))})
    writer.write("up", Box.whole((4, 4)), UP[4:])
    writer.write("norm", Box.whole((4,)), NORM + 1)
    manifest = manifest.model_copy(update={"files": (manifest.files[0], writer.close())})
    (directory / MANIFEST).write_bytes(manifest.to_bytes())


def first(folder):
    return Manifest.load(folder / "step-00000003")


def verified(folder):
    verify(folder / "step-00000003", first(folder))


def newest(folder):
    return newest_checkpoint(folder / "run")


def damaged(why, spoil, says, read=first):
    def given(folder):
        write_checkpoint(folder / "step-00000003")
        spoil(folder / "step-00000003")

    return Refused(why, read, says, code=4, given=given)


def folders(*names):
    return lambda folder: [(folder / "run" / name).mkdir(parents=True) for name in names]


def save_in(folder):
    save(folder, torch.nn.Linear(2, 2), state=ParallelState.alone())


LONG_NAMES = ((newest_checkpoint, 4), (load, 2), (save_in, 2))
test_what_is_no_whole_checkpoint_is_refused = refusals(
    damaged("G1-missing", lambda step: step.rename(step.parent / "away"), "no such directory"),
    damaged("G2-empty", lambda step: [file.unlink() for file in step.iterdir()], "complete checkpoint"),
    damaged("G5-truncated", raw(lambda text: text[:-20]), "valid JSON"),
    damaged("G5-empty", raw(lambda text: b""), "valid JSON"),
    damaged("G5-not-JSON", raw(lambda text: b"\x80\x04."), "UTF-8"),
    damaged("G5-version-99", field(version=99), "version: expected 2 or 3, found 99"),
    damaged("G5-version-1", edited(lambda m: m.update(version=1), sealed=False),
            r"version: expected 2 or 3, found 1\. .* has no seal.*0\.2\.0"),
    damaged("G5-no-version", left_out("version"), "version"),
    damaged("G5-version-true", field(version=True), "version"),
    damaged("G5-no-layout", left_out("layout"), "layout"),
    damaged("G5-layout-of-0", layout(tensor=0), "layout"),
    damaged("G5-unknown-field", field(surprise=1), "surprise"),
    damaged("G5-step-is-text", field(step="3"), "step"),
    damaged("G5-step-and-a-half", field(step=1.5), "step"),
    damaged("G5-negative-step", field(step=-1), "step"),
    damaged("G5-other-step", field(step=4), "step: expected 3, as .* named"),
    damaged("G5-ranks", layout(tensor=10**9), "layout.*found 1,000,000,000"),
    damaged("G5-fewer-ranks-than-files", layout(tensor=1), "layout"),
    damaged("G5-files-of-another-layout", named("rank-00000-of-00004.safetensors"),
            "layout: expected 4 ranks, as rank-00000-of-00004.safetensors says, found 2"),
    damaged("G5-altered", raw(lambda text: text.replace(b'"step": 3', b'"step": 2')), "seal: expected"),
    damaged("G5-seal-removed", raw(lambda text: text.rpartition(b",")[0] + b"\n}\n"), "seal: .* none"),
    damaged("G5-seal-in-version-1", raw(lambda text: text.replace(b": 2,", b": 1,", 1)), "seal: Extra|seal"),
    damaged("G5-two-model-types", field(model_type="gpt2"), r"config\.model_type"),
    damaged("G5-dtype", edited(lambda m: m["tensors"]["up"].update(dtype="F31")), "F31"),
    damaged("G6-shard-missing", lambda step: (step / SHARD).unlink(), f"{SHARD}: .*nothing there. Copy"),
    damaged("G7-shard-truncated", lambda step: truncate(step / SHARD, -1), f"{SHARD}: .*bytes, .*Copy"),
    damaged("G7-companion-truncated", lambda step: truncate(step / TOKENIZER, 1), "tokenizer.*bytes"),
    damaged("G10-foreign-file", lambda step: save_file({"a": UP}, step / "tensor-02-of-03.safetensors"),
            "tensor-02-of-03"),
    damaged("G11-parent", named("../x.safetensors"), "plain file name"),
    damaged("G11-absolute", named("/etc/passwd"), "plain file name"),
    damaged("G11-the-manifest-itself", edited(lambda m: m["files"][1].update(name=MANIFEST)), "twice"),
    damaged("G11-link-out", link_out, r"link to [^.]*out\. Copy the file here"),
    damaged("G12-hole", part(stop=[3, 4]), r"'up'.*3:4.*nobody"),
    damaged("G12-overlap", part(stop=[5, 4]), r"'up'.*4:5.*2 times"),
    damaged("G12-half", edited(lambda m: m["tensors"]["up"]["parts"].pop()), "'up'.*nobody"),
    damaged("G12-no-owner", part(role="replica"), "nobody"),
    damaged("G12-no-such-file", part(file=7), "file 7"),
    damaged("G12-two-parts-in-a-file", part(file=1), "file 1"),
    damaged("G12-backwards", part(start=[9, 0]), "up to stop"),
    damaged("G12-rank", part(stop=[4]), "up to stop"),
    damaged("G12-negative", part(start=[-1, 0]), "start"),
    # What only the bytes show.
    damaged("G8-bit-flip", lambda step: flip_bit(step / SHARD, -1), f"{SHARD}: CRC-32", verified),
    damaged("G8-bit-flip-in-companion", lambda step: flip_bit(step / TOKENIZER, 0),
            "tokenizer.json: CRC-32", verified),
    damaged("G9-shards-swapped", lambda step: [(step / a).rename(step / b) for a, b in SWAPS], "CRC-32",
            verified),
    damaged("G8-header-of-another-tensor", header(b'"nurm"'), f"{SHARD}: 'norm'", verified),
    damaged("G8-header-damaged", header(b"'norm'"), f"{SHARD}: header", verified),
    damaged("G12-replica-differs", replica_differs, "'norm'.*equal replicas", verified),
    # Folders of runs without a complete checkpoint.
    Refused("G1-root-missing", newest, "no such directory", code=4),
    *(Refused(f"G24-{call.__name__}", lambda folder, call=call: call(folder / ("x" * 256)),
              "File name too long.*255", code=code) for call, code in LONG_NAMES),
    Refused("G2-root-empty", newest, "found none", code=4, given=folders("")),
    Refused("G3-only-tmp", newest, "unfinished: step-00000003.tmp-01", code=4,
            given=folders("step-00000003.tmp-0123456789abcdef")),
    Refused("G4-only-incomplete", newest, "step-00000007.*step-00000006", code=4,
            given=folders("step-00000007", "step-00000006")),
)  # fmt: skip


def test_G26_the_newest_is_the_highest_step_whatever_the_clock_said(tmp_path):
    for step in (9, 10, 100):
        write_checkpoint(step_directory(tmp_path, step))
        os.utime(step_directory(tmp_path, step), (1e9 - step, 1e9 - step))
    step_directory(tmp_path, 9).rename(tmp_path / "step-9")  # nor however the number is written
    assert newest_checkpoint(tmp_path).directory.name == "step-00000100"
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [9, 10, 100]
