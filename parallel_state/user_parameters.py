"""Declare how the parameters of a user's own module are cut, and compute their first values."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..system.errors import BadInput
from .declaration import Cut, Declaration
from .initial_weights import OWN, Initial
from .state import ParallelState, alone_or


def declare(
    module: nn.Module,
    name: str,
    *,
    cut: Cut | None = None,
    partial: tuple[str, ...] = (),
    ends: bool = False,
    initial: Initial = OWN,
    state: ParallelState | None = None,
) -> Declaration:
    """Declare how an existing parameter ``module.<name>`` is cut over the ranks; see ``Declaration``.

    With a ``cut`` the parameter is this rank's equal piece, and the whole shape follows from the layout. Its
    first values are those of the module's ``reset_parameters`` unless ``initial`` is given. Raises
    ``BadInput`` if there is no such parameter or the cut is not even.

    >>> norm = nn.LayerNorm(8)  # each rank normalises its own tokens: its gradients are partial
    >>> declare(norm, "weight", partial=("tensor",)).shape
    (8,)
    """
    parameter = dict(module.named_parameters(recurse=False)).get(name)
    if parameter is None:
        known = [known for known, _ in module.named_parameters(recurse=False)]
        raise BadInput(type(module).__name__, name, expected=f"a parameter among {known}", found="none")
    state = alone_or(state)
    shape = list(parameter.shape)
    if cut is not None:
        shape[cut.dim] *= getattr(state.layout, cut.axis)
    stated = Declaration(tuple(shape), cut=cut, partial=partial, ends=ends, initial=initial)
    stated.check(state.layout, name)
    module.__dict__.setdefault("declared", {})[name] = stated
    return stated


def own_values(
    module: nn.Module, path: str, stated: Mapping[str, Declaration], seed: int
) -> dict[str, Tensor]:
    """Return the whole parameters of ``module`` as ``module.reset_parameters()`` fills them, on the CPU in
    fp32.

    ``stated``: the declarations, by the names that the parameters have in the whole model; ``path`` is the
    module's name there. Raises ``BadInput`` if the module has no ``reset_parameters``, or if that function
    does not change a parameter.
    """
    here = dict(module.named_parameters(recurse=False))
    names = {leaf: f"{path}.{leaf}" if path else leaf for leaf in here}
    reset = getattr(module, "reset_parameters", None)
    todo = "Declare it (declare_parameter, or declare) with an initial, or give its module reset_parameters"
    if not callable(reset):
        leaf = next(parameter for parameter in here if stated[names[parameter]].initial == OWN)
        expected = "an initial, or reset_parameters() of its module"
        raise BadInput("initialize", names[leaf], expected=expected, found="neither", todo=todo)
    whole = {leaf: torch.full(stated[names[leaf]].shape, float("nan"), device="cpu") for leaf in here}
    try:
        for leaf, values in whole.items():
            setattr(module, leaf, nn.Parameter(values))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            reset()
        drawn = {leaf: getattr(module, leaf).detach() for leaf in here}
    finally:
        for leaf, parameter in here.items():
            setattr(module, leaf, parameter)
    for leaf, values in drawn.items():
        if stated[names[leaf]].initial == OWN and bool(values.isnan().any()):
            expected, actual = "every value set by reset_parameters()", "some that are not"
            raise BadInput("initialize", names[leaf], expected=expected, found=actual, todo=todo)
    return drawn
