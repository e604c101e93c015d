"""Plain decoding: the target's passes over one token each. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen import decoding
from specgen.methods.base import Method, Request, Tuning, make_run, make_setup
from specgen.methods.drafting_knowledge import COPYING

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.models.models import Models


class PlainDecoding(Method):
    name = "ar"
    paper = "plain decoding"
    tuning = Tuning(recorded=True, own_cost_kind=COPYING, grids=({},))

    def start(self, models: Models, request: Request) -> Run:
        setup = make_setup(models, request, models.plain())
        return make_run(models, request, setup, decoding.NoDrafter())
