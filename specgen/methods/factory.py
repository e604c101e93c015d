"""Constructs a run (the generation of one output) of a method: its drafter, length policy, verifier and schedule.

Imports their modules only when they are needed, so that the command line and draft workers start quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from specgen.base.settings import Settings
from specgen.decoding.adaptive import Adaptive, AdaptiveInputs
from specgen.decoding.components import Components
from specgen.decoding.costs.pearl_window import Window
from specgen.decoding.drafter_kinds import DraftSource
from specgen.decoding.length_policy import Always, LengthPolicy
from specgen.decoding.policies import POLICIES, signals_of
from specgen.methods.method import Method
from specgen.methods.missing_parts import no_draft_model, no_exit_layer, no_predictor
from specgen.methods.table import METHODS

if TYPE_CHECKING:
    from specgen.base.types import Context
    from specgen.decoding.costs.cost_check import CostCheck
    from specgen.decoding.costs.pearl_window import ParallelCosts
    from specgen.decoding.drafters import Drafter, DraftSetup
    from specgen.decoding.joint import JointGreedy
    from specgen.decoding.parallel import DraftWorker, Parallel
    from specgen.decoding.run import Clock, Run, Schedule, StopTexts
    from specgen.decoding.verifiers import Verifier


def make_drafter(method: Method, settings: Settings, components: Components) -> Drafter:
    """Constructs the method's drafter. Raises SpecgenError if its draft model, exit layer or predictor is missing."""
    copies = method.drafts_without_model and settings.values["lookup"]
    if components.draft is None and method.drafter.source is not DraftSource.NOTHING and not copies:
        raise no_exit_layer(method, None) if method.needs_exit_layer else no_draft_model(method)
    if "predicted_acceptance" in signals_of(settings) and components.acceptance_predictor is None:
        raise no_predictor(method)
    return method.drafter.make(draft_setup(components), settings)


def draft_setup(components: Components) -> DraftSetup:
    """Selects from a run's components what its drafter is constructed from."""
    from specgen.decoding.drafters import DraftSetup

    return DraftSetup(
        runner=components.draft,
        sampling=components.sampling,
        eos_ids=components.eos_ids,
        vocab_size=components.vocab_size,
        seed=derive_seed(components.seed, "draft"),
        keep_logits=components.record,
        acceptance_predictor=components.acceptance_predictor,
        history=components.history,
        context_limit=getattr(components.target, "context_limit", 0),  # a draft worker has no target
        tokenizers=components.tokenizers,
    )


def make_policy(settings: Settings, seed: int, adaptive: AdaptiveInputs | None = None) -> LengthPolicy:
    """Constructs the length policy that the settings name. `seed` is the run's; random policies derive their own from it.

    Without a policy in the settings, returns one that never ends a draft. `adaptive` is what the policy of this name needs.
    """
    if settings.policy is None:
        return Always()
    policy = POLICIES[settings.policy]
    construct: Callable[..., LengthPolicy] = policy
    values: dict[str, Any] = {name: settings.values[name] for name in policy.settings}
    if policy is Adaptive:
        assert adaptive is not None, "the costs of drafting were not measured"
        return Adaptive(**values, inputs=adaptive)
    return construct(**values, seed=derive_seed(seed, "policy")) if policy.random else construct(**values)


def derive_seed(seed: int, role: str) -> int:
    """Derives an independent seed: from a run's for each source of randomness (`draft`, `target`, `policy`), from a
    comparison's for each prompt and repeat."""
    return int.from_bytes(blake2b(f"{role} {seed}".encode(), digest_size=7).digest(), "big")


def make_verifier(method: Method, settings: Settings, components: Components) -> Verifier:
    """Constructs the method's verifier. All lossless methods share one for greedy decoding and, but for several drafts, another
    for sampling: for chains and trees."""
    from specgen.decoding import bild, mtad, multi_draft, verifiers

    common = (components.sampling, components.target.device, derive_seed(components.seed, "target"))
    if method.verifier == "joint":
        return mtad.JointLikelihoodVerifier(*common, tau=float(settings.values["tau"]))
    if method.verifier == "rollback":
        return bild.BildVerifier(*common, rollback=float(settings.values["rollback"]))
    if components.sampling.greedy:
        return verifiers.GreedyVerifier()
    if method.verifier in ("k-sequential", "multi-round"):
        rule = multi_draft.k_sequential if method.verifier == "k-sequential" else multi_draft.multi_round
        return multi_draft.TreeSampling(rule, *common)
    return verifiers.RejectionSampling(*common)


def make_parallel(settings: Settings, components: Components, worker: DraftWorker | None) -> Parallel:
    """Constructs PEARL's schedule with its drafter, which `worker` provides.

    If the setting `window` is `auto`, `components.window` must hold the measured window. Raises SpecgenError without a worker.
    """
    from specgen.decoding.parallel import Parallel

    if worker is None:
        raise no_draft_model(METHODS["pearl"])
    size = settings.values["window"]
    window = components.window or Window(int(size), int(size))
    drafter = worker.drafter(settings, components, window.longest)
    return Parallel(drafter, window, bool(settings.values["pre_verify"]), bool(settings.values["post_verify"]))


def make_joint(settings: Settings) -> JointGreedy:
    """Constructs the schedule of multi-token joint decoding, which needs no drafter and no verifier."""
    from specgen.decoding.joint import JointGreedy

    length, beams, nodes = (int(settings.values[name]) for name in ("k", "beams", "nodes"))
    return JointGreedy(length, beams, nodes)


def make_run(
    method: Method,
    settings: Settings,
    components: Components,
    context: Context,
    limit: int,
    stop_texts: StopTexts | None,
    clock: Clock,
    worker: DraftWorker | None = None,
    *,
    costs: ParallelCosts | None = None,
    check: CostCheck | None = None,
) -> Run:
    """Constructs a run of the method, which continues `context` by at most `limit` new tokens.

    `stop_texts` is None without stop strings. `worker` runs the draft model of a parallel method; other methods ignore it.
    `costs` and `check`: see `Run`.
    """
    from specgen.decoding.drafters import NoDrafter
    from specgen.decoding.run import Run
    from specgen.decoding.sequential import sequential
    from specgen.decoding.verifiers import RecordingVerifier

    schedule: Schedule
    drafter: Drafter
    if method.is_parallel:
        schedule = parallel = make_parallel(settings, components, worker)
        drafter, policy = NoDrafter(), parallel.drafter.policy  # the schedule has a drafter of its own
    else:
        schedule = make_joint(settings) if method.schedule == "joint" else sequential
        drafter = make_drafter(method, settings, components)
        policy = make_policy(settings, components.seed, components.adaptive)
    verifier = make_verifier(method, settings, components)
    return Run(
        context=context,
        target=components.target,
        drafter=drafter,
        policy=policy,
        verifier=RecordingVerifier(verifier) if components.record else verifier,
        schedule=schedule,
        limit=limit,
        eos_ids=components.eos_ids,
        stop_texts=stop_texts,
        clock=clock,
        settings=settings,
        seed=components.seed,
        costs=costs,
        check=check,
    )
