"""Heads that are damaged, of another kind or of another target are refused in one line that says what is wrong."""

from __future__ import annotations

import shlex
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import VOCAB, make_model, save
from head_checks import eagle_of, equal, refusal
from head_layouts import LAYOUTS, Config, Tensors, change_head, write_head
from safetensors.torch import load_file
from specgen.engine.parts.head_tensors import HeadTensors
from training_helpers import opened

from specgen.engine.model_loading import LoadedModel

WIDTH, LAYERS = 32, 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return opened(save(make_model("llama", num_hidden_layers=LAYERS), tmp_path_factory.mktemp("heads") / "target"))


def put(**tensors: torch.Tensor) -> Callable[[Tensors], None]:
    """Replaces tensors; `__` in a name is a dot."""
    return lambda raw: raw.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})


def without(*names: str) -> Callable[[Tensors], None]:
    return lambda raw: [raw.pop(name) for name in names] and None


def scaled(name: str, factor: float) -> Callable[[Tensors], None]:
    return lambda raw: raw.update({name: raw[name] * factor})


def spoiled(name: str, value: float) -> Callable[[Tensors], None]:
    def spoil(raw: Tensors) -> None:
        raw[name].view(-1)[3] = value

    return spoil


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    return lambda raw: raw.update({new: raw.pop(old)})


def under_another_name(raw: Tensors) -> None:
    for name in list(raw):
        raw[f"mlp.{name}"] = raw.pop(name)


def same(raw: Tensors) -> None:
    """Leaves the tensors as they are."""


ONES = torch.ones(WIDTH)
FIRST = "layers.0.self_attn.q_proj.weight"
MISTAKES: list[tuple[str, Callable[[Tensors], None], Config, str]] = [
    # tensors that are missing, unknown or have other shapes
    ("eagle1", without("layers.0.mlp.up_proj.weight"), {}, "lacks 1 of its tensors (the first: layers.0.mlp.up_proj.weight)"),
    ("eagle1", without("fc.bias"), {"bias": True}, "lacks 1 of its tensors (the first: fc.bias)"),
    ("eagle1", same, {"bias": False}, "a tensor that such a head does not have (the first: fc.bias)"),
    ("eagle1", same, {"qkv_bias": True}, "lacks 3 of its tensors (the first: layers.0.self_attn.q_proj.bias)"),
    ("eagle1", put(layers__0__input_layernorm__weight=ONES), {}, "does not have (the first: layers.0.input_layernorm.weight)"),
    ("eagle1", put(norm__weight=ONES), {}, "does not have (the first: norm.weight)"),
    ("eagle1", put(layers__0__mlp__down_proj__weight=torch.ones(WIDTH, 41)), {}, "down_proj.weight is 32 x 41 in its file, but"),
    ("eagle1", put(**{FIRST: torch.ones(48)}), {}, f"{FIRST} is no matrix"),
    ("eagle1", same, {"num_attention_heads": 5}, f"rows of {FIRST} are not divisible"),
    ("eagle1", same, {"num_attention_heads": None}, "its config.json does not say num_attention_heads"),
    ("eagle1", same, {"num_attention_heads": "four"}, "num_attention_heads = 'four' in its config.json is not supported"),
    ("eagle1", same, {"intermediate_size": 41}, "gate_proj.weight is 40 x 32 in its file, but has to be 41 x 32"),
    ("eagle1", same, {"hidden_act": "tanh"}, "hidden_act = 'tanh' in its config.json is not supported"),
    ("eagle1", same, {"rope_scaling": {"type": "magic"}}, "in its config.json is not supported"),
    ("eagle1-sglang", put(fc__bias=ONES), {}, "are its fc.bias"),
    ("eagle3", without("midlayer.hidden_norm.weight"), {}, "lacks 1 of its tensors (the first: layers.0.hidden_norm.weight)"),
    ("eagle1", without("fc.weight", "fc.bias"), {}, "lacks 1 of its tensors (the first: fc.weight)"),
    ("eagle3", without("fc.weight"), {}, "lacks 1 of its tensors (the first: fc.weight)"),
    ("eagle3", without("midlayer.self_attn.q_proj.weight"), {}, f"lacks 1 of its tensors (the first: {FIRST})"),
    ("eagle3", without("lm_head.weight"), {}, "lacks 1 of its tensors (the first: lm_head.weight)"),
    ("eagle3", without("d2t", "t2d"), {}, "lacks 1 of its tensors (the first: d2t)"),
    ("eagle3", put(layers__1__mlp__x=ONES), {}, "it has 2 decoder layers"),
    ("medusa-v0.1", without("1.0.linear.weight"), {}, "the first: blocks.1.layers.0.weight"),
    ("medusa-v0.1", without("2.1.weight"), {}, "the first: lm_heads.2.weight"),
    ("medusa-v2", renamed("2.0.linear.weight", "7.0.linear.weight"), {}, "the first: blocks.2.layers.0.weight"),
    ("medusa-v2", put(**{"1.0.linear.bias": torch.ones(31)}), {}, "1.0.linear.bias is 31 in its file, but has to be 32"),
    ("medusa-vllm", put(token_map=torch.tensor([5, 5])), {}, "are its token_map"),
    ("medusa-vllm", put(**{"medusa_heads.token_map": torch.tensor([1] * 20)}), {}, "does not hold different ids of tokens"),
    ("medusa-vllm", put(**{"medusa_heads.token_map": torch.tensor([*range(19), VOCAB])}), {}, "does not hold different ids"),
    ("glide", without("model.layers.0.cross_attn.o_proj.weight"), {}, "the first: layers.0.cross_attn.o_proj.weight"),
    ("glide", without("model.norm.weight"), {}, "lacks 1 of its tensors (the first: norm.weight)"),
    # values
    ("eagle1", spoiled("layers.0.mlp.up_proj.weight", float("nan")), {}, "layers.0.mlp.up_proj.weight holds NaN or infinities"),
    ("eagle3", spoiled("lm_head.weight", float("inf")), {}, "lm_head.weight holds NaN or infinities"),
    ("medusa-v2", spoiled("0.0.linear.bias", float("nan")), {}, "0.0.linear.bias holds NaN"),
    ("eagle3", scaled("fc.weight", 0), {}, "fc.weight holds only zeros"),
    ("glide", scaled("lm_head.weight", 0), {}, "lm_head.weight holds only zeros"),
    ("eagle1", put(fc__weight=torch.ones(WIDTH, 2 * WIDTH, dtype=torch.int8)), {}, "fc.weight is stored as int8"),
    ("eagle3", put(d2t=torch.arange(20, 0, -1)), {}, "d2t does not map its ids to rising ids"),
    ("eagle3", put(d2t=torch.full((20,), VOCAB - 19)), {}, "d2t does not map its ids to rising ids"),
    ("eagle3", put(d2t=torch.full((20,), -1)), {}, "d2t does not map its ids to rising ids"),
    ("eagle3", put(d2t=torch.tensor([0, 2**63 - 2, -(2**62), *range(17)])), {}, "d2t does not map its ids to rising ids"),
    ("eagle3", put(d2t=torch.ones(20)), {}, "d2t has to be a vector of integers, not 1-dimensional float32"),
    ("eagle3", put(d2t=torch.zeros(20, dtype=torch.int64)), {}, "t2d and d2t contradict each other"),
    ("eagle3", put(t2d=torch.ones(VOCAB, 1, dtype=torch.bool)), {}, "t2d is 96 x 1 in its file, but has to be 96"),
    # heads of other targets
    ("eagle1", put(fc__weight=torch.ones(48, 96)), {}, "for another target: fc.weight is for a hidden size of 48, "),
    ("eagle1", put(embed_tokens__weight=torch.ones(99, WIDTH)), {}, "embed_tokens.weight is for a vocabulary of 99, "),
    ("eagle1-speculators", same, {"transformer_layer_config": {"vocab_size": 99}}, "config.json is for a vocabulary of 99, "),
    ("eagle3", put(fc__weight=torch.ones(WIDTH, 3 * 48)), {}, "fc.weight is for three features of 48, "),
    ("eagle3", put(t2d=torch.ones(99, dtype=torch.bool)), {}, "t2d is for a vocabulary of 99, "),
    ("medusa-v2", put(**{"0.0.linear.weight": torch.ones(48, 48)}), {}, "0.0.linear.weight is for a hidden size of 48, "),
    ("medusa-v0.1", lambda raw: raw.update({f"{k}.1.weight": torch.ones(99, WIDTH) for k in range(3)}), {}, "vocabulary of 99, "),
    ("glide", same, {"large_hidden_size": 48}, "large_hidden_size is for a hidden size of 48, "),
    ("glide", put(**{"model.layers.0.cross_attn.q_proj.weight": torch.ones(48, WIDTH)}), {}, "attention of a width of 48, "),
    # feature layers
    ("eagle3", same, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, "does not fit "),
    ("eagle3", same, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}, "eagle_aux_hidden_state_layer_ids = [2, 4]"),
    ("eagle3", same, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}}, "does not fit "),
    ("eagle3", same, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
    # kinds that specgen cannot run
    ("eagle3", put(fc_norm__0__weight=ONES), {}, "it is an EAGLE-3.1 head, which specgen cannot run"),
    ("eagle3-speculators", same, {"norm_output": True}, "a variant that specgen cannot run (norm_output in its config.json)"),
    ("eagle3-speculators", same, {"norm_before_fc": True}, "a variant that specgen cannot run (norm_before_fc"),
    ("eagle3-speculators", same, {"transformer_layer_config": {"model_type": "gemma2"}}, "model_type = 'gemma2'"),
    ("eagle1-speculators", put(embedding_layernorm__weight=ONES), {}, "with further norms (HASS), which specgen cannot run"),
    (
        "eagle1",
        renamed("fc.weight", "eh_proj.weight"),
        {},
        "it is an MTP layer (multi-token prediction), which specgen cannot run",
    ),
    ("glide", without(*(f"model.layers.0.cross_attn.{name}_proj.weight" for name in "qo")), {}, "it is a model, not a head"),
    ("medusa-v2", under_another_name, {}, "it is of no kind that specgen knows (its first tensor: mlp.0.0.linear.bias)"),
    ("glide", same, {"use_remap": True}, "maps the target's keys and values (use_remap)"),
    # text of the file in a message
    ("eagle1", put(**{"\x1b]0;evil\x07\n\u202e": ONES}), {}, "does not have (the first: ␛]0;evil␇↵�)"),
    ("eagle1", put(**{"x" * 5000: ONES}), {}, f"does not have (the first: {'x' * 79}…)"),
    ("eagle1", same, {"hidden_act": "\x1b[31m\n" + "y" * 5000}, "hidden_act = '\\x1b[31m\\ny"),
]


@pytest.mark.parametrize(
    ("layout", "tensors", "config", "message"), MISTAKES, ids=[f"{row[0]}: {row[3][:40]}" for row in MISTAKES]
)
def test_a_mistake_is_named_in_one_line(
    target: LoadedModel, tmp_path: Path, layout: str, tensors: Callable[[Tensors], None], config: Config, message: str
) -> None:
    folder = change_head(write_head(tmp_path, layout, target.folder), tensors, **config)
    assert message in refusal(folder, target)


def test_shapes_are_checked_before_a_tensor_is_read(target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadTensors, "_read", lambda *_: pytest.fail("read a tensor"))
    for layout in LAYOUTS:
        folder = write_head(tmp_path / layout, layout, target.folder)
        refused = change_head(folder, put(further__weight=ONES))
        assert "further.weight" in refusal(refused, target)


def test_damaged_files_are_refused(target: LoadedModel, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", "eagle1", target.folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    whole = weights.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    huge = struct.pack("<Q", 1 << 60) + whole[8:]
    for content in (b"", whole[:5], whole[: 8 + header], whole[:-1], huge, b"version https://git-lfs.github.com/spec/v1\n"):
        weights.write_bytes(content)
        assert "cannot read the weights of the head" in refusal(folder, target)
    weights.write_bytes(whole)
    for text in ("", "{", "[]", "[" * 100_000, '{"num_hidden_layers": ' + "9" * 5000 + "}", '{"num_hidden_layers": 99999}'):
        config.write_text(text)
        assert str(folder) in refusal(folder, target)
    config.unlink()
    assert "it has no config.json" in refusal(folder, target)
    weights.unlink()
    assert "it has no safetensors file" in refusal(folder, target)
    assert "there is no folder" in refusal(tmp_path / "none", target)
    (tmp_path / "file").touch()
    assert "is a file" in refusal(tmp_path / "file", target)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt", "a head's.pth"])
def test_a_pickle_is_not_read_and_the_command_in_the_message_converts_it(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = write_head(tmp_path / "the head", "eagle1", target.folder)
    expected = eagle_of(folder, target)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors["fc.weight"] = tensors["fc.weight"].t().contiguous().t()  # not contiguous, as weights may be saved
    torch.save(tensors, folder / name)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: pytest.fail("read a pickle"))
        message = refusal(folder, target)
    assert f"only {name}, which can run code" in message
    python, option, program, *arguments = shlex.split(message.split("Convert it: ")[1])
    assert (python, option) == ("python", "-c")
    monkeypatch.setattr("sys.argv", ["-c", *arguments])
    exec(program, {})
    assert equal(eagle_of(folder, target), expected)
