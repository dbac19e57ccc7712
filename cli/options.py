"""Help texts of options that several commands have: their facts live in rooms that take seconds to import."""

from __future__ import annotations

SCHEDULES = "gpipe, 1f1b, interleaved, interleaved-zero-bubble, zbv, dualpipev"
VIRTUAL_STAGES = "stages of a pipeline rank; default: 2, or 1 with gpipe, 1f1b"
FORCE = "replace a file that is not this command's own"
