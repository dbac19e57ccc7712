"""Floor 7: files that start a recipe on many hosts, to be read and adapted: Slurm, Kubernetes, SkyPilot.

Offers ``Job``, what such a file says, and ``WRITERS``: for each system a function that returns its text.
"""

from .job import Job, job_of
from .writers import WRITERS

__all__ = ["Job", "WRITERS", "job_of"]
