# Owner(s): ["module: inductor"]
"""Layers that random numbers drop, in one graph: results, gradients and their absence are those of eager mode."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any, TYPE_CHECKING
from unittest import mock

from hypothesis import given, note, Phase, settings, strategies

import torch
import torch._dynamo
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._dynamo.utils import counters
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.dynamo import drawn, drops
from torch._inductor.pygraph.dynamo.branches import Branches
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.test_case import run_tests, TestCase
from torch._subclasses.fake_impls import op_implementations_dict
from torch.nn import functional as F
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_mend import BranchTestCase, number_of_graphs
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 4


class Layer(torch.nn.Module):
    """Enough operators that its paths do not become a plain torch.where."""

    def __init__(self, dropout: float | None = None) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(SIZE)
        self.up, self.down = torch.nn.Linear(SIZE, 8), torch.nn.Linear(8, SIZE)
        self.dropout = dropout

    def forward(self, x, other=None):
        if other is not None:
            x = x + other.mean(0)
        y = F.gelu(self.up(self.norm(x)))
        for i in range(6):
            y = y + y.sin() / (i + 1)
        if self.dropout is not None:
            y = F.dropout(y, self.dropout, self.training)
        return x + self.down(y)


class Stack(torch.nn.Module):
    def __init__(self, layers, drop: float = 0.4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.drop = drop

    def forward(self, x, *others):
        for i, layer in enumerate(self.layers):
            skip = False
            if self.training:
                number = torch.rand([])
                if number < self.drop:
                    skip = True
            if not skip:
                x = layer(x, *others)
        return x


class Model(torch.nn.Module):
    def __init__(self, stack) -> None:
        super().__init__()
        self.first, self.stack, self.last = torch.nn.Linear(SIZE, SIZE), stack, torch.nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.last(self.stack(self.first(x)))


class Continuing(Stack):
    """As decoders of transformers."""

    def forward(self, x, *others):
        for layer in self.layers:
            if self.training and torch.rand([]) < self.drop:
                continue
            x = layer(x, *others)
        return x


class Cache:
    """Has no dtype until its layer has run, as caches of transformers."""

    def __init__(self) -> None:
        self.keys = None
        self.is_ready = False

    def update(self, keys):
        if not self.is_ready:
            self.dtype, self.device = keys.dtype, keys.device
            self.keys = torch.tensor([], dtype=self.dtype, device=self.device)
            self.is_ready = True
        self.keys = torch.cat([self.keys, keys], dim=-1)
        return self.keys


class Caching(Layer):
    def forward(self, x, cache):
        return super().forward(x + cache.update(self.up(x))[:, :SIZE])


class Decoder(torch.nn.Module):
    """Its layers store to caches in ``objects``. Each call makes new ones, unless the caller has given them."""

    def __init__(self, is_given: bool, layers: int = 3) -> None:
        super().__init__()
        self.first = torch.nn.Linear(SIZE, SIZE)
        self.layers = torch.nn.ModuleList(Caching() for _ in range(layers))
        self.is_given = is_given
        self.objects: Any = None
        self.ran: dict[int, bool] = {}

    def forward(self, x):
        x = self.first(x)
        if not self.is_given:
            self.objects = tuple(Cache() for _ in self.layers)
        ran = dict.fromkeys(range(len(self.layers)), False)
        for i, layer in enumerate(self.layers):
            if torch.rand([]) < 0.4:
                continue
            x = layer(x, self.objects[i])
            ran[i] = True
        return x, self.objects, ran


class Wav2Vec2(Stack):
    def forward(self, x):
        for layer in self.layers:
            number = torch.rand([])
            skip = self.training and number < self.drop
            if not skip:
                x = layer(x)
        return x


class Alternatives(Stack):
    """One of two layers runs."""

    def forward(self, x):
        for one, other in zip(self.layers[::2], self.layers[1::2]):
            if torch.rand(1) > self.drop:
                x = one(x)
            else:
                x = other(x)
        return x


class Seq2Seq(torch.nn.Module):
    """If all layers of the decoder are dropped, the encoder has no gradient."""

    def __init__(self, make=Continuing) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(SIZE, SIZE)
        self.encoder, self.decoder = Stack([Layer() for _ in range(2)], 0.3), make([Layer() for _ in range(2)], 0.6)
        self.last = torch.nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.last(self.decoder(self.embed(x), self.encoder(x * self.last.weight.sum())))


class DropTest(BranchTestCase):
    def setUp(self) -> None:
        super().setUp()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(mock.patch.object(drops, "DEVICES", ("cpu",)))
        stack.enter_context(torch._inductor.config.patch(fallback_random=True))

    def compare(self, model, graphs: int | None = 1, calls: int = 16, shape=(3, SIZE)) -> Any:
        model = model.double()
        eager = copy.deepcopy(model)
        compiled = torch.compile(model, options={"pygraph": True})
        args = [(torch.randn(*shape, dtype=torch.float64, requires_grad=i % 2 == 0),) for i in range(2)] * (calls // 2)
        found = self.compare_calls((eager, eager), (compiled, model), args, seed=1)
        self.assertEqual([*eager.buffers()], [*model.buffers()])
        if graphs is not None:
            # Each input is one that needs a gradient, or one that does not.
            self.assertEqual(number_of_graphs(), 2 * graphs)
        absent = [[g is None for g in outcome[2]] for outcome in found if len(outcome) > 3]
        self.assertTrue(any(map(any, absent)) and not all(map(any, absent)) or graphs is None)
        return found

    @parametrize("make", (Stack, Continuing, Wav2Vec2))
    def test_layers(self, make):
        self.compare(Model(make([Layer() for _ in range(4)], 0.2)))
        self.assertEqual(counters["graph_break"], {})

    def test_layers_of_torch(self):
        layers = [torch.nn.TransformerEncoderLayer(SIZE, 2, 8, dropout=0.0, batch_first=True) for _ in range(3)]
        with torch._inductor.config.patch(fallback_random=False):
            self.compare(Model(Continuing(layers)), shape=(2, 3, SIZE))

    def test_alternatives(self):
        found = self.compare(Model(Alternatives([Layer() for _ in range(4)])), graphs=None)
        self.assertEqual(number_of_graphs(), 2)
        self.assertEqual({sum(g is None for g in outcome[2]) for outcome in found}, {12})

    def test_layers_with_numbers(self):
        layers = [Layer() for _ in range(4)]
        for i, layer in enumerate(layers):
            layer.number = i
        self.compare(Model(Continuing(layers, 0.2)))

    @parametrize("make", (Stack, Continuing))
    def test_encoder_and_decoder(self, make):
        found = self.compare(Seq2Seq(make), calls=40)
        self.assertEqual(counters["graph_break"], {})
        missing = {sum(g is None for g in outcome[2]) for outcome in found}
        # All layers run, and none.
        self.assertTrue({0, 24} <= missing)

    def test_result_without_gradient(self):
        """The program may use one result of two: zeros for the encoder would differ from None."""

        class Both(Seq2Seq):
            def forward(self, x):
                # An input that the graph does not read
                x = x.reshape(-1, SIZE * self.unread.shape[0])
                encoded = self.encoder(x * self.last.weight.sum())
                return self.last(self.decoder(self.embed(x), encoded)), encoded

        self.backend.stop()
        model = Both()
        model.unread = torch.nn.Parameter(torch.ones(1))
        self.assertTrue({1, 25} <= self.compare_first(model, calls=20))
        self.assertEqual(number_of_graphs(), 1)
        self.backend.start()

    def compare_first(self, model, calls) -> set[int]:
        """Compare gradients of the first result. Return how many parameters had none in each call."""
        model = model.double()
        eager = copy.deepcopy(model)
        compiled = torch.compile(model, options={"pygraph": True})
        x = torch.randn(3, SIZE, dtype=torch.float64)
        absent = set()
        for seed in range(calls):
            gradients = []
            for fn, module in ((eager, eager), (compiled, model)):
                module.zero_grad()
                torch.manual_seed(seed)
                fn(x)[0].sum().backward()
                gradients.append([p.grad for p in module.parameters()])
            self.assertEqual(*gradients)
            absent.add(sum(g is None for g in gradients[0]))
        return absent

    def test_with_inductor(self):
        self.backend.stop()
        self.compare(Seq2Seq(), calls=20)
        self.backend.start()

    def test_dropout(self):
        """Inductor draws other numbers than eager mode. Layers have a gradient if, and only if, they ran."""
        self.backend.stop()
        torch._inductor.config.fallback_random = False
        self.check_layers_with_gradients(Model(Stack([Layer(0.5) for _ in range(4)])))
        self.backend.start()

    def check_layers_with_gradients(self, model):
        compiled = torch.compile(model, options={"pygraph": True})
        for i in range(20):
            torch.manual_seed(i)
            ran = [bool(torch.rand([]) >= 0.4) for _ in model.stack.layers]
            torch.manual_seed(i)
            model.zero_grad()
            compiled(torch.ones(3, SIZE)).sum().backward()
            for layer, has_run in zip(model.stack.layers, ran):
                self.assertEqual({p.grad is not None for p in layer.parameters()}, {has_run})
        self.assertEqual(number_of_graphs(), 1)

    def test_refusal_holds_for_inlined_frames(self):
        """The graph breaks in the stack. Dynamo does not try again to select layers in each frame around it."""

        class Leaving(Stack):
            def forward(self, x):
                for layer in self.layers:
                    if torch.rand([]) < self.drop:
                        left = None
                    else:
                        x = layer(x)
                        left = x.sum()
                return x if left is None else x + left

        reasons = []

        def restart(*, restart_reason):
            reasons.append(restart_reason)
            return UnspecializeRestartAnalysis(restart_reason=restart_reason)

        with mock.patch.object(drops, "UnspecializeRestartAnalysis", restart):
            self.compare(Model(Leaving([Layer() for _ in range(8)])), graphs=None)
        self.assertEqual(reasons, ["a random number drops layers", "the paths leave different NoneTypes"])

    def test_dropout_of_eager_mode(self):
        """A dropped layer would draw from the generator."""
        self.compare(Model(Stack([Layer(0.5) for _ in range(4)], 0.2)), graphs=None)
        self.assertGreater(number_of_graphs(), 2)

    def test_dropout_of_attention(self):
        """Attention draws as eager mode does, and would draw in a dropped layer."""

        class Attending(Layer):
            def forward(self, x):
                y = super().forward(x)[None]
                return x + torch.nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.5)[0]

        with torch._inductor.config.patch(fallback_random=False):
            self.compare(Model(Stack([Attending() for _ in range(3)])), graphs=None)
        self.assertGreater(number_of_graphs(), 2)

    def test_dropout_beside_attention(self):
        """Where Inductor draws seeds, attention draws no numbers of eager mode, and may draw in a dropped layer."""
        self.backend.stop()
        torch._inductor.config.fallback_random = False

        class Attending(Layer):
            def forward(self, x):
                y = super().forward(x)[None]
                return x + torch.nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.5)[0]

        self.check_layers_with_gradients(Model(Stack([Attending(0.5) for _ in range(3)])))
        self.backend.start()

    def test_infinite_derivative(self):
        """Zeros that a dropped layer gets for a gradient become NaN in it."""

        class Root(Layer):
            def forward(self, x):
                return super().forward(x) + (x - x).sqrt() * self.norm.weight

        found = self.compare(Model(Stack([Root() for _ in range(4)], 0.7)), graphs=None, calls=40)
        self.assertEqual(number_of_graphs(), 2)
        is_finite = {bool(outcome[2][1].isfinite().all()) for outcome in found if outcome[2][1] is not None}
        self.assertEqual(is_finite, {True, False})

    @parametrize("most", (drawn.MAX_COPIED, 2))
    def test_shared_parameters(self, most):
        """A parameter has the gradients of the layers that ran, and none if none did."""
        layers = [Layer() for _ in range(4)]
        layers[2].up = layers[0].up
        layers[3].norm = layers[1].norm
        with mock.patch.object(drawn, "MAX_COPIED", most):
            self.compare(Model(Stack(layers)), graphs=1 if most > 2 else None, calls=30)

    def test_parameter_read_outside(self):
        class Outside(Model):
            def forward(self, x):
                x = x * self.stack.layers[1].norm.weight
                return super().forward(x) + self.stack.layers[2].down.bias

        self.compare(Outside(Stack([Layer() for _ in range(4)])))

    def test_written_argument(self):
        """An argument that only layers read is written: eager mode makes it a result with a gradient."""

        class Writing(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.stack = torch.nn.Linear(SIZE, SIZE), Continuing([Layer() for _ in range(3)])

            def forward(self, x):
                other = x * 2
                y = self.stack(self.first(torch.ones_like(x)), other)
                x.mul_(3)
                return y

        self.compare(Writing(), graphs=None)

    def test_frozen(self):
        model = Model(Stack([Layer() for _ in range(4)]))
        for p in [*model.first.parameters(), *model.stack.layers[1].parameters(), model.stack.layers[2].up.weight]:
            p.requires_grad_(False)
        # Without a gradient of what the layers read, eager mode's result may need none.
        self.compare(model, graphs=None)

    def test_statistics(self):
        """A dropped layer leaves its statistics as they were."""

        class Normed(Layer):
            def __init__(self):
                super().__init__()
                self.norm = torch.nn.BatchNorm1d(SIZE)

        self.compare(Model(Stack([Normed() for _ in range(4)])), graphs=None)

    @parametrize("name", ("index", "write", "store", "hook"))
    def test_refused(self, name):
        """What dropped layers may not do: the graph breaks, or each layer has a graph."""

        class Acting(Layer):
            def forward(self, x):
                x = super().forward(x)
                if name == "index":
                    return x + TABLE[self.place]
                if name == "write":
                    self.place.add_(1)
                if name == "store":
                    SEEN.append(x.detach().sum())
                if name == "hook":
                    x.register_hook(lambda g: 2 * g)
                return x

        layers = [Acting() for _ in range(3)]
        for layer in layers:
            layer.register_buffer("place", torch.tensor([1]))
        SEEN.clear()
        self.compare(Model(Stack(layers)), graphs=None)
        half = len(SEEN) // 2
        self.assertEqual(SEEN[:half], SEEN[half:])
        self.assertEqual(name == "store", half > 0)

    def compare_kept(self, model, calls: int = 16) -> list[Any]:
        """Compare what calls leave in ``model.kept``, and gradients if the loss reads it. Return the outcomes."""
        model = model.double()
        eager = copy.deepcopy(model)
        compiled = torch.compile(model, options={"pygraph": True})
        x = torch.randn(3, SIZE, dtype=torch.float64)
        found = []
        for seed in range(calls):
            outcomes = []
            for fn, module in ((eager, eager), (compiled, model)):
                module.zero_grad()
                module.kept = None
                torch.manual_seed(seed)
                try:
                    loss = fn(x).sum()
                except (IndexError, RuntimeError):
                    outcomes.append(None)
                    continue
                if module.kept is not None and seed % 3:
                    loss = loss + module.kept.square().sum()
                loss.backward()
                gradients = [p.grad for p in module.parameters()]
                outcomes.append((gradients, module.kept, loss.detach(), torch.get_rng_state()))
            self.assertEqual(*outcomes)
            found.append(outcomes[1])
        return found

    @parametrize("may_raise", (False, True))
    def test_path_stores_alone(self, may_raise):
        """A path that is not taken gives no gradient and does not raise, if all that it leaves is in an object."""

        class Keeping(Model):
            def __init__(self, stack):
                super().__init__(stack)
                self.other = Layer()
                self.place = torch.tensor([9])

            def forward(self, x):
                x = super().forward(x)
                if torch.rand([]) < 0.5:
                    y = self.other(x)
                    self.kept = y[self.place] if may_raise else y
                return x * 2

        found = self.compare_kept(Keeping(Continuing([Layer() for _ in range(3)])))
        if not may_raise:
            self.assertEqual(number_of_graphs(), 1)
        self.assertEqual({outcome is None for outcome in found}, {False, may_raise})

    def test_path_keeps_view(self):
        """A view that a path stores shares the memory of what existed before."""

        class Keeping(Continuing):
            def forward(self, x):
                first = x * 2
                for layer in self.layers:
                    if torch.rand([]) < 0.4:
                        continue
                    x = layer(x)
                    layer.kept = first[1:].detach()
                return x * 2, first

        model = Keeping([Layer() for _ in range(3)])
        compiled = torch.compile(model, options={"pygraph": True})
        for seed in range(8):
            for layer in model.layers:
                layer.kept = None
            torch.manual_seed(seed)
            _, first = compiled(torch.ones(3, SIZE, requires_grad=True))
            torch.manual_seed(seed)
            for layer in model.layers:
                self.assertEqual(layer.kept is None, bool(torch.rand([]) < 0.4))
                if layer.kept is not None:
                    self.assertEqual(layer.kept.data_ptr(), first[1:].data_ptr())

    def compare_objects(self, model, kind: type, uses: Callable[[int, int], bool], calls: int) -> OrderedSet[int]:
        """
        Compare what calls leave in objects of a kind, and gradients. ``uses`` tells whether the loss reads a tensor from
        the call and the place. Return how many parameters had no gradient.
        """
        model = model.double()
        eager = copy.deepcopy(model)
        compiled = torch.compile(model, options={"pygraph": True})
        x = torch.randn(3, SIZE, dtype=torch.float64)
        absent = OrderedSet()
        for call in range(calls):
            outcomes = []
            for fn, module in ((eager, eager), (compiled, model)):
                module.zero_grad()
                module.objects = tuple(kind() for _ in range(3)) if module.is_given else None
                torch.manual_seed(call)
                y, objects, ran = fn(x)
                values = [y, *(value for found in objects for value in vars(found).values())]
                tensors = [v for v in values if isinstance(v, torch.Tensor)]
                read = [t for i, t in enumerate(tensors) if t.requires_grad and uses(call, i)]
                if read:
                    sum(t.square().sum() for t in read).backward()
                same = [[a is b for b in tensors] for a in (*tensors, *module.parameters())]
                state = [[*vars(found).items()] for found in objects]
                gradients = [p.grad for p in module.parameters()]
                outcomes.append((y, state, ran, same, gradients, objects is module.objects, torch.get_rng_state()))
                absent.add(sum(g is None for g in gradients))
            self.assertEqual(*outcomes)
        return absent

    @parametrize("is_given", (False, True))
    def test_caches(self, is_given):
        """A layer adds attributes to its cache in the calls in which it runs. Their gradients are eager mode's."""
        absent = self.compare_objects(
            Decoder(is_given), Cache, lambda call, i: bool(call % 3 if i == 0 else call % 4), 24
        )
        self.assertEqual(counters["graph_break"], {})
        self.assertEqual(number_of_graphs(), 1)
        self.assertGreater(len(absent), 3)

    @settings(max_examples=15, deadline=None, database=None, phases=(Phase.generate,))
    @given(seed=strategies.integers(0, 2**32))
    def test_programs_that_store(self, seed):
        note(f"seed {seed}")
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(seed)
        self.compare_objects(Storing(random.Random(seed)), Empty, lambda call, i: True, 8)

    def test_result_is_input(self):
        """If all layers are dropped, eager mode returns the argument itself."""
        self.compare(Stack([Layer() for _ in range(3)], 0.6), graphs=None)

    def test_all_results(self):
        class All(Stack):
            def forward(self, x):
                results = []
                for layer in self.layers:
                    if torch.rand([]) < self.drop:
                        continue
                    x = layer(x)
                    results.append(x)
                return x, results

        class Wrapped(Model):
            def forward(self, x):
                return self.stack(self.first(x))

        self.compare(Wrapped(All([Layer() for _ in range(3)])), graphs=None)

    def test_number_is_read(self):
        class Reading(Continuing):
            def forward(self, x):
                total = 0
                for layer in self.layers:
                    number = torch.rand([], dtype=torch.float64)
                    total = total + number
                    if number < self.drop:
                        continue
                    x = layer(x) * number
                return x + total + torch.rand([], dtype=torch.float64)

        self.compare(Model(Reading([Layer() for _ in range(3)])), graphs=None)

    def test_certain_numbers(self):
        """Branches of which the outcome is certain draw in program order, too."""

        class Both(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.other = Stack([Layer() for _ in range(2)], 0.0), Stack([Layer() for _ in range(3)], 0.4)

            def forward(self, x):
                return self.one(self.other(self.one(x)))

        with torch._inductor.config.patch(fallback_random=False):
            self.compare(Model(Both()))

    @parametrize("form", ("branch", "function", "between"))
    def test_check(self, form):
        """A check in front of the draws sets the generator back if it raises."""

        class Checked(Model):
            def forward(self, x):
                if form == "between":
                    x = x * 2 if torch.rand([]) < 0.5 else x
                if form == "function":
                    torch._check_tensor_all(x < 5, lambda: "large")
                elif x.max() > 5:
                    raise ValueError("large")
                return super().forward(x)

        model = Checked(Stack([Layer() for _ in range(3)])).double()
        compiled = torch.compile(model, options={"pygraph": True})
        with torch._inductor.config.patch(fallback_random=False):
            for seed in range(8):
                x = torch.full((3, SIZE), 6.0 if seed % 2 else 1.0, dtype=torch.float64)
                outcomes = []
                for fn in (model, compiled):
                    torch.manual_seed(seed)
                    try:
                        outcomes.append(fn(x))
                    except (RuntimeError, ValueError) as e:
                        outcomes.append((type(e), str(e)))
                    outcomes.append(torch.get_rng_state())
                self.assertEqual(outcomes[:2], outcomes[2:])
        if form in ("branch", "function"):
            self.assertEqual(number_of_graphs(), 1)
            self.assertEqual(counters["graph_break"], {})

    def test_evaluation(self):
        model = Model(Stack([Layer() for _ in range(3)])).eval()
        self.compare(model, graphs=None)
        model.train()
        torch._dynamo.reset()
        with torch.no_grad():
            self.compare(model, graphs=None)

    def test_hooks_of_parameters(self):
        """A hook of a parameter is not called for a layer that was dropped."""
        model = Model(Stack([Layer() for _ in range(4)]))
        called = []
        for i, layer in enumerate(model.stack.layers):
            layer.up.weight.register_post_accumulate_grad_hook(lambda p, i=i: called.append(i))
        compiled = torch.compile(model, options={"pygraph": True})
        for seed in range(10):
            torch.manual_seed(seed)
            ran = [i for i in range(4) if torch.rand([]) >= 0.4]
            torch.manual_seed(seed)
            called.clear()
            compiled(torch.ones(3, SIZE)).sum().backward()
            self.assertEqual(sorted(called), ran)
        self.assertEqual(number_of_graphs(), 1)

    def test_optimizer(self):
        """Weight decay leaves a layer that was dropped."""
        models = [Model(Stack([Layer() for _ in range(4)]).double()).double()]
        models.append(copy.deepcopy(models[0]))
        x = torch.randn(3, SIZE, dtype=torch.float64)
        for model, fn in zip(models, (models[0], torch.compile(models[1], options={"pygraph": True}))):
            optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
            torch.manual_seed(0)
            for _ in range(10):
                fn(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        self.assertEqual(*([*model.parameters()] for model in models))
        self.assertEqual(number_of_graphs(), 1)

    def test_large_layers(self):
        """Where the device takes longer than the host, each layer has a graph."""
        reset_report()
        with mock.patch.multiple(drops, HOST=0, MAX_SECONDS=0):
            self.compare(Model(Stack([Layer() for _ in range(4)], 0.2)), graphs=2)
        # Before the loop for each input, a layer, and after the loop
        self.assertEqual(number_of_graphs(), 4)
        said = next(entry.reason for entry in report().breaks if entry.is_repaired)
        self.assertEqual(said, Reason.of(Code.LAYER_COMPILED, why="the device would run long for nothing"))
        torch._dynamo.reset()
        counters.clear()
        with mock.patch.object(drops, "HOST", 0):
            self.compare(Model(Stack([Layer() for _ in range(4)], 0.01)), graphs=None, calls=4)
        self.assertEqual(number_of_graphs(), 2)

    def test_layers_of_vectors(self):
        class OfVector(Layer):
            def forward(self, x):
                return super().forward(x) + F.linear(self.norm.weight, self.down.weight.t(), self.up.bias)[:SIZE]

        self.compare(Model(Stack([OfVector() for _ in range(3)], 0.2)))

    def test_other_device(self):
        with mock.patch.object(drops, "DEVICES", ("cuda",)):
            self.compare(Model(Stack([Layer() for _ in range(4)], 0.2)), graphs=2)

    @settings(max_examples=25, deadline=None, database=None, phases=(Phase.generate,))
    @given(seed=strategies.integers(0, 2**32))
    def test_programs(self, seed):
        note(f"seed {seed}")
        torch._dynamo.reset()
        counters.clear()
        self.compare(program(random.Random(seed)), graphs=None, calls=12)


class Empty:
    pass


class Storing(torch.nn.Module):
    """Layers that store to objects, also where they are dropped."""

    def __init__(self, choices: random.Random) -> None:
        super().__init__()
        self.first = torch.nn.Linear(SIZE, SIZE)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.is_given = choices.random() < 0.5
        self.objects: Any = None
        self.before = [name for name in "ab" if choices.random() < 0.4]
        kinds = ("x", "y", "view", "detached", "first", "parameter", "dtype", "number", "none")
        self.stores = [
            [(choices.choice("abc"), choices.choice(kinds)) for _ in range(choices.randint(0, 4))] for _ in "tf"
        ]
        self.is_read = choices.random() < 0.2

    def store(self, found, stores, x, y, first, layer):
        for name, kind in stores:
            if kind in ("x", "y", "first"):
                setattr(found, name, {"x": x, "y": y, "first": first}[kind])
            elif kind in ("view", "detached"):
                setattr(found, name, y[1:] if kind == "view" else y.detach())
            elif kind == "parameter":
                setattr(found, name, layer.up.weight)
            else:
                setattr(found, name, {"dtype": y.dtype, "number": 1, "none": None}[kind])

    def forward(self, x):
        x = first = self.first(x)
        objects = self.objects if self.is_given else tuple(Empty() for _ in self.layers)
        for found in objects:
            for name in self.before:
                setattr(found, name, None)
        for layer, found in zip(self.layers, objects):
            if torch.rand([]) < 0.5:
                self.store(found, self.stores[0], x, x, first, layer)
            else:
                y = layer(x)
                self.store(found, self.stores[1], x, y, first, layer)
                x = y
            if self.is_read and hasattr(found, "c"):
                x = x * 2
        return x * 2, objects, None


TABLE = torch.nn.Parameter(torch.ones(2, SIZE))
SEEN: list[torch.Tensor] = []


class Program(torch.nn.Module):
    """Stacks that read one another, with parameters that layers share."""

    def __init__(self, choices: random.Random) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)
        self.stacks = torch.nn.ModuleList()
        self.reads: list[int | None] = []
        layers = []
        for i in range(choices.randint(1, 3)):
            own = [Layer() for _ in range(choices.randint(1, 3))]
            for layer in own:
                if layers and choices.random() < 0.2:
                    layer.up = choices.choice(layers).up
                if choices.random() < 0.1:
                    layer.norm = torch.nn.BatchNorm1d(SIZE)
                if choices.random() < 0.2:
                    layer.down.requires_grad_(False)
            layers += own
            self.reads.append(choices.choice([None, *range(i)]))
            drop = choices.choice([0.0, 0.3, 0.6, 1.0])
            self.stacks.append(choices.choice([Stack, Continuing])(own, drop))
        self.returns = choices.choice([1, 1, 1, 2])
        self.is_embedded = choices.random() < 0.8

    def forward(self, x):
        results = []
        start = self.first(x) if self.is_embedded else x
        for stack, read in zip(self.stacks, self.reads):
            # What a later stack reads may lead to a result by a layer alone that is dropped.
            results.append(stack(start, *([] if read is None else [results[read]])))
        return tuple(self.last(r) for r in results[-self.returns :])


def program(choices: random.Random) -> torch.nn.Module:
    torch.manual_seed(choices.randint(0, 1000))
    return Program(choices)


class CostTest(TestCase):
    def operations(self, fn: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
        operands = [torch.empty(shape, device="meta") for shape in shapes]
        return drops.operations_of(fn.__name__, [fn(*operands), *operands])

    def test_operations(self):
        of_rows = 2 * 512 * 1536 * 256
        self.assertEqual(self.operations(F.linear, (512, 256), (1536, 256), (1536,)), of_rows)
        self.assertEqual(self.operations(F.linear, (4, 128, 256), (1536, 256)), of_rows)
        self.assertEqual(self.operations(torch.addmm, (1536,), (512, 256), (256, 1536)), of_rows)
        self.assertEqual(self.operations(F.linear, (256,), (1536, 256)), of_rows / 512)
        self.assertEqual(self.operations(torch.bmm, (8, 32, 64), (8, 64, 16)), 2 * 8 * 32 * 16 * 64)
        self.assertEqual(self.operations(F.conv1d, (2, 3, 9), (5, 3, 2)), 2 * (2 * 5 * 8) * (3 * 2))
        attention = F.scaled_dot_product_attention
        of_heads = self.operations(attention, (2, 8, 10, 64), (2, 8, 20, 64), (2, 8, 20, 64))
        self.assertEqual(of_heads, 2 * 2 * (2 * 8 * 10 * 20 * 64))
        self.assertEqual(self.operations(attention, (16, 10, 64), (16, 20, 64), (16, 20, 64)), of_heads)

    def test_precision(self):
        matmul = torch.backends.cuda.matmul
        before = matmul.fp32_precision
        self.addCleanup(setattr, matmul, "fp32_precision", before)
        for precision, rate in (("ieee", drops.OPERATIONS), ("tf32", drops.TENSOR_CORE_OPERATIONS)):
            matmul.fp32_precision = precision
            self.assertEqual(drops.rate_of("linear", torch.float32), rate)
            self.assertEqual(drops.rate_of("linear", torch.float64), drops.OPERATIONS)
            self.assertEqual(drops.rate_of("linear", torch.bfloat16), drops.TENSOR_CORE_OPERATIONS)
            self.assertEqual(drops.rate_of(drops.ATTENTION, torch.float32), drops.OPERATIONS)


class PartitionTest(TestCase):
    def compile_on_gpu(self, model) -> list[Any]:
        """Return the graphs of a forward and its backward."""

        # Numbers are fake, too. No layer is dropped.
        decide = mock.patch.object(Branches, "_decide", lambda *args: True)
        read = mock.patch.dict(
            op_implementations_dict, {torch.ops.aten._local_scalar_dense.default: lambda *args: False}
        )
        with fake_cuda() as graphs, decide, read:
            compiled = torch.compile(model.to("cuda"), options={"pygraph": True})
            result = compiled(torch.randn(3, SIZE, device="cuda"))
            (result[0] if isinstance(result, tuple) else result).sum().backward()
        return graphs

    def test_captured(self):
        """On a GPU, all but the delivery of the outcomes is captured, in both directions."""
        graphs = self.compile_on_gpu(Model(Stack([Layer(0.5) for _ in range(3)])))
        self.assertEqual([[p.captured for p in graph.partitions] for graph in graphs], [[False, True]] * 2)
        # Parameters stay where they are, detached or not.
        self.assertEqual([len(graph.external_inputs) for graph in graphs], [1, 2])

    def test_caches_are_captured(self):
        graphs = self.compile_on_gpu(Decoder(is_given=False))
        self.assertEqual([[p.captured for p in graph.partitions] for graph in graphs], [[False, True]] * 2)


instantiate_parametrized_tests(DropTest)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
