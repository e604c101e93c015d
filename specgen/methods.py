"""The one table where a method is put together: drafter x length policy x verifier x schedule. Imports no torch.

To add a method is to add a row, and at most one class in one file.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from specgen.decoding import policies
from specgen.decoding.policies import LengthPolicy
from specgen.errors import SpecgenError, nearest
from specgen.settings import Setting, Value

ALL_METHODS = "specgen inspect --methods"
WITHOUT_A_DRAFT = ", or do without: -m lookup"  # no advice where lookup is there anyway


@dataclass(frozen=True, slots=True)
class Policy:
    """A length policy's row. A `random` one is made with a seed on top of its settings."""

    maker: Callable[..., LengthPolicy]
    settings: Mapping[str, Setting]
    paper: str
    signals: policies.Signals = frozenset()
    random: bool = False
    needs_where: Mapping[str, policies.Signals] = field(default_factory=dict)  # settings that are true ask for these too

    def needs_with(self, values: Mapping[str, Value]) -> policies.Signals:
        return self.signals.union(*(feeds for name, feeds in self.needs_where.items() if values.get(name)))


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table. `drafter`, `verifier` and `schedule` name factories below; `policy` None means that none ends a draft.

    `any_policy` methods take `policy=` and then that policy's settings too; `defaults` are theirs where they differ.
    `unpredicted` is the policy where the exit layer comes without the predictor that `policy` asks.
    """

    name: str
    drafter: str
    policy: str | None
    paper: str
    lossless: bool = True
    verifier: str = "exact"
    schedule: str = "sequential"
    any_policy: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)
    defaults: Mapping[str, Value] = field(default_factory=dict)
    unpredicted: str | None = None

    @property
    def needs_draft_model(self) -> bool:
        return self.drafter not in ("none", "lookup", "exit", "skip")

    @property
    def may_measure(self) -> bool:
        """Whether a run may have to wait for something to be measured before it starts."""
        return self.schedule == "parallel" or self.drafter == "skip"

    @property
    def needs_exit_layer(self) -> bool:
        return self.drafter == "exit"

    @property
    def splits_target(self) -> bool:
        """Whether the target's layers are run one by one, for which they have to be built as Llama's are."""
        return self.drafter in ("exit", "skip")


FEEDS: Mapping[str, policies.Signals] = {
    "none": frozenset(),
    "model": frozenset({"entropy", "prob"}),
    "lookup": frozenset(),
    "beams": frozenset(),
    "fallback": frozenset({"entropy"}),
    "chains": frozenset(),
    "exit": frozenset({"entropy", "prob", "agreement"}),
    "skip": frozenset({"entropy", "prob"}),
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
        signals=policies.Confidence.signals,
    ),
    "svip": Policy(
        policies.SVIP,
        {
            "threshold": Setting(0.4, "stop where sqrt(c * entropy) is above this", 0, 100),
            "c": Setting(0.15, "the authors' constant for the cross-entropy's share", 0, 100),
            "max_draft": _MAX_DRAFT,
        },
        "SVIP, section 3.2",
        signals=policies.SVIP.signals,
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
    "cali-ts": Policy(
        policies.CaliTS,
        {
            "sigma_model": Setting(0.2, "how far the predictor is off, as a standard deviation", 1e-3, 10),
            "sigma_sample": Setting(0.4, "that of a round's acceptance rate", 1e-3, 10),
            "theta0": Setting(0.7, "acceptance rate to begin with", 0, 1),
            "model_prediction": Setting(True, "ask the predictor about each token"),
            "sampling_prediction": Setting(True, "learn from what was accepted"),
            "max_draft": _MAX_DRAFT,
        },
        "EESD, Algorithm 3 (mended)",
        random=True,
        needs_where={"model_prediction": frozenset({"agreement"})},
    ),
    "selfsd": Policy(
        policies.SelfSD, {"k": Setting(12, "longest draft", 1, 1000)}, "Self-SD, section 3.4", signals=policies.SelfSD.signals
    ),
}


_DRAFTS = {"drafts": Setting(4, "drafts at once", 1, 64)}
_BRANCHES = "candidates a place; a draft tree where above 1"


def _draft_model(name: str, paper: str) -> Method:
    return Method(name, "model", name, paper)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("ar", "none", None, "plain decoding"),
        Method(
            "sd",
            "model",
            "fixed",
            "Leviathan et al. 2023",
            any_policy=True,
            settings={
                "width": Setting(1, _BRANCHES, 1, 64),
                "depth": Setting("auto", "levels of the tree; auto: as many as the policy says", 1, 64, "auto"),
            },
        ),
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
        Method(
            "pearl",
            "model",
            None,
            "PEARL",
            schedule="parallel",
            any_policy=True,
            settings={
                "window": Setting(
                    "auto", "tokens drafted during a target pass; auto: the measured ratio of times", 1, 1000, "auto"
                ),
                "pre_verify": Setting(True, "judge a draft's first token while the rest is drafted"),
                "post_verify": Setting(True, "draft on while tokens are judged"),
            },
        ),
        Method(
            "mtad",
            "beams",
            "fixed",
            "MTAD, section 3.2",
            lossless=False,
            verifier="joint",
            settings={
                "beams": Setting(8, "width of the beam search", 1, 256),
                "tau": Setting(0.1, "accept the longest prefix whose joint likelihood ratio is above this", 0, 1),
                "beam": Setting("greedy", "keep the likeliest beams, or sample them", choices=("greedy", "sample")),
            },
            defaults={"k": 4},
        ),
        Method(
            "bild",
            "fallback",
            "fixed",
            "BiLD, Kim et al. 2023",
            lossless=False,
            verifier="rollback",
            settings={
                "fallback": Setting(0.9, "the draft hands over where its top probability is below this", 0, 1),
                "rollback": Setting(2.0, "the target refuses tokens with a -log probability above this", 0, 1000),
            },
            defaults={"k": 10},
        ),
        Method(
            "spectr", "chains", "fixed", "SpecTr, Sun et al. 2023", verifier="k-sequential", settings=_DRAFTS, defaults={"k": 4}
        ),
        Method(
            "specinfer",
            "chains",
            "fixed",
            "SpecInfer, Miao et al. 2023",
            verifier="multi-round",
            settings=_DRAFTS,
            defaults={"k": 4},
        ),
        Method("eesd", "exit", "cali-ts", "EESD, with Cali-TS where there is a predictor, else Beta-TS", unpredicted="beta-ts"),
        Method("eesd-fixed", "exit", "fixed", "EESD, without its control", any_policy=True),
        Method("eesd-beta", "exit", "beta-ts", "EESD, with Beta-TS"),
        Method("eesd-cali", "exit", "cali-ts", "EESD, with Cali-TS"),
        Method(
            "eesd-tree",
            "exit",
            "cali-ts",
            "EESD, section 5.7",
            settings={"width": Setting(3, _BRANCHES, 1, 64), "depth": Setting(5, "levels of the tree", 1, 64)},
            unpredicted="beta-ts",
        ),
        Method(
            "selfsd",
            "skip",
            "selfsd",
            "Self-SD, Zhang et al. 2023",
            any_policy=True,
            settings={"skip": Setting("auto", "layers to leave out, as 3+5a+7m (a: attention, m: MLP); auto: searched for")},
        ),
    )
}


def default_name(*, has_draft_model: bool) -> str:
    """The method that a pair is decoded with where nobody says how."""
    return "svip" if has_draft_model else "lookup"


def no_draft_model(method: Method) -> SpecgenError:
    return SpecgenError(f"{method.name} needs a draft model, and there is none", f"Name one with --draft{WITHOUT_A_DRAFT}")


def training_command(target: str | None) -> str:
    """What trains an exit layer for the target, None being the bundled one, whose texts are at hand."""
    of = "" if target is None else f" -t {shlex.quote(target)} --corpus FILE"
    return f"specgen tune --train --methods eesd{of}"


def no_exit_layer(method: Method, target: str | None) -> SpecgenError:
    return SpecgenError(
        f"{method.name} needs an exit layer trained for the target, and there is none",
        f"Train one with {training_command(target)}, or name one with --exit-layer FILE",
    )


def no_predictor(method: Method) -> SpecgenError:
    return SpecgenError(
        f"{method.name} asks a predictor, and the exit layer has none",
        "Train another with specgen tune --train, take model_prediction=false, or eesd-beta",
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

    def with_value(self, name: str, value: Value) -> Settings:
        return Settings(self.policy, {**self.values, name: value})

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


def resolve(method: Method, given: Mapping[str, object], *, has_predictor: bool | None = None) -> Settings:
    """Check what the user set and fill in the defaults. Raises SpecgenError naming the setting, its value and the way out.

    `has_predictor` None is not known yet: what either policy of such a method takes is let through.
    """
    if method.unpredicted is not None and has_predictor is None:
        try:
            return resolve(method, given, has_predictor=True)
        except SpecgenError as error:
            with suppress(SpecgenError):
                return resolve(method, given, has_predictor=False)
            raise error
    wanted = dict(given)
    policy = method.policy if has_predictor is not False or method.unpredicted is None else method.unpredicted
    if method.any_policy and "policy" in wanted:
        policy = str(wanted.pop("policy"))
        if policy not in POLICIES:
            raise SpecgenError(
                f"there is no length policy {policy!r}{nearest(policy, POLICIES)}", f"There are {', '.join(POLICIES)}"
            )
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
    _check_fed(method, policy, values)
    if values.get("width") == 1 and values.get("depth", "auto") != "auto" and "depth" in given and method.drafter == "model":
        raise SpecgenError(f"depth is {values['depth']}, but width is 1", "Give width=2 or more: a chain's length is k")
    return Settings(policy, values)


def _check_fed(method: Method, policy: str | None, values: Mapping[str, Value]) -> None:
    """Refuse a policy that asks for what the drafter cannot tell (entropy, of prompt lookup)."""
    feeds = FEEDS[method.drafter]
    if policy is None or not (missing := POLICIES[policy].needs_with(values) - feeds):
        return
    switches = [f"{name}=false" for name, needed in POLICIES[policy].needs_where.items() if needed & missing]
    fitting = [*switches, *(name for name, row in POLICIES.items() if row.signals <= feeds and name != policy)]
    raise SpecgenError(
        f"{method.name} cannot take the policy {policy!r}: its drafter has no {min(missing)} to feed it",
        f"Take one of {', '.join(fitting)}",
    )
