"""Copy an output of several files to a URL, such as ``s3://bucket/model``, where nothing can be renamed.

A note is written first and removed last. While it is there, the files beside it are those of a copy that has
not ended, or that was killed. The file without which no reader takes the folder is copied after all others.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ..parallel_state import BadInput
from .crc import crc32
from .file_names import ADAPTER_CONFIG, CONFIG, DCP_METADATA, MANIFEST, STEP_NAME
from .remote_folder import RemoteFailed, RemoteFolder
from .strict_json import parse_object

#: The note; no reader of weights fetches a file of this name.
NOTE = "unfinished-export"
#: The file that comes last, in each form of output.
_LAST = (MANIFEST, ADAPTER_CONFIG, CONFIG, DCP_METADATA)
_AGAIN = "Run the same command again: it completes the copy"


def check_free(folder: RemoteFolder) -> None:
    """Refuse a place that has files, unless a killed copy left them, and one among checkpoints."""
    note = _note(folder)
    if note is not None and not unfinished(folder):
        folder.remove(NOTE)  # all that a kill left undone
    names = sorted(folder.sizes())
    if names and (NOTE not in names or (not note and names != [NOTE])):  # no file comes before a whole note
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        todo = "Choose another place or remove them first"
        raise BadInput(folder.url, expected="a place without files", found=f"{names[0]}{more}", todo=todo)
    scheme, _, path = folder.url.partition("://")
    if "/" in path:
        around = RemoteFolder(f"{scheme}://{path.rpartition('/')[0]}")
        inside = around.sizes()
        steps = any(size is None and STEP_NAME.fullmatch(name) for name, size in inside.items())
        if steps or MANIFEST in inside:
            what = "a run's checkpoints" if steps else "a checkpoint"
            todo = "Choose a place outside"
            raise BadInput(folder.url, expected=f"a place outside {what}", found=around.url, todo=todo)


def check_ended(folder: RemoteFolder) -> None:
    """Refuse a place to which a copy has not ended; the error names the process that began it."""
    if said := unfinished(folder):
        raise BadInput(folder.url, expected="a whole folder", found=said, todo=_AGAIN)


def unfinished(folder: RemoteFolder) -> str:
    """Say who began a copy to this place that has not ended; empty if there is none."""
    if (note := _note(folder)) is None:
        return ""
    last = folder.read(note["last"]) if note.get("last") in _LAST else None
    if last is not None and crc32(last) == note.get("crc32"):
        return ""
    who = "".join(f", {key} {note[key]}" for key in ("host", "process", "begun") if key in note)
    return f"an export that has not ended or was killed{who}"


def copy_to(folder: RemoteFolder, output: Path) -> None:
    """Copy the files of ``output`` to the place; what a killed copy left there is removed first.

    If the process is killed, at any point, readers take the place for whole or refuse it. Raises ``BadInput``
    as ``check_free`` does, and ``RemoteFailed``.
    """
    check_free(folder)
    *files, last = sorted(output.iterdir(), key=lambda path: (path.name in _LAST, path.name))
    with last.open("rb") as opened:
        crc = crc32(opened.read())
    there = folder.sizes()
    for name in sorted(there.keys() - {NOTE}, key=lambda name: name not in _LAST):
        folder.remove(name)
    begun = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    who = {"host": socket.gethostname(), "process": os.getpid(), "begun": begun}
    folder.write(NOTE, json.dumps({"last": last.name, "crc32": crc} | who).encode())
    folder.sync()
    for path in files:
        folder.copy(path, path.name)
    there = folder.sizes()
    for path in files:
        if there.get(path.name) != path.stat().st_size:
            expected = f"{path.stat().st_size} bytes"
            raise RemoteFailed(f"{folder.url}/{path.name}: expected {expected}, found {there.get(path.name)}")
    folder.sync()
    folder.copy(last, last.name)
    folder.sync()
    folder.remove(NOTE)


def _note(folder: RemoteFolder) -> dict[str, Any] | None:
    """Return what the note says, nothing if it is cut short; ``None`` if there is no note."""
    if (raw := folder.read(NOTE)) is None:
        return None
    try:
        return parse_object(raw, f"{folder.url}/{NOTE}")
    except BadInput:
        return {}
