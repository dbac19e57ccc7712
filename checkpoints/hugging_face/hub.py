"""Find the folder that a model's id on the Hugging Face hub, or a URL, stands for; fetch what is not here."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from ...parallel_state import BadInput
from ...storage.fetched import fetched
from ...storage.file_names import MANIFEST, STEP_NAME
from ...storage.remote_folder import RemoteFolder
from ...system.addresses import as_url

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

#: Weights as safetensors alone, and the small files beside them: never a pickle, never code.
FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]


def local_folder(name: str | Path) -> Path:
    """Return the folder ``name``, or the cached snapshot of the hub's model with this id (``org/model``), or
    a copy of the folder at a URL that fsspec knows (see ``fetched``).

    A folder of that name comes first, and where there is a folder ``org``, a path is meant. Files that the
    cache lacks are fetched, unless ``HF_HUB_OFFLINE`` is set. A folder of checkpoints at a URL stands for the
    newest one. Raises ``BadInput`` if it is neither here nor there.
    """
    if (url := as_url(name)) is not None:
        return fetched(_newest(url), lambda file: any(fnmatch(file, pattern) for pattern in FILES))
    path = Path(name)
    if path.exists() or not _ID.fullmatch(str(name)) or Path(path.parts[0]).exists():
        return path
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


def _newest(url: str) -> str:
    """Return the URL of the newest checkpoint in a folder of checkpoints; other URLs as they are."""
    folder = RemoteFolder(url)
    steps = [name for name, size in folder.sizes().items() if size is None and STEP_NAME.fullmatch(name)]
    whole = [name for name in steps if MANIFEST in folder.sizes(name)]
    return f"{folder.url}/{max(whole, key=lambda name: int(name.removeprefix('step-')))}" if whole else url


def _reason(error: Exception) -> str:
    kinds = {
        "LocalEntryNotFoundError": "the model is not in the cache and the hub is not reachable",
        "OfflineModeIsEnabled": "the model is not in the cache and HF_HUB_OFFLINE is set",
        "RepositoryNotFoundError": "the hub has no such model, or not for you",
        "GatedRepoError": "the hub wants you to accept the model's terms first",
    }
    return kinds.get(type(error).__name__, f"{type(error).__name__}: {str(error).splitlines()[0]}")
