"""Every Python block of the README and the docs runs, and every file they name exists."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "tests" / "README.md"])
BLOCKS = {page: re.findall(r"```python\n(.*?)```", page.read_text(), re.S) for page in PAGES}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCKS[page]], ids=lambda p: str(p.relative_to(ROOT))
)
def test_blocks_run(page, capsys):
    """One after the other, as a reader would paste them into one session."""
    session = {"__name__": "__main__"}
    for number, block in enumerate(BLOCKS[page]):
        exec(compile(block, f"{page.name}, block {number}", "exec"), session)


def test_the_readme_has_a_block():
    assert BLOCKS[ROOT / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


def test_public_names_of_the_readme_exist():
    import keras_dp

    table = (ROOT / "README.md").read_text().split("## What you can use")[1].split("##")[0]
    for name in re.findall(r"`(DP\w+|[a-z_]+(?=\())", table):
        if name not in ("fit", "opt"):
            assert hasattr(keras_dp, name), name
