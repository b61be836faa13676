"""README.md and README_JP.md give the same commands; whatever the documentation names exists."""

import contextlib
import io
import json
import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import mistune
import pytest
from torch.distributed.run import get_args_parser

import launch
import launch.__main__
import vdpp_core
import vdpp_core.__main__
from vdpp_core import RunConfig
from vdpp_core.cli import old_names
from vdpp_core.engine import worker

ROOT = Path(__file__).parents[2]
README, README_JP, TRAINING = "README.md", "README_JP.md", "vdpp_core/tiny_svd/TRAINING.md"
DOCS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))
TEXTS = {name: (ROOT / name).read_text() for name in (README, README_JP, *DOCS, TRAINING)}
LONGEST = 220  # lines of a README
MAINS = {"vdpp_core": vdpp_core.__main__.main, "launch": launch.__main__.main}
PUBLIC = {"vdpp_core": vdpp_core.__all__, "launch": launch.__all__}
RUN_COMMANDS = ("simulate", "benchmark", "generate")

markdown: Any = mistune.create_markdown(renderer="ast", plugins=["table"])


def inside(tokens, kind):
    """All tokens of a kind, at any depth, in order."""
    for token in tokens:
        if token["type"] == kind:
            yield token
        yield from inside(token.get("children", ()), kind)


def title_of(heading):
    return "".join(token["raw"] for kind in ("text", "codespan") for token in inside([heading], kind))


def spans(tokens):
    return sorted(token["raw"] for token in inside(tokens, "codespan"))


def blocks(tokens, language):
    """The code of each block in that language, without comments."""
    for block in inside(tokens, "block_code"):
        if block.get("attrs", {}).get("info") == language:
            yield re.sub(r"(^|[ \t]+)#.*$", "", block["raw"], flags=re.MULTILINE)


def script_commands(tokens):
    """The words of each command in shell blocks."""
    lines = "\n".join(blocks(tokens, "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line))]


def urls(tokens, kind):
    return [token["attrs"]["url"] for token in inside(tokens, kind)]


COMPARED = {
    "commands": script_commands,
    "Python": lambda tokens: list(blocks(tokens, "python")),
    "figures": lambda tokens: urls(tokens, "image"),
    "links": lambda tokens: [url for url in urls(tokens, "link") if url not in (README, README_JP)],
    "code in the text": spans,
}


def sections(text):
    """Level, title and tokens of each section, the heading included."""
    found = []
    for token in markdown(text):
        if token["type"] == "heading":
            found.append((token["attrs"]["level"], title_of(token), []))
        found[-1][2].append(token)
    return found


def differences(english, japanese):
    """A line for each kind of content that differs in a section, under the section's title in `english`."""
    pair = sections(english), sections(japanese)
    if [level for level, *_ in pair[0]] != [level for level, *_ in pair[1]]:
        titles = [[f"{'#' * level} {title}" for level, title, _ in side] for side in pair]
        return [f"sections: {README} has {titles[0]}, {README_JP} has {titles[1]}"]
    found = []
    for (_, title, ours), (_, _, theirs) in zip(*pair, strict=True):
        for what, of in COMPARED.items():
            if of(ours) != of(theirs):
                here, there = Counter(map(str, of(ours))), Counter(map(str, of(theirs)))
                only = f"only in {README}: {[*(here - there)]}, only in {README_JP}: {[*(there - here)]}"
                found.append(f"{title}: {what}: {'another order' if here == there else only}")
    return found


def commands(text):
    """The words of each command: in shell blocks, and code in the text that begins like one."""
    tokens = markdown(text)
    named = [shlex.split(span) for span in spans(tokens) if re.match(r"(\w+=\S+ )*(python -m|torchrun|make) ", span)]
    return [without_settings(words) for words in [*script_commands(tokens), *named]]


def without_settings(words):
    """A command without NAME=VALUE, which make and the shell accept."""
    return [word for word in words if not re.match(r"[A-Z_]+=", word)]


def refused(words):
    """What is wrong with a command, or nothing; nothing is run."""
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [f"no target {word}" for word in words[1:] if word not in targets]
    if words[0] == "sbatch":
        (script,) = (word for word in words if word.endswith(".sbatch"))
        if not (ROOT / script).is_file():
            return [f"no script {script}"]
        words = ["python", "-m", "launch", "start", *words[words.index(script) + 1 :]]
    if words[0] == "torchrun":
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                given = get_args_parser().parse_args(words[1:])
        except SystemExit:
            return [said.getvalue()]
        words = ["python", "-m", given.training_script, *given.training_script_args]
    if words[:2] != ["python", "-m"]:
        return []
    module, *rest = words[2:]
    if module in MAINS:
        return refused_by(module, rest)
    return [] if (ROOT / module.replace(".", "/")).with_suffix(".py").is_file() else [f"no module {module}"]


def refused_by(module, words):
    """Its command, or flags of it, that `module` does not have."""
    path = words[:1]
    if path in (["start"], ["sweep"]):
        path += [word for word in words if word in RUN_COMMANDS][:1]
    for part in parents(path):
        if part[-1] not in names_in(help_of(module, *part[:-1])):
            return [f"{module}: no {' '.join(part)}"]
    known = set().union(*(flags(help_of(module, *part)) for part in parents(path)))
    return [f"{module} {' '.join(path)}: no {word}" for word in words if word.startswith("--") and word not in known]


def parents(path):
    """A command and those that it belongs to."""
    return [path[:length] for length in range(1, len(path) + 1)]


@cache
def help_of(module, *path):
    """What a command prints with --help; None if there is no such command."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            MAINS[module]([*path, "--help"])
        except SystemExit as end:
            usage = f"usage: python -m {' '.join([module, *path])} "  # of an unknown command it is that of the others
            return printed.getvalue() if not end.code and printed.getvalue().startswith(usage) else None
    return None


def flags(text):
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def unknown_flags(text):
    """Flags in the text that no command has."""
    helps = [help_of(module, name) for module in MAINS for name in names_in(help_of(module))]
    helps += [help_of("launch", "start", name) for name in RUN_COMMANDS]
    known = set().union(*(flags(each) for each in helps if each))
    used = {word for span in spans(markdown(text)) if span.startswith("--") for word in span.split()}
    known |= {"--help", *old_names.FLAGS}  # docs/benchmark.md says what they are now
    return sorted(word for word in used - known if word.startswith("--"))


def names_in(text):
    """Words that may be commands in a help text."""
    return sorted(set(re.findall(r"^\W*([a-z]+)\b", text, re.MULTILINE)))


def not_public(text):
    """Names of the two packages that are used in Python but not exported."""
    tokens = markdown(text)
    code = "\n".join([*blocks(tokens, "python"), *(span for span in spans(tokens) if not span.startswith("python"))])
    found = re.findall(r"\b(vdpp_core|launch)\.(\w+)", code)
    found += [
        (package, name.strip())
        for package, names in re.findall(r"from (vdpp_core|launch) import (.+)", code)
        for name in names.split(",")
    ]
    return sorted(f"{package}.{name}" for package, name in found if name not in PUBLIC[package])


def missing_files(name, text):
    """Links, anchors, figures, and paths in the text of committed files (a notebook's ending may be left out)."""
    tokens = markdown(text)
    linked = [*urls(tokens, "image"), *urls(tokens, "link")]
    named = [span for span in spans(tokens) if re.match(r"(notebooks|vdpp_core|launch|tests)/", span)]
    lacking = [url for url in linked if "://" not in url and not resolves(url, ROOT / name, text)]
    return lacking + [path for path in named if not any(ROOT.glob(f"{path.rstrip('/')}*"))]


def resolves(url, page, text):
    path, _, anchor = url.partition("#")
    target = page.parent / path
    if path and not target.is_file():
        return False
    return not anchor or anchor in anchors(target.read_text() if path else text)


def anchors(text):
    """The anchors that GitHub gives to headings."""
    titles = [title for _, title, _ in sections(text)]
    return [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


def test_both_readmes_say_the_same():
    assert differences(TEXTS[README], TEXTS[README_JP]) == []


def test_each_readme_links_to_the_other_at_the_top():
    assert TEXTS[README].splitlines()[2] == "[日本語](README_JP.md)"
    assert TEXTS[README_JP].splitlines()[2] == "[English](README.md)"


@pytest.mark.parametrize("name", [README, README_JP])
def test_a_readme_is_short_and_leads_to_every_page(name):
    assert len(TEXTS[name].splitlines()) <= LONGEST
    assert {*DOCS, TRAINING} <= set(urls(markdown(TEXTS[name]), "link"))


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_text_names_exists(name):
    text = TEXTS[name]
    assert {" ".join(words): wrong for words in commands(text) if (wrong := refused(words))} == {}
    assert unknown_flags(text) == []
    assert not_public(text) == []
    assert missing_files(name, text) == []


@pytest.mark.parametrize("name", [README, README_JP, "docs/running.md", "docs/benchmark.md"])
def test_commands_are_found(name):
    assert len(commands(TEXTS[name])) >= (8 if name != "docs/benchmark.md" else 3)


def test_every_key_of_a_result_is_explained(tmp_path):
    worker.run(RunConfig(command="simulate", total_steps=1, threads=1, output_dir=tmp_path / "run"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    explained = " ".join(spans(markdown(TEXTS["docs/numbers.md"]))).split()
    assert sorted({*result, "failure"} - {"run_id", *explained}) == []


CHANGES = {
    "a command dropped": (r"^make report.*\n", "", "commands"),
    "a command changed": (r"^make \w+", "make test", "commands"),
    "two commands exchanged": (r"^(make .*\n)(make .*\n)", r"\2\1", "commands"),
    "a flag changed": (r"--ranks 1,2", "--ranks 1,4", "commands"),
    "Python changed": (r"cfg=2", "cfg=1", "Python"),
    "a figure dropped": (r"^!\[.*\n", "", "figures"),
    "an option in the text": (r"`--\w+", r"\g<0>s", "code in the text"),
    "a link": (r"\(docs/running\.md\)", "(docs/numbers.md)", "links"),
    "a section dropped": (r"^## .*\n", "", "sections: "),
    "a section's level": (r"^## ", "### ", "sections: "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_one_readme_is_found_in_its_section(change):
    english = TEXTS[README]
    pattern, replacement, what = CHANGES[change]
    place = re.search(pattern, english, re.MULTILINE)
    copy = english[: place.start()] + place.expand(replacement) + english[place.end() :]
    title = sections(english[: place.end()])[-1][1]
    for found in (differences(english, copy), differences(copy, english)):
        assert any(line.startswith(what if what == "sections: " else f"{title}: {what}") for line in found), found
        assert all(line.startswith(("sections: ", f"{title}: ")) for line in found), found


def test_a_translated_comment_is_no_difference():
    block = "# a\n```bash\nmake lab  # {}\n# {}\n```\n"
    assert differences(block.format("one", "two"), block.format("一", "二")) == []


def test_what_does_not_exist_is_found():
    assert refused(["make", "coffee"]) == ["no target coffee"]
    assert refused(["python", "-m", "tests.benchmarks.coffee"]) == ["no module tests.benchmarks.coffee"]
    assert "coffee" in refused(["python", "-m", "launch", "coffee"])[0]
    assert "--cups" in refused(["python", "-m", "vdpp_core", "plan", "--gpus", "2", "--cups", "2"])[0]
    assert "--cups" in refused(["python", "-m", "launch", "start", "--nproc", "2", "benchmark", "--cups", "2"])[0]
    assert "--cups" in refused(["torchrun", "--nproc_per_node=7", "-m", "vdpp_core", "benchmark", "--cups", "2"])[0]
    assert "--cups" in refused(["sbatch", "launch/slurm/run.sbatch", "benchmark", "--cups", "2"])[0]
    assert refused(["sbatch", "launch/coffee.sbatch", "benchmark"]) == ["no script launch/coffee.sbatch"]
    assert commands("```bash\na \\\n  b  # c\n# d\nmake f G=1\n```\n`H=1 make e` `i`") == [
        ["a", "b"],
        ["make", "f"],
        ["make", "e"],
    ]
    assert unknown_flags("`--pp 2 --cups 3`") == ["--cups"]
    assert not_public("`launch.coffee()` `vdpp_core.split`\n```python\nfrom vdpp_core import Parallel, Cup\n```") == [
        "launch.coffee",
        "vdpp_core.Cup",
    ]
    page = "# G H!\n![a](../figures/gantt.png) ![b](c.png) [d](#e) [f](#g-h) `notebooks/05_quality` `notebooks/i`"
    assert missing_files("docs/page.md", page) == ["c.png", "#e", "notebooks/i"]
