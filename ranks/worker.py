"""Run calls as a rank of the pool, until the parent is gone."""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .messages import Call, Leave, Raised, Ready, Returned
from .pickling import pack, pack_exception, unpack
from .reset import forget, forget_groups

#: The number of modules when a call last left new ones behind.
_imported = 0


def main(parent: Connection) -> NoReturn:
    """Serve the parent."""
    # With this signal the parent asks a silent rank where it is; it answers on stderr, even from inside C++.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    faulthandler.enable()  # and where it was when a signal of the system's ended it
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(parent, inbox), daemon=True).start()
    torch.set_num_threads(1)
    while True:
        parent.send_bytes(pack(Ready()))
        call = inbox.get()
        assert isinstance(call, Call), call
        answer = _answer(call)
        parent.send_bytes(pack(answer))
        assert isinstance(inbox.get(), Leave)
        _leave()


def _listen(parent: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    """Hand on what the parent says. Its end of the pipe closes when it dies, by whatever: then so do we."""
    try:
        while True:
            inbox.put(unpack(parent.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)


def _answer(call: Call) -> Returned | Raised:
    try:
        return Returned(pack(_run(call)))
    except BaseException as error:
        seconds = time.monotonic()
        summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        text = "".join(traceback.format_exception(error))
        cause = pack_exception(error)
        return Raised(seconds, summary, text, cause)


def _run(call: Call) -> Any:
    forget()
    enter(call)
    return call.function.load()(*unpack(call.arguments))


def enter(call: Call) -> None:
    """Become the rank that the call names: torchrun's environment, and the process group."""
    place = {
        "RANK": call.rank,
        "LOCAL_RANK": call.rank,
        "WORLD_SIZE": call.world,
        "LOCAL_WORLD_SIZE": call.world,
    }
    # As under torchrun: the store is the launcher's, so that it outlives every rank.
    place |= {"MASTER_PORT": call.port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    if not call.process_group:
        return
    timeout = timedelta(seconds=call.timeout)
    host = dist.TCPStore("127.0.0.1", call.port, is_master=False, wait_for_workers=False, timeout=timeout)
    store = dist.PrefixStore(call.prefix, host)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world, timeout=timeout)
    wait_for_all(store, call.rank, call.world, timeout)


def wait_for_all(store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
    """Return when all ranks have called this. A rank that ended before would close connections on which
    others still wait, and their start would fail.
    """
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{other}" for other in range(world)], timeout)


def _leave() -> None:
    global _imported
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_groups()
    # Models and their groups lie in cycles. Until these are collected, every group keeps threads that wake a
    # hundred times a second; and they are better ended here than somewhere in the next call.
    gc.collect()
    if len(sys.modules) > _imported:
        gc.freeze()  # what has been imported stays, and no later collection need walk it
        _imported = len(sys.modules)
