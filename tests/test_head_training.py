"""Training of heads: batches of the target's states, the loop with an objective, its saved state, and the command."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import BACKENDS, LETTERS, make_model, make_tokenizer, save
from specgen.engine.parts.head_description import HeadDescription, read_head_description
from specgen.engine.parts.head_files import find_head, load_head
from specgen.train.frozen_target import FrozenTarget, TargetStates
from specgen.train.generated_text import GeneratedText, generate_texts
from specgen.train.head_agreement import RANKS, HeldOut, held_out
from specgen.train.head_objective import Objective, Predictions, reachable
from specgen.train.head_training import HeadTraining, predictions
from specgen.train.text_generation import Purpose, TextGeneration
from specgen.train.training_loop import TrainingBatches
from specgen.train.training_task import Recipe, TrainingStopped, TrainingTask
from torch import nn
from training_helpers import TEXTS, TINY, Recorder, corpus_of, opened, packed, refused, train_command, trained

from specgen.base.errors import SpecgenError
from specgen.engine.parts.weights import HeadWeights, MedusaWeights
from specgen.train.corpus import Part
from specgen.train.heads import train_head
from specgen.train.packing import IGNORED, PackedBatch


class LinearHeads(Objective):
    """The simplest heads: one square matrix for each drafted token, on the target's last hidden state."""

    kind = "medusa"
    depths = 2

    def __init__(self, target: FrozenTarget, texts: Sequence[GeneratedText], seed: int) -> None:
        super().__init__(target, texts, seed)
        self.module = nn.Linear(target.width, 2 * target.width, bias=False, device=target.device)
        with torch.no_grad():
            self.module.weight.copy_(torch.eye(target.width).repeat(2, 1))

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        heads = self.module(states.hidden).flatten(0, 1).unflatten(-1, (2, -1))
        rows = []
        for depth in range(2):
            first, source = reachable(batch, 1 + depth)
            rows.append((heads[first, depth], source, torch.full_like(source, depth)))
        return Predictions(*map(torch.cat, zip(*rows, strict=True)))

    def weights(self, ranks: Sequence[Sequence[float]]) -> HeadWeights:
        blocks = [[(weight, weight.new_zeros(len(weight)))] for weight in self.module.weight.chunk(2)]
        return MedusaWeights(blocks, rank_accuracies=ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(make_model("llama"), tmp_path_factory.mktemp("heads") / "target", make_tokenizer(LETTERS)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_packed_texts_states_and_labels_are_those_of_the_text_alone(folder: Path, backend: str) -> None:
    frozen = FrozenTarget(opened(folder, backend))
    batch = packed(TEXTS, 14)
    layers = frozen.num_layers
    states = frozen.states(batch, [0, 2], [layers - 1])
    predicted, labels = predictions(LinearHeads(frozen, [], 0), frozen, batch, None)
    depths, next_tokens, top_k_ids, log_probs, hidden = labels
    torch.testing.assert_close(states.features[..., : frozen.width], frozen.embeddings(batch.ids))
    start = row = 0
    logits_of = {}
    for text in TEXTS:
        alone = frozen.states(packed([text], len(text)), [0, 2], [layers - 1])
        span = slice(start, start + len(text))
        torch.testing.assert_close(states.features[:, span], alone.features, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(states.hidden[:, span], alone.hidden, atol=1e-5, rtol=1e-4)
        for ours, theirs in zip(states.keys_values[0], alone.keys_values[0], strict=True):
            assert ours.shape[:1] + ours.shape[2:3] == (1, 14)
            torch.testing.assert_close(ours[:, :, span], theirs, atol=1e-5, rtol=1e-4)
        reference = frozen.model.reference_logits(text).clone()
        torch.testing.assert_close(frozen.logits(alone.hidden[0]), reference, atol=1e-4, rtol=1e-4)
        logits_of |= {start + index: (reference[index], text[index + 1 :][:1]) for index in range(len(text))}
        start += len(text)
    expected = [(source, depth) for depth in (0, 1) for source in range(1 + depth, 13) if source in (1, 2, 3, 8, 9, 10, 11, 12)]
    expected = [pair for pair in expected if pair not in ((1, 1), (8, 1))]
    assert depths.tolist() == [depth for _, depth in expected]
    for row, (source, _) in enumerate(expected):
        logits, following = logits_of[source]
        assert [next_tokens[row]] == following
        assert top_k_ids[row, 0] == logits.argmax()
        torch.testing.assert_close(log_probs[row], logits.log_softmax(-1)[top_k_ids[row]], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(hidden[row], states.hidden[0, source])
    assert predicted.sources.tolist() == [source for source, _ in expected]


def test_training_reaches_the_weights_that_gradients_of_the_whole_loss_give(
    folder: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step's gradients, in pieces of 5 predicted tokens and a sequence at a time, are those of all logits at once."""
    target = opened(folder)
    frozen = FrozenTarget(target)
    batches = TrainingBatches(corpus_of(corpus, target), [], TINY)
    batch = batches.batch(0)
    whole = LinearHeads(frozen, [], 0)
    predicted, labels = predictions(whole, frozen, batch, None)
    training = HeadTraining(whole, frozen, batches)
    (training.losses(predicted.outputs, *labels)[0] / (batch.labels != IGNORED).sum()).backward()
    expected = whole.module.weight.grad
    monkeypatch.setattr("specgen.train.head_training._CPU_ROWS", 5)
    monkeypatch.setattr("specgen.train.training_loop.MAX_LOGITS", target.model.vocab_size)
    objective = LinearHeads(frozen, [], 0)
    training, found = HeadTraining(objective, frozen, batches), []
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda _, __: found.append(objective.module.weight.grad.clone()))
    training.advance()
    torch.testing.assert_close(found[0], expected, atol=1e-6, rtol=1e-4)


def test_held_out_agreement_is_that_of_each_token_after_right_ones(folder: Path) -> None:
    """Counted by hand: for each generated token, each head's prediction and its rank."""
    target = opened(folder)
    frozen = FrozenTarget(target)
    prompts = [[5, 9, token] for token in range(3, 23)]
    objective = LinearHeads(frozen, [], 0)
    with torch.no_grad():  # a mixture of the first head's input and noise: sometimes right
        objective.module.weight.add_(
            0.05 * torch.randn(objective.module.weight.shape, generator=torch.Generator().manual_seed(0))
        )
    texts = []
    for greedy in (True, False):
        texts += generate_texts(target, prompts, 12, greedy=greedy, seed=1, parts=[Part.HELD_OUT] * len(prompts))
    found = held_out(objective, frozen, texts)
    shares: list[list[list[float]]] = []
    for name, greedy in (("greedy", True), ("sampled", False)):
        reached, right, ranks = [0, 0], [0, 0], [[], []]
        for text in texts:
            if text.greedy != greedy:
                continue
            hidden = frozen.states(packed([text.ids.tolist()], len(text.ids)), [], []).hidden[0]
            heads = objective.module(hidden).chunk(2, dim=-1)
            for last in range(text.prompt_length - 1, len(text.ids) - 1):  # the last token that is not drafted
                are_right = []
                for depth in range(min(2, len(text.ids) - 1 - last)):
                    order = frozen.logits(heads[depth][last - 1]).argsort(descending=True).tolist()
                    rank = order.index(text.top1[last + depth])
                    ranks[depth].append(rank)
                    reached[depth] += all(are_right)
                    are_right.append(rank == 0)
                    right[depth] += all(are_right)
        assert found.agreement[name] == pytest.approx([right[0] / reached[0], right[1] / reached[1]])
        assert 0.02 < right[0] / reached[0] < 0.98
        shares.append([[own.count(rank) / len(own) for rank in range(RANKS)] for own in ranks])
    for depth in range(2):
        assert found.ranks[depth] == pytest.approx(
            [sum(both) / 2 for both in zip(shares[0][depth], shares[1][depth], strict=True)]
        )
    nothing = held_out(objective, frozen, [])
    assert (nothing.agreement, nothing.ranks) == ({"greedy": None, "sampled": None}, [])


def train(folder: Path, out: Path, corpus: Path, observer: Recorder, recipe: Recipe = TINY) -> HeadDescription:
    target = opened(folder)
    return train_head(target, LinearHeads, TrainingTask(out, recipe, corpus=corpus_of(corpus, target)), observer)


def test_a_resumed_run_ends_with_the_same_head(folder: Path, corpus: Path, tmp_path: Path) -> None:
    straight = train(folder, tmp_path / "straight", corpus, Recorder())
    for observer in (Recorder(stop_at_batch=1), Recorder(stop_at_step=1), Recorder(stop_at_step=4)):
        with pytest.raises(TrainingStopped):
            train(folder, tmp_path / "resumed", corpus, observer)
    with pytest.raises(SpecgenError, match=r"another run \(--window: 24, now 25\)"):
        train(folder, tmp_path / "resumed", corpus, Recorder(), replace(TINY, training_length=25))
    last = Recorder()
    resumed = train(folder, tmp_path / "resumed", corpus, last)
    assert [progress.step for progress in last.progress] == [5, 6], "the budget is 6 steps"
    assert not last.generated
    assert {**resumed.figures, "minutes": 0} == {**straight.figures, "minutes": 0}
    saved = [tmp_path / name / "medusa_lm_head.safetensors" for name in ("straight", "resumed")]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    assert not (tmp_path / "resumed" / "training").exists()


def test_a_damaged_state_is_refused(folder: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped):
        train(folder, tmp_path, corpus, Recorder(stop_at_step=2))
    state = tmp_path / "training" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-9])
    with pytest.raises(SpecgenError, match=r"cannot read .*state\.safetensors"):
        train(folder, tmp_path, corpus, Recorder())


def test_training_lowers_the_loss_and_the_saved_head_is_the_measured_one(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[torch.Tensor] = []
    texts: list[GeneratedText] = []

    def recording(objective: LinearHeads, target: FrozenTarget, held_out_texts: Sequence[GeneratedText]) -> HeldOut:
        measured.append(objective.module.weight.clone())
        texts.extend(held_out_texts)
        return held_out(objective, target, held_out_texts)

    monkeypatch.setattr("specgen.train.heads.held_out", recording)
    observer = Recorder()
    described = train(folder, tmp_path, corpus, observer, replace(TINY, steps=60, learning_rate=1e-2))
    assert observer.progress[-1].loss < observer.progress[0].loss - 0.1
    assert {text.part for text in texts} == {Part.HELD_OUT}
    head = load_head(tmp_path, opened(folder))
    assert isinstance(head.weights, MedusaWeights)
    saved = torch.cat([block[0][0] for block in head.weights.blocks])
    torch.testing.assert_close(saved.float(), measured[0], rtol=0, atol=0)
    assert head.description is not None
    assert head.description.figures["steps"] == 60
    assert described.figures["held_out_agreement"]["greedy"][0] > 0.1
    assert len(head.description.rank_accuracies[0]) == RANKS


def test_the_command_trains_a_head_where_it_is_found(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))
    monkeypatch.setattr("specgen.train.heads.objective_of", lambda _: LinearHeads)
    result = trained(train_command("medusa", corpus, None, "-t", str(folder), "--steps", "2", "--json"))
    line = json.loads(result.stdout)
    assert (line["type"], line["kind"], line["figures"]["steps"]) == ("train", "medusa", 2)
    assert "Greedy agreement on held-out text, token by token of a draft: " in result.stderr
    assert len(line["agreement"]) == 2
    found = find_head("medusa", str(folder), folder, is_bundled=False)
    assert found == Path(line["head"])
    assert read_head_description(found).made_with["steps"] == 2


def test_no_model_is_overwritten(folder: Path, corpus: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    refusal = refused(train_command("medusa", corpus, folder, "-t", str(folder), "--steps", "1"))
    assert str(folder) in refusal
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layer", "1"], "--layer cannot be combined with --train --methods medusa, which trains Medusa heads"),
        (["--exit-head", "own", "--exit-head", "target"], "--exit-head cannot be combined"),
        (["--exit-layer", "x"], "--exit-layer cannot be combined"),
        (["--methods", "medusa,glide"], "glide and medusa cannot be trained in one run"),
        (["--self-text", "2"], "--self-text is 2.0"),
    ],
)
def test_options_that_do_not_apply_are_refused(folder: Path, corpus: Path, tmp_path: Path, more: list[str], message: str) -> None:
    assert message in refused(train_command("medusa", corpus, tmp_path, "-t", str(folder), *more))
    assert not any(tmp_path.iterdir())


def test_a_head_learns_from_all_prompts_and_documents_that_are_not_held_out(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no predictor for which some are reserved, and nothing is stored for one."""
    target = opened(folder)
    prompts = [[5, 9, token] for token in range(3, 27)]
    texts = TextGeneration(target, TrainingTask(tmp_path, TINY, prompts=prompts), {}, Recorder(), Purpose.HEAD).run()
    for text in texts:
        assert text.hidden_states is None
        assert text.top_k_ids is None
    used = {part: {text.ids[2].item() for text in texts if text.greedy and text.part == part} for part in Part}
    assert used == {Part.HELD_OUT: {3, 11, 19}, Part.TRAIN: set(range(3, 27)) - {3, 11, 19}, Part.PREDICTOR: set()}
    parts: list[Collection[Part]] = []

    class Recorded(TrainingBatches):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            parts.append(arguments[3])

    monkeypatch.setattr("specgen.train.heads.TrainingBatches", Recorded)
    train(folder, tmp_path / "out", corpus, Recorder(), replace(TINY, steps=1))
    assert set(parts[0]) == {Part.TRAIN, Part.PREDICTOR}
