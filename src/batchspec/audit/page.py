"""The report as one HTML page that needs nothing else: no network, no scripts."""

from __future__ import annotations

from html import escape
from typing import Any

from batchspec.audit.compare import OUTCOMES
from batchspec.audit.plot import COLOURS, divergences, margins_svg, outcomes_of
from batchspec.audit.tables import interval, shortfall_text
from batchspec.html import made_with, page, table

MOST_ROWS = 500
"""Divergences in the page's table, the worst first; the JSON document has all."""


def html_page(document: dict[str, Any]) -> str:
    """The whole page. All text from models, servers and options is escaped."""
    sections = [
        f'<p class="verdict code{document["exit_code"]}">{escape(document["verdict"])}</p>',
        *(f"<p>{escape(remark)}</p>" for remark in document["remarks"]),
        _settings(document),
        _candidates(document),
        _plot(document),
        _divergences(document),
        _errors(document),
        _sampling(document),
        _noise_floor(document),
        made_with(document["provenance"]),
    ]
    return page("batchspec audit", "Are these outputs the target's?", sections)


def _settings(document: dict[str, Any]) -> str:
    settings = document["settings"]
    return (
        f"<p>Target: <code>{escape(str(settings['model']))}</code> in {escape(settings['dtype'])}, greedy, "
        f"{len(settings['prompt_lengths'])} prompts of <code>{escape(str(settings['dataset']))}</code>, up to "
        f"{settings['max_tokens']} tokens each. The reference is the target alone, one prompt at a time.</p>"
    )


def _candidates(document: dict[str, Any]) -> str:
    heads = ["candidate", "batch", *OUTCOMES]
    heads += ["exact match", "tokens before a difference", "divergences per 1,000 tokens"]
    rows = []
    for run in document["runs"]:
        counts, figures = run["counts"], run["figures"]
        name = escape(run["candidate"])
        name = f'<span class="null">{name}</span>' if run["is_null"] else f"<code>{name}</code>"
        cells = {kind: str(counts[kind]) for kind in OUTCOMES}
        if counts["violation"]:
            cells["violation"] = f'<span class="violation">{counts["violation"]}</span>'
        shown = (interval(figures["exact"], "%"), interval(figures["shared"]), interval(figures["divergences"]))
        rows.append([name, str(run["batch_size"]), *cells.values(), *shown])
    return (
        f"<h2>Candidates</h2>{table(heads, rows, 1)}"
        '<p class="small">With 95 % intervals: exact match Wilson, tokens bootstrap over the prompts, '
        "divergences exact Poisson. Prompts with errors are left out. "
        "The null band does not count for the verdict.</p>"
    )


def _plot(document: dict[str, Any]) -> str:
    svg = margins_svg(document)
    if not svg:
        return ""
    return (
        f"<h2>Margins of all tokens</h2>{svg}"
        '<p class="small">Each dot is a token of a reference: '
        "how far the largest logit is above the second, in float32. "
        "Discs are where a candidate chose another token: "
        f'<span style="color:{COLOURS["near-tie"]}">near-ties</span> and '
        f'<span style="color:{COLOURS["violation"]}">violations</span>; rings are the null band\'s. '
        "Margins too small for the scale lie on its lower edge.</p>"
    )


def _divergences(document: dict[str, Any]) -> str:
    found = divergences(document)
    if not found:
        return "<h2>Divergences</h2><p>None.</p>"
    heads = ["candidate", "class", "the target", "the candidate", "after", "batch", "prompt", "position"]
    rows = []
    for run, outcome in found[:MOST_ROWS]:
        one = outcome["divergence"]
        rows.append(
            [escape("null band" if run["is_null"] else run["candidate"]),
             f'<span class="{outcome["kind"]}">{outcome["kind"]}</span>',
             _token(one["expected"], one["expected_text"]), _token(one["got"], one["got_text"]),
             f"<code>{escape(_one_line(one['context']))}</code>", str(run["batch_size"]), str(outcome["prompt"]),
             str(one["position"]), f"{one['margin']:.3g}", shortfall_text(one)]
        )  # fmt: skip
    more = f"<p>{len(found) - MOST_ROWS} more are in the JSON document.</p>" if len(found) > MOST_ROWS else ""
    return (
        f"<h2>Divergences ({len(found)})</h2>{table([*heads, 'margin', 'shortfall'], rows, 5)}{more}"
        '<p class="small">The first difference of each output. '
        "Margin: between the two largest logits in float32 after the shared tokens. "
        "Shortfall: how far the lower one of both tokens is below the largest logit; "
        "that of a near-tie is at most the noise floor.</p>"
    )


def _token(token: int, text: str) -> str:
    number = f' <span class="small">{token}</span>' if token >= 0 else ""
    return f"<code>{escape(_one_line(text))}</code>{number}"


def _one_line(text: str) -> str:
    return text.replace("\n", "\u21b5")


def _errors(document: dict[str, Any]) -> str:
    rows = [
        [escape(run["candidate"]), f"<code>{escape(outcome['error'])}</code>", str(run["batch_size"]),
         str(outcome["prompt"])]
        for run, outcome in outcomes_of(document, "error")
    ]  # fmt: skip
    if not rows:
        return ""
    return f"<h2>Errors ({len(rows)})</h2>" + table(["candidate", "error", "batch", "prompt"], rows[:MOST_ROWS], 2)


def _sampling(document: dict[str, Any]) -> str:
    if not document["sampling"]:
        return ""
    rows = []
    for run in document["sampling"]:
        worst = min(run["tests"], key=lambda test: test["adjusted"], default=None)
        where = "" if worst is None else f"{worst['feature']}, {_pool(worst['prompt'])}"
        verdict = f'<span class="violation">{run["num_failed"]} failed</span>' if run["num_failed"] else "same"
        rows.append(
            [f"<code>{escape(run['candidate'])}</code>", escape(run["against"]), verdict, escape(where),
             str(run["batch_size"]), str(run["num_samples"]), str(len(run["tests"])), str(run["num_errors"]),
             "" if worst is None else f"{worst['adjusted']:.3g}", f"{run['level']:.3g}"]
        )  # fmt: skip
    heads = ["candidate", "against", "distribution", "least p-value at", "batch", "samples", "tests", "errors"]
    return (
        f"<h2>Sampling</h2>{table([*heads, 'adjusted p', 'level'], rows, 4)}"
        '<p class="small">Two-sample permutation tests of the first three tokens and of the length, '
        "for each prompt and pooled over all, corrected by Holm's method. "
        "At or below the level the distributions differ.</p>"
    )


def _pool(prompt: int | None) -> str:
    return "pooled" if prompt is None else f"prompt {prompt}"


def _noise_floor(document: dict[str, Any]) -> str:
    noise = document["noise_floor"]
    if noise is None:
        return ""
    rows = [
        ["error of the gap, alone against float32 (99.9 % quantile)", f"{noise['alone']:.3g}"],
        ["error of the gap, in a padded batch against float32 (99.9 % quantile)", _logits(noise["batched"])],
        ["furthest that a reference token is below the float32 argmax", f"{noise['shortfall']:.3g}"],
        [f"rounding unit of {escape(noise['dtype'])} times the largest logit", f"{noise['unit']:.3g}"],
        ["<b>noise floor</b>", f"<b>{noise['floor']:.3g}</b>"],
        ["tokens whose margin is below it", f"{noise['share_below']:.1%}"],
    ]
    left_out = "" if noise["is_batch_used"] else "; the batch was left out, see above"
    return (
        "<h2>How the noise floor was found</h2>"
        "<p>The references were fed to the target again: alone in float32, "
        f"alone in {escape(noise['dtype'])}, and in padded batches of {noise['batch_size']} without speculation. "
        f"At each of {noise['num_positions']} positions "
        "the gap between the two largest logits was compared with the float32 one. "
        "The floor is twice the largest of the first three figures, "
        f"and in float32 and float64 at least 8 rounding units{left_out}.</p>{table(['', 'logits'], rows, 1)}"
    )


def _logits(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3g}"
