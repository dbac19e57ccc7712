"""Floor 2: files on disk. Safetensors by the slice, folders that appear whole or not at all, strict JSON."""

from .companions import DECIDE_IDS, VOCABULARIES, companions_in
from .safetensors_reader import TensorFile
from .safetensors_writer import TensorWriter

__all__ = [
    "DECIDE_IDS",
    "TensorFile",
    "TensorWriter",
    "VOCABULARIES",
    "companions_in",
]
