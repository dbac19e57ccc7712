"""Floor 7: files that start a recipe on many hosts, to be read and adapted, for Slurm and Kubernetes.

Offers ``job_of``, which returns the ``Job`` of a recipe for one of the ``SYSTEMS``, and ``render``, which
returns the text of its file. ``operand`` makes a path a word of a command.
``exclude_nodes`` adds to the list of nodes that no job should use.
"""

from .job import EXCLUDED_NODES, SYSTEMS, Job, exclude_nodes, job_of, operand
from .render import render

__all__ = ["EXCLUDED_NODES", "Job", "SYSTEMS", "exclude_nodes", "job_of", "operand", "render"]
