"""PEARL: draft and target work at the same time (PEARL, section 3). Imports no torch.

The algorithm, pre-verify (section 3.2) and post-verify (section 3.3), is the schedule in
`decoding.parallel`. The window is the paper's gamma (section 4.1): `decoding.parallel_costs`
computes it from the times of passes, which `pass_times` measures.

Beyond the paper:

- Greedy decoding with a draft model in a process of its own has a flexible window: a draft ends
  when the target's pass ends, however long this takes. After a rejection the target first waits for
  a few tokens of the new draft (`Window.lead`) and verifies them together.
- A fixed window is smaller beside a target pass over fewer tokens, which takes less time on a CPU
  (`Window.beside`).
- Any length policy may end a draft within the window.
- Where both models slow each other down by more than the overlap hides, as on few cores, they take
  turns, with `window=auto`: in whole runs if measured passes say so (`ParallelCosts.overlaps`) or
  the rounds of earlier runs do (`Overlapping`), and within a run from some round on. In whole runs
  the draft model is in this process, which then loads it beside the worker's. In runs that a seed
  repeats, whose text must not depend on the clock, the times in the profile decide before the run.

A PARD model drafts token by token here, as a plain model does. Its rows would follow masks in place
of the tokens that are being verified: measured with one that was trained for the bundled target,
0.93 to 1.02 times plain decoding, against 1.50 to 1.56.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.settings import Setting
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
from specgen.methods.drafting_knowledge import AUTO
from specgen.methods.pass_times import RunTimes

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


class Pearl(DraftModelMethod):
    """A worker runs the draft model while the target's pass runs.

    After an accepted draft, the worker drafts on while the target verifies it (`post_verify`).
    After a rejected one, the target verifies the first token of the new draft while the worker
    drafts the rest (`pre_verify`). A draft has as many tokens as draft passes fit into a target
    pass: the `window`, which follows from the passes' measured times. Where these, or the times of
    rounds, say that turns are faster, the models take turns.
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
            (AUTO,),
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
        times = RunTimes.of(models, request, worker)
        if times.length_in_turn is not None:
            return self._in_turn(models, request, times)

        setup = make_setup(models, request, models.plain())
        policy = make_policy(models, request, setup, times.drafting_case(models, request, setup))
        drafter = worker.drafter(policy, setup, times.window.longest)

        values = request.settings.values
        schedule = decoding.Parallel(
            drafter,
            times.window,
            pre_verify=bool(values["pre_verify"]),
            post_verify=bool(values["post_verify"]),
            costs=times.checked_costs,
            check=times.check,
            overlapping=times.overlapping,
            joins_forced=not request.record,
        )
        return make_run(
            models,
            request,
            setup,
            decoding.NoDrafter(),  # the schedule has the worker draft
            policy=drafter.policy,  # a placeholder: in the worker, `policy` decides
            schedule=schedule,
            settings=times.settings,
            costs=times.checked_costs,
        )

    def _in_turn(self, models: Models, request: Request, times: RunTimes) -> Run:
        """Returns a run in which the draft model drafts before the target's passes."""
        setup = self.setup(models, request)
        case = replace(drafting_case(models, request, setup), cost_kind=self.tuning.drafts)
        schedule = models.checked(decoding.sequential)
        if times.overlapping is not None:
            schedule = decoding.counted_in_turn(schedule, times.overlapping)
        return make_run(
            models,
            request,
            setup,
            decoding.ModelDrafter(setup, depth=times.length_in_turn, in_turn=True),
            policy=make_policy(models, request, setup, case),
            schedule=schedule,
            settings=times.settings,
        )
