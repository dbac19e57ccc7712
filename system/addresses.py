"""Tell an address, such as ``s3://bucket/run``, from a path of this machine."""

import re
from pathlib import Path

#: A scheme of two letters or more; a ``Path`` leaves one slash of two, and none where nothing follows.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/.*)?")

#: Folders of this machine that are copies of what lies at an address, and that address, for messages.
_copies: dict[str, str] = {}


def address_of(name: str | Path) -> str | None:
    """Return the address that a name is, with both slashes; ``None`` for a path of this machine.

    Whatever lies here does not matter: a folder ``s3:`` is reached by its absolute path only.
    """
    match = _ADDRESS.fullmatch(str(name))
    if match is None:
        return None
    rest = match[2] or ""
    if rest.startswith("//"):
        return f"{name}"
    return f"{match[1]}:{'///' if match[1] == 'file' else '//'}{rest.lstrip('/')}"


def as_url(name: str | Path) -> str | None:
    """Return the address of a store that is meant, as ``address_of`` does; ``file://`` is none."""
    address = address_of(name)
    return None if address is None or address.startswith("file:") else address


def can_be_read(name: str | Path) -> bool:
    """Return whether a path is here, or the name is an address, where nobody has looked."""
    return as_url(name) is not None or Path(name).exists()


def file_in(folder: str | Path, name: str) -> str:
    """Return the name of a file in a folder, of this machine or at an address, for messages."""
    return str(Path(folder) / name) if as_url(folder) is None else f"{as_url(folder)}/{name}"


def note_copy(folder: Path, address: str) -> None:
    """Let messages about files in ``folder`` name the address that it is a copy of."""
    _copies[str(folder)] = address


def with_addresses(message: str) -> str:
    """Return a message in which each copy of something at an address has the name of the address."""
    for folder, address in _copies.items():
        message = message.replace(folder, address)
    return message
