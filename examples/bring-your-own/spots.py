"""Segmentation: five clinics outline bright spots in noise; a small U-Net of our own, Dice.

fedmerit run spots.toml --out runs/spots
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CLINICS = ("Abbey", "Bridge", "Castle", "Dale", "Elm")
SIDE = 16


def scans(train=120, test=60, seed=0):
    """Return images (n, h, w, 1) and masks (n, h, w) of 0 and 1: spots of various places and sizes."""
    rng = np.random.default_rng(seed)
    at, radius = rng.uniform(4, SIDE - 4, (train + test, 2)), rng.uniform(2, 4, train + test)
    row, column = np.mgrid[:SIDE, :SIDE]
    mask = np.hypot(row - at[:, :1, None], column - at[:, 1:, None]) < radius[:, None, None]
    x = (mask + rng.normal(0, 0.5, mask.shape))[..., None]
    y = mask.astype(np.int64)
    clinics = rng.choice(CLINICS, train)
    return {"x_train": x[:train], "y_train": y[:train], "x_test": x[train:], "y_test": y[train:],
            "group_train": clinics}  # fmt: skip


class UNet(nn.Module):
    """One level down and up, with a skip; a logit per pixel."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x):
        skip = F.relu(self.first(x))
        deep = F.relu(self.up(F.relu(self.down(skip))))
        return self.last(torch.cat([skip, deep], 1))[:, 0]


def unet(input_shape, outputs):
    """Make the model; images have shape (h, w, channels), and the model gets (m, channels, h, w)."""
    return UNet(input_shape[2])


def dice(model, x, y):
    """Return a number per image in [0, 1], with a gradient: twice the overlap by the sum of the areas."""
    p = torch.sigmoid(model(x))
    return (2 * (p * y).sum((1, 2)) + 1) / (p.sum((1, 2)) + y.sum((1, 2)) + 1)
