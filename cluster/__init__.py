"""Floor 7: files that start a recipe on many hosts, to be read and adapted: Slurm, Kubernetes, SkyPilot.

Offers ``Job``, which holds the hosts, ranks and limits of a job, and ``WRITERS``, a function for each system
that returns the text of the file. ``exclude_nodes`` adds to the list of nodes that no job should use.
"""

from .excluded_nodes import EXCLUDED_NODES, exclude_nodes
from .job import Job, job_of
from .writers import WRITERS

__all__ = ["EXCLUDED_NODES", "Job", "WRITERS", "exclude_nodes", "job_of"]
