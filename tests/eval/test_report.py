"""The report: complete, self-contained, made from files alone."""

from __future__ import annotations

import base64
import io
import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from subquad.errors import OutputError
from subquad.eval.report import write_report
from subquad.eval.report.blocks import (
    Bullets,
    Cell,
    Code,
    Heading,
    Missing,
    Quote,
    Report,
    Section,
    Table,
    Text,
)
from subquad.eval.report.render import render_report
from subquad.eval.results import PairedDifference
from subquad.eval.storage import save_results
from subquad.eval.summary import print_summary

from .conftest import make_results

PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """Collects what a browser would fetch, the text, and tags left open."""

    def __init__(self):
        super().__init__()
        self.sources, self.tags, self.open, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read_page(path):
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


def make_run(folder, **changes):
    save_results(make_results(**changes), folder)
    records = [{"stage": "stage1", "tokens": 512 * step, "loss": 1 / step} for step in range(1, 31)]
    records += [{"stage": "stage2", "tokens": 512 * step, "loss": 0.3 - step / 1000} for step in range(1, 11)]
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "recipe.yaml").write_text("model:\n  source: smollm2-135m\n")
    return folder


def test_report_holds_the_numbers(tmp_path):
    paths = write_report(make_run(tmp_path))
    markdown = paths.markdown.read_text(encoding="utf-8")
    html = " ".join("".join(read_page(paths.html).text).split())
    for text in (markdown, html):
        for number in ("3.1234 ± 0.0320", "2.9991", "-0.0278 ± 0.0022", "18.3 %", "1,138 tokens", "20,480", "10,240"):
            assert number in text
        for words in (
            "beats its own start and the window-only control",
            "subquad run demo",
            "0123456789abcdef",
            "torch 2.13.0",
            "3 min 23 s",
            "source: smollm2-135m",
            "A note of this run.",
            "50 MiB",
        ):
            assert words in text


def test_html_is_self_contained(tmp_path):
    paths = write_report(make_run(tmp_path))
    page = read_page(paths.html)
    assert page.tags.count("img") == 4
    images = [source for source in page.sources if not source.startswith("#")]
    assert len(images) == 4
    for source in images:
        assert base64.b64decode(source.removeprefix("data:image/png;base64,")).startswith(PNG)
    assert page.tags.count("script") == 1
    assert "link" not in page.tags
    html = paths.html.read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import", html)


def test_markdown_links_to_plots_that_exist(tmp_path):
    paths = write_report(make_run(tmp_path))
    links = re.findall(r"\]\(([^)]+)\)", paths.markdown.read_text(encoding="utf-8"))
    assert sorted(links) == [
        "plots/loss_by_position.png",
        "plots/memory.png",
        "plots/training_stage1.png",
        "plots/training_stage2.png",
    ]
    for link in links:
        assert (tmp_path / link).read_bytes().startswith(PNG)
    assert sorted(paths.plots) == sorted(tmp_path / link for link in links)


def test_markdown_tables_are_well_formed(tmp_path):
    lines = write_report(make_run(tmp_path)).markdown.read_text(encoding="utf-8").splitlines()
    blocks, block = [], []
    for line in [*lines, ""]:
        if line.startswith("|"):
            block.append(line)
        elif block:
            blocks.append(block)
            block = []
    assert len(blocks) == 5
    for block in blocks:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block}
        assert len(widths) == 1, block
        assert set(block[1]) <= set("|-:")


def test_text_of_the_run_cannot_break_the_page(tmp_path):
    paths = write_report(make_run(tmp_path, name="<script>x</script>", command="run a|b"))
    page = read_page(paths.html)
    assert page.tags.count("script") == 1
    assert "strong | and <b>bold</b>." in "".join(page.text)
    assert "run a\\|b" in paths.markdown.read_text(encoding="utf-8")


HOSTILE = (
    "<script>x</script>",
    "\\<img src=https://evil.example/x.png>",
    "![pixel](https://evil.example/x.png)",
    "[here](https://evil.example)",
    "One\n<div>\n</div>",
    "# One\n## two",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_cannot_break_the_markdown(tmp_path, text):
    table = Table([text, "b"], [[Cell(text, note=text), Cell("1")]], caption=text)
    blocks = [table, Text(text), Heading(text), Bullets([text]), Missing(text, text), Quote(text, text)]
    report = Report(text, text, text, None, [text], table, [Missing(text, text)], [Section(text, blocks)])
    html = MarkdownIt("commonmark").enable("table").render(render_report(report, tmp_path).markdown.read_text())
    assert not re.search(r"<(script|div|img|a )|<h2>two", html)
    # The text is there, if not as markup.
    assert " ".join(unescape(html).split()).count(" ".join(text.splitlines())) == 22


@pytest.mark.parametrize("fence", ["```", "`````", "~~~"])
def test_a_file_with_a_fence_stays_one_block(tmp_path, fence):
    recipe = f"model:\n# {fence}\n{fence}\n# <script>x</script>"
    report = Report("t", "s", "h", None, [], Table([], []), [], [Section("s", [Code("Recipe", recipe, "yaml")])])
    tokens = MarkdownIt("commonmark").parse(render_report(report, tmp_path).markdown.read_text())
    assert [token.content for token in tokens if token.type == "fence"] == [recipe + "\n"]


@pytest.mark.parametrize("command", ["subquad eval a`b", "subquad eval '``'"])
def test_a_command_with_backticks_stays_code(tmp_path, command):
    report = Report("t", "s", "h", None, [], Table([], []), [Missing("speed", command)])
    html = MarkdownIt("commonmark").render(render_report(report, tmp_path).markdown.read_text())
    assert f"<code>{command}</code>" in html


def test_a_lost_comparison_is_said_in_both_files(tmp_path):
    pairs = [PairedDifference(first="student", second="window_only", difference=0.04, standard_error=0.003)]
    paths = write_report(make_run(tmp_path, differences=pairs))
    for path in (paths.markdown, paths.html):
        text = path.read_text(encoding="utf-8")
        assert "does not beat the window-only control" in text
        assert "+0.0400 ± 0.0030" in text
    assert 'class="verdict"' in paths.html.read_text(encoding="utf-8")


def test_report_without_log_recipe_memory_and_controls(tmp_path):
    loss = make_results().loss.model_copy(
        update={"student_start": None, "window_only": None, "student_without_far": None, "gap_closed": None}
    )
    save_results(
        make_results(loss=loss, differences=[], by_position=[], cache_bytes=None, samples=[], commit=None), tmp_path
    )
    paths = write_report(tmp_path)
    text = paths.markdown.read_text(encoding="utf-8")
    assert paths.plots == []
    assert "no log.jsonl" in text
    assert "Memory was not measured" in text
    assert "not run from a checkout" in text
    read_page(paths.html)


def test_a_damaged_log_line_is_noted_and_the_rest_drawn(tmp_path):
    make_run(tmp_path)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"stage": "stage2", "st')
    paths = write_report(tmp_path)
    assert len(paths.plots) == 4
    assert "Unreadable lines of log.jsonl that were left out: 1." in paths.markdown.read_text(encoding="utf-8")


def test_writing_twice_gives_the_same_text(tmp_path):
    make_run(tmp_path)
    first = write_report(tmp_path).markdown.read_text()
    assert write_report(tmp_path).markdown.read_text() == first


@pytest.mark.parametrize("content", [None, "{broken"])
def test_missing_or_damaged_results_write_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OutputError, match=r"results\.json"):
        write_report(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_in_place_of_the_plots_is_an_output_error(tmp_path):
    make_run(tmp_path)
    (tmp_path / "plots").write_text("in the way")
    with pytest.raises(OutputError, match="plots"):
        write_report(tmp_path)


def test_summary_ends_with_the_path(tmp_path):
    out = io.StringIO()
    path = tmp_path / ("long" * 30) / "report.html"
    print_summary(make_results(), path, Console(file=out, width=100))
    text = out.getvalue()
    assert text.splitlines()[-1] == f"Report: {path}"
    for words in ("Teacher (softmax)", "3.1234 ± 0.0320", "1,138 tokens", "50 MiB", "strong | and <b>bold</b>."):
        assert words in text
    assert "beats its own start" in text
