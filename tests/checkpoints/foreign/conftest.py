"""Let tests import the helpers beside them: pytest imports each test file alone."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
