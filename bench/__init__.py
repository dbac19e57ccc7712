"""Floor 9: measurements of the user's machine.

Offers ``diagnose``, a check of the machine before a run, and ``measure``, which times training, links, saves
and conversion here and compares each layout with one process.
"""

from .doctor import diagnose
from .finding import Finding
from .row import Row
from .run import Report, measure

__all__ = ["Finding", "Report", "Row", "diagnose", "measure"]
