"""A draft model on its device, and how its tokens become the target's."""

from __future__ import annotations

import torch

from specgen.base.errors import SpecgenError
from specgen.engine.block_runner import PardRunner
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.model_files import ModelFiles
from specgen.engine.model_runner import ModelRunner
from specgen.engine.penalties import PenaltyProcessor
from specgen.engine.precision import Precision
from specgen.engine.text.translated_runner import TranslatedRunner
from specgen.engine.text.translation import Translation

DraftModelRunner = ModelRunner | PardRunner | TranslatedRunner


class DraftModel(LoadedModel):
    """A draft model, whose weights are loaded at the first use of `model`.

    If its tokenizer is not the target's, `translation` translates between their tokens; if that is
    not possible, `refusal` says why, and only drafts by way of their text work. Both are None if
    the tokens are the same.
    """

    def __init__(
        self,
        files: ModelFiles,
        precision: Precision,
        device: torch.device,
        translation: Translation | None = None,
        refusal: SpecgenError | None = None,
    ) -> None:
        super().__init__(files, precision, [device])
        self.translation = translation
        self.refusal = refusal

    @property
    def drafts_blocks(self) -> bool:
        """Whether this is a PARD draft model (`block_runner.PardRunner`) that can be used as one:
        its tokens are the target's."""
        is_pard = isinstance(self.files.raw.get("pard_token"), int)
        return is_pard and self.translation is None and self.refusal is None

    def draft_runner(self, penalties: PenaltyProcessor | None = None) -> DraftModelRunner:
        """Returns a runner that takes and answers in the target's token ids; if there is a
        `refusal`, in the draft model's own.

        `penalties` are the target's.
        """
        if self.drafts_blocks:
            return PardRunner(self.runner(), self.files.raw["pard_token"], penalties)
        if self.translation is None:
            return self.runner(penalties)
        return TranslatedRunner(self.runner(), self.translation, penalties)
