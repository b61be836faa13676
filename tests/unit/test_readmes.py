"""README.md and README_JP.md say the same, and the commands, flags and files that they name exist.

Numbers are compared as digits. English number words from two on count as digits, so they are digits in Japanese;
"one" does not, so it is 一 or 単一 there.
"""

import contextlib
import io
import re
import shlex
import unicodedata
from collections import Counter
from pathlib import Path

import mistune
import pytest
from torch.distributed.run import get_args_parser

import launch.commands
import vdpp_core.cli.main

ROOT = Path(__file__).parents[2]
ENGLISH, JAPANESE = ((ROOT / name).read_text() for name in ("README.md", "README_JP.md"))
WORDS = [
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
]
NUMBER = re.compile(rf"−?\d+(?:\.\d+)?|\b(?:{'|'.join(WORDS)})\b")
PARSERS = {
    "vdpp_core": vdpp_core.cli.main.parse,
    "launch": launch.commands.parse,
    "torchrun": get_args_parser().parse_args,
}

markdown = mistune.create_markdown(renderer="ast", plugins=["table"])


def inside(tokens, kind):
    """All tokens of that kind, at any depth, in order."""
    for token in tokens:
        if token["type"] == kind:
            yield token
        yield from inside(token.get("children", ()), kind)


def words_of(tokens):
    return "".join(
        words_of(token["children"]) + " " if "children" in token else token["raw"] if token["type"] == "text" else " "
        for token in tokens
    )


def numbers(tokens):
    found = NUMBER.findall(unicodedata.normalize("NFKC", words_of(tokens)).lower())
    return [str(WORDS.index(number) + 2) if number in WORDS else number for number in found]


def spans(tokens):
    return sorted(token["raw"] for token in inside(tokens, "codespan"))


def blocks(tokens):
    """The lines of each code block, its language first."""
    for block in inside(tokens, "block_code"):
        yield [block.get("attrs", {}).get("info", ""), *block["raw"].splitlines()]


def cells(row):
    return tuple((tuple(numbers([cell])), tuple(spans([cell]))) for cell in inside([row], "table_cell"))


def rows(tokens):
    return [
        (f"table {number}", cells(row))
        for number, table in enumerate(inside(tokens, "table"), start=1)
        for row in [*inside([table], "table_head"), *inside([table], "table_row")]
    ]


def links(tokens):
    found = [token["attrs"]["url"] for token in inside(tokens, "link")]
    return sorted(url for url in found if url not in ("README.md", "README_JP.md"))


COMPARED = {
    "code blocks": lambda tokens: [line for block in blocks(tokens) for line in ("```", *block)],
    "figures": lambda tokens: [token["attrs"]["url"] for token in inside(tokens, "image")],
    "table rows (numbers and code of each cell)": rows,
    "links": links,
    "code in the text": spans,
    "numbers": lambda tokens: sorted(numbers(tokens)),
}


def sections(text):
    """Level, title and tokens of each section, the title included."""
    found = []
    for token in markdown(text):
        if token["type"] == "heading":
            found.append((token["attrs"]["level"], words_of([token]).strip(), []))
        found[-1][2].append(token)
    return found


def differences(english, japanese):
    """A line for each kind of thing that differs in a section, with the section's English title."""
    pair = sections(english), sections(japanese)
    if [level for level, *_ in pair[0]] != [level for level, *_ in pair[1]]:
        titles = [[f"{'#' * level} {title}" for level, title, _ in side] for side in pair]
        return [f"sections: README.md has {titles[0]}, README_JP.md has {titles[1]}"]
    found = []
    for (_, title, ours), (_, _, theirs) in zip(*pair, strict=True):
        for what, of in COMPARED.items():
            if of(ours) != of(theirs):
                here, there = Counter(of(ours)), Counter(of(theirs))
                only = f"{[*(here - there)]} only in README.md, {[*(there - here)]} only in README_JP.md"
                found.append(f"{title}: {what}: {'in another order' if here == there else only}")
    return found


def commands(text):
    """The words of each command: lines of shell blocks, and code in the text that begins like one."""
    tokens = markdown(text)
    scripts = ["\n".join(lines) for language, *lines in blocks(tokens) if language == "bash"]
    lines = [line for script in scripts for line in script.replace("\\\n", " ").splitlines()]
    named = [span for span in spans(tokens) if span.startswith(("python -m ", "torchrun ", "make "))]
    return [words for line in [*lines, *named] if (words := shlex.split(line, comments=True))]


def refused(words):
    """What is wrong with a command, or nothing; nothing is run."""
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [f"no target {word}" for word in words[1:] if word not in targets]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if words[0] == "torchrun":
                given = PARSERS["torchrun"](words[1:])
                words = ["python", "-m", given.training_script, *given.training_script_args]
            if words[:2] != ["python", "-m"]:
                return []
            module, *rest = words[2:]
            if module in PARSERS:
                PARSERS[module](rest)
                return []
    except SystemExit:
        return [said.getvalue()]
    return [] if (ROOT / module.replace(".", "/")).with_suffix(".py").is_file() else [f"no module {module}"]


def flags():
    """All flags that the help of a command names."""
    said = io.StringIO()
    actions = [["start", "simulate"], *([name] for name in ("start", "sweep", "tail", "trace", "resume", "report"))]
    lines = {"vdpp_core": [["benchmark"], ["memory"], ["plan"], ["peers"]], "launch": actions, "torchrun": [[]]}
    for module, commands_of in lines.items():
        for words in commands_of:
            with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
                PARSERS[module]([*words, "--help"])
    return set(re.findall(r"--[\w-]+", said.getvalue()))


def unknown_flags(text):
    used = {word for span in spans(markdown(text)) if span.startswith("--") for word in span.split()}
    return sorted(word for word in used - flags() if word.startswith("--"))


def missing_files(text):
    """Figures and linked files, and paths in the text of what is committed, without their ending or with it."""
    tokens = markdown(text)
    linked = [token["attrs"]["url"] for kind in ("image", "link") for token in inside(tokens, kind)]
    named = [span for span in spans(tokens) if span.startswith(("notebooks/", "vdpp_core/", "launch/", "tests/"))]
    lacking = [url for url in linked if "://" not in url and not (ROOT / url).is_file()]
    return lacking + [path for path in named if not any(ROOT.glob(f"{path}*"))]


def test_both_say_the_same():
    assert differences(ENGLISH, JAPANESE) == []


def test_each_leads_to_the_other_at_its_top():
    assert ENGLISH.splitlines()[2] == "[日本語](README_JP.md)"
    assert JAPANESE.splitlines()[2] == "[English](README.md)"


@pytest.mark.parametrize("text", [ENGLISH, JAPANESE], ids=["README.md", "README_JP.md"])
def test_what_they_name_exists(text):
    assert len(commands(text)) > 20
    assert {" ".join(words): wrong for words in commands(text) if (wrong := refused(words))} == {}
    assert unknown_flags(text) == []
    assert missing_files(text) == []


CHANGES = {
    "a number in the text": (r"\d", "97", "numbers"),
    "a number in a table": (r"^\|.*\d\.", r"\g<0>97", "table rows"),
    "a row dropped": (r"^\|.*\n(?!\|)", "", "table rows"),
    "a column dropped": (r"\|[^|\n]*\|$", "|", "table rows"),
    "a command": (r"^make \w+", "make all", "code blocks"),
    "a comment in a code block": (r"^make .*#", r"\g<0> now", "code blocks"),
    "a figure dropped": (r"^!\[.*\n", "", "figures"),
    "an option in the text": (r"`--\w+", r"\g<0>s", "code in the text"),
    "a link": (r"`\w+`", r"[\g<0>](LICENSE)", "links"),
    "two commands exchanged": (r"^(make .*\n)(make .*\n)", r"\2\1", "code blocks"),
    "a section dropped": (r"^## .*\n", "", "sections: "),
    "a section's level": (r"^## ", "### ", "sections: "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_only_is_found_in_its_section(change):
    pattern, replacement, what = CHANGES[change]
    place = re.search(pattern, ENGLISH, re.MULTILINE)
    copy = ENGLISH[: place.start()] + place.expand(replacement) + ENGLISH[place.end() :]
    title = sections(ENGLISH[: place.end()])[-1][1]
    for found in (differences(ENGLISH, copy), differences(copy, ENGLISH)):
        assert any(line.startswith(what if what == "sections: " else f"{title}: {what}") for line in found), found
        assert all(line.startswith(("sections: ", f"{title}: ")) for line in found), found


def test_what_does_not_exist_is_found():
    assert refused(["make", "coffee"]) == ["no target coffee"]
    assert refused(["python", "-m", "tests.benchmarks.coffee"]) == ["no module tests.benchmarks.coffee"]
    assert "coffee" in refused(["python", "-m", "launch", "coffee"])[0]
    assert "--cups" in refused(["python", "-m", "vdpp_core", "plan", "--gpus", "2", "--cups", "2"])[0]
    assert "--cups" in refused(["torchrun", "--nproc_per_node=7", "-m", "vdpp_core", "benchmark", "--cups", "2"])[0]
    assert commands("```bash\na \\\n  b  # c\n# d\n```\n`make e` `f`") == [["a", "b"], ["make", "e"]]
    assert unknown_flags("`--pp 2 --cups 3`") == ["--cups"]
    assert missing_files("![a](figures/gantt.png) ![b](c.png) `notebooks/05_quality` `notebooks/d`") == [
        "c.png",
        "notebooks/d",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Two GPUs, one card: −2.0 % of `fp16` in fourteen, on 2026-11-28",
        "2台のGPU、単一のカード: −２.0 %、`fp16`の14、2026年11月28日",
    ],
)
def test_numbers_are_read_in_both_languages(text):
    assert numbers(markdown(text)) == ["2", "−2.0", "14", "2026", "11", "28"]
