"""Medusa: each of several heads predicts another later token from the last hidden state (Medusa-1,
Cai et al. 2024).

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.settings import Setting
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.base import PartMethod, Tuning, make_run
from specgen.methods.model_drafts import ADAPTIVE_GRID, COPY, HEAD

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


class Medusa(PartMethod):
    """Drafts a fixed tree of the heads' likeliest tokens; a chain with `nodes` 0."""

    name = "medusa"
    paper = "Medusa-1, Cai et al. 2024"
    needs = "medusa"
    policy = "fixed"
    any_policy = True
    grows_trees = True
    signals = DRAFT_SIGNALS
    settings: ClassVar = {
        "nodes": Setting(
            10, "tokens in the tree of candidates (63 in the paper); 0: a chain", 0, 1024
        ),
        **HEAD,
        **COPY,
    }
    defaults: ClassVar = {"fixed": {"k": 4}}
    tuning = Tuning("medusa", grids=({"nodes": (0, 5, 10, 20), "k": (2, 3, 4)}, ADAPTIVE_GRID))

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        nodes = int(request.settings.values["nodes"])
        if nodes == 0:
            return make_run(models, request, setup, decoding.ModelDrafter(setup))
        return make_run(
            models, request, setup, decoding.MarginalTreeDrafter(setup, nodes=nodes, is_fixed=True)
        )
