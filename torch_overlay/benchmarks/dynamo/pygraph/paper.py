"""
The 25 workloads of the paper's evaluation (table 1), with its batch sizes, in float16 or
bfloat16 inference and bfloat16 autocast training, from configurations with random weights.

Models that are small, or whose library is not kept up, are defined in ``models``, from
their publications; none was compared with the original. ``about`` says what stands in for
what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .case import adding, images, Inputs, normal, sized, WORKLOADS
from .models.hpc import EquationOfState, TurbulentKineticEnergy
from .models.hub import token_inputs, torchvision_model, transformers_model
from .models.language import BertPretraining
from .models.multimodal import CLIP, DALLE2
from .models.speech import SpeechTransformer
from .models.tables import DeepRecommender, DLRM
from .models.vision import Discriminator, EfficientDet, LCNet


SUITE = WORKLOADS
add = adding("paper")


def paper(name: str, label: str, *args: Any, **kwargs: Any) -> None:
    add(name, *args, paper=label, **kwargs)


# HPC


def ocean_grid(small: bool) -> tuple[int, int, int]:
    """Of about 2**20 cells."""
    return (16, 16, 4) if small else (204, 204, 26)


def _eos_inputs(small: bool) -> Inputs:
    x, y, z = ocean_grid(small)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float64).uniform_(low, high)

    return (uniform(0.01, 10, x, y, z), uniform(-2, 20, x, y, z), uniform(0, 1000, 1, 1, z)), {}


def _tke_inputs(small: bool) -> Inputs:
    x, y, z = grid = ocean_grid(small)

    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64) + 0.5

    def signed(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64)

    states = [signed(*grid, 3) for _ in range(3)]
    masks = [(torch.rand(grid) < 0.8).double() for _ in range(3)]
    spacings = [positive(n) for n in (x, x, y, y, z, z, y, y)]
    bottom = torch.randint(0, z, (x, y))
    fields = [positive(*grid), positive(*grid), signed(*grid), signed(x, y)]
    energies = [positive(*grid, 3), signed(*grid, 3)]
    return (*states, *masks, *spacings, bottom, *fields, *energies), {}


paper(
    "eos",
    "EOS",
    lambda small: EquationOfState(),
    _eos_inputs,
    dtype=torch.float64,
    about="own, for TorchBench's pyhpc_equation_of_state",
    obstacle="one kernel: launching a graph costs more than it",
    quick=True,
)
paper(
    "tke",
    "TKE",
    lambda small: TurbulentKineticEnergy(),
    _tke_inputs,
    dtype=torch.float64,
    about="own, for TorchBench's pyhpc_turbulent_kinetic_energy",
    obstacle="21 inputs of 174 MiB to copy",
)


# recommenders


def _ratings(batch: int, dtype: torch.dtype) -> Callable[[bool], Inputs]:
    return sized(normal((batch, 197951), dtype=dtype), normal((4, 512), dtype=dtype))


def _recommender(small: bool) -> nn.Module:
    return DeepRecommender(512, (32, 32, 64)) if small else DeepRecommender(197951)


def _dlrm_inputs(small: bool) -> Inputs:
    batch, rows, lookups = (8, 100, 4) if small else (2048, 1_000_000, 100)
    offsets = [torch.arange(0, batch * lookups, lookups) for _ in range(8)]
    indices = [torch.randint(rows, (batch * lookups,)) for _ in range(8)]
    return (torch.randn(batch, 512, dtype=torch.float16), offsets, indices), {}


paper(
    "deeprecommender_train",
    "DR-T",
    _recommender,
    _ratings(256, torch.float32),
    "training",
    dtype=torch.bfloat16,
    about="own, for TorchBench's nvidia_deeprecommender",
    obstacle="input and output gradient of 193 MiB to copy",
    ring=3,
    gib=10,
    alone=True,
)
paper(
    "deeprecommender_infer",
    "DR-I",
    _recommender,
    _ratings(8192, torch.float16),
    dtype=torch.float16,
    about="own, for TorchBench's nvidia_deeprecommender",
    obstacle="one input of 3 GiB to copy, read by cuBLAS",
    ring=2,
    gib=40,
)
paper(
    "dlrm",
    "DLRM",
    lambda small: DLRM(100 if small else 1_000_000),
    _dlrm_inputs,
    dtype=torch.float16,
    about="own, for TorchBench's dlrm",
    obstacle="17 inputs; index tables from Python lists",
    capturable=False,
    quick=True,
    gib=6,
)


# speech, text and images


def _speech_inputs(small: bool) -> Inputs:
    time, words = (32, 8) if small else (160, 20)
    targets = torch.randint(3, 4000, (1, words))
    targets[:, -4:] = SpeechTransformer.padding
    frames = torch.randn(1, time, 320, dtype=torch.float16)
    return (frames, torch.tensor([time - 10], dtype=torch.int32), targets), {}


def _clip_tokens(batch: int, length: int = 77) -> torch.Tensor:
    tokens = torch.randint(1, 49405, (batch, length))
    tokens[:, 20] = 49407
    return tokens


def _dalle2(small: bool) -> nn.Module:
    return DALLE2(1, 1, 16, (1, 2), 16) if small else DALLE2()


paper(
    "speech_transformer",
    "ST",
    lambda small: SpeechTransformer(1, 128, 2, 256) if small else SpeechTransformer(),
    _speech_inputs,
    dtype=torch.float16,
    about="own, for TorchBench's speech_transformer",
    obstacle="a NumPy scalar in every attention; graph breaks where lengths and padding are read",
    capturable=False,
    quick=True,
    alone=True,
)
paper(
    "dalle2",
    "DALLE2",
    _dalle2,
    lambda small: ((_clip_tokens(1, 256),), {}),
    about="own, for TorchBench's DALLE2_pytorch: its stages and sizes, in another code",
    obstacle="the causal mask is a CPU tensor that every block copies to the GPU; random numbers",
    not_as_eager="it draws random numbers in another way",
    in_tf32=True,
    capturable=False,
    gib=4,
)
paper(
    "mm_clip",
    "MMC",
    lambda small: CLIP(1 if small else 12),
    lambda small: ((torch.randn(1, 3, 224, 224, dtype=torch.float16), _clip_tokens(2 if small else 32)), {}),
    dtype=torch.float16,
    about="own, for TorchBench's torch_multimodal_clip",
    obstacle="the causal mask is a CPU tensor",
    capturable=False,
    quick=True,
)


# vision


def _mask_rcnn(small: bool) -> nn.Module:
    from torchvision.models.detection import maskrcnn_resnet50_fpn

    sizes = {"min_size": 96, "max_size": 128} if small else {}
    # As many objects as an image of COCO has; with these weights all detections are alike.
    module = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, box_detections_per_img=8, **sizes)
    with torch.no_grad():
        # Random weights are never sure enough to detect anything.
        module.roi_heads.box_predictor.cls_score.weight.mul_(40)
    return module


def _detection_targets(small: bool) -> Inputs:
    # Normalization needs more than one value for each channel.
    batch, size = (2, 64) if small else (1, 640)
    boxes = torch.tensor([[10.0, 10, 60, 90], [30, 20, 100, 110], [0, 0, 0, 0]])
    classes = torch.tensor([1, 7, -1])
    return (torch.randn(batch, 3, size, size), boxes.expand(batch, 3, 4).clone(), classes.expand(batch, 3).clone()), {}


paper(
    "maskrcnn",
    "VM",
    _mask_rcnn,
    lambda small: (([torch.rand((3, 96, 128) if small else (3, 427, 640))],), {}),
    about="torchvision's maskrcnn_resnet50_fpn, on random images, 8 detections in each",
    obstacle="26 graph breaks, CPU anchors, shapes that depend on the data",
    not_as_eager="rounding decides which boxes the model keeps",
    needs=("torchvision",),
    built_on_cpu=True,
    capturable=False,
    alone=True,
)
paper(
    "alexnet",
    "ALNET",
    torchvision_model("alexnet"),
    images(2, small_size=224),
    dtype=torch.float16,
    about="torchvision's",
    needs=("torchvision",),
)
paper(
    "efficientdet_train",
    "TEFD",
    lambda small: EfficientDet(64, 16, 1, shallow=True) if small else EfficientDet(),
    _detection_targets,
    "training",
    without_tf32=True,
    about="own, for TorchBench's timm_efficientdet (EfficientDet-D1), in float32: rounding decides gradients in bfloat16",
    obstacle="the number of boxes depends on the data: a graph break",
    capturable=False,
    alone=True,
)
paper(
    "dcgan_train",
    "DCGAN",
    lambda small: Discriminator(8 if small else 64),
    sized(normal((32, 3, 64, 64)), normal((4, 3, 64, 64))),
    "training",
    dtype=torch.bfloat16,
    about="own; TorchBench trains the discriminator alone",
    quick=True,
)
paper(
    "densenet121",
    "DNET",
    torchvision_model("densenet121"),
    images(64),
    dtype=torch.float16,
    about="torchvision's",
    obstacle="18 MiB to copy",
    needs=("torchvision",),
)
paper(
    "lcnet",
    "LCNET",
    lambda small: LCNet(),
    images(256),
    dtype=torch.float16,
    about="own, for timm's lcnet_050",
    obstacle="74 MiB to copy, read by cuDNN",
    quick=True,
)


# language


def language(
    name: str,
    label: str,
    class_name: str,
    inputs: Callable[[bool], Inputs],
    mode: str = "inference",
    options: dict[str, Any] | None = None,
    about: str = "",
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> None:
    def build(small: bool) -> nn.Module:
        return transformers_model(class_name, small, **(options or {}))

    dtype = dtype or (torch.float16 if mode == "inference" else torch.bfloat16)
    about = about or f"transformers' {class_name}"
    paper(name, label, build, inputs, mode, dtype=dtype, about=about, needs=("transformers",), **kwargs)


def _bert_inputs(small: bool) -> Inputs:
    shape = (2, 16) if small else (16, 128)
    return (torch.randint(2, 20005, shape), torch.randint(1, 3, shape)), {}


paper(
    "bert_pretraining",
    "BERT",
    lambda small: BertPretraining(20005, 64, 1, 2) if small else BertPretraining(),
    _bert_inputs,
    "training",
    dtype=torch.bfloat16,
    about="own, for TorchBench's BERT_pytorch",
    obstacle="an output gradient of 156 MiB to copy",
    gib=4,
    alone=True,
)

XLNET = {"d_model": 1024, "n_layer": 24, "n_head": 16, "d_inner": 4096}
# The position table on the CPU that kept the paper's baseline from any graph is gone from
# transformers; modern.py has it back in xlnet_cpu_positions.
language("xlnet_infer", "XLNET-I", "XLNetLMHeadModel", token_inputs(32000, 1, 512), options=XLNET, gib=3)
language(
    "xlnet_train",
    "XLNET-T",
    "XLNetLMHeadModel",
    token_inputs(32000, 8, 512),
    "training",
    options=XLNET,
    ring=3,
    gib=20,
    alone=True,
)
language(
    "mt5_train",
    "MTCG-T",
    "MT5ForConditionalGeneration",
    token_inputs(250112, 16, 128, decoder=True),
    "training",
    ring=3,
    gib=20,
    alone=True,
)
language(
    "mt5_infer", "MTCG-I", "MT5ForConditionalGeneration", token_inputs(250112, 16, 128, decoder=True), ring=3, gib=4
)
language("mobilebert_qa", "MBERT", "MobileBertForQuestionAnswering", token_inputs(30522, 128, 128, labels="positions"))
language(
    "debertav2_qa",
    "DBV2",
    "DebertaV2ForQuestionAnswering",
    token_inputs(128100, 1, 512, labels="positions"),
    options={"hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24, "intermediate_size": 6144},
    gib=5,
)
language(
    "blenderbot_small_train",
    "BSCG",
    "BlenderbotSmallForConditionalGeneration",
    token_inputs(50265, 64, 128, decoder=True),
    "training",
    obstacle="layerdrop reads a random number on the CPU for each layer: graph breaks",
    ring=3,
    gib=20,
)
language(
    "distilgpt2_train",
    "DGPT2",
    "GPT2LMHeadModel",
    token_inputs(50257, 16, 512),
    "training",
    options={"n_layer": 6},
    about="transformers' GPT2LMHeadModel with 6 layers",
    obstacle="a warning in the loss function: graph breaks",
    ring=3,
    gib=20,
    alone=True,
)
language(
    "trocr_train",
    "STCLM",
    "TrOCRForCausalLM",
    token_inputs(10000, 256, 128),
    "training",
    options={
        "vocab_size": 10000,
        "d_model": 256,
        "decoder_layers": 6,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 2048,
    },
    about="transformers' TrOCRForCausalLM in the sizes of Speech2Text2ForCausalLM, which left the library",
    obstacle="layerdrop: a graph break",
    ring=3,
    gib=20,
)
language(
    "deberta_mlm_train",
    "DMLM",
    "DebertaForMaskedLM",
    token_inputs(50265, 8, 512),
    "training",
    about="transformers' DebertaForMaskedLM, in float32: Inductor overflows its mask in bfloat16",
    dtype=torch.float32,
    ring=3,
    gib=12,
)
