"""Sentences of README, guides and studies are short, and a cell of a table has one number."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = ["README.md", "benchmark/README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
# The reference is generated
PAGES = [page for page in TABLES if page != "docs/options_reference.md"]
LONGEST = 35
NUMBERS = re.compile(r"\|(?=\s*[-+\u2212]?[\d.]+(?: %)?(?:,\s+[-+\u2212]?[\d.]+(?: %)?)+\s*\|)[^|]*", re.MULTILINE)


def sentences(text):
    """The prose of a page: without code, comments, headings, tables, pictures and addresses; code in a line is one word."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*[#|].*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "Code", text)
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.MULTILINE):
        yield from re.split(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z\"*(])", " ".join(paragraph.split()))


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page):
    """No sentence has more than 35 words."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not [sentence for sentence in sentences(text) if len(sentence.split()) > LONGEST]


@pytest.mark.parametrize("page", TABLES)
def test_one_number_in_a_cell(page):
    """Numbers that belong to several rows or columns of a table have cells of their own."""
    lines = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert not [cell for line in lines for cell in NUMBERS.findall(line)]


def test_numbers_are_found():
    """A list of numbers is more than one; a number with thousands, an interval or a spread is not."""
    assert NUMBERS.findall("| a | 0.5, \u22121 | 3 %, 4 % |") == ["| 0.5, \u22121 ", "| 3 %, 4 % "]
    assert NUMBERS.findall("| a | 2 (1 to 3) | 1 ± 0.5 | `a=1, b=2` | 1,024 |") == []


def test_words_are_counted():
    """What is no prose does not count, and a sentence ends where the next one begins."""
    text = "# A b\n\nOne [two](x.md) `three four`. Five\nsix.\n\n- Seven!\n  | eight |\n```python\nnine\n```\n<!-- ten -->\n"
    assert [each for each in sentences(text) if each] == ["One two Code.", "Five six.", "Seven!"]
