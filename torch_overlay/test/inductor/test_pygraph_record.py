# Owner(s): ["module: inductor"]
"""
Capture and replay, from deploy() to trees: outputs, inputs, collectives, CPU values.

Functions as Inductor writes them are deployed on the modelled device of modelled_cuda.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any, TYPE_CHECKING
from unittest import mock

from hypothesis import given, HealthCheck, settings, strategies as st

import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees as trees
from torch._inductor.pygraph import report
from torch._inductor.pygraph.capture import agreement
from torch._inductor.pygraph.graph import copies
from torch._inductor.pygraph.graph.prelude import PreludeUnavailable
from torch._inductor.pygraph.select import timing
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.values import deliver
from torch._inductor.pygraph.verify.rehearsal import SavedInput
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.modelled_nodes import MemcpyNode
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.pygraph_collectives import CollectiveTestCase, Ranks
from torch.testing._internal.pygraph_functions import (
    Deployed,
    HeldByAutograd,
    hiding,
    new_generation,
    RecordTestCase,
)


if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass
class HeldByName:
    tensor: torch.Tensor

    def activation(self) -> torch.Tensor:
        return self.tensor


class RecordTest(CollectiveTestCase):
    def test_steady_state_goes_around_trees(self):
        fn = self.check(self.ADD)
        manager = trees.get_manager(0)
        with mock.patch.object(manager, "_run", side_effect=AssertionError("searched")):
            x, y = self.randn(), self.randn()
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))

    @parametrize("name", ("in_between", "of_an_output", "after_a_mutation"))
    def test_collectives(self, name):
        self.check_collectives(name)
        (entry,) = report()
        self.assertEqual((entry.choice, entry.copied_bytes), ("node_update", 0))
        self.assertEqual(counters["pygraph"]["bound_outputs"], 1)
        self.assertEqual(counters["pygraph"]["unsteady_recordings"], 0)

    @parametrize(
        "name, reason",
        (
            ("of_an_input", Reason.of(Code.COLLECTIVE_OF_INPUT)),
            (
                "gathered",
                Reason.of(
                    Code.COLLECTIVE_NOT_OMITTABLE,
                    op="_c10d_functional.all_gather_into_tensor.default",
                ),
            ),
        ),
        name_fn=lambda name, reason: name,
    )
    def test_collectives_that_are_copied(self, name, reason):
        self.check_collectives(name)
        (entry,) = report()
        self.assertEqual((entry.choice, entry.reasons), ("copy", [reason]))

    @parametrize(
        "name, staged",
        (
            ("gathered", 0),
            ("gathered_input", 0),
            ("gathered_together", 32),
            ("gathered_into", 0),
            ("gathered_into_input", 32),
            ("scattered", 0),
            ("scattered_together", 32),
            ("scattered_into", 32),
            ("exchanged", 0),
            ("broadcast", 0),
            ("reduced_together", 0),
            ("of_an_input", 32),
        ),
    )
    def test_collectives_that_ranks_bind(self, name, staged):
        "The graph copies an operand that moves, unless an all-gather copies it to its result."
        self.ranks_decide, self.groups = True, ("0", "1")
        self.force = "node_update"
        self.check_collectives(name)
        (entry,) = report()
        self.assertEqual((entry.choice, entry.copied_bytes), ("node_update", staged))
        self.assertEqual(counters["pygraph"]["unsteady_recordings"], 0)

    @parametrize("name", ("gathered_input", "exchanged"))
    def test_stand_in_follows_the_wait(self, name):
        "A branch beside the collective would have to be joined in each replay."
        self.ranks_decide, self.force, captured = True, "node_update", []
        dispatch = Ranks.__torch_dispatch__

        def noted(mode, func, *rest):
            if self.device.captured is not None:
                captured.append(func.overloadpacket.__name__)
            return dispatch(mode, func, *rest)

        with mock.patch.object(Ranks, "__torch_dispatch__", noted):
            self.check_collectives(name)
        wait = captured.index("wait_tensor")
        into = captured.index("all_gather_into_tensor_out" if name == "gathered_input" else "all_to_all_single")
        self.assertNotIn("bitwise_or", captured[into:wait])
        self.assertIn("bitwise_or", captured[wait:])

    @parametrize("name", ("gathered_input", "scattered", "exchanged"))
    def test_stand_ins_leave_the_graph(self, name):
        "Nodes that are disabled take time on the device."
        self.ranks_decide, self.force = True, "node_update"
        self.check_collectives(name)
        (entry,) = report()
        self.assertEqual(entry.choice, "node_update")
        driver = self.device.driver
        (nodes,) = filter(None, driver.graphs.values())
        self.assertTrue(driver.disabled.isdisjoint(nodes))
        self.assertEqual(entry.kernel_nodes, len(nodes))
        # In a row, still.
        edges = {edge for edge in driver.edges if edge[0] in nodes}
        self.assertEqual(edges, {*itertools.pairwise(nodes)})

    @parametrize("name", ("gathered", "scattered", "exchanged"))
    def test_collective_of_a_wrong_operand(self, name):
        "A kernel in front of it has an address that no parameter shows."
        self.ranks_decide, self.force = True, "node_update"
        with hiding(1):
            self.check_collectives(name)
        (entry,) = report()
        self.assertEqual(entry.choice, "no_graph")

    def test_collectives_of_many_sizes(self):
        "Where not all ranks came to the first, none waits for others to come to the next ones."
        body = "c10d = torch.ops._c10d_functional\n" + self.COLLECTIVES["in_between"].strip()
        model, asked = self.generated(body), []

        def agree(groups, name, value):
            asked.append((name.rpartition("/")[2], value))

        with (
            Ranks(self.device) as ranks,
            mock.patch.object(agreement, "agree", agree),
            mock.patch.object(self, "generated", lambda body: model),
        ):
            for _ in range(4):
                fn = self.deploy(body, [self.randn(), self.randn()], force=None)
                for _ in range(4):
                    inputs = [self.randn(), self.randn()]
                    expected = self.expected(fn, inputs)
                    ranks.ran = 0
                    self.assertEqual(self.values([*fn(*inputs), *inputs]), expected)
                    self.assertEqual(ranks.ran, 1)
        self.assertEqual(asked, [("capture", True)] + [("capture", None)] * 3)

    @parametrize("groups", ((), ("0", "1")))
    def test_collectives_of_several_groups(self, groups):
        "Or of none that is known."
        self.groups = groups
        self.check_collectives("in_between")
        (entry,) = report()
        self.assertEqual(entry.choice, "copy")

    def test_inference_tensor_is_restored(self):
        with torch.inference_mode():
            x = torch.arange(4.0)
        for t in (x, torch.nn.Parameter(torch.arange(4.0))):
            saved = SavedInput(t)
            with torch.inference_mode():
                t.zero_()
            version = t.is_inference() or t._version
            saved.restore(t)
            self.assertEqual(t.detach(), torch.arange(4.0))
            self.assertEqual(t.is_inference() or t._version, version)

    @parametrize("force", ("node_update", "copy"))
    def test_recorded_in_inference_mode(self, force):
        "Dynamo has one function for an inference tensor, in inference mode and outside of it."
        fn = None
        for i in range(7):
            with torch.inference_mode():
                inputs = [self.randn(), self.randn()]
            with torch.inference_mode(i < 4):
                fn = fn or self.deploy(self.ADD, inputs, force=force)
                expected, *_ = self.expected(fn, inputs)
                (out,) = fn(*inputs)
            self.assertEqual(on_host(out), expected)
            self.assertEqual(out.is_inference(), i < 4)
        self.assertEqual(counters["pygraph"]["unbound"], 0)

    def test_output_passed_back_in(self):
        x = self.randn()
        fn = self.deploy(self.ADD, [x, x])
        expected = on_host(x).clone()
        for _ in range(8):
            (x,) = fn(x, x)
            expected = expected.sin() + expected
            self.assertEqual(on_host(x), expected)

    @parametrize("name", ("mutated", "returned", "view", "number"))
    def test_outputs_of_each_kind(self, name):
        body, returned, mutated = {
            "mutated": (
                "x, y = args; args.clear(); launch(add, x, x, y); a = new(); launch(sin, a, x); return (a,)",
                [0],
                (0,),
            ),
            "returned": (
                "x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (x, a, a)",
                [0, 1, 2],
                (),
            ),
            "view": (
                "x, y = args; args.clear(); a = new(); launch(add, a, x, y); "
                "return (a, torch.as_strided(a, (4,), (2,)), torch.as_strided(x, (4,), (1,)))",
                [0, 1, 2],
                (),
            ),
            "number": (
                "x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (a, None, 7)",
                [0, 1, 2],
                (),
            ),
        }[name]
        self.check(body, returned=returned, mutated=mutated)
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))

    def test_returned_input_is_the_callers(self):
        body = "x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (x, a, a)"
        fn = self.check(body, returned=[0, 1, 2])
        x, y = self.randn(), self.randn()
        outputs = fn(x, y)
        self.assertIs(outputs[0], x)
        self.assertIs(outputs[1], outputs[2])

    @parametrize("mode", ("inference", "backward"))
    @parametrize("view", ("w[4:]", "w.view(2, 4)"))
    def test_view_of_a_static_input(self, mode, view):
        """Each call returns a new tensor. Autograd gives it a history, and the program may set attributes."""
        w = self.randn()
        names = ["tangents_1" if mode == "backward" else "arg0_1", "primals_2"]
        body = f"x, w = args; args.clear(); a = new(); launch(sin, a, x); return (a, {view})"
        fn = self.deploy(body, [self.randn(), w], static=[1], mode=mode, returned=[0, 1], names=names)
        seen = []
        for _ in range(6):
            new_generation()
            x = self.randn()
            a, v = fn.call([x, w])
            self.assertEqual((on_host(a), on_host(v)), (on_host(x).sin(), eval(view, {"w": on_host(w)})))
            self.assertFalse(any(v is other for other in seen) or v.requires_grad or v.__dict__)
            seen.append(v.requires_grad_())
            v.changed = True
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))

    def test_allocated_by_an_operator(self):
        self.check(
            "x, y = args; args.clear(); a = empty(); launch(add, a, x, y); b = new(); launch(sin, b, a); return (a, b)",
            returned=[0, 1],
        )
        self.assertEqual(counters["pygraph"]["copied_outputs"], 0)
        self.assertEqual(counters["pygraph"]["bound_outputs"], 2)

    @parametrize("force, bound", (("node_update", True), ("prelude", True), ("node_update", False)))
    def test_copy_nodes(self, force, bound):
        """A kernel copies in the place of a copy node whose ends move, which the driver refuses."""
        driver = self.device.driver
        driver.refuses = lambda node: isinstance(driver.nodes[node], MemcpyNode)

        def copy(to, x):
            if self.device.captured is None:
                on_host(to).copy_(on_host(x))
            else:
                node = MemcpyNode(to.data_ptr(), x.data_ptr(), x.nbytes)
                driver.add_node(self.device.capturing, node, driver.graphs[self.device.capturing][-1:])

        self.hook = lambda: copy
        unavailable = mock.patch.object(copies, "copy_kernel", side_effect=PreludeUnavailable("no compiler"))
        with contextlib.nullcontext() if bound else unavailable:
            self.check(
                """
                x, y = args; args.clear(); copy = hook()
                a = new(); launch(sin, a, x)
                b = new(); copy(b, x)
                c = new(); copy(c, a)
                d = new(); launch(add, d, b, c)
                e = new(); copy(e, y)
                return (c, d, e)
                """,
                returned=[0, 1, 2],
                force=force,
            )
        (entry,) = report()
        self.assertEqual(entry.choice, force if bound else "copy", str(entry))
        self.assertEqual("bytes from device to device" in str(entry.reasons), not bound)

    def test_allocated_by_an_operator_and_shared(self):
        self.check(
            "x, y = args; args.clear(); b = empty(); launch(add, b, x, y); return (b, b.view(2, 4))",
            returned=[0, 1],
        )
        self.assertEqual(counters["pygraph"]["copied_outputs"], 1)
        self.assertEqual(counters["pygraph"]["bound_outputs"], 0)

    @parametrize("force", ("node_update", "copy", None))
    def test_values_on_the_cpu(self, force):
        "They are those of each call, packed ahead of it."

        def scale(out: torch.Tensor, x: torch.Tensor, s: torch.Tensor) -> None:
            torch.mul(x, s.sum(), out=out)

        values = deliver.Deliver(0, (torch.int64, (2,)))
        with self.delivering():
            fn = self.deploy(
                "x, y = args; args.clear(); (s,) = values.launch(); a = new(); "
                "launch(scale, a, x, s); b = new(); launch(add, b, a, y); return (b,)",
                [self.randn(), self.randn()],
                force=force,
            )
            fn.model.__globals__.update(values=values, scale=scale)
            for i in range(120):
                x, y = self.randn(), self.randn()
                value = torch.tensor([(i + 1) // 2 + 1, 7])
                values.pack([value])
                value.zero_()
                (out,) = fn(x, y)
                expected = on_host(x) * ((i + 1) // 2 + 8) + on_host(y)
                self.assertEqual(on_host(out), expected)
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))
        if force:
            (entry,) = report()
            self.assertEqual(entry.choice, force)
            self.assertEqual(entry.reasons, [Reason.of(Code.FORCED)])

    @parametrize("force", ("node_update", "copy", None))
    def test_values_of_what_an_operator_calls(self, force):
        "It packs them while it is captured, and for other callers at any time."

        def scale(out: torch.Tensor, x: torch.Tensor, s: torch.Tensor) -> None:
            torch.mul(x, s.sum(), out=out)

        values = deliver.Deliver(0, (torch.int64, (2,)))

        def op(x: torch.Tensor, factor: int) -> torch.Tensor:
            values.pack([torch.tensor([factor, 0])])
            return inner(x)[0]

        with self.delivering():
            inner = self.deploy(
                "x, = args; args.clear(); (s,) = values.launch(); a = new(); launch(scale, a, x, s); return (a,)",
                [self.randn()],
                force="no_graph",
            )
            inner.model.__globals__.update(values=values, scale=scale)
            fn = self.deploy(
                "x, = args; args.clear(); a = op(x, 3); b = op(x, 5); c = new(); launch(add, c, a, b); return (c,)",
                [self.randn()],
                force=force,
            )
            fn.model.__globals__.update(op=op)
            for i in range(120):
                x = self.randn()
                (out,) = fn(x)
                self.assertEqual(on_host(out), on_host(x) * 8)
                self.assertEqual(on_host(op(x, i)), on_host(x) * i)
        self.assertEqual(counters["pygraph"]["unbound"], 0, str(report()))

    def test_no_inputs(self):
        self.check(
            "args.clear(); a = new(); launch(torch.Tensor.zero_, a); b = new(); launch(sin, b, a); return (b,)",
            list,
        )
        self.assertEqual(counters["pygraph"]["bound_outputs"], 1)

    def test_output_without_elements(self):
        body = "x, y = args; args.clear(); a = new(); launch(add, a, x, y); e = empty_strided_cuda((0, 4), (4, 1), torch.float32); return (a, e)"
        for force in ("node_update", "copy"):
            with self.subTest(force=force):
                fn = None
                kept = []
                for _ in range(6):
                    inputs = [self.randn(), self.randn()]
                    fn = fn or self.deploy(body, inputs, force=force, returned=[0, 1])
                    _, e = fn(*inputs)
                    self.assertEqual(
                        (e.size(), e.stride(), e.dtype), ((0, 4), (4, 1), torch.float32)
                    )
                    self.assertFalse(e.requires_grad)
                    # What the program does to one is not seen of another.
                    kept.append(e.unsqueeze_(0).requires_grad_())

    def test_misaligned_input(self):
        memory = self.randn(64)
        fn = None
        for offset in (0, 4, 1, 2, 4, 0, 4):
            x, y = torch.as_strided(memory, (8,), (1,), offset), self.randn()
            fn = fn or self.deploy(self.ADD, [x, y])
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))


instantiate_parametrized_tests(RecordTest)


class PythonRecordTest(RecordTest):
    "Without compiled code."

    compiled = None


class Program:
    """
    A program of several functions, of which the test chooses each step. What it keeps is
    compared with what it has to be after every step.
    """

    def __init__(self, test: RecordTest, force: str | None) -> None:
        self.test = test
        self.force = force
        self.deployed: dict[str, Deployed] = {}
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.weight = test.randn()
        # (what holds the activation, weight, what the activation has to be)
        self.pending: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def function(
        self, name: str, body: str, inputs: list[Any], **kwargs: Any
    ) -> Deployed:
        if name not in self.deployed:
            self.deployed[name] = self.test.deploy(
                body, inputs, force=self.force, **kwargs
            )
        return self.deployed[name]

    def pick(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        "Something that is kept, or a new tensor, with its value on the host."
        if k < len(self.kept):
            return self.kept[k]
        x = self.test.randn()
        return x, on_host(x).clone()

    def infer(self, k: int, j: int) -> None:
        (x, x_value), (y, y_value) = self.pick(k), self.pick(j)
        (out,) = self.function("add", self.test.ADD, [x, y]).call([x, y])
        self.kept.append((out, x_value.sin() + y_value))

    def mutate(self, k: int, j: int) -> None:
        # Nobody else may hold what is written.
        x, (y, y_value) = self.test.randn(), self.pick(j)
        value = on_host(x) + y_value
        body = "x, y = args; args.clear(); launch(add, x, x, y); a = new(); launch(sin, a, x); return (a, x)"
        out, returned = self.function(
            "mutate", body, [x, y], mutated=(0,), returned=[0, 1]
        ).call([x, y])
        self.test.assertIs(returned, x)
        self.kept += [(out, value.sin()), (x, value)]

    def partitions(self, k: int, j: int) -> None:
        (x, x_value), (y, y_value) = self.pick(k), self.pick(j)
        a, b = self.function(
            "first",
            "x, y = args; args.clear(); a = new(); launch(sin, a, x); b = new(); launch(add, b, x, y); return (a, b)",
            [x, y],
            returned=[1],
        ).call([x, y])
        inputs = [a, b]
        del a
        (c,) = self.function(
            "second",
            "a, b = args; args.clear(); c = new(); launch(mul, c, a, b); d = new(); launch(sin, d, c); return (d,)",
            inputs,
            names=["partition_1_placeholder_0", "partition_1_placeholder_1"],
        ).call(inputs)
        self.kept += [
            (b, x_value + y_value),
            (c, (x_value.sin() * (x_value + y_value)).sin()),
        ]

    def forward(self, k: int, j: int) -> None:
        x, x_value = self.pick(k)
        out, a, w = self.function(
            "forward",
            self.test.FORWARD,
            [x, self.weight],
            mode="forward",
            static=[1],
            names=["primals_1", "primals_2"],
        ).call([x, self.weight])
        value = x_value * on_host(self.weight)
        self.kept.append((out, value.sin()))
        held = HeldByAutograd(a) if j % 2 else HeldByName(a)
        self.pending.append((held, w, value))

    def backward(self, k: int, j: int) -> None:
        if not self.pending:
            return
        retain = j % 3 == 0
        k %= len(self.pending)
        held, w, value = self.pending[k] if retain else self.pending.pop(k)
        t, t_value = self.pick(j)
        inputs = [held.activation(), w, t]
        del held
        body = "a, w, t = args; args.clear(); b = new(); launch(mul, b, a, t); c = new(); launch(mul, c, b, w); return (b, c)"
        grads = self.function(
            "backward",
            body,
            inputs,
            mode="backward",
            static=[0, 1],
            returned=[0, 1],
            names=["mul", "primals_2", "tangents_1"],
        ).call(inputs)
        expected = value * t_value
        self.kept += zip(grads, (expected, expected * on_host(w)))

    def forget_kept(self, k: int, j: int) -> None:
        del self.kept[k:j]

    def abandon_pending(self, k: int, j: int) -> None:
        del self.pending[k:]

    def new_weight(self, k: int, j: int) -> None:
        self.weight = self.test.randn()

    def mark_step(self, k: int, j: int) -> None:
        trees.mark_step_begin()

    def run(self, steps: Sequence[tuple[str, int, int, bool]]) -> None:
        for name, k, j, is_new in steps:
            if is_new:
                new_generation()
            getattr(self, name)(k, j)
            self.check()

    def check(self) -> None:
        for actual, expected in self.kept:
            self.test.assertEqual(on_host(actual), expected)
        for held, _, expected in self.pending:
            self.test.assertEqual(on_host(held.activation()), expected)



STEPS = (
    "infer",
    "mutate",
    "partitions",
    "forward",
    "backward",
    "backward",
    "forget_kept",
    "abandon_pending",
    "new_weight",
    "mark_step",
)



STEP = st.tuples(
    st.sampled_from(STEPS), st.integers(0, 5), st.integers(0, 5), st.booleans()
)



in_short = settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)



class ProgramTest(RecordTestCase):
    @in_short
    @given(
        st.sampled_from(("node_update", "copy")),
        st.lists(
            STEP,
            min_size=4,
            max_size=40,
        ),
    )
    def test_random_programs(self, force, steps):
        trees.reset_cudagraph_trees()
        trees.MarkStepBox.mark_step_counter = 0
        program = Program(self, force)
        # To the steady state of each.
        for name in ("infer", "mutate", "partitions", "forward", "backward") * 4:
            new_generation()
            getattr(program, name)(5, 1)
            program.check()
            program.kept.clear()
        program.run(steps)

    @in_short
    @given(
        # Whatever the times, so that graphs come and go.
        st.lists(st.sampled_from((10.0, 50.0, 90.0)), min_size=1, max_size=8),
        st.lists(
            STEP,
            min_size=20,
            max_size=80,
        ),
    )
    def test_random_programs_while_selecting(self, times, steps):
        trees.reset_cudagraph_trees()
        trees.MarkStepBox.mark_step_counter = 0
        costs = (timing.Cost(*[timing.Estimate(t)] * 3) for t in itertools.cycle(times))
        with (
            mock.patch.multiple(
                timing,
                WARMUP_SAMPLES=0,
                SAMPLES=1,
                MAX_SAMPLES=1,
                DEVICE_SAMPLES=1,
                MAX_DEVICE_SAMPLES=1,
            ),
            mock.patch.object(timing.Samples, "cost", lambda samples: next(costs)),
        ):
            program = Program(self, None)
            program.run(steps)


if __name__ == "__main__":
    run_tests()
