"""Each row of the table of published sizes is a model of the published number of parameters."""

from math import prod

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trilith.models import FAMILIES, published_size, published_sizes
from trilith.parallel_state import BadInput, declarations

SIZES = published_sizes()
FIRST = {size.family.model_type: name for name, size in reversed(SIZES.items())}
ROWS = [
    pytest.param(name, marks=[] if name in FIRST.values() else pytest.mark.slow, id=name) for name in SIZES
]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_builds_and_has_the_published_number_of_parameters(name):
    size = SIZES[name]
    model = size.family.on_meta(size.config)
    assert sum(prod(one.shape) for one in declarations(model).values() if not one.buffer) == size.parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_transformers_counts_the_same_from_the_config_that_is_written(name):
    size = SIZES[name]
    raw = size.family.to_hf(size.config)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    assert theirs.num_parameters() == size.parameters


def test_every_family_has_a_published_size():
    assert {size.family.model_type for size in SIZES.values()} == FAMILIES.keys()


def test_every_key_of_a_row_is_one_that_its_family_reads(recwarn):
    """A misspelled key is unknown, and an unknown key gives a warning."""
    for size in SIZES.values():
        assert size.config.num_hidden_layers > 0
    assert [str(one.message) for one in recwarn] == []


def test_mistral_has_a_window_in_its_first_version_alone():
    windows = [published_size(f"mistral-7b-v0.{n}").config.sliding_window for n in (1, 3)]
    assert windows == [4096, None]


def test_an_unknown_name_is_refused_with_the_nearest_names():
    with pytest.raises(BadInput, match=r"found 'llama-3\.1-9b'. Nearest: llama-3\.1-8b, "):
        published_size("llama-3.1-9b")
    with pytest.raises(BadInput, match=r"found 'zzz'. `trilith models` lists them"):
        published_size("zzz")
    assert published_size("Llama-3.1-8B").parameters == 8_030_261_248
