"""Read files of ``torch.save`` without running their pickles: zip entries, pickle records, strided views.

``TorchArchive`` finds the tensors of one archive; ``ViewFile`` reads boxes of these tensors by ``pread``.
``pickle_machine.py`` refuses a pickle that names anything outside a fixed list. Nothing that a pickle names
is imported or called.
"""

from .archive import TorchArchive, archive_at, open_state_dict, tensors_in
from .pickle_records import read_records
from .records import Limits, Name, Record
from .view_file import View, ViewFile
from .zip_entries import ZipEntry, zip_entries

__all__ = [
    "Limits",
    "Name",
    "Record",
    "TorchArchive",
    "View",
    "ViewFile",
    "ZipEntry",
    "archive_at",
    "open_state_dict",
    "read_records",
    "tensors_in",
    "zip_entries",
]
