"""Mistakes in decoding that the default tests must notice: small changes of the package's source text (mutants).

`test_mutants.py` checks that each text still occurs, and under `-m slow` that the named tests fail with each change.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """A selection of the default tests: a file or test in `tests/`, and pytest's `-k` expression (empty: all of them)."""

    path: str
    expression: str = ""


@dataclass(frozen=True)
class Mutant:
    """A mistake: in `file`, a path in the package, `replacement` is put in place of `text`, which occurs exactly once."""

    name: str
    file: str
    text: str
    replacement: str
    tests: Selection


CHAIN = Selection("test_enumeration.py::test_chains")
POLICY = Selection("test_enumeration.py::test_length_policies")
PEARL = Selection("test_enumeration.py::test_pearl")
TREE = Selection("test_enumeration.py::test_trees", "width")
SPECINFER = Selection("test_enumeration.py::test_trees", "specinfer")
SPECTR = Selection("test_enumeration.py::test_trees", "spectr")
UNIFORMS = Selection("test_enumeration.py::test_each_random_number_is_used_once")
PEARL_ROUNDS = Selection("test_parallel.py")
GREEDY = Selection("test_verifiers.py")
TREE_LEVELS = Selection("test_eesd_signals.py::test_signals_of_a_tree_are_those_of_each_levels_likeliest_node")
LENGTHS = Selection("test_policies.py")
ADAPTIVE, ADAPTIVE_RUNS = Selection("test_adaptive.py"), Selection("test_adaptive_runs.py")
ESTIMATES = Selection("test_drafting_estimates.py")
SHARED = Selection("test_adaptive_pairs.py")
LOSSY = Selection("test_joint.py")
WARPING = Selection("test_distributions.py::test_warping_is_transformers")


def mutants(file: str, tests: Selection, *changes: tuple[str, str, str]) -> list[Mutant]:
    """Mutants of one file that the same tests must notice: name, text and replacement of each."""
    return [Mutant(name, file, text, replacement, tests) for name, text, replacement in changes]


_VERIFIERS, _MULTI = "decoding/verifiers.py", "decoding/multi_draft.py"
_DRAFTERS, _PARALLEL, _RUN = "decoding/drafters.py", "decoding/parallel.py", "decoding/run.py"
_POLICIES, _ADAPTIVE, _GUARD = "decoding/policies.py", "decoding/adaptive.py", "decoding/drafting_guard.py"

REJECTION_SAMPLING = [
    *mutants(
        _VERIFIERS,
        CHAIN,
        ("one uniform number for the whole draft", "torch.rand(length,", "torch.rand(1,"),
        (
            "drafted tokens after the first accepted unseen",
            "accepted = (fresh * q < p).cumprod(dim=0).sum()",
            "accepted = ((fresh * q < p) | (torch.arange(length) > 0)).cumprod(dim=0).sum()",
        ),
        ("p * 1.02", "(fresh * q < p)", "(fresh * q < p * 1.02)"),
        ("tokens after a rejected one accepted", "(fresh * q < p).cumprod(dim=0).sum()", "(fresh * q < p).sum()"),
        (
            "residual mixed with 20 % of p",
            "torch.where(residual.sum() > 0, residual, probs)",
            "torch.where(residual.sum() > 0, 0.8 * residual / residual.sum() + 0.2 * probs, probs)",
        ),
        (
            "correction from the whole of p",
            "residual = (probs - drawn_from * (accepted < length)).clamp_min_(0)",
            "residual = probs",
        ),
        (
            "residual the wrong way round, max(q - p, 0)",
            "residual = (probs - drawn_from * (accepted < length)).clamp_min_(0)",
            "residual = torch.where(accepted < length, drawn_from - probs, probs).clamp_min_(0)",
        ),
        ("residual for the bonus too", "(accepted < length)", "(accepted <= length)"),
        (
            "one accepted token too few",
            "return make_verdict(draft, range(count), own)",
            "return make_verdict(draft, range(max(count - 1, 0)), own)",
        ),
        ("one accepted token too many", "cumprod(dim=0).sum()", "cumprod(dim=0).sum().add(1).clamp_max(length)"),
        (
            "bonus from the row before",
            "accepted.clamp_max(target_probs.shape[0] - 1)[None]",
            "accepted.clamp_max(length - 1)[None]",
        ),
        (
            "correction with the next token's q",
            "rejected = accepted.clamp_max(length - 1)[None]",
            "rejected = (accepted + 1).clamp_max(length - 1)[None]",
        ),
        ("a deterministic draft has the target's p as its q", "q = 1.0 if draft_probs is None", "q = p if draft_probs is None"),
    ),
    *mutants(
        _VERIFIERS,
        UNIFORMS,
        (
            "the verifier's generator starts anew for each draft",
            "fresh = torch.rand(length, generator=self._generator, device=device)",
            "fresh = torch.rand(length, generator=self._generator.manual_seed(0), device=device)",
        ),
    ),
    *mutants(
        "factory.py",
        UNIFORMS,
        (
            "draft and verifier share a seed",
            'seed=derive_seed(components.seed, "draft")',
            'seed=derive_seed(components.seed, "target")',
        ),
    ),
    *mutants(
        _DRAFTERS,
        CHAIN,
        (
            "draft logits beyond the target's vocabulary are not cut",
            "output.logits[0, : self._vocab_size]",
            "output.logits[0]",
        ),
        (
            "a narrower draft's q is not padded",
            "probs=logits_ops.pad_probs(torch.stack(self._probs), self._setup.vocab_size) if",
            "probs=torch.stack(self._probs) if",
        ),
        (
            "q at temperature 1 whatever the sampling parameters are",
            "                self._probs.append(probs)",
            "                self._probs.append(logits.float().softmax(dim=-1))",
        ),
    ),
    *mutants(
        "decoding/logits_ops.py",
        WARPING,
        ("top-k keeps one token less", "scores < weakest", "scores <= weakest"),
        (
            "top-p before the token that reaches it",
            "        is_cut = values.cumsum(dim=-1) - values >= top_p",
            "        is_cut = values.cumsum(dim=-1) >= top_p",
        ),
    ),
    *mutants(
        "decoding/logits_ops.py",
        CHAIN,
        ("top-p without renormalising", "return kept.div_(kept.sum(dim=-1, keepdim=True))", "return kept"),
    ),
]

DRAFTING = [
    *mutants(
        _DRAFTERS,
        POLICY,
        (
            "the doubtful token dropped instead of kept",
            "return chain.draft(extend_draft(policy, limit, extend, unverified=len(unverified)))",
            """reason = extend_draft(policy, limit, extend, unverified=len(unverified))
        if reason == policy.reason and len(chain.tokens) > 1:
            chain.drop_last()
        return chain.draft(reason)""",
        ),
        (
            "stop before keeping the token",
            """            tokens.append(chain.tokens[-1])
""",
            """            if not policy.keep_drafting(token):
                chain.drop_last()
                return policy.reason
            tokens.append(chain.tokens[-1])
""",
        ),
    ),
    *mutants(
        "decoding/sequential.py",
        CHAIN,
        ("a draft one token too long", "run.remaining - 1)", "run.remaining)"),
    ),
    *mutants(
        _RUN,
        CHAIN,
        (
            "EOS inside a draft ignored by the run",
            "if self._ends(draft.tokens[node]):",
            "if self._ends(draft.tokens[node]) and False:",
        ),
    ),
    *mutants(
        _DRAFTERS,
        LENGTHS,
        (
            "EOS inside a draft ignored by the drafter",
            'return "eos" if tokens[-1] in self._eos_ids else token\n',
            "return token\n",
        ),
    ),
    *mutants(
        "decoding/prompt_lookup.py",
        LENGTHS,
        ("prompt lookup drafts after EOS", "eos = tokens[-1] in self._eos_ids", "eos = False"),
        (
            "prompt lookup copies from one token too early",
            "self._continuations[tuple(context.ids[position - length : position])] = position",
            "self._continuations[tuple(context.ids[position - length : position])] = position - 1",
        ),
    ),
]

POLICY_RULES = [
    *mutants(
        _POLICIES,
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
        ("SVIP's c outside of the root", 'math.sqrt(self.c * token["entropy"])', 'self.c * math.sqrt(token["entropy"])'),
        ("the heuristic's lengths change the wrong way", "if accepted == drafted else", "if accepted != drafted else"),
        ("Self-SD's threshold moves the wrong way", "if self._rate < self.TARGET_RATE:", "if self._rate > self.TARGET_RATE:"),
    ),
    *mutants(
        _RUN,
        PEARL_ROUNDS,
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
        ("adaptive: drafts that never pay are started", "        return gain > cost\n", "        return True\n"),
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
        "decoding/acceptance_calibration.py",
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
        "decoding/first_acceptance.py",
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
        "decoding/learned_drafting.py",
        ESTIMATES,
        ("start: later tokens do not count", "+ later) - (1", ") - (1"),
        ("start: later tokens may count as a loss", "max(0.0, self.later[0] / self.later[1])", "self.later[0] / self.later[1]"),
        ("start: waste does not count", " - (1 - accepted) * waste", ""),
        ("start: the first token counts as waste", "self.waste[0] + cost - cost_of_first", "self.waste[0] + cost"),
        ("the prior of greedy decoding for sampling", "share = min(temperature, 1.0)", "share = 0.0"),
    ),
    *mutants(
        "cost_model/drafting_costs.py",
        ADAPTIVE,
        ("costs: only the next token counts on a step up", "range(1, _STAGES + 1)", "range(1, 2)"),
    ),
    *mutants(
        "drafting_knowledge.py",
        SHARED,
        ("adaptive: seeded runs share what they learn", "if sampling.greedy or sampling.seed is None:", "if True:"),
    ),
    *mutants(
        "workers/worker_loop.py",
        SHARED,
        (
            "adaptive: the worker forgets what it learned",
            "learned=self._learned.setdefault(adaptive.key, adaptive.learned)",
            "learned=adaptive.learned",
        ),
    ),
]

PARALLEL = [
    *mutants(
        _PARALLEL,
        PEARL,
        (
            "PEARL: the wrong row of q after pending tokens",
            "torch.cat((first.probs, second.probs[:1]))",
            "torch.cat((first.probs, first.probs[-1:]))",
        ),
        ("PEARL: the first new token judged twice", "fresh.part(1) if verdict.token is None", "fresh if verdict.token is None"),
        ("PEARL: new tokens survive a rejection", "fresh.part(1) if verdict.token is None else Draft()", "fresh.part(1)"),
    ),
    *mutants(
        _PARALLEL,
        PEARL_ROUNDS,
        (
            "PEARL: a bonus after pending tokens",
            "pending = max(len(fresh.tokens) - 1, 0)",
            "pending = len(fresh.tokens) if unverified.tokens else max(len(fresh.tokens) - 1, 0)",
        ),
        (
            "PEARL: drafts beyond the limit",
            "self.drafter.start(run.context, unverified.tokens, min(window, room))",
            "self.drafter.start(run.context, unverified.tokens, window)",
        ),
        ("PEARL: the next token left out", "fresh.part(1) if verdict.token is None", "fresh.part(2) if verdict.token is None"),
        ("PEARL: drafts after a pending EOS", "unverified.tokens[-1] in run.eos_ids", "unverified.tokens[0] in ()"),
    ),
]

TREES = [
    *mutants(
        _VERIFIERS,
        GREEDY,
        (
            "greedy tree: a child accepted under the wrong parent",
            "if draft.parents[child] == node and draft.tokens[child] == token:",
            "if draft.tokens[child] == token:",
        ),
    ),
    *mutants(
        _MULTI,
        TREE,
        (
            "sampled tree: a child accepted under the wrong parent",
            "target_probs.index_select(0, parents), tokens, counts",
            "target_probs.index_select(0, parents.flip(0)), tokens, counts",
        ),
        (
            "sampled tree: bonus and correction from p",
            "target_probs.index_copy_(0, parents, acceptance.residual.to(target_probs.dtype))",
            "pass",
        ),
    ),
    *mutants(
        _MULTI,
        SPECTR,
        ("sampled tree: padded candidates may be accepted", "self._generator) & exists", "self._generator)"),
        (
            "SpecTr: rho = 1",
            "rho[:several] = _smallest_rho(target[:several], draft[:several], number[:several])",
            "rho[:several] = 1",
        ),
        (
            "SpecTr: the rho of all chains where fewer survive",
            "number = upload(torch.tensor(counts, dtype=exact), target.device)[:, None]",
            "number = upload(torch.tensor([counts[0]] * len(counts), dtype=exact), target.device)[:, None]",
        ),
        ("SpecTr: residual without A / b", "residual = (target - common * taken)", "residual = (target - common)"),
    ),
    *mutants(
        _MULTI,
        SPECINFER,
        (
            "sampled tree: the last accepted candidate wins",
            "accepted.byte().argmax(dim=1, keepdim=True)",
            "(accepted.byte() * torch.arange(1, accepted.shape[1] + 1)).argmax(dim=1, keepdim=True)",
        ),
        ("SpecInfer: p is never lowered", "residual[:verified] = torch.where(mass > 0, after / mass, before)", "pass"),
        (
            "SpecInfer: the residual is not normalised",
            "torch.where(mass > 0, after / mass, before)",
            "torch.where(mass > 0, after, before)",
        ),
        ("duplicate draws left out", "draws.extend(level.nodes)", "draws.extend(dict.fromkeys(level.nodes))"),
    ),
    *mutants(
        _MULTI,
        Selection(path="test_multi_draft.py", expression=""),
        ("chains continue after their EOS", "if tree.tokens[node] not in self._eos_ids]", "]"),
    ),
    *mutants(
        "decoding/tree_drafter.py",
        TREE_LEVELS,
        (
            "top-k tree: a level's nodes chosen without their path's probability",
            "joint = values + upload(torch.tensor(log_likelihoods), logits.device)[:, None]",
            "joint = values",
        ),
    ),
]

LOSSY_METHODS = [
    *mutants(
        "decoding/mtad.py",
        LOSSY,
        (
            "MTAD's threshold on the single token",
            """.log().cumsum(dim=0)
        draft_joint = upload(torch.tensor(draft.log_likelihoods), device)""",
            """.log()
        draft_joint = torch.tensor([0.0, *draft.log_likelihoods], device=device).diff()""",
        ),
        ("MTAD stops at the first prefix that fails", "return (passes *", "return (passes.cumprod(dim=0) *"),
    ),
    *mutants(
        "decoding/bild.py",
        LOSSY,
        ("BiLD's rollback off by one", "cumprod(dim=0).sum()", "cumprod(dim=0).sum().add(1).clamp_max(length)"),
    ),
    *mutants(
        _DRAFTERS,
        LOSSY,
        (
            "BiLD keeps the unsure token",
            """                chain.drop_last()
                return refusal""",
            "                return refusal",
        ),
    ),
]

DECODING_MUTANTS = [*REJECTION_SAMPLING, *DRAFTING, *POLICY_RULES, *ADAPTIVE_POLICY, *PARALLEL, *TREES, *LOSSY_METHODS]
