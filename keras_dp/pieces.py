"""Pieces: how one draw reaches the step in several batches of a fixed size.

A draw of the sampler can be larger than what fits in memory at once, and has no fixed size.
Delivered in pieces it is exact at any size: the step adds up the clipped sums of the pieces of
one draw and makes its update, with noise, at the last one. A batch of such a sampler is
``(Piece(x, draw, last), y, sample_weight)``, so that the step never has to guess where a draw
ends: the number of the draw tells when another one begins (a draw that was left unfinished was
never released), ``last`` when it ends, and ``position`` whether none of its pieces was lost on
the way: only a draw whose pieces all arrived may become an update.
"""

from typing import Any, NamedTuple

import numpy as np


class Piece(NamedTuple):
    """The inputs of one part of a draw.

    Attributes:
      x: nest of arrays ``[rows, ...]``, the inputs of the model.
      draw: int64, the number of the draw, different for every draw of a sampler.
      last: bool, whether the draw is complete with this piece.
      position: int64, how many pieces of the draw came before this one.

    The last three are the same in each of ``[rows]`` entries, so that what splits a batch between
    devices gives them to every device; the first entry is read.
    """

    x: Any
    draw: Any
    last: Any
    position: Any = None

    @classmethod
    def of(cls, x, rows, draw, last, position):
        """A piece of so many rows, of plain numbers."""
        return cls(
            x,
            draw=np.full(rows, draw, np.int64),
            last=np.full(rows, last),
            position=np.full(rows, position, np.int64),
        )
