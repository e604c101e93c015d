"""Mistakes in draft trees, in their verification and in n-gram pools that the default tests must notice; see `mutants.py`."""

from __future__ import annotations

from mutants import GREEDY, LIMITS, Selection, mutants

TREE = Selection("test_enumeration.py::test_trees", "specinfer or spectr")
SPECINFER = Selection("test_enumeration.py::test_trees", "specinfer")
SPECTR = Selection("test_enumeration.py::test_trees", "spectr")
LIKELIEST = Selection("test_tree_drafters.py::test_the_likeliest_of_all_candidates_are_drafted")
CAPE_ROUNDS = Selection("test_enumeration.py::test_trees", "cape")
CAPE_TESTS = Selection("test_tree_drafters.py", "cape")
LOOKAHEAD = Selection("test_golden_rounds.py", "lookahead or ouroboros")
NGRAM_POOLS = Selection("test_enumeration.py::test_ngram_pools")

_VERIFIERS, _MULTI, _CAPE = "decoding/verification.py", "methods/multi_draft_tree.py", "methods/cape.py"
_TREE = "decoding/tree.py"

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
        LIMITS,
        ("chains continue after their EOS", "if tree.tokens[node] not in self._eos_ids]", "]"),
    ),
    *mutants(
        _TREE,
        LIKELIEST,
        (
            "top-k tree: a level's nodes chosen without their path's probability",
            "(values.clamp_max_(0.0) + before[:, None])",
            "values.clamp_max_(0.0)",
        ),
    ),
    *mutants(
        _TREE,
        LIKELIEST,
        (
            "dynamic tree: the first candidates instead of the likeliest",
            "key=lambda number: -candidates[number].log_likelihood",
            "key=lambda number: 0",
        ),
        (
            "dynamic tree: nodes are not in the order of their levels",
            "in sorted(by_likelihood[: self._nodes])]",
            "in by_likelihood[: self._nodes]]",
        ),
        ("dynamic tree: tokens follow one that ends the output", "if token not in self._eos_ids:", "if True:"),
        (
            "dynamic tree: only what the model runs is a candidate",
            "        if self._nodes is None:\n            best, positions",
            "        if True:\n            best, positions",
        ),
    ),
    *mutants(
        _TREE,
        LIKELIEST,
        (
            "dynamic tree: parents are those of the larger tree",
            "[at[parent] for parent in parents],",
            "parents,",
        ),
    ),
]

CAPE = [
    *mutants(
        _CAPE,
        CAPE_ROUNDS,
        (
            "CaPE: further candidates count as drawn",
            "        tokens=tokens,\n",
            "        tokens=tokens,\n        probs=None if chain.probs is None else chain.probs[origins],\n",
        ),
        (
            "CaPE: a candidate follows the token that it is a sibling of",
            "[origin - 1 for origin in origins]",
            "range(-1, len(origins) - 1)",
        ),
    ),
    *mutants(
        _CAPE,
        CAPE_TESTS,
        ("CaPE: the likeliest sibling dropped", "[: further_candidates(top_prob)]", "[1 : further_candidates(top_prob)]"),
        ("CaPE: the drawn token is its own sibling", "if token not in (-1, chain.tokens[position])]", "if token != -1]"),
        (
            "CaPE: impossible tokens are candidates",
            "if token not in (-1, chain.tokens[position])]",
            "if token != chain.tokens[position]]",
        ),
    ),
    *mutants(
        _VERIFIERS,
        GREEDY,
        (
            "CaPE: further candidates are never accepted",
            "for child in range(drawn, len(draft.tokens)):",
            "for child in range(0):",
        ),
    ),
]

NGRAMS = [
    *mutants(
        "decoding/run.py",
        LOOKAHEAD,
        ("lookahead: the window is judged", "candidates = draft.candidates", "candidates = draft"),
    ),
    *mutants(
        "methods/lookahead_drafter.py",
        LOOKAHEAD,
        (
            "lookahead: a column does not see the columns before it",
            "roots = [root, *tree.extend(root, self._levels[0])]",
            "roots = [root] * columns",
        ),
        (
            "lookahead: a stub without its first level",
            "for level in self._levels[1:]))[-1]",
            "for level in self._levels[2:]))[-1]",
        ),
        (
            "lookahead: guesses that end the output enter the window",
            "token if token not in self._eos_ids else",
            "token if True else",
        ),
        (
            "lookahead: columns beyond the context limit",
            "columns = max(min(room + 2 - len(self._levels), len(first) + 1,",
            "columns = max(min(len(first) + 1,",
        ),
        (
            "lookahead: the oldest guesses stay",
            "self._levels = [*self._levels[1:], guesses]",
            "self._levels = [*self._levels[:-1], guesses]",
        ),
    ),
    *mutants(
        "methods/lookahead_drafter.py",
        LOOKAHEAD,
        ("pool: the newest phrase is removed", "del phrases[next(iter(phrases))]", "phrases.popitem()"),
        ("pool: n-grams are read again", "        self._read = len(ids)\n", "        pass\n"),
    ),
    *mutants(
        "methods/ouroboros_drafter.py",
        NGRAM_POOLS,
        (
            "Ouroboros: q of the row before",
            "zip((0, *(node + 1 for node in verdict.path)), chosen,",
            "zip((0, *verdict.path), chosen,",
        ),
        (
            "Ouroboros: the likeliest tokens counted as drawn",
            "            choose = own_tokens(logits[:rows], self._sampling, self._generator)",
            "            choose = logits_ops.argmax_tokens(logits).__getitem__",
        ),
        ("Ouroboros: q is not padded or warped", "logits_ops.warp(logits[row], self._sampling)))", "logits[row].softmax(-1)))"),
    ),
    *mutants(
        "methods/ouroboros_drafter.py",
        LOOKAHEAD,
        (
            "Ouroboros: phrases follow the chain's last token but one",
            "self._add_branches(tree, end[-1],",
            "self._add_branches(tree, end[0],",
        ),
        (
            "Ouroboros: the target's words under the wrong key",
            "self._pool.add(self._chain[start], phrase)",
            "self._pool.add(self._chain[start - 1], phrase)",
        ),
        (
            "Ouroboros: words of the target after tokens that it rejects",
            "if phrase[:-1] == self._chain[start + 1 : start + longest]:",
            "if True:",
        ),
    ),
]

TREE_MUTANTS = [*TREES, *CAPE, *NGRAMS]
