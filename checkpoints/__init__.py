"""Floor 4: Hugging Face folders and sharded checkpoints, read, written, converted and verified."""

from .adapter import check_base, fingerprint, read_adapter, read_converted, read_lora, stored_adapter
from .agree import rank_at_fault, together
from .companions import DECIDE_IDS, VOCABULARIES, companions_in
from .convert import How, carry_out, convert
from .diff import Difference, differences
from .find import complete_checkpoints, latest_checkpoint, step_directory
from .hf_folder import HFFolder
from .loading import check_whole, load_model, load_source, load_weights, read_with_adapter
from .manifest import Manifest, StoredAdapter
from .model import restore_model, save_model
from .module import load_module, module_contents, save_module
from .planning import plan_conversion, plan_merge
from .possible import check_model
from .readable import check_plain
from .saving import Contents, Saver
from .source import Source, read_source
from .tensor_file import TensorFile
from .tensor_writer import TensorWriter
from .training import Progress, begin_moments, load_training, newest_checkpoint
from .verify import verify, verify_files

__all__ = [
    "DECIDE_IDS",
    "VOCABULARIES",
    "check_plain",
    "companions_in",
    "Contents",
    "Difference",
    "HFFolder",
    "How",
    "Manifest",
    "Progress",
    "Saver",
    "Source",
    "StoredAdapter",
    "TensorFile",
    "TensorWriter",
    "begin_moments",
    "carry_out",
    "check_base",
    "check_model",
    "check_whole",
    "complete_checkpoints",
    "convert",
    "differences",
    "fingerprint",
    "latest_checkpoint",
    "load_model",
    "load_module",
    "load_source",
    "load_training",
    "load_weights",
    "module_contents",
    "newest_checkpoint",
    "plan_conversion",
    "plan_merge",
    "rank_at_fault",
    "read_adapter",
    "read_converted",
    "read_lora",
    "read_source",
    "read_with_adapter",
    "restore_model",
    "save_model",
    "save_module",
    "step_directory",
    "stored_adapter",
    "together",
    "verify",
    "verify_files",
]
