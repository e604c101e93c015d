"""Mistakes in length policies that the default tests must notice; see `mutants.py`."""

from __future__ import annotations

from mutants import LENGTHS, Selection, mutants

ADAPTIVE, ADAPTIVE_RUNS = Selection("test_adaptive.py"), Selection("test_adaptive_runs.py")
ESTIMATES = Selection("test_drafting_estimates.py")
SHARED = Selection("test_adaptive_pairs.py")

_DRAFTERS, _RUN = "decoding/drafting.py", "decoding/run.py"
_ADAPTIVE, _GUARD = "methods/adaptive.py", "methods/drafting_guard.py"

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
        (
            "adaptive: only the last token's acceptance counts",
            "self.predictions.append(acceptance)\n        self._survival *= acceptance",
            "self.predictions.append(acceptance)\n        self._survival = acceptance",
        ),
        ("adaptive: the rejected token teaches nothing", "min(accepted + 1, drafted)]", "accepted]"),
        ("adaptive: unjudged tokens count as rejected", "min(accepted + 1, drafted)]", "drafted]"),
        ("adaptive: tokens that were cut off stay pending", "del self._steps[unverified:]", "pass"),
        ("adaptive: pending tokens are sure to be accepted", "            self._survival *= acceptance\n", "            pass\n"),
        (
            "adaptive: a token of the target's own after pending ones",
            "tokens = accepted + (was_rejected or not judges_new)",
            "tokens = accepted + was_rejected",
        ),
        ("adaptive: a level costs as one token", "self._level = token.nodes", "self._level = 1"),
        ("adaptive: drafts that never pay are started", "if gain <= cost and not guard.tries():", "if False:"),
        ("adaptive: what never seemed to pay is never tried", "if gain <= cost and not guard.tries():", "if gain <= cost:"),
        (
            "adaptive: no pauses",
            "        guard = self.learned.guard\n        if guard.pauses():",
            "        guard = self.learned.guard\n        if False:",
        ),
        ("adaptive: rounds without a draft are rejections", "accepted > 0 if drafted else None", "accepted > 0"),
    ),
    *mutants(
        _DRAFTERS,
        ADAPTIVE_RUNS,
        (
            "adaptive does not see the token before a cut",
            'return "eos" if tokens[-1] in self._eos_ids else token\n',
            'return "eos" if tokens[-1] in self._eos_ids else "pass ended" if is_cut else token\n',
        ),
    ),
    *mutants(
        _ADAPTIVE,
        ADAPTIVE_RUNS,
        ("adaptive: judged tokens are judged again", "del self._steps[:drafted]", "del self._steps[:0]"),
    ),
    *mutants(
        _GUARD,
        ESTIMATES,
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
    ),
    *mutants(
        "methods/acceptance_calibration.py",
        ESTIMATES,
        ("calibration: the same offset for all intervals", "bisect(self.prior.edges, score), self.FADING", "0, self.FADING"),
        (
            "calibration: the sums never fade",
            "self.information = self.information * fading",
            "self.information = self.information",
        ),
        (
            "calibration: nothing is learned for all tokens",
            "self.offset += residual / (self.information + prior.strength)",
            "pass",
        ),
        (
            "calibration: the last tokens count as the others",
            "residuals * self.RECENT_FADING + residual, informations * self.RECENT_FADING + information",
            "residuals * fading + residual, informations * fading + information",
        ),
        (
            "calibration: the last tokens change what is learned",
            "        residual, information = accepted - expected,",
            "        expected = self.predict(score)\n        residual, information = accepted - expected,",
        ),
        ("calibration: a copy shares its offsets", "offsets=list(self.offsets), informations=", "informations="),
    ),
    *mutants(
        "methods/first_acceptance.py",
        ESTIMATES,
        ("first token: likelihoods swapped", "(level if accepted else 1 - level)", "(1 - level if accepted else level)"),
        (
            "first token: no change without a draft",
            "        change = self.change",
            "        change = self.change\n        if accepted is None:\n            return",
        ),
        ("first token: trials get rarer after any rejection", "elif weights[0] > _USELESS:", "else:"),
        ("first token: trials stay rare", "                self.change = _CHANGE\n", "                pass\n"),
    ),
    *mutants(
        "methods/learned_drafting.py",
        ESTIMATES,
        ("start: later tokens do not count", "+ later) - (1", ") - (1"),
        ("start: later tokens may count as a loss", "max(0.0, self.later[0] / self.later[1])", "self.later[0] / self.later[1]"),
        ("start: waste does not count", " - (1 - accepted) * waste", ""),
        ("start: the first token counts as waste", "self.waste[0] + cost - cost_of_first", "self.waste[0] + cost"),
        ("the prior of greedy decoding for sampling", "share = min(temperature, 1.0)", "share = 0.0"),
    ),
    *mutants(
        "decoding/costs/drafting_costs.py",
        ADAPTIVE,
        ("costs: only the next token counts on a step up", "range(1, _STAGES + 1)", "range(1, 2)"),
    ),
    *mutants(
        "pair/drafting_knowledge.py",
        SHARED,
        ("adaptive: seeded runs share what they learn", "if sampling.greedy or sampling.seed is None:", "if True:"),
    ),
    *mutants(
        "workers/server.py",
        SHARED,
        (
            "adaptive: the worker forgets what it learned",
            "learned=self._learned.setdefault(adaptive.key, adaptive.learned)",
            "learned=adaptive.learned",
        ),
    ),
]

POLICY_MUTANTS = [*POLICY_RULES, *ADAPTIVE_POLICY]
