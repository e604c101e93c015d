"""What is trained is what drafts: rows of training against the runners, gradients against transformers' whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import BACKENDS, LETTERS, make_model, make_tokenizer, model_of, save
from runner_checks import LAYERED, quick
from training_helpers import TEXTS, corpus_of, objective, opened, packed, task_of, written

from specgen.base.types import Context
from specgen.engine.forward_pass import BatchPass
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.products import trained_product
from specgen.engine.parts import eagle, glide, medusa
from specgen.engine.parts.own_layers import ExitLayers
from specgen.train import heads
from specgen.train.corpus import Part
from specgen.train.heads import HEADS, HeadObjective
from specgen.train.loop import IGNORED, RANKS, Training, TrainingBatches, held_out_agreement
from specgen.train.texts import Text, predicted

RUNNERS: dict[str, Any] = {"eagle": eagle, "glide": glide, "medusa": medusa}
LENGTH = 20


class BlocksOf(Random):
    """A source of random numbers that draws GliDe's blocks of one size."""

    def randint(self, a: int, b: int) -> int:
        assert a <= 4 <= b
        return 4


def started(
    kind: str, folder: Path, backend: str = "native", scale: float = 0.2, texts: Sequence[Text] = (), **of_task: Any
) -> HeadObjective:
    """An objective with random weights around its initial ones."""
    made = objective(kind, task_of(folder / "out", **of_task), opened(folder, backend))
    made.start(texts)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters.values():
            weight.add_(torch.randn_like(weight) * scale)
    assert isinstance(made, HeadObjective)
    return made


def saved(family: str, folder: Path, **changes: Any) -> Path:
    return Path(save(make_model(family, **changes), folder / family, make_tokenizer(LETTERS)))


def rows_of(kind: str, depths: int) -> list[tuple[int, int]]:
    """The rows that a batch of TEXTS has: the token after which the predicted one comes, and its depth in a draft."""
    rows, start = [], 0
    for text in TEXTS:
        if kind == "glide":
            rows += [(start + at, at % 4) for at in range(4, len(text) - 1)]
        else:
            rows += [(start + at, depth) for depth in range(depths) for at in range(1 + depth, len(text) - 1)]
        start += len(text)
    return rows


CASES: list[Any] = [
    *(("medusa", "gemma2", backend) for backend in BACKENDS),
    *(("eagle", "llama", backend) for backend in BACKENDS),
    ("eagle", "qwen2", "native"),
    *(("glide", "llama", backend) for backend in BACKENDS),
    ("glide", "qwen3", "native"),
    pytest.param("glide", "gemma2", "native", marks=pytest.mark.slow),
    pytest.param("eagle", "stablelm", "transformers", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "family", "backend"), CASES)
def test_each_row_is_what_is_drafted_there(kind: str, family: str, backend: str, tmp_path: Path) -> None:
    """After the text's tokens that are not drafted, with the others as a draft. Labels are the target's predictions there.

    For EAGLE-3 this is the training-time test, for GliDe the block mask.
    """
    head = started(kind, saved(family, tmp_path), backend, 0.1)
    batch = packed(TEXTS, sum(map(len, TEXTS)))
    found, (_, top_k_ids, top_k_log_probs) = head.predictions(batch, BlocksOf(0) if kind == "glide" else None)
    with torch.no_grad():
        logits = head.logits(found.outputs, found.depths)
    target = ModelRunner(head.model)
    draft = RUNNERS[kind].make_runners(head.weights([]), head.model, target, lambda: None).draft
    pairs = list(zip(found.sources.tolist(), found.depths.tolist(), strict=True))
    assert sorted(pairs) == sorted(rows_of(kind, head.depths))
    ids, segments = batch.ids[0].tolist(), batch.segments[0].tolist()
    for row, (source, depth) in enumerate(pairs):
        text, begin = ids[: source + 1], segments.index(segments[source])
        context, drafted = text[begin : source + 1 - depth], text[source + 1 - depth :]
        expected = draft.logits(Context(context), drafted, start=depth).logits[0]
        torch.testing.assert_close(logits[row], expected, atol=4e-3, rtol=1e-2)
        own = head.model.reference_logits(text[begin:])[-1]
        assert top_k_ids[row, 0] == own.argmax()
        of_top = own.log_softmax(-1)[top_k_ids[row]]
        torch.testing.assert_close(top_k_log_probs[row], of_top, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "glide"])
def test_heads_begin_as_the_target_and_learn(kind: str, tmp_path: Path, corpus: Path) -> None:
    """Untrained heads of Medusa repeat the target's prediction; all weights get gradients, and some steps lower the loss."""
    folder = saved("llama", tmp_path, num_hidden_layers=8)
    own = corpus_of(corpus, opened(folder))
    head = started(kind, folder, scale=0.0 if kind == "medusa" else 0.05, corpus=own)
    batch = packed(TEXTS, sum(map(len, TEXTS)))
    found, _ = head.predictions(batch, None)
    if kind == "medusa":
        hidden = head.states(batch).hidden.flatten(0, 1)
        assert torch.equal(found.outputs, hidden[found.sources - found.depths - 1])
    training = Training(head, TrainingBatches(head.task, [], (Part.TRAIN,)))
    losses = [training.advance() for _ in range(8)]
    assert sum(losses[-2:]) < 0.97 * sum(losses[:2])
    assert all(moment["exp_avg"].abs().max() > 0 for moment in training._optimizer.state.values())


def test_the_losses_over_a_reduced_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The divergence from the target's distribution over the head's tokens; none where its likeliest token is not among them."""
    monkeypatch.setattr(heads, "_LARGEST_VOCABULARY", 8)
    texts = [Text([1, 5, 5, 9, 9, 9, 60], 1, True, Part.HELD_OUT)]
    head = started("eagle", saved("llama", tmp_path, num_hidden_layers=8), texts=texts)
    ids = [0, 1, 2, 3, 4, 5, 9, 60]  # the tokens of the text, and the lowest others
    assert head.weights([]).vocabulary.tolist() == ids  # type: ignore[union-attr]
    outputs, target_logits = torch.randn(4, head.width), 3 * torch.randn(4, head.vocabulary)
    target_logits[:3, 9] = 15.0  # the likeliest but in the last row
    target_logits[3, 70] = 20.0
    log_probs, top = target_logits.log_softmax(-1).sort(descending=True)  # all tokens are known
    depths = torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        logits = head.logits(outputs, depths)
        losses = [head.losses(outputs[row, None], *(each[row, None] for each in (depths, top, log_probs))) for row in range(4)]
    assert logits.isfinite().nonzero()[:, 1].view(4, -1).tolist() == [ids] * 4
    p, q = (each[:, ids].log_softmax(-1) for each in (target_logits, logits))
    expected = (p.exp() * (p - q)).sum(-1) * torch.tensor([1, 0.8, 0.64, 0])
    torch.testing.assert_close(torch.stack(losses), expected, atol=1e-4, rtol=1e-4)


def test_held_out_agreement_is_that_of_each_token_after_right_ones(tmp_path: Path) -> None:
    """Counted by hand: for each generated token, each head's prediction and its rank."""
    head = started("medusa", saved("llama", tmp_path), scale=0.1)
    prompts = [[5, 9, token] for token in range(3, 19)]
    texts = [text for greedy in (True, False) for text in written(head.target, prompts, 12, greedy=greedy, part=Part.HELD_OUT)]
    agreement, found_ranks = held_out_agreement(texts, head.ranks_of)
    shares: list[list[list[float]]] = []
    for name, greedy in (("greedy", True), ("sampled", False)):
        reached, right, ranks = [0] * HEADS, [0] * HEADS, [list[int]() for _ in range(HEADS)]
        for text in (text for text in texts if text.greedy == greedy):
            rows, _ = head.predictions(packed([text.ids], len(text.ids)), None)
            top1 = predicted(head.target, text).top_k_ids[:, 0].tolist()
            logits = head.logits(rows.outputs, rows.depths)
            places = zip(rows.sources.tolist(), rows.depths.tolist(), strict=True)
            by_place = {(source - depth, depth): logits[row] for row, (source, depth) in enumerate(places)}
            for last in range(text.prompt_length - 1, len(text.ids) - 1):  # the last token that is not drafted
                are_right = True
                for depth in range(min(HEADS, len(text.ids) - 1 - last)):
                    order = by_place[last, depth].argsort(descending=True).tolist()
                    ranks[depth].append(order.index(top1[last + depth]))
                    reached[depth] += are_right
                    are_right = are_right and ranks[depth][-1] == 0
                    right[depth] += are_right
        expected = [right[depth] / reached[depth] for depth in range(HEADS) if reached[depth]]
        assert agreement[name] == pytest.approx(expected)
        shares.append([[own.count(rank) / len(own) for rank in range(RANKS)] for own in ranks])
    assert 0 < expected[0] < 1
    for depth in range(HEADS):
        both = zip(shares[0][depth], shares[1][depth], strict=True)
        assert found_ranks[depth] == pytest.approx([sum(pair) / 2 for pair in both])
    assert held_out_agreement([], head.ranks_of) == ({"greedy": None, "sampled": None}, [])


def random_batch() -> BatchPass:
    """Two sequences: a text of 20 tokens, and two texts of 13 and 7 tokens."""
    ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    at = torch.stack((torch.arange(LENGTH), torch.cat((torch.arange(13), torch.arange(7)))))
    segments = torch.stack((torch.zeros(LENGTH), (torch.arange(LENGTH) >= 13).float()))
    visible = (segments[:, :, None] == segments[:, None, :]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return BatchPass(ids, at, visible, at)


def reference_gradients(module: Any, batch: BatchPass, first: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of the next tokens and its gradients, by transformers' whole model; the names are those of an exit's file."""
    module.requires_grad_(True)
    logits = torch.zeros(2, LENGTH, module.config.vocab_size)
    for row, start, end in [(0, 0, LENGTH), (1, 0, 13), (1, 13, LENGTH)]:
        logits[row, start:end] = module(batch.ids[row : row + 1, start:end], use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="sum")
    loss.backward()
    gradients = {"head.weight": module.lm_head.weight.grad}
    for name, weight in module.model.named_parameters():
        parts = name.split(".")
        if parts[0] == "norm":
            gradients[name] = weight.grad
        elif parts[0] == "layers" and int(parts[1]) >= first:
            gradients[".".join(("layers", str(int(parts[1]) - first), *parts[2:]))] = weight.grad
    return loss.detach(), gradients


def exit_loss(model: Any, parameters: dict[str, torch.Tensor], count: int, depth: int, batch: BatchPass) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.batch(batch, depth, with_head=False).hidden_states
    layers = ExitLayers(model, count, parameters, trained_product)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=model.dtype != torch.float32):
        logits, _ = layers.norm_and_head(layers.run_layers(hidden, batch))
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize(("family", "backend"), quick(LAYERED))
def test_an_exits_loss_and_gradients_are_those_of_the_whole_model(family: str, backend: str, tmp_path: Path) -> None:
    """An untrained exit before the model's last layers is the model itself, on either backend."""
    module = make_model(family, tie_word_embeddings=False)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 1:  # norms and biases, which begin as all ones or zeros
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))), alpha=0.2)
    save(module, tmp_path)
    model, batch = model_of(module, backend), random_batch()
    parameters = {name: torch.nn.Parameter(weight) for name, weight in model.last_layers(tmp_path, 2).items()}
    loss = exit_loss(model, parameters, 2, 1, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    expected_loss, expected = reference_gradients(module, batch, 1)
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-5, atol=0)
    assert parameters.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(parameters[name].grad, gradient, rtol=1e-4, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("kind", ["eesd", "medusa", "sd"])
def test_gradients_do_not_depend_on_the_piece_size(
    kind: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece; in pieces of 5 predicted tokens, a sequence at a time."""
    folder, weights = saved("llama", tmp_path), []
    for rows in (1 << 20, 5):
        target = opened(folder)
        task = task_of(tmp_path / "out", corpus=corpus_of(corpus, target))
        made = objective(kind, task, target, *([opened(folder)] if kind == "sd" else []))
        made.rows = rows
        monkeypatch.setattr("specgen.train.loop.MAX_LOGITS", 1 << 26 if rows > 5 else 24 * made.vocabulary)
        prompts = [[5, 9, token] for token in range(3, 9)]
        texts = written(target, prompts, 20, greedy=True, part=Part.TRAIN)
        batches = made.start(texts)
        batch = batches.batch(0)
        training = Training(made, batches)
        assert training.backward(batch, int((batch.labels != IGNORED).sum())) > 0
        weights.append({name: weight.grad.clone() for name, weight in training.trained.items()})  # type: ignore[union-attr]
    for name, gradient in weights[0].items():
        torch.testing.assert_close(gradient, weights[1][name], atol=2e-6, rtol=1e-4)
