"""Transformers' own model with the weights of a loaded one, as the reference in comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from specgen.engine.model import Model
from specgen.engine.transformers.loading import load_module
from specgen.engine.transformers.transformers_model import TransformersModel


class _Loaded(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Model: ...

    @property
    def folder(self) -> Path: ...


_loaded: WeakKeyDictionary[Model, Any] = WeakKeyDictionary()


def transformers_module(loaded: _Loaded) -> Any:
    """Returns transformers' model with the weights, dtype and device of `loaded`, which the native decoder may run.

    In that case the weights are loaded once more, at the first call for a model.
    """
    model = loaded.model
    if isinstance(model, TransformersModel):
        return model.module
    if model not in _loaded:
        _loaded[model] = load_module(loaded.folder, loaded.name, False, model.dtype, model.device)
    return _loaded[model]
