"""Describe a published size: its parameters, memory and FLOPs, and the dry run to start from."""

from dataclasses import dataclass
from math import gcd

from ..models import Size
from ..simulation.model_flops import TokenFlops, flops_per_token, parameters_of

#: The recipe that the suggested dry run changes: data ranks that share all states (ZeRO 3), GPUs of 80 GB.
RECIPE = "llama-3.1-8b-8gpus"
#: Bytes that weights, gradients and moments may take on a rank, and those of one parameter in float32.
_ROOM, _STATES = 40e9, 16
#: From this many parameters the suggestion cuts each matrix too, over the GPUs of one host.
_LARGE, _HOST = 20e9, 8
_LONGEST = 8192


@dataclass(frozen=True)
class SizeFacts:
    """Hold what a published size costs. ``flops``: of a token in a sequence of ``sequence_length`` tokens."""

    size: Size
    #: Of the parameters, those that one token meets.
    active: int
    sequence_length: int
    flops: TokenFlops
    #: The overrides of the suggested dry run.
    overrides: tuple[str, ...]

    @property
    def weights(self) -> int:
        """Return the bytes of the weights in bfloat16."""
        return 2 * self.size.parameters

    @property
    def dry_run(self) -> str:
        """Return the command that plans a training run from scratch in memory of 80 GB a GPU."""
        return " ".join(["trilith train", RECIPE, *self.overrides, "--dry-run"])


def size_facts(size: Size) -> SizeFacts:
    """Compute the facts of a published size on the meta device, in seconds and without memory."""
    config = size.config
    model = size.family.on_meta(config)
    length = min(_LONGEST, config.max_position_embeddings)
    tensor = gcd(_HOST, *config.tensor_units.values()) if size.parameters > _LARGE else 1
    data = 1
    while _STATES * size.parameters > _ROOM * tensor * data:
        data *= 2
    layout = {"tensor": tensor, "data": data, "zero": 3, "sequence": str(tensor > 1).lower()}
    overrides = [f"model.size={size.name}", *(f"layout.{axis}={number}" for axis, number in layout.items())]
    overrides += [f"data.sequence_length={length}", "memory.checkpointing=full"]
    return SizeFacts(
        size, parameters_of(model).active, length, flops_per_token(model, length), tuple(overrides)
    )
