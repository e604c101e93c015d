"""The table of decoding methods. Each row names a drafter, a length policy, a verifier and a schedule. Imports no torch.

To add a method, add a row to `METHODS` and, where it needs new behaviour, a class in a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from specgen.base.errors import SpecgenError, nearest
from specgen.base.settings import Setting, Settings, Value
from specgen.decoding import drafter_kinds as kinds
from specgen.decoding.adaptive import Adaptive
from specgen.decoding.length_policy import Signals
from specgen.decoding.policies import POLICIES, CaliTS, Fixed, signals_of
from specgen.methods.method import Method

DEFAULT_METHOD = "adaptive"  # if neither the user nor a saved tuning result (profile) names one
DEFAULT_EXIT = DEFAULT_HEAD = "auto"  # the trained part that the user named, or the one found for the target
ALL_METHODS = "specgen inspect --methods"


_EXIT = {"exit": Setting(DEFAULT_EXIT, "the exit layer's file or folder; auto: --exit-layer, or the one found for the target")}
_HEAD = {"head": Setting(DEFAULT_HEAD, "the head's folder; auto: --head, or the one found for the target")}
_SKIP = "layers to skip, as 3+5a+7m (a: attention only, m: MLP only); auto: searched for"
_DRAFTS = {"drafts": Setting(4, "number of drafts", 1, 64)}
_TRANSLATION = {
    "translation": Setting(
        "tokens",
        "for a draft model with another tokenizer: by the tokens that both have (TLI), or by text, encoded again (SLEM)",
        choices=("tokens", "text"),
    )
}
_CAPE = {"cape": Setting(False, "add likely candidates at each position of the chain, more where the draft is unsure (CaPE)")}


def _tree(width: int, depth: int | str, nodes: int | str = "auto") -> dict[str, Setting]:
    """The settings of trees with these defaults. A `depth` of `auto` leaves the number of levels to the length policy."""
    levels = "most levels of the tree" if isinstance(depth, int) else "levels of the tree; auto: the policy decides"
    return {
        "width": Setting(width, "candidates at each position; above 1, drafts are trees", 1, 64),
        "depth": Setting(depth, levels, 1, 64, None if isinstance(depth, int) else "auto"),
        "nodes": Setting(nodes, "keep this many of all candidates, as EAGLE-2; auto: the width at each level", 1, 1024, "auto"),
    }


def _ngram(default: int) -> dict[str, Setting]:
    return {"ngram": Setting(default, "longest n-gram to look up", 1, 32)}


def _draft_model(name: str, paper: str) -> Method:
    return Method(name, kinds.MODEL, name, paper)


def _multi_draft(name: str, paper: str, verifier: str) -> Method:
    row = Method(name, kinds.MULTI_DRAFT, "fixed", paper, verifier=verifier, any_policy=True)
    return replace(row, settings=_DRAFTS, defaults={"fixed": {"k": 4}})


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("ar", kinds.NONE, None, "plain decoding"),
        Method(
            "sd",
            kinds.MODEL,
            "fixed",
            "Leviathan et al. 2023",
            any_policy=True,
            settings=_tree(1, "auto") | _CAPE | _TRANSLATION,
        ),
        _draft_model("heuristic", "transformers' assisted generation"),
        _draft_model("confidence", "transformers' assisted generation"),
        _draft_model("svip", "SVIP"),
        Method(
            "adaptive",
            kinds.HYBRID,
            "adaptive",
            "optimal stopping; SpecDec++, Huang et al. 2024",
            settings={"lookup": Setting(True, "also draft by prompt lookup, where this gains more"), **_ngram(5)},
            drafts_without_model=True,
        ),
        _draft_model("beta-ts", "EESD, Table 5"),
        Method(
            "lookup",
            kinds.LOOKUP,
            "adaptive",
            "prompt lookup, Saxena 2023",
            any_policy=True,
            settings=_ngram(3),
            defaults={"fixed": {"k": 10}},
        ),
        Method(
            "suffix",
            kinds.SUFFIX,
            "adaptive",
            "SuffixDecoding, Oliaro et al. 2024",
            any_policy=True,
            settings={
                "min_prob": Setting(0.05, "end a draft before its probability is below this (the paper: 0.1)", 0, 1),
                "factor": Setting(4.0, "longest draft, as a multiple of the match's length (the paper: 1)", 0.1, 1000),
                "history": Setting(
                    False, "also copy from earlier outputs of the loaded models, kept in memory only; not in compare and tune"
                ),
            },
        ),
        Method(
            "lookahead",
            kinds.LOOKAHEAD,
            None,
            "lookahead decoding, Fu et al. 2024",
            settings={
                "window": Setting(3, "columns of the window, W; the authors: 15, 10, 7 for 7B, 13B, 33B on an A100", 1, 128),
                "ngram": Setting(3, "length of the n-grams, N; the authors: 5", 2, 16),
                "guesses": Setting(3, "most n-grams for a token, G; the authors: as many as the window's columns", 1, 128),
            },
        ),
        Method(
            "ouroboros",
            kinds.OUROBOROS,
            "fixed",
            "Ouroboros, Zhao et al. 2024",
            settings={
                "ngram": Setting(4, "length of the n-grams, N; the authors: 5 to 7", 2, 16),
                "branches": Setting(3, "phrases tried after the drafted tokens, K; the authors: 3", 0, 64),
                "window": Setting(4, "columns of the draft's window, and n-grams for a token; the authors: 15 to 20", 1, 128),
            },
            defaults={"fixed": {"k": 5}},
        ),
        Method(
            "pearl",
            kinds.MODEL,
            None,
            "PEARL",
            schedule="parallel",
            any_policy=True,
            settings={
                "window": Setting(
                    "auto", "tokens drafted during a target pass; auto: the measured ratio of times", 1, 1000, "auto"
                ),
                "pre_verify": Setting(True, "verify a draft's first token while the rest is drafted"),
                "post_verify": Setting(True, "continue drafting while tokens are verified"),
            },
        ),
        Method(
            "mtad",
            kinds.BEAMS,
            "fixed",
            "MTAD, section 3.2",
            lossless=False,
            verifier="joint",
            any_policy=True,
            settings={
                "beams": Setting(8, "width of the beam search", 1, 256),
                "tau": Setting(0.1, "accept the longest prefix whose joint likelihood ratio is above this", 0, 1),
                "beam": Setting("greedy", "keep the likeliest beams, or sample them", choices=("greedy", "sample")),
            },
            defaults={"fixed": {"k": 4}},
        ),
        Method(
            "bild",
            kinds.BILD,
            "fixed",
            "BiLD, Kim et al. 2023",
            lossless=False,
            verifier="rollback",
            any_policy=True,
            settings={
                "fallback": Setting(0.9, "end the draft where its top probability is below this", 0, 1),
                "rollback": Setting(2.0, "reject tokens whose -log probability under the target is above this", 0, 1000),
            },
            defaults={"fixed": {"k": 10}},
        ),
        Method(
            "joint",
            kinds.SEARCH,
            None,
            "MTAD, Definition 3.1: what mtad approximates",
            lossless=False,
            schedule="joint",
            settings={
                "k": Setting(4, "tokens in a block", 1, 64),
                "beams": Setting(0, "width of an approximate beam search; 0: the exact search", 0, 256),
                "nodes": Setting(4096, "most prefixes that the exact search for one block may extend", 16, 1 << 20),
            },
            is_yardstick=True,
        ),
        _multi_draft("spectr", "SpecTr, Sun et al. 2023", "k-sequential"),
        _multi_draft("specinfer", "SpecInfer, Miao et al. 2023", "multi-round"),
        Method(
            "eesd",
            kinds.EXIT,
            "cali-ts",
            "EESD, with Cali-TS if there is a predictor, else Beta-TS",
            settings=_EXIT,
            policy_without_predictor="beta-ts",
        ),
        Method("eesd-fixed", kinds.EXIT, "fixed", "EESD, with drafts of fixed length", any_policy=True, settings=_EXIT | _CAPE),
        Method("eesd-beta", kinds.EXIT, "beta-ts", "EESD, with Beta-TS", settings=_EXIT),
        Method("eesd-cali", kinds.EXIT, "cali-ts", "EESD, with Cali-TS", settings=_EXIT),
        Method(
            "eesd-tree",
            kinds.EXIT_TREE,
            "cali-ts",
            "EESD, section 5.7",
            any_policy=True,
            settings=_tree(3, 5) | _EXIT,
            policy_without_predictor="beta-ts",
        ),
        Method(
            "medusa",
            kinds.MEDUSA,
            "fixed",
            "Medusa-1, Cai et al. 2024",
            any_policy=True,
            settings={
                "nodes": Setting(10, "tokens in the tree of candidates (63 in the paper); 0: a chain", 0, 1024),
                **_HEAD,
            },
            defaults={"fixed": {"k": 4}},
        ),
        Method(
            "eagle",
            kinds.EAGLE,
            "fixed",
            "EAGLE-2 and EAGLE-3, Li et al. 2024, 2025",
            any_policy=True,
            settings=_tree(4, 10, 10) | _CAPE | _HEAD,
            defaults={"svip": {"every": 2}},
        ),
        Method("glide", kinds.GLIDE, "fixed", "GliDe, Du et al. 2024", any_policy=True, settings=_CAPE | _HEAD),
        Method(
            "selfsd",
            kinds.SKIP,
            "selfsd",
            "Self-SD, Zhang et al. 2023",
            any_policy=True,
            settings={"skip": Setting("auto", _SKIP)} | _CAPE,
        ),
    )
}


def find(name: str) -> Method:
    """Returns the method `name`. If there is none, raises SpecgenError with the most similar name."""
    if name not in METHODS:
        raise SpecgenError(f"there is no method {name!r}{nearest(name, METHODS)}", f"All of them: {ALL_METHODS}")
    return METHODS[name]


def known_settings(method: Method, policy: str | None) -> dict[str, Setting]:
    """Returns the definitions of all settings of `method` with the length policy `policy`, by name.

    The setting `policy` itself is not included. Default values are those of this method with this policy.
    """
    known = dict(method.settings)
    if policy is not None:
        known.update(POLICIES[policy].settings)
        for name, default in method.defaults.get(policy, {}).items():
            known[name] = replace(known[name], default=default)
    return known


def resolve(method: Method, given: Mapping[str, object], *, has_predictor: bool | None = None) -> Settings:
    """Checks the user's settings `given` and adds the defaults. Raises SpecgenError for an unknown setting or an invalid value.

    A `k` without a `policy` means `policy=fixed` where the method's own policy is `adaptive` (`Method.k_alone`).
    `has_predictor` says whether the exit layer has an acceptance predictor, which decides the length policy of some methods if
    the user names none. With None (not known yet) the settings of both possible policies are accepted.
    """
    if method.policy_without_predictor is not None and has_predictor is None:
        try:
            return resolve(method, given, has_predictor=True)
        except SpecgenError as error:
            with suppress(SpecgenError):
                return resolve(method, given, has_predictor=False)
            raise error
    wanted = dict(given)
    policy = method.policy if has_predictor is not False else method.policy_without_predictor or method.policy
    if method.k_alone and "k" in wanted:
        wanted.setdefault("policy", Fixed.name)
    if method.any_policy and "policy" in wanted:
        policy = str(wanted.pop("policy"))
        if policy not in POLICIES:
            raise SpecgenError(
                f"there is no length policy {policy!r}{nearest(policy, POLICIES)}", f"There are {', '.join(POLICIES)}"
            )
    known = known_settings(method, policy)
    for name in wanted:
        if name not in known:
            combination = method.name if policy == method.policy else f"{method.name} with policy={policy}"
            settable = [*(["policy"] if method.any_policy else []), *known]
            if method.k_alone and not {"policy", "k"} & given.keys():
                settable.append("k")
            raise SpecgenError(
                f"{combination} has no setting {name!r}{nearest(name, settable)}",
                f"It has {', '.join(settable)}" if settable else "It has none",
            )
    if policy == "fixed" and "depth" in known:
        _join_k_and_depth(known, wanted)
    values = {name: setting.parse(name, wanted.get(name, setting.default)) for name, setting in known.items()}
    _check_signals(method, policy, values)
    if method.is_parallel and "draft_cost" in given and values.get("draft_cost") != "auto":
        raise SpecgenError(f"{method.name} drafts during the target's passes, so draft_cost has no effect", "Leave it out")
    _check_tree(method, given, values)
    _check_text(policy, values)
    return Settings(policy, values)


def _check_tree(method: Method, given: Mapping[str, object], values: Mapping[str, Value]) -> None:
    """Raises SpecgenError if settings of a tree were `given` for a chain, or those of a chain for a tree. `values` are all.

    A chain ignores a tree's setting that has its default value.
    """
    if values.get("width", 1) != 1 and values.get("cape"):
        raise SpecgenError(f"cape adds candidates to a chain, and width is {values['width']}", "Take width=1, or leave cape out")
    for name in ("nodes",) if method.drafter.drafts_trees else ("depth", "nodes"):
        if values.get("width") == 1 and name in given and values[name] not in ("auto", method.settings[name].default):
            raise SpecgenError(f"{name} is {values[name]}, but width is 1", "Give width=2 or more: a chain's length is k")


def _check_text(policy: str | None, values: Mapping[str, Value]) -> None:
    """Raises SpecgenError if drafts by way of text are combined with a setting that looks at the target's tokens."""
    if values.get("translation") != "text":
        return
    if policy == Adaptive.name:
        others = ", ".join(name for name in POLICIES if name not in (Adaptive.name, CaliTS.name))
        message = "translation=text cannot use the policy 'adaptive', which follows single tokens of the target"
        raise SpecgenError(message, f"Use one of {others}")
    for name, off in (("width", 1), ("cape", False)):
        if values.get(name) != off:
            raise SpecgenError(f"translation=text drafts a chain, and {name} is {values[name]}", f"Leave {name} out")


def _join_k_and_depth(known: Mapping[str, Setting], wanted: dict[str, object]) -> None:
    """Gives `k` and `depth` the same value if the user gave only one of them: both limit the levels of a tree.

    If both are given, the smaller one ends the tree. `depth` stays `auto` where this is its default.
    """
    for name, other in (("k", "depth"), ("depth", "k")):
        if name in wanted and other not in wanted and known[other].default != "auto":
            levels = known[name].parse(name, wanted[name])
            if isinstance(levels, int):
                wanted[other] = min(levels, int(known[other].high))


def available_policies(method: Method) -> list[str]:
    """The names of the length policies that work with the method's drafter: it computes all signals that they always read.

    Signals are numbers about a drafted token, such as its entropy.
    """
    return [name for name, policy in POLICIES.items() if policy.signals <= method.drafter.signals]


def _check_signals(method: Method, policy: str | None, values: Mapping[str, Value]) -> None:
    """Raises SpecgenError if the policy reads a signal that the drafter does not compute, such as entropy with prompt lookup.

    Signals are numbers about a drafted token. `values` are the settings by name.
    """
    missing = signals_of(Settings(policy, values)) - method.drafter.signals
    if policy is None or not missing:
        return
    optional: Mapping[str, Signals] = POLICIES[policy].optional_signals
    switches = [f"{name}=false" for name, signals in optional.items() if signals & missing]
    others = [name for name in available_policies(method) if name != policy]
    raise SpecgenError(
        f"{method.name} cannot use the policy {policy!r}: its drafter does not compute {min(missing)}",
        f"Use one of {', '.join([*switches, *others])}",
    )
