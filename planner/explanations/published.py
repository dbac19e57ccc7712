"""Look up the numbers of a published size that formulas take."""

from dataclasses import dataclass

from ...models import published_size
from ...simulation.model_flops import flops_per_token, parameters_of


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """Hold what formulas take of a model.

    ``active``: the parameters that a token meets, embedding tables among them. ``matrices``: those that it is
    multiplied with. ``attention_width``: query heads times their width, on average over the blocks.
    """

    parameters: int
    active: int
    matrices: float
    layers: int
    hidden: int
    heads: int
    attention_width: float


def numbers_of(name: str, sequence_length: int) -> ModelNumbers:
    """Return the numbers of a published size, such as ``llama-3.1-8b``; ``BadInput`` for an unknown name."""
    size = published_size(name, "--model")
    config = size.config
    model = size.family.on_meta(config)
    flops, layers = flops_per_token(model, sequence_length), config.num_hidden_layers
    return ModelNumbers(
        size.parameters,
        parameters_of(model).active,
        flops.matrices / 2,
        layers,
        config.hidden_size,
        config.num_attention_heads,
        flops.attention / (4 * layers * sequence_length),
    )
