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
from hypothesis import settings
from support import changed, draws, lanes, run_times
from support.pages import ROOT


@pytest.mark.parametrize(
    "options, expected",
    [
        pytest.param({}, (lanes.LANES, "loadfile"), id="all tests"),
        pytest.param({"maxfail": 1}, (lanes.LANES, "loadfile"), id="-x"),
        pytest.param({"markexpr": "slow"}, (lanes.LANES, "loadfile"), id="-m slow"),
        pytest.param({"numprocesses": 2}, (2, "loadfile"), id="-n 2"),
        pytest.param({"numprocesses": 4, "dist": "load"}, (4, "load"), id="-n 4 --dist load"),
        pytest.param({"numprocesses": 0}, (0, "no"), id="-n 0"),
        pytest.param({"keyword": "ring"}, (None, "no"), id="-k ring"),
        pytest.param({"usepdb": True}, (None, "no"), id="--pdb"),
        pytest.param({"capture": "no"}, (None, "no"), id="-s"),
        pytest.param({"lf": True}, (None, "no"), id="--lf"),
        pytest.param({"paths": ["tests/cli"]}, (None, "no"), id="a folder"),
    ],
)
def test_all_tests_run_in_lanes_and_some_in_one_process(options, expected):
    option = SimpleNamespace(**{"numprocesses": None, "dist": "no", "capture": "fd"} | options)
    source = pytest.Config.ArgsSource.ARGS if "paths" in options else pytest.Config.ArgsSource.TESTPATHS
    config = SimpleNamespace(option=option, args_source=source, ArgsSource=pytest.Config.ArgsSource)
    lanes.use_lanes(config)
    assert (option.numprocesses, option.dist) == expected


@pytest.fixture
def conftest(request):
    (plugin,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if hasattr(plugin, "no_processes_if_quick")
    )
    return plugin


def test_without_xdist_one_process_runs_in_order_and_says_so(capsys, conftest):
    config = SimpleNamespace(
        option=SimpleNamespace(capture="fd"),
        args_source=pytest.Config.ArgsSource.TESTPATHS,
        ArgsSource=pytest.Config.ArgsSource,
        getoption=lambda name: False,
    )
    lanes.use_lanes(config)
    assert "pytest-xdist is not loaded" in capsys.readouterr().err and not hasattr(config.option, "dist")
    items = [SimpleNamespace(nodeid=name) for name in ("b.py::b", "a.py::a")]
    conftest.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == ["b.py::b", "a.py::a"]


def test_a_lane_starts_no_lanes():
    config = SimpleNamespace(workerinput={}, option=SimpleNamespace())
    lanes.use_lanes(config)
    assert not vars(config.option)


def test_the_measured_seconds_leave_quick_less_than_a_minute_on_two_lanes():
    *long, (rest, others) = (line.split() for line in run_times.SECONDS.read_text().splitlines())
    assert others == "others" and float(rest) <= 100
    seconds = [float(value) for value, _ in long]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] >= run_times.LONG
    assert max(Counter(name for _, name in long).values()) == 1


def test_quick_leaves_out_a_function_whose_parameters_together_took_long(conftest, tmp_path, monkeypatch):
    monkeypatch.setattr(run_times, "SECONDS", tmp_path / "seconds.txt")
    took = {"a.py::short": 0.1, "a.py::many": 0.6, "a.py::long": 9.0, "a.py::brief": 0.3}
    run_times.SECONDS.write_text(run_times.table(took))
    assert run_times.SECONDS.read_text() == "9.0 a.py::long\n0.6 a.py::many\n0.4 others\n"
    assert run_times.seconds_of_files()["a.py"] == 9.6

    kept_in_cache = {}
    cache = SimpleNamespace(get=kept_in_cache.get, set=kept_in_cache.__setitem__)
    run_times.remember({"a.py::since": 0.5, "a.py::short": 0.2}, cache)
    left_out = []
    names = ["a.py::short", "a.py::many[1]", "a.py::new", "a.py::many[2-b]", "a.py::long", "a.py::since[x]"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    config = SimpleNamespace(
        getoption=lambda name: name == "quick",
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
        cache=cache,
    )
    conftest.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == ["a.py::short", "a.py::new"]
    assert [item.nodeid for item in left_out] == [
        "a.py::many[1]",
        "a.py::many[2-b]",
        "a.py::long",
        "a.py::since[x]",
    ]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"markexpr": "not slow"}, 3),
        ({"markexpr": "slow"}, 10),
        ({"markexpr": "slow or not slow"}, 10),
        ({"markexpr": "not slow", "quick": True}, 3),
    ],
    ids=str,
)
def test_all_examples_are_drawn_where_the_slow_tests_run(options, count, conftest):
    before = settings.get_current_profile_name()
    try:
        conftest.pytest_configure(SimpleNamespace(getoption=options.get))
        assert draws.drawn(10) == count
    finally:
        settings.load_profile(before)


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


def test_a_fault_whose_place_is_gone_is_an_error():
    gone = mutants.MUTANTS[0]._replace(old="no_such_name()")
    with pytest.raises(LookupError, match="0 times, expected once"):
        mutants.seed(gone)


def test_parts_of_the_faults_are_all_of_them_once():
    parts = [mutants.MUTANTS[part::4] for part in range(4)]
    assert sorted(sum(parts, ())) == sorted(mutants.MUTANTS)


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
