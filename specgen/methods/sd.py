"""Speculative decoding with a draft model (Leviathan et al. 2023, Chen et al. 2023). Imports no
torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.settings import Setting
from specgen.methods.base import Grid, Tuning, make_run
from specgen.methods.model_drafts import CAPE, CAPE_GRID, COPY, ChainMethod, tree_settings
from specgen.methods.readiness import KnownModels, Readiness

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models

_TRANSLATION = {
    "translation": Setting(
        "tokens",
        (
            "for a draft model with another tokenizer: by the tokens that both have (TLI), "
            "or by text, encoded again (SLEM)"
        ),
        choices=("tokens", "text"),
    )
}
# The largest tree first: its outputs are kept, and used again for the smaller ones in it.
_TREES: list[Grid] = [
    {"width": (width,), "depth": (depth,), "k": (depth,)}
    for width in (4, 3, 2)
    for depth in (5, 4, 3, 2)
]


class SpeculativeDecoding(ChainMethod):
    """A draft model drafts chains or trees (`width`), or text (`translation=text`)."""

    name = "sd"
    paper = "Leviathan et al. 2023"
    policy = "fixed"
    any_policy = True
    settings: ClassVar = tree_settings(1, "auto") | CAPE | _TRANSLATION | COPY
    tuning = Tuning("model", recorded=True, shapes=(*_TREES, CAPE_GRID))

    def check(self, models: KnownModels) -> Readiness:
        if models.draft is not None and models.draft_refusal is not None:
            return Readiness(True, "with translation=text")
        return super().check(models)

    def start(self, models: Models, request: Request) -> Run:
        if not request.settings.drafts_text:
            return super().start(models, request)
        setup = self.setup(models, request)
        assert models.draft is not None
        drafter = decoding.TextDrafter(setup, models.tokenizer, models.draft.tokenizer)
        return make_run(models, request, setup, drafter)
