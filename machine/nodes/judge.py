"""Judge nodes by what they said and measured: which differ from most, which are slow, which links fail."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Any

from ...system import counted
from ..facts import Finding, Level
from .links import Link

#: A link or a disk that has less than this share of what the others have is slow.
_SLOW = 1 / 3
#: A latency this many times the others', and this many seconds more, is worth a look.
_LATE, _LATE_SECONDS = 5.0, 0.5e-3
_LEAST_ROOM, _GB, _GBIT = 2e9, 1e9, 1e9 / 8
_SECONDS_APART = 1.0
_REPLACE = "Leave the node out, or have it repaired"


@dataclass(frozen=True)
class Preflight:
    """Hold what the nodes said of themselves, the links between them, the findings about both, and the names
    of the nodes that should not be used.
    """

    nodes: list[dict[str, Any]]
    links: list[Link]
    findings: list[Finding]
    exclude: list[str]


def judge(cards: list[dict[str, Any]], links: list[Link], *, gbits: float | None = None) -> Preflight:
    """Judge nodes by their cards (see ``node_card``) and by the links between them.

    A link is slow beside the others, or if it has less than half of ``gbits``, 10^9 bits a second. A node
    whose links are mostly slow or broken is at fault, where three or more tell which end it is.
    """
    names = [str(card["name"]) for card in cards]
    findings = [*_alike(cards, names), *_folders(cards, names)]
    findings += [*_links(links, names, gbits), *_clocks(links, names)]
    exclude = dict.fromkeys(node for _, node in findings if node is not None)
    return Preflight(cards, links, [finding for finding, _ in findings], [*exclude])


#: A finding, and the name of the node that should be left out because of it.
_Found = tuple[Finding, str | None]


def _alike(cards: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[_Found]:
    """Compare versions and GPUs; the minority is at fault, if there is one."""
    for key in dict.fromkeys(key for card in cards for key in card["facts"]):
        values = [card["facts"].get(key, "unknown") for card in cards]
        (common, count), *_ = Counter(values).most_common()
        if count == len(cards):
            yield Finding("alike", key, "ok", f"{common} on all {counted(count, 'node')}"), None
            continue
        todo = "Give all nodes the same packages, or the same container"
        for name, value in zip(names, values, strict=True):
            if value != common:
                differs = f"{value}; {common} on {count} of {counted(len(cards), 'node')}"
                finding = Finding("alike", f"{key} on {name}", "fault", differs, todo)
                yield finding, name if 2 * count > len(cards) else None


def _folders(cards: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[_Found]:
    for folder in cards[0]["folders"]:
        disks = [card["folders"][folder] for card in cards]
        rates = [disk["written"] for disk in disks if not disk["error"]]
        usual = median_high(rates) if rates else 0.0
        for name, disk in zip(names, disks, strict=True):
            text = (
                f"writes {disk['written'] / _GB:.2f} GB/s, reads {disk['read'] / _GB:.2f} GB/s, "
                f"{disk['free'] / _GB:.1f} GB free"
            )
            todo, bad = "", True
            if disk["error"]:
                text = f"cannot be written to: {disk['error']}"
                todo = "Mount it there, or choose a folder that all nodes can write to"
            elif disk["written"] < _SLOW * usual:
                text, todo = f"{text}; {usual / _GB:.2f} GB/s elsewhere", _REPLACE
            else:
                todo = "Make room, or choose another disk" if disk["free"] < _LEAST_ROOM else ""
                bad = False
            level: Level = "fault" if bad else "warning"
            yield Finding.unless("folders", f"{folder} on {name}", text, todo, level), name if bad else None


def _links(links: Sequence[Link], names: Sequence[str], gbits: float | None) -> Iterator[_Found]:
    if not links:
        return
    best = [max((link.rate for link in _of(links, node)), default=0.0) for node in range(len(names))]
    least = max(_SLOW * median_high(best), 0.5 * (gbits or 0.0) * _GBIT)
    bad = [link for link in links if link.error or link.rate < least]
    # The ends share a bad link: the node that has most of them, more than half of its links, is at fault.
    counts = [len(_of(bad, node)) for node in range(len(names))]
    many = max((len(names) - 1) // 2 + 1, *counts)
    guilty = [node for node, count in enumerate(counts) if count == many and len(names) > 2]
    usual_rate = _rate(median_high(best))
    for node in guilty:
        own = _of(bad, node)
        broken = [link.error for link in own if link.error]
        cause = broken[0] if broken else _rate(median_low([link.rate for link in own]))
        reason = f"{len(own)} of {len(names) - 1} links are broken or slow: {cause}; {usual_rate} elsewhere"
        yield Finding("links", names[node], "fault", reason, _REPLACE), names[node]
    usual = median_low([link.latency for link in links if not link.error] or [0.0])
    for link in links:
        text, todo = link.error or f"{_rate(link.rate)}, {link.latency * 1e6:,.0f} us", ""
        if link in bad:
            text += "" if link.error else f"; expected {_rate(least)} or more"
            todo = "Check cables, the switch and NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME on both nodes"
        elif link.latency > _LATE * usual + _LATE_SECONDS:
            text, todo = f"{text}; {usual * 1e6:,.0f} us elsewhere", "Check what else uses the link"
        check = f"{names[link.first]} - {names[link.second]}"
        yield Finding.unless("links", check, text, todo, "fault" if link in bad else "warning"), None


def _clocks(links: Sequence[Link], names: Sequence[str]) -> Iterator[_Found]:
    """Compare clocks by the first node's links; the middle one is right."""
    ahead = {link.second: link.ahead for link in links if link.first == 0 and not link.error} | {0: 0.0}
    right = median_low(ahead.values())
    far = {node: value - right for node, value in ahead.items() if abs(value - right) > _SECONDS_APART}
    for node, seconds in sorted(far.items()):
        todo = "Start chrony there: logs are compared by their times"
        yield Finding("clock", names[node], "warning", f"{seconds:+.1f} s from the others", todo), None
    if not far and len(ahead) > 1:
        most = max(abs(value - right) for value in ahead.values())
        yield Finding("clock", "all nodes", "ok", f"within {most * 1e3:.1f} ms"), None


def _of(links: Sequence[Link], node: int) -> list[Link]:
    return [link for link in links if node in (link.first, link.second)]


def _rate(rate: float) -> str:
    return f"{rate / _GB:.3g} GB/s"
