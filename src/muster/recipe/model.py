"""The recipe's section `model`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from muster.recipe.section import Fraction, Positive, Section, fixed, free
from muster.recipe.shape import Shape


class Lora(Section):
    """Low-rank adapters: the pretrained weights are frozen, two low-rank matrices per target are trained."""

    rank: Positive = Field(8, description="Rank of the adapters.")
    alpha: Annotated[float, Field(gt=0)] = Field(
        16.0, description="Adapters are scaled by alpha / rank."
    )
    dropout: Fraction = Field(0.0, description="On the adapters' input.")
    targets: list[str] = Field(
        ["q", "v"],
        description="Layers that get an adapter, by name: q k v o gate up down (Whisper: no gate) or, "
        "as transformers calls them, q_proj …; layers of other names by those, such as qkv_proj.",
    )


class Model(Section):
    preset: str = fixed(
        "lmu-micro",
        description="A named architecture. Speech: lmu-micro, lmu-7m, their -causal forms, lmu-guide; for "
        "speech-seq2seq whisper-micro, whisper-tiny, -base, -small, -medium, -large-v3. "
        "Language: gpt2-micro, gpt2, gpt2-medium, -large, -xl, llama-micro, llama-1b, llama-3b, llama-7b, "
        "llama-3-8b, llama-70b. "
        "Images: mnist-net, resnet-18, resnet-50.",
    )
    pretrained: str | None = fixed(
        None,
        description="A Hugging Face folder, or a hub id, whose architecture and weights to start "
        "from: any causal language model of transformers; Whisper; for speech-ctc Wav2Vec2, HuBERT, WavLM, "
        "Wav2Vec2-BERT. `preset` is then ignored.",
    )
    config: str | None = fixed(
        None,
        description="A Hugging Face config.json, or the folder of one, whose architecture to train from "
        "scratch; `preset` is then ignored.",
    )
    trust_remote_code: bool = fixed(
        False,
        description="Run the Python code in the folder of `pretrained` or `config`, for architectures "
        "that transformers does not have itself.",
    )
    shape: Shape | None = fixed(
        None,
        description="Sizes in place of the preset's: `model.preset=gpt2 model.shape.layers=6`.",
    )
    vocab_size: Positive | None = fixed(
        None,
        description="Rows of a language model's embedding. Default: as many as the tokenizer has.",
    )
    lora: Lora | None = fixed(None, description="Train low-rank adapters only.")
    freeze_encoder: bool = fixed(
        False,
        description="Whisper: train only the decoder; the encoder keeps no activations. speech-ctc with "
        "`pretrained`: train only the head.",
    )
    freeze_feature_encoder: bool = fixed(
        True,
        description="speech-ctc with `pretrained`: do not train the convolutions over raw audio of "
        "Wav2Vec2, HuBERT and WavLM.",
    )
    norm: Literal["layer", "batch"] = fixed(
        "layer",
        description="`batch` is masked batch normalisation, synchronised over all ranks. Its statistics "
        "come from one micro-batch at a time, so accumulation and world size change the result.",
    )
    dropout: Fraction = free(
        0.0,
        description="Dropout masks depend on the rank, so with it on, losses differ between world sizes.",
    )

    @property
    def sizes(self) -> dict[str, int | float]:
        """The sizes that `shape` gives."""
        return self.shape.model_dump(exclude_none=True) if self.shape else {}

    @property
    def title(self) -> str:
        """The model in words, such as `gpt2 (layers=6, width=384)`."""
        sizes = ", ".join(f"{name}={size:g}" for name, size in self.sizes.items())
        preset = f"{self.preset} ({sizes})" if sizes else self.preset
        return self.pretrained or self.config or preset

    @field_validator("config")
    @classmethod
    def _from_scratch(cls, config: str | None, info: ValidationInfo) -> str | None:
        if config is not None and info.data.get("pretrained") is not None:
            raise ValueError(
                "trains from scratch, and model.pretrained starts from weights; leave one of them out"
            )
        return config

    @field_validator("shape")
    @classmethod
    def _of_a_preset(cls, shape: Shape | None, info: ValidationInfo) -> Shape | None:
        """Without any size it is as if it were left out."""
        if shape is None or not shape.model_dump(exclude_none=True):
            return None
        for key in ("pretrained", "config"):
            if (folder := info.data.get(key)) is not None:
                raise ValueError(
                    f"model.{key}={folder} has its own sizes; set model.shape=null, or model.{key}=null"
                )
        return shape
