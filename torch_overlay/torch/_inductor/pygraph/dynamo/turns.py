"""
The loop of a frame whose body is a function (see loops.py), which Dynamo compiles. A body makes one turn with the
variables that the loop stores, followed by others that it reads. It returns a condition, the exit if it is true, the
exit if it is false, and the stored variables. The functions below return which of ``exits`` was taken, and the
variables.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Body = Callable[..., tuple[Any, ...]]
    Values = tuple[Any, ...]


# What a body returns for an exit if the next turn follows. A for loop without a further item has this exit, too.
NEXT = 0

# The exit of a loop that was not entered.
NOT_ENTERED = -1


def for_each(body: Body, items: Iterable[Any], state: Values, others: Values, exits: tuple[int, ...]) -> Values:
    taken = NOT_ENTERED
    for item in items:
        turn = body(item, *state, *others)
        taken = turn[1] if turn[0] else turn[2]
        state = turn[3:]
        if taken != NEXT:
            break
    return leave(taken, state, exits)


def while_true(body: Body, condition: Any, state: Values, others: Values, exits: tuple[int, ...]) -> Values:
    if condition:
        return repeat(body, state, others, exits)
    return leave(NOT_ENTERED, state, exits)


def while_false(body: Body, condition: Any, state: Values, others: Values, exits: tuple[int, ...]) -> Values:
    if condition:
        return leave(NOT_ENTERED, state, exits)
    return repeat(body, state, others, exits)


def repeat(body: Body, state: Values, others: Values, exits: tuple[int, ...]) -> Values:
    taken = NEXT
    while taken == NEXT:
        turn = body(*state, *others)
        taken = turn[1] if turn[0] else turn[2]
        state = turn[3:]
    return leave(taken, state, exits)


def leave(taken: int, state: Values, exits: tuple[int, ...]) -> Values:
    return (*(taken == number for number in exits), state)
