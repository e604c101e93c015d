"""What a decoding method is: its base classes, the request for a run, and how a run is put
together. Imports no torch."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from specgen import decoding
from specgen.base.errors import SpecgenError
from specgen.base.model_options import Finding
from specgen.base.part_kinds import DEFAULT_PART, EXIT, HEADS, training_command
from specgen.base.seeds import derive_seed
from specgen.base.settings import Setting, Settings, Value, written
from specgen.base.types import Context, SamplingParams
from specgen.decoding.policy_base import Fixed, LengthPolicy, Signals
from specgen.methods.copying import with_copies
from specgen.methods.drafting_knowledge import COPYING, DraftingCase, DraftingKnowledge
from specgen.methods.readiness import KnownModels, Readiness

if TYPE_CHECKING:
    from specgen.decoding.costs import RoundCosts
    from specgen.decoding.drafting import Drafter, Setup
    from specgen.decoding.parallel_costs import ParallelCosts
    from specgen.decoding.predicted_output import PredictedOutput
    from specgen.decoding.run import Run, Schedule
    from specgen.decoding.verification import Verifier
    from specgen.engine.draft_model import DraftModel
    from specgen.engine.model_runner import Runners
    from specgen.models.models import Models

NOTHING = "nothing"
DRAFT_MODEL = "draft model"
SKIPPED_LAYERS = "skipped layers"
WITHOUT_A_DRAFT = ", or use a method that needs none: -m lookup"
ADAPTIVE = "adaptive"  # the length policy that needs to know what drafting costs
# new tokens for which KV caches are allocated before a run, at most: they grow if it generates more
RESERVED = 4096

Grid = Mapping[str, Sequence[Value]]  # values of settings, which are tried in all combinations


@dataclass(frozen=True, slots=True)
class Loading:
    """What is loaded before a method's runs, so that their first round need not wait.

    `draft` says where the draft model runs: `here`, in turn with the target, or in a `worker`,
    during the target's passes; empty: no draft model does. `find` is what to look for where the
    user names nothing that drafts: see `specgen.load`.
    """

    draft: Literal["", "here", "worker"] = ""
    find: bool | Finding = False


@dataclass(frozen=True, slots=True)
class Tuning:
    """What `specgen tune` needs to know of a method.

    `drafts` names what drafts. If `recorded`, drafts are chains, and drafts of the same length take
    the same time for all methods of the same `cost_kind` (`own_cost_kind`, or if this is empty
    `drafts`); otherwise rounds are timed for each shape of draft. `grids` are the values that are
    tried; None: those that the policy's settings list (`Setting.tuned`); empty: none is simulated.
    `shapes` are values that are tried too, for drafts that are no chains. `is_yardstick`: the
    method is a reference for other methods' outputs and always slower than plain decoding, so that
    `tune` and the default `compare` leave it out.
    """

    drafts: str = "none"
    recorded: bool = False
    own_cost_kind: str = ""
    grids: Sequence[Grid] | None = None
    shapes: Sequence[Grid] = ()
    is_yardstick: bool = False

    @property
    def cost_kind(self) -> str:
        return self.own_cost_kind or self.drafts


@dataclass(frozen=True, slots=True)
class Request:
    """The checked arguments of a decoding run; see `Pair.request`.

    `settings` are the method's; a value that has to be measured is still `auto`. `policy` is the
    class of the length policy that they name, None if they name none. `limit` is the maximum number
    of new tokens: `max_new_tokens`, or fewer if the target's context has no room for them.
    `record`: each round also measures how close the target's and the draft's probabilities are at
    each drafted token. `tuned_costs` are those of the profile that chose the method (see
    `Measurements.tuned_costs`), None if none did. `own_seed` is the seed of the run's random
    numbers, where this is not to be that of `sampling`. `prediction` are the tokens that the user
    expects as output, which are drafted too; empty: none are.

    Raises SpecgenError if the method cannot decode with the settings and the sampling parameters.
    """

    method: Method
    settings: Settings
    policy: type[LengthPolicy] | None
    sampling: SamplingParams
    prompt_ids: list[int]
    limit: int
    record: bool = False
    tuned_costs: Mapping[str, RoundCosts] | None = None
    own_seed: int | None = None
    prediction: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.method.check_request(self.settings, self.sampling)

    @property
    def is_repeatable(self) -> bool:
        """Whether nothing in the run may follow from measured times, from earlier runs or from
        chance.

        The same request has to give the same tokens, and these depend on the drafts if they are
        drawn with a seed, and if the method is lossy. In other runs a draft changes no token.
        """
        if self.sampling.greedy:
            return not self.method.lossless
        return self.sampling.seed is not None

    @property
    def typical_length(self) -> int:
        return typical_length(len(self.prompt_ids), self.limit)

    @property
    def part_name(self) -> str:
        """What names the method's trained part: the value of its setting `exit` or `head`, a path
        or `auto`; `auto` for a method without such a setting."""
        values = self.settings.values
        return str(values.get("exit", values.get("head", DEFAULT_PART)))

    def draw_seed(self) -> int:
        """Returns the seed of a run: the one asked for; without one a random one, or 0 for a
        repeatable request."""
        if self.own_seed is not None:
            return self.own_seed
        if self.sampling.seed is not None:
            return self.sampling.seed
        return 0 if self.is_repeatable else secrets.randbits(32)


def typical_length(prompt_length: int, limit: int) -> int:
    """Returns the context's length in tokens when half of the `limit` new ones are generated. A
    limit over `RESERVED` counts as `RESERVED`."""
    return prompt_length + min(limit, RESERVED) // 2


class Method:
    """A decoding method. There is one instance of each, in `methods.METHODS` or, under an older
    name, in `methods.ALIASES`; it has no state.

    `name` is what users write; a class from outside of this package gets it when it is loaded.
    `paper` names the source. `needs` is what the method drafts with:
    `NOTHING`, `DRAFT_MODEL`, `SKIPPED_LAYERS`, or the kind of a trained part: `EXIT` or one of
    `HEADS`. `settings` are the method's own, besides its length policy's. `policy` names the length
    policy (the rule that ends drafts); None: no policy ends a draft. If `any_policy`, users may
    choose another one with `policy=NAME`. `policy_without_predictor` replaces `policy` if the exit
    layer has no acceptance predictor. `signals` are the numbers about a drafted token that the
    drafter computes for policies. `defaults` maps the name of a length policy to the default values
    of settings that differ with this policy. `older_settings` maps an older name of a boolean
    setting to its present name and the values there. `lossless`: the output is the target's own.

    `drafts_without_model`: it also drafts where there is no draft model. `is_parallel`: drafts are
    made during the target's passes. `grows_trees`: all drafts may be trees. `decodes_greedily`: it
    cannot sample. `alias_of`: the name of the method that this one, with other defaults, is an
    older name of. `unmeasured` are settings with which nothing has to be measured or searched
    before a run. `needed_part` says in words what has to be there for the method to run; empty:
    nothing has.
    """

    name: str = ""
    paper: ClassVar[str] = ""
    needs: ClassVar[str] = NOTHING
    settings: ClassVar[Mapping[str, Setting]] = {}
    policy: ClassVar[str | None] = None
    any_policy: ClassVar[bool] = False
    policy_without_predictor: ClassVar[str | None] = None
    signals: ClassVar[Signals] = frozenset()
    defaults: ClassVar[Mapping[str, Mapping[str, Value]]] = {}
    older_settings: ClassVar[Mapping[str, tuple[str, Mapping[bool, Value]]]] = {}
    lossless: ClassVar[bool] = True
    drafts_without_model: ClassVar[bool] = False
    is_parallel: ClassVar[bool] = False
    grows_trees: ClassVar[bool] = False
    decodes_greedily: ClassVar[bool] = False
    alias_of: str = ""
    unmeasured: ClassVar[Mapping[str, Value]] = {}
    needed_part: ClassVar[str] = ""
    loading: ClassVar[Loading] = Loading()
    tuning: ClassVar[Tuning] = Tuning()

    def start(self, models: Models, request: Request) -> Run:
        """Returns a run of the request, ready to decode. Measures or searches the values of
        settings that are `auto`.

        Raises SpecgenError, with the way out, if what drafts is missing or cannot be used.
        """
        raise NotImplementedError

    def check(self, models: KnownModels) -> Readiness:
        """Returns whether the method can run with these models, as far as their files show.

        `inspect` asks this before weights are loaded. A run does not: `start` raises the error.
        """
        return Readiness(True, "needs no draft model")

    def check_request(self, settings: Settings, sampling: SamplingParams) -> None:
        """Raises SpecgenError if the method cannot decode with these settings and sampling
        parameters."""
        if self.decodes_greedily and not sampling.greedy:
            raise SpecgenError(
                f"{self.name} decodes greedily only, and temperature is {sampling.temperature:g}",
                "Take --temperature 0, or -m mtad",
            )

    @property
    def uses_draft_model(self) -> bool:
        return self.needs == DRAFT_MODEL

    @property
    def needs_draft_model(self) -> bool:
        return self.uses_draft_model and not self.drafts_without_model

    def draft_of(self, models: Models) -> DraftModel | None:
        """Returns the draft model, if there is one and the method's runs use it."""
        return models.draft if self.uses_draft_model else None

    def refusal_without_draft(self, target: str | None) -> SpecgenError | None:
        """Returns the error to raise where there is no draft model; None if the method can do
        without. `target` is as in `without_part`."""
        return self.without_part(target) if self.needs_draft_model else None

    @property
    def needs_exit_layer(self) -> bool:
        return self.needs == EXIT

    @property
    def head(self) -> str:
        """The kind of trained head that the method needs, one of `HEADS`; empty if it needs
        none."""
        return self.needs if self.needs in HEADS else ""

    @property
    def runs_model(self) -> bool:
        """Whether a model, or a part of the target, drafts."""
        return self.needs != NOTHING

    def drafting_remark(self, models: Models) -> str:
        """Returns what to say beside a run's figures about what drafted; empty if it is what the
        user expects."""
        return ""

    def as_dict(self, settings: Settings) -> dict[str, Value]:
        """Returns the values of all settings by name; with `policy` if users may choose it."""
        return settings.as_dict(with_policy=self.any_policy)

    def drafts_trees(self, settings: Settings) -> bool:
        """Whether drafts with these settings may be trees. With `nodes` 0, a method that usually
        drafts trees drafts a chain (Medusa)."""
        if self.grows_trees and settings.values.get("nodes") != 0:
            return True
        return settings.drafts_tree or bool(settings.values.get("cape"))

    @property
    def policy_by_setting(self) -> Mapping[str, str]:
        """The length policy that a setting selects if it is given without `policy`, by the
        setting's name: `k` selects `fixed` if the method's own policy is `adaptive`, which has no
        `k`."""
        return {"k": Fixed.name} if self.any_policy and self.policy == ADAPTIVE else {}

    def without_part(self, target: str | None) -> SpecgenError:
        """Returns the error to raise if what the method drafts with is missing. Only for methods
        that draft with a model or a part.

        If a part is missing, the hint names the command that trains it for the model `target`; None
        is the bundled target, whose training text is included.
        """
        raise NotImplementedError

    def without_predictor(self) -> SpecgenError:
        """Returns the error to raise if the length policy needs a predictor of acceptance, and the
        drafter has none."""
        problem = (
            f"{self.name} with policy=cali-ts needs a head with a predictor of "
            "acceptance, and this head has none"
        )
        return SpecgenError(
            problem,
            "Use policy=beta-ts, set model_prediction=false, or take a head such as DSpark's",
        )


class DraftModelMethod(Method):
    """Base of the methods that draft with a draft model."""

    needs = DRAFT_MODEL
    needed_part: ClassVar[str] = "a draft model"
    loading: ClassVar[Loading] = Loading("here", find="untried")

    def setup(self, models: Models, request: Request) -> Setup:
        """Returns the setup of a run with both models. Raises SpecgenError if there is no draft
        model that can be used."""
        self.check_draft(models, request.settings)
        runners = models.with_draft_model()
        if runners is None:
            raise self.without_part(None)
        return make_setup(models, request, runners)

    def check_draft(self, models: Models, settings: Settings) -> None:
        """Raises SpecgenError if the draft model's tokens have to be translated, and cannot be."""
        refusal = None if models.draft is None else models.draft.refusal
        if refusal is not None and not settings.drafts_text:
            raise refusal

    def check(self, models: KnownModels) -> Readiness:
        if models.draft is None:
            return Readiness(False, "no draft model", "name one with --draft")
        if models.draft_refusal is not None:
            return Readiness(False, "the tokenizers differ", "take a draft of the target's family")
        return Readiness(True)

    def without_part(self, target: str | None) -> SpecgenError:
        return SpecgenError(
            f"{self.name} needs a draft model, and there is none",
            f"Name one with --draft{WITHOUT_A_DRAFT}",
        )


class PartMethod(Method):
    """Base of the methods that draft with a trained part of the target: an exit layer or a head."""

    needed_part: ClassVar[str] = "a trained head"
    loading: ClassVar[Loading] = Loading(find="heads")

    def setup(self, models: Models, request: Request) -> Setup:
        """Returns the setup of a run with the part. Raises SpecgenError if there is none that can
        be used."""
        runners = models.with_part(self.needs, request.part_name)
        if runners is None:
            name = models.target.name
            raise self.without_part(None if name.startswith("demo/") else name)
        return make_setup(models, request, runners)

    def check(self, models: KnownModels) -> Readiness:
        if models.unlike_llama is not None:
            return unlike_llama(models.unlike_llama)
        return models.missing_parts.get(self.needs, Readiness(True, "needs no draft model"))

    def without_part(self, target: str | None) -> SpecgenError:
        return SpecgenError(
            f"{self.name} needs a head trained for the target, and there is none",
            (
                f"Train one with {training_command(self.needs, target)}, or name one with "
                "--head FOLDER"
            ),
        )


def unlike_llama(family: str) -> Readiness:
    """Returns that a method cannot run because the layers of the target's family cannot be run one
    by one."""
    return Readiness(
        False,
        f"needs a model built as Llama is, and {family} is not",
        "take a draft model, or lookup",
    )


def make_setup(models: Models, request: Request, runners: Runners) -> Setup:
    """Returns what a run's drafter and verifier are made from. Makes the KV caches large enough,
    and draws the seed."""
    capacity = models.capacity(len(request.prompt_ids) + min(request.limit, RESERVED))
    runners.reserve(capacity)
    return decoding.Setup(
        runners.draft,
        request.sampling,
        eos_ids=models.eos_ids(request.sampling),
        vocab_size=runners.target.vocab_size,
        seed=request.draw_seed(),
        target=runners.target,
        record=request.record,
        acceptance_predictor=runners.predictor,
        capacity=capacity,
    )


def make_policy(
    models: Models, request: Request, setup: Setup, case: DraftingCase | None = None
) -> LengthPolicy:
    """Makes the length policy that the request names; if it names none, a policy that never ends a
    draft.

    `case` is what its costs depend on; None: see `drafting_case`. Raises SpecgenError if the policy
    needs a predictor of acceptance, and there is none.
    """
    policy = request.policy
    if policy is None:
        return LengthPolicy()
    signals = policy.signals_with(request.settings.values)
    if "predicted_acceptance" in signals and setup.acceptance_predictor is None:
        raise request.method.without_predictor()

    arguments: dict[str, Any] = {name: request.settings.values[name] for name in policy.settings}
    if policy.reads_costs:
        case = drafting_case(models, request, setup) if case is None else case
        arguments["inputs"] = models.kept(DraftingKnowledge).inputs(case)
    elif policy.random:
        arguments["seed"] = derive_seed(setup.seed, "policy")
    construct: Callable[..., LengthPolicy] = policy
    return construct(**arguments)


def drafting_case(models: Models, request: Request, setup: Setup) -> DraftingCase:
    """Returns what the costs of the run's drafts depend on, apart from the machine. The drafts are
    made before the target's passes, with the setup's draft model if it has one."""
    method = request.method
    has_model = setup.draft is not None
    traits = None if setup.draft is None else setup.draft.traits
    drafts_trees = method.drafts_trees(request.settings)
    return DraftingCase(
        method=method.name,
        settings=request.settings,
        sampling=request.sampling,
        context_length=request.typical_length,
        cost_kind=method.tuning.cost_kind if has_model else COPYING,
        is_frozen=request.is_repeatable,
        has_model=has_model,
        runs_draft_model=method.uses_draft_model,
        in_blocks=traits is not None and traits.drafts_blocks,
        drafts_trees=drafts_trees,
        tuned_costs=request.tuned_costs,
        sizes_blocks=traits is not None and traits.sizes_blocks and not drafts_trees,
    )


def make_run(
    models: Models,
    request: Request,
    setup: Setup,
    drafter: Drafter | None,
    *,
    policy: LengthPolicy | None = None,
    verifier: Verifier | None = None,
    schedule: Schedule | None = None,
    settings: Settings | None = None,
    costs: ParallelCosts | None = None,
) -> Run:
    """Puts a run together from what is the method's own; for `costs` see `Run`. The setting `copy`
    adds copied drafts; `drafter` None: there are no others.

    None stands for what most methods share: the request's policy, a lossless verifier, the schedule
    `sequential` with its passes compared with measured ones (`Models.checked`), and the request's
    settings. Raises SpecgenError as `make_policy` and `Models.constraint`.
    """
    assert setup.target is not None
    sampling = request.sampling
    if verifier is None:
        verifier = lossless_verifier(setup, "target")
    if policy is None:
        policy = make_policy(models, request, setup)
    drafter, policy = with_copies(drafter, policy, request.settings.values, setup.eos_ids)
    assert drafter is not None
    constraint = None if sampling.grammar is None else models.constraint(sampling)
    forced = None
    if constraint is not None:
        is_plain = schedule is None and isinstance(drafter, decoding.NoDrafter)
        drafter, forced = decoding.with_forced_tokens(
            drafter, setup, lossless_verifier(setup, "forced"), is_plain=is_plain
        )
    return decoding.Run(
        context=Context(request.prompt_ids, sampling.penalties, constraint),
        target=setup.target,
        drafter=drafter,
        policy=policy,
        verifier=verifier,
        schedule=models.checked(decoding.sequential) if schedule is None else schedule,
        limit=request.limit,
        eos_ids=setup.eos_ids,
        stop_texts=decoding.StopTexts.of(sampling.stop, models.tokenizer, request.prompt_ids),
        clock=decoding.Clock.of_device(models.target.device),
        settings=request.settings if settings is None else settings,
        seed=setup.seed,
        costs=costs,
        lock=models.lock,
        prediction=predicted_output(request, setup),
        forced=forced,
        log_probs=sampling.logprobs,
    )


def lossless_verifier(setup: Setup, name: str) -> Verifier:
    """Makes a verifier for drafts of any kind. Its random numbers come from a seed of its own, by
    its `name`."""
    if setup.sampling.greedy:
        return decoding.GreedyVerifier()
    assert setup.target is not None
    seed = derive_seed(setup.seed, name)
    return decoding.RejectionSampling(setup.sampling, setup.target.device, seed)


def predicted_output(request: Request, setup: Setup) -> PredictedOutput | None:
    """Returns what drafts the output that the user expects; None if nothing is expected."""
    if not request.prediction:
        return None
    return decoding.PredictedOutput(request.prediction, lossless_verifier(setup, "prediction"))


@dataclass(frozen=True, slots=True)
class Choice:
    """A method with settings: those that the user wrote (`given`), and all with their defaults and
    the length policy (`settings`).

    Its text is what users write: `svip:threshold=0.4:max_draft=12`.
    """

    method: Method
    given: Mapping[str, Value]
    settings: Settings

    def __str__(self) -> str:
        return written(self.method.name, self.given)
