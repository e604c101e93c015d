"""Distillation of a draft whose tokenizer is not the target's: comparisons, loss, figures, refusals, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from families import make_model, save
from tokenizer_helpers import byte_level, metaspace
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models
from training_helpers import TINY, opened, task_of, train_command, trained, written
from transformers import PreTrainedTokenizerFast

from specgen.base.errors import SpecgenError
from specgen.engine.model_loading import LoadedModel
from specgen.engine.text.translation import Translation
from specgen.train.corpus import Corpus, Part
from specgen.train.distillation import DraftBatches, DraftObjective, check_overlap, translate
from specgen.train.loop import IGNORED, divergence
from specgen.train.texts import Text, predicted

WORDS = ["the", "quick", "brown", "lazy", "dog", "and", "is", "not", "amused", "12345", "times", "fibonacci", "été", "Größe"]
ONLY_TAUGHT = replace(TINY, self_text=1.0)
VOCABULARY = 480  # rows of the models' tables; both tokenizers have fewer tokens


def saved(folder: Path, pipeline: str | Pipeline, seed: int) -> Path:
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    pipeline = Pipeline.from_str(pipeline) if isinstance(pipeline, str) else pipeline
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
    return saved(made / "target", json.dumps(of_target), 0), saved(made / "draft", metaspace(), 7)


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> LoadedModel:
    return opened(folders[0])


@pytest.fixture(scope="module")
def translation(folders: tuple[Path, Path], target: LoadedModel) -> Translation:
    return between(target, opened(folders[1]))


@pytest.fixture(scope="module")
def texts(target: LoadedModel) -> list[Text]:
    prompts = [target.tokenizer.encode(text) for text in ("The quick brown", "def fibonacci(n):\n    ret", "Märchen 日")]
    read = target.tokenizer.encode("the dog and the fox, 12345 times")
    return [*written(target, prompts, 24, greedy=False, part=Part.TRAIN), Text(read, len(read), False, Part.TRAIN)]


def started(folders: tuple[Path, Path], texts: list[Text]) -> tuple[DraftObjective, DraftBatches]:
    target, draft = opened(folders[0]), opened(folders[1])
    draft.translation = between(target, draft)
    objective = DraftObjective(task_of(folders[0] / "out", ONLY_TAUGHT), target, draft)
    objective.start(texts)
    return objective, objective.batches


def test_a_translated_text_has_the_same_bytes_before_each_comparison(translation: Translation, texts: list[Text]) -> None:
    for text in texts[:3]:
        for prompt_length in (1, text.prompt_length, len(text.ids)):
            ids, positions = translate(translation, text.ids, prompt_length)
            assert len(ids) == len(positions)
            compared = [(after, before) for after, before in enumerate(positions) if before != IGNORED]
            assert [before for _, before in compared] == list(range(prompt_length - 1, len(text.ids)))
            for after, before in compared:
                of_draft = translation.draft.of_ids(ids[: after + 1]).removeprefix(b" ")
                assert of_draft == translation.target.of_ids(text.ids[: before + 1]).removeprefix(b" ")


def test_the_divergence_on_the_overlap_is_the_formula() -> None:
    torch.manual_seed(0)
    logits, target = 2 * torch.randn(6, 12), (2 * torch.randn(6, 10)).log_softmax(dim=-1)
    to_draft = torch.tensor([3, -1, 0, 5, -1, 7, 2, 9, 8, 11])
    off_overlap = torch.ones(12, dtype=torch.bool)
    off_overlap[to_draft[to_draft >= 0]] = False
    off, q, common = off_overlap.nonzero()[:, 0], logits.softmax(dim=-1), to_draft >= 0
    p = target[:, common].exp()
    m, drafted = p.sum(dim=-1), q[:, to_draft[common]]
    restricted = (p / m[:, None]), drafted / drafted.sum(dim=-1, keepdim=True)
    inside = m * F.kl_div(restricted[1].log(), restricted[0], reduction="none").sum(dim=-1)
    outside = (1 - m) * ((1 - m) / (1 - drafted.sum(dim=-1))).log() + m * (m / drafted.sum(dim=-1)).log()
    top = target.topk(10)
    torch.testing.assert_close(divergence(logits, to_draft[top.indices], top.values, off), inside + outside, rtol=1e-4, atol=1e-5)
    top = target.topk(5)  # the others on the overlap are one outcome
    ids, known = to_draft[top.indices], top.values.exp()
    is_common = ids >= 0
    m = torch.where(is_common, known, 0).sum(dim=-1) / known.sum(dim=-1)
    drafted = torch.where(is_common, q.gather(-1, ids.clamp_min(0)), 0)
    others = q[:, ~off_overlap].sum(dim=-1) - drafted.sum(dim=-1), m * (1 - known.sum(dim=-1)), q[:, off_overlap].sum(dim=-1)
    expected = torch.where(is_common, known * (known / drafted).log(), 0).sum(dim=-1)
    expected = expected + others[1] * (others[1] / others[0]).log() + torch.xlogy(1 - m, (1 - m) / others[2])
    torch.testing.assert_close(divergence(logits, ids, top.values, off), expected, rtol=1e-4, atol=1e-5)
    for k in (4, 12):  # of the same vocabulary: by its definition, the rest being one outcome
        p, q = (2 * torch.randn(5, 12)).softmax(dim=-1), logits[:5].softmax(dim=-1)
        top = p.topk(k)
        q = q.gather(-1, top.indices)
        expected = (top.values * (top.values / q).log()).sum(dim=-1)
        rest = 1 - top.values.sum(dim=-1), 1 - q.sum(dim=-1)
        expected = expected if k == 12 else expected + rest[0] * (rest[0] / rest[1]).log()
        torch.testing.assert_close(divergence(logits[:5], top.indices, top.values.log()), expected, rtol=1e-3, atol=1e-4)


def test_rows_have_the_targets_predictions_in_the_drafts_ids(
    folders: tuple[Path, Path], target: LoadedModel, translation: Translation, texts: list[Text]
) -> None:
    _, batches = started(folders, texts)
    assert batches.window > ONLY_TAUGHT.window, "as many of the target's tokens"
    to_draft = torch.tensor([*translation.target_to_draft, *[-1] * VOCABULARY], dtype=torch.int)
    for text, (taught, teacher) in zip(texts, batches._taught, strict=True):
        found = predicted(target, text)
        is_read = text.prompt_length == len(text.ids)  # its first tokens are then taken as a prompt
        ids, positions = translate(translation, text.ids, 1 if is_read else text.prompt_length)
        assert taught == ids
        for before, row in zip(positions, teacher, strict=True):
            if row != IGNORED:
                assert torch.equal(batches.top_k_ids[row], to_draft[found.top_k_ids[before]])
                torch.testing.assert_close(batches.top_k_log_probs[row], found.top_k_log_probs[before])
                assert (batches.top_k_ids[row] >= 0).any()


def test_agreement_is_that_of_the_restricted_draft(
    folders: tuple[Path, Path], target: LoadedModel, translation: Translation, texts: list[Text]
) -> None:
    text = texts[0]._replace(part=Part.HELD_OUT)
    objective, _ = started(folders, [text, *texts[1:]])
    logits = 4 * torch.randn(200, VOCABULARY, generator=torch.Generator().manual_seed(3))
    objective.next_logits = lambda ids: logits[: len(ids)]  # type: ignore[method-assign]
    found, of_target = objective.agreement(), predicted(target, text)
    _, positions = translate(translation, text.ids, text.prompt_length)
    to_draft, matches, tokens = translation.target_to_draft, 0, 0
    for after, before in enumerate(positions):
        if text.prompt_length - 1 <= before < len(text.ids) - 1:
            q = logits[after].index_fill(-1, objective.off_overlap, -torch.inf).softmax(dim=-1)
            best = int(of_target.top_k_ids[before, 0])
            matches += best < len(to_draft) and to_draft[best] == int(q.argmax())
            tokens += 1
    assert tokens == len(text.ids) - text.prompt_length
    assert found == {"greedy": None, "sampled": matches / tokens}


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, path = Random(1), tmp_path_factory.mktemp("texts") / "corpus.txt"
    path.write_text("\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(200)), encoding="utf-8")
    return path


def test_the_command_distils_across_tokenizers(folders: tuple[Path, Path], corpus_file: Path, tmp_path: Path) -> None:
    sizes = ["--steps", "6", "--json", "--self-text", "1", "--learning-rate", "0.003"]
    result = trained(train_command("sd", corpus_file, tmp_path / "out", "-t", str(folders[0]), "-d", str(folders[1]), *sizes))
    line = json.loads(result.stdout)
    figures = line["figures"]
    assert figures["steps"] == 6
    assert figures["agreement"]["sampled"] > figures["agreement_before"]["sampled"]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (folders[1] / "tokenizer.json").read_text()


def test_a_draft_that_shares_too_little_is_refused(folders: tuple[Path, Path], target: LoadedModel, tmp_path: Path) -> None:
    """A draft of single characters, without longer tokens in common."""
    vocabulary = {token: id_ for id_, token in enumerate(["<unk>", "<s>", "</s>", "▁", *map(chr, range(33, 127))])}
    pipeline = Pipeline.from_str(metaspace())
    pipeline.model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    pipeline.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    other = between(target, opened(saved(tmp_path / "other", pipeline, 3)))
    text = "the quick brown dog and the lazy dog"
    words = Corpus(target.tokenizer.encode(word)[1:] for word in text.split())  # the spaces between them are common tokens
    with pytest.raises(SpecgenError, match=r"the draft's vocabulary has only \d+% of the training text's tokens"):
        check_overlap(other, words, VOCABULARY)
    with pytest.raises(SpecgenError, match="embeddings"):
        check_overlap(other, words, len(other.draft.pieces) - 1)
