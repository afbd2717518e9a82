"""Functions with collectives, as Inductor writes them, on the modelled device, and the other ranks of a program."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch.testing._internal.pygraph_functions import RecordTestCase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


if TYPE_CHECKING:
    from torch.testing._internal.modelled_cuda import ModelledDevice


class Ranks(TorchDispatchMode):
    """
    Other ranks, which give what this one does.

    Attributes:
        ran: how often a collective ran
    """

    def __init__(self, device: ModelledDevice) -> None:
        super().__init__()
        self.device = device
        self.ran = 0

    def reduce(self, x: torch.Tensor) -> None:
        self.ran += 1
        x.mul_(2)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name in ("all_reduce_", "all_reduce_coalesced_", "broadcast_"):
            for x in tree_leaves(args[0]):
                self.device.launch(self.reduce, x)
            return args[0]
        compute = getattr(self, name.removesuffix("_coalesced").removesuffix("_out"), None)
        # Stand-ins of a recording have no memory.
        if compute is None or tree_leaves(args)[0].is_meta:
            return func(*args, **(kwargs or {}))
        if (out := (kwargs or {}).get("out")) is not None:
            self.device.launch(compute, out, args[0])
            return out
        results = []
        for like, x in zip(tree_leaves(func(_on_meta(args[0]), *args[1:])), tree_leaves(args[0])):
            results.append(self.device.empty_strided(tuple(like.shape), (1,), torch.float32))
            self.device.launch(compute, results[-1], x)
        return results[0] if isinstance(args[0], torch.Tensor) else results

    def all_gather_into_tensor(self, result: torch.Tensor, x: torch.Tensor) -> None:
        self.ran += 1
        # In place, the operand is a part of the result.
        result.copy_(torch.cat([x, 2 * x]))

    def reduce_scatter_tensor(self, result: torch.Tensor, x: torch.Tensor) -> None:
        self.ran += 1
        torch.mul(x[:4], 3, out=result)

    def all_to_all_single(self, result: torch.Tensor, x: torch.Tensor) -> None:
        self.ran += 1
        result[:4], result[4:] = x[:4], -x[:4]


def _on_meta(tensors: Any) -> Any:
    return tree_map(lambda t: t.to("meta"), tensors)


class CollectiveTestCase(RecordTestCase):
    """A test of functions with collectives."""

    COLLECTIVES = {
        "in_between": """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            b = new(); launch(add, b, a, y)
            return (b,)
        """,
        "of_an_output": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            return (a,)
        """,
        "after_a_mutation": """
            x, y = args; args.clear()
            launch(add, x, x, y)
            a = new(); launch(sin, a, x)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            return (a,)
        """,
        "of_an_input": """
            x, y = args; args.clear()
            c10d.wait_tensor(c10d.all_reduce_(x, 'sum', '0'))
            a = new(); launch(add, a, x, y)
            return (a,)
        """,
        "gathered": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            return (c10d.wait_tensor(c10d.all_gather_into_tensor(a, 2, '0')),)
        """,
        "gathered_input": """
            x, y = args; args.clear()
            a = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, '0'))[4:12]
            b = new(); launch(mul, b, a, y)
            return (b,)
        """,
        "gathered_together": """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            c, d = c10d.all_gather_into_tensor_coalesced([a, y], 2, '0')
            c10d.wait_tensor(c); c10d.wait_tensor(d)
            b = new(); launch(add, b, c[4:12], d[:8])
            return (b,)
        """,
        "scattered": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c = c10d.wait_tensor(c10d.reduce_scatter_tensor(a, 'sum', 2, '0'))
            c10d.wait_tensor(c10d.all_reduce_(c, 'sum', '1'))
            b = new(); launch(sin, b, y); launch(mul, b[:4], c, y[:4])
            return (b,)
        """,
        "scattered_together": """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            c, d = c10d.reduce_scatter_tensor_coalesced([a, y], 'sum', 2, '0')
            c10d.wait_tensor(c); c10d.wait_tensor(d)
            b = new(); launch(sin, b, y); launch(mul, b[:4], c, d)
            return (b,)
        """,
        "gathered_into": """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            b = new(); c10d.wait_tensor(c10d.all_gather_into_tensor_out(a[:4], 2, '0', out=b))
            c = new(); launch(mul, c, b, y)
            return (b, c)
        """,
        "scattered_into": """
            x, y = args; args.clear()
            b = new(); launch(sin, b, x)
            c10d.wait_tensor(c10d.reduce_scatter_tensor_out(y, 'sum', 2, '0', out=b[:4]))
            return (b,)
        """,
        "gathered_into_input": """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            c10d.wait_tensor(c10d.all_gather_into_tensor_out(a[:4], 2, '0', out=y))
            c = new(); launch(mul, c, a, y)
            return (c,)
        """,
        "broadcast": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c10d.wait_tensor(c10d.broadcast_(a, 0, '0'))
            b = new(); launch(mul, b, a, y)
            return (b,)
        """,
        "reduced_together": """
            x, y = args; args.clear()
            a, b = new(), new(); launch(sin, a, x); launch(sin, b, y)
            for t in c10d.all_reduce_coalesced_([a, b], 'sum', '0'): c10d.wait_tensor(t)
            c = new(); launch(mul, c, a, b)
            return (c,)
        """,
        "exchanged": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c = c10d.wait_tensor(c10d.all_to_all_single(a, [4, 4], [4, 4], '0'))
            b = new(); launch(mul, b, c, y)
            return (b,)
        """,
    }

    def check_collectives(self, name: str, calls: int = 7) -> None:
        "Each call of a function runs its collectives once, whatever it does else."
        body = "c10d = torch.ops._c10d_functional\n" + self.COLLECTIVES[name].strip()
        mutated = {"after_a_mutation": (0,), "of_an_input": (0,), "gathered_into_input": (1,)}.get(name, ())
        fn = None
        with Ranks(self.device) as ranks:
            for _ in range(calls):
                inputs = [self.randn(), self.randn()]
                fn = fn or self.deploy(body, inputs, force=self.force, mutated=mutated)
                ranks.ran = 0
                expected = self.expected(fn, inputs)
                in_eager, ranks.ran = ranks.ran, 0
                outputs = fn(*inputs)
                self.assertEqual(self.values([*outputs, *inputs]), expected)
                self.assertEqual(ranks.ran, in_eager)
                del outputs, inputs
