"""Make figures of matplotlib that stand on pages of light and dark paper, and write them as inline SVG."""

import io
import re
from typing import Any

#: Colours that can be read on light and dark paper, and that of text.
COLOURS = ("#3b82c4", "#b0802f", "#4d9a5b", "#a05195", "#c2544f", "#3aa0a0", "#8a8f3c", "#7a6fd0", "#8a6d5b")
INK = "#7a8088"


def new_figure(height: float, *, width: float = 8) -> tuple[Any, Any]:
    """Return a figure of so many inches, and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text stays text: it can be searched, and needs no font of this machine.
    matplotlib.rcParams.update({"svg.fonttype": "none", "text.color": INK, "axes.labelcolor": INK})
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    return figure, axes


def svg_of(figure: Any, name: str | None = None) -> str:
    """Return the figure as an element of a page, and close it. Nothing in it names an address.

    With ``name``, which no other figure of the page has, it is the same text each time.
    """
    import matplotlib
    from matplotlib import pyplot

    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    text = written.getvalue()
    addresses = r"<metadata>.*?</metadata>| xmlns(?::xlink)?=\"[^\"]*\""
    return re.sub(addresses, "", text[text.index("<svg") :], flags=re.DOTALL)
