"""Other places to copy to and from, and a kill at each operation on the disk or on a store."""

import secrets
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import fsspec
import pytest
import torch.distributed as dist
from trilith.storage import remote_folder
from trilith.storage.disk import Disk
from trilith.storage.file_names import MANIFEST
from trilith.storage.remote_folder import RemoteFolder
from trilith.storage.staging import Staging

sys.path.append(str(Path(__file__).parent / "foreign"))  # pytest imports each test file alone
OPERATIONS = ("create", "write", "sync", "rename", "make_directory", "sync_directory")


class Killed(BaseException):
    """The process ends here: nothing after it happens."""


@contextmanager
def _stopped(owner, names, at, half):
    """End the block at operation number ``at`` of some methods, half done; yield the operations begun."""
    operations = list[str]()

    def counted(name):
        real = getattr(owner, name)

        def call(its, *given):
            operations.append(name)
            if len(operations) != at:
                return real(its, *given)
            half(real, name, its, *given)
            raise Killed

        return call

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        for name in names:
            patch.setattr(owner, name, counted(name))
        yield operations


@pytest.fixture
def killed_at():
    """Return what ends a block at an operation on the disk, with half of a write done, as a kill does."""

    def half(real, name, disk, *given):
        if name == "write":
            real(disk, given[0], given[1][: len(given[1]) // 2], *given[2:])

    def leave(staging):
        staging._lock.release()

    @contextmanager
    def killed(at):
        small = mock.patch.object(remote_folder, "_PIECE", 100)
        kept = mock.patch.multiple(Staging, abandon=leave, leave=leave)
        with small, kept, _stopped(Disk, OPERATIONS, at, half) as operations:
            yield operations

    return killed


@pytest.fixture
def stopped_at():
    """Return what ends a block at an operation on a store, with half of it done."""
    remove = RemoteFolder.remove

    def half(real, name, folder, *given):
        if name == "_put":
            real(folder, given[0], given[1][: len(given[1]) // 2])
        else:
            for inner in [one for one in folder.sizes(*given) if one != MANIFEST][:1]:
                remove(folder, f"{given[0]}/{inner}")

    return lambda at: _stopped(RemoteFolder, ("_put", "remove"), at, half)


@pytest.fixture
def made():
    """A folder with ``hf`` and every other form of the same weights; tests do not write into it."""
    from forms import made_once

    return made_once()


@pytest.fixture(scope="module")
def group_of_one():
    """Start a process group of this process alone: runs then take tenths of a second."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def blocked():
    """Return what lets every call of a function wait in a block; it yields what tells that one has begun, and
    what lets them go on.
    """

    @contextmanager
    def block(owner, name):
        begun, go, real = threading.Event(), threading.Event(), getattr(owner, name)

        def stuck(*given):
            begun.set()
            assert go.wait(60)
            return real(*given)

        with mock.patch.object(owner, name, stuck):
            yield begun, go

    return block


@contextmanager
def _bucket():
    """Serve S3 from this process, with buckets of its own; yield the URL of an empty place."""
    reason = "pip install 'moto[server]' s3fs: no dependency of the tests"
    moto = pytest.importorskip("moto.server", reason=reason)
    pytest.importorskip("s3fs", reason=reason)
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            patch.setenv(name, "us-east-1")
        name = f"bucket-{secrets.token_hex(4)}"  # the server's buckets outlive it in this process
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
        yield f"s3://{name}/place"
        fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


@contextmanager
def _place(kind, folder):
    if kind == "s3":
        with _bucket() as url:
            yield url
        return
    yield str(folder / "place") if kind == "local" else "memory://place"
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


_STORES = ["memory", pytest.param("s3", marks=pytest.mark.slow)]


@pytest.fixture(params=["local", *_STORES])
def place(request, tmp_path):
    """Yield the path or URL of an empty place."""
    with _place(request.param, tmp_path) as found:
        yield found


@pytest.fixture(params=_STORES)
def url(request, tmp_path):
    """Yield the URL of an empty place."""
    with _place(request.param, tmp_path) as found:
        yield found


def _end_use():
    while remote_folder._in_use:
        remote_folder._in_use.popitem()[1].release()


@pytest.fixture
def end_use():
    """Return what lets no copy be in use any more, as if this process had ended."""
    return _end_use


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Give the test a cache of its own, and an empty store in memory."""
    monkeypatch.setenv(remote_folder.CACHE, str(tmp_path / "cache"))
    yield tmp_path / "cache"
    _end_use()
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]
