"""A folder's kind is decided by what only that kind holds: decoys change nothing, two kinds are refused."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.configs import TINY_LLAMA
from trilith.checkpoints import convert, read_source
from trilith.cli.app import run
from trilith.machine.random_files import write_hf_folder
from trilith.parallel_state import BadInput
from trilith.storage.file_names import ADAPTERS, SOURCES, FolderKind, kind_of_folder

#: The files of a folder of each kind; a path that ends in a slash is a folder.
MARKS = {
    FolderKind.MODEL: ["config.json", "model.safetensors"],
    FolderKind.ADAPTER: ["adapter_config.json", "adapter_model.safetensors"],
    FolderKind.CHECKPOINT: ["manifest.json", "rank-00000-of-00001.safetensors"],
    FolderKind.CHECKPOINTS: ["step-00000010/manifest.json"],
    FolderKind.RUN: ["checkpoints/step-00000010/manifest.json", "metrics.jsonl"],
    FolderKind.TOKENS: ["tokens.bin", "tokens.docs.npy", "tokens.json"],
}
#: Names that look like something and say nothing.
DECOYS = [
    *("step-by-step.md", "step-images/", "step-", "step-1e3/", "step-+0000010/"),
    *("step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661/", "Step-00000010/", "step-00000010"),
    *("step-00000010.json", "step-00000010.md/", "step-00000010.tmp-mine/", "step-00000010 "),
    *("checkpoints.md", "checkpoints/notes.txt", "manifest.json.bak", "manifest.jsonl", "journal.jsonl"),
    *("run.lock.txt", "adapter_config.json.orig", "config.json~", "README.md", "tokens.docs", "a.tmp-b/"),
    *("images/step-00000010/", "old/manifest.json", "old/config.json", "tokenizer.json"),
]


def make(folder, names):
    for name in names:
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")


@given(
    kind=st.sampled_from([*MARKS, FolderKind.OTHER]),
    decoys=st.lists(st.sampled_from(DECOYS), unique_by=lambda name: name.split("/")[0], max_size=12),
)
def test_decoys_change_nothing(kind, decoys):
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), MARKS.get(kind, []))
        taken = {path.name for path in Path(name).iterdir()}
        make(Path(name), [one for one in decoys if one.split("/")[0] not in taken])
        assert kind_of_folder(Path(name)) == (Path(name), kind)


@given(
    kinds=st.sets(st.sampled_from([*MARKS][:5]), min_size=2, max_size=3),
    among=st.sampled_from((SOURCES, ADAPTERS)),
)
def test_a_folder_of_two_kinds_is_refused_and_each_can_be_named(kinds, among):
    with tempfile.TemporaryDirectory() as name:
        for kind in kinds:
            make(Path(name), MARKS[kind])
        usable = kinds & {*among}
        if len(usable) < 2:
            assert kind_of_folder(Path(name), among)[1] in usable or not usable
            return
        with pytest.raises(BadInput, match="a folder of one kind") as caught:
            kind_of_folder(Path(name), among)
        for kind in usable:
            assert kind.value in str(caught.value)
            said = next(
                part for part in caught.value.todo.split(": ", 1)[1].split("; ") if kind.value in part
            )
            path = Path(said.removesuffix(f" for {kind.value}"))
            same = {FolderKind.RUN: FolderKind.CHECKPOINTS, FolderKind.CHECKPOINTS: FolderKind.CHECKPOINT}
            assert kind_of_folder(Path(path), among)[1] is same.get(kind, kind)


def test_a_model_s_folder_that_holds_a_run_s_checkpoints_is_read_as_what_is_named(tmp_path, capfd):
    write_hf_folder(both := tmp_path / "both", TINY_LLAMA)
    convert(both, tmp_path / "saved", tensor=2)
    (both / "checkpoints").mkdir()
    (tmp_path / "saved").rename(both / "checkpoints" / "step-00000010")
    assert run(["inspect", str(both)]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and str(both / "config.json") in err and str(both / "checkpoints") in err
    assert read_source(both / "config.json").manifest is None
    assert read_source(both / "checkpoints").manifest is not None
