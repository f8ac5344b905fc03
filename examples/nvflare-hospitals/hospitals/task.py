"""What the hospitals do: their data, their network, training and measuring it."""

import zlib

import numpy as np
import torch
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.collab import collab
from torch import nn

import fedmerit.data
from fedmerit.nvflare import torch_scoring

HOSPITALS = ("Abbey", "Bridge", "Castle", "Dale", "Harbour")
NOISY = {"Harbour": 0.8}  # this share of its labels is random


def local_data(hospital: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one hospital: a fifth of fashion-mini."""
    dataset = fedmerit.data.load("fashion-mini")
    parts = fedmerit.data.split(dataset.y_train, len(HOSPITALS), "iid", rng=np.random.default_rng(0))
    mine = parts[HOSPITALS.index(hospital)]
    labels = dataset.y_train[mine]
    if hospital in NOISY:
        labels = fedmerit.data.label_noise(labels, NOISY[hospital], 10, np.random.default_rng(1))
    return dataset.x_train[mine], labels


def network() -> nn.Module:
    """A small convolutional network with fresh weights."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


def train(model: FLModel) -> FLModel:
    """Train the model on this site's images: what stands between flare.receive() and flare.send()."""
    hospital = collab.site_name
    images, labels = local_data(hospital)
    net = network()
    net.load_state_dict({name: torch.as_tensor(array) for name, array in model.params.items()})
    x, y = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1, torch.from_numpy(labels)
    # from the same model the same update must not come twice, not even in another job
    seed = zlib.crc32(f"{collab.fl_ctx.get_job_id()} {model.current_round} {hospital}".encode())
    generator = torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(net.parameters(), lr=0.002)
    for _ in range(2):
        for batch in torch.randperm(len(y), generator=generator).split(32):
            loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
            adam.zero_grad()
            loss.backward()
            adam.step()
    return FLModel(params=net.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": len(y)})


# What is paid for: the probability that the network gives to the right answer.
scoring = torch_scoring(network, "expected-accuracy")


def first_model() -> dict[str, torch.Tensor]:
    """The model that round 1 starts from; on the server."""
    return network().state_dict()


def test_set() -> tuple[np.ndarray, np.ndarray]:
    """What everybody is measured on; on the server."""
    dataset = fedmerit.data.load("fashion-mini")
    return dataset.x_test, dataset.y_test
