"""What is exported, and what an engine is. Imports little, as the help texts list the engines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specgen.base.settings import Value

# the draft length to export where specgen has it from a length policy that no engine has: a
# compromise
LENGTH = 5
TARGET = "TARGET.gguf"  # where there is no GGUF file
HEAD = "HEAD.gguf"

# What drafts in an engine, with the words for it. PARD models draft all tokens in one pass.
DRAFTERS: Mapping[str, str] = {
    "model": "draft models",
    "translated": "draft models whose tokenizer is not the target's",
    "pard": "PARD models",
    "lookup": "prompt lookup",
    "suffix": "suffix decoding",
    "mtp": "MTP layers in the target's files",
    "assistant": "assistants of Gemma 4",
    "eagle": "EAGLE-1 and EAGLE-2 heads",
    "eagle3": "EAGLE-3 heads",
    "dflash": "DFlash heads",
    "dflash2": "DFlash2 heads",
    "dspark": "DSpark heads",
    "medusa": "Medusa heads",
    "glide": "GliDe heads",
}
BLOCKS = ("dflash", "dflash2", "dspark")


@dataclass(frozen=True, slots=True)
class ExportedHead:
    """A trained head, or MTP layers in the target's files.

    `drafter` is a key of `DRAFTERS`. `folder` is the head's, for MTP layers the target's.
    `longest`, `rows` and `layers` are those of `HeadVariant`.
    """

    folder: str
    drafter: str
    longest: int | None = None
    rows: int = 0
    layers: int = 1


@dataclass(frozen=True, slots=True)
class ExportedModels:
    """The models to export: the names of the target and of the draft model (None: there is none),
    and the trained heads by method.

    `is_pard`: the draft model is a PARD model. `tokenizers_differ`: its tokens were translated
    here. `draft_dtype` is what its weights were rounded to, None if they were not. `target_gguf`
    and `draft_gguf` are the models' GGUF files; None: they have none. `target_type` is the target's
    `model_type`; `mixers` are what its layers have in place of attention, such as `delta` or `conv`
    (empty: all have attention). `sampling` has the temperature and the filters for which the
    methods were tuned, under the names in `SamplingParams`, without those that have no effect;
    empty: greedy.
    """

    target: str
    draft: str | None = None
    heads: Mapping[str, ExportedHead] = field(default_factory=dict)
    is_pard: bool = False
    tokenizers_differ: bool = False
    draft_dtype: str | None = None
    target_gguf: str | None = None
    draft_gguf: str | None = None
    target_type: str = ""
    mixers: Collection[str] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExportedMethod:
    """The method to export, and all its settings.

    `drafter` is a key of `DRAFTERS`. `policy` is what decided the drafts' length here. `head` is
    None if the method drafts with none. `mean_length` is the mean length of the drafts here, None
    if it is not known. `copies`: a match in the text so far is copied in place of a draft, here if
    it is this many tokens long (0: where that was expected to gain more); None: nothing is copied.
    """

    name: str
    settings: Mapping[str, Value]
    drafter: str
    policy: str | None
    models: ExportedModels
    head: ExportedHead | None = None
    mean_length: float | None = None
    copies: int | None = None

    @property
    def target(self) -> str:
        return self.models.target

    @property
    def draft(self) -> str | None:
        return self.models.draft

    @property
    def sampled(self) -> bool:
        return bool(self.models.sampling)

    @property
    def tuned_length(self) -> int | None:
        """The number of drafted tokens per round; for `confidence` its maximum. None if another
        length policy decides it."""
        length = self.settings.get("max_draft" if self.name == "confidence" else "k")
        return None if length is None else int(length)

    @property
    def length(self) -> int:
        """The number of drafted tokens per round to export."""
        mean = 0 if self.mean_length is None else round(self.mean_length)
        length = self.tuned_length or mean or LENGTH
        if self.head is None or self.head.longest is None:
            return length
        left_out = self.head.rows - self.rows
        return min(length, self.head.longest - left_out)

    @property
    def rows(self) -> int:
        """The number of rows of a block's pass here."""
        trained = 0 if self.head is None else self.head.rows
        return min(int(self.settings.get("block_size", 0)) or trained, trained)

    @property
    def needed_rows(self) -> int:
        """The number of rows of a block's pass that drafts the exported number of tokens."""
        if self.head is None or self.head.longest is None:
            return 0
        return self.length + self.head.rows - self.head.longest

    @property
    def width(self) -> int:
        """The number of candidates at each position of a draft; above 1, drafts are trees."""
        return int(self.settings.get("width", 1))

    @property
    def nodes(self) -> int:
        """The number of tokens in a draft, which is a tree if `width` is above 1."""
        nodes = self.settings.get("nodes", "auto")
        if self.width == 1:
            return self.length
        return self.width * self.length if nodes == "auto" else int(nodes)

    @property
    def drafts_trees(self) -> bool:
        return self.width != 1 or (self.drafter in BLOCKS and bool(self.settings.get("nodes")))


def _says_nothing(_: ExportedMethod) -> str | None:
    return None


def _any_length(method: ExportedMethod) -> int:
    return method.length


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to export to.

    `write` writes its options for a method, `write_plain` those for plain decoding.

    `drafters` are what it drafts with, each with a note for the user on what the options do not say
    (empty: nothing). In notes, names in braces stand for the value of a setting, the `head`'s
    folder, or the name of the `target` or the `draft` model. `policies` are the methods for draft
    models whose length rule it has, besides `sd`, with notes as well. `trees` are the drafters
    whose drafts may be trees. `copies` returns how it copies from the text before the drafter of a
    method that does so here, None if it does not. `judges` are those whose drafts are drawn, and
    judged by their probabilities, in sampling, as here. `refuses` returns why it cannot run a
    method otherwise, None if it can. `length` returns the number of drafted tokens that its options
    state.

    `reads_gguf`: its models are GGUF files; if `names_gguf`, its options name these.
    `finds_bundled`: it loads the bundled models, by their folders.
    """

    write: Callable[[ExportedMethod], str]
    write_plain: Callable[[ExportedModels], str]
    drafters: Mapping[str, str]
    policies: Mapping[str, str] = field(default_factory=dict)
    trees: Collection[str] = ()
    copies: Callable[[ExportedMethod], str | None] = _says_nothing
    judges: Collection[str] = ()
    refuses: Callable[[ExportedMethod], str | None] = _says_nothing
    length: Callable[[ExportedMethod], int] = _any_length
    reads_gguf: bool = False
    names_gguf: bool = False
    finds_bundled: bool = False
