"""The facts about a pair that `inspect` reports before anything is run. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specgen.cost_model import ACCEPTANCES, ParallelCosts, SpeedupModel
from specgen.errors import SpecgenError
from specgen.methods import Method


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from a model's files. `weight_bytes` and `cache_bytes` (keys and values of one token) are in the dtype that it would
    run in; `context_limit` is None where the config has none."""

    name: str
    family: str
    parameters: int
    layers: int
    hidden: int
    dtype: str
    device: str
    weight_bytes: int
    cache_bytes: int
    context_limit: int | None
    table_rows: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A token id for which two tokenizers have different texts; None where one has no such id."""

    token_id: int
    target: str | None
    draft: str | None


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A comparison of two tokenizers. `refusal` says why the pair cannot be used, None where it can. `probe` is a text that they
    split differently although their vocabularies match, with the ids of both; None where all probes agree."""

    target_size: int
    draft_size: int
    shared: int
    differences: tuple[Difference, ...]
    refusal: str | None
    probe: tuple[str, tuple[int, ...], tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a method can run on this pair; if not, why and what to do."""

    ready: bool
    why: str = ""
    hint: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"ready": self.ready, "why": self.why, "cure": self.hint}  # keys that do not change


@dataclass(frozen=True, slots=True)
class PairReport:
    """All of it. `free_bytes` is free memory on the target's device, None where the system does not report it.

    The last two are None until they are measured: pass times of each model alone, and of both at the same time, as PEARL runs
    them (None without a usable draft model too).
    """

    target: ModelFacts
    draft: ModelFacts | None
    tokenizers: TokenizerFacts | None
    free_bytes: int | None
    methods: Mapping[str, Readiness]
    speedup_model: SpeedupModel | None = None
    parallel_costs: ParallelCosts | None = None

    @property
    def weight_bytes(self) -> int:
        return self.target.weight_bytes + (self.draft.weight_bytes if self.draft else 0)

    @property
    def context_limit(self) -> int | None:
        """The longest run in tokens: the target's limit. Beyond a shorter limit of the draft nothing is drafted."""
        return self.target.context_limit

    @property
    def cache_bytes(self) -> int | None:
        """Bytes for keys and values of both models at full context; None where the target has no limit."""
        if self.context_limit is None:
            return None
        draft = (
            self.draft.cache_bytes * min(self.draft.context_limit or self.context_limit, self.context_limit) if self.draft else 0
        )
        return self.target.cache_bytes * self.context_limit + draft

    def as_dict(self) -> dict[str, Any]:
        """The line of `inspect --json`, without its type."""
        return {
            "target": asdict(self.target),
            "draft": None if self.draft is None else asdict(self.draft),
            "tokenizers": None if self.tokenizers is None else asdict(self.tokenizers),
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "free_bytes": self.free_bytes,
            "methods": {name: readiness.as_dict() for name, readiness in self.methods.items()},
            "measured": None if self.speedup_model is None else _measured(self.speedup_model, self.parallel_costs),
        }


def _measured(model: SpeedupModel, parallel: ParallelCosts | None) -> dict[str, Any]:
    return {
        "context_length": model.context_length,
        "target_seconds": {str(width): seconds for width, seconds in model.target_seconds.items()},
        "draft_seconds": model.draft_seconds or None,
        "cost_ratio": None if parallel is None else parallel.ratio,
        "pearl_window": None if parallel is None else parallel.window.size,
        "pays_from": {str(k): model.break_even_acceptance(k) for k in model.draft_lengths},
        "expected": [
            {"acceptance": acceptance, "draft_length": k, "speedup": speedup}
            for acceptance, (k, speedup) in ((acceptance, model.best(acceptance)) for acceptance in ACCEPTANCES)
        ],
    }


def readiness(
    method: Method,
    *,
    has_draft: bool,
    refusal: str | None,
    no_exit: tuple[str, str] | None,
    unlike_llama: str | None = None,
) -> Readiness:
    """Whether a method can run, as far as the table of methods and the models' files show.

    `no_exit` is the reason and the hint where there is no exit layer; `unlike_llama` is the target's family where its layers
    cannot be run one by one.
    """
    if method.splits_target and unlike_llama is not None:
        why = f"needs a model built as Llama is, and {unlike_llama} is not"
        return Readiness(False, why, "take a draft model, or lookup")
    if method.needs_exit_layer and no_exit is not None:
        return Readiness(False, *no_exit)
    if not method.needs_draft_model:
        return Readiness(True, "needs no draft model")
    if not has_draft:
        return Readiness(False, "no draft model", "name one with --draft")
    if refusal is not None:
        return Readiness(False, "the tokenizers differ", "take a draft of the target's family")
    return Readiness(True)


def planned(found: Mapping[str, Readiness], refused: Mapping[str, SpecgenError]) -> dict[str, Readiness]:
    """The findings with the errors that planning a run on the loaded pair raised, by method."""
    return {
        name: Readiness(False, refused[name].message, refused[name].hint) if name in refused and entry.ready else entry
        for name, entry in found.items()
    }


def first_differences(target: Mapping[str, int], draft: Mapping[str, int], most: int = 5) -> tuple[int, tuple[Difference, ...]]:
    """The number of ids with the same token in both vocabularies, and the first `most` ids whose tokens differ."""
    target_tokens, draft_tokens = ({id_: token for token, id_ in table.items()} for table in (target, draft))
    shared = sum(draft_tokens.get(id_) == token for id_, token in target_tokens.items())
    differing = (
        id_ for id_ in sorted(target_tokens.keys() | draft_tokens.keys()) if target_tokens.get(id_) != draft_tokens.get(id_)
    )
    found = [
        Difference(id_, target_tokens.get(id_), draft_tokens.get(id_)) for id_, _ in zip(differing, range(most), strict=False)
    ]
    return shared, tuple(found)


PROBES: Sequence[str] = (
    "def add(a, b):\n    return a + b\n",
    "Where is Oslo? It's in Norway, 59.9° N.",
    "  two spaces,\ttabs\r\nand “quotes” – naïve café",
    "数学は楽しい 🙂 1234567890",
)
