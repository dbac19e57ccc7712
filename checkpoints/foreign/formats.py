"""List the formats of other projects that are read, and tell which of them a path holds."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ...parallel_state import BadInput
from ...storage.catalog import Catalog, in_one_file
from ...storage.file_names import ADAPTERS, SOURCES, FolderKind, kinds_of, named_tokens
from ...storage.output_places import why_absent
from ...storage.torch_archive import open_state_dict
from . import dcp, megatron_dist, megatron_legacy, meta
from .checkpoint import ForeignCheckpoint

#: No run has more steps: up to here JSON and a float hold a whole number exactly.
MOST_STEPS = 2**53
#: What a source of weights is, and what to do with a token file in its place.
EXPECTED = "a Hugging Face folder or a checkpoint"
OF_TOKENS = "Name the run or the model that the tokens are for; `trilith verify {}` reads them"
_TORCH_SAVE, _ENDINGS = "a file of torch.save", (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class Format:
    """Hold a format: its name for the user, how it is recognised, and its reader (headers only).

    ``recognise`` looks at names of files, and at small files where names do not decide. A checkpoint that the
    reader cannot read is still recognised, so that the reader can say what to do.
    """

    name: str
    recognise: Callable[[Path], bool]
    reader: Callable[[Path], ForeignCheckpoint]

    def read(self, path: Path) -> ForeignCheckpoint:
        """Read the headers; ``BadInput`` for what cannot be read, and for counts that count nothing."""
        checkpoint = self.reader(path)
        counts = {"step": checkpoint.step, "optimizer's step": checkpoint.updates}
        for name, count in (counts | checkpoint.updates_of).items():
            if count is not None and not 0 <= count <= MOST_STEPS:
                raise BadInput(path, name, expected=f"from 0 to {MOST_STEPS:,}", found=f"{count:.3g}")
        return checkpoint


def _read_torch_save(path: Path) -> ForeignCheckpoint:
    """Read the headers of one file in which ``torch.save`` wrote a model, or a trainer's dict with one."""
    if (name := named_tokens(path)) is not None:
        raise BadInput(path, expected="weights", found="a token file", todo=OF_TOKENS.format(name))
    file = open_state_dict(path)
    tensors = Catalog({name: in_one_file(file, name) for name in file.tensors})
    return ForeignCheckpoint(path, _TORCH_SAVE, tensors)


def _is_gguf(path: Path) -> bool:
    names = [child.name for child in path.iterdir()] if path.is_dir() else [path.name]
    return any(name.endswith(".gguf") for name in names)


def _refuse_gguf(path: Path) -> ForeignCheckpoint:
    todo = "Take the safetensors that it was made of: GGUF files are quantised, under llama.cpp's names"
    raise BadInput(path, expected="weights to train or to cut", found="GGUF", todo=todo)


#: In this order: a format whose folder holds files of a later one comes before it.
FORMATS: tuple[Format, ...] = (
    *(Format(form.FORM, form.recognise, form.read) for form in (megatron_dist, megatron_legacy, dcp, meta)),
    Format(_TORCH_SAVE, lambda path: path.is_file() and path.name.endswith(_ENDINGS), _read_torch_save),
    Format("GGUF", _is_gguf, _refuse_gguf),
)


#: How DeepSpeed names the files of its ranks.
_OF_DEEPSPEED = re.compile(r"(zero|bf16_zero|mp)_.*_(model|optim)_states\.pt")


def refuse_absent(path: Path) -> NoReturn:
    """Refuse a path where nothing is, unless it is the name of a token file, or a killed command's output."""
    actual, todo = why_absent(path)
    if (name := named_tokens(path)) is not None:
        actual, todo = "a token file", OF_TOKENS.format(name)
    raise BadInput(path, expected=EXPECTED, found=actual, todo=todo)


def refuse_unknown(path: Path, *, of_others: bool) -> None:
    """Refuse a path of no kind and no format, as far as one can tell what it is, with what to name instead.

    Without ``of_others`` a folder may yet become Hugging Face's, if its config.json is copied there.
    """
    if path.is_file():
        todo = f"Name its folder, {path.parent}, which needs the config.json"
        if path.suffix == ".nemo":
            todo = f"Unpack it (`tar -xf {path}`), and name the model_weights in it"
        elif path.suffix != ".safetensors":
            todo = "Name the folder of a model or a checkpoint"
        raise BadInput(path, expected=EXPECTED, found="a file", todo=todo)
    if FolderKind.TOKENS in kinds_of(path):
        todo = OF_TOKENS.format(named_tokens(path))
        raise BadInput(path, expected=EXPECTED, found=FolderKind.TOKENS.value, todo=todo)
    # By numbers, so that checkpoint-10 comes behind checkpoint-9.
    children = sorted(
        path.iterdir(), key=lambda child: ([*map(int, re.findall(r"\d+", child.name))], child.name)
    )
    parameters = path if path.name == "zero" else path / "zero"
    if any(file.name == "fp32.pt" for folder in _entries(parameters) for file in _entries(folder)):
        todo = "zero_to_fp32.py beside the checkpoint that it was made of writes weights: convert those"
        raise BadInput(path, expected=EXPECTED, found="a universal checkpoint of DeepSpeed's", todo=todo)
    if any(_OF_DEEPSPEED.fullmatch(file.name) for folder in (path, *children) for file in _entries(folder)):
        todo = "DeepSpeed's zero_to_fp32.py in that folder writes its weights: convert what it writes"
        raise BadInput(path, expected=EXPECTED, found="a checkpoint of DeepSpeed's", todo=todo)
    for child in reversed(children):
        of_known_kind = child.is_dir() and {*kinds_of(child)} & {*SOURCES, *ADAPTERS}
        if of_known_kind or (child.is_dir() and format_of(child) is not None):
            raise BadInput(path, expected=EXPECTED, found="a folder around one", todo=f"Name {child}")
    if of_others:
        todo = f"These are read: {', '.join(form.name for form in FORMATS[:-1])}"
        raise BadInput(path, expected="a checkpoint of another project", found="no known format", todo=todo)


def _entries(folder: Path) -> list[Path]:
    return [*folder.iterdir()] if folder.is_dir() else []


def format_of(path: Path) -> Format | None:
    """Return the format of a folder or file, or ``None`` if it is of none."""
    return next((form for form in FORMATS if form.recognise(path)), None)
