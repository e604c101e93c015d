"""PEARL: draft and target work at the same time (section 3). The schedule is `pearl_schedule`. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen.base.settings import Setting, Settings
from specgen.decoding.costs.pearl_window import Window
from specgen.decoding.policy import DRAFT_SIGNALS
from specgen.methods.method import DRAFT_MODEL, Method

if TYPE_CHECKING:
    from specgen.decoding.drafting import Setup
    from specgen.decoding.run import Schedule


def _schedule(setup: Setup, settings: Settings) -> Schedule:
    """The schedule, with the drafter of the setup's worker. The setup has the measured window for the setting `auto`."""
    from specgen.methods.pearl_schedule import Parallel

    if setup.worker is None:
        raise PEARL.without_part(None)
    size = settings.values["window"]
    window = setup.window or Window(int(size), int(size))
    drafter = setup.worker.drafter(settings, setup, window.longest)
    return Parallel(drafter, window, bool(settings.values["pre_verify"]), bool(settings.values["post_verify"]))


PEARL = Method(
    "pearl",
    "PEARL",
    DRAFT_MODEL,
    schedule=_schedule,
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={
        "window": Setting("auto", "tokens drafted during a target pass; auto: the measured ratio of times", 1, 1000, "auto"),
        "pre_verify": Setting(True, "verify a draft's first token while the rest is drafted"),
        "post_verify": Setting(True, "continue drafting while tokens are verified"),
    },
    is_parallel=True,
    drafts="model",
    recorded=True,
    own_cost_kind="parallel",
    grids=({"window": ("auto", *range(1, 17))},),
)
