"""Pictures that can be read on a light and on a dark page."""

import contextlib

# Grey with a contrast of about 4.5 to white and 4.2 to a dark page.
INK = "#767676"
COLOURS = ("#3b82c4", "#d9822b", "#2f9e6e", "#b0579b")


@contextlib.contextmanager
def figure(path, **subplots):
    """Opens a figure, and writes it when the block ends.

    Args:
      path: str, of the picture; the suffix decides the format.
      **subplots: arguments of ``pyplot.subplots``.

    Yields:
      The axes, as ``pyplot.subplots`` returns them.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    colours = dict.fromkeys(names, INK) | {"axes.prop_cycle": pyplot.cycler(color=COLOURS)}
    with pyplot.rc_context(colours | {"svg.hashsalt": "keras_dp"}):
        picture, axes = pyplot.subplots(layout="constrained", **subplots)
        try:
            yield axes
            metadata = {"Date": None} if str(path).endswith(".svg") else None
            picture.savefig(path, transparent=True, metadata=metadata, dpi=120)
        finally:
            pyplot.close(picture)
