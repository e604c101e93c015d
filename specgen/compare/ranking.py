"""Sorts the methods of a comparison, picks the best one, and lists the methods that did not run."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.compare.results import MethodResult
from specgen.methods.method import WITHOUT_A_DRAFT

NOT_RUN = "not run"
FEW_PROMPTS = 5  # with fewer, a bootstrap over prompts draws from too few values, and its interval is too narrow


def ranked(results: Sequence[MethodResult]) -> list[MethodResult]:
    """Returns the results sorted into this order: plain decoding, lossless methods (fastest first), methods with a wrong output
    although they should be lossless, lossy methods (fastest first), methods that did not run."""

    def position(result: MethodResult) -> tuple[int, float]:
        if result.is_reference:
            return 0, 0.0
        kind = 4 if result.overall is None else 3 if not result.spec.lossless else 2 if result.broken else 1
        return kind, -(result.speedup or 0.0)

    return sorted(results, key=position)


def _candidates(results: Sequence[MethodResult]) -> list[MethodResult]:
    """The methods that can be the best one: lossless, with a measured speedup and without wrong output. Plain decoding is not
    among them."""
    return [
        result
        for result in results
        if result.spec.lossless and not result.broken and not result.is_reference and result.speedup is not None
    ]


def best(results: Sequence[MethodResult]) -> MethodResult | None:
    """Returns the fastest lossless method whose output was right, None if there is none. Plain decoding does not count."""
    return max(_candidates(results), key=lambda result: result.speedup or 0.0, default=None)


def as_fast_as(results: Sequence[MethodResult], top: MethodResult) -> list[MethodResult]:
    """Returns the methods, other than the best one `top`, that may be just as fast.

    These are methods with the same settings as `top` once defaults are added, and methods whose speedup's 95 % confidence
    interval reaches the speedup of `top`. With fewer than `FEW_PROMPTS` prompts the intervals are not reliable: then it is every
    method."""
    others = [result for result in _candidates(ranked(results)) if result is not top]
    if too_few_prompts(top):
        return others
    identical = top.spec.decoding_key
    return [
        result
        for result in others
        if result.spec.decoding_key == identical or (result.overall and (result.overall.high or 0.0) >= (top.speedup or 0.0))
    ]


def too_few_prompts(result: MethodResult) -> str:
    """Returns a sentence that says why a speedup measured on so few prompts has no reliable interval; empty if it has one."""
    prompts = 0 if result.overall is None else result.overall.prompts
    if prompts >= FEW_PROMPTS:
        return ""
    return "One prompt gives no interval." if prompts == 1 else f"{prompts} prompts are too few for a reliable interval."


def not_run(results: Sequence[MethodResult]) -> list[tuple[list[str], str]]:
    """Returns the methods that have no results, as pairs: the names of all methods with the same reason, and the reason, such as
    an error message or `not measured yet`."""
    has_lookup = any(result.spec.name == "lookup" for result in results)
    reasons: dict[str, list[str]] = {}
    for result in ranked(results):
        if result.overall is not None:
            continue
        reason = "not measured yet"
        if result.failure is not None:
            hint = result.failure.hint.removesuffix(WITHOUT_A_DRAFT) if has_lookup else result.failure.hint
            reason = f"{NOT_RUN}: {result.failure.message.removeprefix(f'{result.spec.name} ')}"
            reason += f"; {hint[:1].lower()}{hint[1:]}" if hint else ""
        reasons.setdefault(reason, []).append(result.spec.written)
    return [(names, reason) for reason, names in reasons.items()]
