"""Check the host: versions and compilers; memory, cores, limits and clock; the variables that matter."""

import importlib.util
import os
import resource
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from ...system import whole_number
from ...system.machine import memory_available, processor_name, usable_cores
from ..facts import Finding, said_by, versions

_GB = 1e9
#: Below these, something of a run is likely to fail.
_LEAST_MEMORY, _LEAST_SHARED = 4e9, 64e6
#: Limits of the system's: what is limited, its number, what a run needs, and how to raise it.
_LIMITS = [
    ("open files", resource.RLIMIT_NOFILE, 1024, "ulimit -n 65536"),
    ("processes", resource.RLIMIT_NPROC, 1024, "ulimit -u 65536"),
]
_LIMITS_WITH_GPU = [("locked memory", resource.RLIMIT_MEMLOCK, 1 << 30, "ulimit -l unlimited (InfiniBand)")]
#: Variables that change how a run behaves, shown where they are set.
_SHOWN = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "TORCH_COMPILE_DISABLE"),
    *("TORCH_DISTRIBUTED_DEBUG", "GLOO_SOCKET_IFNAME", "HF_HOME", "TMPDIR"),
)
#: Values of variables that do harm.
_HARM = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "Unset it: every kernel waits for the one before",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "Unset it: every collective is compared between ranks first",
    ("NCCL_P2P_DISABLE", "1"): "Unset it, unless GPUs fail to reach each other: NVLink is not used",
    ("NCCL_SHM_DISABLE", "1"): "Unset it, unless shared memory is too small",
    ("TORCH_COMPILE_DISABLE", "1"): "Unset it: compile = true compiles nothing",
}
_FLAGS = ("-std=c++17", "-fopenmp", "-shared", "-fPIC")
_PROGRAM = "#include <vector>\nint main() { std::vector<int> a(3); return int(a.size()) - 3; }\n"


def check_software() -> Iterator[Finding]:
    """Yield the versions, and whether torch.compile will find its compiler."""
    for name, installed in versions().items():
        yield Finding("software", name, "ok", installed)
    build, todo = "for the CPU", ""
    if torch.version.cuda is not None or torch.version.hip is not None:
        build = f"CUDA {torch.version.cuda}"
        if torch.cuda.is_available():
            build += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
            cudnn = torch.backends.cudnn.version()
            build += "" if cudnn is None else f", cuDNN {cudnn}"
    elif shutil.which("nvidia-smi") is not None:
        build += ", on a machine with an NVIDIA driver"
        todo = "Install a CUDA build of torch: see pytorch.org/get-started"
    yield Finding.unless("software", "torch's build", build, todo, "fault")
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++" if shutil.which("g++") else "clang++"]
    text, todo = f"{shutil.which(compiler[0])} compiles C++17 with OpenMP", ""
    if problem := _compile(compiler):
        text, todo = problem, "Install g++ (apt-get install g++), or leave compile = false on a CPU"
    yield Finding.unless("software", "C++ compiler", text, todo)
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            text = "not installed: compile = true will fail on a GPU"
            todo = "pip install triton, in the version that torch names"
        else:
            text, todo = version("triton"), ""
        yield Finding.unless("software", "triton", text, todo)


def _compile(compiler: list[str]) -> str:
    """Compile a small C++ program, as torch's compiler does for a CPU; return what is wrong, if anything."""
    if shutil.which(compiler[0]) is None:
        return f"no {compiler[0]}"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "a.cpp")
        program.write_text(_PROGRAM, encoding="utf-8")
        command = [*compiler, *_FLAGS, str(program), "-o", f"{folder}/a.so"]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler[0]}: {error}"
    last = (process.stderr.strip().splitlines() or ["no message"])[-1]
    return f"{compiler[0]} fails: {last}" if process.returncode else ""


def check_limits() -> Iterator[Finding]:
    """Yield the host's memory and cores, shared memory, limits, and whether its clock is set by others."""
    free, gpu = memory_available(), torch.cuda.is_available()
    text = "not known: the system does not say" if free is None else f"{free / _GB:.1f} GB can be used"
    short = free is not None and free < _LEAST_MEMORY
    todo = "Close other programs, or raise the container's limit" if short else ""
    yield Finding.unless("machine", "memory", text, todo)

    usable, load, name = usable_cores(), os.getloadavg()[0], processor_name()
    text = f"{usable} of {os.cpu_count() or 1} usable{f', {name}' if name else ''}; load {load:.1f}"
    todo = "Other programs are at work: timings will vary; OMP_NUM_THREADS=1 can make ranks much faster"
    yield Finding.unless("machine", "cores", text, todo if load > max(1.0, usable / 2) else "")

    shared = Path("/dev/shm")
    text, todo = "absent", "Mount it: NCCL and worker processes use it"
    if shared.is_dir():
        size = shutil.disk_usage(shared)
        text, todo = f"{size.free / _GB:.2f} of {size.total / _GB:.2f} GB free", ""
        if size.free <= _LEAST_SHARED:
            todo = "In a container: docker run --shm-size=8g"
            todo += " (or --ipc=host). NCCL keeps its buffers there" if gpu else ""
    yield Finding.unless("machine", "/dev/shm", text, todo, "fault" if gpu and shared.is_dir() else "warning")

    for name, number, least, how in _LIMITS + (_LIMITS_WITH_GPU if gpu else []):
        soft, _ = resource.getrlimit(number)
        text = "none" if soft == resource.RLIM_INFINITY else f"{soft:,}"
        todo = f"Raise it: {how}" if soft < least and text != "none" else ""
        yield Finding.unless("machine", f"limit on {name}", text, todo)

    # Logs of several machines are compared by their times.
    answer = said_by("timedatectl", "show", "-p", "NTPSynchronized", "--value", seconds=10)
    text = {"yes": "synchronised", "no": "not synchronised"}.get(answer, "the system does not say")
    todo = "Start chrony or systemd-timesyncd where several machines train together" if answer == "no" else ""
    yield Finding.unless("machine", "clock", text, todo)


def check_variables() -> Iterator[Finding]:
    """Yield the variables that are set and change a run, and those whose value does harm."""
    for name in (*_SHOWN, *sorted(name for name in os.environ if name.startswith("NCCL_"))):
        if (setting := os.environ.get(name)) is not None:
            yield Finding.unless("environment", name, setting, _HARM.get((name, setting), ""))
    threads, cores = os.environ.get("OMP_NUM_THREADS"), usable_cores()
    many = (whole_number(threads or "") or 0) > cores
    todo = f"Set at most {cores}: more threads than cores wait for each other" if many else ""
    text = "not set: trilith gives each rank its share of cores" if threads is None else threads
    yield Finding.unless("environment", "OMP_NUM_THREADS", text, todo)
