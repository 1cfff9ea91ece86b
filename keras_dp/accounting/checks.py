"""Checks of what accounting is told: ValueError with what came, what may, and what to do."""

import math
import numbers

STEPS_ADVICE = "Count updates, the optimizer's iterations."


def checked_int(name, value, least, advice):
    """A whole number of any integer type, as int."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(
            f"{name} must be a whole number of at least {least}; received {value!r} "
            f"({type(value).__name__}). {advice}"
        )
    return int(value)


def checked_number(name, value, allows, allowed, advice):
    """A real number for which ``allows`` is true, as float."""
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = _as_float(value)
    if not allows(number):
        raise ValueError(
            f"{name} must be {allowed}; received {value!r} ({type(value).__name__}). {advice}"
        )
    return number


def checked_choice(name, value, choices):
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        options = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {options}; received {value!r}.")
    return value


def checked_sizes(num_examples, batch_size):
    """Sizes of the data set and of an expected batch that fits into it."""
    num_examples = checked_int("num_examples", num_examples, 1, "Pass the size of the data set.")
    batch_size = checked_int(
        "batch_size", batch_size, 1, "Pass the expected number of examples in one update."
    )
    if batch_size > num_examples:
        raise ValueError(
            f"batch_size={batch_size} is larger than num_examples={num_examples}, but an example "
            "takes part at most once in an update. Pass a batch_size, over all replicas and "
            "accumulated micro-batches, of at most num_examples."
        )
    return num_examples, batch_size


def checked_noise(noise_multiplier):
    """Standard deviation over clipping norm."""
    return checked_number(
        "noise_multiplier",
        noise_multiplier,
        lambda value: 0 <= value < math.inf,
        "a finite number of at least 0",
        "It is the standard deviation of the noise over l2_norm_clip; "
        "keras_dp.compute_noise_multiplier finds it for a target epsilon.",
    )


def checked_delta(delta):
    """A probability that is neither 0 nor 1."""
    return checked_number(
        "delta",
        delta,
        lambda value: 0 < value < 1,
        "a number above 0 and below 1",
        "It is the probability of a worse leak than epsilon says: choose it well below "
        "1 / num_examples, for example 1e-5 for 10000 examples.",
    )


def checked_target(target_epsilon):
    """An epsilon that somebody wants to stay within."""
    return checked_number(
        "target_epsilon",
        target_epsilon,
        lambda value: 0 < value < math.inf,
        "a finite number above 0",
        "Pass the largest epsilon that you accept, for example 3.0.",
    )


def checked_duration(epochs, steps, steps_per_epoch):
    """The number of updates, from the one of ``epochs`` and ``steps`` that was given."""
    if (epochs is None) == (steps is None):
        raise ValueError(
            f"Exactly one of epochs and steps is needed; received epochs={epochs!r} and "
            f"steps={steps!r}. Pass epochs=, or the number of updates as steps=."
        )
    if steps is not None:
        return checked_int("steps", steps, 1, STEPS_ADVICE)
    if isinstance(epochs, numbers.Real) and not isinstance(epochs, numbers.Integral):
        epochs = int(epochs) if float(epochs).is_integer() else epochs
    advice = "For a part of an epoch pass the number of updates as steps=."
    return checked_int("epochs", epochs, 1, advice) * steps_per_epoch


def _as_float(value):
    try:
        return float(value)
    except OverflowError:
        return math.inf
