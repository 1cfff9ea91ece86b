"""Charts that can be read on a light and on a dark page."""

import contextlib

# Grey with a contrast of 4.5 to white and of 4.2 to GitHub's dark page.
_INK = "#767676"
_COLOURS = ("#3b82c4", "#d9822b", "#2f9e6e", "#b0579b", "#8a8a3a", "#c4504f", "#6f6fd0", "#3aa0a0")


def bars(series, path, label, title):
    """Draws ratios as grouped bars from a line at 1, on a logarithmic axis, a group a model.

    Args:
      series: {name: {model: ratio}}; a model may lack in some of them. Nothing is drawn when empty.
      path: of the picture; the suffix decides the format.
      label: of the axis of values.
      title: of the picture.
    """
    if not series:
        return
    models = list(dict.fromkeys(model for values in series.values() for model in values))
    with _axes(path, title, max(7.0, 0.32 * len(models) * (len(series) + 1))) as axes:
        from matplotlib import ticker

        thickness = 0.84 / len(series)
        for number, (name, values) in enumerate(series.items()):
            offset = (number - (len(series) - 1) / 2) * thickness
            places = [models.index(model) + offset for model in values]
            drawn = axes.bar(
                places,
                [value - 1 for value in values.values()],
                thickness,
                bottom=1,
                label=name,
                color=_COLOURS[number % len(_COLOURS)],
            )
            texts = [f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in values.values()]
            axes.bar_label(drawn, texts, padding=2, fontsize=7)
        axes.axhline(1, color=_INK, linewidth=1)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5)))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%gx"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
        axes.margins(y=0.12)
        axes.set_xticks(range(len(models)), models)
        axes.set_xlabel("model")
        axes.set_ylabel(label)
        axes.grid(axis="y", alpha=0.25)


def curves(series, path, x_label, y_label, title):
    """Draws curves on logarithmic axes.

    Args:
      series: {name: (x values, y values)}; nothing is drawn when empty. A name's words before a
        comma choose the colour, those behind it the kind of line.
      path: of the picture; the suffix decides the format.
      x_label, y_label: of the axes.
      title: of the picture.
    """
    if not series:
        return
    subjects = list(dict.fromkeys(name.split(",")[0] for name in series))
    kinds = list(dict.fromkeys(name.partition(",")[2] for name in series))
    with _axes(path, title, 7.0) as axes:
        for name, (x, y) in series.items():
            subject, _, kind = name.partition(",")
            axes.plot(
                x,
                y,
                ("-", "--", ":", "-.")[kinds.index(kind) % 4],
                label=name,
                color=_COLOURS[subjects.index(subject) % len(_COLOURS)],
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.25)


@contextlib.contextmanager
def _axes(path, title, width):
    """Axes to draw on, which become the picture ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK}
    colours |= {"xtick.color": _INK, "ytick.color": _INK, "svg.hashsalt": "keras_dp"}
    with pyplot.rc_context(colours):
        figure, axes = pyplot.subplots(figsize=(width, 4.2), layout="constrained")
        yield axes
        axes.set_title(title)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, metadata=metadata, dpi=120)
        pyplot.close(figure)
