"""Distillation of a draft whose tokenizer is not the target's: alignment, loss, figures, refusals, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from families import LETTERS, make_model, make_tokenizer, save
from tokenizer_helpers import byte_level, metaspace
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models
from training_helpers import TINY, Recorder, corpus_of, opened, refused, train_command, trained, written
from transformers import PreTrainedTokenizerFast

from specgen.base.errors import SpecgenError
from specgen.engine.model_loading import LoadedModel
from specgen.engine.text.translation import Translation, token_overlap
from specgen.train.corpus import Part
from specgen.train.distillation import DraftObjective
from specgen.train.divergence import divergence, overlap_divergence
from specgen.train.loop import Training, train
from specgen.train.packing import IGNORED
from specgen.train.task import TrainingStopped, TrainingTask
from specgen.train.texts import GeneratedText, predicted
from specgen.train.translation import (
    TranslatedBatches,
    check_overlap,
    overlap_shares,
    shared_ends,
    translate,
)

WORDS = ["the", "quick", "brown", "lazy", "dog", "and", "is", "not", "amused", "12345", "times", "fibonacci", "été", "Größe"]
ONLY_TAUGHT = replace(TINY, generated_share=1.0)
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
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, path = Random(1), tmp_path_factory.mktemp("texts") / "corpus.txt"
    path.write_text("\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(200)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> LoadedModel:
    return opened(folders[0])


@pytest.fixture(scope="module")
def translation(folders: tuple[Path, Path], target: LoadedModel) -> Translation:
    return between(target, opened(folders[1]))


@pytest.fixture(scope="module")
def texts(target: LoadedModel) -> list[GeneratedText]:
    prompts = [target.tokenizer.encode(text) for text in ("The quick brown", "def fibonacci(n):\n    ret", "Märchen 日")]
    read = target.tokenizer.encode("the dog and the fox, 12345 times")
    return [*written(target, prompts, 24, greedy=False, part=Part.TRAIN), predicted(target, read, len(read))]


def test_pieces_that_end_at_the_same_byte() -> None:
    source, other = [b"he", b"llo", b" wor", b"ld", b"!"], [b"hel", b"lo", b" wor", b"l", b"d", b"!"]
    assert shared_ends(source, other) == [IGNORED, 1, 2, IGNORED, 3, 4]
    # Empty pieces are special tokens. The last one of those at the same byte has seen all of the text before.
    assert shared_ends([b"", b"a", b"", b"", b"b"], [b"a", b"", b"b"]) == [IGNORED, 3, 4]


def test_a_translated_text_has_the_same_bytes_before_each_comparison(
    target: LoadedModel, translation: Translation, texts: list[GeneratedText]
) -> None:
    for text in texts[:3]:
        ids = text.ids.tolist()
        for prompt_length in (1, text.prompt_length, len(ids)):
            found = translate(translation, ids, prompt_length)
            assert len(found.ids) == len(found.positions)
            compared = [(after, before) for after, before in enumerate(found.positions) if before != IGNORED]
            assert {before for _, before in compared} >= set(range(prompt_length - 1, len(ids)))
            assert len(compared) == len({before for _, before in compared})
            for after, before in compared:
                of_draft = translation.draft.of_ids(found.ids[: after + 1]).removeprefix(b" ")
                assert of_draft == translation.target.of_ids(ids[: before + 1]).removeprefix(b" ")


def test_a_prompt_is_compared_where_both_tokenizers_cut_it(target: LoadedModel, translation: Translation) -> None:
    ids = target.tokenizer.encode("def fibonacci(n):\n    return")
    found = translate(translation, ids, len(ids))
    assert found.ids == translation.prompt(ids)
    pieces = [translation.draft.pieces[id_] for id_ in found.ids]
    newline = pieces.index(b"\n")
    assert found.positions[0] == 0  # the special token at the start
    assert found.positions[-1] == len(ids) - 1
    assert found.positions[newline] == IGNORED  # the target has one token for the line break and the spaces after it
    assert 2 < sum(position != IGNORED for position in found.positions) < len(ids)


def test_special_tokens_inside_a_prompt_are_compared(target: LoadedModel, translation: Translation) -> None:
    ids = [*target.tokenizer.encode("dog"), 2, *target.tokenizer.encode("fox")]
    found = translate(translation, ids, len(ids))
    assert found.positions[found.ids.index(2)] == ids.index(2)


def test_the_divergence_on_the_overlap_is_the_formula() -> None:
    torch.manual_seed(0)
    logits, target = 2 * torch.randn(6, 12), (2 * torch.randn(6, 10)).log_softmax(dim=-1)
    to_draft = torch.tensor([3, -1, 0, 5, -1, 7, 2, 9, 8, 11])
    off_overlap = torch.ones(12, dtype=torch.bool)
    off_overlap[to_draft[to_draft >= 0]] = False
    q, common = logits.softmax(dim=-1), to_draft >= 0
    p = target[:, common].exp()
    m, drafted = p.sum(dim=-1), q[:, to_draft[common]]
    restricted = (p / m[:, None]), drafted / drafted.sum(dim=-1, keepdim=True)
    inside = m * F.kl_div(restricted[1].log(), restricted[0], reduction="none").sum(dim=-1)
    outside = (1 - m) * ((1 - m) / (1 - drafted.sum(dim=-1))).log() + m * (m / drafted.sum(dim=-1)).log()
    top = target.topk(10)
    found = overlap_divergence(logits, off_overlap.nonzero()[:, 0], to_draft[top.indices], top.values)
    torch.testing.assert_close(found, inside + outside, rtol=1e-4, atol=1e-5)
    top = target.topk(5)  # the others on the overlap are one outcome
    ids, known = to_draft[top.indices], top.values.exp()
    is_common = ids >= 0
    assert is_common.any(dim=-1).all()
    m = torch.where(is_common, known, 0).sum(dim=-1) / known.sum(dim=-1)
    drafted = torch.where(is_common, q.gather(-1, ids.clamp_min(0)), 0)
    others = q[:, ~off_overlap].sum(dim=-1) - drafted.sum(dim=-1), m * (1 - known.sum(dim=-1)), q[:, off_overlap].sum(dim=-1)
    expected = torch.where(is_common, known * (known / drafted).log(), 0).sum(dim=-1)
    expected = expected + others[1] * (others[1] / others[0]).log() + torch.xlogy(1 - m, (1 - m) / others[2])
    found = overlap_divergence(logits, off_overlap.nonzero()[:, 0], ids, top.values)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_without_other_tokens_it_is_the_divergence_of_the_same_vocabulary() -> None:
    torch.manual_seed(0)
    logits, order = 2 * torch.randn(5, 20), torch.randperm(20)
    top = (2 * torch.randn(5, 20)).log_softmax(dim=-1).topk(4)
    none = torch.empty(0, dtype=torch.long)
    permuted = torch.empty_like(logits).scatter(-1, order.expand(5, -1), logits)
    expected = divergence(logits, top.indices, top.values)
    torch.testing.assert_close(overlap_divergence(permuted, none, order[top.indices], top.values), expected, rtol=1e-4, atol=1e-5)


def test_acceptance_lies_between_the_bounds_of_the_divergence() -> None:
    """The claim of the module: m (1 - sqrt(KL(p' || q') / 2)) <= sum of min(p, q') <= m."""
    torch.manual_seed(1)
    for scale in (0.1, 1.0, 3.0):
        p, q = (scale * torch.randn(2, 200, 8)).softmax(dim=-1)
        p, m = p[:, :6], p[:, :6].sum(dim=-1)
        q = q[:, 2:] / q[:, 2:].sum(dim=-1, keepdim=True)
        kl = (p / m[:, None] * (p / m[:, None] / q).log()).sum(dim=-1)
        acceptance = torch.minimum(p, q).sum(dim=-1)
        assert (acceptance <= m + 1e-6).all()
        assert (acceptance >= m * (1 - (kl / 2).sqrt()) - 1e-6).all()


def test_rows_have_the_targets_predictions_in_the_drafts_ids(translation: Translation, texts: list[GeneratedText]) -> None:
    batches = TranslatedBatches(None, texts, ONLY_TAUGHT, translation, VOCABULARY, 128)
    assert batches.recipe.training_length > ONLY_TAUGHT.training_length  # as many of the target's tokens
    batch = batches.batch(0)
    rows = batch.teacher[batch.teacher != IGNORED]
    assert 0.3 * batch.teacher.numel() < len(rows) < batch.teacher.numel()
    rows_of = [zip(text.top_k_ids, text.top_k_log_probs, strict=True) for text in texts]
    by_log_probs = {tuple(logs.tolist()): ids for pairs in rows_of for ids, logs in pairs}
    to_draft = torch.tensor([*translation.target_to_draft, *[-1] * VOCABULARY])
    for ids, logs in zip(batches.top_k_ids[rows], batches.top_k_log_probs[rows], strict=True):
        assert torch.equal(ids, to_draft[by_log_probs[tuple(logs.tolist())].long()])
        assert (ids >= 0).any()
    found = translate(translation, texts[0].ids.tolist(), texts[0].prompt_length)
    where = next(index for index, (ids, _) in enumerate(batches._taught) if ids == found.ids)
    teacher = batches._taught[where][1]
    for before, row in zip(found.positions, teacher, strict=True):
        if row != IGNORED:
            assert torch.equal(batches.top_k_log_probs[row], texts[0].top_k_log_probs[before])


def test_the_gradient_is_that_of_both_losses(
    folders: tuple[Path, Path], translation: Translation, texts: list[GeneratedText]
) -> None:
    draft = opened(folders[1], "transformers")
    draft.translation = translation
    objective = DraftObjective(opened(folders[0]), draft)
    batches: Any = objective.start(texts, TrainingTask(folders[0], ONLY_TAUGHT), ONLY_TAUGHT)
    training, batch = Training(objective, batches), batches.batch(0)
    outputs, (labels, teacher) = objective.outputs(batch, None)
    outputs = outputs.detach().requires_grad_()
    objective.losses(outputs, labels, teacher)[0].backward()
    taught = teacher != IGNORED
    spelled = ~taught & (labels != IGNORED)
    assert spelled.any()
    expected = outputs.detach().softmax(dim=-1)[spelled] - F.one_hot(labels[spelled], VOCABULARY)
    torch.testing.assert_close(outputs.grad[spelled], expected, rtol=1e-3, atol=1e-5)
    of_taught = outputs.grad[taught & (labels != IGNORED)]
    assert of_taught.isfinite().all()
    assert (of_taught[:, batches.off_overlap].sum(dim=-1).abs() > 0).any()  # the draft's probability of the overlap
    assert (of_taught.index_fill(-1, batches.off_overlap, 0).abs().amax(dim=-1) > 0).all()
    training.backward(batch, int((labels != IGNORED).sum()))
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in training.trained.values())


def test_agreement_and_acceptance_are_those_of_the_restricted_draft(translation: Translation, texts: list[GeneratedText]) -> None:
    batches = TranslatedBatches(None, texts, ONLY_TAUGHT, translation, VOCABULARY, 128)
    text = replace(texts[0], part=Part.HELD_OUT)
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(200, VOCABULARY, generator=generator)
    found = batches.measure(lambda ids: logits[: len(ids)], [text, texts[3]])  # of a text that was only read nothing counts
    compared = translate(translation, text.ids.tolist(), text.prompt_length)
    to_draft, accepted, matches, tokens = translation.target_to_draft, 0.0, 0, 0
    for after, before in enumerate(compared.positions):
        if text.prompt_length - 1 <= before < len(text.ids) - 1:
            q = logits[after].index_fill(-1, batches.off_overlap, -torch.inf).softmax(dim=-1)
            top = zip(text.top_k_ids[before].tolist(), text.top_k_log_probs[before].exp().tolist(), strict=True)
            pairs = [(p, q[to_draft[id_]].item()) for id_, p in top if id_ < len(to_draft) and to_draft[id_] >= 0]
            accepted += sum(min(pair) for pair in pairs)
            best = int(text.top1[before])
            matches += best < len(to_draft) and to_draft[best] == int(q.argmax())
            tokens += 1
    assert tokens == len(text.ids) - text.prompt_length
    assert found["acceptance"] == pytest.approx(accepted / tokens, rel=1e-4)
    assert found["agreement"] == {"greedy": None, "sampled": matches / tokens}


def test_the_shares_of_the_overlap(target: LoadedModel, translation: Translation, folders: tuple[Path, Path]) -> None:
    ids = target.tokenizer.encode("the dog and fibonacci(n)")
    text = GeneratedText(torch.tensor(ids), torch.tensor(ids), None, 1, True, Part.HELD_OUT)
    target_pieces = [translation.target.pieces[id_] for id_ in ids[1:]]
    own = [translation.draft.pieces[id_] for id_ in translation.prompt(ids)[1:]]
    shares = overlap_shares(translation, [text])
    assert shares["common"] == sum(piece in translation.draft.ids for piece in target_pieces) / len(target_pieces)
    joint = {b"".join(own[:end]).removeprefix(b" "): own[end - 1] for end in range(1, len(own) + 1)}
    same = sum(joint.get(b"".join(target_pieces[:end])) == target_pieces[end - 1] for end in range(1, len(target_pieces) + 1))
    assert shares["kappa"] == same / len(target_pieces)
    assert 0 < shares["kappa"] <= shares["common"] <= 1
    ended = torch.tensor([*ids, target.tokenizer.eos_id])
    assert overlap_shares(translation, [replace(text, ids=ended, top1=ended)])["kappa"] == shares["kappa"], "it has no bytes"
    tokenizers = target.tokenizer, opened(folders[1]).tokenizer
    shown = token_overlap(*tokenizers, outputs=[ids[1:]])
    assert shares["kappa"] == shown.covered / shown.tokens, "the same definition as in inspect"
    assert overlap_shares(translation, []) == {"kappa": None, "common": None}


def test_a_resumed_run_ends_with_the_same_weights(folders: tuple[Path, Path], texts_file: Path, tmp_path: Path) -> None:
    def run(name: str, observer: Recorder) -> tuple[Path, dict[str, object]]:
        target, draft = opened(folders[0]), opened(folders[1], "transformers")
        draft.translation = between(target, draft)
        task = TrainingTask(tmp_path / name, replace(ONLY_TAUGHT, learning_rate=3e-3), corpus=corpus_of(texts_file, target))
        return train(DraftObjective(target, draft), task, observer)

    straight, figures = run("straight", Recorder())
    with pytest.raises(TrainingStopped):
        run("resumed", Recorder(stop_at_step=3))
    last = Recorder()
    resumed, again = run("resumed", last)
    assert "resuming at step 3" in last.messages
    assert (straight / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    assert {key: figures[key] for key in ("agreement", "acceptance", "kappa", "common")}.items() <= again.items()
    assert again["acceptance"] > again["acceptance_before"]


def test_the_command_distils_across_tokenizers(folders: tuple[Path, Path], texts_file: Path, tmp_path: Path) -> None:
    models = ["-t", str(folders[0]), "-d", str(folders[1]), "--steps", "2", "--json", "--self-text", "0.5"]
    result = trained(train_command("sd", texts_file, tmp_path / "out", *models))
    line = json.loads(result.stdout)
    figures = line["figures"]
    assert figures["steps"] == 2
    assert 0 < figures["kappa"] <= 1
    assert 0 < figures["acceptance"] < figures["common"]
    assert f"Expected acceptance at temperature 1: {figures['acceptance']:.1%}" in result.stderr
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (folders[1] / "tokenizer.json").read_text()


def test_tokenizers_without_bytes_are_refused(folders: tuple[Path, Path], texts_file: Path, tmp_path: Path) -> None:
    other = save(make_model("llama"), tmp_path / "other", make_tokenizer(LETTERS))
    models = ["-t", str(folders[0]), "-d", other]
    message = refused(train_command("sd", texts_file, tmp_path / "out", *models))
    assert f"their tokens cannot be translated: {other}: its tokens are those of a WordLevel model" in message
    assert "Take a draft of the target's family" in message
    assert "translation=text" not in message, "a method's setting trains nothing"
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the quick brown dog and the lazy dog", "the draft's vocabulary has only [1-9]*[0-9]% of the training text's tokens"),
        ("the Größe of the dog", "the draft's tokenizer cannot write [1-9]*[0-9]% of the training text's tokens"),
    ],
)
def test_a_draft_that_shares_too_little_is_refused(
    folders: tuple[Path, Path], target: LoadedModel, tmp_path: Path, text: str, message: str
) -> None:
    """A draft of single characters: without longer tokens in common, or without the characters."""
    vocabulary = {token: id_ for id_, token in enumerate(["<unk>", "<s>", "</s>", "▁", *map(chr, range(33, 127))])}
    pipeline = Pipeline.from_str(metaspace())
    pipeline.model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    pipeline.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    other = between(target, opened(saved(tmp_path / "other", pipeline, 3)))
    words = [target.tokenizer.encode(word)[1:] for word in text.split()]  # the spaces between them are common tokens
    task = TrainingTask(tmp_path, TINY, prompts=words)
    with pytest.raises(SpecgenError, match=message):
        check_overlap(other, task, VOCABULARY)
    with pytest.raises(SpecgenError, match="embeddings"):
        check_overlap(other, task, len(other.draft.pieces) - 1)
