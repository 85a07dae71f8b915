"""A small ResNet: pictures [batch, 1, 12, 12] -> scores [batch, 4]."""

from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.relu(states + self.second(self.first(states)))


class ResNet(nn.Sequential):
    def __init__(self, channels: int, blocks: int) -> None:
        stem = [nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4)]
        super().__init__(*stem, *(Residual(channels) for _ in range(blocks)), *head)
