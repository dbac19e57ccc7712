"""A user's regular expressions come to an end: decided as ``re`` decides, or refused within a limit."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refusal_of
from trilith.models import LoraConfig, patterns
from trilith.parallel_state import BadInput
from trilith.recipes.section import ParameterGroup
from trilith.training.optimizer import assign

#: A name on which a pattern that tries all ways needs longer than anybody lives.
NAME = "model.layers.0.self_attn." + "a" * 60 + "!"

atoms = st.sampled_from(["a", "[a-z]", ".", "\\w", "(a|a)", "(?:a|[a-z])", "a?"])
endless = st.builds("({}{}){}{}".format, atoms, st.sampled_from("+*"), st.sampled_from("+*"), st.just("$"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(patterns, "PATIENCE", 0.1)
    patterns.compiled.cache_clear()


def decided(pattern):
    """Return whether a group of this pattern takes the name; ``None`` if the pattern is refused as slow."""
    try:
        return bool(assign([ParameterGroup(match=pattern)], {NAME: (), "other!": ()}))
    except BadInput as error:
        return None if "takes longer" in str(error) else False


@settings(max_examples=12, deadline=None)
@given(pattern=endless, prefix=st.sampled_from(["", "attn.", "^model.*"]))
def test_a_repetition_in_a_repetition_ends_in_an_answer_or_a_refusal(pattern, prefix):
    patterns.compiled.cache_clear()
    began = time.process_time()
    decided(prefix + pattern)
    # The limit itself is a tenth of a second; without it, years.
    assert time.process_time() - began < 20


def test_patterns_without_an_end_are_refused_wherever_a_user_may_write_one():
    pattern = "(.*a+)+b"
    assert decided(pattern) is None
    for adapters in (
        {"target_modules": pattern},
        {"target_modules": [NAME], "exclude_modules": pattern},
        {"target_modules": [NAME.rpartition(".")[2]], "layers_to_transform": (0,), "layers_pattern": pattern},
    ):
        assert "decided within" in refusal_of(lambda adapters=adapters: LoraConfig(**adapters).targets(NAME))
    by_pattern = LoraConfig(rank_pattern={pattern: 4}, alpha_pattern={pattern: 4})
    for number_of in (by_pattern.rank_of, by_pattern.alpha_of):
        assert "decided within" in refusal_of(lambda number_of=number_of: number_of(NAME))


def test_the_time_is_that_of_all_names_together(monkeypatch):
    monkeypatch.setattr(patterns, "PATIENCE", 0.5)
    pattern = patterns.Pattern("(a+)+$")
    began = time.process_time()
    with pytest.raises(BadInput, match="decided within"):
        for _ in range(10_000):
            pattern.find("match", "a" * 20 + "!")  # each takes a part of the time
    assert time.process_time() - began < 20


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=100, deadline=None)
@given(pattern=st.text("ab.*+?()[]|\\d{}1,", max_size=8), name=st.text("ab.1", max_size=12))
def test_what_is_decided_is_what_re_says(pattern, name):
    try:
        expected = re.search(pattern, name)
    except re.error:
        with pytest.raises(re.error):
            patterns.compiled(pattern)
        return
    found = patterns.compiled(pattern).find("search", name)
    assert (found and found.span()) == (expected and expected.span())


@pytest.mark.parametrize("pattern", ["(" * 2000 + "a" + ")" * 2000, "a{99999999999}", "a" * 100_000])
def test_a_pattern_too_large_to_compile_is_refused(pattern):
    with pytest.raises(BadInput, match="a regular expression"):
        assign([ParameterGroup(match=pattern)], {NAME: ()})
