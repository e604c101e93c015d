"""What is trained is what drafts: rows of training against the runners, gradients against
transformers' whole model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import BACKENDS, LETTERS, make_model, make_tokenizer, save
from runner_checks import LAYERED, quick
from safetensors.torch import load_file
from torch import Tensor
from training_helpers import (
    TEXTS,
    TINY,
    corpus_of,
    objective,
    opened,
    opened_draft,
    packed,
    task_of,
    written,
)

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.loaded_model import load_model
from specgen.engine.model_files import ModelSource, find_model
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.layer_files import EXIT_HEAD
from specgen.engine.parts import block, eagle, glide, medusa, own_layers
from specgen.engine.parts.eagle import FC
from specgen.engine.parts.own_layers import VOCABULARY, ExitLayers, ExitWeights
from specgen.engine.parts.trained_part import describe_head, open_part, save_head
from specgen.engine.precision import Precision
from specgen.train import states
from specgen.train.corpus import Use
from specgen.train.heads import HeadObjective
from specgen.train.loop import IGNORED, PackedBatch, Training, held_out_agreement
from specgen.train.states import TargetStates
from specgen.train.texts import Text

RUNNERS: dict[str, Any] = {"block": block, "eagle": eagle, "glide": glide, "medusa": medusa}
TOKENS = sum(map(len, TEXTS))


class BlocksOf(Random):
    """A source of random numbers that draws GliDe's blocks of one size."""

    def randint(self, a: int, b: int) -> int:
        assert a <= 4 <= b
        return 4


def started(
    kind: str,
    folder: Path,
    backend: str = "native",
    scale: float = 0.2,
    texts: Sequence[Text] = (),
    **of_task: Any,
) -> HeadObjective:
    """An objective with random weights around its initial ones."""
    made: HeadObjective = objective(
        kind, task_of(folder / "out", **of_task), opened(folder, backend)
    )
    made.start(texts)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters.values():
            weight.add_(torch.randn_like(weight) * scale)
    return made


def saved(family: str, folder: Path, **changes: Any) -> Path:
    return Path(save(make_model(family, **changes), folder / family, make_tokenizer(LETTERS)))


def rows_of(kind: str, depths: int) -> list[tuple[int, int]]:
    """The rows that a batch of TEXTS has: the token after which the predicted one comes, and its
    depth in a draft."""
    rows = []
    start = 0
    for text in TEXTS:
        if kind == "glide":
            rows += [(start + at, at % 4) for at in range(4, len(text) - 1)]
        else:
            # with one token of context, only a block has a row of its own
            first = 0 if kind == "block" else 1
            rows += [
                (start + at, depth)
                for depth in range(depths)
                for at in range(first + depth, len(text) - 1)
            ]
        start += len(text)
    return rows


CASES: list[Any] = [
    *(("medusa", "gemma2", backend) for backend in BACKENDS),
    *(("eagle", "llama", backend) for backend in BACKENDS),
    ("eagle", "qwen2", "native"),
    *(("block", "llama", backend) for backend in BACKENDS),
    ("block", "qwen3", "native"),
    ("block", "gemma2", "native"),
    *(("glide", "llama", backend) for backend in BACKENDS),
    ("glide", "qwen3", "native"),
    pytest.param("glide", "gemma2", "native", marks=pytest.mark.slow),
    pytest.param("eagle", "stablelm", "transformers", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "family", "backend"), CASES)
def test_each_row_is_what_is_drafted_there(
    kind: str, family: str, backend: str, tmp_path: Path
) -> None:
    """After the text's tokens that are not drafted, with the others as a draft. Labels are the
    target's predictions there.

    For EAGLE-3 this is the training-time test, for GliDe the block mask.
    """
    head = started(kind, saved(family, tmp_path), backend, 0.1)
    batch = packed(TEXTS, TOKENS)
    found, (_, top_k_ids, log_probs) = head.predictions(
        batch, BlocksOf(0) if kind == "glide" else None
    )
    with torch.no_grad():
        logits = head.logits(found.outputs, found.depths)
    draft = (
        RUNNERS[kind]
        .make_runners(head.weights([]), head.model, ModelRunner(head.model), lambda: None)
        .draft
    )
    pairs = list(zip(found.sources.tolist(), found.depths.tolist(), strict=True))
    assert sorted(pairs) == sorted(rows_of(kind, head.depths))
    ids = batch.ids[0].tolist()
    segments = batch.segments[0].tolist()
    for row, (source, depth) in enumerate(pairs):
        text = ids[: source + 1]
        begin = segments.index(segments[source])
        context = text[begin : source + 1 - depth]
        drafted = text[source + 1 - depth :]
        expected = draft.logits(Context(context), drafted, start=depth).logits[0]
        close = {"atol": 1e-4, "rtol": 1e-4} if kind == "block" else {"atol": 4e-3, "rtol": 1e-2}
        torch.testing.assert_close(logits[row], expected, **close)
        own = head.model.reference_logits(text[begin:])[-1]
        assert top_k_ids[row, 0] == own.argmax()
        of_top = own.log_softmax(-1)[top_k_ids[row]]
        torch.testing.assert_close(log_probs[row], of_top, atol=1e-3, rtol=1e-3)


def loss_of_first_batch(training: Training) -> float:
    """Other batches' losses differ by more than a few steps gain."""
    batch = training.batches.batch(0).part(slice(None), training.objective.device)
    step = training.step
    training.step = 0  # by which positions of drafts are drawn
    loss = training.backward(batch, int((batch.labels != IGNORED).sum()))
    training._optimizer.zero_grad(set_to_none=True)
    training.step = step
    return float(loss)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "glide", "block", "eesd"])
def test_heads_begin_as_the_target_and_learn(kind: str, tmp_path: Path, corpus: Path) -> None:
    """Untrained blocks of Medusa add nothing; all weights get gradients, and some steps lower the
    loss."""
    folder = saved("llama", tmp_path, num_hidden_layers=8)
    head = started(
        kind,
        folder,
        scale=0.0 if kind == "medusa" else 0.05,
        corpus=corpus_of(corpus, opened(folder)),
    )
    batch = packed(TEXTS, TOKENS)
    found, _ = head.predictions(batch, None)
    if kind == "medusa":
        hidden = head.states(batch).hidden.flatten(0, 1)
        assert torch.equal(found.outputs, hidden[found.sources - found.depths - 1])
    training = Training(head, head.begin(head.parameters, [], (Use.TRAIN,)))
    before = loss_of_first_batch(training)
    for _ in range(8):
        training.advance()
    assert loss_of_first_batch(training) < 0.99 * before
    assert all(moment["exp_avg"].abs().max() > 0 for moment in training._optimizer.state.values())


def test_the_losses_over_a_reduced_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The divergence from the target's distribution over the head's tokens, times its probability
    of these; none where its likeliest token is not among them."""
    monkeypatch.setattr(states, "LARGEST_VOCABULARY", 8)
    texts = [Text([1, 5, 5, 9, 9, 9, 60], 1, True, Use.TRAIN)]
    head = started("eagle", saved("llama", tmp_path, num_hidden_layers=8), texts=texts)
    ids = [0, 1, 2, 3, 4, 5, 9, 60]  # the tokens of the text, and the lowest others
    assert head.weights([]).vocabulary.tolist() == ids  # type: ignore[union-attr]
    outputs = torch.randn(4, head.width)
    target_logits = 3 * torch.randn(4, head.vocabulary)
    target_logits[:3, 9] = 15.0  # the likeliest but in the last row
    target_logits[3, 70] = 20.0
    log_probs, top = target_logits.log_softmax(-1).sort(descending=True)  # all tokens are known
    depths = torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        logits = head.logits(outputs, depths)
        loss = head.losses(outputs, depths, top, log_probs)
    assert logits.shape == (4, 8)
    p, q = target_logits[:, ids].log_softmax(-1), logits.log_softmax(-1)
    known = target_logits.softmax(-1)[:, ids].sum(-1)
    expected = known * (p.exp() * (p - q)).sum(-1) * torch.tensor([1, 0.8, 0.64, 0])
    torch.testing.assert_close(loss, expected.sum(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("in_bfloat16", [False, True])
@pytest.mark.parametrize("kind", ["medusa", "eagle", "glide", "block", "eesd"])
def test_parts_of_a_target_in_bfloat16_learn_in_either_dtype(
    kind: str, in_bfloat16: bool, tmp_path: Path, corpus: Path
) -> None:
    """Products are in float32 where those in bfloat16 are not faster."""
    files = find_model(ModelSource(str(saved("llama", tmp_path, num_hidden_layers=8))), print)
    target = load_model(files, Precision(torch.bfloat16), [torch.device("cpu")], print)
    made = objective(kind, task_of(tmp_path / "out", corpus=corpus_of(corpus, target)), target)
    made.in_bfloat16 = in_bfloat16
    training = Training(made, made.start([]))
    assert math.isfinite(training.advance())
    loss = loss_of_first_batch(training)
    assert math.isfinite(loss)
    made.in_bfloat16 = not in_bfloat16
    assert loss_of_first_batch(training) == pytest.approx(loss, rel=0.05)


def turning_states(width: int, count: int = 80, length: int = 8) -> tuple[Tensor, Tensor]:
    """A matrix, and states [count, length, width], each of which is that matrix times the one
    before."""
    torch.manual_seed(3)
    matrix = torch.linalg.qr(torch.randn(width, width)).Q
    states = [torch.randn(count, width)]
    for _ in range(length - 1):
        states.append(states[-1] @ matrix.T)
    return matrix, torch.stack(states, dim=1)


def test_heads_of_medusa_begin_with_the_map_to_later_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head k reads the state from which the next token is predicted, and predicts the one k + 1
    places after it."""
    head = started("medusa", saved("llama", tmp_path), scale=0.0)
    table = head.head_start()
    for number in range(head.depths):  # without text
        assert torch.equal(head.parameters[f"{number}.lm_head"], table)
    matrix, hidden = turning_states(head.width)
    ids = torch.ones(hidden.shape[:2], dtype=torch.long)
    positions = torch.arange(hidden.shape[1]).expand_as(ids)
    batch = PackedBatch(ids, positions, torch.zeros_like(ids), ids, ids)
    made = TargetStates(hidden[:, :, :0], hidden, hidden)
    monkeypatch.setattr(head, "solved_for", lambda texts: iter([(batch, made)]))
    found = head.initial_weights([], torch.Generator())
    for number in range(head.depths):
        expected = table @ torch.linalg.matrix_power(matrix, number + 1)
        torch.testing.assert_close(found[f"{number}.lm_head"], expected, atol=0.01, rtol=0.01)


def test_heads_of_medusa_with_a_reduced_vocabulary_are_saved_as_vllm_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LARGEST_VOCABULARY", 8)
    texts = [Text([1, 5, 5, 9, 9, 9, 60], 1, True, Use.TRAIN)]
    head = started("medusa", saved("llama", tmp_path), texts=texts)
    weights: Any = head.weights([])
    assert weights.vocabulary.tolist() == [0, 1, 2, 3, 4, 5, 9, 60]
    folder = tmp_path / "saved"
    save_head(folder, weights, describe_head("medusa", head.target, {}, {}))
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["truncated_vocab_size"]) == ("medusa", 8)
    read: Any = open_part(folder, head.target, is_exit=False).load()
    assert torch.equal(read.vocabulary, weights.vocabulary)
    for number in range(head.depths):
        kept = weights.lm_heads[number].bfloat16()
        assert torch.equal(read.lm_heads[number], kept)
        ((matrix, bias),) = weights.blocks[number]
        assert all(map(torch.equal, read.blocks[number][0], (matrix.bfloat16(), bias.bfloat16())))


def test_a_head_of_eagle_begins_with_the_map_to_the_next_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the next token's embedding and the state before it; its layer adds nothing."""
    head = started("eagle", saved("llama", tmp_path), scale=0.0)
    width = head.width
    matrix, hidden = turning_states(width)
    embeddings = 0.1 * torch.randn(hidden.shape)
    ids = torch.ones(hidden.shape[:2], dtype=torch.long)
    positions = torch.arange(hidden.shape[1]).expand_as(ids)
    batch = PackedBatch(ids, positions, torch.zeros_like(ids), ids, ids)
    for at in range(1, hidden.shape[1]):
        hidden[:, at] = hidden[:, at - 1] @ matrix.T + 3 * embeddings[:, at]
    made = TargetStates(hidden[:, :, :0], hidden, embeddings)
    monkeypatch.setattr(head, "solved_for", lambda texts: iter([(batch, made)]))
    head.begin(head.initial_weights([], torch.Generator()), [], ())
    fused = head.parameters[FC]
    torch.testing.assert_close(fused[:, :width] / 3, torch.eye(width), atol=0.03, rtol=0)
    torch.testing.assert_close(fused[:, width:], matrix, atol=0.03, rtol=0)
    with torch.no_grad():
        found = head.predict(batch, made, None)
    first = found.outputs[found.depths == 0]
    expected = hidden.flatten(0, 1)[found.sources[found.depths == 0]]
    torch.testing.assert_close(first, expected, atol=0.3, rtol=0.1)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_head_of_eagle_with_a_reduced_vocabulary_drafts_what_is_trained(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has the ids of the target's tokens that it knows, and is EAGLE-1's otherwise."""
    monkeypatch.setattr(states, "LARGEST_VOCABULARY", 8)
    texts = [Text([1, 5, 5, 9, 9, 9, 60], 1, True, Use.TRAIN)]
    changes = {"final_logit_softcapping": 0.5} if family == "gemma2" else {}
    head = started("eagle", saved(family, tmp_path, **changes), scale=0.1, texts=texts)
    for weight in head.parameters.values():
        weight.data = weight.data.bfloat16().float()
    ids = [0, 1, 2, 3, 4, 5, 9, 60]
    folder = tmp_path / "saved"
    save_head(folder, head.weights([]), describe_head("eagle", head.target, {}, {}))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    read: Any = open_part(folder, head.target, is_exit=False).load()
    assert (read.version, read.vocabulary.tolist()) == (1, ids)
    draft = eagle.make_runners(read, head.model, ModelRunner(head.model), lambda: None).draft
    text = [1, 5, 9, 60, 5]
    logits = draft.logits(Context(text)).logits[0]
    known = logits.isfinite()
    assert known.nonzero()[:, 0].tolist() == ids
    found, _ = head.predictions(packed([[*text, 7]], 6), None)
    row = ((found.sources == 4) & (found.depths == 0)).nonzero()[0]
    with torch.no_grad():
        trained = head.logits(found.outputs[row], found.depths[row])[0]
    torch.testing.assert_close(trained, logits[known], atol=4e-3, rtol=1e-2)
    change = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**change, "hot_token_ids": [3, 2]}))
    (folder / "head.yaml").unlink()
    with pytest.raises(SpecgenError, match="hot_token_ids are not rising ids"):
        open_part(folder, head.target, is_exit=False).load()


def test_a_resumed_training_with_more_text_keeps_the_heads_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LARGEST_VOCABULARY", 8)
    folder = saved("llama", tmp_path)
    texts = [Text([1, 5, 5, 9, 9, 9, 60], 1, True, Use.TRAIN)]
    first = started("eagle", folder, texts=texts)
    texts.append(Text([1, *range(20, 30)], 1, True, Use.TRAIN))
    again = started("eagle", folder, texts=texts)
    assert again.ids is not None
    assert again.ids.tolist() == first.ids.tolist() == [0, 1, 2, 3, 4, 5, 9, 60]  # type: ignore[union-attr]


def test_held_out_agreement_is_that_of_each_token_after_right_ones() -> None:
    """Two greedy drafts and a sampled one of three depths; -1 where nothing is predicted. Other
    uses do not count."""
    ranks = {1: [[0, 0, 2], [0, 4, -1]], 2: [[99, 0, 0]], 3: [[0, 0, 0]]}
    texts = [
        Text([number, 7], 1, number == 1, Use.TRAIN if number == 3 else Use.HELD_OUT)
        for number in ranks
    ]
    agreement, by_rank = held_out_agreement(texts, lambda text: torch.tensor(ranks[text.ids[0]]))
    assert agreement == {"greedy": [1.0, 0.5, 0.0], "sampled": [0.0]}
    assert [row[:5] for row in by_rank] == [
        [0.5, 0, 0, 0, 0],
        [0.75, 0, 0, 0, 0.25],
        [0.5, 0, 0.5, 0, 0],
    ]
    assert held_out_agreement([], lambda _: torch.empty(0)) == (
        {"greedy": None, "sampled": None},
        [],
    )


def test_ranks_are_those_of_the_targets_tokens(tmp_path: Path) -> None:
    """Of each draft that begins after the prompt's last token or a later one."""
    head = started("medusa", saved("llama", tmp_path), scale=0.1)
    (text,) = written(head.target, [[5, 9, 7]], 12, greedy=True, part=Use.HELD_OUT)
    found, (_, top_k_ids, _) = head.predictions(packed([text.ids], len(text.ids)), None)
    orders = head.logits(found.outputs, found.depths).argsort(descending=True)
    expected = torch.full((len(text.ids), head.depths), -1)
    for row, (source, depth) in enumerate(
        zip(found.sources.tolist(), found.depths.tolist(), strict=True)
    ):
        if source - depth >= 2:
            expected[source - depth, depth] = orders[row].tolist().index(top_k_ids[row, 0])
    assert torch.equal(head.ranks_of(text), expected)


@pytest.mark.parametrize(("family", "backend"), quick(LAYERED))
def test_each_row_of_an_exit_is_what_is_drafted_there(
    family: str, backend: str, tmp_path: Path
) -> None:
    """After the text's tokens that are not drafted, with the others as a draft: the target's last
    states are those of the former alone. Texts are packed, on either backend."""
    made: Any = started("eesd", saved(family, tmp_path), backend, 0.05)
    found, _ = made.predictions(packed(TEXTS, TOKENS), None)
    with torch.no_grad():
        logits = made.logits(found.outputs, found.depths)
    tensors = {name: weight.detach() for name, weight in made.parameters.items()}
    weights = ExitWeights(ExitLayers(made.model, 1, tensors), made.after)
    draft = own_layers.make_runners(weights, made.model, None, lambda: None).draft
    assert draft is not None
    rows = iter(zip(found.sources.tolist(), found.depths.tolist(), logits, strict=True))
    for depth in range(made.depths):
        start = 0
        for text in TEXTS:
            for at in range(depth, len(text) - 1):
                source, row_depth, row = next(rows)
                assert (source, row_depth) == (start + at, depth)
                begin = at + 1 - depth
                output = draft.logits(Context(text[:begin]), text[begin : at + 1], start=depth)
                torch.testing.assert_close(row, output.logits[0], atol=1e-2, rtol=1e-2)
            start += len(text)
    assert next(rows, None) is None


@pytest.mark.parametrize("ids", [None, [3, 4, 5, 7, 9, 30, 31, 32, 60]])
def test_the_predictor_of_an_exit_learns_from_the_tokens_that_it_drafts(
    ids: list[int] | None, tmp_path: Path
) -> None:
    """With an LM head of few tokens, too, they are the target's ids, not the head's own."""
    made: Any = started("eesd", saved("llama", tmp_path), scale=0.2)
    tensors = {name: weight.detach() for name, weight in made.parameters.items()}
    if ids is not None:
        made.ids = tensors[VOCABULARY] = torch.tensor(ids)
        made.parameters[EXIT_HEAD] = tensors[EXIT_HEAD] = tensors[EXIT_HEAD][made.ids]
    weights = ExitWeights(ExitLayers(made.model, 1, tensors), made.after)
    draft = own_layers.make_runners(weights, made.model, None, lambda: None).draft
    assert draft is not None
    text = TEXTS[0]

    likeliest, _ = made.exit_outputs(text)

    for depth in range(made.depths):
        for at in range(depth, len(text) - 1):
            begin = at + 1 - depth
            output = draft.logits(Context(text[:begin]), text[begin : at + 1], start=depth)
            assert likeliest[depth, at] == output.logits[0].argmax()


@pytest.mark.parametrize("kind", ["eesd", "medusa", "sd"])
def test_gradients_do_not_depend_on_the_piece_size(
    kind: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece; in pieces of 5 predicted tokens, a sequence at a time."""
    folder = saved("llama", tmp_path)
    gradients = []
    for rows in (1 << 20, 5):
        target = opened(folder)
        task = task_of(tmp_path / "out", TINY, corpus=corpus_of(corpus, target))
        made = objective(kind, task, target, *([opened_draft(folder)] if kind == "sd" else []))
        made.rows = rows
        monkeypatch.setattr(
            "specgen.train.loop.MAX_LOGITS", 1 << 26 if rows > 5 else 24 * made.vocabulary
        )
        texts = written(
            target, [[5, 9, token] for token in range(3, 9)], 20, greedy=True, part=Use.TRAIN
        )
        training = Training(made, made.start(texts))
        monkeypatch.setattr(
            torch.nn.utils,
            "clip_grad_norm_",
            lambda weights, _: gradients.append([w.grad for w in weights]),
        )
        training.advance()
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)
