"""PEARL: draft and target work at the same time (PEARL, section 3). Imports no torch.

The schedule is `decoding.parallel`, the window is computed in `decoding.parallel_costs`.

A PARD model drafts token by token here, as a plain model does. Its rows would follow masks in place
of the tokens that are being verified: measured with one that was trained for the bundled target,
0.93 to 1.02 times plain decoding, against 1.50 to 1.56.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.settings import Setting
from specgen.decoding.parallel_costs import Window, usual_window
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.base import (
    DraftModelMethod,
    Loading,
    Tuning,
    drafting_case,
    make_policy,
    make_run,
    make_setup,
)
from specgen.methods.drafting_knowledge import AUTO, DraftingCase, draft_cost
from specgen.methods.pass_times import PassTimes

if TYPE_CHECKING:
    from specgen.base.measuring import PassCheck
    from specgen.base.settings import Settings
    from specgen.decoding.drafting import Setup
    from specgen.decoding.parallel_costs import ParallelCosts
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models, Worker


class Pearl(DraftModelMethod):
    """A worker runs the draft model while the target's pass runs.

    After an accepted draft, the worker drafts on while the target verifies it (`post_verify`).
    After a rejected one, the target verifies the first token of the new draft while the worker
    drafts the rest (`pre_verify`). A draft has as many tokens as draft passes fit into a target
    pass: the `window`, which follows from the passes' measured times.
    """

    name = "pearl"
    paper = "PEARL"
    any_policy = True
    is_parallel = True
    signals = DRAFT_SIGNALS
    settings: ClassVar = {
        "window": Setting(
            AUTO,
            "tokens drafted during a target pass; auto: the measured ratio of times",
            1,
            1000,
            AUTO,
        ),
        "pre_verify": Setting(True, "verify a draft's first token while the rest is drafted"),
        "post_verify": Setting(True, "continue drafting while tokens are verified"),
    }
    unmeasured: ClassVar = {"window": 1}
    loading: ClassVar = Loading("worker", find="unloaded")
    tuning = Tuning(
        "model", recorded=True, own_cost_kind="parallel", grids=({"window": (AUTO, *range(1, 17))},)
    )

    def start(self, models: Models, request: Request) -> Run:
        self.check_draft(models, request.settings)
        worker = models.worker()
        if worker is None:
            raise self.without_part(None)
        times = self._pass_times(models, request)
        window, settings = self._window(models, request, worker, times)

        # the worker has the draft's runner, and ends the drafts
        setup = make_setup(models, request, models.plain())
        policy = make_policy(models, request, setup, self._case(models, request, setup, times))
        drafter = worker.drafter(policy, setup, window.longest)

        costs = None
        check = None
        if request.settings.values["window"] == AUTO and times is not None:
            costs = times
            check = self._check(models, request)
        values = settings.values
        schedule = decoding.Parallel(
            drafter, window, bool(values["pre_verify"]), bool(values["post_verify"]), costs, check
        )
        return make_run(
            models,
            request,
            setup,
            decoding.NoDrafter(),
            policy=drafter.policy,
            schedule=schedule,
            settings=settings,
            costs=costs,
        )

    def _pass_times(self, models: Models, request: Request) -> ParallelCosts | None:
        """Returns the pass times, measured at the first call, if the window or the policy follows
        from them."""
        values = request.settings.values
        policy = request.policy
        reads_costs = policy is not None and policy.reads_costs and values["verify_cost"] == AUTO
        if request.is_repeatable or not (values["window"] == AUTO or reads_costs):
            return None
        return models.kept(PassTimes).costs(
            request.typical_length, request.sampling, record=request.record
        )

    def _case(
        self, models: Models, request: Request, setup: Setup, times: ParallelCosts | None
    ) -> DraftingCase:
        """Returns what the costs of drafts depend on: the draft model drafts, and in parallel."""
        return replace(
            drafting_case(models, request, setup),
            cost_kind=self.tuning.cost_kind,
            has_model=True,
            in_blocks=models.draft is not None and models.draft.drafts_blocks,
            in_parallel=True,
            parallel_costs=times,
        )

    def _window(
        self, models: Models, request: Request, worker: Worker, times: ParallelCosts | None
    ) -> tuple[Window, Settings]:
        """Returns the window, and the settings with its size."""
        settings = request.settings
        if settings.values["window"] != AUTO:
            size = int(settings.values["window"])
            return Window(size, size), settings
        if times is None:
            size = usual_window(draft_cost(models))
            return Window(size, size), settings.with_value("window", size)
        window = times.run_window(is_flexible=request.sampling.greedy and worker.is_process)
        return window, settings.with_value("window", times.window.size)

    def _check(self, models: Models, request: Request) -> PassCheck:
        """Returns what compares the run's passes with those that the window was computed from."""
        times = models.kept(PassTimes)
        return times.check(request.typical_length, request.sampling, record=request.record)
