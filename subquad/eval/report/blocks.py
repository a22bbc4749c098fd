"""What a report is made of, the same for HTML and Markdown: sections of tables, plots, texts and gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from subquad.eval.plots import Plot

Mark = Literal["better", "worse", "tie", "open"]
MARK_WORDS: dict[Mark, str] = {"better": "better", "worse": "worse", "tie": "tie", "open": "open"}
DASH = "–"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What it shows.
        sort: Number to sort by; None sorts by the text.
        mark: What a difference says; shown as a word and a colour.
        note: A second line in small type.
    """

    text: str
    sort: float | None = None
    mark: Mark | None = None
    note: str = ""

    @property
    def word(self) -> str:
        """The mark as a word, empty without one."""
        return MARK_WORDS[self.mark] if self.mark else ""


NOTHING = Cell(DASH)


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        head: Column titles.
        rows: Cells, as many per row as there are titles.
        text_columns: Leading columns of text; the others are numbers, set flush right.
        caption: Sentence below it.
    """

    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    text_columns: int = 1
    caption: str = ""


@dataclass(frozen=True)
class Figures:
    """Plots, one below the other, or small ones side by side.

    Attributes:
        plots: The plots.
        small: Whether several fit beside each other.
    """

    kind: ClassVar[str] = "figures"
    plots: Sequence[Plot]
    small: bool = False


@dataclass(frozen=True)
class Text:
    """A paragraph.

    Attributes:
        text: Plain text.
        soft: Whether it is an aside.
    """

    kind: ClassVar[str] = "text"
    text: str
    soft: bool = False


@dataclass(frozen=True)
class Heading:
    """A heading inside a section.

    Attributes:
        text: Plain text.
    """

    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True)
class Bullets:
    """A list.

    Attributes:
        items: Plain texts.
    """

    kind: ClassVar[str] = "bullets"
    items: Sequence[str]


@dataclass(frozen=True)
class Missing:
    """Something that was not measured.

    Attributes:
        what: Its name.
        command: Command that measures it; empty where there is none.
    """

    kind: ClassVar[str] = "missing"
    what: str
    command: str = ""


@dataclass(frozen=True)
class Quote:
    """A text that a model wrote.

    Attributes:
        prompt: The text given.
        text: The text written.
    """

    kind: ClassVar[str] = "quote"
    prompt: str
    text: str


@dataclass(frozen=True)
class Code:
    """A file, folded away in HTML.

    Attributes:
        title: What it is.
        text: Its content.
        language: For Markdown's fence.
    """

    kind: ClassVar[str] = "code"
    title: str
    text: str
    language: str = ""


Block = Table | Figures | Text | Heading | Bullets | Missing | Quote | Code


@dataclass(frozen=True)
class Section:
    """A section of the report.

    Attributes:
        title: Its heading.
        blocks: Its content, in order.
    """

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        title: Of the page.
        subtitle: What was evaluated and when.
        headline: The answer in one sentence.
        success: Whether the headline is good news; None where there is no verdict.
        points: The sentences below it.
        summary: The table of the first screen.
        missing: What the summary would show, too, had it been measured.
        sections: Everything else.
    """

    title: str
    subtitle: str
    headline: str
    success: bool | None
    points: Sequence[str]
    summary: Table
    missing: Sequence[Missing] = ()
    sections: Sequence[Section] = field(default=())

    @property
    def plots(self) -> list[Plot]:
        """All plots, in order."""
        blocks = (block for section in self.sections for block in section.blocks)
        return [plot for block in blocks if isinstance(block, Figures) for plot in block.plots]


def cells(*texts: str) -> list[Cell]:
    """Return a row of plain texts."""
    return [Cell(text) for text in texts]
