"""Tables in notebooks: no NaN, None, <NA> or inf."""

from __future__ import annotations

import math
import re

import pandas as pd

from launch.widgets import blanks


def test_a_table_says_nothing_or_endless_and_keeps_its_digits():
    columns = {
        "seconds": [1.5, math.nan],
        "bytes": pd.array([1, None], dtype="Int64"),
        "word": ["<a>" * 20, None],
        "speed": [math.inf, -math.inf],
        "fits": [True, False],
    }
    table = pd.DataFrame(columns)
    shown = re.findall("<td>(.*?)</td>", blanks.page(table))
    assert shown == ["1.5", "1", "&lt;a&gt;" * 20, "∞", "True", "–", "–", "–", "−∞", "False"]
    assert math.isinf(table["speed"][0])
    twice = pd.concat([table[["seconds"]], table[["seconds"]].round(3)], axis=1)  # two columns of one name
    assert re.findall("<td>(.*?)</td>", blanks.page(twice)) == ["1.5", "1.5", "–", "–"]
    assert blanks.page(pd.DataFrame({"a": range(100)})).count("<tr") == 1 + pd.options.display.max_rows + 1
