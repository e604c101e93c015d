"""A draft model whose weights are loaded when they are first used."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock

import torch

from specgen.base.errors import SpecgenError
from specgen.engine.devices import device_name
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model import Model
from specgen.engine.model_loading import LoadedModel, PreparedModel, load_model
from specgen.engine.model_runner import ModelRunner
from specgen.engine.text.translated_runner import TranslatedRunner
from specgen.engine.text.translation import Translation


class DeferredModel:
    """A prepared model that loads its weights at the first use of `loaded`, `model` or `runner`.

    A pair may never need the draft's weights in this process: plain decoding has no draft model, and PEARL's may run in a process
    of its own. Everything else is known without weights: `name`, `folder`, `tokenizer`, `device`, `dtype_name`,
    `backend`, and `context_limit`, the longest context in tokens. `dtype` is that of its computations; `dtype_name` is `int8` or
    `int4` if the weights are quantised. `translation` is between the target's tokens and the model's; None if both have the same,
    and if there is none: then `refusal` says why, and drafts go by way of their text. `warning` is for the user, None if there
    is none.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        device: torch.device,
        dtype: torch.dtype,
        translation: Translation | None = None,
        refusal: SpecgenError | None = None,
        warning: str | None = None,
    ) -> None:
        self.name, self.folder, self.tokenizer = prepared.name, prepared.folder, prepared.tokenizer
        self.device, self.dtype_name = device, prepared.source.quantise or str(dtype).removeprefix("torch.")
        self.context_limit, self.backend = prepared.context_limit, prepared.config.backend
        self.translation, self.refusal, self.warning = translation, refusal, warning
        self.prepared, self.dtype = prepared, dtype
        self._loaded: LoadedModel | None = None
        self._lock = Lock()

    @property
    def loaded(self) -> LoadedModel:
        """The model with its weights. Raises SpecgenError or RunError, as `load_model` does, if it cannot be loaded."""
        with self._lock:
            if self._loaded is None:
                loaded = load_model(self.prepared, self.device, self.dtype, lambda _: None)
                self._loaded = replace(loaded, translation=self.translation)
            return self._loaded

    @property
    def devices(self) -> list[torch.device]:
        """The devices that have its layers; see `LoadedModel`."""
        return [self.device]

    @property
    def device_label(self) -> str:
        """The device as text; see `LoadedModel`."""
        return device_name(self.device)

    @property
    def model(self) -> Model:
        return self.loaded.model

    def runner(self, penalties: PenaltyProcessor | None = None) -> ModelRunner:
        return self.loaded.runner(penalties)

    def draft_runner(self, penalties: PenaltyProcessor | None = None) -> ModelRunner | TranslatedRunner:
        """Returns a runner that answers in the target's token ids, see `LoadedModel`; with a `refusal`, in the model's own."""
        return self.loaded.draft_runner(penalties)


DraftModel = LoadedModel | DeferredModel
"""What a pair's draft model may be."""
DraftModelRunner = ModelRunner | TranslatedRunner
"""What may run it. Both answer in the target's token ids."""
