"""Searches for garbage when told. Each process that a test starts imports this file: so no torch is here."""

import gc
import subprocess
import sys
import weakref

import pytest
from trilith.system import manual_gc, no_garbage_search, search_garbage_rarely


def in_a_new_process(check):
    """Return a test that calls ``check(searches)`` in a new process, where few objects are searched.

    ``searches`` holds the generation of each search; Python searches after ten new objects.
    """

    def run():
        searches = []
        gc.set_threshold(10, 2, 10)
        gc.callbacks.append(lambda phase, info: phase == "start" and searches.append(info["generation"]))
        check(searches)

    def test():
        code = f"import runpy; runpy.run_path({__file__!r})[{check.__name__!r}].run()"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    test.run = run
    return test


def make_objects():
    return [[number] for number in range(1000)]


class Node:
    """Be garbage that only a search finds."""


def seen_by_a_search(objects):
    """Count the objects that are not hidden from a search."""
    seen = set(map(id, gc.get_objects()))
    return sum(id(one) in seen for one in objects)


@in_a_new_process
def test_nothing_else_searches_until_the_end(searches):
    make_objects()
    assert len(searches) > 5
    with manual_gc() as search:
        searches.clear()
        make_objects()
        assert searches == []
        node = Node()
        node.itself = node
        gone = weakref.ref(node)
        del node
        search(True)
        assert gone() is None, "garbage is freed, and not hidden"
        search(False)
        assert searches == [2, 0]
        make_objects()
        assert searches == [2, 0]
    make_objects()
    assert len(searches) > 5


@in_a_new_process
def test_the_first_search_hides_what_is_there_until_the_end_whatever_ends_it(searches):
    here = make_objects()
    for error in (None, ValueError()):
        try:
            with manual_gc() as search:
                search(False)
                assert gc.get_freeze_count() == 0 and seen_by_a_search(here) == 1000
                search(True)
                hidden = gc.get_freeze_count()
                assert hidden > 1000 and seen_by_a_search(here) == 0
                new = make_objects()
                search(True)
                # Not equal: an object that another thread drops is freed, hidden or not.
                assert gc.get_freeze_count() <= hidden
                assert (seen_by_a_search(here), seen_by_a_search(new)) == (0, 1000)
                if error is not None:
                    raise error
        except ValueError:
            pass
        assert gc.get_freeze_count() == 0 and gc.isenabled() and seen_by_a_search(here) == 1000


@in_a_new_process
def test_what_the_caller_has_hidden_stays_hidden(searches):
    gc.freeze()
    hidden = gc.get_freeze_count()
    with manual_gc() as search:
        search(True)
        assert gc.get_freeze_count() <= hidden
    assert hidden - 100 < gc.get_freeze_count() <= hidden


@in_a_new_process
def test_what_a_template_has_hidden_is_not_counted_and_stays_hidden(searches):
    search_garbage_rarely()
    hidden = gc.get_freeze_count()
    with pytest.MonkeyPatch.context() as patch, manual_gc() as search:
        patch.setattr(gc, "get_freeze_count", None)  # it walks over all that is hidden
        search(True)
    assert hidden - 100 < gc.get_freeze_count() <= hidden


@in_a_new_process
def test_a_caller_that_never_searches_has_it_so_afterwards(searches):
    gc.disable()
    try:
        with manual_gc() as search:
            search(True)
        assert not gc.isenabled()
    finally:
        gc.enable()


@in_a_new_process
def test_what_is_made_meanwhile_is_not_searched_and_can_be_hidden(searches):
    with no_garbage_search():
        before = len(searches)
        kept = make_objects()
        assert len(searches) == before and len(kept) == 1000
    hidden = gc.get_freeze_count()
    with no_garbage_search(hide=True):
        pass
    assert gc.isenabled() and gc.get_freeze_count() > hidden + 1000
