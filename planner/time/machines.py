"""Describe the machines that a step can be timed for: the makers' figures, and the share that is reached.

Rates are of one device: FLOP/s without sparsity, bytes a second of its memory, bytes a second in one
direction of its links. ``MACHINES`` holds the makers' figures; the share of them that is reached is an
``Efficiency``, which says where it comes from. The FLOP/s in bf16 are those that MFU is computed with
(``simulation/model_flops.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...layers import Checkpointing
from ...parallel_state import BadInput
from ...simulation.model_flops import peak_named


@dataclass(frozen=True, slots=True)
class Link:
    """State a link of one device: ``rate`` in bytes a second in one direction, and ``latency``, the seconds
    that each message takes in addition.
    """

    name: str
    rate: float
    latency: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """State the shares of the makers' figures that are reached, and the ``source`` of these shares.

    ``products``, ``attention``: shares of the FLOP/s. ``memory``: share of the memory's bytes a second,
    reached by operators that mostly read and write. ``launch``: seconds that the host needs to start any
    operator.

    A CPU has four more. Three are in seconds, by the mode of activation checkpointing: ``again``, what the
    host does to compute a block again, for each operator of its forward; ``collectives``, what each
    collective takes more inside a block than alone, because threads wake up and ranks come late;
    ``exchanges``, the same for those around a ring, with the operators that each adds to attention.
    ``groups`` are by the kind of collective with which data ranks gather or sum a group of parameters.
    """

    products: float
    attention: float
    memory: float
    launch: float
    source: str
    #: By the kind of collective; ``""`` is for every other kind.
    links: Mapping[str, float] = field(default_factory=lambda: {"": 0.8})
    again: Mapping[Checkpointing, float] = field(default_factory=dict)
    collectives: Mapping[Checkpointing, float] = field(default_factory=dict)
    exchanges: Mapping[Checkpointing, float] = field(default_factory=dict)
    groups: Mapping[str, Link] = field(default_factory=dict)

    def link(self, kind: str) -> float:
        """Return the share of a link that this kind of collective reaches."""
        return self.links.get(kind, self.links[""])


#: None of these figures is fitted to a training step: a step is what they predict.
ASSUMED = Efficiency(
    products=0.75,
    attention=0.5,
    memory=0.85,
    launch=5e-6,
    source="assumed: not measured on this device",
)
#: FlashAttention-2, which torch calls, "achieves only 35% utilization on the H100" (Shah et al. 2024).
HOPPER = replace(
    ASSUMED,
    attention=0.35,
    source="attention as published for its kernel (Shah et al. 2024); products, copies, links and launches "
    "assumed: not measured on this device",
)
#: The products of a training step, 121.5 TFLOP in 162 ms, and a copy, alone on the device: one H100
#: (docs/performance.md). One product of 8192 x 8192 x 8192 reaches 5 % more.
H100 = replace(
    HOPPER,
    products=750 / 989,
    memory=2.98 / 3.35,
    source="products measured in a step, and a copy, on one H100; attention as published for its kernel "
    "(Shah et al. 2024); links and launches assumed",
)


@dataclass(frozen=True)
class Machine:
    """Describe nodes of equal devices. ``peaks``: FLOP/s by the name of a dtype. ``memory`` in bytes.

    ``inside`` joins the ``gpus`` of a node, ``between`` joins nodes, for each device. ``watts``: the most
    that a device draws; hosts, network and cooling are not in it.
    """

    name: str
    memory: float
    peaks: Mapping[str, float]
    bandwidth: float
    inside: Link
    between: Link
    gpus: int
    watts: float
    source: str
    efficiency: Efficiency = ASSUMED
    #: Whether the host launches operators ahead of the device, so that launches, sending and work overlap.
    #: A CPU does one after the other: its ranks take all cores.
    asynchronous: bool = True
    #: Bytes a second between a device and its host, in one direction.
    host: float = 25e9
    #: Words of torch's name of the device.
    words: str = field(default="", compare=False)
    #: The maker's FLOP/s in bf16, where ``peaks`` are measured; MFU is told against it.
    stated: float | None = None

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s of products in ``dtype``; raises ``BadInput`` for one that the table has not."""
        if dtype not in self.peaks:
            raise BadInput(
                "machine", dtype, expected=f"one of {', '.join(self.peaks)} on {self.name}", found=dtype
            )
        return self.peaks[dtype]


def _infiniband(gigabits: float) -> Link:
    return Link(f"InfiniBand {gigabits:g} Gbit/s", gigabits / 8 * 1e9, 5e-6)


def _nvlink(gigabytes: float) -> Link:
    return Link(f"NVLink {gigabytes:g} GB/s", gigabytes * 1e9, 2e-6)


_PCIE = Link("PCIe 4.0 x16", 32e9, 5e-6)


def _row(name: str, words: str, **values: Any) -> Machine:
    peak = peak_named(words)
    assert peak is not None, words
    other = values.pop("peaks")
    return Machine(name, peaks={"bfloat16": peak, "float16": peak, **other}, words=words, **values)


#: Sources: the data sheets "NVIDIA H100 Tensor Core GPU", "NVIDIA H200 Tensor Core GPU", "NVIDIA DGX B200",
#: "NVIDIA A100 80GB", "NVIDIA L40S", the white paper "NVIDIA Ada GPU Architecture", and "AMD Instinct MI300X
#: Accelerator". Networks are those of the makers' own eight-GPU servers, or what such servers usually have.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _row(
            "h100-80gb", "H100", memory=80e9, peaks={"float32": 67e12, "float8": 1979e12}, bandwidth=3.35e12,
            inside=_nvlink(450), between=_infiniband(400), gpus=8, watts=700, host=64e9,
            efficiency=H100,
            source="NVIDIA H100 Tensor Core GPU data sheet, SXM; network of DGX H100",
        ),
        _row(
            "h200", "H200", memory=141e9, peaks={"float32": 67e12, "float8": 1979e12}, bandwidth=4.8e12,
            inside=_nvlink(450), between=_infiniband(400), gpus=8, watts=700, host=64e9, efficiency=HOPPER,
            source="NVIDIA H200 Tensor Core GPU data sheet, SXM; network of DGX H200",
        ),
        _row(
            "b200", "B200", memory=180e9, peaks={"float32": 75e12, "float8": 4500e12}, bandwidth=8e12,
            inside=_nvlink(900), between=_infiniband(400), gpus=8, watts=1000, host=64e9,
            source="NVIDIA DGX B200 data sheet, an eighth of the system",
        ),
        _row(
            "a100-80gb", "A100", memory=80e9, peaks={"float32": 19.5e12}, bandwidth=2.039e12,
            inside=_nvlink(300), between=_infiniband(200), gpus=8, watts=400, host=32e9,
            source="NVIDIA A100 80GB data sheet, SXM; network of DGX A100",
        ),
        _row(
            "l40s", "L40S", memory=48e9, peaks={"float32": 91.6e12, "float8": 733e12}, bandwidth=864e9,
            inside=_PCIE, between=Link("Ethernet 100 Gbit/s", 12.5e9, 10e-6), gpus=8, watts=350, host=32e9,
            source="NVIDIA L40S data sheet; network assumed: 100 Gbit/s for each GPU",
        ),
        _row(
            "rtx-4090", "RTX 4090", memory=24e9, peaks={"float32": 82.6e12, "float8": 330.3e12},
            bandwidth=1.008e12, inside=_PCIE, between=Link("Ethernet 25 Gbit/s", 3.125e9, 20e-6), gpus=8,
            watts=450, host=32e9,
            source="NVIDIA Ada GPU Architecture white paper, sums in fp32; network assumed: 25 Gbit/s each",
        ),
        _row(
            "mi300x", "MI300X", memory=192e9, peaks={"float32": 163.4e12, "float8": 2614.9e12},
            bandwidth=5.3e12, inside=Link("Infinity Fabric 448 GB/s", 448e9, 2e-6), between=_infiniband(400),
            gpus=8, watts=750, host=64e9,
            source="AMD Instinct MI300X data sheet, seven links of 64 GB/s; network assumed: 400 Gbit/s each",
        ),
    )
}  # fmt: skip


def machine_named(name: str, *, gpus_per_node: int | None = None) -> Machine:
    """Return a machine of the table, with another number of GPUs a node if given; ``BadInput`` for others."""
    if name not in MACHINES:
        raise BadInput(
            "machine", "--gpu-type", expected=f"one of {', '.join(MACHINES)}", found=repr(name),
            todo="Any other machine: `trilith bench` there, and --machine bench.json",
        )  # fmt: skip
    machine = MACHINES[name]
    return machine if gpus_per_node is None else replace(machine, gpus=gpus_per_node)
