"""Parameters that FSDP gathers, which lie at another address in each step."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


def release_gathered(tx: InstructionTranslatorBase) -> None:
    """Take no parameter of a module that FSDP manages for static: a function is recorded for each address of those."""
    for node in tx.output.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        if argument is not None and argument.source.guard_source.is_fsdp_module():
            node.meta.get("tensor_dict", {}).pop("_dynamo_static_input_type", None)
