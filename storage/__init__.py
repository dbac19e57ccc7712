"""Floor 2: files on disk, whatever is in them.

Offers ``TensorFile``, which reads slices of a safetensors file, and ``TensorWriter``, which writes one as a
stream. Import by file: folders that appear whole or not at all (``staging.py``), locks, journals, strict
JSON. ``torch_archive/`` reads files of ``torch.save`` and refuses hostile pickles.
"""
# mypy: implicit-reexport

from .files_beside_weights import DECIDE_IDS, VOCABULARIES, companions_in
from .safetensors_reader import TensorFile
from .safetensors_writer import TensorWriter
