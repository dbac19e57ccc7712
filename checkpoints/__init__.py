"""Floor 4: weights on disk: Hugging Face folders and sharded checkpoints.

Offers ``save`` and ``load``, for any model, alone or with its optimizer, in any layout; ``convert``, which
also reshards, and ``verify``; ``Saver``, with which a run saves; and ``Manifest``, the index of a checkpoint.
"""

from .convert.carry_out import ConversionOptions as ConversionOptions
from .convert.carry_out import carry_out as carry_out
from .convert.carry_out import convert as convert
from .convert.plan import plan_conversion as plan_conversion
from .convert.plan import plan_merge as plan_merge
from .convert.to_dcp import convert_to_dcp as convert_to_dcp
from .described import describe_module as describe_module
from .diff import Difference as Difference
from .diff import differences as differences
from .find import complete_checkpoints as complete_checkpoints
from .find import newest_checkpoint as newest_checkpoint
from .find import newest_in as newest_in
from .find import newest_of_run as newest_of_run
from .find import step_directory as step_directory
from .hugging_face.folder import HFFolder as HFFolder
from .load import Loaded as Loaded
from .load import check_whole as check_whole
from .load import load as load
from .load import load_source as load_source
from .load import with_adapter as with_adapter
from .lora import fingerprint as fingerprint
from .lora import read_adapter as read_adapter
from .lora import read_converted as read_converted
from .lora import read_lora as read_lora
from .lora import stored_adapter as stored_adapter
from .manifest import Manifest as Manifest
from .manifest import StoredAdapter as StoredAdapter
from .manifest_checks import Progress as Progress
from .manifest_checks import check_model as check_model
from .manifest_checks import check_plain as check_plain
from .mirror import restore_if_none as restore_if_none
from .optimizer_state import begin_moments as begin_moments
from .save import contents_of as contents_of
from .save import save as save
from .saver import Contents as Contents
from .saver import Saver as Saver
from .source import Source as Source
from .source import foreign_format as foreign_format
from .source import read_source as read_source
from .user_module_family import Described as Described
from .verify import verify as verify
from .verify import verify_files as verify_files
