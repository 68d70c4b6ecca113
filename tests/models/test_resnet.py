"""ResNet against transformers' own, whose code and parameter names differ from ours."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.models import build
from muster.models.configs import MnistNetConfig, ResNetConfig
from muster.models.resnet import MnistNet, ResNet

COUNTS = {"resnet-18": 11_689_512, "resnet-50": 25_557_032, "mnist-net": 151_306}


@pytest.mark.parametrize("preset", COUNTS)
def test_a_preset_has_exactly_its_parameters(preset):
    with torch.device("meta"):
        model = build(preset)
    assert sum(p.numel() for p in model.parameters()) == COUNTS[preset]


@pytest.mark.parametrize("preset", COUNTS)
def test_the_plan_names_blocks_that_the_model_has(preset):
    with torch.device("meta"):
        model = build(preset)
    assert model.plan.blocks
    for name in model.plan.blocks:
        assert sum(type(m).__name__ == name for m in model.modules()) >= 2


@pytest.mark.parametrize("depth", [18, pytest.param(50, marks=pytest.mark.full)])
def test_state_dicts_bear_torchvisions_names(depth):
    with torch.device("meta"):
        names = list(ResNet(ResNetConfig(depth)).state_dict())
    assert len(names) == {18: 122, 50: 320}[depth]
    convs, blocks = {18: 2, 50: 3}[depth], {18: (1, 1, 1, 1), 50: (2, 3, 5, 2)}[depth]
    known = rf"layer[1-4]\.\d\.((conv|bn)[1-{convs}]|downsample\.[01])|conv1|bn1|fc"
    assert all(re.fullmatch(known, name.rpartition(".")[0]) for name in names)
    for layer, last in enumerate(blocks, 1):
        assert f"layer{layer}.{last}.bn{convs}.running_var" in names
        assert f"layer{layer}.{last + 1}.conv1.weight" not in names
    assert ("layer1.0.downsample.0.weight" in names) == (depth == 50)


def theirs(ours: ResNet) -> nn.Module:
    """transformers' ResNet of the same depth with the weights of `ours`."""
    from transformers import ResNetConfig as Config
    from transformers import ResNetForImageClassification

    deep = ours.config.depth == 50
    config = Config(
        num_channels=ours.config.channels,
        hidden_sizes=[256, 512, 1024, 2048] if deep else [64, 128, 256, 512],
        depths=[3, 4, 6, 3] if deep else [2, 2, 2, 2],
        layer_type="bottleneck" if deep else "basic",
        num_labels=ours.config.classes,
    )
    model = ResNetForImageClassification(config).to(ours.fc.weight.dtype)
    model.load_state_dict({their_name(name): t for name, t in ours.state_dict().items()})
    return model


def their_name(name: str) -> str:
    kinds = {"conv": "convolution", "bn": "normalization", "0": "convolution", "1": "normalization"}
    if name.startswith("fc"):
        return name.replace("fc", "classifier.1")
    if found := re.match(r"layer(\d)\.(\d)\.(conv|bn|downsample\.)(\d)\.(.*)", name):
        stage, block, kind, number, rest = found.groups()
        where = f"resnet.encoder.stages.{int(stage) - 1}.layers.{block}"
        if kind == "downsample.":
            return f"{where}.shortcut.{kinds[number]}.{rest}"
        return f"{where}.layer.{int(number) - 1}.{kinds[kind]}.{rest}"
    kind, rest = re.match(r"(conv|bn)1\.(.*)", name).groups()
    return f"resnet.embedder.embedder.{kinds[kind]}.{rest}"


@pytest.mark.parametrize("depth", [18, pytest.param(50, marks=pytest.mark.full)])
def test_it_computes_what_transformers_resnet_computes(depth):
    torch.manual_seed(0)
    ours = ResNet(ResNetConfig(depth, classes=7)).double()
    reference = theirs(ours)
    images = torch.randn(2, 3, 46, 40, dtype=torch.float64)
    for mode in (True, False):  # training moves the running statistics that evaluation uses
        expected = reference.train(mode)(images).logits
        torch.testing.assert_close(ours.train(mode)(images), expected)
    F.cross_entropy(ours.train()(images), torch.tensor([1, 4])).backward()
    F.cross_entropy(reference.train()(images).logits, torch.tensor([1, 4])).backward()
    gradients = {their_name(n): p.grad for n, p in ours.named_parameters()}
    torch.testing.assert_close(gradients, {n: p.grad for n, p in reference.named_parameters()})


def test_the_small_stem_keeps_the_resolution_that_the_other_divides_by_four():
    sides = {}
    for stem in ("small", "imagenet"):
        model = ResNet(ResNetConfig(18, classes=3, channels=1, stem=stem)).eval()
        model.layer1.register_forward_hook(
            lambda _m, _i, out, stem=stem: sides.update({stem: out.shape[2:]})
        )
        assert model(torch.randn(2, 1, 32, 32)).shape == (2, 3)
    assert sides == {"small": (32, 32), "imagenet": (8, 8)}


@pytest.mark.parametrize("wrong", [{"depth": 34}, {"stem": "large"}])
def test_an_unknown_shape_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .* expected one of"):
        ResNetConfig(**wrong)


def mnist_reference(model: MnistNet, images: Tensor) -> Tensor:
    """For sizes that divide by eight, where its windows are those of adaptive pooling."""
    w = model.state_dict()
    x = F.conv2d(images, w["conv1.conv.weight"], w["conv1.conv.bias"], padding=1).clamp(min=0)
    x = F.adaptive_max_pool2d(x, images.shape[-1] // 2)
    x = F.conv2d(x, w["conv2.conv.weight"], w["conv2.conv.bias"], padding=1).clamp(min=0)
    x = F.adaptive_avg_pool2d(x, 4).flatten(1) @ w["fc1.weight"].T + w["fc1.bias"]
    return x.clamp(min=0) @ w["fc2.weight"].T + w["fc2.bias"]


@pytest.mark.parametrize("size", [8, 32])
def test_the_mnist_network_computes_what_its_description_says(size):
    model = MnistNet(MnistNetConfig()).double()
    images = torch.randn(3, 1, size, size, dtype=torch.float64)
    torch.testing.assert_close(model(images), mnist_reference(model, images))


@pytest.mark.parametrize("size", [8, 9, 11, 28, 33, 64])
def test_the_mnist_network_sees_every_pixel_of_any_size(size):
    torch.manual_seed(0)
    model = MnistNet(MnistNetConfig(channels=3))
    images = torch.rand(1, 3, size, size).requires_grad_()
    model(images).square().sum().backward()
    seen = images.grad.abs().sum((0, 1)) > 0
    even = size // 2 * 2  # halving drops an odd last row
    assert seen[:even, :even].all()


@pytest.mark.guides
@pytest.mark.parametrize("preset", COUNTS)
def test_every_parameter_has_a_part_in_the_loss(preset):
    torch.manual_seed(0)
    model = build(preset, classes=4)
    channels = model.config.channels
    model(torch.randn(4, channels, 32, 32)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def gradients(model: nn.Module, images: slice) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)[images]
    labels = torch.tensor([0, 1, 2, 1])[images]
    F.cross_entropy(model(x), labels, reduction="sum").backward()
    return [*(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def small_resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet(ResNetConfig(18, classes=3, stem="small")).double()


def half_the_images(mesh: object) -> list[Tensor]:
    """Summed over ranks, as the loop does it, and only rank 0 speaks: eleven million numbers."""
    rank = torch.distributed.get_rank()
    model = small_resnet()
    mine = gradients(model, slice(2 * rank, 2 * rank + 2))
    for grad in mine[: len(list(model.parameters()))]:
        torch.distributed.all_reduce(grad)
    return mine if rank == 0 else []


def test_two_ranks_give_the_gradients_of_one_process_with_all_images(ranks):
    torch.testing.assert_close(ranks(2)(half_the_images)[0], gradients(small_resnet(), slice(0, 4)))
