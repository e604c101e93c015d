"""Draft trees whose levels are chosen on a GPU: the host reads all of them at the end, or each where it decides after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from specgen.base.types import Context
from specgen.decoding import logits_ops, signals
from specgen.decoding.length_policy import Signals
from specgen.engine.devices import upload
from specgen.engine.model_runner import ChoosingRunner
from specgen.engine.native.kernels.kernel_set import SPAN


class Level(NamedTuple):
    """The candidates for a level of a tree, the likeliest path's first, with numbers on the host.

    `origins` are the rows of the logits that each candidate was chosen from, `log_likelihoods` (nats) are those of the paths.
    `signals` are the likeliest candidate's, by name. `statistics` has entropy and top probability of each row of the logits.
    """

    tokens: Sequence[int]
    origins: Sequence[int]
    log_likelihoods: Sequence[float]
    signals: dict[str, float]
    statistics: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class LevelsOnDevice:
    """How the levels of a tree are chosen (`TopKTreeDrafter`), and what is computed for each. Implements `ChoiceRule`.

    The `width` likeliest candidates of a level are run, all but those in `eos_ids` are continued. The host gets these or, if it
    `reads_all`, `width` candidates after each node. Logits from `vocab_size` on are cut. `signals` are the names of numbers about
    a level's likeliest candidate, see `signals.compute`.
    """

    width: int
    reads_all: bool
    vocab_size: int
    eos_ids: frozenset[int]
    signals: Signals

    @property
    def levels(self) -> int:
        """The number of levels that a tree can have: all but the last one are run."""
        return SPAN // self.width + 1

    def chooser(self, vocab_size: int, device: torch.device) -> LevelChooser:
        return LevelChooser(self, min(vocab_size, self.vocab_size), device)


class LevelChooser:
    """Chooses levels on the device, and keeps them for the host. Implements `forward_pass.TokenChooser`.

    `table` [levels, numbers] has a row for each level, and `row` [1] is the row of the next one: tokens, origins and
    log-likelihoods of `candidates` candidates, then entropy and top probability of `width` rows of logits, then the signals in
    the order of `names`. What a level has fewer of is filled up; candidates then have the log-likelihood -inf.
    """

    def __init__(self, rule: LevelsOnDevice, vocab_size: int, device: torch.device) -> None:
        self.width, self._vocab_size, self._signals = rule.width, vocab_size, rule.signals
        self._children = min(rule.width, vocab_size)
        self.candidates = max(rule.width, rule.width * self._children) if rule.reads_all else rule.width
        self.names = sorted(rule.signals)
        self._eos = upload(torch.tensor(sorted(rule.eos_ids), dtype=torch.int64), device)
        self.parents: torch.Tensor | None = torch.zeros(rule.width, dtype=torch.int64, device=device)
        self.row = torch.zeros(1, dtype=torch.int64, device=device)
        self._joint = torch.zeros(rule.width, device=device)  # log-likelihoods of the paths; -inf: not continued
        numbers = 3 * self.candidates + 2 * rule.width + len(self.names)
        self.table = torch.zeros(rule.levels, numbers, dtype=torch.float64, device=device)  # exact for tokens, unlike float32
        self.state: Sequence[torch.Tensor] = [self.row, self._joint]

    def begin(self) -> None:
        """Prepares for the first level of a tree."""
        self.row.zero_()
        self._joint.zero_()

    def __call__(self, logits: torch.Tensor, unrestricted: torch.Tensor | None = None) -> torch.Tensor:
        logits, rows = logits[:, : self._vocab_size], logits.shape[0]
        before = self._joint[:rows, None]
        values, tokens = logits.float().log_softmax(dim=-1).topk(self._children, dim=-1)
        joint = torch.where(before == -torch.inf, -torch.inf, values.clamp_max_(0.0) + before)  # never above the parent's
        best, positions = joint.flatten().sort(descending=True, stable=True)
        best, positions = best[: self.candidates], positions[: self.candidates]
        chosen = tokens.flatten().index_select(0, positions).masked_fill_(best.isnan(), -1)
        origins = positions // self._children
        missing = (0, self.candidates - best.shape[0])
        best, chosen, origins = pad(best, missing, value=-torch.inf), pad(chosen, missing), pad(origins, missing)
        own = logits if unrestricted is None else unrestricted
        entropies, top_probs = (pad(values, (0, self.width - rows)) for values in logits_ops.entropy_and_top_prob(own))
        found = self._of_likeliest(logits, unrestricted, chosen[:1], origins[:1])
        row = torch.cat([numbers.double() for numbers in (chosen, origins, best, entropies, top_probs, *found)])
        self.table.index_copy_(0, self.row, row[None])
        self.row.add_(1)
        return self._continue(chosen[: self.width], origins[: self.width], best[: self.width])

    def _of_likeliest(
        self, logits: torch.Tensor, unrestricted: torch.Tensor | None, token: torch.Tensor, origin: torch.Tensor
    ) -> list[torch.Tensor]:
        """Returns the signals of the likeliest candidate, each [1], in the order of `names`."""
        if not self.names:
            return []
        own = None if unrestricted is None else unrestricted.index_select(0, origin)
        found = signals.compute(self._signals, logits.index_select(0, origin), token.clamp_min(0), unpenalised=own)
        return [found[name] for name in self.names]

    def _continue(self, tokens: torch.Tensor, origins: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
        """Prepares for the level after these nodes, and returns the ids to run."""
        assert self.parents is not None
        self.parents.copy_(origins)
        ended = (tokens[:, None] == self._eos).any(dim=1)
        self._joint.copy_(joint.masked_fill(ended, -torch.inf))
        return tokens.clamp_min(0)  # -1, after logits with a NaN, is no token that can be run


class DeviceTree:
    """A tree that grows level by level on the device, after the context: at most `levels` of them, which `rule` chooses.

    If it `is_deferred`, the host reads nothing before the tree is complete.
    """

    def __init__(self, runner: ChoosingRunner, rule: LevelsOnDevice, context: Context, levels: int, *, is_deferred: bool) -> None:
        self.levels, self.is_deferred = min(levels, rule.levels), is_deferred
        chooser = runner.chooser(rule)
        assert isinstance(chooser, LevelChooser)
        self._runner, self._rule, self._chooser, self._context = runner, rule, chooser, context
        self._count = 0  # levels chosen
        self._nodes: list[tuple[list[int], list[int]]] = []  # of the levels read: tokens that are run, rows that they follow

    def add_level(self) -> None:
        if self._count == 0:
            self._chooser.begin()
        self._runner.choose_next(self._rule, self._context, (), self._count, self.levels)
        self._count += 1

    def read(self) -> list[Level]:
        """Returns the levels that were not read yet, with one transfer to the host."""
        chooser, first = self._chooser, len(self._nodes)
        if first == self._count:
            return []
        return [self._level(row) for row in chooser.table[first : self._count].tolist()]

    def count_nodes(self) -> None:
        """Tells the runner which nodes it has run: those of all levels that were read, but the last."""
        tokens: list[int] = []
        parents: list[int] = []
        for of_level, origins in self._nodes[:-1]:
            before = len(tokens) - self._rule.width
            parents += [before + origin if before >= 0 else -1 for origin in origins]
            tokens += of_level
        self._runner.count_chosen(tokens, parents)

    def _level(self, row: list[float]) -> Level:
        size, width = self._chooser.candidates, self._rule.width
        tokens, origins = list(map(int, row[:size])), list(map(int, row[size : 2 * size]))
        self._nodes.append(([max(token, 0) for token in tokens[:width]], origins[:width]))
        entropies, top_probs = row[3 * size : 3 * size + width], row[3 * size + width : 3 * size + 2 * width]
        values = dict(zip(self._chooser.names, row[3 * size + 2 * width :], strict=True))
        return Level(tokens, origins, row[2 * size : 3 * size], values, list(zip(entropies, top_probs, strict=True)))
