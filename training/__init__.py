"""Floor 7: the training loop and its parts.

Offers ``run``, which runs a recipe and supervises its ranks, and ``Trainer``, which trains on one rank. For
your own loop it offers the steps, the optimizer, ZeRO (``shard_over_data``), precision, learning rates and
evaluation.
"""

from .callbacks import Callback
from .evaluation import Evaluator
from .learning_rate import Schedule
from .loss import Fault, FunctionLoss, Loss, Sums, Term
from .optimizer import make_adamw
from .precision import Precision
from .run_plan import RunPlan, check_run
from .samples import shard_batch
from .step import Step
from .step_sums import StepResult
from .supervised import run
from .token_loss import TokenLoss
from .trainer import Trainer
from .update import LossScale, Update
from .zero_on_fsdp import shard_over_data
