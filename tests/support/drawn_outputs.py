"""Draw odd outputs of a command: names that are none, and places that something else has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from support.command_lines import Place, parameters_of, places, values_of, words

#: The outputs of each command that has one.
OUTPUTS = {
    name: [place for place in places() if place.output and place.command == name]
    for name in dict.fromkeys(place.command for place in places() if place.output)
}


#: Names of an output, in a folder that ``_furnish`` fills: some of a new place, and others.
PLACES = [
    *("new", "missing/new", "missing/../new", "new//new", "./new", "-new", "~new", "a b", "ü", "a" * 255),
    *(
        "",
        ".",
        "..",
        "new/",
        "a" * 256,
        "a/" * 2100 + "a",
        "a\nb",
        "\x1b[31m",
        "\udcff",
        "s3://bucket/x",
        "~",
    ),
    *(
        "file://x",
        "a=b",
        "/",
        "/dev/null",
        "/proc/x",
        "folder",
        "folder/",
        "file",
        "file/new",
        "file/",
        "link",
    ),
    *("loop", "loop/new", "to_folder", "to_folder/new", "locked", "locked/new", "fifo", "fifo/new"),
    *("{}", "{}/new"),
]


@dataclass(frozen=True)
class Drawn:
    """Hold a drawn command line; an error of it says one of ``names``; ``place``: where alone it writes."""

    words: list[str]
    names: Sequence[str]
    what: str
    place: str = ""


def draw_output(random: Random, place: Place, inputs: Path, where: Path) -> Drawn:
    """Return a command line whose output is odd, or lies where something is."""
    _furnish(where, place.suffix)
    sources = [value for (value, *_) in values_of(place.command, inputs, where).values()]
    # A copy: what is written beside an input must not be there in the next trial.
    source = Path(next((value for value in sources if value.startswith(str(inputs))), inputs / "hf"))
    word = random.choice(PLACES).format(where / source.name)
    suffix = "" if place.command == "tokenize" or word[-1:] in ("", "/", ".") else place.suffix
    line = words(place.command, inputs, where, place, word + suffix)
    if word.startswith(str(where)):
        (shutil.copytree if source.is_dir() else shutil.copy)(source, where / source.name)
        line = [each.replace(str(source), str(where / source.name)) for each in line]
    if place.command == "plan":  # which has another output
        at = line.index(str(where / ("html" if place.name == "write" else "write")))
        del line[at - 1 : at + 1]
    for flag, kinds in ((flag, kinds) for _, flag, _, kinds in parameters_of(place.command)):
        if flag == "--force" and bool in kinds and random.random() < 0.4:
            line.append(flag)
    key, path = str(place.key or place.name).split(".")[-1], Path(word)
    parts = [repr(part)[1:-1][:8] for part in (*path.parts[:1], *path.parts[-2:]) if part != "/"]
    named = f"{Path(word + suffix)}: expected"
    names = [f"--{key}", f"'{key.upper()}'", named, *parts, "utf-8", "such option"]
    return Drawn(line, names, f"{place} {word[:30]!r}", os.path.join(where, word + suffix))


def _furnish(where: Path, suffix: str) -> None:
    """Put into a folder what an output cannot replace, also with the suffix that the output has."""
    for end in {"", suffix}:
        for name in ("folder", "locked"):
            (where / f"{name}{end}").mkdir()
            (where / f"{name}{end}" / "mine").write_text("mine")
        (where / f"locked{end}").chmod(0o555)
        (where / f"file{end}").write_text("mine")
        (where / f"link{end}").symlink_to("nowhere")
        (where / f"loop{end}").symlink_to(f"loop{end}")
        (where / f"to_folder{end}").symlink_to(f"folder{end}")
        os.mkfifo(where / f"fifo{end}")
