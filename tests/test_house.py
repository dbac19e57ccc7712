"""The rules of the house, held over every file: floors, packages, private names, printing, length.

Each rule is a function of some sources, so that it is also shown to catch what it forbids.
"""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import trilith
from trilith.parallel_state import engine

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
    "pipeline": 4,
    "planner": 5,
    "runs": 5,
    "recipes": 6,
    "generation": 6,
    "training": 7,
    "search": 8,
    "cluster": 7,
    "testing": 8,
    "machine": 9,
    "cli": 10,
}
#: The most files in one folder: more is a flat drawer. The zoo has one for each family.
MOST_FILES, MOST_FAMILIES = 30, 60

#: Files that may name what torch keeps private, and why.
PRIVATE_TORCH = {
    "parallel_state/engine/autograd_and_compiler.py": "of the one room for it",
    "parallel_state/engine/collectives.py": "the same",
    "parallel_state/engine/flight_recorder.py": "the same",
    "parallel_state/engine/fully_sharded.py": "the same",
    "parallel_state/engine/kernels.py": "the same",
    "parallel_state/engine/local_tensors.py": "the same",
    "ranks/reset.py": "empties a cache of torch's between calls, which a library never needs",
    "testing/simulated_device/backend.py": "makes a device of Python, for which torch has no public door",
    "testing/live_bytes.py": "counts what every operator leaves behind: torch has no public hook for that",
}

#: Files that read or parse by themselves and not through ``storage/small_files.py``, and why.
READERS = {
    "recipes/reference.py": "the pages of the documentation, for make docs",
    "storage/strict_json.py": "the one parser of JSON",
    "storage/small_files.py": "the one reader",
    "storage/journal.py": "bytes of our own, cut off where a kill cut them",
    "system/process_info.py": "/proc",
    "system/machine.py": "/proc and /sys",
    "parallel_state/collective_order.py": "a store between ranks, no file",
    "machine/nodes/preflight.py": "a store between ranks, no file",
    "runs/flight_recorder.py": "torch's own texts, no file",
    "runs/rendezvous.py": "a store between ranks, no file",
    "data/text/chat_formats.py": "a text inside a record, no file",
    "data/text/text_and_jsonl.py": "streams data sets of any size in blocks",
    "data/text/stdlib_corpus.py": "Python's own sources",
    "cli/shared/quickstart.py": "compares two files that it has just written",
    "generation/ranks.py": "a file of its own rank, in a temporary folder",
    "runs/events.py": "the last byte of a log of its own",
}

#: Files that may load a pickle, and why: no file that a user names is ever among what they load.
UNPICKLERS = {
    "parallel_state/collective_errors.py": "an error of this very process, to see whether it can be sent",
    "ranks/pickling.py": "messages between the processes of a test",
}
UNPICKLING = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "marshal.loads", "shelve.open"}

#: The most lines of a file. A file holds one idea that its name says: length alone is no reason to cut it.
LIMIT = 300


def sources():
    """Every Python file of the package, by its path below the root."""
    files = [ROOT / "__init__.py"]
    for room in FLOORS:
        files += sorted((ROOT / room).rglob("*.py"))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


@cache
def tree_of(text):
    """Parse a file, once for all rules."""
    return ast.parse(text)


@cache
def nodes_of(text):
    """Return all nodes of a file, listed once for all rules."""
    return tuple(ast.walk(tree_of(text)))


@pytest.fixture(autouse=True, scope="module")
def forget_the_files():
    """Give the memory of all trees back: other tests of this process fork it."""
    yield
    nodes_of.cache_clear()
    tree_of.cache_clear()


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
USE_TESTING = ("testing/", "machine/", "cli/parity.py", "__init__.py")


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
    reached = {}
    for start in arrows:
        seen, queue = set(), [*arrows[start]]
        while queue:
            if (folder := queue.pop()) not in seen:
                seen.add(folder)
                queue += arrows.get(folder, ())
        reached[start] = seen
    round_about = [folder for folder, seen in reached.items() if folder in seen]
    return [f"{folder}: imports itself by way of {sorted(reached[folder])}" for folder in round_about]


def flat_drawers(files):
    """Folders with too many files to be looked through."""
    counts = {}
    for path in files:
        counts[str(Path(path).parent)] = counts.get(str(Path(path).parent), 0) + 1
    most = {"models": MOST_FAMILIES}
    return [f"{folder}: {n} files" for folder, n in counts.items() if n > most.get(folder, MOST_FILES)]


def absolute_imports(files):
    return [
        f"{path}:{node.lineno}: rooms import each other relatively"
        for path, text in files.items()
        for node in nodes_of(text)
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "trilith"
        )
        or (
            isinstance(node, ast.Import)
            and any(alias.name.split(".")[0] == "trilith" for alias in node.names)
        )
    ]


def private_torch(files):
    """Private names imported from torch, private attributes of its modules, and what the engine lists."""
    listed = {name for owner, name in (*engine.PRIVATE, *engine.FULLY_SHARDED) if name.startswith("_")}
    found = []
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


def torch_names(text):
    """The names by which a file knows torch and what it imported from there."""
    found = set()
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0] for a in node.names if a.name.split(".")[0] == "torch"}
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "torch"
        ):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def dotted_name(node):
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted_name(node.value)):
        return f"{owner}.{node.attr}"
    return None


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def prints(files):
    return [
        f"{path}:{node.lineno}: a library does not print"
        for path, text in files.items()
        if not path.startswith("cli/")
        for node in nodes_of(text)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


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
            f"{path}:{line}: {name} can run a pickle: storage/torch_archive reads it without"
            for line, name in sorted(set(names))
            if path not in UNPICKLERS
            and (name in UNPICKLING or name.rpartition(".")[2] in ("find_class", "Unpickler", "_load_global"))
        ]
    return found


def long_files(files):
    lengths = {path: len(text.splitlines()) for path, text in files.items()}
    return [f"{path}: {n} lines" for path, n in lengths.items() if n > LIMIT]


#: First words of docstrings that readers did not understand: no docstring begins with one, in any file.
CLIPPED = {"How", "Of", "That", "Those", "What", "When", "Where", "Whether", "Which", "Who"}
#: First words of docstrings that describe instead of saying what is done.
NO_VERBS = {
    *CLIPPED,
    *("A", "All", "An", "As", "At", "Bytes", "Each", "Every", "From", "If", "In", "Not", "On", "One"),
    *("So", "The", "These", "This", "To", "While", "With"),
}


def unclear_docstrings(files):
    """Find what doors offer without a docstring that begins with a verb, and such methods of classes."""
    trees = {path: tree_of(text) for path, text in files.items()}
    found = []
    for path, name in sorted({one for door in trees for one in offered(trees, door)}):
        for node in trees[path].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                if not ast.get_docstring(node):
                    found.append(f"{path}: {name} has no docstring")
                inside = node.body if isinstance(node, ast.ClassDef) else []
                methods = [one for one in inside if isinstance(one, ast.FunctionDef) and one.name[0] != "_"]
                found += [
                    f"{path}: {one.name}: no verb begins {text.split()[0]!r}..."
                    for one in (node, *methods)
                    if (text := ast.get_docstring(one)) and not begins_with_a_verb(text)
                ]
    return found


def begins_with_a_verb(text):
    """An imperative, as far as that can be told: a word, none of ``NO_VERBS``, and not one with a final s."""
    word = text.split()[0].rstrip(",:")
    plain = re.fullmatch(r"[A-Z][a-z]+", word) is not None
    return plain and word not in NO_VERBS and (not word.endswith("s") or word.endswith("ss"))


def clipped_docstrings(files):
    """Find docstrings, those of private functions too, whose first word is in ``CLIPPED``."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [(path, node) for path, text in files.items() for node in nodes_of(text)]
    found = [(path, ast.get_docstring(node) or "") for path, node in nodes if isinstance(node, kinds)]
    return [f"{path}: {text[:60]!r}" for path, text in found if re.match(r"\w*", text)[0] in CLIPPED]


def modules_without_a_verb(files):
    """Find files whose docstring begins with no verb; families begin with a name, commands with a line."""
    first = {path: (ast.get_docstring(tree_of(text)) or "Nothing").split()[0] for path, text in files.items()}
    return [
        f"{path}: {word!r}..."
        for path, word in first.items()
        if Path(path).parts[0] not in ("models", "cli")
        and Path(path).name not in ("__init__.py", "__main__.py")
        if not begins_with_a_verb(word) or word.endswith("ing")
    ]


def offered(trees, door):
    """Yield file and name of everything in a door's ``__all__``, through the doors inside of the room."""
    body = trees[door].body if Path(door).name == "__init__.py" else []
    lists = [
        one.value for one in body if isinstance(one, ast.Assign) and dotted_name(one.targets[0]) == "__all__"
    ]
    names = {name for one in lists for name in ast.literal_eval(one)}
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            there = str(Path(door).parent / Path(*node.module.split(".")))
            for alias in node.names:
                if (alias.asname or alias.name) in names and f"{there}.py" in trees:
                    yield f"{there}.py", alias.name
                elif (alias.asname or alias.name) in names:
                    inner = offered(trees, f"{there}/__init__.py")
                    yield from (one for one in inner if one[1] == alias.name)


#: Pieces of sentences that readers did not understand, so that they do not come back.
OBSCURE = [
    "ranks, or groups of them, with rows",
    "what tensor ranks repeat",
    "what blocks forget",
    "what is given up for it",
    "what looks for mistakes",
    "of a group, from one to the next",
    "what logits are wanted of",
    "A block's output and log-sums",
    "What each row's balance loss",
    "How the data and context ranks hold a weight",
    "Of a module that no family describes",
    "What precedes the names in blocks",
    "Of the last dim of what",
    "Where a number that is not finite first",
    "how long a silent peer is waited for",
    "A token is one of those here",
    "kept until backward, and needed besides",
    "cut never runs through",
    "has one more dim than `",
]


def obscure_sentences(files):
    texts = {path: " ".join(text.split()) for path, text in files.items()}
    return [f"{path}: {words!r}" for path, text in texts.items() for words in OBSCURE if words in text]


def relative_imports(files):
    """Find relative imports that run in test files: a rank loads a test file by path, in no package."""
    found = []
    for path, text in files.items():
        blocks = [node for node in nodes_of(text) if isinstance(node, ast.If)]
        typing_only = [one for one in blocks if dotted_name(one.test) == "TYPE_CHECKING"]
        unrun = {inner for block in typing_only for one in block.body for inner in ast.walk(one)}
        nodes = [node for node in nodes_of(text) if isinstance(node, ast.ImportFrom) and node.level]
        found += [f"{path}:{node.lineno}: a test file imports another" for node in nodes if node not in unrun]
    return found


RULES = [
    upward_imports,
    users_of_testing,
    circles,
    flat_drawers,
    absolute_imports,
    private_torch,
    prints,
    own_readers,
    unpicklers,
    long_files,
    unclear_docstrings,
    modules_without_a_verb,
    clipped_docstrings,
    obscure_sentences,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule):
    assert rule(sources()) == []


def test_the_pages_have_no_obscure_sentence():
    pages = {path.name: path.read_text() for path in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]}
    assert len(pages) > 15 and obscure_sentences(pages) == []


def test_the_table_of_contributing_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    places = text.partition("## Where is what")[2].partition("\n## ")[0]
    named = re.findall(r"`([a-z_/]+\.py)`", places)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_test_files_stand_alone():
    files = {str(file): file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    assert len(files) > 100 and relative_imports(files) == []


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks"])
def test_docstrings_outside_the_package_are_not_clipped(folder):
    files = {str(file): file.read_text() for file in (ROOT / folder).rglob("*.py")}
    assert len(files) > 1 and clipped_docstrings(files) == []


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (relative_imports, "tests/a/test_b.py", "from .conftest import c"),
        (upward_imports, "layers/a.py", "from ..models import zoo"),
        (upward_imports, "layers/a.py", "from .. import models"),
        (upward_imports, "layers/a.py", "def f():\n    from ..training.step import g"),
        (upward_imports, "layers/deep/a.py", "from ...cli import main"),
        (upward_imports, "layers/__init__.py", "from ..models import zoo"),
        (upward_imports, "training/a.py", "from ..testing import run_parallel"),
        (users_of_testing, "cli/quickstart.py", "def f():\n    from ..testing import run_fresh"),
        (upward_imports, "checkpoints/a.py", "import trilith.training"),
        (upward_imports, "layers/a.py", "from ..tests import helper"),
        (absolute_imports, "models/a.py", "from trilith.layers import Linear"),
        (absolute_imports, "models/a.py", "import trilith.layers"),
        (private_torch, "layers/a.py", "import torch._dynamo"),
        (private_torch, "layers/a.py", "from torch.distributed import _functional_collectives"),
        (private_torch, "layers/a.py", "from torch._C import x"),
        (private_torch, "layers/a.py", "import torch\ntorch._foreach_add_([], 1)"),
        (private_torch, "layers/a.py", "import torch.distributed as dist\ndist.group._world"),
        (
            private_torch,
            "layers/a.py",
            "from torch.distributed.tensor import DTensor\nDTensor._op_dispatcher",
        ),
        (private_torch, "layers/a.py", "x = y._local_tensor"),
        (prints, "training/a.py", "def f():\n    print('hello')"),
        (own_readers, "training/a.py", "path.read_text()"),
        (own_readers, "training/a.py", "path.read_bytes()"),
        (own_readers, "training/a.py", "import json\njson.loads(x)"),
        (own_readers, "training/a.py", "import tomllib\ntomllib.load(x)"),
        (unpicklers, "storage/a.py", "import torch\ntorch.load(path, weights_only=True)"),
        (unpicklers, "storage/a.py", "import pickle\nx = pickle.loads(raw)"),
        (unpicklers, "storage/a.py", "from pickle import load"),
        (unpicklers, "storage/a.py", "from torch import load as read"),
        (unpicklers, "checkpoints/a.py", "def find_class(self, module, name):\n    return None"),
        (unpicklers, "data/a.py", "import numpy as np\nnp.load(path, allow_pickle=True)"),
        (long_files, "models/a.py", "\n" * (LIMIT + 1)),
        (clipped_docstrings, "tests/test_a.py", '"""What a test does."""'),
        (clipped_docstrings, "layers/a.py", 'def _f():\n    """Whether it is."""'),
        (clipped_docstrings, "layers/a.py", 'class _A:\n    def b(self):\n        """Of: it."""'),
        (modules_without_a_verb, "layers/a.py", '"""Experts: many nets."""'),
        (modules_without_a_verb, "data/a.py", '"""Mixing sources."""'),
        (obscure_sentences, "models/a.py", '"""The cut never\n    runs through one."""'),
    ],
)
def test_the_rule_catches_what_it_forbids(rule, path, text):
    assert len(rule({path: text})) == 1


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (
            upward_imports,
            "models/a.py",
            "from ..layers import Linear\nfrom .b import c\nfrom . import d\nimport os",
        ),
        (upward_imports, "testing/a.py", "from ..training import step"),
        (users_of_testing, "cli/parity.py", "from ..testing.parity.check import parity"),
        (flat_drawers, "layers/a.py", ""),
        (private_torch, "layers/a.py", "import torch\nfrom .b import _c\ntorch.nn.Linear.__init__\nself._x"),
        (prints, "cli/a.py", "print('hello')"),
        (
            unpicklers,
            "data/a.py",
            "import numpy as np\nnp.load(path, allow_pickle=False)\nimport pickletools",
        ),
        (clipped_docstrings, "layers/a.py", 'def _f():\n    """Return what it is."""'),
        (relative_imports, "tests/test_b.py", "if TYPE_CHECKING:\n    from .conftest import C"),
        (long_files, "models/a.py", "\n" * LIMIT),
    ],
)
def test_the_rule_lets_pass_what_it_allows(rule, path, text):
    assert rule({path: text}) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('def f():\n    """Return it."""', 0),
        ('def f():\n    """What it is."""', 1),
        ('def f():\n    """Elements of it."""', 1),
        ('def f():\n    """``x`` of it."""', 1),
        ("def f():\n    pass", 1),
        ('class f:\n    """Hold it."""\n    def g(self):\n        """Whether it is."""', 1),
        ('class f:\n    """Hold it."""\n    def g(self):\n        pass', 0),
    ],
)
def test_a_docstring_without_a_verb_is_found_behind_a_door(text, count):
    door = {"layers/__init__.py": "from .deep import f\n__all__ = ['f']", "layers/deep/a.py": text}
    door["layers/deep/__init__.py"] = "from .a import f\n__all__ = ['f']"
    assert len(unclear_docstrings(door)) == count
    assert unclear_docstrings({"layers/__init__.py": "", "layers/a.py": text}) == []


def test_folders_that_import_each_other_are_found():
    around = {"layers/a.py": "from .deep.b import c", "layers/deep/b.py": "from ..e import f"}
    around["layers/e.py"] = ""
    assert [found.split(":")[0] for found in circles(around)] == ["layers", "layers/deep"]
    del around["layers/a.py"]
    assert circles(around) == []


def test_a_folder_with_too_many_files_is_found():
    assert len(flat_drawers({f"layers/{number}.py": "" for number in range(MOST_FILES + 1)})) == 1


def test_docs_and_examples_import_from_doors():
    """A door is what stays when files move; the test harness's own rooms are for tests."""
    texts = {path: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        texts[path] = "\n".join(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
    found = [
        f"{path.name}: {name}"
        for path, text in texts.items()
        for name in re.findall(r"(?:from|import) (trilith\.\w+\.[\w.]+)", text)
    ]
    assert found == []


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


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_folder_with_a_door_is_a_room():
    doors = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert doors <= FLOORS.keys()


def test_the_root_offers_what_doors_offer():
    for name in trilith.__all__:
        offered = getattr(trilith, name)
        assert any(name in door.__all__ and getattr(door, name) is offered for door in doors())
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trilith.nothing
    assert dir(trilith) == trilith.__all__


def doors():
    return [import_module(f"trilith.{room}") for room in FLOORS if room not in ("cli", "runs")]


@pytest.mark.parametrize("room", FLOORS)
def test_a_door_says_on_which_floor_it_is_and_what_it_offers(room):
    said = import_module(f"trilith.{room}").__doc__ or ""
    assert said.startswith(f"Floor {FLOORS[room]}: ") and "\n\nOffers " in said
    assert 3 <= len(said.strip().splitlines()) <= 5


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


def replaced_in_torch(cls):
    """The methods of a class that replace one of torch's pipelining, which documents none of them."""
    theirs = [base for base in cls.__mro__ if base.__module__.startswith("torch.distributed.pipelining")]
    own = {name for name, value in vars(cls).items() if callable(value) and not name.startswith("__")}
    return {name for name in own for base in theirs if name in vars(base)}


def test_what_torch_does_not_promise_is_looked_for_at_the_start():
    """Private names in the engine, those of FSDP's groups, and methods that a pipeline's stage replaces."""
    listed = {name for _, name in (*engine.PRIVATE, *engine.FULLY_SHARDED, *engine.PIPELINING)}
    files = sorted((ROOT / "parallel_state/engine").glob("*.py"))
    tree = ast.Module([node for file in files for node in ast.parse(file.read_text()).body], [])
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)
    }
    of_groups = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and dotted_name(node.value) == "group" and node.attr in GROUP
    }
    from trilith.pipeline.driver import DrivenStage

    parts = {part for path, _ in (*engine.PRIVATE, *engine.FULLY_SHARDED) for part in path.split(".")}
    assert found - own - listed - parts == set()
    assert of_groups == GROUP and listed >= GROUP
    assert {"backward_one_chunk"} < replaced_in_torch(DrivenStage) <= listed


#: What FSDP's own group of parameters is asked for.
GROUP = {"fsdp_params", "post_backward", "unshard", "wait_for_unshard"}
