# Owner(s): ["module: inductor"]
"""copy.deepcopy of plain objects: values, identities and changes are those of eager mode."""

from __future__ import annotations

import copy

import torch
import torch._dynamo
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, subtest
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.pygraph_mend import BOX, MendTestCase


class Config:
    attribute_map: dict[str, str] = {}

    def __init__(self):
        self.layers = 2
        self.kinds = ["full", "sliding"]
        self.rope = {"theta": 2.0, "scaling": {"factor": 4}}
        self.dtype = torch.float32
        self.name = "small"


class Mapped(Config):
    """As transformers' PreTrainedConfig."""

    attribute_map = {"num_layers": "layers"}

    def __init__(self):
        super().__init__()
        self.inner = Config()
        self.decoder_layers = 5

    def __setattr__(self, key, value):
        super().__setattr__(super().__getattribute__("attribute_map").get(key, key), value)

    def __getattribute__(self, key):
        if key != "attribute_map" and key in super().__getattribute__("attribute_map"):
            key = super().__getattribute__("attribute_map")[key]
        return super().__getattribute__(key)

    def to_dict(self):
        output = copy.deepcopy(self.__dict__)
        output["kind"] = type(self).__name__
        return output

    def decoder(self):
        result = copy.deepcopy(self)
        for key, value in result.to_dict().items():
            if key.startswith("decoder_"):
                setattr(result, key.removeprefix("decoder_"), value)
        return result


CONFIG = Config()
MAPPED = Mapped()


def reads(x):
    config = copy.deepcopy(CONFIG)
    for _ in range(config.layers):
        x = x * config.rope["theta"] + config.rope["scaling"]["factor"]
    return x.to(config.dtype) + len(config.kinds)


def changes(x):
    config = copy.deepcopy(CONFIG)
    config.kinds.append("more")
    config.rope["scaling"]["factor"] = 7
    config.layers += 1
    return x + config.layers + len(config.kinds) + len(CONFIG.kinds) + CONFIG.layers + config.rope["scaling"]["factor"]


def maps(x):
    config = MAPPED.decoder()
    return x * config.num_layers + config.inner.layers + MAPPED.num_layers


def returns(x):
    config = copy.deepcopy(CONFIG)
    return x + 1, vars(config), type(config) is Config, config is CONFIG, config.kinds is CONFIG.kinds


def plain_values(x):
    kinds, text, pair = copy.deepcopy(CONFIG.kinds), copy.deepcopy("text"), (1, (2, "a"))
    kinds.append(text)
    return x + len(kinds) + len(CONFIG.kinds), kinds, copy.deepcopy(pair) is pair


ONE_GRAPH = [reads, changes, maps, returns, plain_values]


class Counting(Config):
    def __deepcopy__(self, memo):
        BOX.step += 1
        return self


class Shared(Config):
    def __init__(self):
        super().__init__()
        self.same = self.kinds


class Slotted:
    __slots__ = ("layers",)

    def __init__(self):
        self.layers = 3


COUNTING, SHARED, SLOTTED = Counting(), Shared(), Slotted()


def copies_by_itself(x):
    return x + copy.deepcopy(COUNTING).layers


def copies_shared(x):
    config = copy.deepcopy(SHARED)
    config.same.append("more")
    return x + len(config.kinds)


def copies_slots(x):
    return x + copy.deepcopy(SLOTTED).layers


def copies_tensor(x):
    return copy.deepcopy([x])[0] + 1


def returns_mapped(x):
    config = copy.deepcopy(MAPPED)
    return x + 1, vars(config.inner), config.num_layers, config


BREAKS = [copies_by_itself, copies_shared, copies_slots, copies_tensor]


class CopyTest(MendTestCase):
    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in ONE_GRAPH])
    def test_one_graph(self, fn):
        self.assertEqual(self.check(fn), {"graphs": 1, "breaks": 0})

    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in BREAKS])
    def test_breaks(self, fn):
        found = self.check(fn)
        _, without = self.observe_compiled(fn, pygraph_mend=False)
        self.assertEqual(found, without)

    @parametrize("fn", [subtest(fn, name=fn.__name__) for fn in (changes, maps)])
    def test_inductor(self, fn):
        with self.inductor():
            self.assertEqual(self.check(fn), {"graphs": 1, "breaks": 0})

    def test_returned_copy_of_a_class_that_sets_attributes(self):
        _, inner, layers, config = torch.compile(returns_mapped, options={"pygraph": True})(torch.ones(2))
        self.assertEqual((type(config), layers), (Mapped, 2))
        self.assertEqual(vars(config) | {"inner": inner}, vars(MAPPED) | {"inner": vars(MAPPED.inner)})

    def test_guards(self):
        """A change of any part of the object is seen by the next call."""
        config = Config()

        def fn(x):
            copied = copy.deepcopy(config)
            return x + copied.layers * len(copied.__dict__), copied.kinds, copied.rope

        compiled = torch.compile(fn, options={"pygraph": True})
        x = torch.ones(2)

        def change_nested():
            config.rope["scaling"]["factor"] = 8

        changes = (
            lambda: setattr(config, "layers", 3),
            lambda: config.kinds.append("new"),
            lambda: config.kinds.__setitem__(0, "other"),
            change_nested,
            lambda: setattr(config, "added", 1),
            lambda: delattr(config, "added"),
            lambda: setattr(config, "name", ["list"]),
        )
        for change in changes:
            self.assertEqual(compiled(x), fn(x))
            change()
            self.assertEqual(compiled(x), fn(x))


instantiate_parametrized_tests(CopyTest)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
