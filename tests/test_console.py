"""Tables that go to a file are not squeezed into 80 columns."""

from subquad.console import FILE_WIDTH, open_console


def test_width_of_a_file_and_of_a_shell_that_says_its_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert open_console().width == FILE_WIDTH
    monkeypatch.setenv("COLUMNS", "50")
    assert open_console().width == 50
    assert open_console(quiet=True).quiet
