"""What fits: free memory of a device, and what a model's activations take."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from fedmerit.errors import FedmeritError, InputError
from fedmerit.models import prepare
from fedmerit.utilities import check_logits, device_of, evaluation


def free_memory(device: torch.device) -> int:
    """Bytes that may be used unless told otherwise: 80 % of what a GPU has free, half of the machine's.

    Where this process may use only a share of the GPU, 80 % of what is left of that share.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        share = total if fraction is None else fraction(device) * total
        return int(0.8 * min(free, max(0, share - torch.cuda.memory_reserved(device))))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def try_forward(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[int, int]:
    """Number of classes, and bytes of all layers' outputs, twice, for one image in float32."""
    device = device_of(model)
    outputs = 4 * images.numel()

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal outputs
        outputs += 2 * 4 * output.numel() if isinstance(output, Tensor) else 0

    hooks = [module.register_forward_hook(count) for module in model.modules() if not list(module.children())]
    try:
        with evaluation(model):
            logits = check_logits(model(prepare(images, device)), labels.to(device))
    except FedmeritError:
        raise
    except Exception as error:
        shape = tuple(images.shape[1:])
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"the model fails on an image of shape {shape}: {why}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return logits.shape[1], outputs
