"""The decoding methods and the length policies, in the order in which they are listed, and how
their settings are read.

To add a method or a length policy, write it in a file of this package, and list it in `OURS` or
`_POLICIES`; `.github/CONTRIBUTING.md` says which tests it needs. Methods of other packages are in
`METHODS` from when they are loaded (see `outside`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from specgen.base.errors import RunError, SpecgenError, nearest
from specgen.base.settings import Setting, Settings, Value
from specgen.decoding.policy_base import Fixed, LengthPolicy, Signals
from specgen.methods import outside
from specgen.methods.adaptive import Adaptive, AdaptiveMethod
from specgen.methods.base import ADAPTIVE, Choice, Grid, Method
from specgen.methods.bild import BiLD
from specgen.methods.block import Block
from specgen.methods.copying import OFF
from specgen.methods.drafting_knowledge import AUTO
from specgen.methods.eagle import Eagle
from specgen.methods.eesd import EESD
from specgen.methods.eesd_older_names import EESDBeta, EESDCali, EESDFixed, EESDTree
from specgen.methods.fly import FLy
from specgen.methods.glide import GliDe
from specgen.methods.joint import Joint
from specgen.methods.lookahead import Lookahead
from specgen.methods.lookup import PromptLookup
from specgen.methods.medusa import Medusa
from specgen.methods.mtad import MTAD
from specgen.methods.mtp import MultiTokenPrediction
from specgen.methods.multi_draft import SpecInfer, SpecTr
from specgen.methods.ouroboros import Ouroboros
from specgen.methods.pearl import Pearl
from specgen.methods.plain import PlainDecoding
from specgen.methods.sd import SpeculativeDecoding
from specgen.methods.selfsd import SelfSD, SelfSpeculativeDecoding
from specgen.methods.suffix import SuffixDecoding
from specgen.methods.svip import SVIP, SVIPMethod
from specgen.methods.thompson import BetaTS, BetaTSMethod, CaliTS
from specgen.methods.transformers_policies import (
    Confidence,
    ConfidenceMethod,
    Heuristic,
    HeuristicMethod,
)

__all__ = ["ADAPTIVE", "METHODS", "POLICIES", "Choice", "Method", "find", "named", "resolve"]

DEFAULT_METHOD = "adaptive"  # if neither the user nor a saved tuning result (profile) names one
ALL_METHODS = "specgen inspect --methods"

OURS: Sequence[Method] = [
    PlainDecoding(),
    SpeculativeDecoding(),
    HeuristicMethod(),
    ConfidenceMethod(),
    SVIPMethod(),
    AdaptiveMethod(),
    BetaTSMethod(),
    PromptLookup(),
    SuffixDecoding(),
    Lookahead(),
    Ouroboros(),
    Pearl(),
    MTAD(),
    BiLD(),
    FLy(),
    Joint(),
    SpecTr(),
    SpecInfer(),
    EESD(),
    Medusa(),
    Eagle(),
    MultiTokenPrediction(),
    GliDe(),
    Block(),
    SelfSpeculativeDecoding(),
]
_OLDER: list[Method] = [EESDCali(), EESDBeta(), EESDFixed(), EESDTree()]
_POLICIES: list[type[LengthPolicy]] = [
    Fixed,
    Heuristic,
    Confidence,
    SVIP,
    BetaTS,
    CaliTS,
    SelfSD,
    Adaptive,
]

_BUILT_IN = {method.name: method for method in OURS}
_known = dict(_BUILT_IN)
# ours, and those from outside that were loaded
METHODS: Mapping[str, Method] = _known
# found by name, and listed nowhere
ALIASES: Mapping[str, Method] = {method.name: method for method in _OLDER}
POLICIES: Mapping[str, type[LengthPolicy]] = {policy.name: policy for policy in _POLICIES}
# The methods that are usually fast, the fastest first. They are compared by default where they can
# run.
USUAL = (
    "adaptive",
    "svip",
    "pearl",
    "mtp",
    "eagle",
    "lookup",
    "sd",
    "medusa",
    "eesd",
    "suffix",
    "glide",
    "block",
    "lookahead",
)


def find(name: str, *, others: Collection[str] = ()) -> Method:
    """Returns the method `name`: one of ours, one that was loaded, or one of an installed package,
    which is loaded.

    If there is none, raises SpecgenError, which suggests a method with a similar name; `others` are
    names that the caller knows besides. Also raises it if the method of a package is wrong.
    """
    method = METHODS.get(name) or ALIASES.get(name)
    if method is not None:
        return method
    if name in outside.installed():
        return _keep(outside.load_installed(name))
    if outside.is_reference(name):
        raise SpecgenError(
            f"the method {name} is not loaded", f"Only naming it runs its module: -m {name}"
        )
    hint = f"All of them: {ALL_METHODS}"
    if others:
        hint += f"; from transformers: {', '.join(others)}"
    raise SpecgenError(f"there is no method {name!r}{nearest(name, [*METHODS, *others])}", hint)


def named(name: str, *, others: Collection[str] = ()) -> Method:
    """Returns the method that the user names, as `find`; also a class, `package.module:Class`,
    whose module is imported.

    Raises SpecgenError as `find` and `outside.load`, and if a package offers another method under
    the name of one of ours.
    """
    if outside.is_reference(name) and not outside.is_local(name):
        return _keep(outside.load(name))
    problem = _clash(name)
    if problem is not None:
        raise problem
    return find(name, others=others)


def given(method: str | type[Method]) -> tuple[Method, Mapping[str, str]]:
    """Returns a method and its settings, which are not checked yet. `method` is a class, or a text
    such as `svip:threshold=0.4`. Raises SpecgenError as `named` and `split`, and for a class that
    is no complete method."""
    if not isinstance(method, type):
        name, settings = split(str(method))
        return named(name), settings
    for ours in (*OURS, *_OLDER):
        if type(ours) is method:
            return ours, {}
    return _keep(outside.made(method, outside.reference_of(method))), {}


def failure_outside(error: BaseException) -> RunError | None:
    """Returns the error of a method from outside in whose module `error` was raised; None if it was
    raised in none."""
    package = __name__.partition(".")[0]
    others = [
        method
        for method in METHODS.values()
        if type(method).__module__.partition(".")[0] != package
    ]
    return outside.failure(error, others)


def is_known(name: str) -> bool:
    """Whether `find` knows the method without importing a module that only the user may name."""
    return name in METHODS or name in ALIASES or name in outside.installed()


def _is_ours(name: str) -> bool:
    return name in _BUILT_IN or name in ALIASES


def _clash(name: str) -> SpecgenError | None:
    """Returns the error to raise where a package offers a method under this name of one of ours;
    None if none does, and for other names."""
    return outside.clash(name) if _is_ours(name) else None


def _keep(method: Method) -> Method:
    """Returns the method that is known by the name of `method` from now on: itself, unless one of
    the same class is known. Raises SpecgenError if its length policy is unknown."""
    known = METHODS.get(method.name)
    if known is not None and type(known) is type(method):
        return known
    if method.policy is not None and method.policy not in POLICIES:
        raise SpecgenError(
            f"{method.name}: there is no length policy {method.policy!r}"
            f"{nearest(method.policy, POLICIES)}",
            f"There are {', '.join(POLICIES)}; one of your own is made in start",
        )
    _known[method.name] = method
    return method


def listed(note: Callable[[str], None]) -> list[Method]:
    """Returns our methods and those of installed packages. Tells `note` which of those cannot be
    used, and why."""
    every = [*OURS]
    for name in outside.installed():
        problem = _clash(name)
        if problem is not None:
            note(str(problem))
            continue
        try:
            every.append(find(name))
        except SpecgenError as error:
            note(str(error))
    return every


def split(written: str) -> tuple[str, dict[str, str]]:
    """Splits text such as `svip:threshold=0.4:max_draft=12` into a method's name and the settings
    by name, not yet checked.

    A name without `=` after the first colon belongs to the method's name, unless this is one of
    ours: `package.module:Class:k=5`. Raises SpecgenError for a setting that is not written
    NAME=VALUE.
    """
    name, *pairs = (part.strip() for part in written.strip().split(":"))
    if pairs and outside.is_class_name(pairs[0]) and not _is_ours(name):
        name = f"{name}:{pairs.pop(0)}"
    settings: dict[str, str] = {}
    for pair in pairs:
        setting, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not setting:
            raise SpecgenError(
                f"cannot read {pair!r} in {written!r}",
                "Write settings like sd:policy=svip:threshold=0.3, lists like 3+5+7",
            )
        settings[setting] = value
    return name, settings


def choice_of(
    name: str, given: Mapping[str, Value], *, has_predictor: bool | None = None
) -> Choice:
    """Returns the method `name` with the settings `given`, and default values for all others.
    Raises SpecgenError as `resolve` does."""
    method = find(name)
    return Choice(method, given, resolve(method, given, has_predictor=has_predictor))


def signals_of(settings: Settings) -> Signals:
    """The names of the signals that the length policy with these settings reads; empty without a
    policy."""
    if settings.policy is None:
        return frozenset()
    return POLICIES[settings.policy].signals_with(settings.values)


def known_settings(method: Method, policy: str | None) -> dict[str, Setting]:
    """Returns the definitions of all settings of `method` with the length policy `policy` (None: no
    policy), by name.

    The setting `policy` itself is not included. The default values are those for this combination
    of method and policy.
    """
    settings = dict(method.settings)
    if policy is not None:
        settings.update(POLICIES[policy].settings)
        for name, default in method.defaults.get(policy, {}).items():
            settings[name] = replace(settings[name], default=default)
    return settings


def own_settings(method: Method) -> dict[str, Setting]:
    """Returns the definitions of all settings of `method` with its own length policy, by name."""
    return known_settings(method, method.policy)


def unmeasured_settings(method: Method) -> dict[str, Value]:
    """Returns the settings with which nothing has to be measured or searched before a run."""
    policy = {} if method.policy is None else POLICIES[method.policy].unmeasured
    return {**method.unmeasured, **policy}


def tuned_grids(method: Method) -> Sequence[Grid]:
    """Returns the values of settings that tuning tries: those in `Tuning.grids`; without any, those
    that the settings of the method's length policy list (`Setting.tuned`), or the method's own
    settings if it has no policy. Where a model's drafts may take turns with copies, and by default
    do not, this is tried too."""
    grids = method.tuning.grids
    if grids is None:
        settings = method.settings if method.policy is None else POLICIES[method.policy].settings
        grids = [{name: setting.tuned for name, setting in settings.items() if setting.tuned}]
    copy = method.settings.get("copy")
    if not grids or copy is None or copy.default != OFF:
        return grids
    # with the values of one more setting, where simulations are cheap: see `Tuning.recorded`
    first = dict([*grids[0].items()][:1]) if method.tuning.recorded else {}
    return [*grids, {**first, "copy": (AUTO,)}]


def distance_from_defaults(method: Method, settings: Mapping[str, Value]) -> int:
    """Returns how many of the settings differ from their defaults. A length policy other than the
    method's counts as one more."""
    policy = settings.get("policy", method.policy)
    known = known_settings(method, None if policy is None else str(policy))
    own = [
        name not in known or known[name].default != value
        for name, value in settings.items()
        if name != "policy"
    ]
    return (policy != method.policy) + sum(own)


def resolve(
    method: Method, given: Mapping[str, object], *, has_predictor: bool | None = None
) -> Settings:
    """Checks the user's settings `given` and adds the defaults. Raises SpecgenError for an unknown
    setting or an invalid value.

    A setting without a `policy` may select one: see `Method.policy_by_setting`. `has_predictor`
    says whether the exit layer has an acceptance predictor; for some methods this decides the
    length policy if the user names none. With None (not known yet) the settings of both possible
    policies are accepted.
    """
    if method.policy_without_predictor is not None and has_predictor is None:
        try:
            return resolve(method, given, has_predictor=True)
        except SpecgenError:
            with suppress(SpecgenError):
                return resolve(method, given, has_predictor=False)
            raise
    wanted = _with_present_names(method, given)
    policy = _take_policy(method, wanted, has_predictor=has_predictor)
    known = known_settings(method, policy)
    for name in wanted:
        if name not in known:
            named = "policy" in given
            raise _unknown_setting(name, method, policy, known, is_policy_named=named)
    if policy == Fixed.name and "depth" in known:
        _join_k_and_depth(known, wanted)
    values = {
        name: setting.parse(name, wanted.get(name, setting.default))
        for name, setting in known.items()
    }
    _check_signals(method, policy, values)
    _check_combination(method, policy, given, values)
    return Settings(policy, values)


def _with_present_names(method: Method, given: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings with those under an older name (`Method.older_settings`) under the
    present one. Raises SpecgenError if one is given under both."""
    wanted = dict(given)
    for older, (present, values) in method.older_settings.items():
        if older not in wanted:
            continue
        value = Setting(True, "").parse(older, wanted.pop(older))
        if present in wanted:
            raise SpecgenError(
                f"{older} is an older name of {present}, and both are given", f"Leave {older} out"
            )
        wanted[present] = values[bool(value)]
    return wanted


def _take_policy(
    method: Method, wanted: dict[str, object], *, has_predictor: bool | None
) -> str | None:
    """Returns the name of the length policy; None if the method has none.

    Takes the setting `policy` out of `wanted`, where users may choose it.
    """
    for name, policy in method.policy_by_setting.items():
        if name in wanted:
            wanted.setdefault("policy", policy)
    if method.any_policy and "policy" in wanted:
        policy = str(wanted.pop("policy"))
        if policy not in POLICIES:
            raise SpecgenError(
                f"there is no length policy {policy!r}{nearest(policy, POLICIES)}",
                f"There are {', '.join(POLICIES)}",
            )
        return policy
    if has_predictor is False and method.policy_without_predictor is not None:
        return method.policy_without_predictor
    return method.policy


def settable_names(method: Method) -> list[str]:
    """Returns the names of the settings that users may give with the method's own length policy."""
    return _settable(method, own_settings(method))


def _settable(method: Method, known: Mapping[str, Setting]) -> list[str]:
    return [*(["policy"] if method.any_policy else []), *known]


def _unknown_setting(
    name: str,
    method: Method,
    policy: str | None,
    known: Mapping[str, Setting],
    *,
    is_policy_named: bool,
) -> SpecgenError:
    """Returns the error for a setting that the method does not have with this length policy. It
    names the policies that have it; without those, a setting with a similar name."""
    combination = method.name
    if policy != method.policy:
        combination = f"{method.name} with policy={policy}"
    settable = _settable(method, known)
    if not is_policy_named:
        settable = list(dict.fromkeys([*settable, *method.policy_by_setting]))
    hint = f"It has {', '.join(settable)}" if settable else "It has none"
    others = [other for other in available_policies(method) if name in POLICIES[other].settings]
    problem = f"{combination} has no setting {name!r}"
    if not others:
        return SpecgenError(f"{problem}{nearest(name, settable)}", hint)
    owners = " or ".join(f"policy={other}" for other in others)
    return SpecgenError(f"{problem}, which belongs to {owners}", hint)


def _check_combination(
    method: Method, policy: str | None, given: Mapping[str, object], values: Mapping[str, Value]
) -> None:
    """Raises SpecgenError if some of the user's settings `given` exclude each other. `values` are
    all settings by name.

    A chain ignores a tree's setting that has its default value. Drafts by way of text do not look
    at the target's tokens.
    """
    width = values.get("width", 1)
    by_text = values.get("translation") == "text"
    if method.is_parallel and "draft_cost" in given and values.get("draft_cost") != "auto":
        raise SpecgenError(
            f"{method.name} drafts during the target's passes, so draft_cost has no effect",
            "Leave it out",
        )
    if width != 1 and values.get("cape"):
        raise SpecgenError(
            f"cape adds candidates to a chain, and width is {width}",
            "Take width=1, or leave cape out",
        )
    for name in ("nodes",) if method.grows_trees else ("depth", "nodes"):
        is_chain = values.get("width") == 1
        if (
            is_chain
            and name in given
            and values[name] not in ("auto", method.settings[name].default)
        ):
            raise SpecgenError(
                f"{name} is {values[name]}, but width is 1",
                "Give width=2 or more: a chain's length is k",
            )
    if by_text and policy == Adaptive.name:
        message = (
            "translation=text cannot use the policy 'adaptive', which follows "
            "single tokens of the target"
        )
        raise SpecgenError(message, "Name another with policy=")
    for name, off in (("width", 1), ("cape", False)):
        if by_text and values.get(name) != off:
            raise SpecgenError(
                f"translation=text drafts a chain, and {name} is {values[name]}",
                f"Leave {name} out",
            )


def _join_k_and_depth(known: Mapping[str, Setting], wanted: dict[str, object]) -> None:
    """Gives `k` and `depth` the same value if the user gave only one of them: both limit the levels
    of a tree.

    If both are given, the smaller one ends the tree. `depth` stays `auto` where this is its
    default.
    """
    for name, other in (("k", "depth"), ("depth", "k")):
        if name in wanted and other not in wanted and known[other].default != "auto":
            levels = known[name].parse(name, wanted[name])
            if isinstance(levels, int):
                wanted[other] = min(levels, int(known[other].high))


def available_policies(method: Method) -> list[str]:
    """The names of the length policies that users may choose for the method: its drafter computes
    all signals that they need. Empty if they may choose none.

    Signals are numbers about a drafted token, such as its entropy. Signals that a setting can
    switch off do not count.
    """
    if not method.any_policy:
        return []
    return [name for name, policy in POLICIES.items() if policy.signals <= method.signals]


def _check_signals(method: Method, policy: str | None, values: Mapping[str, Value]) -> None:
    """Raises SpecgenError if the policy reads a signal that the drafter does not compute, such as
    entropy with prompt lookup.

    Signals are numbers about a drafted token. `values` are the settings by name.
    """
    missing = signals_of(Settings(policy, values)) - method.signals
    if policy is None or not missing:
        return
    optional: Mapping[str, Signals] = POLICIES[policy].optional_signals
    switches = [f"{name}=false" for name, signals in optional.items() if signals & missing]
    others = [name for name in available_policies(method) if name != policy]
    raise SpecgenError(
        (
            f"{method.name} cannot use the policy {policy!r}: its drafter does not compute "
            f"{min(missing)}"
        ),
        f"Use one of {', '.join([*switches, *others])}",
    )
