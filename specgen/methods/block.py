"""Block drafters: a head of some layers drafts a block of tokens in one pass (DFlash, DFlash2,
DSpark). Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

from specgen import decoding
from specgen.base.settings import Setting
from specgen.decoding.policy_base import MODEL_SIGNALS
from specgen.methods.base import ADAPTIVE, PartMethod, Tuning, make_run
from specgen.methods.model_drafts import ADAPTIVE_GRID, COPY, HEAD, SVIP_GRID

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.decoding.drafting import Drafter
    from specgen.decoding.run import Run
    from specgen.engine.parts.block import BlockHeadRunner
    from specgen.methods.base import Request
    from specgen.models.models import Models


_WIDTH = 4  # candidates after each node of a tree whose rows depend on the token before


class Block(PartMethod):
    """Drafts a chain, as long as it is expected to pay, or none; with `nodes`, a tree of the
    likeliest paths, or of continuations where a row depends on the token before."""

    name = "block"
    paper = "DFlash, DFlash2, DSpark, 2026"
    needs = "block"
    policy: ClassVar[str | None] = ADAPTIVE
    any_policy = True
    signals = MODEL_SIGNALS
    settings: ClassVar = {
        "nodes": Setting(0, "tokens in a tree of candidates; 0: a chain", 0, 1024),
        "block_size": Setting(
            0, "rows that the head computes in a pass, at most as in its training; 0: all", 0, 256
        ),
        **HEAD,
        **COPY,
    }
    defaults: ClassVar = {"fixed": {"k": 7}}
    tuning = Tuning(
        "block",
        grids=({"k": (2, 3, 4, 5, 7)}, {"nodes": (8, 24), "k": (4, 7)}, SVIP_GRID, ADAPTIVE_GRID),
    )

    def drafts_trees(self, settings: Settings) -> bool:
        return int(settings.values["nodes"]) > 0

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        block_size = int(request.settings.values["block_size"])
        if block_size:
            head = cast("BlockHeadRunner", setup.draft)
            setup = replace(setup, draft=head.shortened(block_size))
        nodes = int(request.settings.values["nodes"])
        drafter: Drafter
        if nodes == 0:
            drafter = decoding.ModelDrafter(setup)
        elif setup.draft is not None and setup.draft.traits.independent:
            drafter = decoding.MarginalTreeDrafter(setup, nodes=nodes)
        else:
            drafter = decoding.TopKTreeDrafter(setup, width=_WIDTH, nodes=nodes)
        return make_run(models, request, setup, drafter)
