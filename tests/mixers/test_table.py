"""The table of docs/mixers.md is that of the present yamls and classes."""

from mixer_table import PAGE, listed, mixer_table, range_of
from pages import read
from torch import tensor


def test_the_page_has_the_table_of_the_classes_and_yamls():
    table = mixer_table(*listed())
    assert table in read(PAGE), "python tools/mixer_table.py puts the present one there"
    assert len(table.splitlines()) >= 22


def test_half_lives_are_shown_from_the_shortest_to_the_longest():
    assert range_of(tensor([692.8, 1.38, 20.0])) == "1.4 to 693"
    assert range_of(tensor([22.0, 22.2])) == "22"
