"""Models of images: ResNet-18 and ResNet-50, and the small network everybody tries on MNIST.

ResNet's parameters bear torchvision's names, so its state dicts load, and the stride of a
bottleneck sits on its 3×3 convolution, as there ("v1.5").
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from muster.models.configs import MnistNetConfig, ResNetConfig
from muster.models.norm import BatchNorm2d
from muster.models.plan import ParallelPlan

GRID = 4  # MnistNet's head sees this many by this many regions, whatever the image's size


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Past a block: projected where the block changes the shape."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(conv(inputs, outputs, 1, stride), BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3, stride), BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), BatchNorm2d(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = conv(inputs, width, 1), BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, outputs, 1), BatchNorm2d(outputs)
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


Block = type[BasicBlock] | type[Bottleneck]

LAYOUTS: dict[int, tuple[Block, tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


def make_layer(block: Block, inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
    outputs = width * block.expansion
    rest = [block(outputs, width, 1) for _ in range(depth - 1)]
    return nn.Sequential(block(inputs, width, stride), *rest)


class ResNet(nn.Module):
    """Images `[batch, channels, height, width]` to logits `[batch, classes]`."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        block, depths = LAYOUTS[config.depth]
        self.plan = ParallelPlan(blocks=(block.__name__,))
        small, grow = config.stem == "small", block.expansion
        self.conv1 = conv(config.channels, 64, 3 if small else 7, 1 if small else 2)
        self.bn1 = BatchNorm2d(64)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = make_layer(block, 64, 64, depths[0], 1)
        self.layer2 = make_layer(block, 64 * grow, 128, depths[1], 2)
        self.layer3 = make_layer(block, 128 * grow, 256, depths[2], 2)
        self.layer4 = make_layer(block, 256 * grow, 512, depths[3], 2)
        self.fc = nn.Linear(512 * grow, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class MnistNet(nn.Module):
    """Images `[batch, channels, height, width]`, 8 pixels or more, to logits `[batch, classes]`.

    Two convolutions, two linear layers, no batch norm: the same on any layout.
    """

    plan: ClassVar[ParallelPlan] = ParallelPlan(blocks=(ConvBlock.__name__,))

    def __init__(self, config: MnistNetConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = ConvBlock(config.channels, config.width)
        self.conv2 = ConvBlock(config.width, 2 * config.width)
        self.fc1 = nn.Linear(2 * config.width * GRID * GRID, config.hidden)
        self.fc2 = nn.Linear(config.hidden, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv2(F.max_pool2d(self.conv1(images), 2))
        # Windows that cover the image with GRID × GRID of them. Adaptive pooling would do as much,
        # but adds its gradients up in no fixed order on a GPU.
        stride = [side // GRID for side in x.shape[2:]]
        window = [side - (GRID - 1) * step for side, step in zip(x.shape[2:], stride, strict=True)]
        x = F.avg_pool2d(x, window, stride)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))
