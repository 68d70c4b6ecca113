"""Which of some classes an image belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster import models
from muster.data import corpus
from muster.data.corpus import Split
from muster.data.images.source import Images, ImageSample, ImageSource, find_classes, read
from muster.data.loader import Batch
from muster.errors import RecipeError
from muster.models.configs import MnistNetConfig, ResNetConfig
from muster.recipe.model import Model
from muster.recipe.schema import Recipe
from muster.tasks.base import Counts, Example, Score, Task

RESNET_SIZE = 224  # pixels a side, unless data.image_size says otherwise
MNIST_SIZE = 28
SMALLEST = 8
SMALL_STEM_BELOW = 64
ASSETS = ("classes", "channels", "size", "mean", "std")


class ImageClassification(Task):
    """Pixels scaled to one size and normalised, a convolutional model, cross entropy."""

    def __init__(self, recipe: Recipe, assets: dict[str, Any] | None = None) -> None:
        self.recipe = recipe
        self._sources: dict[Split, ImageSource | None] = {}
        self._training_images: Images | None = None
        self.preset = _image_preset(recipe.model)
        assets = assets or self._assets_from_training_data()
        self.assets = {name: assets[name] for name in ASSETS}
        self.classes: list[int | str] = self.assets["classes"]
        self.channels: int = self.assets["channels"]
        self.size: int = self.assets["size"]
        self._mean = np.array(self.assets["mean"], np.float32)[:, None, None]
        self._std = np.array(self.assets["std"], np.float32)[:, None, None]

    def build_model(self) -> nn.Module:
        fields: dict[str, Any] = {"classes": len(self.classes), "channels": self.channels}
        if isinstance(self.preset, ResNetConfig):
            fields["stem"] = "small" if self.size < SMALL_STEM_BELOW else "imagenet"
        return models.build(self.recipe.model.preset, **fields)

    def source(self, split: Split) -> ImageSource | None:
        if split not in self._sources:
            images = self._images(split)
            self._sources[split] = None if images is None else self._usable(images, split)
        return self._sources[split]

    def collate(
        self, samples: Sequence[ImageSample], epoch: int | None, longest: float | None = None
    ) -> Batch:
        pixels = np.stack([sample.pixels for sample in samples]).astype(np.float32)
        images = (pixels / 255 - self._mean) / self._std
        return Batch(
            ids=[sample.id for sample in samples],
            tensors={
                "images": torch.from_numpy(images),
                "labels": torch.tensor([sample.label for sample in samples]),
            },
            units=len(samples),
            filled=len(samples),
            cells=len(samples),
        )

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output.float(), batch["labels"], reduction="sum")

    def score(self, output: Tensor, batch: Batch) -> Score:
        labels, predictions = batch["labels"].tolist(), output.argmax(-1).tolist()
        examples = [
            Example(
                i, str(self.classes[label]), str(self.classes[prediction]), int(label != prediction)
            )
            for i, label, prediction in zip(batch.ids, labels, predictions, strict=True)
        ]
        wrong = sum(example.edits for example in examples)
        counts = {
            "correct": float(len(labels) - wrong),
            "images": float(len(labels)),
            "nll": float(self.loss(output, batch)),
        }
        return Score(counts, examples)

    def summarise(self, counts: Counts) -> dict[str, float]:
        images = counts["images"]
        return {
            "accuracy": counts["correct"] / images,
            "loss": counts["nll"] / images,
            "images": images,
        }

    def example(self) -> ImageSample:
        return ImageSample(0, np.zeros((self.channels, self.size, self.size), np.uint8), 0)

    def _assets_from_training_data(self) -> dict[str, Any]:
        """What a checkpoint needs in order to classify without the training data."""
        images = self._images("train")
        assert images is not None
        size = self.recipe.data.image_size
        if size is None and isinstance(self.preset, MnistNetConfig):
            size = max(images.size or MNIST_SIZE, SMALLEST)
        return {
            "classes": find_classes(images),
            "channels": images.channels,
            "size": size or RESNET_SIZE,
            "mean": list(images.scale.mean),
            "std": list(images.scale.std),
        }

    def _usable(self, images: Images, split: Split) -> ImageSource:
        return ImageSource(
            images,
            self.classes,
            self.channels,
            self.size,
            key=f"data.{split}",
            cache_bytes=int(self.recipe.data.cache_gib * 2**30),
        )

    def _images(self, split: Split) -> Images | None:
        if split == "train" and self._training_images is not None:
            return self._training_images
        data = self.recipe.data
        (train,) = data.sources
        named = {"train": train, "validation": data.validation, "test": data.test}[split]
        spec = named or train
        if named:
            files = corpus.files(named, f"data.{split}", split, content="images")
        else:
            files = corpus.sibling_split(train, split, content="images")
            if not files and (spec, split) != (corpus.DIGITS, "test"):
                return None
        images = read(
            spec,
            files,
            split,
            image_column=data.image_column,
            label_column=data.label_column,
            max_files=data.max_parquet_files if split == "train" else None,
            max_bad_fraction=data.max_bad_fraction,
        )
        if split == "train":
            self._training_images = images
        return images


def _image_preset(wanted: Model) -> ResNetConfig | MnistNetConfig:
    """The preset, if it is an image model and no key is set that it does not use."""
    models.check_preset("image-classification", wanted.preset, wanted.sizes)
    config = models.PRESETS[wanted.preset]
    assert isinstance(config, ResNetConfig | MnistNetConfig)
    for key in ("pretrained", "config", "vocab_size", "lora", "norm", "dropout"):
        if getattr(wanted, key) != Model.model_fields[key].default:
            raise RecipeError(f"model.{key}: does not apply to {wanted.preset}; leave it out")
    return config
