"""EAGLE heads: EAGLE-1 and -2 (arXiv:2401.15077, 2406.16858), EAGLE-3 (arXiv:2503.01840) and
EAGLE-3.1 (arXiv:2605.09992).

Features are hidden states of the target. Pair i of a text joins the target's feature at token i
with the embedding of token i + 1, and has position i. The head's layers turn pairs into predicted
features: the one of pair i imitates the target's feature at token i + 1, and its logits predict
token i + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specgen.base.types import Context
from specgen.engine.block_runner import penalised
from specgen.engine.devices import inference, upload
from specgen.engine.forward_pass import (
    NO_NODES,
    ForwardPass,
    ModelOutput,
    passes_of_levels,
    tokens_before,
)
from specgen.engine.model import Model
from specgen.engine.model_runner import DraftTraits, ModelRunner, Runners
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.attend import attend_batch
from specgen.engine.native.attention import Attention
from specgen.engine.native.inputs import PassInputs, layer_kinds
from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_files import FINAL_NORM, HEAD, read_layer
from specgen.engine.native.layer_stack import LayerStack
from specgen.engine.native.linear import Linear, MakeLinear
from specgen.engine.native.native_model import NativeModel, final_logits
from specgen.engine.native.norms import Norm, norm_function, output_norm, rms_norm
from specgen.engine.parts.mtp import AssistantRunner, MtpLayer, before_final_norm, without_first
from specgen.engine.parts.part import (
    AssistantWeights,
    DecoderRunner,
    EagleWeights,
    FeatureRunner,
    KeptRows,
    MtpWeights,
    native_layers,
    of_all_tokens,
    part_weight,
)
from specgen.engine.penalties import PenaltyProcessor
from specgen.engine.weights import bias_of

FC = "fc.weight"
FEATURE_NORM = "layers.0.hidden_norm.weight"
FIRST_NORM = "layers.0.input_layernorm.weight"
# before `fc`: all but the first, or it
INPUT_NORMS = "input_norm.weight", *(f"fc_norm.{number}.weight" for number in range(3))
TRIAL_TEXT = (  # for `_feeds_normed`
    "The museum opens at nine in the morning and closes at six in the evening. On the "
    "first floor you will find paintings from"
    " the nineteenth century, and on the second floor there is a collection of musical "
    "instruments.\n\ndef mean(numbers):\n"
    "    total = 0\n    for number in numbers:\n        total += number\n    return "
    "total / len(numbers)\n"
)
_TRIAL_DEPTH = 4  # tokens


class FirstLayer(NativeLayer):
    """The first layer of an EAGLE head, whose attention reads another vector than the residual
    stream."""

    def run(self, hidden: Tensor, attended: Tensor, inputs: PassInputs) -> Tensor:
        """Returns the residual stream `hidden` [rows, width] with the outputs of attention and MLP
        added. Attention reads `attended`."""
        hidden = self.mixer.output.add_to(hidden, self.mixer(attended, inputs))
        return self.mlp.output.add_to(hidden, self.mlp(self._mlp_norm(hidden), inputs))


class UnrolledAttention(Attention):
    """The attention of a head's first layer in EAGLE-3's training-time test (section 3.2), in which
    each call drafts one more token.

    A draft follows each prefix of a text. The first call has the text's pairs. In call j after it,
    row i is the pair of the j-th token drafted after pair i, at position i + j. It sees the pairs
    that pair i sees, and the tokens drafted after pair i.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # keys and values of each call, [batch, kv heads, n, head size]
        self._drafted: list[tuple[Tensor, Tensor]] = []

    def _batch_attention(self, heads: Tensor, inputs: PassInputs) -> Tensor:
        mask = inputs.kinds[self._kind].mask
        batch = inputs.batch
        group = self._heads // self._kv_heads
        assert batch is not None
        assert mask is not None
        heads = heads.view(batch, inputs.rows, *heads.shape[1:])
        query, keys, values = torch.split(
            heads, [self._heads, self._kv_heads, self._kv_heads], dim=2
        )
        self._drafted.append((keys.transpose(1, 2), values.transpose(1, 2)))
        if len(self._drafted) == 1:
            return attend_batch(query, *self._drafted[0], mask).flatten(0, 1)
        (keys, values), *of_drafts = [
            tuple(heads.repeat_interleave(group, dim=1) for heads in pair) for pair in self._drafted
        ]
        query = query.transpose(1, 2)
        drafts = [(query * own_keys).sum(-1, keepdim=True) for own_keys, _ in of_drafts]
        weights = torch.cat((query @ keys.transpose(-1, -2) + mask, *drafts), dim=-1).softmax(
            dim=-1
        )
        before, *own_weights = torch.split(weights, [inputs.rows, *(1 for _ in drafts)], dim=-1)
        mixed: Tensor = before.to(values.dtype) @ values
        for weight, (_, own_values) in zip(own_weights, of_drafts, strict=True):
            mixed = mixed + weight * own_values
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


class UnrolledLayer(FirstLayer):
    """The first layer of a head in training, where each call drafts one more token after each
    prefix of a text."""

    attention = UnrolledAttention


class EagleLayers:
    """The layers of an EAGLE head with their weights on `device`, for drafting and for training.

    `make_linear` makes a linear layer from a weight, a bias and a factor, as for `NativeLayer`;
    `norm_gain` is `gain` of `norms.norm_function`. `first_layer` is the class of the first layer.
    """

    def __init__(
        self,
        weights: EagleWeights,
        device: torch.device,
        dtype: torch.dtype,
        make_linear: MakeLinear,
        *,
        norm_gain: float = 1.0,
        first_layer: type[FirstLayer] = FirstLayer,
    ) -> None:
        architecture = weights.architecture
        is_third = weights.version == 3

        def take(name: str) -> Tensor:
            """Returns a tensor; of the norm of version 3's first attention, which reads two
            vectors, the weights for both."""
            tensor = weights.tensors[name].to(device)
            return torch.cat((tensor, take(FEATURE_NORM))) if name == FIRST_NORM else tensor

        self._is_third = is_third
        # without the norms' weights, which products contain
        self.normed = norm_function(architecture.norm_eps, norm_gain)
        self._eps = architecture.norm_eps
        norms = [take(name) for name in INPUT_NORMS if name in weights.tensors]
        self._input_norm = torch.stack(norms).float() if norms else None
        bias = take(bias_of(FC)).to(dtype) if bias_of(FC) in weights.tensors else None
        self._fc = make_linear(part_weight(take(FC), dtype, make_linear), bias, 1.0)
        self._feature_norm: Tensor | None = None
        self._output_norm: Norm | None = None
        if weights.norm_before_residual:
            self._feature_norm = (take(FEATURE_NORM).float() * norm_gain).to(dtype)
        if weights.norm_output:
            norm = (take(FINAL_NORM).float() * norm_gain).to(dtype)
            self._output_norm = output_norm(architecture.norm_eps, norm_gain, norm)
        _, (kind, *kinds) = layer_kinds(architecture, [device] * len(architecture.layers))
        as_kept = None if make_linear.kernels is not None else dtype
        own = read_layer(architecture, 0, take, as_kept, norm_gain, is_normed=is_third)
        self._pair_norm = own.attention_norm  # None: it is part of the weights
        self._first = first_layer(architecture, 0, kind, own, make_linear, gain=norm_gain)
        others = native_layers(architecture, kinds, take, dtype, make_linear, norm_gain, 1)
        self._others = LayerStack(others)

    def joined(self, features: Tensor) -> Tensor:
        """Returns vectors [n, ...] projected by `fc` to [n, width]. In EAGLE-3 they are the three
        features of each token, [n, 3 * target width], otherwise its pair, [n, 2 width]."""
        if self._input_norm is not None:
            parts = features.view(len(features), *self._input_norm.shape)
            parts = rms_norm(self._eps, None, parts) * self._input_norm
            features = parts.flatten(1).to(features.dtype)
        return self._fc(features)

    def __call__(self, embeddings: Tensor, features: Tensor, inputs: PassInputs) -> Tensor:
        """Runs the layers on pairs (see the module), and returns the hidden states [n, width] after
        them: the predicted features.

        `embeddings` and `features` are [n, width]; for EAGLE-3 the features are `joined` ones.
        """
        if self._is_third:
            pairs = self.normed(torch.stack((embeddings, features), dim=1))
            attended = pairs.flatten(1)
            if self._pair_norm is not None:
                attended = attended * self._pair_norm
            hidden = (
                features.clone() if self._feature_norm is None else pairs[:, 1] * self._feature_norm
            )
        else:
            attended = self.joined(torch.cat((embeddings, features), dim=-1))
            # in training, products are in bfloat16 and sums in float32
            hidden = attended.to(features.dtype, copy=True)
        hidden = self._first.run(hidden, attended, inputs)
        hidden = self._others(hidden, inputs)
        return hidden if self._output_norm is None else self._output_norm(hidden)


class EagleRunner(DecoderRunner):
    """Drafts with an EAGLE head, or with the target's own drafting layers (MTP). Implements
    `DraftRunner`.

    Its `target` is a runner of the target that keeps the features for the head. The head runs on
    pairs: feature i of the target and token i + 1, at position i. So n committed tokens are n - 1
    pairs, and the logits after the context come from the last of them. A drafted token is paired
    with the predicted feature of its parent, so each level of a draft takes a pass. The cache has
    the keys, values and predicted features of the context's pairs, made from the target's features,
    then those of the draft. When the context grows, the draft's are dropped, those of accepted
    tokens too: these pairs are run again with the target's features, in the pass that also computes
    the next draft's first logits.

    With several drafting layers, layer k pairs each token with what layer k - 1 predicts at the
    token before it, so its first pair is that of token k + 1. Drafted tokens of level m, from 1,
    are run by the layers from m on, and layer m gives their logits. This needs no features after
    the context's, and the longest draft is the number of layers.

    As with `ModelRunner`, each call may have another context, and the runner stays usable after an
    interrupted call. In a context of one token, which has no pair, the token is paired with zeros.
    """

    def __init__(
        self,
        weights: EagleWeights | MtpWeights,
        model: Model,
        target_penalties: PenaltyProcessor | None,
        penalties: PenaltyProcessor | None,
    ) -> None:
        super().__init__(weights, model, self._run)
        taps = [model.shape.num_layers]
        reduce = None
        self._lm_head: Linear | None = None
        self._normed: Norm | None = None  # of the LM head's input
        # the target's, if the LM head's rows are
        self._of_target: Architecture | None = None
        self._vocabulary = None
        made: Any = self.device, model.dtype, self.make_linear
        # which run on the pairs one after the other
        self._stages: list[EagleLayers | MtpLayer] = []
        if isinstance(weights, MtpWeights):
            self._stages += [
                MtpLayer(weights, index, *made, norm_gain=self.gain)
                for index in range(len(self.devices))
            ]
            reduce = before_final_norm(weights, self.device)
        else:
            layers = EagleLayers(weights, *made, norm_gain=self.gain)
            self._stages.append(layers)
            if HEAD in weights.tensors:
                head = weights.tensors[HEAD].to(self.device)
                self._lm_head = self.make_linear(part_weight(head, model.dtype, self.make_linear))
            if weights.version == 1 and isinstance(model, NativeModel):
                self._of_target = model.architecture
            if weights.version == 3:
                if not weights.norm_output:
                    norm = weights.tensors[FINAL_NORM].to(self.device)
                    norm = (norm.float() * self.gain).to(model.dtype)
                    self._normed = output_norm(self.architecture.norm_eps, self.gain, norm)
                taps = list(weights.feature_layers)
                reduce = layers.joined
            if weights.vocabulary is not None:
                self._vocabulary = weights.vocabulary.to(self.device)
        if len(self._stages) > 1:
            self.traits = DraftTraits(longest_draft=len(self._stages))
        self._rows = [KeptRows() for _ in self._stages]
        self._token_penalties = penalties
        self.target = FeatureRunner(
            model, model.forward(taps=taps), model.new_cache(), target_penalties, reduce
        )
        self._context = Context(())  # the last call's
        self._first: int | None = None  # its first token, None if it has no other

    @inference
    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        """Returns the logits after the context (index 0) and after each draft token i (index i +
        1), from index `start` on.

        The arguments are those of `ModelRunner.logits`. The output's `hidden_states` are the
        predicted features. Logits of tokens outside the head's vocabulary are -inf.
        """
        ids = context.ids
        self._context = context
        first = ids[0] if len(ids) > 1 else None
        if first != self._first:
            self._cached.clear()
            self._first = first
        pairs = Context(ids[1:] or ids)  # the tokens of the pairs
        pairs.prompt_length = context.prompt_length
        if self._cached.committed != len(pairs):
            # drops the draft, also the part that was accepted
            self._cached.truncate(self._cached.committed)
        output = super().logits(pairs, draft, parents, start=start)
        return penalised(output, self._token_penalties, context, draft, parents, start)

    def _run(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        """Runs the pairs of a pass: those of the context in one pass of the head, then each level
        of the draft in another."""
        first = forward_pass.first
        last = forward_pass.last
        length = len(forward_pass.context)
        outputs: list[ModelOutput] = []
        if first < length:
            committed = forward_pass._replace(draft=NO_NODES, last=min(last, length))
            if self._first is None:
                features = torch.zeros(
                    1,
                    self.architecture.hidden_size,
                    dtype=self.target_model.dtype,
                    device=self.device,
                )
            else:
                features = self.target.features(committed._replace(context=self._context))
            outputs.append(self._run_pairs(committed, 1, features))
        for level, number in passes_of_levels(forward_pass, mixed=len(self._stages) == 1):
            outputs.append(self._run_pairs(level, level.last - level.first, None, number))
        logits, hidden = (torch.cat(rows) for rows in list(zip(*outputs, strict=True))[:2])
        return ModelOutput(logits[-logits_to_keep:], hidden[-logits_to_keep:])

    def _run_pairs(
        self,
        forward_pass: ForwardPass,
        logits_to_keep: int,
        features: Tensor | None = None,
        level: int = 0,
    ) -> ModelOutput:
        """Runs the head on the n tokens of a pass, which are of the context, or drafted ones of a
        `level` from 1.

        `features` [n, width] are the target's, for the context's tokens; others are those predicted
        at the tokens before.
        """
        self.cache.length = forward_pass.first
        embeddings = self.embed(forward_pass)
        inputs = self.inputs(forward_pass)
        predicted: list[Tensor] = []
        begin = min(level, len(self._stages) - 1)
        before = torch.empty(0)
        if len(self._stages) > 1 or features is None:
            before = upload(tokens_before(forward_pass), self.device)
        for number, stage in enumerate(self._stages[begin:], begin):
            if number or features is None:
                features = self._rows[max(number - 1, 0)].kept.index_select(0, before)
            visible = without_first(inputs, number, forward_pass.last) if number else inputs
            predicted.append(stage(embeddings, features, visible))
            self._rows[number].write(forward_pass.first, predicted[-1], self.cache.capacity)
        kept = predicted[0][-logits_to_keep:]
        if self._lm_head is None:
            return ModelOutput(self.target_model.head_logits(kept), kept)
        logits = self._lm_head(kept if self._normed is None else self._normed(kept))
        if self._of_target is not None:
            logits = final_logits(self._of_target, logits)
        return ModelOutput(of_all_tokens(logits, self._vocabulary, self.vocab_size), kept)


@torch.no_grad()
def make_runners(
    weights: EagleWeights | MtpWeights | AssistantWeights,
    model: Model,
    _: ModelRunner,
    penalties: Callable[[], PenaltyProcessor | None],
) -> Runners:
    """Returns a runner of the target that keeps the features that the head reads, and a runner of
    the head.

    `penalties` is called once for each runner, and makes its penalty processor. Raises SpecgenError
    if the model's layers cannot be run one by one.
    """
    if isinstance(weights, EagleWeights) and weights.trial_ids:
        weights = replace(weights, norm_output=_feeds_normed(weights, model), trial_ids=())
    if isinstance(weights, AssistantWeights):
        assistant = AssistantRunner(weights, model, penalties(), penalties())
        return Runners(assistant.target, assistant)
    draft = EagleRunner(weights, model, penalties(), penalties())
    return Runners(draft.target, draft)


def _feeds_normed(weights: EagleWeights, model: Model) -> bool:
    """Whether the head predicts better from its own states after the final norm (EAGLE-3.1) than
    from those before it (EAGLE-3).

    Measured on the text `weights.trial_ids` by the probabilities of the target's likeliest next
    tokens, after drafts of the text's tokens. For files whose `norm_output` may mean either
    (SpecForge before its pull request 879).
    """
    ids = list(weights.trial_ids)
    agreements: list[float] = []
    likeliest = ModelRunner(model).logits(Context(ids[:1]), ids[1:]).logits.argmax(-1)
    for norm_output in (True, False):
        runner = EagleRunner(replace(weights, norm_output=norm_output), model, None, None)
        total = 0.0
        for start in range(_TRIAL_DEPTH, len(ids) - _TRIAL_DEPTH, _TRIAL_DEPTH):
            end = start + _TRIAL_DEPTH
            probs = runner.logits(Context(ids[:start]), ids[start:end], start=1).logits.softmax(-1)
            total += float(probs.gather(1, likeliest[start:end, None]).sum())
        agreements.append(total)
    return agreements[0] >= agreements[1]
