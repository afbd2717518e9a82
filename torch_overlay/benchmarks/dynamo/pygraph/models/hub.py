"""Models of libraries, which need not be installed, from configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def torchvision_model(name: str) -> Callable[[bool], nn.Module]:
    def build(small: bool) -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)()

    return build


def without_dropout(config: Any) -> Any:
    """With a probability that drops nothing but keeps the kernels, as benchmarks/dynamo does."""
    for name in dir(config):
        # A model without layerdrop draws a number for each layer all the same.
        is_off = "layerdrop" in name and getattr(config, name) == 0
        if "drop" in name and isinstance(getattr(config, name), float) and not is_off:
            setattr(config, name, 1e-30)
    return config


SMALL_VOCABULARY = 1000
SHRUNK = {"num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"}


def transformers_model(class_name: str, small: bool, *, drops: bool = False, **options: Any) -> nn.Module:
    import transformers

    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**options)
    if not drops:
        config = without_dropout(config)
    config.use_cache = False
    if small:
        config.vocab_size = SMALL_VOCABULARY
        for name in SHRUNK:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, 1)
    return model_class(config)


def token_inputs(
    vocabulary: int, batch: int, length: int, *, labels: str = "labels", decoder: bool = False
) -> Callable[[bool], tuple[tuple[Any, ...], dict[str, Any]]]:
    """``labels`` is "labels", "positions" or "". A decoder gets the encoder's tensor, as in benchmarks/dynamo."""

    def inputs(small: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shape = (2, 16) if small else (batch, length)
        words = SMALL_VOCABULARY if small else vocabulary
        found = {"input_ids": torch.randint(2, words, shape)}
        if decoder:
            found["decoder_input_ids"] = found["input_ids"]
        if labels == "positions":
            found |= {name: torch.randint(shape[1], shape[:1]) for name in ("start_positions", "end_positions")}
        elif labels:
            found[labels] = torch.randint(2, words, shape)
        return (), found

    return inputs
