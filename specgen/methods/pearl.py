"""PEARL: draft and target work at the same time (PEARL, section 3). Imports no torch.

The schedule is `decoding.parallel`, the window is computed in `decoding.parallel_costs`.

A PARD model drafts token by token here, as a plain model does. Its rows would follow masks in place of the tokens that are being
verified: measured with one that was trained for the bundled target, 0.93 to 1.02 times plain decoding, against 1.50 to 1.56.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen import decoding
from specgen.base.settings import Setting, Settings
from specgen.decoding.parallel_costs import Window
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.method import DRAFT_MODEL, Method

if TYPE_CHECKING:
    from specgen.decoding.drafting import Setup
    from specgen.decoding.run import Schedule


def _schedule(setup: Setup, settings: Settings) -> Schedule:
    """Makes the schedule, with the drafter of the setup's worker, and for `window=auto` the measured window of the setup."""
    if setup.worker is None:
        raise PEARL.without_part(None)
    size = settings.values["window"]
    window = setup.window or Window(int(size), int(size))
    drafter = setup.worker.drafter(settings, setup, window.longest)
    return decoding.Parallel(drafter, window, bool(settings.values["pre_verify"]), bool(settings.values["post_verify"]))


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
