"""Floor 4: Hugging Face folders and sharded checkpoints, read, written, converted and verified."""

from .agree import rank_at_fault, together
from .convert import How, carry_out, convert, plan_conversion
from .diff import Difference, differences
from .find import complete_checkpoints, latest_checkpoint, step_directory
from .hf_folder import HFFolder
from .loading import load_model, load_weights
from .manifest import Manifest
from .saving import Contents, Saver
from .source import Source, read_source
from .tensor_file import TensorFile
from .tensor_writer import TensorWriter
from .training import Progress, load_training, newest_checkpoint
from .verify import verify

__all__ = [
    "Contents",
    "Difference",
    "HFFolder",
    "How",
    "Manifest",
    "Progress",
    "Saver",
    "Source",
    "TensorFile",
    "TensorWriter",
    "carry_out",
    "complete_checkpoints",
    "convert",
    "differences",
    "latest_checkpoint",
    "load_model",
    "load_training",
    "load_weights",
    "newest_checkpoint",
    "plan_conversion",
    "rank_at_fault",
    "read_source",
    "step_directory",
    "together",
    "verify",
]
