"""The drafter that runs a model, for chains and trees, and its settings. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.part_kinds import DEFAULT_PART
from specgen.base.settings import Setting, Settings
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.base import ADAPTIVE, DraftModelMethod, Grid, PartMethod, Tuning, make_run
from specgen.methods.copying import OFF, copy_setting

if TYPE_CHECKING:
    from specgen.decoding.drafting import Drafter, Setup
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models

CAPE = {
    "cape": Setting(
        False,
        (
            "add likely candidates at each position of the chain, more where the draft is "
            "unsure (CaPE)"
        ),
    )
}
CAPE_GRID: Grid = {"cape": (True,), "k": (2, 3, 5, 8)}
HEAD = {
    "head": Setting(
        DEFAULT_PART, "the head's folder; auto: --head, or the one found for the target"
    )
}
COPY = copy_setting(OFF, "where more of it is expected to be accepted than of the model's drafts")
ADAPTIVE_GRID: Grid = {"policy": (ADAPTIVE,)}
SVIP_GRID: Grid = {"policy": ("svip",), "threshold": (0.3, 0.4, 0.5, 0.7)}


def tree_settings(width: int, depth: int | str, nodes: int | str = "auto") -> dict[str, Setting]:
    """The settings of draft trees, with these default values. A `depth` of `auto` leaves the number
    of levels to the length policy."""
    levels = Setting(depth, "levels of the tree; auto: the policy decides", 1, 64, ("auto",))
    if isinstance(depth, int):
        levels = Setting(depth, "most levels of the tree", 1, 64)
    return {
        "width": Setting(width, "candidates at each position; above 1, drafts are trees", 1, 64),
        "depth": levels,
        "nodes": Setting(
            nodes,
            "keep this many of all candidates, as EAGLE-2; auto: the width at each level",
            1,
            1024,
            ("auto",),
        ),
    }


def model_drafter(setup: Setup, settings: Settings) -> Drafter:
    """Makes a drafter that runs a model: token by token, or level by level if the settings ask for
    a tree."""
    depth = _number(settings, "depth")
    nodes = _number(settings, "nodes")
    is_independent = setup.draft is not None and setup.draft.traits.independent  # PARD's logits
    if settings.drafts_tree and nodes is not None and is_independent:
        return decoding.MarginalTreeDrafter(setup, nodes=nodes, depth=depth)
    if settings.drafts_tree:
        return decoding.TopKTreeDrafter(
            setup, width=int(settings.values["width"]), depth=depth, nodes=nodes
        )
    return decoding.ModelDrafter(setup, depth=depth, cape=bool(settings.values.get("cape")))


def _number(settings: Settings, name: str) -> int | None:
    """Returns the value of a setting; None if it is `auto`, or if there is no such setting."""
    value = settings.values.get(name, "auto")
    return None if value == "auto" else int(value)


class HeadMethod(PartMethod):
    """Base of the methods whose trained part drafts token by token, or level by level, as a model
    does."""

    policy: ClassVar[str | None] = "fixed"
    any_policy = True
    signals = DRAFT_SIGNALS

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        return make_run(models, request, setup, model_drafter(setup, request.settings))


class ChainMethod(DraftModelMethod):
    """A draft model drafts, until the length policy ends the draft; the target verifies."""

    signals = DRAFT_SIGNALS
    settings: ClassVar[Mapping[str, Setting]] = COPY
    tuning: ClassVar[Tuning] = Tuning("model", recorded=True)

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        return make_run(models, request, setup, model_drafter(setup, request.settings))
