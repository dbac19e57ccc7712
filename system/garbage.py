"""Hold Python's search for garbage (in cycles of objects) back where nearly everything that is made stays."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Whether ``search_garbage_rarely`` was called, here or in a process that this one is a fork of.
_hidden = False


@contextmanager
def no_garbage_search(*, hide: bool = False) -> Iterator[None]:
    """Search for no garbage meanwhile. Objects that no other object refers to are freed all the same.

    Imports and plans make a million objects that stay. Each search looks at them again, which took a quarter
    of a dry run's time. The next search, which comes at once, does so too, unless ``hide`` puts all that is
    here out of its sight; for commands that nearly end the process.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if hide:
            gc.freeze()
        if was_on:
            gc.enable()


@contextmanager
def manual_gc() -> Iterator[Callable[[bool], None]]:
    """Yield a function that searches for garbage; meanwhile Python does so at no other time.

    Python searches when it has made many objects, which is at another moment on each rank, and all ranks then
    wait for the one that searches. ``search(True)`` looks at all objects, ``search(False)`` at those made
    since the last search. The first search of all puts what it found alive out of sight of the later ones,
    unless the caller has already done so with objects of its own, which would come back too at the end.
    """
    searched = hides = False

    def search(everywhere: bool) -> None:
        nonlocal searched, hides
        gc.collect(2 if everywhere else 0)
        if everywhere and not searched:
            searched = True
            # To count what is hidden takes 40 ms where that is all of torch.
            if not _hidden and gc.get_freeze_count() == 0:
                hides = True
                gc.freeze()

    with no_garbage_search():
        try:
            yield search
        finally:
            if hides:
                gc.unfreeze()


def search_less_often() -> None:
    """Search for garbage less often than Python would; for the begin of a process that imports torch.

    Imports make half a million objects that stay. The searches took a quarter of a command's start.
    """
    gc.set_threshold(50_000, 20, 50)


def search_garbage_rarely() -> None:
    """Let no later search of this process, or of its forks, look at what is here by now; search less often.

    With torch and transformers imported and all tests collected, a search of all objects took 0.15 s, and at
    Python's own thresholds the searches took a tenth of the time of a file of tests.
    """
    global _hidden
    gc.collect()
    gc.freeze()
    _hidden = True
    search_less_often()
