"""What AOTAutograd asks with ``config.pygraph``, see ``torch._inductor.call_shortener``."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._dynamo.capabilities import direct_calls
from torch._inductor.pygraph.calls import direct, training


if TYPE_CHECKING:
    from collections.abc import Callable


class CallShortener:
    def note_forwarding(
        self,
        fn: Callable[..., Any],
        to: Callable[..., Any],
        num_outputs: int | None = None,
    ) -> None:
        """
        Note that ``fn`` only passes on its arguments and the results of ``to``.

        It may disable gradients, do more in its first call, and check the number of outputs.
        """
        direct.forwards_to[fn] = to, num_outputs
        direct_calls[fn] = direct.direct

    def runtime_wrapper(self, *args: Any) -> Callable[[list[Any]], Any]:
        return training.runtime_wrapper(*args)

    def specialize(self, function: type[Any], disable_amp: bool) -> None:
        training.specialize(function, disable_amp)


SHORTENER = CallShortener()
