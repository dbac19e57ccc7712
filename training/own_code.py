"""Run a Python file that a recipe names, the user's own, and take a class, function or object from it."""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..parallel_state import BadInput, require
from ..storage.small_files import read_text
from ..system import nearest_names, visible
from ..system.user_errors import asked, refused


class OwnCode(NamedTuple):
    """Hold the object that ``name`` (``file.py:object``) stands for, and the SHA-256 of the file."""

    entry: Any
    name: str
    digest: str


#: The files that ran in this process, by path, each with its digest.
_ran: dict[str, tuple[str, ModuleType]] = {}


def own_code(name: str, key: str) -> OwnCode:
    """Return the object of a Python file that ``name`` (``file.py:object``) stands for.

    The file runs once in a process, and again if its bytes have changed. It is imported under its own name,
    unless an installed module has that. The folder that it is in is the last place where its imports look.
    Raises ``BadInput`` about the recipe's ``key`` for no such file, an error in it, and no such object.
    """
    file, _, entry = name.rpartition(":")
    path = Path(file)
    require(path.is_file(), "recipe", key, "a Python file", f"no file {visible(file)}")
    source = read_text(path)
    digest, place = hashlib.sha256(source.encode()).hexdigest(), str(path.resolve())
    if _ran.get(place, ("",))[0] != digest:
        _ran[place] = digest, _run(source, Path(place), key)
    module = _ran[place][1]
    if not hasattr(module, entry):
        public = [name for name in vars(module) if not name.startswith("_")]
        expected, todo = f"a name in {visible(file)}", nearest_names(entry, public, cutoff=0.5)
        raise BadInput("recipe", key, expected=expected, found=entry, todo=todo)
    return OwnCode(getattr(module, entry), name, digest)


def _run(source: str, path: Path, key: str) -> ModuleType:
    """Run a file's text as a module: the text whose digest is known, and no bytecode is written or read."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path)))
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise refused(error, key, expected="a file that can be imported") from error
    return module


def _module_name(path: Path) -> str:
    """Return the file's own name, unless an import of it gives another file; then one that nothing has."""
    name, digest = path.stem, hashlib.sha256(str(path).encode()).hexdigest()[:8]
    if "." not in name:
        with suppress(ValueError):  # of a module without a spec
            spec = importlib.util.find_spec(name)
            if spec is None or (spec.origin and Path(spec.origin).resolve() == path):
                return name
    return f"{name.replace('.', '_')}_{digest}"


def call_own(code: OwnCode, arguments: Mapping[str, Any], key: str, *, within: str, **offered: Any) -> Any:
    """Return ``code.entry(**arguments, **offered)``; of ``offered`` the keywords that it names.

    Raises ``BadInput`` about ``key`` for arguments that do not fit, and about ``within`` for what it raises.
    """
    named = {name: entry for name, entry in offered.items() if names(code.entry, name)}
    check_keywords(code, arguments, key, **named)
    call = ", ".join(f"{name}={entry!r}" for name, entry in arguments.items())
    expected = f"one that can be made with ({call})"[:160]
    return asked(lambda: code.entry(**arguments, **named), within, expected)


def check_keywords(code: OwnCode, arguments: Mapping[str, Any], key: str, *others: Any, **named: Any) -> None:
    """Refuse arguments that a function or class cannot be called with, beside what else it is given."""
    signature = signature_of(code.entry)
    try:
        signature.bind(*others, **arguments, **named)
    except TypeError as error:
        unknown = next((name for name in arguments if not names(code.entry, name)), "")
        keywords = signature.parameters.keys() - {"state"}
        raise BadInput(
            "recipe", key,
            expected=f"the keywords of {code.name.rpartition(':')[2]}{signature}",
            found=unknown or error, todo=nearest_names(unknown, keywords, most=1, cutoff=0.5),
        ) from None  # fmt: skip


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return a signature; of what Python knows none of, one that takes anything."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **named: None)


def names(function: Callable[..., Any], keyword: str) -> bool:
    """Tell whether a function, or a class, takes a keyword of this name."""
    parameters = signature_of(function).parameters
    return keyword in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())
