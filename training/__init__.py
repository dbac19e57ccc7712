"""Floor 7: the training loop and its parts.

Offers ``run``, which runs a recipe and supervises its ranks, and ``Trainer``, which trains on one rank. For
your own loop it offers the steps, the optimizer, ZeRO (``shard_over_data``), precision and learning rates.
"""

from .callbacks import Callback as Callback
from .learning_rate import Schedule as Schedule
from .loss import Fault as Fault
from .loss import FunctionLoss as FunctionLoss
from .loss import Loss as Loss
from .loss import Sums as Sums
from .loss import Term as Term
from .optimizer import make_adamw as make_adamw
from .precision import Precision as Precision
from .run_plan import RunPlan as RunPlan
from .run_plan import check_run as check_run
from .samples import shard_batch as shard_batch
from .step import Step as Step
from .step_sums import StepResult as StepResult
from .supervised import run as run
from .token_loss import TokenLoss as TokenLoss
from .trainer import Trainer as Trainer
from .update import LossScale as LossScale
from .update import Update as Update
from .zero_on_fsdp import shard_over_data as shard_over_data
