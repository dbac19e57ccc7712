"""Find the folder that a model's id on the Hugging Face hub stands for; fetch what is not here."""

import re
from pathlib import Path

from ...parallel_state import BadInput

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

#: Weights as safetensors alone, and the small files beside them: never a pickle, never code.
FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]


def from_hub(name: str | Path) -> Path | None:
    """Return the cached snapshot of the hub's model with this id (``org/model``); ``None`` if it is no id.

    Where there is a folder ``org``, a path is meant. Files that the cache lacks are fetched, unless
    ``HF_HUB_OFFLINE`` is set. Raises ``BadInput`` if the model is neither here nor there.
    """
    path = Path(name)
    if path.exists() or not _ID.fullmatch(str(name)) or Path(path.parts[0]).exists():
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), allow_patterns=FILES))
    except (LocalEntryNotFoundError, OSError, HfHubHTTPError, HFValidationError) as error:
        raise BadInput(
            name,
            expected="a folder, or a model in the Hugging Face cache or on the hub",
            found=f"no such folder, and {_reason(error)}",
            todo="Check the name, your access and the network, or download it elsewhere and give its folder",
        ) from error


def _reason(error: Exception) -> str:
    kinds = {
        "LocalEntryNotFoundError": "the model is not in the cache and the hub is not reachable",
        "OfflineModeIsEnabled": "the model is not in the cache and HF_HUB_OFFLINE is set",
        "RepositoryNotFoundError": "the hub has no such model, or not for you",
        "GatedRepoError": "the hub wants you to accept the model's terms first",
    }
    return kinds.get(type(error).__name__, f"{type(error).__name__}: {str(error).splitlines()[0]}")
