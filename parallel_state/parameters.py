"""Declare parameters with how they are cut, a user's too, find their local part, and fill a whole model."""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..system.errors import BadInput
from .declaration import Cut, Declaration, declarations
from .engine import is_dtensor, local_data
from .initial_weights import OWN, Initial, Own, fill, seed_of
from .pieces import Box
from .state import ParallelState, alone_or


class DeclaredModule(nn.Module):
    """Hold parameters that are declared, and the state that they are cut for; fill them as torch does."""

    #: The rows of the parameters with which this rank computes; ``None``: all that it holds.
    rows_here: slice | None = None

    def __init__(self, state: ParallelState | None = None) -> None:
        super().__init__()
        self.state = alone_or(state)

    def declare(self, name: str, shape: tuple[int, ...], cut: Cut | None = None, **facts: Any) -> None:
        """Declare and register a parameter of this module; ``facts``: further ones of a ``Declaration``."""
        declare_parameter(self, name, Declaration(shape, cut, **facts), self.state)

    def here(self, name: str = "weight") -> Tensor:
        """Return this rank's rows of a parameter to compute with, see ``local``."""
        parameter = local(getattr(self, name))
        return parameter if self.rows_here is None else parameter[self.rows_here]

    def reset_parameters(self) -> None:
        """Fill this rank's part of the module's own declared parameters again, from torch's global seed,
        which the ranks must set alike; padding becomes zero.

        The bits are the same in every layout. Parameters on the meta device stay as they are. ``initialize``
        fills a model by a seed and by names.
        """
        for leaf, declaration in self.__dict__.get("declared", {}).items():
            parameter, seed = getattr(self, leaf), _global_seed()
            if not parameter.is_meta:
                box = stored_box(parameter, declaration, self.state)
                _fill(local_data(parameter), box, declaration, seed)


def _global_seed() -> int:
    return int(torch.randint(2**62, (), device="cpu"))


def declare_parameter(
    module: nn.Module,
    name: str,
    declaration: Declaration | None,
    state: ParallelState | None,
    *,
    plain: bool = False,
) -> None:
    """Register ``module.<name>``, this rank's part of the declared parameter, and store the declaration; of
    ``None`` a parameter that is ``None``.

    Device and dtype are torch's defaults (``with torch.device("meta")`` builds without memory); a buffer has
    its own dtype and requires no gradient. On a real device the parameter is filled at once from torch's
    global seed: ranks that called ``torch.manual_seed`` alike hold parts of one tensor. ``plain``: no DTensor
    on several tensor ranks either, for code that computes with parameters as they are. Raises ``BadInput`` if
    the layout cannot cut it evenly.
    """
    if declaration is None:
        module.register_parameter(name, None)
        return
    state = alone_or(state)
    declaration.check(state.layout, name)
    box = declaration.box(state.layout, state.at)
    local = torch.empty(box.shape, dtype=declaration.dtype)
    if not local.is_meta:
        _fill(local, box, declaration, _global_seed())
    mesh, shape = state.tensor_mesh, declaration.held_shape(state.layout)
    if declaration.experts and state.layout.expert > 1:  # FSDP wants both meshes of one root
        mesh, shape = state.expert_tensor_mesh, (box.shape[0], *shape[1:])
    if mesh is not None and not plain and not declaration.buffer:  # which FSDP and the optimizer never see
        from torch.distributed.tensor import DTensor, Replicate, Shard  # half a second

        cut = declaration.cut is not None and declaration.cut.axis == "tensor"
        placement = Shard(declaration.cut.dim) if cut and declaration.cut else Replicate()
        whole = torch.empty(shape, device="meta")
        local = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    module.register_parameter(name, nn.Parameter(local, requires_grad=not declaration.buffer))
    module.__dict__.setdefault("declared", {})[name] = declaration


def local(parameter: Tensor) -> Tensor:
    """Return the part of a parameter to compute with; its gradient is this rank's own, not summed."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


def stored_box(parameter: Tensor, declaration: Declaration, state: ParallelState) -> Box:
    """Return the box of the whole tensor that this rank stores, sharded over the data axes or not yet."""
    box = declaration.box(state.layout, state.at)
    if tuple(local_data(parameter).shape) != box.shape:
        box = declaration.shard_box(state.layout, state.at)
    assert tuple(local_data(parameter).shape) == box.shape, (local_data(parameter).shape, box)
    return box


def initialize(
    model: nn.Module, seed: int, *, among: Container[str] | None = None, state: ParallelState | None = None
) -> None:
    """Fill every parameter as a function of ``seed`` and its name only; padding becomes zero.

    Undeclared parameters, such as those of ``torch.nn``'s layers, are filled by their module's
    ``reset_parameters``; ``BadInput`` names a parameter whose module has none. ``among``: fill only the
    parameters of these names. The bits do not depend on the layout, on FSDP, or on the pipeline stage.
    """
    state = alone_or(state)
    declared, modules = declarations(model), dict(model.named_modules())
    drawn: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if among is not None and name not in among:
            continue
        declaration = declared[name]
        box = stored_box(parameter, declaration, state)
        if isinstance(declaration.initial, Own):
            path, _, leaf = name.rpartition(".")
            if path not in drawn:
                drawn[path] = own_values(modules[path], path, declared, seed_of(seed, path))
            own_part, true = _without_padding(local_data(parameter), box, declaration)
            own_part.copy_(drawn[path][leaf][true.slices])
            continue
        _fill(local_data(parameter), box, declaration, seed_of(seed, name))


def _fill(local: Tensor, box: Box, declaration: Declaration, seed: int) -> None:
    local, true = _without_padding(local, box, declaration)
    if true.size:
        fill(local, true, declaration.shape, declaration.initial, seed)


@torch.no_grad()
def _without_padding(local: Tensor, box: Box, declaration: Declaration) -> tuple[Tensor, Box]:
    """Zero the padding; return the rows of ``local`` before it, and their box."""
    true = declaration.true_part(box)
    if true != box:
        local.zero_()
        local = local[: true.shape[0]]
    return local, true


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
        names = [names for names, _ in module.named_parameters(recurse=False)]
        raise BadInput(type(module).__name__, name, expected=f"a parameter among {names}", found="none")
    state = alone_or(state)
    shape = list(parameter.shape)
    if cut is not None:
        shape[cut.dim] *= getattr(state.layout, cut.axis)
    declaration = Declaration(tuple(shape), cut=cut, partial=partial, ends=ends, initial=initial)
    declaration.check(state.layout, name)
    module.__dict__.setdefault("declared", {})[name] = declaration
    return declaration


def own_values(
    module: nn.Module, path: str, declared: Mapping[str, Declaration], seed: int
) -> dict[str, Tensor]:
    """Return the whole parameters of ``module`` that its ``reset_parameters()`` makes, on the CPU in fp32.

    ``declared``: the declarations, by the names that the parameters have in the whole model; ``path`` is the
    module's name there. Raises ``BadInput`` if the module has no ``reset_parameters``, or if that function
    does not change a parameter.
    """
    parameters = dict(module.named_parameters(recurse=False))
    names = {leaf: f"{path}.{leaf}" if path else leaf for leaf in parameters}
    # A weight that another module has too may be declared by the name that it has there.
    shapes = {leaf: declared.get(names[leaf], parameter).shape for leaf, parameter in parameters.items()}
    own = [leaf for leaf in parameters if names[leaf] in declared and declared[names[leaf]].initial == OWN]
    reset = getattr(module, "reset_parameters", None)
    todo = "Declare it (declare_parameter, or declare) with an initial, give its module reset_parameters, or "
    todo += "begin with weights (model.init_from in a recipe)"
    # The one of declared modules fills by initial values alone.
    if not callable(reset) or getattr(reset, "__func__", None) is DeclaredModule.reset_parameters:
        expected = "an initial, or reset_parameters() of its module"
        raise BadInput("initialize", names[own[0]], expected=expected, found="neither", todo=todo)
    whole = {leaf: torch.full(shape, float("nan"), device="cpu") for leaf, shape in shapes.items()}
    try:
        for leaf, values in whole.items():
            setattr(module, leaf, nn.Parameter(values))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            reset()
        drawn = {leaf: getattr(module, leaf).detach() for leaf in parameters}
    finally:
        for leaf, parameter in parameters.items():
            setattr(module, leaf, parameter)
    for leaf in own:
        if bool(drawn[leaf].isnan().any()):
            expected, actual = "every value set by reset_parameters()", "some that are not"
            raise BadInput("initialize", names[leaf], expected=expected, found=actual, todo=todo)
    return drawn
