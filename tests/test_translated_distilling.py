"""Distillation of a draft whose tokenizer is not the target's: comparisons, loss, figures,
refusals, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from families import make_model, save
from tokenizer_helpers import byte_level, metaspace
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models
from training_helpers import TINY, opened, opened_draft, task_of, train_command, trained, written
from transformers import PreTrainedTokenizerFast

from specgen.base.errors import SpecgenError
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.text.translation import Translation
from specgen.train.corpus import Corpus, Use
from specgen.train.distillation import DraftObjective, check_overlap, translate
from specgen.train.loop import IGNORED, divergence
from specgen.train.texts import Text, predicted

WORDS = [
    "the",
    "quick",
    "brown",
    "lazy",
    "dog",
    "and",
    "is",
    "not",
    "amused",
    "12345",
    "times",
    "fibonacci",
    "été",
    "Größe",
]
VOCABULARY = 480  # rows of the models' tables; both tokenizers have fewer tokens


def saved(folder: Path, pipeline: Pipeline, seed: int) -> Path:
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pipeline, **named)
    return Path(save(make_model("llama", seed=seed, vocab_size=VOCABULARY), folder, tokenizer))


def between(target: LoadedModel, draft: LoadedModel) -> Translation:
    return Translation(target.tokenizer, draft.tokenizer, target.eos_ids, draft.eos_ids)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with a byte-level tokenizer, and a draft with one like SentencePiece's."""
    made = tmp_path_factory.mktemp("translated")
    of_target = json.loads(byte_level(with_template=True))
    of_target["added_tokens"] = [token for token in of_target["added_tokens"] if token["special"]]
    target = saved(made / "target", Pipeline.from_str(json.dumps(of_target)), 0)
    return target, saved(made / "draft", Pipeline.from_str(metaspace()), 7)


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> LoadedModel:
    return opened(folders[0])


@pytest.fixture(scope="module")
def translation(folders: tuple[Path, Path], target: LoadedModel) -> Translation:
    return between(target, opened(folders[1]))


@pytest.fixture(scope="module")
def texts(target: LoadedModel) -> list[Text]:
    prompts = [
        target.tokenizer.encode(text)
        for text in ("The quick brown", "def fibonacci(n):\n    ret", "Märchen 日")
    ]
    read = target.tokenizer.encode("the dog and the fox, 12345 times")
    return [
        *written(target, prompts, 24, greedy=False, part=Use.TRAIN),
        Text(read, len(read), False, Use.TRAIN),
    ]


def started(folders: tuple[Path, Path], texts: list[Text]) -> DraftObjective:
    target = opened(folders[0])
    draft = opened_draft(folders[1])
    draft.translation = between(target, draft)
    objective = DraftObjective(
        task_of(folders[0] / "out", replace(TINY, self_text=1.0)), target, draft
    )
    objective.start(texts)
    return objective


def test_a_translated_text_has_the_same_bytes_before_each_comparison(
    translation: Translation, texts: list[Text]
) -> None:
    for text in texts[:3]:
        for prompt_length in (1, text.prompt_length, len(text.ids)):
            ids, positions = translate(translation, text.ids, prompt_length)
            assert len(ids) == len(positions)
            compared = [
                (after, before) for after, before in enumerate(positions) if before != IGNORED
            ]
            assert [before for _, before in compared] == list(
                range(prompt_length - 1, len(text.ids))
            )
            for after, before in compared:
                of_draft = translation.draft.of_ids(ids[: after + 1]).removeprefix(b" ")
                assert of_draft == translation.target.of_ids(text.ids[: before + 1]).removeprefix(
                    b" "
                )


@pytest.mark.parametrize("known", [5, 10])
@pytest.mark.parametrize("to_draft", [list(range(10)), [3, -1, 0, 5, -1, 7, 2, 9, 8, 11]])
def test_the_divergence_is_that_of_its_outcomes(known: int, to_draft: list[int]) -> None:
    """KL(P || Q) over the known tokens that the draft has, all others on the overlap, and all off
    the overlap."""
    generator = torch.Generator().manual_seed(0)
    size = max(to_draft) + 1
    logits, target = (
        2 * torch.randn(6, vocabulary, generator=generator) for vocabulary in (size, 10)
    )
    top = target.log_softmax(dim=-1).topk(known)
    ids = torch.tensor(to_draft)[top.indices]
    of_target = top.values.exp()
    off = torch.tensor([id_ for id_ in range(size) if id_ not in to_draft], dtype=torch.long)
    found = divergence(logits, ids, top.values, off)
    draft = logits.softmax(dim=-1)
    for row in range(6):
        pairs = [
            (float(p), float(draft[row, id_]))
            for p, id_ in zip(of_target[row], ids[row], strict=True)
            if id_ >= 0
        ]
        total = float(of_target[row].sum())
        outside = float(draft[row, off].sum())
        mass = sum(p for p, _ in pairs) / total
        outcomes = [
            *pairs,
            ((1 - total) * mass, 1 - outside - sum(q for _, q in pairs)),
            (1 - mass, outside),
        ]
        outcomes = [pair for pair in outcomes if min(pair) > 1e-5]
        expected = sum(p * torch.tensor(p / q).log() for p, q in outcomes)
        torch.testing.assert_close(found[row], expected, rtol=1e-3, atol=1e-4)


def test_rows_have_the_targets_predictions_in_the_drafts_ids(
    folders: tuple[Path, Path], target: LoadedModel, translation: Translation, texts: list[Text]
) -> None:
    batches = started(folders, texts).batches
    assert batches.window > TINY.window, "as many of the target's tokens"
    to_draft = torch.tensor([*translation.target_to_draft, *[-1] * VOCABULARY], dtype=torch.int)
    for text, (taught, teacher, _) in zip(texts, batches._taught, strict=True):
        found = predicted(target, text)
        is_read = text.prompt_length == len(text.ids)  # its first tokens are then taken as a prompt
        ids, positions = translate(translation, text.ids, 1 if is_read else text.prompt_length)
        assert taught == ids
        for before, row in zip(positions, teacher, strict=True):
            if row != IGNORED:
                assert torch.equal(batches.top_k_ids[row], to_draft[found.top_k_ids[before]])
                torch.testing.assert_close(
                    batches.top_k_log_probs[row], found.top_k_log_probs[before]
                )
                assert (batches.top_k_ids[row] >= 0).any()


def test_agreement_is_that_of_the_restricted_draft(
    folders: tuple[Path, Path], target: LoadedModel, translation: Translation, texts: list[Text]
) -> None:
    text = texts[0]._replace(use=Use.HELD_OUT)
    objective = started(folders, [text, *texts[1:]])
    logits = 4 * torch.randn(200, VOCABULARY, generator=torch.Generator().manual_seed(3))
    objective.next_logits = lambda ids: logits[: len(ids)]  # type: ignore[method-assign]
    best = predicted(target, text).top_k_ids[:, 0].tolist()
    _, positions = translate(translation, text.ids, text.prompt_length)
    matches = []
    for after, before in enumerate(positions):
        if text.prompt_length - 1 <= before < len(text.ids) - 1:
            own = int(logits[after].index_fill(-1, objective.off_overlap, -torch.inf).argmax())
            matches.append(
                best[before] < len(translation.target_to_draft)
                and translation.target_to_draft[best[before]] == own
            )
    assert objective.agreement() == {"greedy": None, "sampled": sum(matches) / len(matches)}


def test_the_command_distils_across_tokenizers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Measured by the cross-entropy: of a random target, whose likeliest tokens the draft mostly
    lacks, the same ones are predicted by chance."""
    rng = Random(1)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(
        "\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(200)), encoding="utf-8"
    )
    sizes = [
        "--steps",
        "30",
        "--json",
        "--self-text",
        "1",
        "--learning-rate",
        "0.01",
        "--seed",
        "1",
    ]
    result = trained(
        train_command(
            "sd", corpus, tmp_path / "out", "-t", str(folders[0]), "-d", str(folders[1]), *sizes
        )
    )
    figures = json.loads(result.stdout)["figures"]
    assert figures["steps"] == 30
    assert figures["cross_entropy"] < figures["start"]["cross_entropy"] - 0.08
    assert figures["agreement"].keys() == figures["agreement_before"].keys()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (
        folders[1] / "tokenizer.json"
    ).read_text()


def test_a_draft_that_shares_too_little_is_refused(
    folders: tuple[Path, Path], target: LoadedModel, tmp_path: Path
) -> None:
    """A draft of single characters, without longer tokens in common."""
    vocabulary = {
        token: id_
        for id_, token in enumerate(["<unk>", "<s>", "</s>", "▁", *map(chr, range(33, 127))])
    }
    pipeline = Pipeline.from_str(metaspace())
    pipeline.model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    other = between(target, opened(saved(tmp_path / "other", pipeline, 3)))
    words = ["the", "quick", "brown", "dog", "and", "lazy"]
    # the spaces between them are common tokens
    text = Corpus(target.tokenizer.encode(word)[1:] for word in words)
    with pytest.raises(
        SpecgenError, match=r"the draft's vocabulary has only \d+% of the training text's tokens"
    ):
        check_overlap(other, text, VOCABULARY)
    with pytest.raises(SpecgenError, match="embeddings"):
        check_overlap(other, text, len(other.draft.pieces) - 1)
