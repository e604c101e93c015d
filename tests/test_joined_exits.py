"""Exits that join the target's last state of the token before, with LM heads of all tokens and of
some: lossless by enumeration and in greedy decoding, and their gradients against differences of a
loss that is computed by definition, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import LETTERS, exit_tensors, make_model, make_tokenizer, save
from torch import Tensor
from training_helpers import objective, opened, packed, task_of
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from specgen.base.settings import parse_pairs
from specgen.base.types import Context, SamplingParams
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.config_reading import read_architecture, read_config
from specgen.engine.native.layer_files import EXIT_HEAD, FINAL_NORM
from specgen.engine.native.native_model import NativeModel, load_native
from specgen.engine.parts import own_layers
from specgen.engine.parts.own_layers import JOIN, JOIN_BIAS, VOCABULARY, ExitLayers, ExitWeights
from specgen.testing.enumeration import PROMPT, ROUNDING, Paths, exact, states, total_variation
from specgen.testing.scripted_models import scripted_run
from specgen.train.corpus import Use
from specgen.train.loop import Training
from specgen.train.texts import Text

METHODS = ("eesd-fixed:k=2", "eesd-tree:width=2:depth=2:theta0=1")


class Joined:
    """A random target with what drafts by `method`: its first layer with a random exit, whose head
    knows the tokens `ids` (None: all)."""

    def __init__(self, method: str, vocabulary: int, spread: float, ids: list[int] | None) -> None:
        module = make_model("llama", vocab_size=vocabulary, initializer_range=spread)
        with TemporaryDirectory() as name:
            module.save_pretrained(name)
            config = read_config(Path(name), "a test's")
            model = load_native(
                Path(name),
                "a test's",
                read_architecture(config),
                torch.float32,
                torch.device("cpu"),
            )
        assert isinstance(model, NativeModel)
        self.name, *given = method.split(":")
        self.settings: dict[str, Any] = dict(parse_pairs(given))
        self._plain = ModelRunner(model)
        tensors = joined_tensors(module.state_dict(), ids)
        made = own_layers.make_runners(
            ExitWeights(ExitLayers(model, 1, tensors), 1), model, None, lambda: None
        )
        self.target: Any = made.target
        self.draft: Any = made.draft

    def row(self, ids: Sequence[int]) -> Tensor:
        self._plain.clear_cache()
        return self._plain.logits(Context(list(ids))).logits[0].clone()

    def rounds(self, sampling: SamplingParams) -> list[Any]:
        run = scripted_run(
            self.name, self.settings, self.target, self.draft, sampling, prompt=PROMPT
        )
        return list(run.rounds())


def joined_tensors(weights: Mapping[str, Tensor], ids: list[int] | None) -> dict[str, Tensor]:
    tensors = exit_tensors(weights)
    width = len(tensors[FINAL_NORM])
    generator = torch.Generator().manual_seed(0)
    tensors[JOIN] = torch.randn(width, 2 * width, generator=generator) / width**0.5
    tensors[JOIN_BIAS] = torch.randn(width, generator=generator)
    if ids is not None:
        tensors[VOCABULARY] = torch.tensor(ids)
        tensors[EXIT_HEAD] = tensors[EXIT_HEAD][ids]
    return tensors


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ids", [None, [0, 2]])
def test_all_paths_together_have_the_targets_distribution(
    method: str, ids: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Joined(method, 3, 0.4, ids)
    temperature = round(1.2 * float(made.row(PROMPT).std()), 1)
    sampling = SamplingParams(max_new_tokens=3, temperature=temperature)
    reference: Any = SimpleNamespace(row=made.row)
    expected = exact(reference, sampling, 3)
    found = Paths(monkeypatch).of_rounds(
        lambda: states(made.name, made.settings, made.target, made.draft, sampling)
    )
    assert total_variation(found, expected) < ROUNDING
    assert max(found.values()) < 0.8


@pytest.mark.parametrize("ids", [None, list(range(0, 96, 2))])
def test_greedy_ids_are_plain_decodings(ids: list[int] | None) -> None:
    """Drafts have the tokens alone that the head knows."""
    made = Joined(METHODS[0], 96, 0.05, ids)
    rounds = made.rounds(SamplingParams(max_new_tokens=40))
    found = [token for round_ in rounds for token in round_.token_ids]
    expected = list(PROMPT)
    for _ in range(40):
        expected.append(int(made.row(expected).argmax()))
    assert found == expected[len(PROMPT) :]
    drafted = {token for round_ in rounds for token in round_.draft.tokens}
    assert len(drafted) > 3
    assert drafted <= set(ids or range(96))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_exit_begins_with_a_layer_that_adds_nothing(tmp_path: Path, family: str) -> None:
    """And hardly anything after a small step, also behind a norm of its output: the states are as
    large as in the target."""
    module = make_model(family)
    module.get_input_embeddings().weight.data.mul_(1000)
    target = opened(save(module, tmp_path / "target", make_tokenizer(LETTERS)))
    made = objective("eesd", task_of(tmp_path / "out"), target)
    text = Text([5, 9, 7, 3, 11, 30, 31], 1, True, Use.TRAIN)
    made.start([text])
    batch = made.whole(text.ids, 1)
    states_ = made.states(batch)
    own = made._exit(1)
    entering = own.joined(states_.features[0], states_.hidden[0]).detach()
    for changed in (0.0, 1e-4):
        with torch.no_grad():
            for weight in made.parameters.values():
                weight.add_(changed)
            left = made._exit(1).run_layers(entering.clone(), batch.forward_pass())
        assert (left - entering).norm() <= 100 * changed * entering.norm()

    last = target.model.shape.num_layers - 1
    tapped = target.model.batch(batch.forward_pass(), taps=[last]).features
    assert tapped is not None
    sizes = [float(state.square().mean().sqrt()) for state in (entering, tapped[0])]
    assert 0.2 < sizes[0] / sizes[1] < 5


def reference_loss(
    weights: Mapping[str, Tensor],
    config: Any,
    texts: Sequence[Sequence[int]],
    given: Sequence[tuple[Tensor, Tensor]],
    labels: Sequence[tuple[Tensor, Tensor]],
    ids: Sequence[int],
    depths: int,
) -> Tensor:
    """The loss of an exit by definition, in float64: for each token of a text a draft of `depths`
    of the tokens after it, in which each token's row is the last of its own pass over the entering
    states of the context, made from the target's last states, and of the draft, made from the
    exit's own.

    `given` are the states [n, width] after the target's first layer and those after its final norm,
    `labels` the target's likeliest next tokens and their log-probabilities.
    """
    layer = LlamaDecoderLayer(config, 0).double()
    layer.load_state_dict(
        {
            name.removeprefix("layers.0."): weight
            for name, weight in weights.items()
            if name.startswith("layers.0.")
        }
    )
    rotary = LlamaRotaryEmbedding(config)
    own = {id_: place for place, id_ in enumerate(ids)}

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def joined(feature: Tensor, before: Tensor) -> Tensor:
        return weights[JOIN] @ torch.cat((normed(feature), normed(before))) + weights[JOIN_BIAS]

    def last_row(entering: list[Tensor]) -> Tensor:
        hidden = torch.stack(entering)[None]
        count = len(entering)
        cos, sin = rotary(hidden.float(), torch.arange(count)[None])
        mask = torch.full((count, count), -torch.inf, dtype=torch.double).triu(1)[None, None]
        made = layer(hidden, attention_mask=mask, position_embeddings=(cos.double(), sin.double()))
        row = (made if isinstance(made, Tensor) else made[0])[0, -1]
        return weights[FINAL_NORM] * normed(row)

    total = torch.zeros((), dtype=torch.double)
    for text, (features, hidden), (top, log_probs) in zip(texts, given, labels, strict=True):
        before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
        context = [joined(features[at], before[at]) for at in range(len(text))]
        for begin in range(len(text)):
            entering = context[: begin + 1]
            state = last_row(entering)
            for depth in range(depths):
                at = begin + depth
                if at >= len(text) - 1:
                    break
                if depth:
                    entering = [*entering, joined(features[at], state)]
                    state = last_row(entering)
                if int(top[at, 0]) not in own:
                    continue
                log_q = (weights[EXIT_HEAD] @ state).log_softmax(-1)
                known = [
                    (log_p, own[int(token)])
                    for token, log_p in zip(top[at], log_probs[at], strict=True)
                    if int(token) in own
                ]
                p = torch.stack([log_p for log_p, _ in known]).double().exp()
                q = log_q[[place for _, place in known]]
                total = total + 0.8**depth * (p * ((p / p.sum()).log() - q)).sum()
    return total


@pytest.mark.parametrize("reduced", [False, True])
def test_gradients_are_differences_of_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reduced: bool
) -> None:
    """Of the join, the layer, the norm and the LM head, along random directions, with drafts of as
    many tokens as a step draws."""
    monkeypatch.setattr("specgen.train.states.TOP_K", 96)
    monkeypatch.setattr("specgen.train.texts.TOP_K", 96)
    folder = save(make_model("llama"), tmp_path / "target", make_tokenizer(LETTERS))
    made = objective("eesd", task_of(tmp_path / "out"), opened(folder))
    texts = [[5, 9, 7, 3, 11, 30, 31], [32, 33, 34, 35]]
    if reduced:
        made.ids = torch.tensor([*range(0, 96, 3), 40, 41, 43])
    monkeypatch.setattr(made, "reduces_head", False)
    made.start([])
    generator = torch.Generator().manual_seed(1)
    for weight in made.parameters.values():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)

    batch = packed(texts, sum(map(len, texts)))
    training = Training(made, made.begin(made.parameters, [], (Use.TRAIN,)))
    training.step = 2
    depths = Random("objective 0 2").randint(1, made.depths)
    assert depths == 4
    loss = training.backward(batch, 1)
    whole = [made.whole(text, 1) for text in texts]
    given = []
    labels = []
    for each in whole:
        found = made.states(each)
        given.append((found.features[0].double(), found.hidden[0].double()))
        labels.append(made.labels_of(each, found))
    ids = range(made.vocabulary) if made.ids is None else made.ids.tolist()
    config = make_model("llama").config
    config._attn_implementation = "eager"
    weights = {name: weight.detach().double() for name, weight in made.parameters.items()}

    def by_definition(changed: Mapping[str, Tensor]) -> float:
        with torch.no_grad():
            return float(
                reference_loss(weights | changed, config, texts, given, labels, ids, depths)
            )

    assert float(loss) == pytest.approx(by_definition({}), rel=1e-4)
    for name, weight in weights.items():
        direction = torch.randn(weight.shape, generator=generator).double()
        step = 1e-5
        ends = [by_definition({name: weight + sign * step * direction}) for sign in (1, -1)]
        gradient = made.parameters[name].grad
        assert gradient is not None, name
        slope = float((gradient.double() * direction).sum())
        size = float(gradient.double().norm() * direction.norm()) / direction.numel() ** 0.5
        assert size > 1e-4, name
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-2 * size), name
