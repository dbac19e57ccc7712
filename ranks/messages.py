"""Define the messages between parent and worker, and pack them: functions by name, the rest by pickle."""

import contextlib
import importlib.util
import io
import os
import pickle
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

#: The parent's script, in a worker: not ``__main__``, or its main block would run there.
SCRIPT = "__mp_main__"


@dataclass(frozen=True)
class FunctionName:
    """Name a function or class at module level: its module, the file that defines it, its name there."""

    module: str
    file: str
    name: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Self:
        """Name a function; ``ValueError`` for closures, lambdas, bound methods: other processes lack them."""
        advice = "Define it with `def` at the top of a module and pass what it needs as arguments"
        if not isinstance(fn, FunctionType | type):
            raise ValueError(f"{fn!r} is not a plain function or class. {advice}")
        name = fn.__qualname__
        if "<" in name:
            raise ValueError(f"{name} of {fn.__module__} is a lambda or lives in another function. {advice}")
        module = sys.modules.get(fn.__module__)
        file = getattr(module, "__file__", None)
        if module is None or file is None:
            raise ValueError(f"{name}: its module {fn.__module__} has no file to load it from. {advice}")
        named: Any = module
        for part in name.split("."):
            named = getattr(named, part, None)
        if named is not fn:
            raise ValueError(f"{name} of {file} is something else under that name. {advice}")
        return cls(
            SCRIPT if module.__name__ == "__main__" else module.__name__, str(Path(file).resolve()), name
        )

    def load(self) -> Callable[..., Any]:
        """Return the function in this process. Its file is executed once, under its name in the parent.

        Test modules have no importable name (pytest's importlib mode), so the file is loaded by path. The
        name is the same, so that classes of the file can be pickled in both directions. Modules of packages
        are imported.
        """
        named: Any = _load(self.module, self.file)
        for part in self.name.split("."):
            named = getattr(named, part)
        function: Callable[..., Any] = named
        return function


def _load(name: str, file: str) -> ModuleType:
    main = sys.modules["__main__"]
    module_loaded = main if name == SCRIPT and _file_of(main) == file else sys.modules.get(name)
    if module_loaded is not None and _file_of(module_loaded) == file:
        return module_loaded
    try:
        spec = importlib.util.find_spec(name) if module_loaded is None else None
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and str(Path(spec.origin).resolve()) == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    _load_parents(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_parents(name: str) -> None:
    """Import each package in a dotted name, or add an empty module: pickle imports it before it looks up."""
    for end in (place for place, letter in enumerate(name) if letter == "."):
        try:
            importlib.import_module(name[:end])
        except ImportError:
            sys.modules[name[:end]] = ModuleType(name[:end])


def _file_of(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    return None if file is None else str(Path(file).resolve())


#: A template writes to a rank's life line: first the process id, at the end the exit code.
LIFE = struct.Struct("i")
#: Worker to parent: waiting for a call.
READY = "ready"
#: Parent to worker: all ranks have answered, or one has failed; destroy the process group.
LEAVE = "leave"


@dataclass(frozen=True)
class Setting:
    """Parent to a new worker: the environment, folder and import path to take over, and what kind it is."""

    environment: dict[str, str]
    folder: str
    path: tuple[str, ...]
    fresh: bool

    def apply(self) -> None:
        """Take it over."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        importlib.invalidate_caches()  # files have come into being since the template started
        dist.set_debug_level_from_env()


@dataclass(frozen=True)
class Call:
    """Parent to worker: run this.

    ``arguments`` is packed apart: it may need the function's module to be unpacked. ``port`` is the parent's
    store on 127.0.0.1, ``prefix`` this call's own corner of it. Without ``process_group`` the function starts
    its own, from torchrun's environment variables.
    """

    function: FunctionName
    arguments: bytes
    rank: int
    world: int
    port: int
    prefix: str
    timeout: float
    process_group: bool = True


@dataclass(frozen=True)
class Raised:
    """Worker to parent, in the place of the packed result: what was raised, and when on the monotonic clock,
    which all processes share.
    """

    seconds: float
    summary: str
    traceback: str
    cause: bytes | None


class _Pickler(pickle.Pickler):
    """Plain pickle, which copies tensors into the message: no shared memory that outlives it.

    (``torch.multiprocessing`` would send handles.) A view of a larger tensor is sent as what it shows alone,
    and what a script defines by its file: ``__main__`` is another module there.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and (
            obj.__module__ in ("__main__", SCRIPT) or "<" in obj.__qualname__
        ):
            return FunctionName.load, (FunctionName.of(obj),)
        if isinstance(obj, DTensor):
            raise TypeError(
                "a DTensor belongs to its process group: return to_local() or full_tensor() of it"
            )
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            return NotImplemented
        if _is_plain(obj):
            # One element may have any stride.
            row = obj.detach().contiguous().as_strided((obj.numel(),), (1,))
            numbers = bytearray(row.view(torch.uint8).numpy().data)
            return _plain, (numbers, obj.dtype, obj.shape, obj.requires_grad)
        if _shares(obj):
            alone = obj.detach().clone(memory_format=torch.contiguous_format)
            return alone.requires_grad_(obj.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _is_plain(x: torch.Tensor) -> bool:
    """Return whether the tensor is numbers on the host and nothing else: torch's own way takes 0.1 ms."""
    marked = vars(x) or x.is_quantized or x.is_conj() or x.is_neg()
    return x.device.type == "cpu" and x.numel() > 0 and not marked and (x.is_contiguous() or _shares(x))


def _plain(numbers: bytearray, dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> torch.Tensor:
    """Return the tensor of these numbers, in memory of its own."""
    return torch.frombuffer(numbers, dtype=dtype).clone().view(shape).requires_grad_(requires_grad)


def _shares(x: torch.Tensor) -> bool:
    """Return whether the tensor is a view of more than it shows, or is part of autograd's graph."""
    return not x.is_leaf or x.untyped_storage().nbytes() != x.numel() * x.element_size()


def pack(value: object) -> bytes:
    """Return bytes for another process.

    A view of a larger tensor, or a result of autograd, arrives as a fresh leaf.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return the value that ``pack`` was given. Use it only for bytes from a process that we started."""
    return pickle.loads(data)


def pack_exception(error: BaseException) -> bytes | None:
    """Pack an exception if it can be rebuilt, else return ``None``: its traceback is sent as text anyhow."""
    with contextlib.suppress(Exception):
        data = pack(error)
        unpack(data)
        return data
    return None


def unpack_exception(data: bytes | None) -> BaseException | None:
    """Rebuild the exception that ``pack_exception`` packed; ``None`` if this process cannot."""
    with contextlib.suppress(Exception):
        error = None if data is None else unpack(data)
        return error if isinstance(error, BaseException) else None
    return None
