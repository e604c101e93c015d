"""A model runner that keeps its outputs, so that drafts of different shapes after the same context share their passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from specgen.engine.model_runner import ModelOutput

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner
    from specgen.types import Context

MOST_BYTES = 128 << 20  # of kept logits


class _Output(NamedTuple):
    logits: torch.Tensor  # [vocabulary]
    hidden: torch.Tensor | None  # [width]


class MemoisedRunner:
    """A `DraftRunner` for runs of one prompt. `calls` counts the calls of `logits`, `passes` those that needed a forward pass.

    Outputs are kept by the generated tokens and the path of drafted tokens after them, whatever the shape of the draft.
    """

    def __init__(self, runner: DraftRunner) -> None:
        self._runner = runner
        self.context_limit, self.num_embeddings = runner.context_limit, runner.num_embeddings
        self.vocab_size, self.device = runner.vocab_size, runner.device
        self._outputs: dict[tuple[tuple[int, ...], tuple[int, ...]], _Output] = {}
        self.calls = self.passes = self._bytes = 0

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """As `ModelRunner.logits`."""
        self.calls += 1
        tokens = list(draft)
        parents = list(range(-1, len(tokens) - 1)) if parents is None else list(parents)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent + 1], token))
        generated = tuple(context.ids[context.prompt_length :])
        keys = [(generated, path) for path in paths[start:]]
        if all(key in self._outputs for key in keys):
            kept = [self._outputs[key] for key in keys]
            hidden = [output.hidden for output in kept if output.hidden is not None]
            return ModelOutput(torch.stack([output.logits for output in kept]), torch.stack(hidden) if hidden else None)
        self.passes += 1
        computed = self._runner.logits(context, tokens, parents, start=start)
        for position, key in enumerate(keys):
            if self._bytes < MOST_BYTES and key not in self._outputs:
                logits = computed.logits[position].clone()
                self._outputs[key] = _Output(
                    logits, None if computed.hidden_states is None else computed.hidden_states[position].clone()
                )
                self._bytes += logits.numel() * logits.element_size()
        return computed
