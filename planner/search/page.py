"""Write what searches found as one HTML page: no script, no other file, no network."""

from collections.abc import Sequence
from html import escape

from ...runs.report.html import folded, table, whole_page
from .find import Found
from .pictures import memory_of_stages, step_of_rank, sweep, timetable_of
from .report import HEAD, asked, facts, left_out, recipe_toml, rows, searched
from .strategy import reasons
from .sweep import asked_in_sweep, found_ones, sweep_head, sweep_rows, sweep_warnings


def make_page(search: Found) -> str:
    """Return the page of one search."""
    request = search.request
    sentences = [asked(request), *reasons(search)]
    sentences += [f"{word[0].upper()}{word[1:]}: {line}." for word, line in facts(search)]
    body = [
        f"<h1>Layouts of {escape(request.name)}</h1>",
        "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences),
        "<h2>The fastest layouts</h2>",
        table(rows(search), head=HEAD, text=1),
        "<p>Seconds are those of a step, waits the share of it in which a pipeline rank is idle, "
        "and GB those of the heaviest rank.</p>",
        "<h2>Memory of the fastest layout</h2>",
        f"<figure><figcaption>By pipeline rank</figcaption>{memory_of_stages(search)}</figure>",
        *_schedule(search),
        "<h2>Step of the fastest layout</h2>",
        '<figure class="broad"><figcaption>What the busiest rank spends a step on</figcaption>'
        f"{step_of_rank(search)}</figure>",
        "<p>Exchanges are drawn as far as nothing is computed beside them. Inside a forward or a backward "
        "the parts follow each other here; in truth each block has its own.</p>",
        "<h2>The other layouts</h2>",
        f"<p>Ruled out: {escape(searched(search))}.</p>",
        table(left_out(search), head=("", "reason", "layouts", "example")),
        folded("The recipe", f"<pre>{escape(recipe_toml(search))}</pre>"),
    ]
    return whole_page(f"trilith plan {request.name}", "".join(body), command="trilith plan")


def _schedule(search: Found) -> list[str]:
    best = search.best[0]
    if best.choice.layout.pipeline == 1:
        return []
    return [
        "<h2>Timetable of the fastest layout</h2>",
        f'<figure class="broad"><figcaption>When each pipeline rank computes</figcaption>'
        f"{timetable_of(search)}</figure>",
    ]


def make_sweep_page(results: Sequence[Found]) -> str:
    """Return the page of several searches: how tokens a second grow with GPUs or tokens of a row."""
    searches = found_ones(results)
    sentences = [f"Warning: {line}." for line in sweep_warnings(results)]
    sentences += [f"{search.error}." for search in results if search.error is not None]
    name = searches[0].request.name
    body = [
        f"<h1>Layouts of {escape(name)}</h1>",
        f"<p>{escape(asked_in_sweep([search.request for search in results]))}</p>",
        f"<figure><figcaption>Tokens a second of the fastest layouts</figcaption>{sweep(searches)}</figure>",
        table(sweep_rows(results), head=sweep_head(results), text=3),
        "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences),
    ]
    return whole_page(f"trilith plan {name}", "".join(body), command="trilith plan")
