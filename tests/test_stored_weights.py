"""What is no dense layer with attention runs through the kernels with its weights as they are
stored: recurrent layers and trained parts."""

from __future__ import annotations

import pytest
from families import make_model, model_of

from specgen.engine.kernels.library import kernels
from specgen.engine.model import ALL_OPERATORS

needs_kernels = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")


@needs_kernels
def test_what_is_left_on_torch_is_named() -> None:
    assert model_of(make_model("olmo2"), "native").on_torch() == ()
    assert model_of(make_model("llama"), "native").on_torch() == ()
    assert model_of(make_model("lfm2"), "native").on_torch() == (
        "short convolutions (2 of 3 layers)",
        "gates of short convolutions (2 of 3 layers)",
    )
    found = model_of(make_model("qwen3_5_text"), "native").on_torch()
    assert "gates of attention (1 of 4 layers)" in found
    assert "states of the delta rule (3 of 4 layers)" in found
    assert model_of(make_model("llama"), "transformers").on_torch() == ALL_OPERATORS


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_all_is_on_torch() -> None:
    assert model_of(make_model("llama"), "native").on_torch() == ALL_OPERATORS
