"""The one table where a method is put together: drafter x length policy x verifier x schedule. Imports no torch.

To add a method is to add a row, and at most one class in one file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specgen.decoding import policies
from specgen.decoding.policies import LengthPolicy
from specgen.errors import SpecgenError, nearest

if TYPE_CHECKING:
    from specgen.decoding.drafters import Drafter
    from specgen.decoding.run import Clock, Run, Schedule, StopTexts
    from specgen.decoding.verifiers import Verifier
    from specgen.models.session import Session
    from specgen.types import Context, SamplingParams

Value = int | float | str
ALL_METHODS = "specgen inspect --methods"


@dataclass(frozen=True, slots=True)
class Setting:
    """A method's parameter: its default says its kind, the bounds what is sensible (both included)."""

    default: Value
    help: str
    low: float = -math.inf
    high: float = math.inf

    def parse(self, name: str, value: object) -> Value:
        """The value as a number or text of the default's kind, from a string or a Python value."""
        if isinstance(self.default, str):
            return str(value)
        kind = type(self.default)
        try:
            if isinstance(value, bool):
                raise ValueError
            number = kind(str(value).strip())
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise SpecgenError(f"{name} is {value!r}", f"It has to be {wanted}") from None
        if not self.low <= number <= self.high:  # false for NaN too
            raise SpecgenError(f"{name} is {value}", f"It has to lie between {self.low:g} and {self.high:g}")
        return number


@dataclass(frozen=True, slots=True)
class Policy:
    """A length policy's row. A `random` one is made with a seed on top of its settings."""

    maker: Callable[..., LengthPolicy]
    settings: Mapping[str, Setting]
    paper: str
    needs: policies.Feeds = frozenset()
    random: bool = False


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table. `drafter` and `schedule` name factories below; `policy` None means that nothing is drafted.

    `any_policy` methods take `policy=` and then that policy's settings too; `defaults` are theirs where they differ.
    """

    name: str
    drafter: str
    policy: str | None
    paper: str
    lossless: bool = True
    schedule: str = "sequential"
    any_policy: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)
    defaults: Mapping[str, Value] = field(default_factory=dict)

    @property
    def needs_draft_model(self) -> bool:
        return self.drafter == "model"


FEEDS: Mapping[str, policies.Feeds] = {
    "none": frozenset(),
    "model": frozenset({"entropy", "prob"}),
    "lookup": frozenset(),
}

_K = Setting(5, "tokens in a draft", 1, 1000)
_MAX_DRAFT = Setting(40, "longest draft", 1, 1000)

POLICIES: Mapping[str, Policy] = {
    "fixed": Policy(policies.Fixed, {"k": _K}, "Leviathan et al. 2023"),
    "heuristic": Policy(
        policies.Heuristic,
        {"k": Setting(5, "tokens in the first draft", 1, 1000), "max_draft": _MAX_DRAFT},
        "transformers' schedule",
    ),
    "confidence": Policy(
        policies.Confidence,
        {
            "threshold": Setting(0.4, "stop after a token with a lower probability than this", 0, 1),
            "max_draft": Setting(20, "longest draft", 1, 1000),
        },
        "transformers' dynamic length",
        needs=policies.Confidence.needs,
    ),
    "svip": Policy(
        policies.SVIP,
        {
            "threshold": Setting(0.4, "stop where sqrt(c * entropy) is above this", 0, 100),
            "c": Setting(0.15, "the authors' constant for the cross-entropy's share", 0, 100),
            "max_draft": _MAX_DRAFT,
        },
        "SVIP, section 3.2",
        needs=policies.SVIP.needs,
    ),
    "beta-ts": Policy(
        policies.BetaTS,
        {
            "alpha": Setting(1.0, "prior successes", 1e-3, 1e6),
            "beta": Setting(1.0, "prior failures", 1e-3, 1e6),
            "max_draft": _MAX_DRAFT,
        },
        "EESD, Algorithm 2 (mended)",
        random=True,
    ),
}


def _draft_model(name: str, paper: str) -> Method:
    return Method(name, "model", name, paper)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("ar", "none", None, "plain decoding"),
        Method("sd", "model", "fixed", "Leviathan et al. 2023", any_policy=True),
        _draft_model("heuristic", "transformers' assisted generation"),
        _draft_model("confidence", "transformers' assisted generation"),
        _draft_model("svip", "SVIP"),
        _draft_model("beta-ts", "EESD, Table 5"),
        Method(
            "lookup",
            "lookup",
            "fixed",
            "prompt lookup, Saxena 2023",
            any_policy=True,
            settings={"ngram": Setting(3, "longest n-gram to look up", 1, 32)},
            defaults={"k": 10},
        ),
    )
}


def default_name(*, has_draft_model: bool) -> str:
    """The method that a pair is decoded with where nobody says how."""
    return "svip" if has_draft_model else "lookup"


def no_draft_model(method: Method) -> SpecgenError:
    return SpecgenError(
        f"{method.name} needs a draft model, and there is none", "Name one with --draft, or do without: -m lookup"
    )


def find(name: str) -> Method:
    """The method of that name. Raises SpecgenError, with the nearest name, where there is none."""
    if name not in METHODS:
        raise SpecgenError(f"there is no method {name!r}{nearest(name, METHODS)}", f"All of them: {ALL_METHODS}")
    return METHODS[name]


@dataclass(frozen=True, slots=True)
class Settings:
    """A method's settings, checked: the policy that was chosen, and every value by name."""

    policy: str | None
    values: Mapping[str, Value]

    def as_dict(self, method: Method) -> dict[str, Value]:
        """For traces: the values, and the policy where the method leaves a choice."""
        return {**({"policy": self.policy} if method.any_policy and self.policy else {}), **self.values}


def known_settings(method: Method, policy: str | None) -> dict[str, Setting]:
    """All that `method` with `policy` can be set to, `policy` itself aside, with the defaults that hold here."""
    known = dict(method.settings)
    if policy is not None:
        known.update(POLICIES[policy].settings)
    if policy == method.policy:
        for name, default in method.defaults.items():
            known[name] = Setting(default, known[name].help, known[name].low, known[name].high)
    return known


def resolve(method: Method, given: Mapping[str, object]) -> Settings:
    """Check what the user set and fill in the defaults. Raises SpecgenError naming the setting, its value and the way out."""
    wanted = dict(given)
    policy = method.policy
    if method.any_policy and "policy" in wanted:
        policy = str(wanted.pop("policy"))
        if policy not in POLICIES:
            raise SpecgenError(
                f"there is no length policy {policy!r}{nearest(policy, POLICIES)}", f"There are {', '.join(POLICIES)}"
            )
    _check_fed(method, policy)
    known = known_settings(method, policy)
    for name in wanted:
        if name not in known:
            whose = method.name if policy == method.policy else f"{method.name} with policy={policy}"
            settable = [*(["policy"] if method.any_policy else []), *known]
            raise SpecgenError(
                f"{whose} has no setting {name!r}{nearest(name, settable)}",
                f"It has {', '.join(settable)}" if settable else "It has none",
            )
    values = {name: setting.parse(name, wanted.get(name, setting.default)) for name, setting in known.items()}
    return Settings(policy, values)


def _check_fed(method: Method, policy: str | None) -> None:
    """Refuse a policy that asks for what the drafter cannot tell (entropy, of prompt lookup)."""
    feeds = FEEDS[method.drafter]
    if policy is not None and (missing := POLICIES[policy].needs - feeds):
        fitting = [name for name, row in POLICIES.items() if row.needs <= feeds]
        raise SpecgenError(
            f"{method.name} cannot take the policy {policy!r}: its drafter has no {min(missing)} to feed it",
            f"Take one of {', '.join(fitting)}",
        )


def parse_pairs(pairs: list[str]) -> dict[str, str]:
    """`["k=8", "policy=svip"]` as a dictionary. Raises SpecgenError for what has no `=`."""
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise SpecgenError(f"cannot read the setting {pair!r}", "Write NAME=VALUE, for instance --set k=8")
        settings[name.strip()] = value.strip()
    return settings


@dataclass(frozen=True, slots=True)
class Parts:
    """What a pair hands to the factories. `vocab_size` is the width of the target's logits, `record` asks for both distributions'
    agreement in each round."""

    target: Session
    draft: Session | None
    sampling: SamplingParams
    eos_ids: frozenset[int]
    vocab_size: int
    seed: int
    record: bool = False


def make_drafter(method: Method, settings: Settings, parts: Parts) -> Drafter:
    from specgen.decoding import drafters

    if method.drafter == "none":
        return drafters.NoDrafter()
    if method.drafter == "lookup":
        return drafters.PromptLookup(int(settings.values["ngram"]), parts.eos_ids)
    if parts.draft is None:
        raise no_draft_model(method)
    seed = _derived(parts.seed, "draft")
    return drafters.DraftModel(parts.draft, parts.sampling, parts.eos_ids, parts.vocab_size, seed, keep_logits=parts.record)


def make_policy(settings: Settings, seed: int) -> LengthPolicy:
    if settings.policy is None:
        return policies.Fixed(k=1)
    row = POLICIES[settings.policy]
    own = {name: settings.values[name] for name in row.settings}
    return row.maker(**own, seed=_derived(seed, "policy")) if row.random else row.maker(**own)


def _derived(seed: int, role: str) -> int:
    """A seed of its own for each source of randomness: neighbouring seeds of a user share none."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(f"{role} {seed}".encode(), digest_size=7).digest(), "big")


def make_verifier(parts: Parts) -> Verifier:
    from specgen.decoding import verifiers

    if parts.sampling.greedy:
        return verifiers.Greedy()
    return verifiers.RejectionSampling(parts.sampling, parts.target.device, _derived(parts.seed, "target"))


def recording(verifier: Verifier) -> Verifier:
    from specgen.decoding.verifiers import Recording

    return Recording(verifier)


def make_schedule(method: Method) -> Schedule:
    from specgen.decoding.sequential import sequential

    return {"sequential": sequential}[method.schedule]


def make_run(
    method: Method, settings: Settings, parts: Parts, context: Context, limit: int, stop_texts: StopTexts | None, clock: Clock
) -> Run:
    """A method's parts put together on a context, to end after `limit` new tokens at the latest."""
    from specgen.decoding.run import Run

    return Run(
        context=context,
        target=parts.target,
        drafter=make_drafter(method, settings, parts),
        policy=make_policy(settings, parts.seed),
        verifier=recording(make_verifier(parts)) if parts.record else make_verifier(parts),
        schedule=make_schedule(method),
        limit=limit,
        eos_ids=parts.eos_ids,
        stop_texts=stop_texts,
        clock=clock,
    )
