"""Check versions, and the compilers that ``compile = true`` needs."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from ..facts import Finding, versions

GROUP = "software"
_PROGRAM = "#include <vector>\nint main() { std::vector<int> a(3); return int(a.size()) - 3; }\n"


def check_software() -> Iterator[Finding]:
    """Yield the versions, and whether torch.compile will find its compiler."""
    for name, installed in versions().items():
        todo = "" if installed else f"pip install {name}"
        yield Finding.unless(GROUP, name, installed or "not installed", todo, "fault")
    yield _build()
    yield _compiler()
    if torch.cuda.is_available():
        yield _triton()


def _build() -> Finding:
    """Report for which devices this torch was built."""
    if torch.version.cuda is None and torch.version.hip is None:
        if shutil.which("nvidia-smi") is not None:
            text = "for the CPU, on a machine with an NVIDIA driver"
            todo = "Install a CUDA build of torch: see pytorch.org/get-started"
            return Finding(GROUP, "torch's build", "fault", text, todo)
        return Finding(GROUP, "torch's build", "ok", "for the CPU")
    nccl = ""
    if torch.cuda.is_available():
        nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        if (cudnn := torch.backends.cudnn.version()) is not None:
            nccl += f", cuDNN {cudnn}"
    return Finding(GROUP, "torch's build", "ok", f"CUDA {torch.version.cuda}{nccl}")


def _compiler() -> Finding:
    """Compile a small C++ program, as torch's compiler does for a CPU."""
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(words[0]) is None and not os.environ.get("CXX"):
        words = ["clang++"]
    todo = "Install g++ (apt-get install g++), or leave compile = false on a CPU"
    if shutil.which(words[0]) is None:
        return Finding(GROUP, "C++ compiler", "warning", f"no {words[0]}", todo)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "a.cpp")
        program.write_text(_PROGRAM, encoding="utf-8")
        command = [*words, "-std=c++17", "-fopenmp", "-shared", "-fPIC", str(program), "-o", f"{folder}/a.so"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Finding(GROUP, "C++ compiler", "warning", f"{words[0]}: {error}", todo)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding(GROUP, "C++ compiler", "warning", f"{words[0]} fails: {last}", todo)
    return Finding(GROUP, "C++ compiler", "ok", f"{shutil.which(words[0])} compiles C++17 with OpenMP")


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        text = "not installed: compile = true will fail on a GPU"
        todo = "pip install triton, in the version that torch names"
        return Finding(GROUP, "triton", "warning", text, todo)
    return Finding(GROUP, "triton", "ok", version("triton"))
