"""Writes tables and charts: into a folder of results, and into a block of a Markdown page."""

import pathlib

from benchmarks import chart


def publish(text, series, label, title, folder, path, name):
    """Writes results.md and chart.svg, and the same into the page.

    Args:
      text: Markdown.
      series, label, title: of the chart, as of :func:`benchmarks.chart.bars`.
      folder: of the results.
      path: None or the page's.
      name: of the page's block.
    """
    (folder / "results.md").write_text(text)
    chart.bars(series, folder / "chart.svg", label, title)
    if not path:
        return
    path = pathlib.Path(path)
    if series:
        picture = path.with_name(f"{path.stem}-{name}.svg")
        chart.bars(series, picture, label, title)
        text = f"![{title}]({picture.name})\n\n{text}"
    replace_block(path, name, text)


def replace_block(path, name, text):
    """Puts ``text`` between the comments of a block and writes the page.

    Args:
      path: the page; it has one ``<!-- benchmarks: NAME -->`` and, behind it, one
        ``<!-- end of benchmarks: NAME -->``.
      name: NAME.
      text: Markdown.

    Raises:
      ValueError: when the page has not exactly one such block.
    """
    start, end = f"<!-- benchmarks: {name} -->", f"<!-- end of benchmarks: {name} -->"
    page = path.read_text()
    if page.count(start) != 1 or page.count(end) != 1 or page.index(end) < page.index(start):
        raise ValueError(
            f"{path.name} must have one {start} and, behind it, one {end}. Received: "
            f"{page.count(start)} and {page.count(end)}."
        )
    before, rest = page.split(start)
    path.write_text(f"{before}{start}\n\n{text.strip()}\n\n{end}{rest.split(end)[1]}")
