"""Mistakes in reading and showing recorded runs that the default tests must notice; see `mutants.py`."""

from __future__ import annotations

from mutants import Mutant, Selection, mutants

VIEWS = Selection("test_views.py")
TRACES = Selection("test_traces.py")
UI = Selection("test_ui.py")
COMPARED = Selection("test_compare_views.py")
HOSTILE = Selection("test_safe_text.py")

STATISTICS = [
    *mutants(
        "traces/acceptance.py",
        TRACES,
        (
            "low and high end of the acceptance interval swapped",
            "for sign in (-1, 1))",
            "for sign in (1, -1))",
        ),
        (
            "entropy over entropy instead of cross-entropy over entropy",
            "1 + token.kl / token.entropy",
            "token.kl / token.entropy",
        ),
        ("Pinsker's bound without its half", "max(divergence, 0.0) / 2", "max(divergence, 0.0)"),
        (
            "predictions after a rejected token count",
            'judged = accepted + (round_.verdict.source == "correction")',
            "judged = len(round_.draft.predicted)",
        ),
        (
            "a bin's mean is of the accepted alone",
            "fmean(number for number, _ in group)",
            "fmean(number * is_accepted for number, is_accepted in group)",
        ),
    ),
    *mutants(
        "traces/acceptance.py",
        VIEWS,
        (
            "a number at an edge counts to the range below",
            "bisect_right(edges, number, 1, len(edges) - 1)",
            "bisect_right(edges, number - 1e-9, 1, len(edges) - 1)",
        ),
    ),
    *mutants(
        "traces/statistics.py",
        TRACES,
        (
            "discarded tokens count as verified",
            "(token for token in self.tokens if token.status is not TokenStatus.DISCARDED)",
            "self.tokens",
        ),
        (
            "a draft's mean entropy with that of unverified tokens",
            "entropies = [draft.entropies[node] for node in (*path, *rejected)]",
            "entropies = list(draft.entropies)",
        ),
        ("a run of accepted tokens goes on after a rejection", "yield accepted\n            accepted = 0", "yield accepted"),
        (
            "both ends of a posterior's interval swapped",
            "beta_quantile(alpha, beta, 0.05), beta_quantile(alpha, beta, 0.95)",
            "beta_quantile(alpha, beta, 0.95), beta_quantile(alpha, beta, 0.05)",
        ),
    ),
    *mutants(
        "traces/reader.py",
        TRACES,
        ("the accepted path by the node before", "depth = depths.get(parent)", "depth = depths.get(node - 1)"),
        ("seconds of unknown phases get lost", 'else "other"] += value', 'else "other"] = value'),
        ("a cut line counts to its run", "        run.end = end\n", "        run.end = end + 1\n"),
    ),
]

SHOWN = [
    *mutants(
        "view/generation.py",
        UI,
        (
            "the footer's acceptance is the draft's share",
            "rate, run, energy = summary.acceptance_rate",
            "rate, run, energy = summary.draft_share",
        ),
        ("the beginning of a stop text is shown", "min(starts, default=len(text) - kept)", "min(starts, default=len(text))"),
        (
            "accepted tokens of the round counted without the first",
            "drafted=position < accepted",
            "drafted=position < accepted - 1",
        ),
    ),
    *mutants(
        "view/comparison.py",
        COMPARED,
        ("the bar is heavy to the high end", "for value in (low, high))", "for value in (high, high))"),
        (
            "the first method is the best",
            "if entry is top and (column",
            "if entry.is_reference and (column",
        ),
    ),
    *mutants(
        "view/comparison.py",
        VIEWS,
        ("the most important column is dropped first", "first = max(kept,", "first = min(kept,"),
        ("seconds and share of different phases", "(summary.phase_seconds[phase],", "(summary.phase_seconds['draft'],"),
    ),
    *mutants(
        "view/tune_report.py",
        VIEWS,
        (
            "expected and measured speed in each other's column",
            'rows.append([label, f"{method.predicted:.1f}", measured, speedup])',
            'rows.append([label, measured, f"{method.predicted:.1f}", speedup])',
        ),
    ),
    *mutants(
        "view/templates/charts.html.j2",
        VIEWS,
        ("an interval upside down", 'y1="{{ "%.1f"|format(chart.y(point[3])) }}"', 'y1="{{ "%.1f"|format(chart.y(point[1])) }}"'),
        ("the parts of the time bar lie on each other", "place.x = place.x + share", "place.x = share"),
        ("a line through the wrong heights", "100 * chart.y(y) / chart.height) }}", "100 * (1 - y)) }}"),
    ),
    *mutants("view/pages.py", HOSTILE, ("control characters in a tooltip", "else inline(str(value))", "else str(value)")),
    *mutants("view/pages.py", COMPARED, ("a page without escaping", "autoescape=True", "autoescape=False")),
]

VIEW_MUTANTS: list[Mutant] = [*STATISTICS, *SHOWN]
