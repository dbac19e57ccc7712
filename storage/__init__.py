"""Floor 2: files on disk, whatever is in them.

Offers safetensors files read by the slice and written as a stream, and, by file: folders that appear whole or
not at all, locks, journals, and small files read strictly.
"""

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
