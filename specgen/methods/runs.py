"""Makes a run (the generation of one output) of a method: its drafter, length policy, verifier and schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specgen.base.settings import Settings
from specgen.base.types import Context
from specgen.decoding.drafting import Drafter, NoDrafter, Setup, derive_seed
from specgen.decoding.parallel import Parallel
from specgen.decoding.parallel_costs import ParallelCosts
from specgen.decoding.policy_base import LengthPolicy
from specgen.decoding.run import Clock, Run, StopTexts, sequential
from specgen.decoding.verification import GreedyVerifier, RejectionSampling, Verifier
from specgen.methods import POLICIES, signals_of
from specgen.methods.adaptive import Adaptive, AdaptiveInputs
from specgen.methods.method import Method


def make_run(
    method: Method,
    settings: Settings,
    setup: Setup,
    context: Context,
    limit: int,
    stop_texts: StopTexts | None,
    clock: Clock,
    *,
    costs: ParallelCosts | None = None,
) -> Run:
    """Makes a run of the method, which continues `context` by at most `limit` new tokens.

    `stop_texts` is None without stop strings. For `costs` see `Run`. Raises SpecgenError if the method needs a draft model or a
    trained part that the setup lacks.
    """
    assert setup.target is not None
    schedule = sequential if method.schedule is None else method.schedule(setup, settings)
    drafter: Drafter = NoDrafter()
    if isinstance(schedule, Parallel):  # it has a drafter of its own, whose policy the run informs
        policy = schedule.drafter.policy
    else:
        drafter = make_drafter(method, settings, setup)
        policy = make_policy(settings, setup.seed, setup.adaptive)
    return Run(
        context=context,
        target=setup.target,
        drafter=drafter,
        policy=policy,
        verifier=make_verifier(method, settings, setup),
        schedule=schedule,
        limit=limit,
        eos_ids=setup.eos_ids,
        stop_texts=stop_texts,
        clock=clock,
        settings=settings,
        seed=setup.seed,
        costs=costs,
    )


def make_drafter(method: Method, settings: Settings, setup: Setup) -> Drafter:
    """Makes the method's drafter. Raises SpecgenError if its draft model, exit layer or predictor is missing."""
    copies = method.drafts_without_model and settings.values["lookup"]
    if setup.draft is None and method.runs_model and not copies:
        raise method.without_part(None)
    if "predicted_acceptance" in signals_of(settings) and setup.acceptance_predictor is None:
        raise method.without_predictor()
    return NoDrafter() if method.drafter is None else method.drafter(setup, settings)


def make_policy(settings: Settings, seed: int, adaptive: AdaptiveInputs | None = None) -> LengthPolicy:
    """Makes the length policy that the settings name; if they name none, a policy that never ends a draft.

    `seed` is the run's, from which random policies derive their own. `adaptive` has the inputs of the policy `adaptive`; others
    need none.
    """
    if settings.policy is None:
        return LengthPolicy()
    policy = POLICIES[settings.policy]
    construct: Callable[..., LengthPolicy] = policy
    values: dict[str, Any] = {name: settings.values[name] for name in policy.settings}
    if policy is Adaptive:
        assert adaptive is not None, "the costs of drafting were not measured"
        values["inputs"] = adaptive
    elif policy.random:
        values["seed"] = derive_seed(seed, "policy")
    return construct(**values)


def make_verifier(method: Method, settings: Settings, setup: Setup) -> Verifier:
    """Makes the method's verifier: its own if it has one; otherwise `GreedyVerifier`, or `RejectionSampling` where the target
    samples."""
    if method.verifier is not None:
        return method.verifier(setup, settings)
    return GreedyVerifier() if setup.sampling.greedy else RejectionSampling(*setup.for_verifier)
