"""The order of methods in a comparison, the best one, and the methods that did not run."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.compare.results import MethodResult
from specgen.methods import WITHOUT_A_DRAFT

NOT_RUN = "not run"


def ranked(results: Sequence[MethodResult]) -> list[MethodResult]:
    """Plain decoding, lossless methods by speed, broken ones, lossy ones by speed, and those that did not run."""

    def position(result: MethodResult) -> tuple[int, float]:
        if result.is_reference:
            return 0, 0.0
        kind = 4 if result.overall is None else 3 if not result.spec.lossless else 2 if result.broken else 1
        return kind, -(result.speedup or 0.0)

    return sorted(results, key=position)


def _candidates(results: Sequence[MethodResult]) -> list[MethodResult]:
    """The methods with a measured speedup whose output is the target's, plain decoding aside."""
    return [
        result
        for result in results
        if result.spec.lossless and not result.broken and not result.is_reference and result.speedup is not None
    ]


def best(results: Sequence[MethodResult]) -> MethodResult | None:
    """The fastest method whose output is the target's, None where there is none."""
    return max(_candidates(results), key=lambda result: result.speedup or 0.0, default=None)


def as_fast_as(results: Sequence[MethodResult], top: MethodResult) -> list[MethodResult]:
    """The other methods whose interval reaches the best one's speedup."""
    others = [result for result in _candidates(ranked(results)) if result is not top]
    return [result for result in others if result.overall and (result.overall.high or 0.0) >= (top.speedup or 0.0)]


def not_run(results: Sequence[MethodResult]) -> list[tuple[list[str], str]]:
    """Methods without figures and why: methods with the same reason share an entry."""
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
