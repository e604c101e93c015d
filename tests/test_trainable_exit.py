"""Exit layers in training, on both backends: gradients against transformers' whole model, and the files of either backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import BACKENDS, make_model, make_tokenizer, model_of, save
from runner_checks import LAYERED, quick
from safetensors.torch import load_file
from specgen.engine.parts.exit_files import WEIGHTS, Description, load_exit, save_exit
from specgen.train.exit_training import exit_outputs
from specgen.train.training_loop import autocast_for
from training_helpers import opened

from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.batch_pass import BatchPass
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.model import Model, TrainableExit
from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.early_exit import EarlyExit

LENGTH = 20  # tokens; more than the sliding windows


def random_batch() -> BatchPass:
    """Two sequences: a text of 20 tokens, and two texts of 13 and 7 tokens."""
    ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    at = torch.stack((torch.arange(LENGTH), torch.cat((torch.arange(13), torch.arange(7)))))
    segments = torch.stack((torch.zeros(LENGTH), (torch.arange(LENGTH) >= 13).float()))
    visible = (segments[:, :, None] == segments[:, None, :]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return BatchPass(ids, at, visible, at)


def losses(model: Model, exit_layer: TrainableExit, depth: int, batch: BatchPass) -> torch.Tensor:
    """The sum of the losses of predicting each sequence's next token; texts after the first one begin with a guess."""
    with torch.no_grad():
        hidden = model.batch_layers(batch, depth).hidden_states
    assert hidden is not None
    with autocast_for(model.device, model.dtype):
        logits, _ = exit_layer.norm_and_head(exit_layer.run_layers(hidden, batch))
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="sum")


def reference_gradients(module: Any, batch: BatchPass, first: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same loss and its gradients, by transformers' whole model; the names are those of an exit's file."""
    module.requires_grad_(True)
    texts = [(0, 0, LENGTH), (1, 0, 13), (1, 13, LENGTH)]
    logits = torch.zeros(2, LENGTH, module.config.vocab_size)
    for row, start, end in texts:
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


@pytest.mark.parametrize(("family", "backend"), quick(LAYERED))
def test_loss_and_gradients_are_those_of_the_whole_model(family: str, backend: str, tmp_path: Path) -> None:
    """An untrained exit before the model's last layers is the model itself."""
    module = make_model(family, tie_word_embeddings=False)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 1:  # norms and biases, which begin as all ones or zeros
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))), alpha=0.2)
    save(module, tmp_path)
    model, batch = model_of(module, backend), random_batch()
    exit_layer = model.trainable_exit(tmp_path, 2)
    exit_layer.module.requires_grad_(True)
    loss = losses(model, exit_layer, 1, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: weight.grad for name, weight in exit_layer.module.named_parameters()}
    expected_loss, expected = reference_gradients(module, batch, 1)
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-5, atol=0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4 * scale, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2"])
def test_a_bfloat16_target_is_trained_with_products_in_bfloat16(family: str, tmp_path: Path) -> None:
    module = make_model(family, tie_word_embeddings=False)
    save(module, tmp_path)
    batch, found = random_batch(), []
    for backend in BACKENDS:
        model = model_of(module.bfloat16(), backend)
        exit_layer = model.trainable_exit(tmp_path, 1)
        exit_layer.module.float().requires_grad_(True)
        loss = losses(model, exit_layer, 2, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [weight.grad for weight in exit_layer.module.parameters()]
        assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)
        found.append((float(loss.detach()), float(torch.nn.utils.get_total_norm(gradients))))  # type: ignore[arg-type]
    assert found[0] == pytest.approx(found[1], rel=0.02)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(make_model(request.param), tmp_path_factory.mktemp("exit") / "target", make_tokenizer()))


def test_an_exit_trained_on_one_backend_runs_on_the_other(folder: Path, tmp_path: Path) -> None:
    """The files are equal, and the exit loaded from them predicts what it did in training, on both backends."""
    targets = [opened(folder, backend) for backend in BACKENDS]
    ids = random_batch().ids[0]
    for target in targets:
        for layers in (0, 1, 2):
            exit_layer = target.model.trainable_exit(folder, layers)
            exit_layer.module.requires_grad_(False)
            torch.manual_seed(0)
            for _, weight in sorted(exit_layer.module.named_parameters()):
                weight.add_(0.2 * torch.randn_like(weight)).copy_(weight.bfloat16())
            expected = exit_outputs(target.model, 1, exit_layer, ids)[0]
            described = Description("here", weights_fingerprint(folder), 1, layers)
            out = tmp_path / target.model.backend / str(layers)
            save_exit(out, exit_layer.module, None, described)
            for other in targets:
                torch.testing.assert_close(drafted(other, out, ids), expected, atol=3e-5, rtol=1e-4)
    for layers in (0, 1, 2):
        native, other = (load_file(tmp_path / backend / str(layers) / WEIGHTS) for backend in BACKENDS)
        assert native.keys() == other.keys()
        assert all(torch.equal(weight, other[name]) for name, weight in native.items())


def drafted(target: LoadedModel, path: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits [n, vocabulary] after each of the tokens, by a saved exit as decoding runs it."""
    loaded = load_exit(path, target)
    runner = EarlyExit(target.model, loaded.layer, loaded.description.after).draft
    rows = runner.logits(Context(ids[:1].tolist()), ids[1:].tolist()).logits
    return rows.clone()


def test_the_bundled_exit_is_the_same_on_both_backends() -> None:
    ids = torch.tensor(opened(demo.folder("target")).tokenizer.encode("def add(a, b):\n    return a + b\n\nThe sum of 2 and 3"))
    found = [drafted(opened(demo.folder("target"), backend), demo.exit_folder(), ids) for backend in BACKENDS]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert torch.equal(found[0].argmax(dim=-1), found[1].argmax(dim=-1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exit_has_at_most_two_layers(folder: Path, backend: str) -> None:
    with pytest.raises(SpecgenError, match="the exit has 3 layers"):
        opened(folder, backend).model.trainable_exit(folder, 3)
