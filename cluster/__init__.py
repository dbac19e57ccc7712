"""Floor 7: files that start a recipe on many hosts, to be read and adapted: Slurm, Kubernetes, SkyPilot.

Offers ``Job``, what such a file says, and ``WRITERS``: for each system a function that returns its text.
``exclude_nodes`` keeps the list of nodes that no job should use.
"""

from .excluded_nodes import EXCLUDED_NODES, exclude_nodes
from .job import Job, job_of
from .writers import WRITERS

__all__ = ["EXCLUDED_NODES", "Job", "WRITERS", "exclude_nodes", "job_of"]
