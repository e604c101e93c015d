"""Drafts by way of their text: a drafter that knows the coming text, of any tokenizer, and what its
drafts become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from foreign_tokenizers import FILES, TEXT, settings_of
from tokenizer_helpers import LLAMA, load, write
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models

from specgen.base.types import Context, Round, SamplingParams
from specgen.decoding.chain import TextDrafter
from specgen.decoding.drafting import Setup
from specgen.decoding.policy_base import Fixed
from specgen.decoding.run import Run
from specgen.engine.model_runner import TOKEN_BY_TOKEN, ModelOutput, SizedRunner
from specgen.engine.text.retokenized_context import RetokenizedContext
from specgen.engine.text.token_bytes import token_bytes
from specgen.engine.text.tokenizer import Tokenizer
from specgen.testing.enumeration import ROUNDING, Case, distance
from specgen.testing.scripted_models import ids_of, scripted_run

TokenizerOf = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")

    @cache
    def made(name: str) -> Tokenizer:
        return load(write(folder / name.replace(" ", "-"), FILES[name](), settings_of(name), LLAMA))

    return made


class Script(SizedRunner):
    """A model that says `ids`, whatever came before: the token at each position is certain."""

    traits = TOKEN_BY_TOKEN
    context_limit = 10_000
    device = torch.device("cpu")

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        self.ids = ids
        self.vocab_size = vocab_size
        self.num_embeddings = vocab_size

    def next_token(self, ids: Sequence[int]) -> int:
        return self.ids[min(len(ids), len(self.ids) - 1)]

    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        assert context.ids, "a model can run no empty context"
        rows = torch.full((len(draft) + 1 - start, self.vocab_size), -10.0)
        for row, length in enumerate(range(start, len(draft) + 1)):
            rows[row, self.next_token([*context.ids, *draft[:length]])] = 10.0
        return ModelOutput(rows, rows)


class Oracle(Script):
    """A draft model that continues any prefix of `text` with the text that follows, in tokens of
    its own.

    It errs after each prefix whose length is a multiple of `errs`.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, errs: int = 10_000) -> None:
        super().__init__([], max(tokenizer.vocabulary().values()) + 1)
        self._tokenizer = tokenizer
        self._text = text
        self._errs = errs
        self._all = [*tokenizer.opening, *tokenizer.encode(text, special=False)]

    def next_token(self, ids: Sequence[int]) -> int:
        tokenizer = self._tokenizer
        pieces = list(map(tokenizer.detokenizer(()).push, ids))
        said = "".join(pieces)
        # tokens of a character
        part = next((number for number, piece in enumerate(reversed(pieces)) if piece), 0)
        if len(said) % self._errs == self._errs - 1:
            return tokenizer.encode("a", special=False)[-1]
        if not self._text.startswith(said):  # its tokens do not keep all spaces
            known = (
                [*self._all, *tokenizer.encode("a", special=False)]
                if list(ids) == self._all[: len(ids)]
                else []
            )
            return [*known, *tokenizer.encode("a", special=False)][len(ids) if known else 0]
        rest = tokenizer.encode_after(said[-20:], self._text[len(said) :]) or tokenizer.encode(
            self._text[len(said) :], special=False
        )
        return [*rest, *tokenizer.encode("a", special=False)[-1:] * 9][part]


def run_of(
    target: Tokenizer,
    draft: Tokenizer,
    ids: Sequence[int],
    prompt: int,
    runner: Any,
    eos: Sequence[int] = (),
    **settings: object,
) -> Run:
    """A run whose target says `ids`, of which the first `prompt` are the prompt."""
    sampling = SamplingParams(max_new_tokens=len(ids) - prompt)
    script = Script(ids, max(target.vocabulary().values()) + 1)
    settings = {"translation": "text", "k": 4, **settings}
    return scripted_run(
        "sd",
        settings,
        script,
        runner,
        sampling,
        eos=eos,
        prompt=ids[:prompt],
        tokenizers=(target, draft),
    )


def accepted(rounds: Sequence[Round]) -> float:
    """The share of the drafted tokens that were accepted."""
    return sum(len(round_.verdict.path) for round_ in rounds) / max(
        1, sum(len(round_.draft.tokens) for round_ in rounds)
    )


@pytest.mark.parametrize(
    ("target", "draft", "least"),
    [
        ("byte-level", "byte-level", 1.0),
        ("byte-level", "other merges", 0.85),
        ("byte-level", "gemma", 0.85),
        ("with bos", "prepend", 0.85),
        ("first", "byte-level", 0.8),
        ("gemma", "first", 1.0),
        ("byte-level", "word piece", 0.2),
        ("lower case", "byte-level", 0.0),
        ("byte-level", "lower case", 0.0),
    ],
)
def test_a_draft_that_knows_the_text_is_accepted(
    tokenizer_of: TokenizerOf, target: str, draft: str, least: float
) -> None:
    """Whatever both tokenizers are. Tokens at a draft's end may be rejected: text that follows
    would change them."""
    ours = tokenizer_of(target)
    theirs = tokenizer_of(draft)
    ids = ours.encode(TEXT)
    rounds = list(run_of(ours, theirs, ids, 6, Oracle(theirs, TEXT)).rounds())
    assert ids_of(rounds) == ids[6:]
    assert accepted(rounds) >= least


@pytest.mark.parametrize(
    ("draft", "least"), [("other merges", 0.5), ("first", 0.4), ("word piece", 0.1)]
)
def test_tokens_that_are_not_the_texts_usual_ones(
    tokenizer_of: TokenizerOf, draft: str, least: float
) -> None:
    """The target may split a word, or a character, anywhere. Drafts continue there, and a draft
    that errs changes nothing."""
    ours = tokenizer_of("byte-level")
    theirs = tokenizer_of(draft)
    rng = Random(0)
    of_byte = token_bytes(ours).ids
    ids = list[int]()
    for word in TEXT.split(" "):
        spaced = " " * bool(ids) + word
        ids += (
            ours.encode(spaced, special=False)
            if rng.random() < 0.8
            else [of_byte[bytes([byte])] for byte in spaced.encode()]
        )
    rounds = list(run_of(ours, theirs, ids, 6, Oracle(theirs, TEXT, errs=19)).rounds())
    assert ids_of(rounds) == ids[6:]
    assert accepted(rounds) >= least


def test_the_drafts_context_only_grows_and_is_the_texts_encoding(tokenizer_of: TokenizerOf) -> None:
    for target, draft in (
        ("byte-level", "prepend"),
        ("with bos", "other merges"),
        ("first", "with bos"),
    ):
        ours = tokenizer_of(target)
        theirs = tokenizer_of(draft)
        text, texts = TEXT * 3, RetokenizedContext(ours, theirs)
        context = Context((ids := ours.encode(text))[:2])
        known = list[int]()
        for token in ids[2:]:
            texts.follow(context)
            assert texts.context.ids[: len(known)] == known
            known = list(texts.context.ids)
            context.extend([token])
        texts.follow(context)
        assert len(known) > 50
        assert len(texts.tail) < 150
        assert [*texts.context.ids, *texts.tail] == theirs.encode(text)
        texts.follow(Context(ids[:20]))
        assert [*texts.context.ids, *texts.tail] == theirs.encode(
            text[: len(ours.text_of(ids[:20]).lstrip())]
        )[: len(texts.tail) + len(texts.context)]


def test_special_tokens_become_the_drafts(tokenizer_of: TokenizerOf) -> None:
    ours = tokenizer_of("with bos")
    theirs = tokenizer_of("first")
    bos, eos, user = (ours.vocabulary()[name] for name in ("<s>", "</s>", "<|user|>"))
    texts = RetokenizedContext(ours, theirs)
    texts.follow(
        Context(
            [
                bos,
                *ours.encode("The dog", special=False),
                eos,
                bos,
                user,
                *ours.encode(" is", special=False),
            ]
        )
    )
    found = [*texts.context.ids, *texts.tail]
    first = [*theirs.opening, *theirs.encode("The dog", special=False), theirs.eos_id]
    assert theirs.opening == [1]
    assert found[: len(first)] == first
    assert theirs.text_of(found[len(first) :]) == "<|user|> is"


def test_a_draft_that_ends_the_text_ends_it_in_the_targets_token(tokenizer_of: TokenizerOf) -> None:
    ours = tokenizer_of("byte-level")
    theirs = tokenizer_of("word piece")
    assert ours.eos_id is not None
    ids = [*ours.encode("The quick dog jumps"), ours.eos_id]

    class Ends(Oracle):
        def next_token(self, ids: Sequence[int]) -> int:
            return self._all[len(ids)] if len(ids) < len(self._all) else theirs.eos_id or 0

    run = run_of(
        ours, theirs, [*ids, 5, 5], 2, Ends(theirs, "The quick dog jumps"), eos=[ours.eos_id], k=20
    )
    last = list(run.rounds())[-1]
    assert (run.finish_reason, run.context.ids) == ("eos", ids)
    assert (last.draft.tokens[-1], last.draft.stop_reason) == (ours.eos_id, "eos")


def test_limits(tokenizer_of: TokenizerOf) -> None:
    """The run's limit counts the target's tokens, the draft's context limit its own."""
    ours = tokenizer_of("byte-level")
    theirs = tokenizer_of("other merges")
    ids = ours.encode(TEXT)
    short = Oracle(theirs, TEXT)
    short.context_limit = 70
    rounds = list(run_of(ours, theirs, ids, 6, short).rounds())
    assert ids_of(rounds) == ids[6:]
    assert rounds[1].draft.tokens
    assert not rounds[-1].draft.tokens
    assert not any(
        round_.draft.tokens
        for round_ in rounds
        if len(theirs.encode(ours.text_of(ids[: 6 + round_.index]))) > 70
    )


def letters(pieces: Sequence[str]) -> str:
    """A tokenizer of these texts; those of several characters are merged."""
    merges = [(piece[:-1], piece[-1]) for piece in pieces if len(piece) > 1]
    pipeline = Pipeline(
        models.BPE(vocab={piece: id_ for id_, piece in enumerate(pieces)}, merges=merges)
    )
    pipeline.decoder = decoders.Fuse()
    text: str = pipeline.to_str()
    return text


@pytest.mark.parametrize(
    ("pieces", "limit", "warp"),
    [
        ((["a", "b"], ["b", "a", "ab", "aba"]), 5, {}),
        ((["a", "b", "ab"], ["b", "a", "ba", "bb"]), 4, {}),
        ((["a", "b", "ab"], ["a", "b"]), 4, {"top_k": 2}),
    ],
)
def test_samples_have_the_targets_distribution(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pieces: tuple[list[str], list[str]],
    limit: int,
    warp: dict[str, Any],
) -> None:
    """By enumeration. The target may say `a`, `b` where the usual token is `ab`; drafts have
    several tokens."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    of_target, of_draft = (
        load(write(tmp_path / str(number), letters(each), settings, LLAMA))
        for number, each in enumerate(pieces)
    )
    case = Case(
        "sd", {"translation": "text", "k": 3}, limit, (len(pieces[0]), len(pieces[1])), warp
    )
    drafted = list[int]()
    propose = TextDrafter.propose

    def counted(self: TextDrafter, *arguments: Any) -> Any:
        found = propose(self, *arguments)
        drafted.append(len(found.tokens))
        return found

    monkeypatch.setattr(TextDrafter, "propose", counted)
    assert distance(case, tokenizers=(of_target, of_draft)) < ROUNDING
    assert max(drafted) > 1


def test_what_the_draft_model_cannot_read_gets_no_draft(tokenizer_of: TokenizerOf) -> None:
    """Its tokenizer may have more tokens than it has embeddings, or put none before a text of a
    part of a character."""
    ours = tokenizer_of("byte-level")
    theirs = tokenizer_of("other merges")
    narrow = Oracle(theirs, TEXT)
    narrow.num_embeddings = max([*theirs.opening, *theirs.encode("T", special=False)]) + 1
    drafter = TextDrafter(Setup(narrow), ours, theirs)  # type: ignore[arg-type]
    for text, count in (("T", 1), ("The quick dog", 0)):
        assert bool(drafter.propose(Context(ours.encode(text)), Fixed(4), 4).tokens) == count
    drafter = TextDrafter(Setup(Oracle(ours, TEXT)), ours, ours)  # type: ignore[arg-type]
    assert not drafter.propose(
        Context(ours.encode("\N{SNOWMAN}", special=False)[:1]), Fixed(4), 4
    ).tokens
