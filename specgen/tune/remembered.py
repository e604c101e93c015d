"""Model runners of simulated runs: one keeps a model's outputs, the other draws a draft model's
tokens given the target's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specgen.base.seeds import derive_seed
from specgen.base.types import Context
from specgen.decoding import token_sampling
from specgen.decoding.verification import survival
from specgen.engine.forward_pass import ModelOutput
from specgen.engine.model_runner import SizedRunner

if TYPE_CHECKING:
    from specgen.base.types import SamplingParams
    from specgen.engine.model_runner import DraftRunner
    from specgen.tune.round_timing import ReferenceOutput

MOST_BYTES = 128 << 20  # kept logits take at most this much memory; others are computed again


class MemoisedRunner(SizedRunner):
    """Runs a model on one prompt and keeps its outputs, so that the same tokens need no second
    forward pass.

    An output is kept under the generated and the drafted tokens before it, so drafts of different
    lengths and trees of different shapes share outputs. `joins`: the output is the same whether a
    token before it was generated or drafted. That is not so for heads, which read the target's
    hidden states of generated tokens, and for drafters of whole blocks. `kept` is the store of
    outputs that all such runners of a simulator share. `calls` counts the calls of `logits`, also
    those answered from the store.
    """

    def __init__(
        self, runner: DraftRunner, kept: dict[tuple[Any, ...], ModelOutput], *, joins: bool = True
    ) -> None:
        self.take_sizes(runner)
        self.traits = runner.traits
        self._runner = runner
        self._kept = kept
        self._joins = joins
        self.calls = 0

    def reserve(self, capacity: int) -> None:
        """Does nothing: few passes are run."""

    def clear_cache(self) -> None:
        """Does nothing: the kept outputs stay."""

    def room(self, context: Context) -> int:
        return self._runner.room(context)

    def cached_tokens(self, context: Context) -> int:
        return 0

    def key(self, context: Context, path: Sequence[int]) -> tuple[Any, ...]:
        """Returns the key under which the output after the context and the drafted tokens `path` is
        kept."""
        generated = context.ids[context.prompt_length :]
        return (id(self), *generated, *path) if self._joins else (id(self), tuple(generated), *path)

    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        """Returns what `ModelRunner.logits` would: from kept outputs if all of its rows are kept,
        else by a forward pass."""
        self.calls += 1
        paths: list[Sequence[int]] = [()]
        if parents is None:
            paths += [draft[: position + 1] for position in range(len(draft))]
        else:
            for token, parent in zip(draft, parents, strict=True):
                paths.append((*paths[parent + 1], token))
        keys = [self.key(context, path) for path in paths[start:]]
        if all(key in self._kept for key in keys):
            parts = zip(*(self._kept[key] for key in keys), strict=True)
            return ModelOutput(*(None if part[0] is None else torch.cat(part) for part in parts))  # type: ignore[arg-type]
        computed = self._runner.logits(context, list(draft), parents, start=start)._replace(
            features=None
        )
        bytes_per_row = sum(part[:1].nbytes for part in computed if part is not None)
        for position, key in enumerate(keys):
            if len(self._kept) * bytes_per_row < MOST_BYTES and key not in self._kept:
                rows = (
                    None if part is None else part[position : position + 1].clone()
                    for part in computed
                )
                self._kept[key] = ModelOutput(*rows)  # type: ignore[arg-type]
        return computed

    def last_hidden_state(self, context: Context) -> torch.Tensor | None:
        """Returns the hidden state [width] from which the model predicted the context's last
        token."""
        before = Context(context.ids[: context.prompt_length])
        before.extend(context.ids[context.prompt_length : -1])
        states = self.logits(before).hidden_states
        return None if states is None else states[0]


class DrawnRunner(SizedRunner):
    """Runs a draft model in simulated sampling: draws each token itself, and returns logits with
    which a greedy drafter takes it.

    In these logits the drawn token has its probability q, and all others share the rest equally.
    Their `unpenalised` are the draft model's own logits, from which all other signals are computed.
    A token is drawn once for each context, draft before it and seed. After tokens that equal the
    beginning of the `reference` (plain decoding's output) it is drawn given the next token y there:
    it is y with probability min(1, q(y) / (c p(y))), where p is the target's distribution and c the
    probability with which block verification reaches it (`verification.survival`), and otherwise it
    is drawn from the positive part of q - c p. After other tokens, of which none is accepted, it is
    drawn from q.

    With `in_blocks` False, c is 1: for PEARL, where the tokens that are verified together are not
    known while they are drafted. Slightly fewer are then accepted than in real runs.
    """

    def __init__(
        self,
        draft: MemoisedRunner,
        target: MemoisedRunner,
        reference: ReferenceOutput,
        sampling: SamplingParams,
        seed: int,
        *,
        in_blocks: bool = True,
    ) -> None:
        self.take_sizes(draft)
        self.traits = draft.traits._replace(draws=False)  # drafters take the likeliest token
        self._draft = draft
        self._target = target
        self._reference = reference
        self._sampling = sampling
        self._seed = seed
        self._in_blocks = in_blocks
        # by the context's length and the draft: the token, its q, and c after it
        self._drawn: dict[tuple[Any, ...], tuple[int, float, float]] = {}

    def token_by_token(self) -> DrawnRunner:
        """Returns the same runner with `in_blocks` False."""
        return DrawnRunner(
            self._draft,
            self._target,
            self._reference,
            self._sampling,
            self._seed,
            in_blocks=False,
        )

    def reserve(self, capacity: int) -> None:
        """Does nothing: few passes are run."""

    def clear_cache(self) -> None:
        """Does nothing: the kept outputs stay."""

    def room(self, context: Context) -> int:
        return self._draft.room(context)

    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        assert parents is None, "only chains are drawn, token by token"
        output = self._draft.logits(context, draft, start=start)
        key = self._key(context, draft)
        if key not in self._drawn:
            reached = 1.0
            if self._in_blocks and draft:
                reached = self._drawn[self._key(context, draft[:-1])][2]
            tokens = [*context.ids[context.prompt_length :], *draft]
            self._drawn[key] = self._draw(output, tokens, reached)
        token, probability, _ = self._drawn[key]
        if token < 0:  # no token can be drawn: the drafter finds out why
            return output
        rest = (1 - probability) / max(1, output.logits.shape[1] - 1)
        logits = torch.full_like(output.logits, math.log(rest) if rest > 0 else -math.inf)
        logits[0, token] = math.log(max(probability, 1.01 * rest))
        return output._replace(logits=logits, unpenalised=output.model_logits)

    def _key(self, context: Context, draft: Sequence[int]) -> tuple[Any, ...]:
        return (len(context), *self._draft.key(context, draft))

    def _draw(
        self, output: ModelOutput, tokens: list[int], reached: float
    ) -> tuple[int, float, float]:
        """Returns the token drafted after `tokens`, the generated and drafted ones so far, its
        probability q, and c after it; `reached` is c before it.

        The token is -1 if none can be drawn.
        """
        generator = token_sampling.make_generator(
            output.logits.device, derive_seed(self._seed, f"position {len(tokens)}")
        )
        width = self._target.vocab_size
        reference = self._reference.token_ids
        probs = token_sampling.pad_probs(
            token_sampling.warp(output.logits[0, :width], self._sampling), width
        )
        if len(tokens) >= len(reference) or tokens != reference[: len(tokens)]:
            token = int(token_sampling.draw(probs, generator))
            return token, float(probs[token]), reached
        context = Context(self._reference.prompt_ids)
        context.extend(tokens)
        of_target = token_sampling.warp(self._target.logits(context).logits[0], self._sampling)
        token = reference[len(tokens)]
        chance = probs[token] / (reached * of_target[token])
        if not torch.rand(1, generator=generator, device=generator.device) < chance:
            residual = (probs - reached * of_target).clamp_min(0)
            other = int(token_sampling.draw(residual, generator))
            token = other if other >= 0 else token
        probability = float(probs[token])
        after = survival([float(of_target[token])], [probability], reached)[1]
        return token, probability, after
