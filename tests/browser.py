"""Reports in a real browser: ``make browser``, where Chromium is installed. Not part of ``make check``.

Drives a headless Chromium through its pipe, on a phone and a wide screen, in light and dark: nothing is
fetched, nothing is complained about, nothing is wider than the screen, text stands out from its ground and is
large enough to read. Screenshots are left in the folder that is printed.
"""

import base64
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from trilith.runs.report.page import make_report
from trilith.runs.report.record import RunRecord

SCREENS = {"phone": (360, 800), "desktop": (1280, 900)}
SCHEMES = ("light", "dark")

#: What is wrong on the page, as a list of sentences.
LOOK = Path(__file__).with_suffix(".js").read_text()


class Browser:
    """Drive a headless Chromium over its DevTools pipe."""

    def __init__(self, read, write):
        self._read, self._write, self._left, self._count = read, write, b"", 0
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method, **parameters):
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def evaluate(self, expression, **how):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, **how)
        return found["result"].get("value")

    def complaints(self, is_own, kinds):
        """Yield what was fetched that is not the page's own, and what was complained about."""
        for event in self.events:
            url = event.get("params", {}).get("request", {}).get("url", "")
            if event.get("method") == "Network.requestWillBeSent" and not is_own(url):
                yield f"fetched {url}"
            if event.get("method") in kinds:
                yield f"complained: {event['params']}"

    def wait(self, method):
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next())

    def _next(self):
        while b"\0" not in self._left:
            self._left += os.read(self._read, 1 << 20)
        first, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(first))


@contextmanager
def chromium():
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.exit("No Chromium here: apt-get install chromium, or run this where there is one")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def inherit():
        # Chromium reads file 3 and writes file 4; moved up first, so that neither overwrites the other.
        high_in, high_out = os.dup2(theirs_in, 30), os.dup2(theirs_out, 31)
        os.dup2(high_in, 3)
        os.dup2(high_out, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            [program, *options, "--remote-debugging-pipe"],
            pass_fds=(3, 4, theirs_in, theirs_out),
            preexec_fn=inherit,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            yield Browser(ours_in, ours_out)
        finally:
            process.kill()
            process.wait()


@contextmanager
def opened(uri, screen, scheme):
    """Open a page on this screen, in a browser of its own."""
    with chromium() as browser:
        width, height = SCREENS[screen]
        for domain in ("Network", "Log", "Runtime", "Page"):
            browser.call(f"{domain}.enable")
        screen_is = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": screen == "phone"}
        browser.call("Emulation.setDeviceMetricsOverride", **screen_is)
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", features=wanted)
        browser.call("Emulation.setFocusEmulationEnabled", enabled=True)
        browser.call("Page.navigate", url=uri)
        browser.wait("Page.loadEventFired")
        yield browser


def look(page, screen, scheme, picture):
    """Return everything that is wrong with the page on this screen."""
    with opened(page.as_uri(), screen, scheme) as browser:
        wrong = [*map(str, browser.evaluate(LOOK))]
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        if (ground == "rgb(255, 255, 255)") != (scheme == "light"):
            wrong.append(f"{scheme} is {ground}")
        shot = browser.call("Page.captureScreenshot", captureBeyondViewport=True)
        picture.write_bytes(base64.b64decode(shot["data"]))
        kinds = "Log.entryAdded", "Runtime.exceptionThrown"
        wrong += browser.complaints(lambda url: url == page.as_uri() or url.startswith("data:"), kinds)
    return wrong


def example(name, steps):
    """Return the record of a run with everything that a report shows."""
    lines = [
        {"step": n, "loss": 2 + 3 * math.exp(-n / 90), "grad_norm": 0.4 + 1e4 * math.exp(-n / 9)}
        | {"seconds": 0.3}
        | {"lr": 3e-4 * (1 - n / steps), "tokens": 8192, "tokens_per_second": 21_000.0 + 900 * math.sin(n)}
        | {"mfu_causal": 0.41, "mfu_full": 0.46, "memory": 2**31}
        | ({"evaluation_loss": 2.1 + 3 * math.exp(-n / 90)} if n % 40 == 39 else {})
        | ({"skipped": "overflow"} if n == 70 else {})
        for n in range(steps)
    ]
    begun = {"time": 1.7e9, "layout": "tensor 2, pipeline 2", "world": 4, "recipe": {"steps": steps}}
    again = begun | {"checkpoint": "step-00000100", "written_by": "tensor 2, pipeline 2", "world": 1}
    events = [
        begun | {"event": "started", "step": 0, "weights": "a/very/long/path/" * 8},
        again | {"event": "resumed", "step": 100, "layout": "one rank"},
        {"event": "failed", "step": steps, "time": 1.7e9, "why": "no reason " * 30},
    ]
    return RunRecord(name, lines, events, f"{name}/checkpoints/step-00000100")


def main():
    folder = Path(tempfile.mkdtemp(prefix="trilith-browser-"))
    pages = {
        "one": [example("run", 300)],
        "compared": [example(f"runs/number-{n}", 200 + n) for n in range(4)],
    }
    bad = 0
    for name, runs in pages.items():
        page = folder / f"{name}.html"
        page.write_text(make_report(runs), encoding="utf-8")
        for screen in SCREENS:
            for scheme in SCHEMES:
                wrong = look(page, screen, scheme, folder / f"{name}-{screen}-{scheme}.png")
                print(f"{name} {screen} {scheme}: {'; '.join(wrong[:5]) or 'ok'}")
                bad += bool(wrong)
    print(f"screenshots: {folder}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
