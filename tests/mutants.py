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
UNIFORMS = Selection("test_enumeration.py::test_each_random_number_is_used_once")
PEARL_ROUNDS = Selection("test_parallel.py")
GREEDY = Selection("test_verification.py")
LENGTHS = Selection("test_policies.py", "not every_policy")
LIMITS = Selection("test_tree_drafters.py::test_no_draft_passes_its_limits")
LOSSY = Selection("test_joint.py")
BILD_ROUNDS = Selection("test_golden_rounds.py", "bild")
WARPING = Selection("test_verification.py::test_warping_is_transformers")


def mutants(file: str, tests: Selection, *changes: tuple[str, str, str]) -> list[Mutant]:
    """Mutants of one file that the same tests must notice: name, text and replacement of each."""
    return [Mutant(name, file, text, replacement, tests) for name, text, replacement in changes]


_VERIFIERS, _DRAFTERS = "decoding/verification.py", "decoding/drafting.py"
_PARALLEL, _RUN = "methods/pearl_schedule.py", "decoding/run.py"

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
            "torch.where(residual.sum() > 0, residual, after)",
            "torch.where(residual.sum() > 0, 0.8 * residual / residual.sum() + 0.2 * after, after)",
        ),
        (
            "correction from the whole of p",
            "residual = (after - drawn_from * (accepted < length)).clamp_min_(0)",
            "residual = after",
        ),
        (
            "residual the wrong way round, max(q - p, 0)",
            "residual = (after - drawn_from * (accepted < length)).clamp_min_(0)",
            "residual = torch.where(accepted < length, drawn_from - after, after).clamp_min_(0)",
        ),
        ("residual for the bonus too", "(accepted < length)", "(accepted <= length)"),
        ("one accepted token too few", "path = list(range(accepted))", "path = list(range(max(accepted - 1, 0)))"),
        ("one accepted token too many", "cumprod(dim=0).sum()", "cumprod(dim=0).sum().add(1).clamp_max(length)"),
        (
            "bonus from the row before",
            "accepted.clamp_max(len(logits) - 1)[None]",
            "accepted.clamp_max(length - 1)[None]",
        ),
        (
            "correction with the next token's q",
            "draft_probs.index_select(0, accepted.clamp_max(length - 1)[None])",
            "draft_probs.index_select(0, (accepted + 1).clamp_max(length - 1)[None])",
        ),
    ),
    *mutants(
        _VERIFIERS,
        UNIFORMS,
        (
            "the verifier's generator starts anew for each draft",
            "fresh = torch.rand(length, generator=self._generator, device=logits.device)",
            "fresh = torch.rand(length, generator=self._generator.manual_seed(0), device=logits.device)",
        ),
    ),
    *mutants(
        _DRAFTERS,
        UNIFORMS,
        (
            "draft and verifier share a seed",
            'derive_seed(setup.seed, "draft")',
            'derive_seed(setup.seed, "target")',
        ),
    ),
    *mutants(
        _DRAFTERS,
        CHAIN,
        (
            "draft logits beyond the target's vocabulary are not cut",
            "logits = output.logits[:, : self._vocab_size]",
            "logits = output.logits",
        ),
    ),
    *mutants(
        _DRAFTERS,
        CHAIN,
        (
            "a narrower draft's q is not padded",
            "probs=logits_ops.pad_probs(torch.stack(self._probs), vocab_size) if",
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
    *mutants(
        _VERIFIERS,
        GREEDY,
        ("own draws: the token after the node before", "valid_token(choice(child + 1),", "valid_token(choice(child),"),
        (
            "own draws: another draw for each sibling",
            "if draft.parents[child] == node and draft.tokens[child] == token:",
            "if draft.parents[child] == node and draft.tokens[child] == choice(node + 1):",
        ),
        ("own draws: all at once, from the next row", "return tokens[row]", "return tokens[row - 1]"),
        (
            "own draws: a candidate of the context follows the chain",
            "if draft.parents[child] == node and",
            "if draft.parents[child] in (node, -1) and",
        ),
    ),
    *mutants(
        _VERIFIERS,
        UNIFORMS,
        (
            "own draws: one random number for all tokens",
            "draw(logits_ops.warp(logits[row], sampling), generator)",
            "draw(logits_ops.warp(logits[row], sampling), generator.manual_seed(0))",
        ),
        (
            "own draws: tokens are drawn where none is needed",
            "if logits.is_cpu:",
            "if False:",
        ),
    ),
]

DRAFTING = [
    *mutants(
        _DRAFTERS,
        POLICY,
        (
            "the doubtful token dropped instead of kept",
            "reason = extend_draft(policy, limit, extend, unverified=len(unverified))",
            """reason = extend_draft(policy, limit, extend, unverified=len(unverified))
        if reason == policy.reason and len(host.tokens) > 1:
            host.drop_last()""",
        ),
        (
            "stop before keeping the token",
            """            tokens.append(host.tokens[-1])
""",
            """            if not policy.keep_drafting(token):
                host.drop_last()
                return policy.reason
            tokens.append(host.tokens[-1])
""",
        ),
    ),
    *mutants(
        _RUN,
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
        LIMITS,
        (
            "EOS inside a draft ignored by the drafter",
            'return "eos" if tokens[-1] in self._eos_ids else token\n',
            "return token\n",
        ),
    ),
    *mutants(
        "methods/lookup.py",
        LIMITS,
        ("prompt lookup drafts after EOS", "eos = tokens[-1] in self._eos_ids", "eos = False"),
    ),
    *mutants(
        "methods/lookup.py",
        LENGTHS,
        (
            "prompt lookup copies from one token too early",
            "self._continuations[tuple(context.ids[position - length : position])] = position",
            "self._continuations[tuple(context.ids[position - length : position])] = position - 1",
        ),
    ),
    *mutants(
        "decoding/logits_ops.py",
        Selection("test_policies.py", "penalties_forbid"),
        (
            "drafts go on where penalties forbid all tokens",
            "return bool((logits.amax(dim=-1) == -torch.inf).any())",
            "return False",
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

LOSSY_METHODS = [
    *mutants(
        "methods/mtad_search.py",
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
        "methods/bild_drafting.py",
        LOSSY,
        ("BiLD's rollback off by one", "cumprod(dim=0).sum()", "cumprod(dim=0).sum().add(1).clamp_max(length)"),
    ),
    *mutants(
        _DRAFTERS,
        BILD_ROUNDS,
        (
            "BiLD keeps the unsure token",
            """                host.drop_last()
                return refusal""",
            "                return refusal",
        ),
    ),
]

DECODING_MUTANTS = [*REJECTION_SAMPLING, *DRAFTING, *PARALLEL, *LOSSY_METHODS]
