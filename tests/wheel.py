"""Build wheel and sdist into build/dist, compare them with the folders, and try the wheel (`make wheel`).

`list` says what `make release` would upload, and that nothing is.
"""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "build" / "dist"


def files_of_the_package():
    """Return the files that an installed package has: all that git knows in its folders, and the root's."""
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {name.removeprefix("trilith").removeprefix(".").replace(".", "/") for name in names} - {""}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {
        name
        for name in listed.splitlines()
        if str(Path(name).parent) in folders or name in ("__init__.py", "__main__.py", "py.typed")
    }


def problems(wheel, sdist):
    """Yield what the two files lack, and what they have beside."""
    wanted = files_of_the_package()
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = Parser().parsestr(
            archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))).decode()
        )
        for name in wanted:
            if f"trilith/{name}" in packed and archive.read(f"trilith/{name}") != (ROOT / name).read_bytes():
                yield f"the wheel's {name} is not the folder's"
    found = {name.removeprefix("trilith/") for name in packed}
    yield from (f"the wheel lacks {name}" for name in sorted(wanted - found))
    yield from (f"the wheel has {name}, which is not of the package" for name in sorted(found - wanted))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if metadata["Version"] != version:
        yield f"the wheel's version is {metadata['Version']}, not {version}"
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    yield from (
        f"the sdist lacks {name}" for name in sorted((wanted | {"pyproject.toml", "README.md"}) - inside)
    )
    yield from (
        f"the sdist has {name}" for name in sorted(inside) if re.match(r"tests|benchmarks|docs", name)
    )


#: What shows that data files are there: recipes, sizes, templates of jobs, topics, the completion's names.
COMMANDS = (
    ["--help"],
    ["train", "llama-3.2-1b-8gpus", "--dry-run"],
    ["models", "llama-3.2-1b"],
    ["plan", "explain", "bubble"],
    ["launch", "slurm", "llama-3.2-1b-8gpus", "--out", "job.sbatch"],
    ["launch", "jobset", "llama-3.2-1b-8gpus", "--out", "job.yaml"],
    ["plan", "llama-3.2-1b", "--gpus", "8", "--write", "recipe.toml"],
)


def try_out(wheel):
    """Install the wheel outside the checkout, with this environment's other packages, and run commands."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "installed"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), str(wheel)]
        subprocess.run(pip, check=True)
        environment = {**os.environ, "PYTHONPATH": str(place)}
        where = [sys.executable, "-c", "import trilith; print(trilith.__file__)"]
        for words in (where, *([sys.executable, "-m", "trilith", *words] for words in COMMANDS)):
            done = subprocess.run(
                words, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(
                    f"{done.stdout}{done.stderr}exit code {done.returncode} of {words[1:]} from the wheel"
                )
            if words is where and not done.stdout.startswith(folder):
                sys.exit(f"not the wheel was imported but {done.stdout}")


def built():
    """Return the wheel and the sdist."""
    return next(DIST.glob("*.whl")), next(DIST.glob("*.tar.gz"))


def main():
    if sys.argv[1:] == ["list"]:
        for file in built():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            print(f"{file.stat().st_size:>10,} bytes  sha256 {digest}  {file.name}")
        print("Nothing was uploaded: the owner does that, with twine upload build/dist/*")
        return
    for file in DIST.glob("*"):
        file.unlink()
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wheel, sdist = built()
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)], check=True)
    if wrong := [*problems(wheel, sdist)]:
        sys.exit("\n".join(wrong))
    try_out(wheel)
    print(
        f"{wheel.name}, {sdist.name}: every file of the package, and no other; {len(COMMANDS)} commands ran"
    )


if __name__ == "__main__":
    main()
