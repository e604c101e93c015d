"""What a drafter would say from every position of the target's own output, recorded once: all that a length policy looks at.

The draft runs over the target's output in one pass (teacher-forced), and goes on from each of its mistakes, all of them as the
branches of one tree: a pass a level. Whatever a policy does, what it would have seen is among that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch

from specgen.decoding import logits_ops, signals
from specgen.engine.devices import synchronizer
from specgen.engine.inference_mode import inference
from specgen.errors import SpecgenError
from specgen.types import Context, SamplingParams

if TYPE_CHECKING:
    from specgen.engine.exit_layer import Predictor
    from specgen.engine.model_runner import DraftRunner, ModelRunner
    from specgen.pair import Pair

AFTER = 16  # tokens that a draft is followed behind its first mistake
LONGEST = 40  # tokens of a rollout: as long as a policy lets any draft become


class Drafted(NamedTuple):
    """A token that a draft would have, and the signals that a policy may read."""

    token: int
    signals: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """What the target says to a prompt by itself: `token_ids`, the first from the prompt's own pass; how long that pass took, and
    all of it (seconds); `limit` is the number of tokens at which it would have ended at the latest, `eos_ids` what ends it
    before."""

    prompt_ids: list[int]
    token_ids: list[int]
    limit: int
    eos_ids: frozenset[int]
    prefill: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RecordedDrafts:
    """A drafter's behaviour along one answer: `rollouts[t]` is its draft behind the first t new tokens (none for t = 0), as long
    as any policy may ask. `chances` are how likely the target takes its first token, for t = 1, 2, ...: 0 or 1 in greedy
    decoding, else the sum of min(p, q) of both warped distributions. `prefill` is what the draft's own look at the prompt takes
    (seconds)."""

    answer: ReferenceOutput
    rollouts: Sequence[Sequence[Drafted]]
    chances: Sequence[float]
    prefill: float = 0.0

    @property
    def acceptance(self) -> float | None:
        """The mean chance of a token to be accepted, if those before it were."""
        return sum(self.chances) / len(self.chances) if self.chances else None


@inference
def record_answer(pair: Pair, prompt_ids: list[int], sampling: SamplingParams) -> ReferenceOutput:
    """Decode plainly, from an empty cache."""
    plan = pair.plan(prompt_ids, "ar", sampling)
    pair.forget()
    rounds = list(plan.run.rounds())
    ids = [token for round_ in rounds for token in round_.token_ids]
    seconds = [sum(round_.seconds.values()) for round_ in rounds]
    return ReferenceOutput(prompt_ids, ids, plan.run.limit, frozenset(plan.run.eos_ids), seconds[0], sum(seconds))


class Recorder:
    """Records how a draft behaves along answers. `target` is the session that judges, `draft` the one that drafts; sampling's
    fates are drawn from `seed`. `predictor` is an exit layer's, where there is one."""

    def __init__(
        self,
        target: ModelRunner,
        draft: DraftRunner,
        sampling: SamplingParams,
        seed: int = 0,
        predictor: Predictor | None = None,
    ) -> None:
        self._target, self._draft, self._sampling = target, draft, sampling
        self._predictor = predictor
        self._eos_ids: frozenset[int] = frozenset()  # of the answer that is being recorded
        self._rng = Random(seed)
        self._generator = logits_ops.make_generator(draft.device, seed)

    @inference
    def tape(self, answer: ReferenceOutput) -> RecordedDrafts:
        """Raises SpecgenError where the draft cannot follow at all: its context is shorter, or it does not know the tokens."""
        self._eos_ids = answer.eos_ids
        if len(answer.token_ids) < 2:
            return RecordedDrafts(answer, [()] * len(answer.token_ids), [], 0.0)
        room = self._draft.context_limit - len(answer.prompt_ids) - len(answer.token_ids) - AFTER
        if room < 0 or max(*answer.prompt_ids, *answer.token_ids) >= self._draft.num_embeddings:
            raise SpecgenError("the draft model cannot follow this prompt", "Take shorter prompts: --prompts FILE")
        prefill = self.prefill(answer)
        context = Context(answer.prompt_ids)
        along = answer.token_ids[:-1]
        target = self._target.logits(context, along)
        judged, judged_hidden = target.logits.clone(), target.hidden_states  # a session's rows last until its next call
        rows = self._draft.logits(context, along)
        guesses = rows.logits[:, : self._target.vocab_size].clone()
        scores = None if self._predictor is None else _Scores(self._predictor, judged_hidden, rows.hidden_states)
        first, chances = self._first_guesses(answer.token_ids, guesses, judged)
        wrong = [place for place in range(1, len(first)) if first[place].token != answer.token_ids[place]]
        after = self._after(context, along, wrong, first, scores)
        rollouts = [self._rollout(place, first, after, scores) for place in range(1, len(first))]
        return RecordedDrafts(answer, [(), *rollouts], chances[1:], prefill)

    @inference
    def prefill(self, answer: ReferenceOutput) -> float:
        """Seconds of the draft's pass over the prompt, beyond those of a single token."""
        self._target.logits(Context(answer.prompt_ids))  # an exit finds the first layers' rows there
        wait = synchronizer(self._draft.device) or (lambda: None)
        context = Context(answer.prompt_ids)
        taken = []
        for _ in range(2):  # the second one finds all but the last token cached
            wait()
            start = time.perf_counter()
            self._draft.logits(context)
            wait()
            taken.append(time.perf_counter() - start)
        return max(0.0, taken[0] - taken[1])

    def _first_guesses(
        self, answer: Sequence[int], rows: torch.Tensor, judged: torch.Tensor
    ) -> tuple[list[Drafted], list[float]]:
        """The draft's token after each prefix of the answer: the answer's own where it is accepted."""
        if self._sampling.greedy:
            found = _with_signals(rows, rows.argmax(dim=-1))
            return found, [float(guess.token == token) for guess, token in zip(found, answer, strict=True)]
        target_probs = logits_ops.warp(judged, self._sampling)
        draft_probs = logits_ops.warp(rows, self._sampling)
        draft_probs = torch.nn.functional.pad(draft_probs, (0, target_probs.shape[-1] - draft_probs.shape[-1]))
        overlap = torch.minimum(target_probs, draft_probs).sum(dim=-1).clamp(0, 1)
        rejected = logits_ops.draw((draft_probs - target_probs).clamp_min(0), self._generator).tolist()
        accepted = [self._rng.random() < chance or other < 0 for chance, other in zip(overlap.tolist(), rejected, strict=True)]
        ids = [token if kept else other for kept, token, other in zip(accepted, answer, rejected, strict=True)]
        found = _with_signals(rows, torch.tensor(ids, device=rows.device), draft_probs)
        for place, (kept, token) in enumerate(zip(accepted, answer, strict=True)):
            if not kept and ids[place] == token:  # rejected all the same: the recorded token must differ from the answer's
                found[place] = found[place]._replace(token=-1)
        return found, overlap.tolist()

    def _after(
        self, context: Context, along: Sequence[int], wrong: Sequence[int], first: Sequence[Drafted], scores: _Scores | None
    ) -> dict[int, list[Drafted]]:
        """What follows the mistakes at the places `wrong`, up to an end-of-sequence."""
        after: dict[int, list[Drafted]] = {place: [] for place in wrong}
        tokens, parents = list(along), list(range(-1, len(along) - 1))
        growing = [(place, place - 1, first[place].token) for place in wrong if self._goes_on(first[place].token)]
        for _ in range(AFTER):
            if not growing:
                break
            begun = len(tokens)
            tokens += [token for _, _, token in growing]
            parents += [parent for _, parent, _ in growing]
            rows = self._draft.logits(context, tokens, parents, start=begun + 1)
            if scores is not None:
                scores.add([place for place, _, _ in growing], rows.hidden_states)
            chosen = self._chosen(rows.logits[:, : self._target.vocab_size])
            for (place, _, _), drafted in zip(growing, chosen, strict=True):
                after[place].append(drafted)
            growing = [
                (place, begun + node, drafted.token)
                for node, ((place, _, _), drafted) in enumerate(zip(growing, chosen, strict=True))
                if self._goes_on(drafted.token)
            ]
        return after

    def _goes_on(self, token: int) -> bool:
        return token >= 0 and token not in self._eos_ids

    def _chosen(self, rows: torch.Tensor) -> list[Drafted]:
        """The draft's own choice from each of `rows`."""
        if self._sampling.greedy:
            return _with_signals(rows, rows.argmax(dim=-1))
        draft_probs = logits_ops.warp(rows, self._sampling)
        return _with_signals(rows, logits_ops.draw(draft_probs, self._generator), draft_probs)

    def _rollout(
        self, begin: int, first: Sequence[Drafted], after: dict[int, list[Drafted]], scores: _Scores | None
    ) -> list[Drafted]:
        """The draft that begins at a place: along the answer up to the first mistake, then what follows it."""
        found: list[Drafted] = []
        for place, level, drafted in _path(begin, first, after):
            if scores is not None:
                score = scores.of(begin, place, level, len(found) + 1)
                drafted = Drafted(drafted.token, {**drafted.signals, "predicted_acceptance": score})
            found.append(drafted)
            if drafted.token in self._eos_ids or len(found) == LONGEST:
                break
        return found


def _with_signals(rows: torch.Tensor, tokens: torch.Tensor, probs: torch.Tensor | None = None) -> list[Drafted]:
    """The tokens [n] chosen from the logits [n, vocabulary], and drawn from `probs` if given, with all their signals."""
    chosen = signals.ChosenTokens(rows, tokens, probs)
    computed = {name: value.tolist() for name, value in signals.compute(frozenset(signals.SIGNALS), chosen).items()}
    return [
        Drafted(token, dict(zip(computed, values, strict=True)))
        for token, *values in zip(tokens.tolist(), *computed.values(), strict=True)
    ]


def _path(begin: int, first: Sequence[Drafted], after: dict[int, list[Drafted]]) -> Iterator[tuple[int, int, Drafted]]:
    """Each token with the place whose row it came from, and how far behind a mistake there it stands (0: not at all)."""
    for place in range(begin, len(first)):
        yield place, 0, first[place]
        if place in after:
            yield from ((place, level, drafted) for level, drafted in enumerate(after[place], start=1))
            return


class _Scores:
    """A predictor's scores along an answer. They depend on where a draft began, so its two parts are kept apart: the rows
    of the target [places, PLACES] and of the draft [places]."""

    def __init__(self, predictor: Predictor, target: torch.Tensor | None, draft: torch.Tensor | None) -> None:
        assert target is not None
        assert draft is not None
        self._predictor = predictor
        # row i of the target is what the answer's token i came from: a draft behind i + 1 tokens begins with it
        self._offsets = predictor.offsets(target).tolist()
        self._along: list[float] = self._part(draft)
        self._after: dict[int, list[float]] = {}

    def add(self, positions: Sequence[int], rows: torch.Tensor | None) -> None:
        assert rows is not None
        for place, part in zip(positions, self._part(rows), strict=True):
            self._after.setdefault(place, []).append(part)

    def of(self, begin: int, place: int, level: int, position: int) -> float:
        """The score of a draft's token at `position` (from 1), when the draft began at `begin`."""
        part = self._along[place] if level == 0 else self._after[place][level - 1]
        offset = self._offsets[begin - 1][min(position, self._predictor.POSITIONS) - 1]
        return 1 / (1 + math.exp(-(part + offset)))

    def _part(self, rows: torch.Tensor) -> list[float]:
        found: list[float] = (rows.to(self._predictor.bias.dtype) @ self._predictor.draft_weights).tolist()
        return found


def acceptances(tapes: Mapping[str, Sequence[RecordedDrafts]]) -> dict[str, float | None]:
    """How often the target takes each drafter's tokens, those before being right; None where nothing was recorded."""
    found: dict[str, float | None] = {}
    for drafter, along in tapes.items():
        chances = [chance for tape in along for chance in tape.chances]
        found[drafter] = sum(chances) / len(chances) if chances else None
    return found
