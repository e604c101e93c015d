"""Drafters that compute the logits for all positions of a draft at once: what they share, and
PARD."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.devices import inference, upload
from specgen.engine.forward_pass import ModelOutput, depths, draft_nodes
from specgen.engine.model_runner import DraftRunner, DraftTraits, ModelRunner, SizedRunner
from specgen.engine.penalties import PenaltyProcessor, penalised_logits

LONGEST_DRAFT = 12  # tokens that PARD's authors draft; trained with 8


class BlockRunner(SizedRunner, ABC):
    """Base of drafters that compute the logits for all positions of a draft together. Implements
    `DraftRunner`.

    They are computed once for each context, as rows: row m predicts the token on level m of a
    draft, from 0. So the logits after the context are row 0, and those after a drafted token on
    level m are row m + 1. `longest_draft` is the number of rows. For `independent`, `draws`,
    `drafts_blocks`, `sizes_blocks` and `rank_accuracies` see `DraftTraits`: where rows are
    independent, drawn tokens need not fit to each other, and more of the likeliest ones are
    accepted. `like` is a runner whose context limit, vocabulary and device this one has;
    `penalties` change the logits from which tokens are chosen.
    """

    independent = True
    draws = False
    sizes_blocks = False
    drafts_blocks = True
    rank_accuracies: Sequence[Sequence[float]] = ()

    def __init__(
        self, like: DraftRunner, longest_draft: int, penalties: PenaltyProcessor | None
    ) -> None:
        self.take_sizes(like)
        self.longest_draft = longest_draft
        self._penalties = penalties
        # a context, its length, the rows after it
        self._computed: tuple[Context, int, ModelOutput] | None = None
        self._deepest = longest_draft  # the most rows that calls have used, for a subclass

    @property
    def traits(self) -> DraftTraits:
        return DraftTraits(
            self.longest_draft,
            self.draws,
            self.independent,
            self.drafts_blocks,
            self.rank_accuracies,
            self.sizes_blocks,
        )

    def plan(self, levels: int | None) -> None:
        """Says that the next draft has at most so many levels (None: as many as there are rows).

        If it gets more, the further rows take another pass. By default this changes nothing.
        """

    @inference
    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        """Returns the logits after the context (index 0) and after each draft token i (index i +
        1), from index `start` on.

        The arguments are those of `ModelRunner.logits`. No draft token may be on the level of the
        last row: the logits after it would need a further row.
        """
        if parents is None or isinstance(parents, range):
            levels: Sequence[int] = range(len(draft) + 1)
        else:
            levels = [0, *(depth + 1 for depth in depths(parents))]
        count = 1 + max(levels)
        known = self._computed
        if known is None or not self._is_same(context) or len(known[2].logits) < count:
            known = context, len(context), self.rows(context, count)
            self._computed = known
        self._deepest = max(self._deepest, count)
        output = self.after([context.ids[-1], *draft][start:], _picked(known[2], levels[start:]))
        return penalised(output, self._penalties, context, draft, parents, start)

    def _is_same(self, context: Context) -> bool:
        """Whether the rows that were computed last are those after this context."""
        known = self._computed
        return known is not None and known[0] is context and known[1] == len(context)

    @abstractmethod
    def rows(self, context: Context, count: int) -> ModelOutput:
        """Computes the rows after the context: at least the first `count`, in order, as an output
        with `logits` [rows, vocabulary]."""

    def after(self, tokens: Sequence[int], rows: ModelOutput) -> ModelOutput:
        """Returns the output after each of `tokens`, the context's last one or drafted ones, from
        `rows`, the rows of their levels. By default these themselves."""
        return rows

    def reserve(self, capacity: int) -> None:
        """Makes the KV cache's next buffers, where there is one, large enough for `capacity`
        tokens."""

    def clear_cache(self) -> None:
        """Drops the rows that were computed, and empties the KV cache if there is one. For
        measurements."""
        self._computed = None


def _picked(rows: ModelOutput, levels: Sequence[int]) -> ModelOutput:
    """Returns the rows of these levels, in their order; views of a range's."""
    logits, states, *_ = rows
    if isinstance(levels, range):
        own = slice(levels.start, levels.stop)
        return ModelOutput(logits[own], None if states is None else states[own])
    picked = upload(torch.tensor(levels), logits.device)
    return ModelOutput(
        logits.index_select(0, picked),
        None if states is None else states.index_select(0, picked),
    )


def penalised(
    output: ModelOutput,
    penalties: PenaltyProcessor | None,
    context: Context,
    draft: Sequence[int],
    parents: Sequence[int] | None,
    start: int,
) -> ModelOutput:
    """Returns `output` with penalties applied to its logits: those of the processor `penalties`
    (None: none) and of the context.

    The other arguments are those of the call of `ModelRunner.logits` whose output this is.
    """
    nodes = draft_nodes(list(draft), parents)
    processed = penalised_logits(
        penalties, output.logits, context, nodes.tokens, nodes.parents, start
    )
    if processed is None:
        return output
    return output._replace(logits=processed, unpenalised=output.logits)


class PardRunner(BlockRunner):
    """Drafts with a PARD model (An et al. 2025, arXiv 2504.18583), which gets the new tokens and
    then mask tokens in one pass.

    `mask` is the id of the mask token. The logits after the context's last token and after each
    mask are the rows. When drafted tokens are accepted, they are run as real tokens in place of
    their masks. The number of masks follows the lengths of the last drafts; if a draft gets longer,
    its further rows take another pass. Raises SpecgenError if the model has no embedding for
    `mask`.
    """

    def __init__(
        self, runner: ModelRunner, mask: int, penalties: PenaltyProcessor | None = None
    ) -> None:
        super().__init__(runner, LONGEST_DRAFT, penalties)
        self._runner = runner
        self._mask = mask
        self._expected = LONGEST_DRAFT
        if not 0 <= mask < self.num_embeddings:
            problem = (
                f"the draft's pard_token is {mask}, and its embedding has "
                f"{self.num_embeddings:,} rows"
            )
            raise SpecgenError(problem, "Correct its config.json")

    def rows(self, context: Context, count: int) -> ModelOutput:
        if not self._is_same(context):
            self._expected = max(self._deepest, self._expected - 1, 1)
            self._deepest = 1
        wanted = self._expected if count <= self._expected else max(count, LONGEST_DRAFT)
        wanted = min(wanted, max(count, self.context_limit - len(context)))
        output = self._runner.logits(context, [self._mask] * (wanted - 1))
        return ModelOutput(output.logits.clone())

    def reserve(self, capacity: int) -> None:
        self._runner.reserve(capacity + LONGEST_DRAFT)

    def clear_cache(self) -> None:
        super().clear_cache()
        self._runner.clear_cache()
