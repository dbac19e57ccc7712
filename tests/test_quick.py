"""``make quick`` leaves out the functions that took long in a measured run, no others; the rest is short."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parent


@pytest.fixture
def setup(request):
    """Return the module ``tests/conftest.py``."""
    plugins = request.config.pluginmanager.get_plugins()
    return next(one for one in plugins if getattr(one, "__file__", "") == str(TESTS / "conftest.py"))


def test_what_quick_keeps_takes_less_than_a_minute_on_two_lanes():
    """By ``seconds.txt``, whose last line is what all functions took that it does not name."""
    *long, (rest, others) = (line.split() for line in (TESTS / "seconds.txt").read_text().splitlines())
    assert others == "others" and float(rest) <= 100
    taken = [float(seconds) for seconds, _ in long]
    assert taken == sorted(taken, reverse=True) and taken[-1] >= 0.5
    assert max(Counter(name for _, name in long).values()) == 1


def test_a_function_is_left_out_if_all_its_parameters_together_took_long(setup, tmp_path, monkeypatch):
    took = Counter({"a.py::short": 0.1, "a.py::many": 0.6, "a.py::long": 9.0, "a.py::brief": 0.3})
    monkeypatch.setattr(setup, "TOOK", took)
    monkeypatch.setattr(setup, "SECONDS", tmp_path / "seconds.txt")
    setup.write_seconds(tmp_path / "seconds.txt")
    assert (tmp_path / "seconds.txt").read_text() == "9.0 a.py::long\n0.6 a.py::many\n0.4 others\n"

    left_out = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    names = ["a.py::short", "a.py::many[1]", "a.py::new", "a.py::many[2-b]", "a.py::long"]
    for quick in (False, True):
        items = [SimpleNamespace(nodeid=name) for name in names]
        config = SimpleNamespace(getoption=lambda name, quick=quick: quick, hook=hook)
        setup.pytest_collection_modifyitems(config, items)
        kept = ["a.py::short", "a.py::new"] if quick else names
        assert [item.nodeid for item in items] == kept
    assert [item.nodeid for item in left_out] == ["a.py::many[1]", "a.py::many[2-b]", "a.py::long"]
