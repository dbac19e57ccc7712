"""Floor 4: weights on disk: Hugging Face folders and sharded checkpoints.

Offers ``load_model``, ``save_model`` and ``restore_model`` for a model of the zoo; ``save_module`` and
``load_module`` for any other module; ``convert`` and ``verify``; ``Saver`` and ``load_training``, with which
a training run saves and resumes; and ``Manifest``, the index of a checkpoint.
"""

from .convert.carry_out import ConversionOptions, carry_out, convert
from .convert.request import plan_conversion, plan_merge
from .convert.to_dcp import convert_to_dcp
from .diff import Difference, differences
from .find import complete_checkpoints, latest_checkpoint, step_directory
from .hugging_face.folder import HFFolder
from .load import (
    check_whole,
    load_model,
    load_model_source,
    load_source,
    load_weights,
    read_with_adapter,
)
from .lora import check_base, fingerprint, read_adapter, read_converted, read_lora, stored_adapter
from .manifest import Manifest, StoredAdapter
from .manifest_checks import check_model
from .manifest_rereading import check_plain
from .mirror import restore_if_none
from .model import restore_model, save_model
from .moments import begin_moments
from .resume import Progress, load_training, newest_checkpoint, newest_in
from .save import Contents, Saver
from .source import Source, foreign_format, read_foreign, read_source
from .user_module import load_module, module_contents, save_module
from .verify import verify, verify_files

__all__ = [
    "Contents",
    "Difference",
    "HFFolder",
    "ConversionOptions",
    "Manifest",
    "Progress",
    "Saver",
    "Source",
    "StoredAdapter",
    "begin_moments",
    "carry_out",
    "check_base",
    "check_model",
    "check_plain",
    "check_whole",
    "complete_checkpoints",
    "convert",
    "convert_to_dcp",
    "differences",
    "fingerprint",
    "foreign_format",
    "latest_checkpoint",
    "load_model",
    "load_model_source",
    "load_module",
    "load_source",
    "load_training",
    "load_weights",
    "module_contents",
    "newest_checkpoint",
    "newest_in",
    "plan_conversion",
    "plan_merge",
    "read_adapter",
    "read_converted",
    "read_foreign",
    "read_lora",
    "read_source",
    "read_with_adapter",
    "restore_if_none",
    "restore_model",
    "save_model",
    "save_module",
    "step_directory",
    "stored_adapter",
    "verify",
    "verify_files",
]
