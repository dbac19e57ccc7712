"""A kill at each operation on the local disk, for tests of what is copied from another place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
from trilith.storage import remote_folder
from trilith.storage.disk import Disk
from trilith.storage.staging import Staging

OPERATIONS = ("create", "write", "sync", "rename", "make_directory")


class Killed(BaseException):
    """The process ends here: nothing after it happens."""


def _let_go(staging: Staging) -> None:
    """Leave everything as it is, as a kill does."""
    staging._lock.release()


@contextmanager
def _killed_at(at: int) -> Iterator[list[str]]:
    """End the block at its operation number ``at``; yield the names of the operations that it began.

    Of a write that is killed, half has arrived. A block with fewer operations runs to its end.
    """
    operations = list[str]()
    real = {name: getattr(Disk, name) for name in OPERATIONS}

    def counted(name: str) -> Any:
        def call(disk: Disk, *given: Any) -> Any:
            operations.append(name)
            if len(operations) != at:
                return real[name](disk, *given)
            if name == "write":
                real[name](disk, given[0], given[1][: len(given[1]) // 2], *given[2:])
            raise Killed

        return call

    with (
        mock.patch.object(remote_folder, "_PIECE", 100),
        mock.patch.multiple(Staging, abandon=_let_go, leave=_let_go),
        pytest.MonkeyPatch.context() as patch,
        suppress(Killed),
    ):
        for name in OPERATIONS:
            patch.setattr(Disk, name, counted(name))
        yield operations


@pytest.fixture
def killed_at() -> Callable[[int], AbstractContextManager[list[str]]]:
    return _killed_at
