"""List the formats of other projects that are read, and tell which of them a path holds."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...parallel_state import BadInput
from ...storage.catalog import Catalog, in_one_file
from ...storage.torch_archive import open_state_dict
from . import dcp, megatron_dist, megatron_legacy, meta
from .checkpoint import ForeignCheckpoint

#: No run has more steps: up to here JSON and a float hold a whole number exactly.
MOST_STEPS = 2**53
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
        for name, count in (("step", checkpoint.step), ("optimizer's step", checkpoint.updates)):
            if count is not None and not 0 <= count <= MOST_STEPS:
                raise BadInput(path, name, expected=f"from 0 to {MOST_STEPS:,}", found=f"{count:.3g}")
        return checkpoint


def _read_torch_save(path: Path) -> ForeignCheckpoint:
    """Read the headers of one file in which ``torch.save`` wrote a model, or a trainer's dict with one."""
    if path.with_name(f"{path.name.removesuffix('.bin')}.docs.npy").exists():
        todo = "Name the run or the model that the tokens are for"
        raise BadInput(path, expected="weights", found="a token file", todo=todo)
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


def format_of(path: Path) -> Format | None:
    """Return the format of a folder or file, or ``None`` if it is of none."""
    return next((form for form in FORMATS if form.recognise(path)), None)
