"""Floor 10: measurements of the user's machine.

Offers ``diagnose``, a check of the machine before a run, ``preflight``, a comparison of a job's nodes, and
``measure``, which times training, links, saves and conversion and compares each layout with one process.
"""

from .doctor.checks import diagnose
from .facts import Finding
from .measure.run import Report, Row, measure
from .nodes.judge import Preflight
from .nodes.preflight import preflight

__all__ = ["Finding", "Preflight", "Report", "Row", "diagnose", "measure", "preflight"]
