"""Floor 4: weights on disk: Hugging Face folders and sharded checkpoints.

Offers ``save`` and ``load``, for any model, alone or with its optimizer, in any layout; ``convert``, which
also reshards, and ``verify``; ``Saver``, with which a run saves; and ``Manifest``, the index of a checkpoint.
"""
# mypy: implicit-reexport

from .convert.carry_out import ConversionOptions, carry_out, convert
from .convert.plan import plan_conversion, plan_merge
from .convert.to_dcp import convert_to_dcp
from .described import describe_module
from .diff import Difference, differences
from .find import complete_checkpoints, newest_checkpoint, newest_in, newest_of_run, step_directory
from .hugging_face.folder import HFFolder
from .load import Loaded, check_whole, load, load_source, with_adapter
from .lora import fingerprint, read_adapter, read_converted, read_lora, stored_adapter
from .manifest import Manifest, StoredAdapter
from .manifest_checks import Progress, check_model, check_plain
from .mirror import restore_if_none
from .optimizer_state import begin_moments
from .save import contents_of, save
from .saver import Contents, Saver
from .source import Source, foreign_format, read_source
from .user_module_family import Described
from .verify import verify, verify_files, verifying
