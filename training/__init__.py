"""Floor 7: the training loop and its parts.

Offers ``run``, which runs a recipe and supervises its ranks, and ``Trainer``, which trains on one rank. For
your own loop it offers the steps, the optimizer, ZeRO (``shard_over_data``), precision, learning rates and
evaluation.
"""

from .adamw import make_adamw
from .evaluation import Evaluator
from .learning_rate import Schedule
from .precision import Precision
from .run_plan import RunPlan, check_run
from .samples import shard_batch
from .step import TrainStep
from .supervised import run
from .trainer import Trainer
from .user_step import ModuleStep
from .zero_on_fsdp import shard_over_data

__all__ = [
    "Evaluator",
    "ModuleStep",
    "Precision",
    "RunPlan",
    "Schedule",
    "TrainStep",
    "Trainer",
    "check_run",
    "make_adamw",
    "run",
    "shard_batch",
    "shard_over_data",
]
