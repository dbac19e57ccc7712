"""Write a job's file from its system's template: each value quoted for the place where it stands.

In a template ``{{name}}`` is the job's value of that name. A line with a value that is ``None`` is left out;
``{{if name}}`` stands for nothing, and its line is left out in the same way. A line with ``{{each name}}``
or ``{{each name.key}}`` is repeated for each element of a list.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from ..parallel_state import BadInput
from ..storage.small_files import read_text
from .job import SYSTEMS, Job
from .kubernetes import pod_values
from .network import optional, variables
from .slurm import slurm_values

Place = Literal["bash", "yaml", "directive", "comment"]

_TEMPLATES = Path(__file__).parent
_MARK = re.compile(r"\{\{(?:(if|each) )?(\w+)(?:\.(\w+))?\}\}")
#: What Slurm would not take as it stands from a line that begins with #SBATCH.
_SPECIAL = re.compile(r"[\s'\"#\\]")
#: How the user knows a value that is no option of its own name.
_ASKED = {"recipe": "RECIPE", "command": "KEY=VALUE", "file": "--out"}
_ASKED |= dict.fromkeys(("out", "folder", "inside"), "out")  # the recipe's key


def render(job: Job, file: str) -> str:
    """Return the text of the job's file, which will have the path ``file``.

    ``BadInput`` for a value that cannot stand in one line: a name or a path with control characters.
    """
    suffix = SYSTEMS[job.system].suffix
    template = read_text(_TEMPLATES / f"job{suffix}")
    code: Place = "yaml" if suffix.endswith(".yaml") else "bash"
    own = slurm_values(job) if job.system == "slurm" else pod_values(job)
    values = {**asdict(job), "file": file, **_common(job), **own}
    return "".join(f"{line}\n" for text in template.splitlines() for line in _lines(text, values, code))


def quoted(value: object, place: Place, name: str) -> str:
    """Return a value, or a list of them, as text that has the same value in that place and nowhere ends it.

    ``BadInput`` with ``name`` for text that no quotes would hold there.
    """
    texts = [str(part) for part in value] if isinstance(value, list | tuple) else [str(value)]
    key = _ASKED.get(name, f"--{name.replace('_', '-')}")
    for text in texts:
        if not text or not text.isprintable():
            expected = "text that can be printed in one line"
            raise BadInput("launch", key, expected=expected, found=repr(text)[:80])
        if place == "directive" and (match := _SPECIAL.search(text)):
            expected = "a name that #SBATCH takes, without spaces, quotes, # and \\"
            raise BadInput("launch", key, expected=expected, found=f"{match[0]!r} in {text[:80]!r}")
    if place == "yaml":  # in quotes, so that no reader takes 1e3 or yes for a number or a truth
        return json.dumps(value, ensure_ascii=False)
    if place == "directive":
        return ",".join(texts)
    return shlex.join(texts) if place == "bash" else " ".join(texts)


def _lines(text: str, values: Mapping[str, Any], code: Place) -> Iterator[str]:
    """Yield the lines that a template's line becomes."""
    marks = list(_MARK.finditer(text))
    if any(values[mark[2]] is None for mark in marks):
        return
    lists = {mark[2] for mark in marks if mark[1] == "each"}
    for index in range(max((len(values[name]) for name in lists), default=1)):
        parts, end = [], 0
        for mark in marks:
            what, name, key = mark.groups()
            parts.append(text[end : mark.start()])
            end = mark.end()
            if what != "if":
                value = values[name][index] if what == "each" else values[name]
                place = _place(text[: mark.start()], code)
                parts.append(quoted(value if key is None else value[key], place, name))
        yield "".join([*parts, text[end:]]).rstrip()


def _place(before: str, code: Place) -> Place:
    """Return in what a value stands, told by its line up to there."""
    if before.startswith("#SBATCH ") and " # " not in before:
        return "directive"
    return "comment" if before.lstrip().startswith("#") or " # " in before else code


def _common(job: Job) -> dict[str, Any]:
    names = ("name", "value", "why")
    return {
        "variables": [dict(zip(names, row, strict=True)) for row in variables(gpu=job.gpu)],
        "hints": [dict(zip(names, row, strict=True)) for row in optional(gpu=job.gpu)],
        "exclude": job.exclude or None,
        "gpus": job.ranks if job.gpu else None,
        "cores": None if job.gpu else job.ranks,
    }
