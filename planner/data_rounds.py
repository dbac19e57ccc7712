"""Count how often a step gathers the weights of a group, and sums its gradients, over the data axes."""

from __future__ import annotations

from dataclasses import dataclass

from .step_shape import Work


@dataclass(frozen=True, slots=True)
class DataRounds:
    """State how often a step does each exchange of a group of parameters, such as a block.

    ``forward``, ``backward``: all-gathers of the weights; ``scatters``: reduce-scatters of the gradients;
    ``replicas``: all-reduces of a rank's piece of the gradients over the replicas of the shards.
    """

    forward: int
    backward: int
    scatters: int
    replicas: int

    @property
    def gathers(self) -> int:
        return self.forward + self.backward


def data_rounds(work: Work, *, root: bool) -> DataRounds:
    """Return the counts of a step for a group; ``root``: the group of all parameters that are in no block.

    With ZeRO 3 the root's weights stay whole from forward to backward, except in a pipeline: there a stage
    runs other forwards in between and gathers the root again, unless the loss is computed in chunks. Replicas
    sum once in a step; those of the root, under a pipeline, after each reduce-scatter.
    """
    layout, rounds = work.layout, work.micro_batches
    once, each = int(layout.zero in (1, 2)), rounds * (layout.zero == 3)
    stays = root and (layout.pipeline == 1 or bool(work.loss_chunk))
    scatters = rounds if layout.zero >= 2 else 1
    replicas = scatters if root and layout.pipeline > 1 else 1
    return DataRounds(once or each, 0 if stays else each, scatters, replicas)
