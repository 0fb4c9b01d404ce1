"""Tables: aligned, and cut only where a terminal is narrow."""

from cni_hostport.cli.table import ELLIPSIS, render

COLUMNS = ("HOST", "PORT", "POD")
ROWS = [("*", "80", "default/a-rather-long-name"), ("192.0.2.1", "8080", "-")]
SHRINK = {"POD": 8}
DROP = ("HOST", "POD")


def test_columns_are_as_wide_as_their_widest_cell():
    assert render(COLUMNS, ROWS) == (
        "HOST       PORT  POD\n*          80    default/a-rather-long-name\n192.0.2.1  8080  -"
    )


def test_nothing_is_cut_without_a_width():
    assert ELLIPSIS not in render(COLUMNS, ROWS, None, SHRINK, DROP)


def test_a_long_cell_is_cut_before_a_column_goes():
    lines = render(COLUMNS, ROWS, 30, SHRINK, DROP).split("\n")
    assert lines[0] == "HOST       PORT  POD"
    assert lines[1] == "*          80    default/a-ra…"
    assert max(map(len, lines)) == 30


def test_columns_go_least_important_first():
    assert render(COLUMNS, ROWS, 16, SHRINK, DROP).split("\n")[0] == "PORT  POD"
    assert render(COLUMNS, ROWS, 6, SHRINK, DROP).split("\n")[0] == "PORT"


def test_no_width_is_too_small():
    for width in range(1, 60):
        text = render(COLUMNS, ROWS, width, SHRINK, DROP)
        assert len(text.split("\n")) == 3
        assert max(map(len, text.split("\n"))) <= max(width, 4)
