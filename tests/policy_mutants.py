"""Mistakes in length policies that the default tests must notice; see `mutants.py`."""

from __future__ import annotations

from mutants import LENGTHS, Selection, mutants

ADAPTIVE = Selection("test_adaptive.py")

_DRAFTERS, _RUN = "decoding/drafting.py", "decoding/run.py"
_ADAPTIVE = "methods/adaptive.py"

POLICY_RULES = [
    *mutants(
        "methods/eesd.py",
        LENGTHS,
        (
            "Beta-TS counts unjudged tokens",
            "self.beta += min(accepted + 1, drafted) - accepted",
            "self.beta += drafted - accepted",
        ),
        ("Cali-TS counts unjudged tokens", "self._judged += min(accepted + 1, drafted)", "self._judged += drafted"),
        (
            "Cali-TS's weights swapped",
            "(sample * score + rounds * model * self.theta_hat)",
            "(rounds * model * score + sample * self.theta_hat)",
        ),
    ),
    *mutants(
        "methods/svip.py",
        LENGTHS,
        ("SVIP's c outside of the root", 'math.sqrt(self.c * token["entropy"])', 'self.c * math.sqrt(token["entropy"])'),
    ),
    *mutants(
        "methods/sd.py",
        LENGTHS,
        ("the heuristic's lengths change the wrong way", "if accepted == drafted else", "if accepted != drafted else"),
    ),
    *mutants(
        "methods/selfsd.py",
        LENGTHS,
        ("Self-SD's threshold moves the wrong way", "if self._rate < self.TARGET_RATE:", "if self._rate > self.TARGET_RATE:"),
    ),
    *mutants(
        _RUN,
        Selection("test_golden_rounds.py", "pearl and beta-ts"),
        ("the policy observes tokens that are not verified yet", "draft.levels - unverified, accepted", "draft.levels, accepted"),
    ),
]

ADAPTIVE_POLICY = [
    *mutants(
        _ADAPTIVE,
        ADAPTIVE,
        ("adaptive: only the last token's acceptance counts", "self._survival *= acceptance", "self._survival = acceptance"),
        ("adaptive: the rejected token teaches nothing", "min(accepted + 1, drafted)]", "accepted]"),
        ("adaptive: unjudged tokens count as rejected", "min(accepted + 1, drafted)]", "drafted]"),
        ("adaptive: tokens that were cut off stay pending", "del self._steps[unverified:]", "pass"),
        (
            "adaptive: pending tokens are sure to be accepted",
            "math.prod(acceptance for _, _, acceptance in self._steps)",
            "1.0",
        ),
        (
            "adaptive: a token of the target's own after pending ones",
            "tokens = accepted + (was_rejected or not judges_new)",
            "tokens = accepted + was_rejected",
        ),
        ("adaptive: a level costs as one token", "self._costs.of_draft(1, token.nodes)", "self._costs.of_draft(1, 1)"),
        ("adaptive: drafts that never pay are started", "if self._in_parallel or self._model_gain > 0:", "if True:"),
        ("adaptive: no pauses", "if not guard.pauses():", "if True:"),
        ("adaptive: judged tokens are judged again", "del self._steps[:drafted]", "del self._steps[:0]"),
        ("adaptive: costs stay the first guess", "self._costs = self._timed.costs.with_values(*self._given)", "pass"),
    ),
    *mutants(
        _DRAFTERS,
        ADAPTIVE,
        (
            "adaptive does not see the token before a cut",
            'return "eos" if tokens[-1] in self._eos_ids else token\n',
            'return "eos" if tokens[-1] in self._eos_ids else "pass ended" if is_cut else token\n',
        ),
    ),
    *mutants(
        "methods/learned_drafting.py",
        ADAPTIVE,
        ("guard: pauses of one length", "self.pause = min(2 * self.pause, LONGEST_PAUSE)", "pass"),
        (
            "guard: a pause does not lower the loss",
            "self.left, self.loss = self.pause, self.loss - budget",
            "self.left = self.pause",
        ),
        ("guard: every gain halves the pause", "elif self.loss < -budget:", "elif cost < tokens:"),
        (
            "guard: gains count for later losses",
            "max(self.pause // 2, SHORTEST_PAUSE), 0.0",
            "max(self.pause // 2, SHORTEST_PAUSE), self.loss",
        ),
        ("acceptance: nothing is learned for all tokens", "self.offset += residual / (self.information + self.strength)", "pass"),
        (
            "acceptance: the last tokens count as the others",
            "_LONG, _RECENT, _RECENT_STRENGTH = 0.999, 0.95",
            "_LONG, _RECENT, _RECENT_STRENGTH = 0.999, 0.999",
        ),
        ("gains: trials stay frequent", "max(_FEWEST_DRAFTS, _SHRINKING * self.trust)", "_DRAFTS"),
        ("gains: no return to the first gain", "_IDLE_FADING * self.gain, _IDLE_FADING * self.drafts", "self.gain, self.drafts"),
    ),
    *mutants(
        "decoding/costs/drafting_costs.py",
        ADAPTIVE,
        ("costs: a slow round counts as it is", "_OUTLIER = 3.0", "_OUTLIER = 100.0"),
        (
            "costs: the line goes through one pass only",
            "count + 2, x + _WIDEST, xx + _WIDEST**2",
            "count + 2, x, xx + _WIDEST**2",
        ),
    ),
    *mutants(
        "pair/drafting_knowledge.py",
        ADAPTIVE,
        ("adaptive: seeded runs share what they learn", "key = None if frozen else", "key ="),
        (
            "adaptive: seeded runs learn their costs",
            "(known.guess, None) if frozen else (known.costs, known)",
            "(known.costs, known)",
        ),
        (
            "adaptive: a trial's costs are not stored",
            "known.guess = known.costs\n",
            "known.guess = known.costs\n        return\n",
        ),
    ),
]

POLICY_MUTANTS = [*POLICY_RULES, *ADAPTIVE_POLICY]
