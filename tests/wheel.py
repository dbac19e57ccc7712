"""Build wheel and sdist into build/dist and compare what they hold with the folders (`make wheel`).

`list` says what `make release` would upload, and that nothing is.
"""

import hashlib
import re
import subprocess
import sys
import tarfile
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
    print(f"{wheel.name}, {sdist.name}: every file of the package, and no other")


if __name__ == "__main__":
    main()
