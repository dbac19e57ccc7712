"""List the environment variables that a job on many hosts usually needs, each with its reason."""

from collections.abc import Iterator

#: (name, value, why, only with GPUs)
VARIABLES = (
    ("OMP_NUM_THREADS", "1", "one thread a rank; more only where a rank has cores to spare", False),
    ("TRITON_CACHE_DIR", "/tmp/triton", "compiled kernels on the host's own disk", True),
    ("NCCL_DEBUG", "WARN", "say why a connection fails", True),
    ("TORCH_FR_BUFFER_SIZE", "2000", "the flight recorder keeps the last 2,000 collectives", True),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "and writes them to a file when one of them times out", True),
)
#: The same, to be set by whoever knows the network: written as comments.
OPTIONAL = (
    ("NCCL_SOCKET_IFNAME", "eth0", "the interface by which hosts meet, if it is not found", True),
    ("GLOO_SOCKET_IFNAME", "eth0", "the same for gloo, which saves and signals use", False),
    ("NCCL_IB_HCA", "mlx5", "the InfiniBand cards to use", True),
    ("FI_PROVIDER", "efa", "on AWS with EFA", True),
)


def variables(*, gpu: bool) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and reason of each variable that the file sets."""
    return ((name, value, why) for name, value, why, only in VARIABLES if gpu or not only)


def optional(*, gpu: bool) -> Iterator[tuple[str, str, str]]:
    """Yield name, example value and reason of each variable that depends on the network."""
    return ((name, value, why) for name, value, why, only in OPTIONAL if gpu or not only)
