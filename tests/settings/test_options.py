"""Options of mixers, evaluations and benches: their yamls, and classes that inherit defaults."""

import pytest
import yaml
from mixer_table import PAGE, listed, mixer_table, range_of
from pages import read
from torch import tensor
from write_yamls import as_yaml, yamls

from attnbench.settings.errors import UserError
from attnbench.settings.options import Options, option
from attnbench.settings.registry import build

YAMLS = {f"{path.parent.name}/{path.stem}": (path, content) for path, content in yamls()}


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_has_the_options_of_its_class(name):
    path, content = YAMLS[name]
    assert path.read_text(encoding="utf-8") == content, "python tools/write_yamls.py writes it"


class Shape(Options):
    """A shape.

    More about it.
    """

    width: int = option(64, "of the model", minimum=1)
    sizes: list[int] = option([1, 2], "in this order", rising=True)
    table: dict = option({}, "long")


class Wide(Shape):
    """A wide shape."""

    depth: int | None = option(None, "x" * 118)
    width, sizes = 128, [3]


class Own(Shape):
    def __init__(self, *, length: int) -> None:
        self.length = length


def test_an_option_without_an_annotation_has_another_default_and_the_old_rule():
    wide, other = Wide(), Wide(width=5)
    assert (wide.width, wide.sizes, wide.depth, other.width) == (128, [3], None, 5)
    wide.sizes.append(4)
    assert Wide().sizes == [3]
    assert Shape().width == 64
    assert Own(length=3).length == 3


def test_a_yaml_has_own_options_first_and_every_help():
    assert as_yaml(Wide, "a.Wide") == (
        f"# A wide shape.\n_target_: a.Wide\n# {'x' * 118}\ndepth: null\n"
        "width: 128 # of the model\nsizes: [3] # in this order\ntable: {} # long\n"
    )
    text = as_yaml(Shape, "a.Shape", "eval.shape")
    assert text.startswith("# @package eval.shape\n# A shape.\n_target_: a.Shape\n")
    assert yaml.safe_load(text) == {"_target_": "a.Shape", "width": 64, "sizes": [1, 2], "table": {}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 0}, "eval.x.width=0: must be at least 1"),
        ({"width": "8"}, "eval.x.width=8: must be an integer"),
        ({"sizes": [2, 1]}, "eval.x.sizes=\\[2, 1\\]: must rise"),
        ({"height": 3}, "eval.x.height=3: unknown setting"),
    ],
)
def test_a_value_that_breaks_its_rule_is_named(options, words, monkeypatch):
    monkeypatch.setattr("attnbench.settings.registry.resolve", lambda target, base: base)
    with pytest.raises(UserError, match=words):
        build("x.Shape", options, Shape, group="eval.x")


def test_the_page_has_the_table_of_the_classes_and_yamls():
    table = mixer_table(*listed())
    assert table in read(PAGE), "python tools/mixer_table.py puts the present one there"
    assert len(table.splitlines()) >= 22


def test_half_lives_are_shown_from_the_shortest_to_the_longest():
    assert range_of(tensor([692.8, 1.38, 20.0])) == "1.4 to 693"
    assert range_of(tensor([22.0, 22.2])) == "22"
