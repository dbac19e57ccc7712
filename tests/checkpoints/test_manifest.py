"""The manifest: nothing but a whole checkpoint is accepted, and it stays quick for the largest models."""

import json
import os
import time
from zlib import crc32

import pytest
import torch
from safetensors.torch import save_file
from trilith.checkpoints import Manifest, latest_checkpoint, step_directory, verify
from trilith.checkpoints.seal import seal
from trilith.checkpoints.stored_tensor import Part, StoredTensor
from trilith.parallel_state import BadCheckpoint, Box, Layout
from trilith.storage import TensorWriter
from trilith.storage.file_names import MANIFEST
from trilith.storage.records import StoredFile

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
        written = writer.close()
        files.append(StoredFile(name=name, size=written.size, crc32=written.crc))
        parts.append(Part(file=rank, start=(rank * 4, 0), stop=(rank * 4 + 4, 4)))
    (directory / "tokenizer.json").write_bytes(b"{}")
    norms = (Part(file=0, start=(0,), stop=(4,)), Part(file=1, start=(0,), stop=(4,), role="replica"))
    manifest = Manifest(
        kind="training",
        model_type="llama",
        config={"model_type": "llama", "rope_scaling": None, "rms_norm_eps": 1e-5, "name": "é"},
        layout=Layout(tensor=2),
        step=int(directory.name.removeprefix("step-")),
        seeds={"data": 1},
        data_position={"sample": 96},
        files=tuple(files),
        companions=(StoredFile(name="tokenizer.json", size=2, crc32=crc32(b"{}")),),
        tensors={
            "up": StoredTensor(dtype="F32", shape=(8, 4), parts=tuple(parts)),
            "norm": StoredTensor(dtype="F32", shape=(4,), parts=norms),
        },
    )
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
    assert len((checkpoint / MANIFEST).read_text().splitlines()) > 10  # a line each, for people


def edited(change):
    def edit(directory):
        manifest = json.loads((directory / MANIFEST).read_text())
        manifest.pop("seal")
        change(manifest)
        (directory / MANIFEST).write_bytes(seal((json.dumps(manifest)[:-1] + "\n}\n").encode()))

    return edit


def of_version_1(directory):
    """Write the manifest as releases before the seal did."""
    manifest = json.loads((directory / MANIFEST).read_text()) | {"version": 1}
    manifest.pop("seal")
    (directory / MANIFEST).write_text(json.dumps(manifest))


def raw(change):
    return lambda directory: void(
        (directory / MANIFEST).write_bytes(change((directory / MANIFEST).read_bytes()))
    )


def void(_):
    return None


SHARD = "tensor-01-of-02.safetensors"


def test_a_manifest_of_the_release_before_the_seal_is_read_and_known_as_unsealed(checkpoint):
    sealed = Manifest.load(checkpoint)
    of_version_1(checkpoint)
    old = Manifest.load(checkpoint)
    assert sealed.sealed and not old.sealed
    assert old.model_copy(update={"version": 2}) == sealed


def test_every_single_flipped_bit_of_a_manifest_is_refused(checkpoint):
    whole = (checkpoint / MANIFEST).read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            with pytest.raises(BadCheckpoint):
                Manifest.parse(bytes(damaged), "manifest.json")


def gone(directory):
    directory.rename(directory.parent / "elsewhere")


def empty(directory):
    for path in directory.iterdir():
        path.unlink()


def no_shard(directory):
    (directory / SHARD).unlink()


def short_shard(directory):
    (directory / SHARD).write_bytes((directory / SHARD).read_bytes()[:-1])


def foreign(directory):
    save_file({"a": UP}, directory / "tensor-02-of-03.safetensors")


def link_out(directory):
    (directory / SHARD).rename(directory.parent / "out")
    (directory / SHARD).symlink_to("../out")


def short_tokenizer(directory):
    (directory / "tokenizer.json").write_bytes(b"{")


def renamed(name):
    return lambda m: m["files"][1].update(name=name)


def first_part(m):
    part = m["tensors"]["up"]["parts"][0]
    return part


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(gone, "no such directory", id="G1-missing"),
        pytest.param(empty, "complete checkpoint", id="G2-empty"),
        pytest.param(raw(lambda b: b[:-20]), "valid JSON", id="G5-truncated"),
        pytest.param(raw(lambda b: b""), "valid JSON", id="G5-empty"),
        pytest.param(raw(lambda b: b"\x80\x04."), "UTF-8", id="G5-not-JSON"),
        pytest.param(
            edited(lambda m: m.update(version=99)),
            "version: expected 1, 2 or 3, found 99",
            id="G5-version-99",
        ),
        pytest.param(edited(lambda m: m.pop("version")), "version", id="G5-no-version"),
        pytest.param(edited(lambda m: m.update(version=True)), "version", id="G5-version-true"),
        pytest.param(edited(lambda m: m.pop("layout")), "layout", id="G5-no-layout"),
        pytest.param(edited(lambda m: m["layout"].update(tensor=0)), "layout", id="G5-layout-of-0"),
        pytest.param(edited(lambda m: m.update(surprise=1)), "surprise", id="G5-unknown-field"),
        pytest.param(edited(lambda m: m.update(step="3")), "step", id="G5-step-is-text"),
        pytest.param(edited(lambda m: m.update(step=1.5)), "step", id="G5-step-and-a-half"),
        pytest.param(edited(lambda m: m.update(step=-1)), "step", id="G5-negative-step"),
        pytest.param(edited(lambda m: m.update(step=4)), "step: expected 3, as .* named", id="G5-other-step"),
        pytest.param(
            edited(lambda m: m["layout"].update(tensor=10**9)), "layout.*found 1,000,000,000", id="G5-ranks"
        ),
        pytest.param(
            edited(lambda m: m["layout"].update(tensor=1)), "layout", id="G5-fewer-ranks-than-files"
        ),
        pytest.param(
            edited(lambda m: m["files"][0].update(name="rank-00000-of-00004.safetensors")),
            "layout: expected 4 ranks, as rank-00000-of-00004.safetensors says, found 2",
            id="G5-files-of-another-layout",
        ),
        pytest.param(raw(lambda b: b.replace(b'"step": 3', b'"step": 2')), "seal: expected", id="G5-altered"),
        pytest.param(raw(lambda b: b.rpartition(b",")[0] + b"\n}\n"), "seal: .* none", id="G5-seal-removed"),
        pytest.param(
            raw(lambda b: b.replace(b'": 2,', b'": 1,', 1)), "seal: Extra|seal", id="G5-seal-in-version-1"
        ),
        pytest.param(
            edited(lambda m: m.update(model_type="gpt2")), "config.model_type", id="G5-two-model-types"
        ),
        pytest.param(edited(lambda m: m["tensors"]["up"].update(dtype="F31")), "F31", id="G5-dtype"),
        pytest.param(no_shard, f"{SHARD}: .*nothing there", id="G6-shard-missing"),
        pytest.param(short_shard, f"{SHARD}: .*bytes", id="G7-shard-truncated"),
        pytest.param(short_tokenizer, "tokenizer.json: .*bytes", id="G7-companion-truncated"),
        pytest.param(foreign, "tensor-02-of-03", id="G10-foreign-file"),
        pytest.param(edited(renamed("../x.safetensors")), "plain file name", id="G11-parent"),
        pytest.param(edited(renamed("/etc/passwd")), "plain file name", id="G11-absolute"),
        pytest.param(edited(renamed(MANIFEST)), "twice", id="G11-the-manifest-itself"),
        pytest.param(link_out, "link to", id="G11-link-out"),
        pytest.param(
            edited(lambda m: first_part(m).update(stop=[3, 4])), r"'up'.*3:4.*nobody", id="G12-hole"
        ),
        pytest.param(
            edited(lambda m: first_part(m).update(stop=[5, 4])), r"'up'.*4:5.*2 times", id="G12-overlap"
        ),
        pytest.param(edited(lambda m: m["tensors"]["up"]["parts"].pop()), "'up'.*nobody", id="G12-half"),
        pytest.param(edited(lambda m: first_part(m).update(role="replica")), "nobody", id="G12-no-owner"),
        pytest.param(edited(lambda m: first_part(m).update(file=7)), "file 7", id="G12-no-such-file"),
        pytest.param(edited(lambda m: first_part(m).update(file=1)), "file 1", id="G12-two-parts-in-a-file"),
        pytest.param(edited(lambda m: first_part(m).update(start=[9, 0])), "up to stop", id="G12-backwards"),
        pytest.param(edited(lambda m: first_part(m).update(stop=[4])), "up to stop", id="G12-rank"),
        pytest.param(edited(lambda m: first_part(m).update(start=[-1, 0])), "start", id="G12-negative"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused(checkpoint, spoil, says):
    spoil(checkpoint)
    with pytest.raises(BadCheckpoint, match=says) as caught:
        Manifest.load(checkpoint)
    assert caught.value.exit_code == 4
    assert str(checkpoint) in str(caught.value) and "\n" not in str(caught.value)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flipped_weight(directory):
    flip(directory / SHARD, -1)


def flipped_tokenizer(directory):
    flip(directory / "tokenizer.json", 0)


def swapped(directory):
    a, b = directory / SHARD, directory / "tensor-00-of-02.safetensors"
    a.rename(directory / "c")
    b.rename(a)
    (directory / "c").rename(b)


def other_header(directory):
    raw = (directory / SHARD).read_bytes()
    (directory / SHARD).write_bytes(raw.replace(b'"norm"', b'"nurm"'))


def broken_header(directory):
    raw = (directory / SHARD).read_bytes()
    (directory / SHARD).write_bytes(raw.replace(b'"norm"', b"'norm'"))


def replica_differs(directory):
    """Write a replica that differs already when it is written, so that its checksum is right."""
    manifest = Manifest.load(directory)
    (directory / SHARD).unlink()
    writer = TensorWriter(directory / SHARD, {"up": ("F32", (4, 4)), "norm": ("F32", (4,))})
    writer.write("up", Box.whole((4, 4)), UP[4:])
    writer.write("norm", Box.whole((4,)), NORM + 1)
    crc = writer.close().crc
    other = StoredFile(name=SHARD, size=manifest.files[1].size, crc32=crc)
    manifest = manifest.model_copy(update={"files": (manifest.files[0], other)})
    (directory / MANIFEST).write_bytes(manifest.to_bytes())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(flipped_weight, f"{SHARD}: CRC-32", id="G8-bit-flip"),
        pytest.param(flipped_tokenizer, "tokenizer.json: CRC-32", id="G8-bit-flip-in-companion"),
        pytest.param(swapped, "CRC-32", id="G9-shards-swapped"),
        pytest.param(other_header, f"{SHARD}: 'norm'", id="G8-header-of-another-tensor"),
        pytest.param(broken_header, f"{SHARD}: header", id="G8-header-damaged"),
        pytest.param(replica_differs, "'norm'.*equal replicas", id="G12-replica-differs"),
    ],
)
def test_damage_that_only_the_bytes_show(checkpoint, spoil, says):
    spoil(checkpoint)
    manifest = Manifest.load(checkpoint)
    with pytest.raises(BadCheckpoint, match=says) as caught:
        verify(checkpoint, manifest)
    assert caught.value.exit_code == 4


def test_verify_reads_every_byte_once(checkpoint):
    manifest, read = Manifest.load(checkpoint), list[int]()
    verify(checkpoint, manifest, threads=1, progress=read.append)
    assert sum(read) == sum(file.size for file in manifest.files)


def test_G4_an_older_complete_checkpoint_is_used_and_both_are_named(tmp_path):
    for step in (3, 10, 20):
        write_checkpoint(step_directory(tmp_path, step))
    assert latest_checkpoint(tmp_path).directory == step_directory(tmp_path, 20)
    no_shard(step_directory(tmp_path, 20))
    (step_directory(tmp_path, 10) / MANIFEST).unlink()
    found = latest_checkpoint(tmp_path)
    assert found.directory == step_directory(tmp_path, 3)
    assert "step-00000020" in found.warnings[0] and "step-00000003" in found.warnings[0]
    assert "step-00000010" in found.warnings[1]


def test_G26_the_newest_is_the_highest_step_whatever_the_clock_said(tmp_path):
    for step in (9, 10, 100):
        write_checkpoint(step_directory(tmp_path, step))
        os.utime(step_directory(tmp_path, step), (1e9 - step, 1e9 - step))
    assert latest_checkpoint(tmp_path).directory.name == "step-00000100"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        pytest.param(None, "no such directory", id="G1-root-missing"),
        pytest.param([], "found none", id="G2-root-empty"),
        pytest.param(
            ["step-00000003.tmp-0123456789abcdef"], "unfinished: step-00000003.tmp-01", id="G3-only-tmp"
        ),
        pytest.param(["step-00000007"], "step-00000007", id="G4-only-incomplete"),
    ],
)
def test_no_complete_checkpoint(tmp_path, names, says):
    root = tmp_path / "run"
    for name in names or []:
        (root / name).mkdir(parents=True)
    if names == []:
        root.mkdir()
    with pytest.raises(BadCheckpoint, match=says) as caught:
        latest_checkpoint(root)
    assert caught.value.exit_code == 4


def llama_405b(tensor=8, pipeline=16, layers=126):
    """Make the manifest of a converted Llama 3.1 405B from its shapes."""
    d, f, v, kv = 16_384, 53_248, 128_256, 1024
    files = tuple(
        StoredFile(name=f"pipeline-{p:02d}.tensor-{t:02d}.safetensors", size=6 << 30, crc32=p * tensor + t)
        for p in range(pipeline)
        for t in range(tensor)
    )
    tensors = {}

    def add(name, stage, shape, dim):
        whole, parts = Box.whole(shape), []
        for t in range(tensor):
            step = 0 if dim is None else shape[dim] // tensor
            box = whole if dim is None else whole.narrow(dim, t * step, t * step + step)
            role = "replica" if dim is None and t else "owner"
            parts.append(Part(file=stage * tensor + t, start=box.start, stop=box.stop, role=role))
        tensors[name] = StoredTensor(dtype="BF16", shape=shape, parts=tuple(parts))

    add("embed.weight", 0, (v, d), 0)
    for layer in range(layers):
        stage = layer * pipeline // layers
        rows = {"q": (d, d), "k": (kv, d), "v": (kv, d), "gate": (f, d), "up": (f, d)}
        for name, shape in rows.items():
            add(f"layers.{layer}.{name}.weight", stage, shape, 0)
        add(f"layers.{layer}.o.weight", stage, (d, d), 1)
        add(f"layers.{layer}.down.weight", stage, (d, f), 1)
        add(f"layers.{layer}.norm1.weight", stage, (d,), None)
        add(f"layers.{layer}.norm2.weight", stage, (d,), None)
    add("norm.weight", pipeline - 1, (d,), None)
    add("head.weight", pipeline - 1, (v, d), 0)
    return Manifest(
        kind="weights",
        model_type="llama",
        config={},
        layout=Layout(tensor=tensor, pipeline=pipeline),
        files=files,
        tensors=tensors,
    )


def test_a_405b_manifest_is_read_and_checked_in_a_moment():
    manifest = llama_405b()
    text = manifest.to_bytes()
    assert len(text) < 2 << 20
    begin = time.process_time()
    again = Manifest.parse(text, "405B")
    again.check("405B")
    parts = [part for tensor in again.tensors.values() for part in tensor.parts if part.file == 5]
    elapsed = time.process_time() - begin
    assert again == manifest and len(parts) == 8 * 9 + 1
    assert elapsed < 1.5, f"{elapsed:.2f} s"
