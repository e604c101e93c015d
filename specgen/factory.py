"""A method's row made into a run: its drafter, policy, verifier and schedule, by the names in the table of methods.

What a method needs is imported when it is made: the table itself, the command line and workers go without the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from specgen.decoding import policies
from specgen.decoding.policies import LengthPolicy
from specgen.methods import METHODS, POLICIES, Method, Settings, no_draft_model, no_exit_layer, no_predictor

if TYPE_CHECKING:
    from specgen.cost_model import Window
    from specgen.decoding.drafters import AcceptancePredictor, Drafter
    from specgen.decoding.parallel import Parallel
    from specgen.decoding.run import Clock, Run, Schedule, StopTexts
    from specgen.decoding.verifiers import Verifier
    from specgen.engine.model_runner import DraftRunner, ModelRunner
    from specgen.types import Context, SamplingParams
    from specgen.workers import DraftWorker


@dataclass(frozen=True, slots=True)
class Components:
    """What a pair hands to the factories. `vocab_size` is the width of the target's logits, `capacity` the tokens to make caches
    for, `worker` what can draft beside the target and `window` what was measured for it, where there is one; `record` asks for
    both distributions' agreement in each round. `agreement` is an exit layer's predictor, where there is one."""

    target: ModelRunner
    draft: DraftRunner | None
    sampling: SamplingParams
    eos_ids: frozenset[int]
    vocab_size: int
    seed: int
    capacity: int = 0
    worker: DraftWorker | None = None
    window: Window | None = None
    record: bool = False
    agreement: AcceptancePredictor | None = None


def make_drafter(method: Method, settings: Settings, parts: Components) -> Drafter:
    from specgen.decoding import drafters

    if method.drafter == "none":
        return drafters.NoDrafter()
    if method.drafter == "lookup":
        return drafters.PromptLookupDrafter(int(settings.values["ngram"]), parts.eos_ids)
    if parts.draft is None:
        raise no_exit_layer(method, None) if method.needs_exit_layer else no_draft_model(method)
    if (
        method.needs_exit_layer
        and settings.policy == "cali-ts"
        and settings.values["model_prediction"]
        and parts.agreement is None
    ):
        raise no_predictor(method)
    common = (parts.draft, parts.sampling, parts.eos_ids, parts.vocab_size, derive_seed(parts.seed, "draft"))
    values = settings.values
    if method.drafter == "beams":
        from specgen.decoding.mtad_drafter import BeamSearchDrafter

        return BeamSearchDrafter(
            *common, width=int(values["beams"]), stochastic=values["beam"] == "sample", keep_logits=parts.record
        )
    if method.drafter == "fallback":
        from specgen.decoding.bild import BildDrafter

        return BildDrafter(*common, fallback=float(values["fallback"]), keep_logits=parts.record)
    if method.drafter == "chains":
        from specgen.decoding.multi_draft import MultiDraftDrafter

        return MultiDraftDrafter(*common, drafts=int(values["drafts"]), keep_logits=parts.record)
    if branches(settings):
        from specgen.decoding.tree_drafter import TopKTreeDrafter

        depth = None if values["depth"] == "auto" else int(values["depth"])
        runner, _, eos_ids, vocab_size, _ = common
        width, own = int(values["width"]), parts.agreement
        return TopKTreeDrafter(runner, eos_ids, vocab_size, width=width, depth=depth, keep_logits=parts.record, agreement=own)
    return drafters.ModelDrafter(*common, keep_logits=parts.record, agreement=parts.agreement)


def branches(settings: Settings) -> bool:
    """Whether drafts are trees of the likeliest candidates. A width of 1 is one too where no chain is what the method is for."""
    return int(settings.values.get("width", 1)) > 1 or isinstance(settings.values.get("depth"), int)


def make_policy(settings: Settings, seed: int) -> LengthPolicy:
    if settings.policy is None:
        return policies.Always()
    row = POLICIES[settings.policy]
    own = {name: settings.values[name] for name in row.settings}
    return row.maker(**own, seed=derive_seed(seed, "policy")) if row.random else row.maker(**own)


def derive_seed(seed: int, role: str) -> int:
    """A seed of its own for each source of randomness: neighbouring seeds of a user share none."""
    return int.from_bytes(blake2b(f"{role} {seed}".encode(), digest_size=7).digest(), "big")


def make_verifier(method: Method, settings: Settings, parts: Components) -> Verifier:
    """The method's; whichever is lossless comes to the same thing in greedy decoding, on chains and trees alike."""
    from specgen.decoding import bild, mtad_verifier, multi_draft, verifiers

    common = (parts.sampling, parts.target.device, derive_seed(parts.seed, "target"))
    if method.verifier == "joint":
        return mtad_verifier.JointLikelihoodVerifier(*common, tau=float(settings.values["tau"]))
    if method.verifier == "rollback":
        return bild.BildVerifier(*common, rollback=float(settings.values["rollback"]))
    if parts.sampling.greedy:
        return verifiers.GreedyVerifier()
    judges = {"k-sequential": multi_draft.k_sequential, "multi-round": multi_draft.multi_round}
    if branches(settings):
        return multi_draft.TreeSampling(multi_draft.multi_round, *common)
    if method.verifier in judges:
        return multi_draft.TreeSampling(judges[method.verifier], *common)
    return verifiers.RejectionSampling(*common)


def recording(verifier: Verifier) -> Verifier:
    from specgen.decoding.verifiers import RecordingVerifier

    return RecordingVerifier(verifier)


def make_parallel(settings: Settings, parts: Components) -> Parallel:
    """PEARL's schedule with its drafter, which works beside the target. A window that is `auto` has to be in `parts`."""
    from specgen.cost_model import Window
    from specgen.decoding.parallel import Parallel
    from specgen.workers.thread_worker import ThreadWorker

    if parts.draft is None:
        raise no_draft_model(METHODS["pearl"])
    worker = parts.worker or ThreadWorker(parts.draft)
    given = settings.values["window"]
    window = Window(int(given), int(given)) if parts.window is None else parts.window
    drafter = worker.drafter(settings, parts, window.size)
    return Parallel(drafter, window, bool(settings.values["pre_verify"]), bool(settings.values["post_verify"]))


def make_run(
    method: Method,
    settings: Settings,
    parts: Components,
    context: Context,
    limit: int,
    stop_texts: StopTexts | None,
    clock: Clock,
) -> Run:
    """A method's parts put together on a context, to end after `limit` new tokens at the latest."""
    from specgen.decoding.run import Run
    from specgen.decoding.sequential import sequential

    schedule: Schedule
    drafter: Drafter
    if method.schedule == "parallel":
        schedule = parallel = make_parallel(settings, parts)
        drafter, policy = parallel.drafter, parallel.drafter.policy
    else:
        schedule, drafter, policy = sequential, make_drafter(method, settings, parts), make_policy(settings, parts.seed)
    verifier = make_verifier(method, settings, parts)
    return Run(
        context=context,
        target=parts.target,
        drafter=drafter,
        policy=policy,
        verifier=recording(verifier) if parts.record else verifier,
        schedule=schedule,
        limit=limit,
        eos_ids=parts.eos_ids,
        stop_texts=stop_texts,
        clock=clock,
    )
