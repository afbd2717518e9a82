"""
Programs at which Dynamo breaks the graph. Their weights are random. The catalogue adds cases of the suites ``paper`` and
``modern`` (ALSO).

Six of the eight models of the GraphMend paper exist in transformers. They break in other places
today.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch import nn

from .case import adding, Inputs, normal, sized, Suite
from .models.breaking import (
    AdaptiveOde,
    AssertedLoss,
    CheckedLoss,
    FlowPolicy,
    GreedyGeneration,
    LayerDropEncoder,
    LoggedLoss,
)
from .models.hub import token_inputs, transformers_model
from .models.language import Decoder


if TYPE_CHECKING:
    from collections.abc import Callable


SUITE = Suite(("eager", "no_cg", "stock_cg", "pygraph", "mend_off"), breaks_graphs=True, selects_in_loop=True)
# Cases of other suites that break the graph.
ALSO = (
    "blenderbot_small_train",
    "distilgpt2_train",
    "longformer",
    "maskrcnn",
    "phi4_mini",
    "speech_transformer",
    "trocr_train",
)
mend = adding("mend", capturable=False)

LAYERDROP = "layerdrop reads a random number on the CPU for each layer"
COPIED_CONFIG = "copy.deepcopy of the configuration"
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


# own


def _classified(batch: int, width: int) -> Callable[[], Inputs]:
    return lambda: ((torch.randn(batch, width), torch.randint(1000, (batch,))), {})


def _policy(asks_tensor: bool) -> Callable[[bool], nn.Module]:
    return lambda small: FlowPolicy(asks_tensor, 3, 64, 1) if small else FlowPolicy(asks_tensor)


def _generation(small: bool) -> nn.Module:
    if small:
        return GreedyGeneration(Decoder(64, 64, 1, 4, 2, 128, 16), 2, 4)
    return GreedyGeneration(Decoder(32000, 1024, 12, 16, 8, 4096, 128), 4, 32)


CHUNK = sized(
    normal((1, 50, 32), (1, 50, 1024), dtype=torch.bfloat16), normal((1, 5, 32), (1, 5, 64), dtype=torch.bfloat16)
)
OWN: dict[str, tuple[Any, ...]] = {
    # Each has the module, its inputs, the mode, the reason of the graph break, and other fields of Case.
    "flow_clock": (_policy(True), CHUNK, "inference", "the loop asks a tensor", {"dtype": torch.bfloat16}),
    "flow_counter": (
        _policy(False),
        CHUNK,
        "inference",
        "none: flow_clock with a counter in Python",
        {"dtype": torch.bfloat16},
    ),
    "adaptive_ode": (
        lambda small: AdaptiveOde(8, 16) if small else AdaptiveOde(128, 512),
        sized(normal((64, 128)), normal((4, 8))),
        "inference",
        "the solver stops on a tensor",
        {"min_gain_over_stock": 8.0},
    ),
    "greedy_generation": (
        _generation,
        sized(lambda: ((torch.randint(3, 32000, (4, 1)),), {}), lambda: ((torch.randint(3, 64, (2, 1)),), {})),
        "inference",
        "the loop stops on a tensor",
        {},
    ),
    "layerdrop_train": (
        lambda small: LayerDropEncoder(64, 2) if small else LayerDropEncoder(512, 6),
        sized(normal((8, 128, 512)), normal((2, 8, 64))),
        "training",
        LAYERDROP,
        {},
    ),
    **{
        name: (
            lambda small, kind=kind: kind(64, 2) if small else kind(1024, 12),
            sized(_classified(256, 1024), _classified(4, 64)),
            "training",
            obstacle,
            {"max_breaks": 0},
        )
        for name, kind, obstacle in (
            ("logged_loss", LoggedLoss, "a logging call in the loss"),
            ("checked_loss", CheckedLoss, "a branch on a tensor that raises"),
            ("asserted_loss", AssertedLoss, "an assert on a tensor"),
        )
    },
}
for name, (module, inputs, mode, obstacle, more) in OWN.items():
    mend(name, module, inputs, mode, about="own", obstacle=obstacle, **more)


# transformers


def _pictures(small: bool) -> Inputs:
    side = 64 if small else 512
    return (), {"pixel_values": torch.randn(1, 3, side, side)}


def _speech(small: bool) -> Inputs:
    return (), {
        "input_features": torch.randn(1, 80, 100 if small else 3000),
        "labels": torch.randint(3, 200, (1, 16)),
    }


def _waves(small: bool) -> Inputs:
    return (), {"input_values": torch.randn(2, 800 if small else 32000), "labels": torch.randint(1, 30, (2, 5))}


def _picture_and_text(small: bool) -> Inputs:
    side, text = (28, 20) if small else (336, 640)
    image_tokens = (side // 14) ** 2
    tokens = torch.randint(3, 200, (1, text))
    tokens[:, 3 : 3 + image_tokens] = 255
    values = torch.randn(1, 3, side, side)
    return (), {"input_ids": tokens, "pixel_values": values, "attention_mask": torch.ones_like(tokens)}


def _detr(small: bool) -> dict[str, Any]:
    import transformers

    sizes = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]} if small else {}
    backbone = transformers.ResNetConfig(out_features=["stage4"], **sizes)
    return {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": backbone}


def _llava(small: bool) -> dict[str, Any]:
    vision: dict[str, Any] = {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 28 if small else 336}
    text: dict[str, Any] = {"model_type": "llama", "vocab_size": 256, "use_cache": False}
    for part, width, layers in ((vision, 1024, 12), (text, 1024, 12)):
        part["hidden_size"] = 64 if small else width
        part |= {"intermediate_size": 4 * part["hidden_size"], "num_hidden_layers": 2 if small else layers}
        part["num_attention_heads"] = part["hidden_size"] // 16 if small else 16
    return {"vision_config": vision, "text_config": text, "image_token_id": 255}


def _whisper(small: bool) -> dict[str, Any]:
    positions = {"max_source_positions": 50} if small else {}
    return {"suppress_tokens": None, "begin_suppress_tokens": None, "vocab_size": 1000, **SPECIAL, **positions}


TEXT = token_inputs(1000, 8, 128)
BOTH = token_inputs(1000, 8, 128, decoder=True)
LONG = token_inputs(1000, 1, 1024, decoder=True)
SMALL_VOCABULARY = {"vocab_size": 1000, **SPECIAL}
# Stock records a path of graphs for each combination of dropped layers. With all layers, rows ran out of time.
FEWER = {"encoder_layers": 6, "decoder_layers": 6, **SMALL_VOCABULARY}
TRANSFORMERS: dict[str, tuple[Any, ...]] = {
    # Each has the class, its configuration, its inputs, the mode, and the reason of the graph break.
    "bart_train": ("BartForConditionalGeneration", FEWER, BOTH, "training", LAYERDROP),
    "biogpt_train": ("BioGptForCausalLM", {"num_hidden_layers": 12, **SMALL_VOCABULARY}, TEXT, "training", LAYERDROP),
    "pegasus_train": ("PegasusForCausalLM", SMALL_VOCABULARY, TEXT, "training", LAYERDROP),
    "m2m100_train": ("M2M100ForConditionalGeneration", FEWER, BOTH, "training", LAYERDROP),
    "led": (
        "LEDForConditionalGeneration",
        {"attention_window": 256, **SMALL_VOCABULARY},
        LONG,
        "inference",
        ".item() on the attention mask",
    ),
    "whisper_train": (
        "WhisperForConditionalGeneration",
        _whisper,
        _speech,
        "training",
        f"{LAYERDROP}; {COPIED_CONFIG}",
    ),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 1000}, BOTH, "inference", COPIED_CONFIG),
    "wav2vec2": ("Wav2Vec2ForCTC", {}, _waves, "inference", "a branch on a tensor that raises"),
    "detr": ("DetrForObjectDetection", _detr, _pictures, "inference", "a branch on whether all values are finite"),
    "llava": ("LlavaForConditionalGeneration", _llava, _picture_and_text, "inference", "torch._check_tensor_all"),
}
# Of these models the paper repairs all breaks.
REPAIRED = ("biogpt_train", "pegasus_train", "t5")


def _built(class_name: str, options: Any) -> Callable[[bool], nn.Module]:
    def build(small: bool) -> nn.Module:
        return transformers_model(class_name, small, **(options(small) if callable(options) else options))

    return build


for name, (class_name, options, inputs, mode, obstacle) in TRANSFORMERS.items():
    mend(
        name,
        _built(class_name, options),
        inputs,
        mode,
        dtype=torch.bfloat16 if mode == "training" else torch.float32,
        about=f"transformers' {class_name}",
        obstacle=obstacle,
        needs=("transformers",),
        max_breaks=0 if name in REPAIRED else None,
        ring=3,
        gib=8,
    )
