"""Floor 1: how a model lies on many ranks, and nothing about what it computes.

Offers ``Layout``, the number of ranks along each axis; ``ParallelState``, the layout seen from one rank;
parameters that declare once how they are cut; sums of partial gradients; gradient clipping by the norm of the
whole model; and the errors that users meet.
"""
# mypy: implicit-reexport

from ..system.errors import (
    BadCheckpoint,
    BadInput,
    MachineFailed,
    PeerFailed,
    from_os_error,
    from_validation,
    nearest,
    nearest_divisors,
    nearest_multiples,
    require,
)
from .collective_errors import rank_at_fault, together
from .collective_order import CollectiveOrder
from .data_types import dtype_name, dtype_named
from .declaration import BUFFER_DTYPE, Cut, Declaration, buffer_names, declarations, padded_rows
from .fault_injection import fault
from .foreign import check_state, mark_shared, refuse_foreign, refuse_hooks, refuse_replaced
from .gradient_clipping import GradientClipping, clip_gradients, gradient_norm
from .gradient_sums import (
    GradientSums,
    NotTrained,
    divide_gradients,
    finalize_gradients,
    has_gradients,
    refuse_held_twice,
    refuse_untrained,
)
from .initial_weights import OWN, Constant, Initial, LogUniform, Normal, Own, Uniform, seed_of
from .launchers import Launched, launched
from .layout import AXES, Coordinates, Layout, refuse_layout
from .parameters import DeclaredModule, declare, declare_parameter, initialize, local, stored_box
from .pieces import Box, Piece, shared_units
from .process_groups import (
    BACKENDS,
    FILES_TIMEOUT,
    TIMEOUT,
    abandon_process_group,
    init_process_group,
    own_device,
)
from .state import ParallelState, alone_or, state_of
