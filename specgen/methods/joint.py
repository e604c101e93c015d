"""Multi-token joint greedy decoding, the exact decoding that MTAD approximates (MTAD, Definition
3.1).

Not lossless. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.errors import SpecgenError
from specgen.base.settings import Setting, Settings
from specgen.base.types import SamplingParams
from specgen.methods.base import Method, Tuning, make_run, make_setup

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


class Joint(Method):
    name = "joint"
    paper = "MTAD, Definition 3.1: what mtad approximates"
    lossless = False
    grows_trees = True
    decodes_greedily = True
    settings: ClassVar = {
        "k": Setting(4, "tokens in a block", 1, 64),
        "beams": Setting(0, "width of an approximate beam search; 0: the exact search", 0, 256),
        "nodes": Setting(
            4096, "most prefixes that the exact search for one block may extend", 16, 1 << 20
        ),
    }
    tuning = Tuning("search", grids=(), is_yardstick=True)

    def check_request(self, settings: Settings, sampling: SamplingParams) -> None:
        super().check_request(settings, sampling)
        if sampling.logprobs is not None:
            raise SpecgenError(
                f"{self.name} chooses whole blocks, and gives no log-probabilities",
                "Leave logprobs out, or take another method",
            )

    def start(self, models: Models, request: Request) -> Run:
        setup = make_setup(models, request, models.plain())
        values = request.settings.values
        schedule = decoding.JointGreedy(
            setup, k=int(values["k"]), beams=int(values["beams"]), nodes=int(values["nodes"])
        )
        return make_run(models, request, setup, decoding.NoDrafter(), schedule=schedule)
