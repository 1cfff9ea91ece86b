"""Numbers that users give."""

import numbers


def checked_int(value, name, minimum):
    """`value` as an int >= `minimum`, or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int >= {minimum}. Received: {value!r}.")
    if value < minimum:
        raise ValueError(f"{name} must be an int >= {minimum}. Received: {value}.")
    return int(value)
