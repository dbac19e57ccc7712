"""Floor 1: how a model lies on many ranks, and nothing about what it computes.

Offers ``Layout``, the number of ranks along each axis; ``ParallelState``, the layout seen from one rank;
parameters that declare once how they are cut; sums of partial gradients; gradient clipping by the norm of the
whole model; and the errors that users meet.
"""

from ..system.errors import BadCheckpoint as BadCheckpoint
from ..system.errors import BadInput as BadInput
from ..system.errors import MachineFailed as MachineFailed
from ..system.errors import PeerFailed as PeerFailed
from ..system.errors import from_os_error as from_os_error
from ..system.errors import from_validation as from_validation
from ..system.errors import nearest as nearest
from ..system.errors import nearest_divisors as nearest_divisors
from ..system.errors import nearest_multiples as nearest_multiples
from .collective_errors import rank_at_fault as rank_at_fault
from .collective_errors import together as together
from .collective_order import CollectiveOrder as CollectiveOrder
from .data_types import dtype_name as dtype_name
from .data_types import dtype_named as dtype_named
from .declaration import BUFFER_DTYPE as BUFFER_DTYPE
from .declaration import Cut as Cut
from .declaration import Declaration as Declaration
from .declaration import buffer_names as buffer_names
from .declaration import declarations as declarations
from .declaration import padded_rows as padded_rows
from .fault_injection import fault as fault
from .foreign import check_state as check_state
from .foreign import mark_shared as mark_shared
from .foreign import refuse_foreign as refuse_foreign
from .gradient_clipping import GradientClipping as GradientClipping
from .gradient_clipping import clip_gradients as clip_gradients
from .gradient_clipping import gradient_norm as gradient_norm
from .gradient_sums import GradientSums as GradientSums
from .gradient_sums import NotTrained as NotTrained
from .gradient_sums import divide_gradients as divide_gradients
from .gradient_sums import finalize_gradients as finalize_gradients
from .gradient_sums import has_gradients as has_gradients
from .gradient_sums import refuse_held_twice as refuse_held_twice
from .gradient_sums import refuse_untrained as refuse_untrained
from .initial_weights import OWN as OWN
from .initial_weights import Constant as Constant
from .initial_weights import Initial as Initial
from .initial_weights import LogUniform as LogUniform
from .initial_weights import Normal as Normal
from .initial_weights import Own as Own
from .initial_weights import Uniform as Uniform
from .initial_weights import seed_of as seed_of
from .launchers import Launched as Launched
from .launchers import launched as launched
from .layout import AXES as AXES
from .layout import Coordinates as Coordinates
from .layout import Layout as Layout
from .layout import refuse_layout as refuse_layout
from .local_work import check_local_ranks as check_local_ranks
from .local_work import check_workers as check_workers
from .parameters import DeclaredModule as DeclaredModule
from .parameters import declare as declare
from .parameters import declare_parameter as declare_parameter
from .parameters import initialize as initialize
from .parameters import local as local
from .parameters import stored_box as stored_box
from .pieces import Box as Box
from .pieces import Piece as Piece
from .pieces import shared_units as shared_units
from .process_groups import BACKENDS as BACKENDS
from .process_groups import FILES_TIMEOUT as FILES_TIMEOUT
from .process_groups import TIMEOUT as TIMEOUT
from .process_groups import abandon_process_group as abandon_process_group
from .process_groups import init_process_group as init_process_group
from .process_groups import own_device as own_device
from .state import ParallelState as ParallelState
from .state import alone_or as alone_or
from .state import state_of as state_of
