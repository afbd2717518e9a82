"""
Cases rewritten in JAX: the same computation, with the weights and inputs that PyTorch has.

    python -m pygraph.jax_peer CASE FILE ROUNDS

A process of its own, without PyTorch, on the device that PyTorch uses meanwhile only to hold
memory. FILE has the weights and inputs, pickled: NumPy's arrays, and whether they hold the
bits of bfloat16, which NumPy lacks. FILE with the suffix .out gets the outputs for each set
of inputs; the last line printed is JSON, with microseconds a call. ``jax.jit`` is as
it comes, command buffers included, but for the precision of float32 products, which is
PyTorch's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import pickle
import sys
from pathlib import Path
from typing import Any, TYPE_CHECKING

import numpy as np

from .timing import time_interleaved


if TYPE_CHECKING:
    from collections.abc import Callable

    Arrays = dict[str, Any]
    Model = Callable[..., Any]

# Seconds of a round
ROUND_S = 0.1


def available(case: str) -> bool:
    return case in MODELS and importlib.util.find_spec("jax") is not None


# models, by the names of PyTorch's parameters


def pointwise(weights: Arrays, *xs: Any) -> Any:
    from jax import numpy as jnp

    result = xs[0]
    for x in xs[1:]:
        result = jnp.sin(result) + x
    return result * 2


def mlp(weights: Arrays, x: Any) -> Any:
    from jax import nn

    for i in range(len(weights) // 2):
        x = nn.gelu(_linear(weights, f"layers.{i}", x), approximate=False)
    return x


def bert(weights: Arrays, *, input_ids: Any, labels: Any, heads: int = 12) -> Arrays:
    """BertForMaskedLM: token ids and labels (batch, length) to a loss and logits (batch, length, words)."""
    from jax import nn, numpy as jnp

    batch, length = input_ids.shape
    embeddings = {
        name: weights[f"bert.embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    }
    x = embeddings["word"][input_ids] + embeddings["token_type"][0] + embeddings["position"][:length]
    x = _layer_norm(weights, "bert.embeddings.LayerNorm", x)
    for layer in itertools.takewhile(
        lambda layer: f"{layer}.output.dense.weight" in weights,
        (f"bert.encoder.layer.{i}" for i in itertools.count()),
    ):
        q, k, v = (
            _linear(weights, f"{layer}.attention.self.{name}", x).reshape(batch, length, heads, -1)
            for name in ("query", "key", "value")
        )
        attended = nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = x + _linear(weights, f"{layer}.attention.output.dense", attended)
        x = _layer_norm(weights, f"{layer}.attention.output.LayerNorm", x)
        wide = nn.gelu(_linear(weights, f"{layer}.intermediate.dense", x), approximate=False)
        x = _layer_norm(weights, f"{layer}.output.LayerNorm", x + _linear(weights, f"{layer}.output.dense", wide))
    head = "cls.predictions.transform"
    x = _layer_norm(weights, f"{head}.LayerNorm", nn.gelu(_linear(weights, f"{head}.dense", x), approximate=False))
    # The weights of the words, which the decoder shares.
    logits = x @ embeddings["word"].T + weights["cls.predictions.bias"]
    likelihood = jnp.take_along_axis(nn.log_softmax(logits.astype(jnp.float32)), labels[..., None], -1)
    return {"loss": -likelihood.mean().astype(logits.dtype), "logits": logits}


def _linear(weights: Arrays, name: str, x: Any) -> Any:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _layer_norm(weights: Arrays, name: str, x: Any, epsilon: float = 1e-12) -> Any:
    from jax import lax, numpy as jnp

    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    normal = centered * lax.rsqrt((centered * centered).mean(-1, keepdims=True) + epsilon)
    return (normal * weights[f"{name}.weight"] + weights[f"{name}.bias"]).astype(x.dtype)


MODELS: dict[str, Model] = {
    "pointwise_16x4MiB": pointwise,
    "pointwise_2x4KiB": pointwise,
    "mlp_20x64": mlp,
    "bert_inference": bert,
}


def run(case: str, file: Path, rounds: int) -> dict[str, Any]:
    import jax
    from jax import numpy as jnp

    def array(bits: np.ndarray, is_bfloat16: bool) -> Any:
        value = jnp.asarray(bits)
        return jax.lax.bitcast_convert_type(value, jnp.bfloat16) if is_bfloat16 else value

    def bits(value: Any) -> tuple[np.ndarray, bool]:
        is_bfloat16 = value.dtype == jnp.bfloat16
        return np.asarray(jax.lax.bitcast_convert_type(value, jnp.uint16) if is_bfloat16 else value), is_bfloat16

    def arrays(found: dict[str, tuple[np.ndarray, bool]]) -> Arrays:
        return {name: array(*value) for name, value in found.items()}

    weights, ring = pickle.loads(file.read_bytes())
    weights = arrays(weights)
    inputs = [([array(*value) for value in args], arrays(kwargs)) for args, kwargs in ring]
    # As users do, the weights are arguments of each call.
    call = jax.jit(MODELS[case])
    is_float32 = any(value.dtype == jnp.float32 for value in weights.values())
    with jax.default_matmul_precision("highest") if is_float32 else contextlib.nullcontext():
        outputs = []
        for args, kwargs in inputs:
            leaves = jax.tree_util.tree_leaves_with_path({"outputs": call(weights, *args, **kwargs)})
            outputs.append({jax.tree_util.keystr(path): bits(leaf) for path, leaf in leaves})
        file.with_suffix(".out").write_bytes(pickle.dumps(outputs))
        last = None
        turns = itertools.cycle(inputs)

        def loop(calls: int) -> None:
            nonlocal last
            for args, kwargs in itertools.islice(turns, calls):
                last = call(weights, *args, **kwargs)

        # JAX has no marks on the device. In long rounds, the first call's wait for the host counts little.
        timing = time_interleaved({case: loop}, lambda: jax.block_until_ready(last), rounds=rounds, round_s=ROUND_S)[case]
    return {
        "platform": jax.devices()[0].platform,
        "version": jax.__version__,
        "median_us": timing.median_us,
        "host_us": timing.host_us,
    }


if __name__ == "__main__":
    _case, _file, _rounds = sys.argv[1:]
    print(json.dumps(run(_case, Path(_file), int(_rounds))))
