"""Rotary frequencies and tables of the native decoder, against transformers' rotary modules."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from native_configs import assert_same_rotary, read_like, reference_of, sparse, written
from transformers import AutoModelForCausalLM

from specgen.engine.model_shape import of_transformers
from specgen.engine.native.architecture import UnsupportedConfig
from specgen.engine.native.families import FAMILIES, read_architecture
from specgen.engine.native.rotary import RotaryTable

_SHORT, _LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + i for i in range(8)]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "old name": {"type": "linear", "factor": 4.0},
    "linear": {"rope_type": "linear", "factor": 3},
    "dynamic": {"rope_type": "dynamic", "factor": 1.7},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn tuned": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 0.5, "attention_factor": 1.3},
    "yarn untruncated": {"rope_type": "yarn", "factor": 16, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
    "yarn without factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 48},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 32},
    "longrope with factor": {"rope_type": "longrope", "factor": 6.0, "original_max_position_embeddings": 32},
    "longrope tuned": {"rope_type": "longrope", "attention_factor": 1.1, "original_max_position_embeddings": 32},
}


def rotary_module(reference: Any) -> type:
    """The class of rotary modules that transformers uses in models of this config."""
    with torch.device("meta"):
        return type(AutoModelForCausalLM.from_config(reference).model.rotary_emb)


def in_turn() -> Iterator[Any]:
    """Every family and kind; a third of the pairs by default, with every kind for Llama and the two families that refuse some."""
    for (row, name), (column, family) in product(enumerate(ROPES), enumerate(FAMILIES)):
        often = family in ("llama", "phi3", "gemma3_text") or name == "default" or (row + column) % 3 == 0
        yield pytest.param(name, family, marks=() if often else pytest.mark.slow)


@pytest.mark.parametrize(("name", "family"), list(in_turn()))
def test_rotary_frequencies_are_those_of_transformers(family: str, name: str) -> None:
    rope = deepcopy(ROPES[name])
    kind = rope.get("rope_type", "old name")
    config = sparse(family, rope_theta=123_456.0)
    if kind == "longrope":
        pairs = 2 if family == "stablelm" else 8
        rope |= {"short_factor": _SHORT[:pairs], "long_factor": _LONG[:pairs]}
    config["rope_scaling"] = rope
    refused = {
        "phi3": kind not in ("default", "longrope"),  # yarn means longrope there, and lacks its factors
        "gemma3_text": kind == "old name" or "truncate" in rope,
    }
    if refused.get(family):
        with pytest.raises(UnsupportedConfig, match="rope_scaling"):
            read_architecture(config)
        return
    reference = reference_of(config)
    for form in (config, written(reference, whole=True)):
        assert_same_rotary(read_like(form, reference), reference, rotary_module(reference))


@pytest.mark.parametrize("original", [32, None])
def test_phi3_takes_old_names_of_longrope_and_the_original_length_at_the_top(original: int | None) -> None:
    config = sparse("phi3", rope_scaling={"type": "longrope", "short_factor": _SHORT, "long_factor": _LONG})
    config |= {"max_position_embeddings": 8192} | ({} if original is None else {"original_max_position_embeddings": original})
    found = read_like(config, reference_of(config))
    assert found.rotary["all"].long_boundary == (original or 4096)
    for name in ("yarn", "su"):
        config["rope_scaling"]["type"] = name
        assert read_architecture(config) == found


def test_a_length_at_the_top_wins_over_the_one_inside() -> None:
    rope = {"rope_type": "longrope", "short_factor": _SHORT, "long_factor": _LONG, "original_max_position_embeddings": 16}
    config = sparse("llama", rope_scaling=rope, original_max_position_embeddings=64)
    found = read_like(config, reference_of(config))
    assert found.rotary["all"].long_boundary == 64


def test_dynamic_rope_ends_at_its_original_length() -> None:
    config = sparse("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 96})
    assert read_like(config, reference_of(config)).max_position_embeddings == 96
    del config["rope_scaling"]["original_max_position_embeddings"]
    assert read_like(config, reference_of(config)).max_position_embeddings == 128


def test_gemma3_reads_nested_rope_parameters() -> None:
    rope = {
        "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 2e5, "original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0},
    }
    config = sparse("gemma3_text", rope_parameters=rope, sliding_window_pattern=2, rope_local_base_freq=777.0)
    reference = reference_of(config)
    assert_same_rotary(read_like(config, reference), reference, rotary_module(reference))


def test_the_table_grows_and_serves_inference_mode_and_training() -> None:
    rotary = read_architecture(sparse("llama")).rotary["all"]
    table, fresh = RotaryTable(rotary, "cpu"), RotaryTable(rotary, "cpu")
    with torch.inference_mode():
        first = table.rows(3, 9)
        assert not table.rows(0, 700).is_inference()
    weight = torch.ones(6, 8, requires_grad=True)
    (table.rows(3, 9) * weight).abs().sum().backward()  # a tensor made in inference mode could not be saved for this
    assert weight.grad is not None
    expected = fresh.rows(0, 3000)
    assert torch.equal(table.rows(2500, 3000), expected[2500:])
    assert torch.equal(first, expected[3:9])
    assert torch.equal(table.gather(torch.tensor([5, 0, 2999])), expected[[5, 0, 2999]])
    assert table.rows(1, 4).data_ptr() == table.rows(0, 4).data_ptr() + 8 * 8
    with pytest.raises(ValueError, match="LongRoPE"):
        table.rows(0, 1, long=True)


@pytest.mark.parametrize(("name", "limits"), [("dynamic", (40, None)), ("longrope", (128, 40)), ("yarn", (128, None))])
def test_context_limits_of_scaled_rotary_embeddings(name: str, limits: tuple[int, int | None]) -> None:
    """A dynamic rope ends where its frequencies would change; LongRoPE changes them once; YaRN only stretches them."""
    rope = {**ROPES[name], "short_factor": _SHORT, "long_factor": _LONG, "original_max_position_embeddings": 40}
    shape = of_transformers(reference_of(sparse("llama", rope_scaling=rope)))
    assert (shape.context_limit, shape.rope_boundary) == limits
