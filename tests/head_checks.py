"""What the tests of trained heads' files share: a target, comparisons of weights, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from head_layouts import LAYOUTS, Config, Tensors, sizes_of
from specgen.engine.parts.head_files import load_head

from specgen.base.errors import SpecgenError
from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.weights import EagleWeights, GlideWeights, MedusaWeights

LAYERS = 8


def published(layout: str, target: LoadedModel, **sizes: Any) -> tuple[Config, Tensors]:
    return LAYOUTS[layout](sizes_of(target.folder, **sizes))


def eagle_of(folder: Path, target: LoadedModel) -> EagleWeights:
    weights = load_head(folder, target).weights
    assert isinstance(weights, EagleWeights)
    return weights


def equal(found: Any, expected: Any) -> bool:
    """Whether weights or parts of weights are equal, tensors by their values and dtypes."""
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[name], each) for name, each in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, EagleWeights | GlideWeights | MedusaWeights):
        return all(equal(getattr(found, name), getattr(expected, name)) for name in type(expected).__slots__ if name != "kind")
    return bool(found == expected)


def refusal(folder: Path, target: LoadedModel) -> str:
    """Why a head cannot be loaded: one printable line that names the head."""
    with pytest.raises(SpecgenError) as caught:
        load_head(folder, target)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 700
    assert str(folder) in text
    assert caught.value.hint
    return text
