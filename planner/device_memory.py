"""Compare what a rank needs with the memory of a device: what fits, and what torch's allocator reserves."""

#: Bytes of a GPU for its context, its libraries' workspaces and NCCL. Assumed, not measured.
RUNTIME = 3_000_000_000

#: Share of what torch's caching allocator reserves on a GPU that no tensor has at the peak: what GMLake saves
#: of it in the mean of eight language models on A100s (Guo et al., ASPLOS 2024, arXiv 2401.08156: 15 %, at
#: most 33 %). Steps of one H100 left 0 to 6 % unused (docs/performance.md). With
#: ``PYTORCH_ALLOC_CONF=expandable_segments:True`` torch leaves less unused.
FRAGMENTATION = 0.15
#: The variable with which torch's allocator leaves less unused.
LESS_UNUSED = "PYTORCH_ALLOC_CONF=expandable_segments:True"


def unit_of(largest: float) -> tuple[str, float]:
    """Return the unit in which to print bytes of which ``largest`` are the most, and its size in bytes."""
    return ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)


def runtime_of(device: str) -> int:
    """Return the bytes of a device that are no tensors': 0 on a CPU."""
    return RUNTIME if device == "cuda" else 0


def usable(memory: float, headroom: float) -> int:
    """Return the bytes of a device that a rank may use, the same in a search and in a dry run."""
    return int(memory * (1 - headroom))


def reserved_bytes(allocated: int) -> int:
    """Return the bytes that torch's allocator reserves for ``allocated`` ones, by ``FRAGMENTATION``."""
    return int(allocated / (1 - FRAGMENTATION))


def reserved_words(reserved: int, memory: float | None) -> str:
    """Return one line about the bytes reserved of a GPU's ``memory``, and what the figure rests on."""
    line = f"about {reserved / 1e9:,.1f} GB, if {FRAGMENTATION:.0%} of what torch's allocator takes is unused"
    if memory is None or reserved <= memory:
        return line
    excess = f"more than the GPU's {memory / 1e9:,.0f} GB: set {LESS_UNUSED}"
    return f"{line}; {excess}"
