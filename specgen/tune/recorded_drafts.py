"""Records what a drafter drafts at every position of the target's own output, so that length policies can be simulated on it.

A length policy decides after each drafted token whether to draft another. One teacher-forced pass of the draft model over the
target's output gives the drafted token at each position. After each token that the target would reject, drafting continues: all
these continuations are branches of one tree, and each level of the tree takes one pass. Whatever policy is simulated later, its
drafts are prefixes of the recorded ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch

from specgen.base.errors import SpecgenError
from specgen.base.types import Context, SamplingParams
from specgen.decoding import logits_ops
from specgen.decoding.policy import MODEL_SIGNALS
from specgen.engine.devices import synchronizer
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import room

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner, ModelRunner
    from specgen.engine.parts.acceptance import Predictor
    from specgen.pair.pair import Pair

CONTINUATION = 16  # tokens recorded after a draft's first rejected token
LONGEST = 40  # largest number of tokens of a recorded draft: the largest `max_draft` that is tried


class Drafted(NamedTuple):
    """A drafted token with its signals: numbers about it that a length policy may read, such as its entropy."""

    token: int
    signals: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """The target's output after a prompt, by plain decoding, with its times.

    `limit` is the largest number of new tokens; a token in `eos_ids` ends the output earlier. `prefill_seconds` is the time of
    the pass over the prompt, which gives the first new token. `seconds` is the time of the whole output, prefill included.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    limit: int
    eos_ids: frozenset[int]
    prefill_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RecordedDrafts:
    """What a drafter drafts at each position of one reference output (the target's own output after a prompt).

    `rollouts[t]` is the draft that follows the first t new tokens, at most `LONGEST` tokens; it is empty for t = 0.
    `acceptance_probabilities[t - 1]` is the probability that the target accepts the first token of `rollouts[t]`. It is 0 or 1 in
    greedy decoding, and the sum of min(p, q) over the vocabulary when sampling; p and q are the target's and the draft's
    probabilities after temperature, top-k and top-p. `prefill_seconds` is the time of the drafter's pass over the prompt.
    """

    reference: ReferenceOutput
    rollouts: Sequence[Sequence[Drafted]]
    acceptance_probabilities: Sequence[float]
    prefill_seconds: float = 0.0


@inference
def record_reference(pair: Pair, prompt_ids: list[int], sampling: SamplingParams) -> ReferenceOutput:
    """Generates the target's output after a prompt by plain decoding, and returns it with its times.

    The key-value caches are emptied first, so that the time of the pass over the whole prompt is measured.
    """
    run = pair.run(pair.request(prompt_ids, "ar", sampling))
    pair.forget()
    rounds = list(run.rounds())
    ids = [token for round_ in rounds for token in round_.token_ids]
    seconds = [sum(round_.seconds.values()) for round_ in rounds]
    return ReferenceOutput(prompt_ids, ids, run.limit, frozenset(run.eos_ids), seconds[0], sum(seconds))


@inference
def draft_prefill_seconds(target: ModelRunner, draft: DraftRunner, reference: ReferenceOutput) -> float:
    """Returns the seconds of the draft model's pass over the prompt, minus the seconds of its pass over one token."""
    target.logits(Context(reference.prompt_ids))  # an exit layer reads the first layers' hidden states from the target's pass
    wait = synchronizer(draft.device) or (lambda: None)
    context = Context(reference.prompt_ids)
    seconds = []
    for _ in range(2):  # the second pass finds all but the last token in the cache
        wait()
        start = time.perf_counter()
        draft.logits(context)
        wait()
        seconds.append(time.perf_counter() - start)
    return max(0.0, seconds[0] - seconds[1])


class Recorder:
    """Records what a drafter drafts at each position of reference outputs (the target's own outputs).

    `target` runs the verifying model, `draft` the drafting model. When sampling, it is drawn at random whether a drafted token is
    accepted; `seed` makes this repeatable. `predictor` is the exit layer's predictor of acceptance, None if there is none.
    """

    def __init__(
        self, target: ModelRunner, draft: DraftRunner, sampling: SamplingParams, seed: int = 0, predictor: Predictor | None = None
    ) -> None:
        self._target, self._draft, self._sampling, self._predictor = target, draft, sampling, predictor
        self._rng, self._generator = Random(seed), logits_ops.make_generator(draft.device, seed)

    @inference
    def record(self, reference: ReferenceOutput) -> RecordedDrafts:
        """Returns the drafts at each position of a reference output.

        Raises SpecgenError if the output does not fit into the draft model's context, or contains a token that the draft model
        does not have.
        """
        if len(reference.token_ids) < 2:
            return RecordedDrafts(reference, [()] * len(reference.token_ids), [])
        whole = Context(reference.prompt_ids)
        whole.extend(reference.token_ids)
        if room(self._draft, whole) < CONTINUATION:
            raise SpecgenError("the draft model cannot follow this prompt", "Take shorter prompts: --prompts FILE")
        prefill_seconds = draft_prefill_seconds(self._target, self._draft, reference)
        context, generated = Context(reference.prompt_ids), reference.token_ids[:-1]
        target = self._target.logits(context, generated)
        target_logits = target.logits.clone()  # a runner's outputs are valid until its next call
        draft = self._draft.logits(context, generated)
        draft_logits = draft.logits[:, : self._target.vocab_size].clone()
        unpenalised = draft.unpenalised_part(self._target.vocab_size)
        unpenalised = None if unpenalised is None else unpenalised.clone()
        scores = None if self._predictor is None else _Scores(self._predictor, target.hidden_states, draft.hidden_states)
        first, probabilities = self._first_tokens(reference.token_ids, draft_logits, target_logits, unpenalised)
        rejected = [position for position in range(1, len(first)) if first[position].token != reference.token_ids[position]]
        continued = self._continuations(reference, rejected, first, scores)
        rollouts = [_rollout(position, first, continued, scores, reference.eos_ids) for position in range(1, len(first))]
        return RecordedDrafts(reference, [(), *rollouts], probabilities[1:], prefill_seconds)

    def _first_tokens(
        self,
        token_ids: Sequence[int],
        draft_logits: torch.Tensor,
        target_logits: torch.Tensor,
        unpenalised: torch.Tensor | None,
    ) -> tuple[list[Drafted], list[float]]:
        """Returns the drafted token at each position of the output `token_ids`, and the probability that it is accepted there.

        In greedy decoding it is the draft's most probable token. When sampling, acceptance is drawn first. Given the output's
        token y, a token was accepted there with probability min(1, q(y) / p(y)), and it was y; otherwise it is drawn from the
        normalised positive part of q - p. p and q are the target's and the draft's probabilities. Logits are [tokens,
        vocabulary]; `unpenalised` are the draft's without penalties, None if it has none.
        """
        if self._sampling.greedy:
            found = self._chosen(draft_logits, unpenalised)
            return found, [float(drafted.token == token) for drafted, token in zip(found, token_ids, strict=True)]
        target_probs = logits_ops.warp(target_logits, self._sampling)
        draft_probs = logits_ops.warp(draft_logits, self._sampling)
        draft_probs = torch.nn.functional.pad(draft_probs, (0, target_probs.shape[-1] - draft_probs.shape[-1]))
        overlap = torch.minimum(target_probs, draft_probs).sum(dim=-1).clamp(0, 1)
        output = torch.tensor(token_ids, device=draft_probs.device)[:, None]
        drawn = (draft_probs.gather(-1, output) / target_probs.gather(-1, output))[:, 0].nan_to_num(0.0).clamp(0, 1)
        rejected = logits_ops.draw((draft_probs - target_probs).clamp_min(0), self._generator).tolist()
        pairs = zip(drawn.tolist(), rejected, strict=True)
        accepted = [self._rng.random() < probability or other < 0 for probability, other in pairs]
        ids = [token if kept else other for kept, token, other in zip(accepted, token_ids, rejected, strict=True)]
        found = _with_signals(draft_logits, torch.tensor(ids, device=draft_logits.device), draft_probs, unpenalised)
        for position, (kept, token) in enumerate(zip(accepted, token_ids, strict=True)):
            if not kept and ids[position] == token:  # the token is rejected, so it must differ from the output's token
                found[position] = found[position]._replace(token=-1)
        return found, overlap.tolist()

    def _continuations(
        self, reference: ReferenceOutput, rejected: Sequence[int], first: Sequence[Drafted], scores: _Scores | None
    ) -> dict[int, list[Drafted]]:
        """Returns, for each position in `rejected`, what the draft model drafts after the rejected token there.

        These are at most `CONTINUATION` tokens; an end-of-sequence token ends them earlier. `first` has the drafted token of each
        position. `scores` collects the predictor's scores, None without a predictor.
        """
        continued: dict[int, list[Drafted]] = {position: [] for position in rejected}
        context, tokens = Context(reference.prompt_ids), reference.token_ids[:-1]
        parents = list(range(-1, len(tokens) - 1))
        growing = [(position, position - 1, first[position].token) for position in rejected]
        for _ in range(CONTINUATION):
            growing = [entry for entry in growing if entry[2] >= 0 and entry[2] not in reference.eos_ids]
            if not growing:
                break
            begin = len(tokens)
            tokens += [token for _, _, token in growing]
            parents += [parent for _, parent, _ in growing]
            output = self._draft.logits(context, tokens, parents, start=begin + 1)
            if scores is not None:
                scores.add([position for position, _, _ in growing], output.hidden_states)
            width = self._target.vocab_size
            chosen = self._chosen(output.logits[:, :width], output.unpenalised_part(width))
            positions = [position for position, _, _ in growing]
            for position, drafted in zip(positions, chosen, strict=True):
                continued[position].append(drafted)
            growing = [(position, begin + node, continued[position][-1].token) for node, position in enumerate(positions)]
        return continued

    def _chosen(self, logits: torch.Tensor, unpenalised: torch.Tensor | None) -> list[Drafted]:
        """Returns the token that the draft model chooses from each row of its logits [rows, vocabulary], with its
        signals (the numbers, such as entropy, that length policies read)."""
        if self._sampling.greedy:
            return _with_signals(logits, logits.argmax(dim=-1), None, unpenalised)
        draft_probs = logits_ops.warp(logits, self._sampling)
        return _with_signals(logits, logits_ops.draw(draft_probs, self._generator), draft_probs, unpenalised)


def _with_signals(
    logits: torch.Tensor, tokens: torch.Tensor, probs: torch.Tensor | None, unpenalised: torch.Tensor | None
) -> list[Drafted]:
    """Returns the `tokens` [n] with their signals, computed from the logits [n, vocabulary] that they were chosen from.

    `probs` [n, vocabulary] are the probabilities that the tokens were drawn from, None in greedy decoding. `unpenalised` are the
    logits without penalties, None if `logits` have none.
    """
    found = logits_ops.signals(MODEL_SIGNALS, logits, tokens, probs, unpenalised=unpenalised)
    computed = {name: value.tolist() for name, value in found.items()}
    return [
        Drafted(token, dict(zip(computed, values, strict=True)))
        for token, *values in zip(tokens.tolist(), *computed.values(), strict=True)
    ]


def _rollout(
    begin: int, first: Sequence[Drafted], continued: Mapping[int, list[Drafted]], scores: _Scores | None, eos_ids: frozenset[int]
) -> list[Drafted]:
    """Returns the draft that begins at position `begin` of the reference output.

    It has the drafted tokens from there to the first rejected one, and then the continuation of the rejected token.
    """
    end = next((position for position in range(begin, len(first)) if position in continued), len(first) - 1)
    path = [(position, 0, first[position]) for position in range(begin, end + 1)]
    path += [(end, level, drafted) for level, drafted in enumerate(continued.get(end, ()), start=1)]
    found: list[Drafted] = []
    for position, level, drafted in path[:LONGEST]:
        if scores is not None:
            score = scores.of(begin, position, level, len(found) + 1)
            drafted = Drafted(drafted.token, {**drafted.signals, "predicted_acceptance": score})
        found.append(drafted)
        if drafted.token in eos_ids:
            break
    return found


class _Scores:
    """The predicted probabilities that drafted tokens are accepted, from the exit layer's predictor.

    A score is the sigmoid of the sum of two parts. One depends on the target's hidden state where the draft began and on the
    token's place in the draft, the other on the drafting model's hidden state at the token. They are kept separately, because the
    same token occurs in drafts that began at different positions. Hidden states are [tokens, width].
    """

    def __init__(self, predictor: Predictor, target: torch.Tensor | None, draft: torch.Tensor | None) -> None:
        assert target is not None
        assert draft is not None
        self._predictor = predictor
        # row i of the target's states produced token i of the output; a draft after i + 1 tokens starts from this row
        self._offsets = predictor.offsets(target).tolist()
        self._first: list[float] = self._draft_part(draft)
        self._continued: dict[int, list[float]] = {}

    def add(self, positions: Sequence[int], hidden: torch.Tensor | None) -> None:
        assert hidden is not None
        for position, part in zip(positions, self._draft_part(hidden), strict=True):
            self._continued.setdefault(position, []).append(part)

    def of(self, begin: int, position: int, level: int, drafted: int) -> float:
        """Returns the score of token number `drafted` (from 1) of the draft that began at position `begin` of the output.

        At level 0 it is the drafted token at `position`; at level n, token n of the continuation after the rejected token there.
        """
        part = self._first[position] if level == 0 else self._continued[position][level - 1]
        offset = self._offsets[begin - 1][min(drafted, self._predictor.POSITIONS) - 1]
        return 1 / (1 + math.exp(-(part + offset)))

    def _draft_part(self, hidden: torch.Tensor) -> list[float]:
        parts: list[float] = (hidden.to(self._predictor.bias.dtype) @ self._predictor.draft_weights).tolist()
        return parts


def mean_acceptance(drafts: Mapping[str, Sequence[RecordedDrafts]]) -> dict[str, float]:
    """Returns for each drafter the mean probability that the target accepts a drafted token after accepted ones.

    A drafter without recorded tokens is missing from the result.
    """
    probabilities = {name: [p for each in recorded for p in each.acceptance_probabilities] for name, recorded in drafts.items()}
    return {name: sum(values) / len(values) for name, values in probabilities.items() if values}
