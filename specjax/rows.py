"""Reading and writing each row of a batch at places of its own.

Written as ``x[rows, places]``, rows that do not touch each other look to the compiler
as if they might: on a mesh it would send all of them to every device.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Int, Shaped


def take(
    x: Shaped[Array, "B N *rest"], places: Int[Array, "B ..."]
) -> Shaped[Array, "B ..."]:
    """``x[b, places[b]]`` of every row b; a place past the end is the last.

    Args:
        x: of each row, N entries.
        places: numbers of entries, one or more per row.
    """
    return jax.vmap(lambda own, at: own[at])(x, places)


def put(
    x: Shaped[Array, "B N *rest"],
    places: Int[Array, "B ..."],
    values: Shaped[Array, "B ..."],
) -> Shaped[Array, "B N *rest"]:
    """The same with ``x[b, places[b]] = values[b]``; past the end nothing is written.

    Args:
        x: of each row, N entries.
        places: numbers of entries, one or more per row.
        values: to write there.
    """
    return jax.vmap(lambda own, at, new: own.at[at].set(new, mode="drop"))(
        x, places, values
    )
