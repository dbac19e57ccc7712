"""Seed faults on purpose, one at a time, and see tests fail (`make mutants`; `PART=1/4` for a part).

Each is a mistake that somebody made, in one place, and quiet: the model still trains and the checkpoint still
loads. A test that stays green on its mutant is no test. Only copies of the tree are changed.

A place is a function and a piece of its syntax tree, so that a function may move, and be laid out anew.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

#: Short words for what pytest is given; ``-k`` chooses some rows by their names.
LAYERS = "tests/layers/test_parts.py::test_a_layer_in_parts_equals_one_device"
WORDS = {
    "FORWARD": "tests/models/test_hugging_face.py::test_logits_and_gradients_are_transformers",
    "RESUME": "-kD1 tests/training/test_stop_and_go.py",
    "ROUND_TRIP": "tests/checkpoints/test_convert.py::"
    "test_there_and_through_another_layout_and_back_is_bitwise_D6",
    **{f"LAYERS_{word.upper()}": f"-k{word} {LAYERS}" for word in ("float8", "experts", "sinks", "window")},
}


class Mutant(NamedTuple):
    """Describe a seeded mistake: its place, the change, and the tests that must fail then.

    In the function (``Class.method``, or a module's constant) one expression, or statements in a row, become
    others.
    """

    name: str
    function: str
    old: str
    new: str
    tests: str


def read_mutants():
    """Read the table in ``mutants.txt``: a name; the function, the old and the new code; the tests."""
    found = []
    for record in (ROOT / "tests/mutants.txt").read_text().split("\n\n"):
        name, place, tests = record.strip().splitlines()
        function, change = place.strip().split(": ", 1)
        old, new = (code.replace(r"\n", "\n") for code in change.split("  =>  "))
        tests = WORDS.get(tests.strip()) or f"tests/{tests.strip()}"
        found.append(Mutant(name, function, old, new, tests))
    return tuple(found)


MUTANTS = read_mutants()


def code_files():
    """Return the package's own files."""
    away = {"tests", "tools", "benchmarks", "examples", "build"}
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    return sorted(path for path in found if path.parts[0] not in away and not path.parts[0].startswith("."))


@cache
def scopes():
    """Return every function, class and constant by its name in the module, with its file and the module."""
    found = {}

    def visit(inside, prefix, path, module):
        for node in ast.iter_child_nodes(inside):
            named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if named:
                found.setdefault(prefix + node.name, []).append((path, module, node))
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
                    found.setdefault(prefix + target.id, []).append((path, module, node))
            if named or isinstance(node, ast.stmt):
                visit(node, f"{prefix}{node.name}." if named else prefix, path, module)

    for path in code_files():
        module = ast.parse((ROOT / path).read_text())
        visit(module, "", path, module)
    return found


def same(one, other):
    """Return whether both are the same code, wherever it stands."""
    return type(one) is type(other) and _written(one) == _written(other)


def _written(node):
    return ast.dump(node).replace("Store()", "Load()")


def places(scope, old):
    """Yield where the expression or the statements stand: a node, its field, and the index in that field."""
    for node in ast.walk(scope):
        for field, value in ast.iter_fields(node):
            inside = value if isinstance(value, list) else [value]
            for at in range(len(inside)):
                some = inside[at : at + len(old)]
                if len(some) == len(old) and all(map(same, some, old)):
                    yield node, field, at


def parse(old, new):
    """Parse both as expressions, or as statements if one of them is not an expression."""
    before, after = ast.parse(old).body, ast.parse(new).body
    if len(before) == len(after) == 1 and isinstance(before[0], ast.Expr) and isinstance(after[0], ast.Expr):
        return [before[0].value], [after[0].value]
    return [*before], [*after]


def seed(mutant):
    """Return the file with the mistake, and its new text; ``LookupError`` unless there is one such place."""
    old, new = parse(mutant.old, mutant.new)
    found = [
        (path, module, *place)
        for path, module, scope in scopes().get(mutant.function, [])
        for place in places(scope, old)
    ]
    if len(found) != 1:
        raise LookupError(
            f"{mutant.name}: {mutant.function} has `{mutant.old}` {len(found)} times, expected once"
        )
    path, module, node, field, at = found[0]
    before = getattr(node, field)
    after = [*before[:at], *new, *before[at + len(old) :]] if isinstance(before, list) else new[0]
    setattr(node, field, after)
    text = ast.unparse(module)
    setattr(node, field, before)
    return path, text


def copy_tree(target):
    """Copy to ``target`` the files that git tracks or would track."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(
        listed, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def run_tests(tree, tests, *more):
    """Run pytest on the copy, which comes before any installed trilith on the path."""
    options = [
        "-x",
        "-q",
        "--no-header",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tree.parent / 'temp'}",
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *more, *tests.split()],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


def caught_by(tree, mutant):
    """Return the test that fails on the mutant, or ``None``."""
    file, text = seed(mutant)
    original = (tree / file).read_text()
    (tree / file).write_text(text)
    try:
        result = run_tests(tree, mutant.tests)
    finally:
        (tree / file).write_text(original)
    failed = [line.split(" - ")[0] for line in result.stdout.splitlines() if line.startswith("FAILED ")]
    return failed[0].removeprefix("FAILED ") if result.returncode == 1 and failed else None


def vague(mutant):
    """Return whether a mutant names neither one test function nor rows to choose with ``-k``."""
    words = mutant.tests.split()
    return not any(word.startswith("-k") for word in words) and (len(words) != 1 or "::" not in words[0])


def failed_without(tree, mutants):
    """Run the mutants' tests on the tree as it is; return what pytest says if one fails."""
    tests = {word for mutant in mutants for word in mutant.tests.split()}
    result = run_tests(tree, " ".join(sorted(tests)))
    return (result.stdout or "pytest said nothing") if result.returncode else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--part", default="1/1", help="2/4 is the second of four parts")
    parser.add_argument("--lanes", type=int, default=2, help="mutants that run side by side")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    chosen = [one for one in MUTANTS if not options.only or any(word in one.name for word in options.only)]
    chosen = chosen[part - 1 :: parts]
    for mutant in chosen:
        seed(mutant)  # all places are there before anything runs
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.lanes) as lanes:
        trees = SimpleQueue()
        for lane in range(options.lanes):
            (Path(folder) / str(lane)).mkdir()
            trees.put(copy_tree(Path(folder) / str(lane) / "trilith"))

        def on_a_tree(work):
            tree = trees.get()
            try:
                return work(tree)
            finally:
                trees.put(tree)

        clean = lanes.submit(on_a_tree, lambda tree: failed_without(tree, chosen))
        caught = 0
        results = lanes.map(lambda mutant: on_a_tree(lambda tree: caught_by(tree, mutant)), chosen)
        for mutant, test in zip(chosen, results, strict=True):
            caught += test is not None
            print(f"{'caught' if test else 'MISSED'}  {mutant.name}\n        {test or ''}", flush=True)
        print(f"{caught}/{len(chosen)} caught")
        if failed := clean.result():
            print(failed[-3000:], "these tests fail without any mutant", sep="\n")
    return int(caught < len(chosen) or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
