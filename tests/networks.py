"""Networks and modules of users, for tests."""

import sys

from torch import nn

from fedmerit.simulation.models import ResNet, build


def module_of(name, text, folder, monkeypatch):
    """A module of a user's own in the working directory, for as long as a fixture lives."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    yield name
    sys.modules.pop(name, None)


def network(name, channels):
    """A small network that fedmerit has; ResNets of so many channels. None for other names."""
    if name in ("mlp", "cnn", "cnn-pool"):
        return build(name, (6, 6, 1), 3)
    if name.startswith("resnet-"):
        return ResNet((1, 1, 1, 1), channels, 3, width=4, norm=name.removeprefix("resnet-"))
    return None


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 3)

    def forward(self, x):
        y = self.layer(x.flatten(1))
        return y if y.sum() > 0 else 2 * y
