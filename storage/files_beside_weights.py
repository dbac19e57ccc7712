"""Find and copy the small files beside the weights: tokenizer, generation config, chat template, processor.

They are known by name. Whatever else lies in a folder stays there, so no pickle, no code and no file of the
system that somebody linked to comes into a checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..parallel_state import BadInput, require
from .crc import crc32
from .safe_open import contained, open_regular, read_small
from .strict_json import StoredFile, shown

#: Any of these is enough for a tokenizer.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
#: The files that decide a tokenizer's ids.
DECIDE_IDS = (*VOCABULARIES, "merges.txt", "added_tokens.json")
#: What transformers reads of a tokenizer and of generation, and where a chat template may lie.
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_OTHERS = ("special_tokens_map.json", "vocab.txt")
#: What transformers' processors of images, videos and sound read.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
#: Every file that travels along.
COMPANIONS = tuple(
    sorted({*DECIDE_IDS, *CHAT_TEMPLATES, GENERATION_CONFIG, TOKENIZER_CONFIG, *_OTHERS, *_PROCESSORS})
)
_MOST_BYTES = 512 << 20


def companions_in(folder: Path, *, allow_symlinks: bool = False) -> list[Path]:
    """Find the companions in a folder, by name.

    ``BadInput`` for one that is no regular file, may not be read, is larger than 512 MiB, or is a link that
    leads out of the folder and the Hugging Face cache it belongs to, unless ``allow_symlinks``.
    """
    present = {path.name for path in folder.iterdir()}
    names = [name for name in COMPANIONS if name in present]
    companions = [contained(folder, name, allow_symlinks=allow_symlinks) for name in names]
    for path in companions:
        with open_regular(path) as (_, status):
            if status.st_size > _MOST_BYTES:
                raise BadInput(path, expected=f"at most {_MOST_BYTES:,} bytes", found=f"{status.st_size:,}")
    return companions


@dataclass(frozen=True, slots=True)
class Companion:
    """Hold one file that is copied along with the weights, as it was when it was read."""

    name: str
    data: bytes

    @property
    def stored(self) -> StoredFile:
        """Return the manifest's entry for this file."""
        return StoredFile(name=self.name, size=len(self.data), crc32=crc32(self.data))


def read_companions(paths: Sequence[Path]) -> list[Companion]:
    """Read all of them; ``BadInput`` for a file whose name is not that of a companion."""
    for path in paths:
        expected, todo = f"one of {', '.join(COMPANIONS)}", "No other file goes into a checkpoint"
        require(path.name in COMPANIONS, path, "companions", expected, shown(path.name), todo)
    return [Companion(path.name, read_small(path, _MOST_BYTES)) for path in paths]
