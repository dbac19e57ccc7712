"""Be a rank: run the calls of the pool until the parent is gone, or the one call of ``run_fresh``.

Or import torch once and fork ranks: an import takes seconds, a fork milliseconds. ``start`` is the command of
such a template. It has one thread, so that a fork is whole.
"""

import faulthandler
import gc
import importlib
import os
import queue
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import _collective_utils, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ..system import format_warning, search_garbage_rarely
from ..system.process_end import end
from .messages import LEAVE, LIFE, READY, Call, Raised, Setting, pack, pack_exception, unpack

#: The number of modules when a call last left new ones behind.
_imported = 0


def serve(parent: Connection) -> NoReturn:
    """Run the calls that the parent sends."""
    inbox = begin(parent)
    while True:
        parent.send_bytes(pack(READY))
        call = inbox.get()
        parent.send_bytes(pack(_answer(call)))
        assert inbox.get() == LEAVE
        _leave()


def run_one(parent: Connection) -> int:
    """Run the one function that the parent sends, and give the code to exit with.

    The interpreter then ends as any script's does, threads, process group and all: tests look at just that.
    """
    inbox = begin(parent)
    parent.send_bytes(pack(READY))
    np.random.seed()  # forks share numpy's state, launched processes do not
    call = inbox.get()
    try:
        run(call)
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
        return code if isinstance(code, int) else 1
    return 0


def begin(parent: Connection) -> queue.SimpleQueue[Any]:
    """Prepare a process for calls; what the parent says arrives in the queue."""
    # With this signal the parent asks a silent rank where it is; it answers on stderr, even from inside C++.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    faulthandler.enable()  # and where it was when a signal of the system's ended it
    torch.set_num_threads(1)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(parent, inbox), daemon=True).start()
    return inbox


def _listen(parent: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    """Hand on what the parent says; end when it does, with what we started, such as a compiler."""
    try:
        while True:
            inbox.put(unpack(parent.recv_bytes()))
    except (EOFError, OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)


def _answer(call: Call) -> bytes | Raised:
    try:
        _forget()
        return pack(run(call))
    except BaseException as error:
        seconds = time.monotonic()
        summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        return Raised(seconds, summary, "".join(traceback.format_exception(error)), pack_exception(error))


def run(call: Call) -> Any:
    """Call the function as the rank that the call names."""
    assert isinstance(call, Call), call
    _enter(call)
    return call.function.load()(*unpack(call.arguments))


def _enter(call: Call) -> None:
    """Become the rank that the call names: torchrun's environment, and the process group."""
    rank, world = str(call.rank), str(call.world)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    # As under torchrun: the store is the launcher's, so that it outlives every rank.
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(call.port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    if not call.process_group:
        return
    timeout = timedelta(seconds=call.timeout)
    host = dist.TCPStore("127.0.0.1", call.port, is_master=False, wait_for_workers=False, timeout=timeout)
    store = dist.PrefixStore(call.prefix, host)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world, timeout=timeout)
    wait_for_all(store, call.rank, call.world, timeout)


def wait_for_all(store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
    """Wait for all ranks: one that ended before would close connections on which others still wait."""
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{other}" for other in range(world)], timeout)


def _leave() -> None:
    global _imported
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_groups()
    # Models and their groups lie in cycles. Until these are collected, every group keeps threads that wake a
    # hundred times a second; and they are better ended here than somewhere in the next call.
    gc.collect()
    if len(sys.modules) > _imported:
        gc.freeze()  # what has been imported stays, and no later collection need walk it
        _imported = len(sys.modules)


def _forget_groups() -> None:
    """Empty the caches that hold meshes, and so process groups: DTensor's, and compiled code.

    They take a later, equal mesh for the one that they know; that one's groups have been destroyed, and their
    names may since mean other ranks. Until they are let go, the threads of these groups go on.
    """
    _clear_sharding_prop_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    # Not in every version of torch.
    if clear := getattr(_redistribute, "clear_redistribute_planner_cache", None):
        clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _forget() -> None:
    _forget_groups()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def main(fd: int) -> int:
    """Fork ranks until the harness is gone. In a rank: do what the harness sends; the exit code."""
    parent = Connection(fork_ranks(socket.socket(fileno=fd)))
    setting = unpack(parent.recv_bytes())
    assert isinstance(setting, Setting), setting
    setting.apply()
    return run_one(parent) if setting.fresh else serve(parent)


def fork_ranks(requests: socket.socket) -> int:
    """Fork on each request, and report each fork's end. Returns in the forks alone: their end of the pipe."""
    lives: dict[int, int] = {}
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    search_garbage_rarely()  # a search in a fork would copy every page
    while True:
        readable, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _report_ended(lives)
        if requests.fileno() in readable:
            data, fds, _, _ = socket.recv_fds(requests, 1, 3)
            if not data:
                os._exit(0)  # the harness is gone; the ranks notice by their own pipes
            pipe, printed, life = fds
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                # A shell starts what runs in its background with this signal ignored.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                requests.close()
                for fd in (woken, wake, life, *lives.values()):
                    os.close(fd)
                for stream in (1, 2):
                    os.dup2(printed, stream)
                os.close(printed)
                os.setsid()
                return pipe
            os.write(life, LIFE.pack(pid))
            lives[pid] = life
            os.close(pipe)
            os.close(printed)


def _report_ended(lives: dict[int, int]) -> None:
    while lives:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        life = lives.pop(pid)
        with suppress(BrokenPipeError):  # the harness no longer asks
            os.write(life, LIFE.pack(os.waitstatus_to_exitcode(status)))
        os.close(life)


def start() -> NoReturn:
    """Be a template: the arguments of the command line are a descriptor and the modules to import."""
    warnings.formatwarning = format_warning
    # What is imported here no rank need import: pipelining and FSDP import torch's compiler, 1.5 s a rank.
    for name in sys.argv[2:]:
        importlib.import_module(name)
    end(main(int(sys.argv[1])))
