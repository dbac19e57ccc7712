"""The rules of the house, held over every file: floors, packages, private names, readers, pickles, length.

Each rule is a function of some sources, so that it is also shown to catch what it forbids. Rules that any
project may have (no printing, docstrings, imports between test files) are ruff's: see pyproject.toml.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import trilith

ROOT = Path(trilith.__path__[0]).resolve()

FLOORS = {
    "system": 0,
    "parallel_state": 1,
    "ranks": 2,
    "layers": 2,
    "storage": 2,
    "models": 3,
    "data": 3,
    "checkpoints": 4,
    "simulation": 4,
    "pipeline": 4,
    "runs": 5,
    "recipes": 6,
    "generation": 6,
    "training": 7,
    "planner": 8,
    "cluster": 7,
    "testing": 9,
    "machine": 10,
    "cli": 11,
}
#: The most files in one folder: more is a flat drawer. The zoo has one for each family.
MOST_FILES, MOST_FAMILIES = 30, 60

#: Files that may name what torch keeps private, and why.
PRIVATE_TORCH = {
    "parallel_state/engine/autograd_and_compiler.py": "of the one room for it",
    "parallel_state/engine/collectives.py": "the same",
    "parallel_state/engine/measuring.py": "the same",
    "parallel_state/engine/fake_tensors.py": "the same",
    "parallel_state/engine/gathered_weights.py": "the same",
    "parallel_state/engine/fully_sharded.py": "the same",
    "parallel_state/engine/gloo_all_gather.py": "the same",
    "parallel_state/engine/kernels.py": "the same",
    "parallel_state/engine/local_tensors.py": "the same",
    "parallel_state/engine/own_weights.py": "the same",
    "ranks/worker.py": "empties a cache of torch's between calls, which a library never needs",
    "simulation/backend.py": "makes a device of Python, for which torch has no public door",
    "simulation/kernels.py": "calls kernels that torch would call after asking a driver",
    "simulation/recorder.py": "tells operators apart by their private names",
}

#: Files that read or parse by themselves and not through ``storage/small_files.py``, and why.
READERS = {
    "cli/plan_explain.py": "a table of our own, which --help reads without torch",
    "cli/shared/options.py": "a table of our own, which a shell completes from without torch",
    "storage/strict_json.py": "the one parser of JSON",
    "storage/small_files.py": "the one reader, and journals, whose bytes are our own",
    "system/process_info.py": "/proc",
    "system/machine.py": "/proc and /sys",
    "parallel_state/collective_order.py": "a store between ranks, no file",
    "machine/nodes/preflight.py": "a store between ranks, no file",
    "runs/flight_recorder.py": "torch's own texts, no file",
    "runs/rendezvous.py": "a store between ranks, no file",
    "data/text/chat_formats.py": "a text inside a record, no file",
    "cli/quickstart.py": "Python's own sources",
}

#: Files that may load a pickle, and why: of what a user names, only the last loads any, and imports nothing.
UNPICKLERS = {
    "parallel_state/collective_errors.py": "an error of this very process, to see whether it can be sent",
    "ranks/messages.py": "messages between the processes of a test",
    "storage/torch_archive/pickle_records.py": "finds classes of its own alone, and imports nothing",
}
UNPICKLING = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "marshal.loads", "shelve.open"}

#: Names that say nothing, or little, and how often all files together may bind them: most of the former are
#: the ``found`` of an error, the other half of ``expected``.
SAY_NOTHING = {"one", "found", "given", "said", "told", "held", "kept", "some", "every", "more", "theirs"}
SAY_NOTHING |= {"stated", "made", "here", "known", "mine", "wanted", "each"}
SAY_LITTLE = {"item", "result", "value", "data", "tmp", "obj", "thing"}
MOST_SAY_NOTHING, MOST_SAY_LITTLE = 27, 258

#: The most lines of a file. A file holds one idea that its name says: length alone is no reason to cut it.
LIMIT = 300


@cache
def sources():
    """Every Python file of the package, by its path below the root."""
    files = [ROOT / "__init__.py"]
    for room in FLOORS:
        files += sorted((ROOT / room).rglob("*.py"))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


@cache
def nodes_of(text):
    """Return all nodes of a file, parsed and listed once for all rules."""
    return tuple(ast.walk(ast.parse(text)))


@pytest.fixture(autouse=True, scope="module")
def forget_the_files():
    """Give the memory of all trees back: other tests of this process fork it."""
    yield
    nodes_of.cache_clear()
    sources.cache_clear()


def imported(path, text):
    """Line and absolute name of everything that a file imports, wherever in the file."""
    package = ["trilith", *Path(path).parent.parts]
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def upward_imports(files):
    found = []
    for path, text in files.items():
        room = Path(path).parts[0]
        for line, name in imported(path, text):
            parts = name.split(".")
            if parts[0] != "trilith" or len(parts) < 2 or room == "__init__.py":
                continue
            other = parts[1]
            if other not in FLOORS:
                found.append(f"{path}:{line}: imports {name}, which is not in a room")
            elif other != room and FLOORS[other] >= FLOORS[room]:
                found.append(
                    f"{path}:{line}: {room} (floor {FLOORS[room]}) imports {other} ({FLOORS[other]})"
                )
    return found


#: Who may use the test harness: it is for users and tests, so product code that starts ranks uses ``ranks``.
USE_TESTING = ("__init__.py", "testing/", "machine/", "cli/parity.py", "cli/shared/parity.py")


def users_of_testing(files):
    return [
        f"{path}:{line}: imports {name}; ranks are started by trilith.ranks"
        for path, text in files.items()
        for line, name in imported(path, text)
        if name.startswith("trilith.testing") and not path.startswith(USE_TESTING)
    ]


def circles(files):
    """Folders that import each other, directly or around, the folders inside a room counted by themselves.

    A door offers what its room's files have, so it is not counted.
    """
    arrows = {}
    for path, text in files.items():
        if Path(path).name == "__init__.py":
            continue
        here = str(Path(path).parent)
        for _, name in imported(path, text):
            parts = name.split(".")[1:] if name.startswith("trilith.") else []
            whole = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
            there = [str(Path(one).parent) for one in whole if f"{one}.py" in files][:1]
            arrows.setdefault(here, set()).update({*there} - {here})
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


def flat_drawers(files):
    """Folders with too many files to be looked through."""
    counts, most = Counter(str(Path(path).parent) for path in files), {"models": MOST_FAMILIES}
    return [f"{folder}: {n} files" for folder, n in counts.items() if n > most.get(folder, MOST_FILES)]


def absolute_imports(files):
    return [
        f"{path}:{node.lineno}: rooms import each other relatively"
        for path, text in files.items()
        for node in nodes_of(text)
        if "trilith" in named_packages(node)
    ]


def named_packages(node):
    """Return the packages of which a statement imports something by an absolute name."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
    return {name.split(".")[0] for name in names}


def private_torch(files):
    """Private names imported from torch, private attributes of its modules, and what the engine asks for."""
    listed, found = private_names(), []
    for path, text in files.items():
        names = [(line, name) for line, name in imported(path, text) if name.split(".")[0] == "torch"]
        aliases = torch_names(text)
        for node in nodes_of(text):
            if isinstance(node, ast.Attribute):
                if node.attr in listed:
                    names.append((node.lineno, node.attr))
                if (dotted := dotted_name(node)) and dotted.split(".")[0] in aliases:
                    names.append((node.lineno, dotted))
        found += [
            f"{path}:{line}: {name}"
            for line, name in sorted(set(names))
            if path not in PRIVATE_TORCH and any(is_private(part) for part in name.split("."))
        ]
    return found


@cache
def private_names():
    """The private names that files which may name torch's ask objects for, but not those of their own."""
    nodes = [node for path in PRIVATE_TORCH for node in nodes_of(sources()[path])]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    asked = [node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
    return {node.attr for node in asked if dotted_name(node.value) not in ("os", "self")} - own


def names_in_torch():
    """The names that torch's operators, its imported modules, their classes and methods have or ask for."""
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    modules = [vars(module) for name, module in [*sys.modules.items()] if name.partition(".")[0] == "torch"]
    classes = {kind for module in modules for kind in module.values() if issubclass(type(kind), type)}
    bases = {base for kind in classes for base in kind.__mro__}
    codes = [getattr(method, "__code__", None) for base in bases for method in [*vars(base).values()]]
    return names.union(*modules, *map(vars, bases), *(getattr(code, "co_names", ()) for code in codes))


def torch_names(text):
    """The names by which a file knows torch and what it imported from there."""
    imports = [alias for node in nodes_of(text) if "torch" in named_packages(node) for alias in node.names]
    return {alias.asname or alias.name.split(".")[0] for alias in imports}


def dotted_name(node):
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted_name(node.value)):
        return f"{owner}.{node.attr}"
    return None


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def own_readers(files):
    """Calls that read a file whole, or parse JSON or TOML: a pipe would make them wait for ever."""
    reading = {"read_text", "read_bytes"}
    parsing = {("json", "load"), ("json", "loads"), ("tomllib", "load"), ("tomllib", "loads")}
    return [
        f"{path}:{node.lineno}: reads by itself: use storage/small_files.py"
        for path, text in files.items()
        if path not in READERS
        for node in nodes_of(text)
        if isinstance(node, ast.Attribute)
        and (
            node.attr in reading
            or (isinstance(node.value, ast.Name) and (node.value.id, node.attr) in parsing)
        )
    ]


def unpicklers(files):
    """Find what could run a pickle: Python's and torch's readers, by any import, and classes like theirs."""
    found = []
    for path, text in files.items():
        if not re.search("pickle|torch|marshal|shelve|find_class", text):
            continue
        names = [(line, name) for line, name in imported(path, text)]
        for node in nodes_of(text):
            if isinstance(node, ast.Attribute):
                names.append((node.lineno, dotted_name(node) or f"?.{node.attr}"))
            elif isinstance(node, ast.Name | ast.FunctionDef):
                names.append((node.lineno, node.id if isinstance(node, ast.Name) else node.name))
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                plain = isinstance(node.value, ast.Constant) and node.value.value is False
                names += [] if plain else [(node.value.lineno, "find_class")]
        found += [
            f"{path}:{line}: {name} can run a pickle: storage/torch_archive reads it without importing"
            for line, name in sorted(set(names))
            if path not in UNPICKLERS
            and (name in UNPICKLING or name.rpartition(".")[2] in ("find_class", "Unpickler", "_load_global"))
        ]
    return found


def own_numbers(files):
    """Tests of text before ``int``: they pass "²" or thousands of digits, which ``int`` refuses."""
    tests = {"isdigit", "isdecimal", "isnumeric"}
    return [
        f"{path}:{node.lineno}: {node.attr} before int: system.whole_number reads such text"
        for path, text in files.items()
        if path != "system/text.py"
        for node in nodes_of(text)
        if isinstance(node, ast.Attribute) and node.attr in tests
    ]


def endless_caches(files):
    """Caches of the process that keep all that they were ever asked for: whole models, for instance."""
    endless = []
    for path, text in files.items():
        for node in nodes_of(text):
            if isinstance(node, ast.FunctionDef) and (node.args.args or node.args.kwonlyargs):
                decorators = {ast.unparse(one).removeprefix("functools.") for one in node.decorator_list}
                if decorators & {"cache", "lru_cache(None)", "lru_cache(maxsize=None)"}:
                    endless.append(f"{path}:{node.lineno}: {node.name}")
    return endless


def classes_of_the_zoo(files):
    """Imports of a model's class, but for annotations: other rooms ask a model for a fact, not what it is."""
    names, found = {"CausalLM", "Decoder"}, []
    for path, text in files.items():
        if path.startswith("models/") or path == "__init__.py":
            continue
        if not any(name in text for name in names):
            continue
        tests = [node for node in nodes_of(text) if isinstance(node, ast.If)]
        typed = {
            id(node)
            for test in tests
            if "TYPE_CHECKING" in ast.unparse(test.test)
            for statement in test.body
            for node in ast.walk(statement)
        }
        for node in nodes_of(text):
            imports = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            imports |= {node.attr} if isinstance(node, ast.Attribute) else set()
            if id(node) not in typed and (known := imports & names):
                found.append(
                    f"{path}:{node.lineno}: {', '.join(known)} at run time: ask the model for a fact"
                )
    return found


def long_files(files):
    lengths = {path: len(text.splitlines()) for path, text in files.items()}
    return [f"{path}: {n} lines" for path, n in lengths.items() if n > LIMIT]


def bound_names(text):
    """Line and name of each binding by assignment, loop, ``with``, parameter, ``except`` and ``case``."""
    for node in nodes_of(text):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield node.lineno, name


def places_that_bind(files, names):
    return [
        f"{path}:{line}: {name}"
        for path, text in files.items()
        for line, name in sorted(bound_names(text))
        if name in names
    ]


def vague_names(files):
    """Names that make a reader look up what they hold: a loop variable is the singular of its collection."""
    nothing, little = (places_that_bind(files, names) for names in (SAY_NOTHING, SAY_LITTLE))
    found = [f"{len(nothing)} names that say nothing: {nothing}"] * (len(nothing) > MOST_SAY_NOTHING)
    return found + [f"{len(little)} names that say little: {little}"] * (len(little) > MOST_SAY_LITTLE)


#: A number right before the plural of what messages count: "1 ranks".
PLURAL = re.compile(r" (?:GPU|rank|node|step|row|file|sample|document)s\b(?!/)")


def plurals(files):
    """Formatted numbers before a plural, unless they are constants or said otherwise (``or``, ``if``)."""
    return [
        f"{path}:{text.lineno}: use counted() of trilith.system"
        for path, source in files.items()
        for text in nodes_of(source)
        if isinstance(text, ast.JoinedStr)
        for number, words in pairwise(text.values)
        if isinstance(words, ast.Constant) and PLURAL.match(str(words.value))
        if isinstance(number, ast.FormattedValue) and not isinstance(number.value, ast.BoolOp | ast.IfExp)
        if not ast.unparse(number.value).rpartition(".")[2].isupper()
    ]


RULES = [upward_imports, users_of_testing, circles, flat_drawers, absolute_imports, private_torch]
RULES += [classes_of_the_zoo, own_readers, unpicklers, own_numbers, endless_caches, long_files, plurals]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule):
    assert rule(sources()) == []


def test_names_say_what_they_hold():
    scripts = [ROOT / "__main__.py", *sorted((ROOT / "examples").rglob("*.py"))]
    files = sources() | {str(file.relative_to(ROOT)): file.read_text() for file in scripts}
    assert vague_names(files) == []


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (upward_imports, "layers/a.py", "from ..models import zoo"),
        (upward_imports, "layers/a.py", "def f():\n    from ..training.step import g"),
        (upward_imports, "layers/deep/a.py", "from ...cli import main"),
        (users_of_testing, "cli/quickstart.py", "def f():\n    from ..testing import run_fresh"),
        (upward_imports, "checkpoints/a.py", "import trilith.training"),
        (upward_imports, "layers/a.py", "from ..tests import helper"),
        (absolute_imports, "models/a.py", "from trilith.layers import Linear"),
        (absolute_imports, "models/a.py", "import trilith.layers"),
        (private_torch, "layers/a.py", "import torch._dynamo"),
        (private_torch, "layers/a.py", "import torch\ntorch._foreach_add_([], 1)"),
        (private_torch, "layers/a.py", "import torch.distributed as dist\ndist.group._world"),
        (private_torch, "layers/a.py", "from torch.distributed.tensor import DTensor\nDTensor._dispatcher"),
        (private_torch, "layers/a.py", "x = y._local_tensor"),
        (own_numbers, "cli/a.py", "count = int(word) if word.isdigit() else 1"),
        (own_readers, "training/a.py", "path.read_text()"),
        (own_readers, "training/a.py", "import tomllib\ntomllib.load(x)"),
        (unpicklers, "storage/a.py", "import torch\ntorch.load(path, weights_only=True)"),
        (unpicklers, "storage/a.py", "import pickle\nx = pickle.loads(raw)"),
        (unpicklers, "storage/a.py", "from torch import load as read"),
        (unpicklers, "checkpoints/a.py", "def find_class(self, module, name):\n    return None"),
        (unpicklers, "data/a.py", "import numpy as np\nnp.load(path, allow_pickle=True)"),
        (classes_of_the_zoo, "planner/a.py", "from ..models import CausalLM, Family"),
        (classes_of_the_zoo, "planner/a.py", "def f():\n    from ..models.base.decoder import Decoder"),
        (classes_of_the_zoo, "planner/a.py", "from .. import models\nisinstance(x, models.CausalLM)"),
        (
            classes_of_the_zoo,
            "planner/a.py",
            "if TYPE_CHECKING:\n    x = 1\nelse:\n    from ..models import CausalLM",
        ),
        (plurals, "cli/a.py", 'f"{len(ranks):,} ranks wait"'),
        (endless_caches, "models/a.py", "@cache\ndef f(config): ..."),
        (endless_caches, "models/a.py", "@lru_cache(maxsize=None)\ndef f(config): ..."),
        (long_files, "models/a.py", "\n" * (LIMIT + 1)),
        (vague_names, "data/a.py", "first, (found, *_) = pair\n" * (MOST_SAY_NOTHING + 1)),
        (vague_names, "data/a.py", "match x:\n    case [1, *kept]:\n        pass\n" * (MOST_SAY_NOTHING + 1)),
        (vague_names, "data/a.py", "f = lambda value: value\n" * (MOST_SAY_LITTLE + 1)),
    ],
)
def test_the_rule_catches_what_it_forbids(rule, path, text):
    assert len(rule({path: text})) == 1


def test_folders_that_import_each_other_are_found():
    around = {"layers/a.py": "from .deep.b import c", "layers/deep/b.py": "from ..e import f"}
    around["layers/e.py"] = ""
    (circle,) = circles(around)
    assert {*circle.split(" imports ")} == {"layers", "layers/deep"}
    del around["layers/a.py"]
    assert circles(around) == []


def test_a_folder_with_too_many_files_is_found():
    assert len(flat_drawers({f"layers/{number}.py": "" for number in range(MOST_FILES + 1)})) == 1


def test_listed_exceptions_are_still_needed():
    files = sources()
    for path in PRIVATE_TORCH:
        assert private_torch({path.replace("/", "/other_"): files[path]}), f"{path} names nothing private"
    for path in READERS:
        assert own_readers({path.replace("/", "/other_"): files[path]}), f"{path} reads nothing by itself"


def test_the_package_list_is_the_tree():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for room in ROOT.iterdir() if room.name in FLOORS for path in room.rglob("*.py")}
    tree = {".".join(["trilith", *folder.relative_to(ROOT).parts]) for folder in folders}
    assert sorted(listed) == sorted({"trilith", *tree})
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_every_folder_with_a_door_is_a_room():
    doors = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert doors <= FLOORS.keys()


def test_the_root_offers_what_doors_offer():
    for name in trilith.__all__:
        offered = getattr(trilith, name)
        assert any(getattr(door, name, None) is offered for door in doors())
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trilith.nothing
    assert dir(trilith) == trilith.__all__


def doors():
    return [import_module(f"trilith.{room}") for room in FLOORS if room not in ("cli", "runs")]


@pytest.mark.parametrize("room", FLOORS)
def test_a_door_says_on_which_floor_it_is_and_what_it_offers(room):
    text = import_module(f"trilith.{room}").__doc__ or ""
    assert text.startswith(f"Floor {FLOORS[room]}: ") and "\n\nOffers " in text
    door = (ROOT / room / "__init__.py").read_text()  # a strict type checker asks for one of these
    assert room in ("cli", "runs") or re.search(r"__all__ = |import (\w+) as \1\b|# mypy: implicit-re", door)


def test_importing_the_package_imports_no_torch():
    code = "import sys, trilith; assert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_starting_ranks_imports_neither_training_nor_checkpoints():
    code = "import sys; from trilith.testing import run_parallel; print(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    rooms = {name.split(".")[1] for name in told.split() if name.startswith("trilith.")}
    assert {"ranks", "testing"} <= rooms <= {"parallel_state", "ranks", "system", "testing"}


def test_the_house_is_imported_once():
    """pytest also loads the root ``__init__``, under the checkout's name: it must bring nothing with it."""
    rooms = tuple(str(ROOT / room) + "/" for room in FLOORS)
    names = {
        name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(rooms)
    }
    assert names
    assert not [name for name in names if not name.startswith("trilith.") and name != "__main__"]
    assert trilith.__file__ == str(ROOT / "__init__.py")


def test_this_torch_has_every_private_name_that_is_used():
    import_module("torch.distributed.fsdp")
    assert len(doors()) > 10 and "_local_tensor" in private_names()
    assert private_names() - names_in_torch() == set()
    assert "_no_such_name" not in names_in_torch()
