"""How the suite runs: in lanes or not, what options choose; the seeded faults still fit the code."""

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support import changed, lanes, run_times
from support.pages import ROOT


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (lanes.LANES, "loadfile")),
        ({"markexpr": "slow"}, (lanes.LANES, "loadfile")),
        ({"numprocesses": 4, "dist": "load"}, (4, "load")),
        ({"numprocesses": 0}, (0, "no")),
        ({"keyword": "ring"}, (None, "no")),
        ({"capture": "no"}, (None, "no")),
        ({"paths": ["tests/cli"]}, (None, "no")),
    ],
    ids=str,
)
def test_all_tests_run_in_lanes_and_some_in_one_process(options, expected):
    option = SimpleNamespace(**{"numprocesses": None, "dist": "no", "capture": "fd"} | options)
    source = pytest.Config.ArgsSource.ARGS if "paths" in options else pytest.Config.ArgsSource.TESTPATHS
    config = SimpleNamespace(option=option, args_source=source, ArgsSource=pytest.Config.ArgsSource)
    lanes.use_lanes(config)
    assert (option.numprocesses, option.dist) == expected


def test_the_measured_seconds_leave_quick_less_than_a_minute_on_two_lanes():
    *long, (rest, others) = (line.split() for line in run_times.SECONDS.read_text().splitlines())
    assert others == "others" and float(rest) <= 100
    seconds = [float(value) for value, _ in long]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] >= run_times.LONG
    assert max(Counter(name for _, name in long).values()) == 1


def test_a_change_reaches_the_rooms_that_import_it():
    imports = {"layers": {"system"}, "models": {"layers"}, "cli": {"models"}, "data": set(), "system": set()}
    assert changed.reached(["layers"], imports) == {
        "layers": "changed",
        "models": "imports layers",
        "cli": "imports models",
    }
    chosen = changed.tests_of(["cli/plan.py"])
    assert {"tests/cli", "tests/test_*.py", "tests/test_house.py"} == set(chosen)
    assert {"tests/cli", "tests/training", "tests/layers"} <= set(changed.tests_of(["layers/norm.py"]))
    assert "tests/data" not in changed.tests_of(["training/optimizer.py"])
    assert "tests/cluster/test_slurm.py" in changed.tests_of(["tests/support/slurm.py"])
    assert set(changed.tests_of(["pyproject.toml"])) == {"tests"}


HERE = Path(__file__).resolve().parent
SPEC = importlib.util.spec_from_file_location("trilith_mutants", HERE / "mutants.py")
assert SPEC is not None and SPEC.loader is not None
mutants = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = mutants
SPEC.loader.exec_module(mutants)


def test_every_seeded_fault_fits_the_code():
    for mutant in mutants.MUTANTS:
        file, text = mutants.seed(mutant)
        compile(text, file, "exec")
        path, _, test = mutant.tests.split()[-1].partition("::")
        (name, row, _), text = test.partition("["), (HERE.parent / path).read_text()
        assert f"def {name}" in text or f"\n{name} = " in text, mutant
        assert not (row and f"\n\ndef {name}(" in text), f"{mutant}: a test without parameters has no rows"


def test_each_fault_names_a_test_or_chooses_rows():
    assert [mutant.name for mutant in mutants.MUTANTS if mutants.vague(mutant)] == []
    tried = mutants.MUTANTS[0]
    for tests in ("tests/a.py", "tests/a.py::test_b tests/a.py::test_c"):
        assert mutants.vague(tried._replace(tests=tests))
    for tests in ("tests/a.py::test_b", "-kword tests/a.py"):
        assert not mutants.vague(tried._replace(tests=tests))


def test_the_oldest_versions_are_those_that_the_project_declares():
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    commands = subprocess.run(
        ["make", "-n", "oldest"], cwd=HERE.parent, capture_output=True, text=True, check=True
    )
    declared = [re.fullmatch(r"(torch|transformers)>=([\d.]+),<.+", line) for line in project["dependencies"]]
    versions = [f"{match[1]}=={match[2]}.*" for match in declared if match]
    assert len(versions) == 2 and f"-e '.[test]' {' '.join(versions)}\n" in commands.stdout


def workflow_commands():
    """Yield the name of a workflow's job and each command that it runs, in order."""
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for name, job in yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].items():
            for step in job["steps"]:
                if "run" in step:
                    yield f"{file.stem} {name}", step["run"]


def test_workflows_may_only_read_and_use_actions_of_the_host_by_version():
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 120 and job["runs-on"] == "ubuntu-latest"
            used = [step["uses"] for step in job["steps"] if "uses" in step]
            assert used == ["actions/checkout@v4", "actions/setup-python@v5"]


def test_what_workflows_run_is_there():
    """Targets of make, scripts, extras; ``make versions`` alone makes an environment of its own."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {"check check"}  # its script installs
    for job, line in workflow_commands():
        for command in line.split(" && "):
            match shlex.split(command.replace("${{ matrix.versions }}", "newest")):
                case ["make", target, *variables]:
                    done = subprocess.run(
                        ["make", "-n", target, *variables], cwd=ROOT, capture_output=True, check=False
                    )
                    assert done.returncode == 0, done.stderr
                    assert job in installed or target == "versions", f"{job}: nothing is installed"
                case ["bash", script]:
                    assert (ROOT / script).is_file()
                case ["python", "-m", "pip", "install", "-q", *what]:
                    installed.add(job)
                    named = {extra for word in what for extra in re.findall(r"\w+(?=[,\]])", word)}
                    assert named <= set(extras)
                case words:
                    raise AssertionError(f"{job}: {words}")
