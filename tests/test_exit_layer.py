"""Exit layers: made from a target, run after its first layers, saved and loaded, refused if they do not fit."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from families import BACKENDS, LETTERS, make_model, make_tokenizer, save
from runner_checks import LAYERED, quick
from specgen.engine.exit_parts import Predictor
from specgen.engine.parts.exit_files import DESCRIPTION, Description, Exit, load_exit, read_description, save_exit
from specgen.engine.transformers.exit_layer import ExitLayer
from specgen.train.exit_training import exit_outputs
from training_helpers import opened

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.early_exit import EarlyExit
from specgen.engine.transformers.decoder_layers import decoder_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(make_model("llama"), tmp_path_factory.mktemp("exit") / "target", make_tokenizer(LETTERS)))


def untrained() -> ExitLayer:
    """An untrained exit layer of the target in `folder`."""
    return ExitLayer.of(make_model("llama"))


@pytest.mark.parametrize(("family", "backend"), quick(LAYERED))
def test_an_untrained_exit_before_the_last_layer_gives_the_targets_logits(models_folder: Path, family: str, backend: str) -> None:
    module = make_model(family)
    target = opened(save(module, models_folder / "exit" / family), backend)
    ids = torch.randint(3, 90, (30,), generator=torch.Generator().manual_seed(1))  # longer than the sliding windows
    expected = module(input_ids=ids[None]).logits[0]
    for layers in (1, 2):
        layer = target.model.trainable_exit(target.folder, layers)
        found, _ = exit_outputs(target.model, target.model.shape.num_layers - layers, layer, ids)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_model_whose_layers_one_by_one_give_other_logits_is_refused() -> None:
    model = make_model("gemma2")
    decoder_of(model).embed_tokens.register_forward_hook(lambda module, args, out: out)
    ExitLayer.of(model)
    model.register_forward_hook(lambda module, args, out: setattr(out, "logits", out.logits * 2))
    with pytest.raises(SpecgenError, match="do not give its own logits"):
        ExitLayer.of(model)


def draft_logits(target: LoadedModel, found: Exit) -> torch.Tensor:
    """The logits with which an exit drafts after a few tokens."""
    both = EarlyExit(target.model, found.layer, found.description.after)
    return both.draft.logits(Context([1, 5, 6, 7]), [8, 9]).logits


def test_a_saved_exit_loads_unchanged(folder: Path, tmp_path: Path) -> None:
    target, native = opened(folder, "transformers"), opened(folder, "native")
    layer, predictor = untrained(), Predictor(32)
    with torch.no_grad():
        for weight in [*layer.parameters(), *predictor.parameters()]:
            weight.copy_(torch.randn_like(weight).bfloat16())
    described = Description("here", weights_fingerprint(folder), 1, predictor=True, figures={"agreement": 0.123456})
    path = save_exit(tmp_path, layer, predictor, described)
    for named in (path, tmp_path, tmp_path / DESCRIPTION):
        found = load_exit(named, target)
        assert found.description.after == 1
        assert found.predictor is not None
        assert found.description.figures == {"agreement": 0.1235}
        for mine, theirs in ((layer, found.layer.layer), (predictor, found.predictor)):
            for name, weight in mine.state_dict().items():
                assert torch.equal(weight, theirs.state_dict()[name])
        by_native = draft_logits(native, load_exit(named, native))
        torch.testing.assert_close(by_native, draft_logits(target, found), atol=2e-4, rtol=1e-3)
    # The target's own head is not saved.
    small = save_exit(tmp_path / "small", layer, None, replace(described, own_head=False, predictor=False))
    assert small.stat().st_size < path.stat().st_size
    assert load_exit(small, target).layer.layer.head is target.model.module.lm_head
    assert load_exit(small, native).layer._parts.head is native.model.parts.head


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exit_of_another_target_or_a_damaged_one_is_refused(folder: Path, tmp_path: Path, backend: str) -> None:
    target = opened(folder, backend)
    layer = untrained()
    described = Description("here", weights_fingerprint(folder), 1)
    path = save_exit(tmp_path / "exit", layer, None, described)
    other = opened(save(make_model("llama", seed=3), tmp_path / "other"))
    with pytest.raises(SpecgenError, match=r"was trained for here .*not for .*other\. Train one"):
        load_exit(path, other)
    with pytest.raises(SpecgenError, match=r"there is no exit layer in"):
        load_exit(tmp_path, target)
    text = (tmp_path / "exit" / DESCRIPTION).read_text()
    breaks = {
        "after: 1": ("after: 3", "after layer 3 of 3"),  # no layer would be left to verify with
        "layers: 1": ("layers: 2", "does not fit its description"),
        "format: 1": ("format: 7", "format: Input should be 1"),
        "own_head: true": ("own_head: maybe", "own_head: Input should be a valid boolean"),
        "predictor: false": ("predictor: true", "does not fit its description"),
        "target: here": ("target: here\nzebra: 1", "zebra: Unexpected keyword argument"),
        "figures: {}": ("figures: 3", "figures: Input should be a valid dictionary"),
    }
    for old, (new, message) in breaks.items():
        assert old in text
        (tmp_path / "exit" / DESCRIPTION).write_text(text.replace(old, new))
        with pytest.raises(SpecgenError, match=message):
            load_exit(path, target)
    (tmp_path / "exit" / DESCRIPTION).write_text(text)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SpecgenError, match="cannot read the exit layer"):
        load_exit(path, target)
    path.write_bytes(content)
    save_exit(tmp_path / "third", layer, None, replace(described, fingerprint="0" * 16))
    (tmp_path / "third" / DESCRIPTION).write_text(text)
    with pytest.raises(SpecgenError, match="do not belong together"):
        load_exit(tmp_path / "third", target)


@pytest.mark.parametrize("content", ["1: x\nzebra: y", "zz: 2024-99-99", "[" * 3000, "\x00", "- 1", "a: &a [*a"])
def test_a_damaged_description_gives_an_error_of_one_line(tmp_path: Path, content: str) -> None:
    whole = yaml.safe_dump(asdict(Description("here", "0" * 16, 1)))
    (tmp_path / DESCRIPTION).write_text(f"{whole}{content}\n" if content[0].isalnum() else content)
    with pytest.raises(SpecgenError) as caught:
        read_description(tmp_path / DESCRIPTION)
    assert str(tmp_path / DESCRIPTION) in caught.value.message
    assert "\n" not in str(caught.value)


def test_the_named_file_is_loaded(folder: Path, tmp_path: Path) -> None:
    target = opened(folder, "transformers")
    layer = untrained()
    described = Description("here", weights_fingerprint(folder), 1)
    weights = save_exit(tmp_path, layer, None, described)
    with torch.no_grad():
        layer.norm.weight.fill_(3.0)
    other = save_exit(tmp_path / "made", layer, None, described)
    other.rename(tmp_path / "second.safetensors")
    for missing in ("second.safetensors", "third.safetensors", "exit.bin", "exit"):
        with pytest.raises(SpecgenError, match=f"there is no exit layer {tmp_path / missing}"):
            load_exit(tmp_path / missing, target)
    (tmp_path / "made" / DESCRIPTION).rename(tmp_path / "second.yaml")
    for named in ("second.safetensors", "second.yaml"):
        assert float(load_exit(tmp_path / named, target).layer.layer.norm.weight[0]) == 3.0
    assert float(load_exit(weights, target).layer.layer.norm.weight[0]) != 3.0


def test_a_fingerprint_depends_on_the_weights_and_not_on_their_files(folder: Path, tmp_path: Path) -> None:
    model = make_model("llama")
    before = weights_fingerprint(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert weights_fingerprint(tmp_path / "shards") == before
    for _ in range(2):  # the second time in a file whose fingerprint is cached
        with torch.no_grad():
            decoder_of(model).layers[1].mlp.up_proj.weight.mul_(1.01)
        model.save_pretrained(tmp_path / "changed")
        assert weights_fingerprint(tmp_path / "changed") != before
        before = weights_fingerprint(tmp_path / "changed")
