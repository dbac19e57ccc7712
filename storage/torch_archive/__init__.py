"""Read files of ``torch.save`` without running what their pickles name: zip entries, records, strided views.

``read_archive`` finds the tensors of one archive; ``ViewFile`` reads boxes of these tensors by ``pread``.
``pickle_records.py`` refuses a pickle that names anything outside a fixed list. Nothing named is called.
"""
# mypy: implicit-reexport

from .archive import nested, open_state_dict, read_archive
from .pickle_records import Maker, Name, OrderedDict, Record, read_records
from .view_file import ViewFile
