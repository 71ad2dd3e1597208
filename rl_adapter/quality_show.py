"""What `quality.json` holds, as a table for the console and as a plot. matplotlib is imported when a plot is drawn, not before."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

Column = Mapping[str, Any]
FLOOR = 1e-12  # nats, or relative error: what is drawn lowest on a logarithmic axis, since 0 has no place there


def table(result: Mapping[str, Any]) -> Table:
    """A row for each measure, a column for each variant."""
    reference, variants = result["reference"], result["variants"]
    text = result["text"]
    found = f"{text['tokens']} tokens in {text['rows']} rows of {pathlib.Path(text['path']).name or 'held-out problems'}"
    note = f"logits and layers at {text['compared']} of them; layer error: RMS over the size of the residual stream; intervals of 95 %"
    out = Table(title=escape(f"against {reference['label']}: {found}"), box=box.SIMPLE, caption=note)
    out.add_column("")
    for column in (reference, *variants):
        out.add_column(escape(column["label"].replace(", ", "\n")), justify="right")
    for name, show in _ROWS:
        cells = [show(column) for column in (reference, *variants)]
        if any(cells):
            out.add_row(name, *cells)
    return out


def _shown(key: str, form: str) -> Callable[[Column], str]:
    return lambda column: form.format(column[key]) if column.get(key) is not None else ""


def _percent(key: str, interval: str, sign: str = "") -> Callable[[Column], str]:
    def show(column):
        if key not in column:
            return ""
        ends = column.get(interval)
        return f"{column[key]:{sign}.2%}" + (f"\n{ends[0]:{sign}.2%} .. {ends[1]:{sign}.2%}" if ends else "")

    return show


_ROWS: tuple[tuple[str, Callable[[Column], str]], ...] = (
    ("weights, MB", lambda column: f"{sum(column['forms'].values()) / 1e6:,.1f}"),
    ("perplexity", _shown("perplexity", "{:.4f}")),
    ("  change", _percent("perplexity_change", "perplexity_change_interval", "+")),
    ("KL, mean nats", _shown("kl_mean", "{:.2e}")),
    ("  99th percentile", _shown("kl_p99", "{:.2e}")),
    ("  largest", _shown("kl_max", "{:.2e}")),
    ("same top token", _shown("same_top", "{:.2%}")),
    ("same experts", _shown("experts_shared", "{:.2%}")),
    ("  all k of a token", _shown("experts_same_set", "{:.2%}")),
    ("error, first layer", lambda column: f"{column['layer_error'][0]:.2e}" if "layer_error" in column else ""),
    ("  worst layer", lambda column: f"{max(column['layer_error']):.2e}" if "layer_error" in column else ""),
    ("  last layer", lambda column: f"{column['layer_error'][-1]:.2e}" if "layer_error" in column else ""),
    ("accuracy", _percent("accuracy", "accuracy_interval")),
    ("  change", _percent("accuracy_change", "accuracy_change_interval", "+")),
)


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Error by layer; then by variant: KL, change of perplexity, and change of accuracy where tasks were measured."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # not pyplot, which would choose a screen for the whole process

    variants, with_tasks = result["variants"], "accuracy" in result["reference"]
    y = np.arange(len(variants))
    colors = [colormaps["tab10"](i % 10) for i in y]
    widths = [1.7, 1, 1, 1] if with_tasks else [1.7, 1, 1]
    size = (3.2 * sum(widths), 1.6 + max(2.0, 0.4 * len(variants)))
    figure = Figure(size, layout="constrained")
    layers, kl, perplexity, *accuracy = figure.subplots(1, len(widths), width_ratios=widths)

    for column, color in zip(variants, colors):
        error = np.maximum(column["layer_error"], FLOOR)
        layers.plot(np.arange(1, len(error) + 1), error, "o-", ms=3, color=color, label=column["label"])
    layers.set(title="error of the residual stream", xlabel="after layer", ylabel="relative RMS error", yscale="log")
    layers.legend(frameon=False)
    layers.xaxis.get_major_locator().set_params(integer=True)

    for i, (column, color) in enumerate(zip(variants, colors)):
        mean, high = (max(column[key], FLOOR) for key in ("kl_mean", "kl_p99"))
        kl.plot([mean, max(mean, high)], [i, i], color=color)
        kl.plot(mean, i, "o", color=color)
        kl.plot(max(mean, high), i, "|", color=color, ms=10)
    kl.set(title="KL to the reference", xlabel="nats a token: mean | 99th percentile", xscale="log")

    def changes(axes, key, title, xlabel):
        for i, (column, color) in enumerate(zip(variants, colors)):
            low, high = (100 * x for x in column[f"{key}_interval"] or [column[key]] * 2)
            axes.plot([low, high], [i, i], color=color)
            axes.plot(100 * column[key], i, "o", color=color)
        axes.axvline(0, color="0.6", lw=1, zorder=0)
        axes.set(title=title, xlabel=xlabel)

    changes(perplexity, "perplexity_change", "perplexity", "change in %, 95 % interval")
    if with_tasks:
        changes(accuracy[0], "accuracy_change", "accuracy on tasks", "change in points, 95 % interval")
    for axes in (kl, perplexity, *accuracy):
        axes.set(ylim=(len(variants) - 0.5, -0.5), yticks=y, yticklabels=[])
    kl.set_yticklabels([column["label"].replace(", ", "\n") for column in variants])
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    text = result["text"]
    figure.suptitle(f"against {result['reference']['label']} ({text['tokens']} tokens)", fontsize="medium")
    figure.savefig(path, dpi=150)
