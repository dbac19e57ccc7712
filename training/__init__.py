"""Floor 7: the training loop and its parts: optimizer, precision, schedules, steps."""

from .adamw import make_adamw
from .data_parallel import shard_over_data
from .evaluation import Evaluator
from .precision import Precision
from .step import TrainStep
from .trainer import Trainer
from .user_step import ModuleStep, own_samples

__all__ = [
    "Evaluator",
    "ModuleStep",
    "Precision",
    "TrainStep",
    "Trainer",
    "make_adamw",
    "own_samples",
    "shard_over_data",
]
