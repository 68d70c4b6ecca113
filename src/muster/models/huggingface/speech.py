"""Speech encoders of transformers with a CTC head: Wav2Vec2, HuBERT, WavLM and Wav2Vec2-BERT.

The model is transformers' own module. What it draws at random by the batch (its SpecAugment, LayerDrop)
is off: the recipe's masks follow the sample, and its dropout is the recipe's.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from muster.models.norm import valid_frames
from muster.models.plan import ParallelPlan

MEL_FAMILY = "wav2vec2-bert"
DROPOUTS = (
    "activation_dropout",
    "attention_dropout",
    "conformer_conv_dropout",
    "feat_proj_dropout",
    "final_dropout",
    "hidden_dropout",
)
NO_DROPOUT = {"layerdrop": 0.0, "feat_quantizer_dropout": 0.0}
MASK_SHARE = 0.05  # of transformers' own SpecAugment; more than 0 gives a model its mask embedding

Document = dict[str, Any]  # config.json
Lengths = TypeVar("Lengths", int, Tensor)


class SpeechEncoderCTC(nn.Module):
    """The encoder and its head, under the names they have in transformers' …ForCTC."""

    def __init__(
        self,
        document: Document,
        *,
        masks_padding: bool,
        time_masks: bool = False,
        dropout: float = 0.0,
        freeze_features: bool = False,
        freeze_encoder: bool = False,
    ) -> None:
        """`time_masks`: training replaces stretches of features by the mask embedding."""
        super().__init__()
        theirs = _build(document, dropout)
        self.family: str = document["model_type"]
        self.masks_padding, self.time_masks = masks_padding, time_masks
        self.architecture = type(theirs).__name__
        self._prefix: str = theirs.base_model_prefix
        setattr(self, self._prefix, getattr(theirs, self._prefix))
        self.dropout, self.lm_head = theirs.dropout, theirs.lm_head
        self.base._mask_hidden_states = self._mask_features
        if freeze_features and self.family != MEL_FAMILY:
            self.base.feature_extractor._freeze_parameters()
        if not time_masks and hasattr(self.base, "masked_spec_embed"):
            self.base.masked_spec_embed.requires_grad_(False)
        if freeze_encoder:
            self.base.requires_grad_(False)
        layers = {type(layer).__name__ for layer in self.base.encoder.layers}
        self.plan = ParallelPlan(blocks=tuple(sorted(layers)))
        self.train()

    @property
    def base(self) -> Any:
        return getattr(self, self._prefix)

    def forward(
        self, inputs: Tensor, lengths: Tensor, stretches: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`inputs` `[batch, samples]` or `[batch, time, mels]`, and how much of each is a clip's own;
        `stretches` `[batch, n, 2]` are masked, as shares of the clip. → logits and their lengths."""
        padding = valid_frames(lengths, inputs.shape[1]).int() if self.masks_padding else None
        masked = {}
        if stretches is not None and self.time_masks:
            masked["mask_time_indices"] = self._masked(inputs, lengths, stretches)
        hidden = self.base(inputs, attention_mask=padding, **masked).last_hidden_state
        return self.lm_head(self.dropout(hidden)), self.output_lengths(lengths)

    def output_lengths(self, lengths: Tensor) -> Tensor:
        return self.base._get_feat_extract_output_lengths(lengths)  # type: ignore[no-any-return]

    def _masked(self, inputs: Tensor, lengths: Tensor, stretches: Tensor) -> Tensor:
        config = self.base.config
        own = convolved(lengths, config.conv_kernel, config.conv_stride)
        total = convolved(inputs.shape[1], config.conv_kernel, config.conv_stride)
        time = torch.arange(total, device=inputs.device)
        edges = stretches * own[:, None, None]
        return ((time >= edges[..., :1]) & (time < edges[..., 1:])).any(1)

    def train(self, mode: bool = True) -> SpeechEncoderCTC:
        """The encoder's own flag and its adapter's only draw for LayerDrop, by the batch."""
        super().train(mode)
        for module in (self.base.encoder, getattr(self.base, "adapter", None)):
            if module is not None:
                module.training = False
        return self

    def _mask_features(
        self,
        hidden_states: Tensor,
        mask_time_indices: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """In place of transformers' own, which waits for the GPU to count what is masked."""
        if mask_time_indices is None:
            return hidden_states
        embedding = self.base.masked_spec_embed.to(hidden_states.dtype)
        return torch.where(mask_time_indices[..., None], embedding, hidden_states)

    def to_empty(self, *, device: Any, recurse: bool = True) -> SpeechEncoderCTC:
        """Buffers keep their values: they are constants, and no file holds them."""
        super().to_empty(device=device, recurse=recurse)
        for module in self.modules():
            own = dict(module.named_buffers(recurse=False))
            if not own:
                continue
            with torch.device("cpu"):
                fresh = dict(type(module)(self.base.config).named_buffers(recurse=False))
            for name, buffer in own.items():
                buffer.copy_(fresh[name])
        return self


def convolved(lengths: Lengths, kernels: list[int], strides: list[int]) -> Lengths:
    """Frames that convolutions without padding make of so many samples."""
    for kernel, stride in zip(kernels, strides, strict=True):
        lengths = (lengths - kernel) // stride + 1
    return lengths


def least_samples(document: Document) -> int:
    """That the convolutions need for one frame."""
    if document["model_type"] == MEL_FAMILY:
        return 0
    config = _config(document)
    needed = 1
    for kernel, stride in reversed(list(zip(config.conv_kernel, config.conv_stride, strict=True))):
        needed = (needed - 1) * stride + kernel
    return needed


def normalises_frames(document: Document) -> bool:
    """Whether every frame is normalised by itself; else one norm runs over the whole padded clip."""
    return getattr(_config(document), "feat_extract_norm", "layer") == "layer"


def reads_padding(document: Document, masks_padding: bool) -> bool:
    """Whether a clip's output depends on how far it is padded. An adapter's convolutions read beyond a
    clip's end."""
    adapter = getattr(_config(document), "add_adapter", False)
    return not masks_padding or not normalises_frames(document) or bool(adapter)


def with_mask_embedding(document: Document) -> Document:
    """The config of a model that has one, which a mask probability of 0 would leave out."""
    config = _config(document)
    if config.mask_time_prob or config.mask_feature_prob:
        return document
    return document | {"mask_time_prob": MASK_SHARE}


def with_head(document: Document, vocab: int, blank: int) -> Document:
    return document | {"vocab_size": vocab, "pad_token_id": blank}


def _config(document: Document) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[document["model_type"]].from_dict(dict(document))


def _build(document: Document, dropout: float) -> Any:
    from transformers import AutoModelForCTC

    config = _config(document)
    if config.model_type == "wavlm":  # how transformers calls torch; the sums are the same
        warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")
    known = config.to_dict()
    wanted = NO_DROPOUT | dict.fromkeys(DROPOUTS, dropout)
    for name, value in wanted.items():
        if name in known:
            setattr(config, name, value)
    return AutoModelForCTC.from_config(config, dtype=torch.float32)
