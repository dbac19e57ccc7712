"""docs/install.md and the Containerfile name one version of each package that pyproject.toml asks for."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_and_the_container_name_the_same_versions_of_all_packages():
    page = (ROOT / "docs" / "install.md").read_text()
    rows = dict(re.findall(r"^\| ([\w]+)[^|]*\| ([\d.]+) \|", page, re.MULTILINE))
    pinned = dict(re.findall(r"^ {4}([\w]+)==([\d.]+)", (ROOT / "Containerfile").read_text(), re.MULTILINE))
    assert rows == pinned
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["trackers"], *extras["tensorboard"]]
    names = {re.split(r"[<>=;\[ ]", one)[0] for one in wanted} - {"trilith"}
    assert names == rows.keys()


def test_the_container_runs_as_a_user_of_its_own():
    lines = (ROOT / "Containerfile").read_text().splitlines()
    user = lines.index("USER trainer")
    assert not any(line.startswith("USER") for line in lines[user + 1 :])
    assert any(line.startswith("RUN pip install") for line in lines[user:])
