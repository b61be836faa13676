"""What people read: tables within 100 columns, a page that needs no network, and a CSV."""

from __future__ import annotations

import base64
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import pandas as pd

from launch.documents import experiments, figures
from launch.documents.book import Book, Part
from launch.documents.machine import ranks_text
from launch.documents.rows import Row, number
from vdpp_core.cli.words import WIDTH
from vdpp_core.runs import machine
from vdpp_core.runs.files import write_atomically

HEADS = ("what", "published", "here", "ratio", "why it differs")
OF_CLAIMS = ("claim", "claimed", "their numbers", "ratio", "verdict")
WIDTHS = (34, 13, 13, 6, 26)
AS_ABOVE = "as above"
PAGE, TABLE = "index.html", "documents.csv"
CLAIMS = "Claims that need no run"
STYLE = """
:root{color-scheme:light dark;--line:#8884;--quiet:#8889;--good:#1a7f37;--bad:#c0392b}
@media(prefers-color-scheme:dark){:root{--good:#5fc97a;--bad:#ff8a7a}}
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1.2em}
h1{margin-bottom:.2em}h2{margin-top:2em;border-bottom:1px solid var(--line)}
table{border-collapse:collapse;width:100%;font-size:14px}
td,th{padding:.25em .7em .25em 0;text-align:left;vertical-align:top;overflow-wrap:anywhere}
tr+tr td{border-top:1px solid var(--line)}th{border-bottom:2px solid var(--line)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.rows{table-layout:fixed}.rows th{box-sizing:border-box;width:15%;overflow-wrap:normal}.rows th:nth-child(1){width:27%}
.rows th:nth-child(4){width:9%}.rows th:nth-child(5){width:34%}
.rows td:last-child,.rows th:last-child{padding-left:1em}
.quiet{opacity:.65}.pass{color:var(--good);font-weight:600}.fail{color:var(--bad);font-weight:600}
.facts th{border:0;width:9em;font-weight:600}.facts td{border:0}
.videos{display:flex;flex-wrap:wrap;gap:1.5em}.videos video{width:256px;image-rendering:pixelated;display:block}
figure{margin:.5em 0}figcaption{font-size:13px}.steps td{white-space:nowrap}details{margin:.6em 0}
"""


def wrapped(cells: Sequence[str], widths: Sequence[int] = WIDTHS) -> str:
    """A line of a table, in as many lines as its fullest cell needs."""
    columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, widths, strict=True)]
    most = max(map(len, columns))
    lines = zip(*(column + [""] * (most - len(column)) for column in columns), strict=True)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """What the columns of a table show; a reason that is that of the row above is not repeated."""
    before = ""
    for row in rows:
        yield row.what, *row.texts, AS_ABOVE if row.why and row.why == before else row.why
        before = row.why


def table(rows: Sequence[Row], heads: Sequence[str] = HEADS) -> str:
    """The rows as text of at most 100 columns."""
    return "\n".join(wrapped(cells) for cells in (heads, ["-" * width for width in WIDTHS], *_cells(rows)))


def of_part(part: Part) -> str:
    """A section's table as text, with its settings and which rank had which steps."""
    experiment = part.experiment
    lines = [f"Section {experiment.section}: {experiment.title}", *textwrap.wrap(experiment.setting, WIDTH), ""]
    if experiment.steps_on_ranks:
        stages = experiment.steps_on_ranks[max(experiment.steps_on_ranks)]
        lines += [wrapped(cells, (6, 24, 30)) for cells in [STEP_HEADS, *_steps(stages)]] + [""]
    return "\n".join(
        [*lines, table(part.rows), *(line for note in part.notes for line in textwrap.wrap(note, WIDTH)), ""]
    )


STEP_HEADS = ("rank", "steps, as the documents", "steps in order of execution")


def _steps(stages: Sequence[range]) -> list[tuple[str, str, str]]:
    """Rank, its steps as the documents count them (down to 0), and in order of execution."""
    last = max(stages[-1])
    return [
        (str(rank), f"{last - steps[0]} … {last - steps[-1]}", f"{steps[0]} … {steps[-1]}")
        for rank, steps in enumerate(stages)
    ]


def of_claims(claims: Sequence[Row]) -> str:
    """The claims' table as text."""
    return "\n".join([CLAIMS, "", table(_with_place(claims), OF_CLAIMS), ""])


def _with_place(claims: Sequence[Row]) -> list[Row]:
    """The claims, each with the place in the documents in front."""
    return [replace(row, what=f"{_where(row.section)}: {row.what}") for row in claims]


def _where(section: str) -> str:
    return f"section {section}" if section.isdigit() else f"their {section}"


def write(book: Book) -> None:
    """Write the page and the CSV; what was there before is replaced whole."""
    rows = [("measured", row) for part in book.sections for row in part.rows] + [
        ("arithmetic", row) for row in book.claims
    ]
    frame = pd.DataFrame(
        [
            {
                "section": row.section,
                "kind": kind,
                "what": row.what,
                "published": row.published,
                "here": row.here,
                "unit": row.unit,
                "ratio": row.ratio,
                "why it differs": row.why,
            }
            for kind, row in rows
        ]
    )
    write_atomically(book.folder / TABLE, frame.to_csv(index=False))
    write_atomically(book.folder / PAGE, page(book))


def page(book: Book) -> str:
    """The page: no network, no scripts; videos are inside it."""
    sizes = "CPU ranks, small sizes" if book.machine.small else f"{book.machine.gpus} GPUs, their sizes"
    known, intro = figures.KNOWN, "Each figure that the documents publish, beside the one obtained here"
    intro += ". There is no GPU here: the same experiments with small models and videos." if book.machine.small else "."
    facts = {
        "here": f"{book.machine.name}; {sizes}; {time.strftime('%Y-%m-%d %H:%M')}",
        "published": f"{known['hardware']}, {known['date']}; {known['software']}",
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions().items()),
        "commit": machine.git_commit() or "none",
        "state": book.state,
    }
    head = "".join(f"<tr><th>{name}</th><td>{escape(fact)}</td></tr>" for name, fact in facts.items())
    links = [(_anchor(part), f"{part.experiment.section} {part.experiment.title}") for part in book.sections]
    links += [("claims", CLAIMS)] * bool(book.claims)
    contents = " · ".join(f'<a href="#{anchor}">{escape(words)}</a>' for anchor, words in links)
    claims = f'<h2 id="claims">{CLAIMS}</h2>{_table(_with_place(book.claims), OF_CLAIMS)}' if book.claims else ""
    return f"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>The documents, repeated</title><style>{STYLE}</style>
<h1>The documents, repeated</h1>
<p>{escape(intro)}</p>
<table class="facts">{head}</table><p>{contents}</p>
{"".join(map(_section, book.sections))}{claims}
</html>
"""


def _anchor(part: Part) -> str:
    return f"section-{part.experiment.section}"


def _section(part: Part) -> str:
    experiment = part.experiment
    notes = "".join(f'<p class="quiet">{escape(note)}</p>' for note in part.notes)
    title = f"Section {experiment.section}: {escape(experiment.title)}"
    return (
        f'<h2 id="{_anchor(part)}">{title}</h2><p>{escape(experiment.setting)}</p>'
        f"{_table(part.rows, HEADS)}{_assignment(experiment)}{_videos(part)}{notes}"
    )


def _table(rows: Sequence[Row], heads: Sequence[str]) -> str:
    titles = "".join(f"<th{_class(column)}>{head}</th>" for column, head in enumerate(heads))
    lines = []
    for what, published, here, ratio, why in _cells(rows):
        mark = f' class="{here}"' if here in ("pass", "fail") else ""
        reason = f'<span class="quiet">{AS_ABOVE}</span>' if why == AS_ABOVE else escape(why)
        lines.append(
            f'<tr><td>{escape(what)}</td><td class="n">{escape(published)}</td>'
            f'<td class="n"><span{mark}>{escape(here)}</span></td>'
            f'<td class="n">{ratio}</td><td>{reason}</td></tr>'
        )
    return f'<table class="rows"><tr>{titles}</tr>{"".join(lines)}</table>'


def _class(column: int) -> str:
    return ' class="n"' if 0 < column < len(HEADS) - 1 else ""


def _assignment(experiment: experiments.Experiment) -> str:
    """Which rank has which steps."""
    found = []
    for count, stages in experiment.steps_on_ranks.items():
        lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in _steps(stages))
        heads = "".join(f"<th>{head}</th>" for head in STEP_HEADS)
        open_ = " open" * (count == figures.RANKS[-1])
        words = f"Steps of {ranks_text(count)}"
        found.append(
            f'<details{open_}><summary>{words}</summary><table class="steps"><tr>{heads}</tr>{lines}</table></details>'
        )
    return "".join(found)


def _videos(part: Part) -> str:
    """The official pipeline's video beside ours."""
    return (
        f'<div class="videos">{"".join(_video(path, words) for words, path in part.videos.items())}</div>'
        if part.videos
        else ""
    )


def _video(path: Path, words: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    size = f"{number(path.stat().st_size / 1024)} KB"
    source = f"data:video/mp4;base64,{data}"
    return (
        f'<figure><video src="{source}" controls autoplay loop muted playsinline aria-label="{escape(words)}"></video>'
        f"<figcaption>{escape(words)}, {size}</figcaption></figure>"
    )
