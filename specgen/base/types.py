"""Data types shared by all packages. Imports no torch: fields that hold tensors are typed `Any`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal, Protocol, Self

from specgen.base.errors import SpecgenError
from specgen.base.grammars import Grammar
from specgen.base.schema import shown
from specgen.base.settings import Setting

Source = Literal["correction", "bonus"]
Mode = Literal["prefill", "sequential", "pre-verify", "post-verify"]
FinishReason = Literal["length", "eos", "stop", "interrupted"]
# see `TuningOutcome.verdict`
TuningVerdict = Literal["pays", "does not pay", "unclear", "unconfirmed", "no time"]
LARGEST = 1 << 40  # tokens that `SamplingParams` may name
BACKENDS = ("auto", "native", "transformers")  # whose forward pass runs
QUANTISED = ("int8", "int4")  # what a draft model's weights can be rounded to
DRAFT_DTYPES = ("auto", "float32", "bfloat16", "float16", *QUANTISED)  # of --draft-dtype
# The phases of a round, by which its seconds are reported:
# - prefill: the target's pass over the prompt
# - draft: drafting, without the time in `policy`; in PEARL the time spent waiting for drafts
# - policy: the length policy (the decision after each token, the update after verification) and the
#   acceptance predictor; EESD's Table 8 calls it sampling. On a GPU only the time to start the
#   predictor's kernels: waiting for them would slow drafting. In PEARL only the update, because the
#   decisions are made during the target's pass.
# - verify: the target's pass
# - sample: accepting tokens and choosing the target's own
# - other: the rest
PHASES = ("prefill", "draft", "policy", "verify", "sample", "other")


def _number(
    default: Any,
    low: float,
    high: float,
    *,
    is_filter: bool = False,
    is_fractional: bool = False,
) -> Any:
    """Returns a field of `SamplingParams` that holds a number from `low` to `high`, of the type of
    the default, or if that is None an integer, unless it `is_fractional`. `is_filter`: it cuts
    tokens from the target's distribution, and with the default none."""
    without_default = 0.0 if is_fractional else 0
    setting = Setting(without_default if default is None else default, "", low, high)
    return field(default=default, metadata={"setting": setting, "is_filter": is_filter})


@dataclass(frozen=True, slots=True)
class TokenPenalties:
    """What a request changes of the logits of tokens that have occurred.

    `repetition` divides the positive logits of tokens in the context and multiplies the negative
    ones; None: as the model's generation config says. Of tokens of the output alone, `presence` is
    subtracted, and `frequency` times the number of their occurrences.
    """

    repetition: float | None = None
    presence: float = 0.0
    frequency: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Temperature 0 is greedy decoding; `top_k` 0
    keeps the whole vocabulary.

    `min_p` cuts the tokens whose probability is less than this share of the likeliest token's.
    `seed` None: a random seed. `stop` are strings that end the generated text;
    `ignore_eos` generates on after an end-of-sequence token. `logprobs` records the
    log-probability of each token and those of so many of the likeliest tokens (see
    `Verdict.log_probs`); None: nothing. `repetition_penalty`, `presence_penalty` and
    `frequency_penalty` are as in `TokenPenalties`. `grammar` is what the output has to match; the
    output ends where nothing can follow. Raises SpecgenError for a value out of range, and for
    `ignore_eos` beside a grammar.
    """

    max_new_tokens: int = _number(128, 1, LARGEST)
    temperature: float = _number(0.0, 0, 100)
    top_p: float = _number(1.0, 0, 1, is_filter=True)
    top_k: int = _number(0, 0, LARGEST, is_filter=True)
    seed: int | None = _number(None, 0, 2**63 - 1)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float = _number(0.0, 0, 1, is_filter=True)
    logprobs: int | None = _number(None, 0, 100)
    repetition_penalty: float | None = _number(None, 0.01, 100, is_fractional=True)
    presence_penalty: float = _number(0.0, -2, 2)
    frequency_penalty: float = _number(0.0, -2, 2)
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.stop, Iterable | None):
            raise SpecgenError(
                f"stop is {self.stop!r}", "Give the texts that end the output, as strings"
            )
        object.__setattr__(
            self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        )
        for parameter in fields(self):
            setting = parameter.metadata.get("setting")
            value = getattr(self, parameter.name)
            if setting is not None and (value is not None or parameter.default is not None):
                # NumPy's numbers become Python's, which can be written as JSON
                number = setting.parse(parameter.name, value)
                object.__setattr__(self, parameter.name, number)
        if 0 < self.temperature < 1e-3:
            raise SpecgenError(
                f"temperature is {self.temperature}",
                "Take 0 for greedy decoding, or at least 0.001",
            )
        if not self.top_p:
            raise SpecgenError("top_p is 0", "It has to be above 0 and at most 1 (1: no cut)")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise SpecgenError(
                    f"stop holds {self.stop!r}", "Each stop text needs at least one character"
                )
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise SpecgenError(
                    f"stop holds {self.stop!r}, which is not UTF-8",
                    "Convert it first, for instance with iconv",
                )
        if not isinstance(self.grammar, Grammar | None):
            raise SpecgenError(
                f"grammar is {shown(self.grammar)}",
                'Give a specgen.Grammar, such as specgen.Grammar("regex", "[0-9]+")',
            )
        if self.grammar is not None and self.ignore_eos:
            raise SpecgenError(
                "ignore_eos is given beside a grammar, which says where the output ends",
                "Leave one of them out",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalties(self) -> TokenPenalties | None:
        """The penalties that these parameters ask for; None if they ask for none."""
        asked = TokenPenalties(
            self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        )
        return None if asked == TokenPenalties() else asked

    @property
    def warping(self) -> dict[str, Any]:
        """The temperature and the `filters` by name; in greedy decoding, where filters change
        nothing, the temperature (0) alone."""
        return {"temperature": self.temperature, **({} if self.greedy else self.filters)}

    @property
    def filters(self) -> dict[str, Any]:
        """The values of `top_p`, `top_k` and `min_p`, which cut tokens from the distribution, by
        name."""
        return {name: getattr(self, name) for name in FILTERS}

    @property
    def active_filters(self) -> dict[str, Any]:
        """The `filters` whose value is not the default, so that they do cut tokens."""
        return {name: value for name, value in self.filters.items() if value != FILTERS[name]}


# the names of the sampling parameters that cut tokens from the distribution, with their defaults
FILTERS: Mapping[str, Any] = {
    field.name: field.default for field in fields(SamplingParams) if field.metadata.get("is_filter")
}


class Constraint(Protocol):
    """Says which tokens may follow an output, so that it keeps to a grammar. Belongs to one
    context, which it follows."""

    def forbidden(
        self, context: Context, tokens: Sequence[int], parents: Sequence[int], start: int
    ) -> Any:
        """Returns a bool tensor [n, the tokenizer's vocabulary] on the CPU, True for tokens that
        must not come next.

        The rows are those of the logits at the indices `start`, `start + 1`, ...: index 0 follows
        the context, index i + 1 draft token i. `tokens` and `parents` are the draft, as for
        `ModelRunner.logits`. After drafted tokens that leave the grammar no token is forbidden:
        what comes there is never part of the output. Raises RunError if no token of the vocabulary
        can continue the output.
        """
        ...

    def is_complete(self, context: Context, path: Sequence[int]) -> bool:
        """Whether nothing but an end-of-sequence token may follow the context and the tokens
        `path` after it."""
        ...

    def can_end(self, context: Context) -> bool:
        """Whether the output may end after the context."""
        ...

    def forced(self, context: Context, path: Sequence[int] = ()) -> list[int]:
        """Returns the tokens of the text that has to come next, as the tokenizer writes it; none
        where the grammar leaves a choice."""
        ...


class Context:
    """The ids of the prompt's tokens and of all tokens generated so far, in order. Drafted tokens
    join once they are accepted.

    Tokens are only ever appended, so a KV cache of the first n tokens stays valid. `largest_id` is
    the largest of the ids, -1 if there are no tokens. `penalties` change the logits of all models
    after this context; None: those that the target's generation config sets, if any, alone do.
    `constraint` forbids the tokens with which the output would leave a grammar, to all models too;
    None: every token may follow.
    """

    __slots__ = ("__weakref__", "constraint", "ids", "largest_id", "penalties", "prompt_length")

    def __init__(
        self,
        prompt_ids: Iterable[int],
        penalties: TokenPenalties | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.penalties = penalties
        self.constraint = constraint
        self.ids: list[int] = list(prompt_ids)
        self.prompt_length = len(self.ids)
        self.largest_id = max(self.ids, default=-1)

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)
        self.largest_id = max((self.largest_id, *tokens))


class TokenStatus(Enum):
    """What verification did with a drafted token. DISCARDED are all that were neither accepted nor
    rejected: tokens after a rejected one, tokens that were not verified, and in a tree the siblings
    of an accepted token, verified or not."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True)
class Draft:
    """The tokens that a drafter proposes, as a tree with one token per node: what is verified and
    recorded. A chain is a tree without branches.

    Node i follows node `parents[i]`; parent -1 is the context, so a chain's parents are -1, 0, 1,
    ... `stop_reason` says in a few words why drafting ended; None only for an empty draft. Only the
    first `judged` nodes are candidates for the output (None: all). The target runs the other nodes
    too, but they are not verified: the drafter learns from the target's logits after them
    (lookahead decoding).

    What a verifier needs: `probs` [n, vocabulary] are the distributions that the first n nodes were
    drawn from. n is the number of nodes, or, if other nodes follow a chain that was drawn, the
    length of this chain. None if no node was drawn. `draws` lists the node of each random draw in
    order (a node drawn twice occurs twice). None: each was drawn once. `log_likelihoods[i]` (nats)
    is the draft model's joint log-likelihood of the path to node i; empty if the verifier needs
    none.

    What is recorded: `entropies` (nats) and `top_probs` (largest probability) describe the draft
    model's distribution at each node (temperature 1, no penalties, top-k or top-p); both are empty
    for a drafter without a model. `logits` [nodes, vocabulary] of the draft model, without
    penalties, are kept to record how far the models agree; otherwise None. `predicted` has the
    acceptance probability that the length policy predicted for each token of a chain (each level of
    a tree), given that all before it are accepted; NaN where it predicted none, and empty for a
    policy that predicts nothing. `forced` are the nodes that a grammar leaves no choice about: no
    model drafted them (entropy 0, top probability 1), and the length policy does not know of them.
    In a tree they come before all other nodes, one after the other. `is_copied`: the tokens were
    copied from the context by a method that also drafts with a model.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    probs: Any = None
    entropies: Sequence[float] = ()
    top_probs: Sequence[float] = ()
    stop_reason: str | None = None
    draws: Sequence[int] | None = None
    log_likelihoods: Sequence[float] = ()
    logits: Any = None
    predicted: Sequence[float] = ()
    judged: int | None = None
    forced: frozenset[int] = frozenset()
    is_copied: bool = False

    @classmethod
    def chain(cls, tokens: Sequence[int], **fields: Any) -> Self:
        """Returns a draft that is a chain: each token follows the one before it. `fields` are
        further fields of `Draft` by name."""
        return cls(tokens, range(-1, len(tokens) - 1), **fields)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the token before it. A tree with one node at each level is a
        chain too."""
        line = range(-1, len(self.tokens) - 1)
        if isinstance(self.parents, range):
            return self.parents == line
        return list(self.parents) == list(line)

    @property
    def levels(self) -> int:
        """The number of tokens on the longest path from the context to a leaf."""
        if self.is_chain:
            return len(self.tokens)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    @property
    def drafted_levels(self) -> int:
        """The `levels` without forced tokens."""
        return self.levels - len(self.forced)

    @property
    def candidates(self) -> Draft:
        """The draft's first `judged` nodes, which are verified; the whole draft if `judged` is
        None."""
        if self.judged is None:
            return self
        return replace(
            self,
            tokens=self.tokens[: self.judged],
            parents=self.parents[: self.judged],
            judged=None,
        )

    def part(self, start: int, stop: int | None = None) -> Draft:
        """Returns a chain of this chain's tokens `start` to `stop` - 1 (None: to the end), with
        their per-token fields such as `probs`.

        Only for chains.
        """
        of_tokens = {
            name: getattr(self, name)
            for name in ("probs", "entropies", "top_probs", "logits", "predicted")
        }
        parts = {
            name: None if values is None else values[start:stop]
            for name, values in of_tokens.items()
        }
        tokens = self.tokens[start:stop]
        own = range(start, start + len(tokens))
        forced = frozenset(node - start for node in self.forced if node in own)
        return Draft.chain(
            tokens,
            stop_reason=self.stop_reason,
            forced=forced,
            is_copied=self.is_copied,
            **parts,
        )

    def with_predictions(self, predictions: Sequence[float]) -> Draft:
        """Returns this draft with `predicted` set to `predictions`: an acceptance probability for
        each token (each level of a tree).

        Predictions beyond the draft's last level are dropped; levels without a prediction get NaN.
        Forced tokens get 1.
        """
        if not predictions or not self.tokens:
            return self
        levels = self.levels
        if self.forced:
            own = iter(predictions)
            predictions = [
                1.0 if level in self.forced else next(own, math.nan) for level in range(levels)
            ]
        return replace(
            self, predicted=(*predictions[:levels], *[math.nan] * (levels - len(predictions)))
        )


@dataclass(frozen=True, slots=True)
class DistributionOverlap:
    """How close the target's distribution p and the draft model's distribution q are at each
    drafted token.

    Both are taken at temperature 1, without penalties, top-k, top-p and min-p. `overlap` is the sum
    of min(p, q) over the vocabulary, which is the acceptance probability at temperature 1. `kl` is
    KL(q||p) in nats.
    """

    overlap: Sequence[float]
    kl: Sequence[float]


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """The log-probability (nats) of a token of the output under the target, and those of the
    likeliest tokens at its position, the likeliest first: `top` has their ids.

    They are the target's own: at temperature 1, without penalties and filters.
    """

    log_prob: float
    top: Sequence[int] = ()
    top_log_probs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying a draft: the accepted nodes (`path`), in order, and the `token` that
    the target chose after them.

    `source` says whether the token is a correction (after a rejection) or a bonus (after a whole
    accepted path); None for an empty draft. `token` is None if the output ended inside the draft,
    or if the target's logits after the last accepted node are missing; `source` is None then too.
    `agreement` compares both models' probabilities; None unless recorded. `ties` counts the
    target's choices in this verdict that rounding may have decided: in half precision, its two
    largest logits were equal. `log_probs` has an entry for each token of the path and for `token`,
    if the sampling parameters ask for them.
    """

    path: tuple[int, ...] = ()
    token: int | None = None
    source: Source | None = None
    agreement: DistributionOverlap | None = None
    ties: int = 0
    log_probs: Sequence[TokenLogProbs] = ()


@dataclass(frozen=True, slots=True)
class Round:
    """One step of decoding: a draft, the forward pass of the target that verified it, and the
    verdict.

    `mode` says which step of the schedule it was. `seconds` maps each phase of the round (see
    `PHASES`) to its duration. `policy_state` are numbers that the length policy (the rule that ends
    drafts) has learned; None if it learns nothing. `target_passes` is the number of the target's
    passes; only joint decoding takes more than one. `unjudged` counts nodes that the pass ran
    besides those in `draft`, because they are no candidates for the output (see `Draft.judged`).
    """

    index: int
    mode: Mode
    draft: Draft
    verdict: Verdict
    seconds: Mapping[str, float] = field(default_factory=dict)
    policy_state: Mapping[str, float] | None = None
    target_passes: int = 1
    unjudged: int = 0

    @property
    def pass_tokens(self) -> int:
        """The number of tokens in the target's pass, in the schedule `sequential`: the context's
        last token and all drafted nodes."""
        return 1 + len(self.draft.tokens) + self.unjudged

    @property
    def drafting_seconds(self) -> float:
        """The seconds spent on drafting, those of the length policy included."""
        return self.seconds["draft"] + self.seconds["policy"]

    @property
    def verification_seconds(self) -> float:
        """The seconds of the target's pass and of all that follows it."""
        return self.seconds["verify"] + self.seconds["sample"] + self.seconds["other"]

    @property
    def accepted_ids(self) -> list[int]:
        return [self.draft.tokens[node] for node in self.verdict.path]

    @property
    def token_ids(self) -> list[int]:
        """The tokens that this round added to the output, in order."""
        if self.verdict.token is None:
            return self.accepted_ids
        return [*self.accepted_ids, self.verdict.token]

    @property
    def statuses(self) -> tuple[TokenStatus, ...]:
        """The status of each drafted node. After a correction, the children of the last accepted
        node are REJECTED.

        All other nodes that were not accepted are DISCARDED.
        """
        accepted = set(self.verdict.path)
        last = self.verdict.path[-1] if self.verdict.path else -1
        corrected = self.verdict.source == "correction"
        statuses = []
        for node, parent in enumerate(self.draft.parents):
            if node in accepted:
                statuses.append(TokenStatus.ACCEPTED)
            elif corrected and parent == last:
                statuses.append(TokenStatus.REJECTED)
            else:
                statuses.append(TokenStatus.DISCARDED)
        return tuple(statuses)
