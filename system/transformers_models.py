"""Import transformers without its reading the files of all its models twice."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch


def import_models() -> None:
    """Import ``transformers.models``, which lists what the files in it define by reading all of them.

    ``transformers`` itself has listed the same: a third of a second that each command would wait for.
    """
    if "transformers.models" in sys.modules:
        return
    import transformers
    from transformers.utils import import_utils

    define, folder = import_utils.define_import_structure, Path(transformers.__file__).parent / "models"

    def listed(path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path).parent != folder:
            return define(path, prefix)
        remembered, above = define(folder, prefix="models"), "models."
        return {
            backends: {
                name.removeprefix(above): names for name, names in files.items() if name.startswith(above)
            }
            for backends, files in remembered.items()
        }

    with patch.object(import_utils, "define_import_structure", listed):
        import transformers.models
