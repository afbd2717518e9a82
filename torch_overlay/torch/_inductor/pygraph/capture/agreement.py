"""
How ranks take one decision. Each rank posts what it knows under a key. The rank that posts last decides for all and writes
the decision into a register, whose first value holds. A rank that does not take part, or has waited too long, writes
that there is no agreement. So all ranks return the same, and each within the time-out. The exchange goes over the store
of the default group, on the CPU. The protocol is a generator of requests to a store, which tests answer in every order.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import logging
import time
from collections import Counter
from typing import Any, TYPE_CHECKING

import torch.distributed as dist
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from torch._inductor.pygraph.types.partition import Collective


log = logging.getLogger(__name__)

# How long a rank waits for the others, which may have more to compile. At most this part of a group's own time-out:
# the device of another rank may wait for a collective meanwhile.
PATIENCE = datetime.timedelta(minutes=2)
PART_OF_TIMEOUT = 4

# Each wait in vain makes later ones this much shorter: all of them together are not much longer than the first.
SHORTER = 4
_waits_in_vain = 0

# A request to a store: the name of its method, and arguments.
Request = tuple[Any, ...]


def connected(key: str, rank: int, own: Iterable[int]) -> Generator[Request, Any, list[int] | None]:
    """Return the ranks that groups, in the end, connect with this one, whose groups have the ranks ``own``, or None."""
    known = {rank: sorted(own)}
    yield "set", f"{key}/connects/{rank}", json.dumps(known[rank])
    while missing := OrderedSet(itertools.chain.from_iterable(known.values())) - known.keys():
        for other in sorted(missing):
            if not (yield "wait", f"{key}/connects/{other}"):
                return None
            known[other] = json.loads((yield "get", f"{key}/connects/{other}"))
            if not known[other]:
                return None
    return sorted(known)


def vote(
    key: str, rank: int, members: Sequence[int], value: Any, decide: Callable[[list[Any]], Any]
) -> Generator[Request, Any, Any]:
    """
    Return what ``decide`` makes of the values of all members, or None if one of them does not take part in time: its
    value is None. Another decision has another key.
    """
    register = f"{key}/decision"
    if value is None:
        yield "compare_set", register, "", "null"
    else:
        yield "set", f"{key}/{rank}", json.dumps(value)
        if (yield "add", f"{key}/posted", 1) == len(members):
            values = []
            for member in members:
                values.append(json.loads((yield "get", f"{key}/{member}")))
            yield "compare_set", register, "", json.dumps(decide(values))
        elif not (yield "wait", register):
            yield "compare_set", register, "", "null"
    return json.loads((yield "get", register))


def agreement(
    name: str, rank: int, groups: Sequence[Sequence[int]], value: Any, decide: Callable[[list[Any]], Any]
) -> Generator[Request, Any, Any]:
    """As ``vote``, among all ranks that ``groups`` connect."""
    members: Sequence[int] | None = sorted(OrderedSet(itertools.chain.from_iterable(groups)))
    key = f"pygraph/{name}"
    if len(groups) > 1:
        members = None if value is None else (yield from connected(key, rank, members))
        if members is None:
            # Others need not wait for this rank.
            yield "set", f"{key}/connects/{rank}", "[]"
            return None
    # Ranks of another pipeline stage or replica may have a function of this name.
    digest = hashlib.sha256(json.dumps(members).encode()).hexdigest()[:16]
    return (yield from vote(f"{key}/{digest}", rank, members, value, decide))


def run(requests: Generator[Request, Any, Any], store: dist.Store, patience: datetime.timedelta) -> Any:
    """Answer requests by ``store``. All of their waits together end after ``patience``."""
    deadline = time.monotonic() + patience.total_seconds()
    answer: Any = None
    while True:
        try:
            method, key, *args = requests.send(answer)
        except StopIteration as end:
            return end.value
        if method != "wait":
            answer = getattr(store, method)(key, *args)
            continue
        try:
            # A store takes a time-out of 0 for none.
            store.wait([key], datetime.timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
            answer = True
        except RuntimeError:
            # DistStoreError. A FileStore raises nothing more special than this.
            answer = False


def agree(
    groups: Sequence[str], name: str, value: Any, decide: Callable[[list[Any]], Any] = lambda values: True
) -> Any:
    """
    Return what the ranks of process groups decide together, and None if they do not. Waits for the other ranks, unless
    ``value`` is None: this rank does not take part. The name is the same on all ranks, and no other step has it.
    """
    global _waits_in_vain
    try:
        found = [dist.distributed_c10d._resolve_process_group(group) for group in groups]  # type: ignore[arg-type]
        ranks = [dist.get_process_group_ranks(group) for group in found]
        patience = min([PATIENCE, *(timeout / PART_OF_TIMEOUT for group in found for timeout in _timeouts(group))])
        patience /= SHORTER**_waits_in_vain
        store = dist.distributed_c10d._get_default_store()
        began = time.monotonic()
        decision = run(agreement(name, dist.get_rank(), ranks, value, decide), store, patience)
        _waits_in_vain += decision is None and time.monotonic() - began >= patience.total_seconds()
        return decision
    except (KeyError, RuntimeError, ValueError) as e:
        log.info("ranks cannot agree on %s: %s", name, str(e).partition("\n")[0])
        return None


# How often this process recorded a function, by name. Other ranks record it as often.
_recordings: Counter[str] = Counter()


class Steps:
    """
    The steps of a recording, which its ranks take together: the capture, each collective in it, and deploying the graph.
    Each returns whether all ranks take it.

    NCCL exchanges addresses with the other ranks while it captures a collective, and waits for them without a time-out
    (ncclShmemAllgather of NCCL 2.28). So a rank comes to a collective only if the others of its group do.

    Args:
        function: its name, the same on all ranks
        groups: names of all process groups of its collectives

    Attributes:
        has_begun: all ranks capture
    """

    def __init__(self, function: str, groups: Sequence[str]) -> None:
        _recordings[function] += 1
        self.name = f"{function}/{_recordings[function]}"
        self.groups = tuple(groups)
        self.has_begun = False
        # At which other ranks may wait for this one, and the groups that take them.
        self._ahead = {"capture": self.groups}
        self._captured: Counter[str] = Counter()

    def capture(self) -> bool:
        self.has_begun = self._take("capture")
        if self.has_begun:
            self._ahead = {**{f"{group}/0": (group,) for group in self.groups}, "deploy": self.groups}
        return self.has_begun

    def collective(self, group: str | None) -> bool:
        if group not in self.groups:
            # It is not known who takes part.
            return True
        is_taken = self._take(f"{group}/{self._captured[group]}")
        self._captured[group] += 1
        if is_taken:
            self._ahead[f"{group}/{self._captured[group]}"] = (group,)
        return is_taken

    def deploy(self) -> bool:
        groups, self._ahead = self._ahead, {"deploy": self.groups}
        return "deploy" in groups and self._take("deploy")

    def refuse(self) -> None:
        """Tell the other ranks that this one does not go on, unless they know."""
        ahead, self._ahead = self._ahead, {}
        for step, groups in ahead.items():
            if groups:
                agree(groups, f"{self.name}/{step}", None)

    def _take(self, step: str) -> bool:
        groups = self._ahead.pop(step)
        return bool(groups) and bool(agree(groups, f"{self.name}/{step}", True))


def sizes(groups: Sequence[str]) -> list[int]:
    """Return how many ranks are in each group, nothing if that is not known."""
    try:
        return [dist.distributed_c10d._resolve_process_group(group).size() for group in groups]  # type: ignore[arg-type]
    except (KeyError, RuntimeError, ValueError):
        return []


def rank_in(group: str) -> int | None:
    """Return which rank of a group this process is, None if that is not known."""
    try:
        return dist.distributed_c10d._resolve_process_group(group).rank()  # type: ignore[arg-type]
    except (KeyError, RuntimeError, ValueError):
        return None


def own_name() -> str:
    """Return which rank this process is, empty if it is alone."""
    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return f"rank {dist.get_rank()}" if has_others else ""


def describe(collectives: Iterable[Collective]) -> list[str]:
    """Return for people what a function's collectives are, and the ranks of their groups."""
    counts = Counter((c.op, c.group) for c in collectives if c.group is not None)
    return [f"{op} x {count} in group {group} of {_ranks(group)}" for (op, group), count in counts.items()]


def _ranks(group: str) -> str:
    try:
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group))  # type: ignore[arg-type]
    except (KeyError, RuntimeError, ValueError):
        return "unknown ranks"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 8 else f"{len(ranks)} ranks"


def _timeouts(group: dist.ProcessGroup) -> Iterable[datetime.timedelta]:
    for device in group._device_types:
        try:
            yield group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            # Not all backends have options.
            continue
