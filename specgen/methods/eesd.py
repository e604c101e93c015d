"""EESD: the target's first layers and a trained exit layer draft. Imports no torch.

Where the paper's sections are built:

- The exit layer (3.1), after the target's first N layers: `engine.parts.own_layers`. Its runners
  share the first N layers' results, so that verification runs only the later layers.
- Self-distillation (3.2): `train.texts` has the target generate the text, `train.exits` trains.
- Thompson sampling (3.3, Algorithms 1 to 3): `thompson`, its predictor: `engine.parts.own_layers`.
  It ends the drafts with `policy=cali-ts`.
- Trees (5.7): `decoding.tree`.
- The ablations (Tables 4 and 5) are other length policies: `policy=beta-ts`, `policy=fixed`, and
  the switches of `cali-ts`.

By default `adaptive` ends the drafts: unlike Thompson sampling, it counts what drafting and
verification cost, and drafts nothing where that does not pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.errors import SpecgenError
from specgen.base.part_kinds import DEFAULT_PART, EXIT, training_command
from specgen.base.settings import Setting
from specgen.decoding.policy_base import MODEL_SIGNALS
from specgen.methods.base import ADAPTIVE, Grid, Loading, PartMethod, Tuning, make_run
from specgen.methods.model_drafts import (
    ADAPTIVE_GRID,
    CAPE,
    COPY,
    SVIP_GRID,
    model_drafter,
    tree_settings,
)
from specgen.methods.thompson import BETA_TS_GRID, CALI_TS_GRID, BetaTS, CaliTS

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models

_EXIT = {
    "exit": Setting(
        DEFAULT_PART,
        "the exit layer's file or folder; auto: --exit-layer, or the one found for the target",
    )
}
_FIXED_GRID: Grid = {"policy": ("fixed",), "k": range(1, 13)}
_GRIDS = (ADAPTIVE_GRID, SVIP_GRID, CALI_TS_GRID, BETA_TS_GRID, _FIXED_GRID)
_TREES: Grid = {"width": (2, 3, 4), "depth": (2, 3, 4, 5, 6)}


def _policy_by_setting() -> dict[str, str]:
    """Returns the policy that a setting selects, by the setting's name: those that both policies of
    Thompson sampling have select none."""
    shared = CaliTS.settings.keys() & BetaTS.settings.keys()
    return {
        name: policy.name
        for policy in (CaliTS, BetaTS)
        for name in policy.settings
        if name not in shared
    }


class EESD(PartMethod):
    """The target's first layers with the exit layer draft chains or trees, until the length policy
    ends the draft. The target verifies.

    The paper's policy is `cali-ts`, which needs an exit layer with a predictor of acceptance. A
    setting that only `cali-ts` or only `beta-ts` has selects that policy.
    """

    name = "eesd"
    paper = "EESD; the paper's Thompson sampling: policy=cali-ts; trees: section 5.7"
    needs = EXIT
    needed_part = "an exit layer"
    policy: ClassVar[str | None] = ADAPTIVE
    any_policy = True
    signals = MODEL_SIGNALS
    settings: ClassVar = tree_settings(1, "auto") | CAPE | _EXIT | COPY
    loading: ClassVar = Loading()
    tuning = Tuning("exit", recorded=True, grids=_GRIDS, shapes=(_TREES,))

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)  # with the predictor, if the exit layer has one
        drafter = model_drafter(setup, request.settings)
        # Target and draft share the first layers, so that a target pass is shorter than those that
        # were measured: the plain schedule does not compare them.
        return make_run(models, request, setup, drafter, schedule=decoding.sequential)

    @property
    def policy_by_setting(self) -> Mapping[str, str]:
        implied = super().policy_by_setting
        # the older names (`eesd-beta`, ...) have a policy already, which no setting changes
        return {**implied, **_policy_by_setting()} if implied else implied

    def without_part(self, target: str | None) -> SpecgenError:
        return SpecgenError(
            f"{self.name} needs an exit layer trained for the target, and there is none",
            (
                f"Train one with {training_command(self.needs, target)}, or name one with "
                "--exit-layer FILE"
            ),
        )

    def without_predictor(self) -> SpecgenError:
        hint = (
            "Train another with specgen tune --train, set model_prediction=false, or "
            "use policy=beta-ts"
        )
        return SpecgenError(f"{self.name} needs a predictor, and the exit layer has none", hint)
