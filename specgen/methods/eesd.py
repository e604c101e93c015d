"""EESD: the target's first layers and a trained exit layer draft, and Thompson sampling ends the
drafts. Imports no torch.

The exit layer follows the first 5 to 10 % of the target's layers. Draft and target share the
results of these layers, so that verification runs only the later ones. Sections 3.1 (the exit
layer), 3.3 (Thompson sampling, in `thompson`), 5.7 (trees); Tables 4 and 5 compare the length
policies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.errors import SpecgenError
from specgen.base.part_kinds import DEFAULT_PART, EXIT, training_command
from specgen.base.settings import Setting
from specgen.decoding.policy_base import MODEL_SIGNALS
from specgen.methods.base import Grid, Loading, PartMethod, Tuning, make_run
from specgen.methods.model_drafts import CAPE, model_drafter, tree_settings

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
_CALIBRATED: Grid = {
    "policy": ("cali-ts",),
    "sigma_model": (0.1, 0.3, 0.5),
    "sigma_sample": (1.0, 3.0),
    "theta0": (0.5, 0.7, 0.9),
    "max_draft": (3, 5, 8, 40),
}
_BETA: Grid = {
    "policy": ("beta-ts",),
    "alpha": (1.0, 2.0, 5.0),
    "beta": (0.5, 1.0, 2.0, 5.0),
    "max_draft": (4, 8, 40),
}
_FIXED: Grid = {"policy": ("fixed",), "k": range(1, 13)}
_TREES: Grid = {"width": (2, 3, 4), "depth": (2, 3, 4, 5, 6)}


class EESD(PartMethod):
    """The target's first layers with the exit layer draft chains or trees, until the length policy
    ends the draft; the target verifies."""

    name = "eesd"
    paper = "EESD, with Cali-TS if there is a predictor, else Beta-TS; trees: section 5.7"
    needs = EXIT
    needed_part = "an exit layer"
    policy = "cali-ts"
    policy_without_predictor: ClassVar[str | None] = "beta-ts"
    any_policy = True
    signals = MODEL_SIGNALS
    settings: ClassVar = tree_settings(1, "auto") | CAPE | _EXIT
    loading: ClassVar = Loading()
    tuning = Tuning("exit", recorded=True, grids=(_CALIBRATED, _BETA, _FIXED), shapes=(_TREES,))

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)  # with the predictor, if the exit layer has one
        drafter = model_drafter(setup, request.settings)
        # Target and draft share the first layers, so that a target pass is shorter than those that
        # were measured: the plain schedule does not compare them.
        return make_run(models, request, setup, drafter, schedule=decoding.sequential)

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


class EESDCali(EESD):
    """An older name of `eesd`, as the classes below."""

    name = "eesd-cali"
    alias_of = "eesd"
    policy_without_predictor = None


class EESDBeta(EESDCali):
    name = "eesd-beta"
    policy = "beta-ts"


class EESDFixed(EESDCali):
    name = "eesd-fixed"
    policy = "fixed"


class EESDTree(EESD):
    name = "eesd-tree"
    alias_of = "eesd"
    settings: ClassVar = EESD.settings | tree_settings(3, 5)
    grows_trees = True
