"""Draws a sweep's scaling curves: held-out accuracy, R² or loss against width, depth, parameters, FLOPs and data.

    python analysis/scaling.py [STORE] [--sweep NAME] [--metric METRIC] [--out DIR] [--json]

Each figure comes as PNG and PDF with a CSV of exactly the numbers it shows; fits.csv holds the power laws. Exit status:
0 done; 1 the store, the sweep or a finished trial is missing, or the figures can't be written; 2 wrong
usage.
"""

import sys
from pathlib import Path

# Run as a script, Python searches analysis/ and not the project's root, where `analysis` and `sweeps` are. The one
# takes the other's place, so that no file of this folder is ever found under a standard module's name.
if __name__ == "__main__" and not __package__:
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(entry for entry in sys.path if Path(entry).resolve() != _here)]

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from analysis import figures
from analysis.figures import NoFigure, Plot
from analysis.fits import LETTERS
from analysis.frames import ATTENTION, FINISHED, PENDING, NothingToShow, SweepFrame, load_sweep, points_of
from analysis.selection import rank, select_points, selection_metric
from sweeps.store import Store, StoreError

MAX_LISTED = 8
"""Lines of one kind that are printed; the CSVs and --json hold all."""


class Chosen(NamedTuple):
    """The store that is read, and why that one."""

    path: str
    why: str


def choose_store(named: str | None, environment: str | None) -> Chosen:
    """The store that is named, else HYLA_STORE, else results/, else results-tiny/.

    Raises:
      NothingToShow: none is named and none is there.
    """
    if named:
        return Chosen(named, "")
    if environment:
        return Chosen(environment, "from HYLA_STORE")
    for path, why in (("results", "HYLA_STORE is not set"), ("results-tiny", "there is no results/")):
        if Path(path).is_dir():
            return Chosen(path, why)
    raise NothingToShow(
        f"{Path('results').absolute()}: no results store there, nor in results-tiny/; name one (`python "
        "analysis/scaling.py STORE`), or train one with `python -m sweeps run sweeps/scaling.yaml --tiny`"
    )


METRICS = ("accuracy_per_feature", "r2", "loss")
SPLITS = ("ood", "test", "valid")
"""What is drawn where nobody says: the first of each that the sweep measured."""


def default_value(measured: Sequence[str], metric: str | None, split: str | None) -> str:
    """The metric on the y axis, `<split>/<metric>`, where a part of it, or neither, was asked for.

    Args:
      measured: what there is, `<split>/<metric>` each.
      metric: what was asked for; None: accuracy per feature, else R², else the loss.
      split: what was asked for; None: what is held out, parts before combinations of them, else what was seen.

    Returns:
      One of `measured`, or what was asked for though it is not among them.
    """
    wanted = [f"{s}/{m}" for m in ([metric] if metric else METRICS) for s in ([split] if split else SPLITS)]
    return next((value for value in wanted if value in measured), wanted[0])


def analyse(
    store: Chosen, sweep: str | None, metric: str | None, split: str | None, out: Path | None, show_valid: bool
) -> dict[str, Any]:
    """Reads the sweep, draws and writes its figures, and says what was found, in values that JSON can hold.

    Raises:
      NothingToShow, StoreError: in one line.
    """
    frame = load_sweep(Store.open(store.path), sweep)
    value = default_value(frame.measured, metric, split)
    if value not in frame.measured:
        raise NothingToShow(f"{store.path}: sweep {frame.sweep} measured no {value}; choose one of {frame.measured}")
    cells = select_points(points_of(frame, value), frame.cell_axes)
    if cells["mean"].isna().all():
        raise NothingToShow(f"{store.path}: sweep {frame.sweep} holds no final {value}; choose one of {frame.measured}")

    plots: list[Plot] = []
    skipped = []
    of_task = [spec for spec in figures.TASK_FIGURES if spec.x_columns[0] in frame.axes]
    for spec in (*figures.FIGURES, *of_task):
        try:
            plots.append(figures.plot_data(cells, spec, frame, value))
        except NoFigure as reason:
            skipped.append({"figure": spec.name, "reason": str(reason)})
    folder = out or Path("figures") / "".join(c if c.isalnum() or c in "-_." else "-" for c in frame.sweep).strip("-.")
    files = _write(folder, plots, cells, frame, value, show_valid)
    return {
        "store": store.path,
        "store_chosen": store.why,
        "sweep": frame.sweep,
        "request_id": frame.request_id,
        "requested_at": frame.requested_at.isoformat(),
        "other_sweeps": list(frame.other_sweeps),
        "metric": value,
        "selected_by": selection_metric(cells),
        "interval": "range of seeds",
        "trials": {"asked": len(frame.trials), **frame.status_counts()},
        "variants": _best_cells(cells, frame, value),
        "cells_lacking_seeds": _lacking_cells(cells, frame),
        "num_cells": len(cells),
        "num_points_lacking_seeds": int((cells["num_candidates"] - cells["num_candidates_complete"]).sum()),
        "num_points": int(cells["num_candidates"].sum()),
        "not_finished": _not_finished(frame),
        "fits": [_fit_row(plot, fit) for plot in plots for fit in plot.fits],
        "skipped_figures": skipped,
        "damaged": list(frame.damaged),
        "files": [str(path) for path in files],
    }


def _write(
    folder: Path, plots: Sequence[Plot], cells: pd.DataFrame, frame: SweepFrame, value: str, show_valid: bool
) -> list[Path]:
    """Figures, the CSV beside each, all cells and all fits."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for plot in plots:
            figure = figures.draw(plot, frame, value, show_valid=show_valid)
            files += figures.save(figure, folder / plot.spec.name)
            files.append(
                _write_csv(figures.csv_table(plot.data, frame, value, plot.x), folder / f"{plot.spec.name}.csv")
            )
        if plots:
            figure = figures.draw_overview(plots, cells, frame, value, show_valid=show_valid)
            files += figures.save(figure, folder / "overview")
            panels = []
            for plot in plots:
                rows = figures.panel_rows(plot.data, figures.largest_panel(plot))
                table = figures.csv_table(rows, frame, value, plot.x)
                table.insert(0, "panel", plot.spec.name)
                panels.append(table)
            if figures.has_gap(cells, value):
                table = figures.csv_table(cells, frame, value)
                table.insert(0, "panel", "gap")
                panels.append(table)
            files.append(_write_csv(pd.concat(panels), folder / "overview.csv"))
        files.append(_write_csv(figures.csv_table(cells, frame, value), folder / "cells.csv"))
        fits = pd.DataFrame([_fit_row(plot, fit) for plot in plots for fit in plot.fits], columns=FIT_COLUMNS)
        files.append(_write_csv(fits, folder / "fits.csv"))
    except OSError as error:
        raise NothingToShow(f"{error.filename or folder}: figures can't be written here: {error.strerror}") from None
    return files


def _write_csv(table: pd.DataFrame, path: Path) -> Path:
    table.to_csv(path, index=False)
    return path


FIT_COLUMNS = [
    "figure",
    "variant",
    "panel",
    "x",
    "y",
    "exponent",
    "exponent_low",
    "exponent_high",
    "coefficient",
    "coefficient_low",
    "coefficient_high",
    "r2",
    "num_points",
    "x_min",
    "x_max",
    "why_not",
]


def _fit_row(plot: Plot, panel_fit: figures.PanelFit) -> dict[str, Any]:
    return {
        "figure": plot.spec.name,
        "variant": panel_fit.variant,
        "panel": figures.panel_text(panel_fit.panel),
        "x": LETTERS[plot.x],
        "y": panel_fit.error,
        **panel_fit.fit._asdict(),
    }


def _best_cells(cells: pd.DataFrame, frame: SweepFrame, value: str) -> list[dict[str, Any]]:
    """Of each variant the cell that is best on the validation split, among those with all seeds where there is one."""
    valid = f"valid/{value.split('/')[1]}"
    rows = []
    for variant in figures.variants(cells):
        own = cells[(cells[ATTENTION] == variant) & cells["mean"].notna()]
        if own.empty:
            rows.append({"variant": variant, "num_seeds": 0})
            continue
        best = rank(own[own["complete"]] if own["complete"].any() else own).iloc[0]
        rows.append(
            {
                "variant": variant,
                "cell": {axis: best[axis] for axis in frame.cell_axes if axis != ATTENTION},
                "chosen": {axis: best[axis] for axis in frame.select_over if axis in frame.axes},
                **({valid: best[valid]} if valid in best else {}),
                **{name: best[name] for name in ("mean", "low", "high")},
                **{name: int(best[name]) for name in ("num_seeds", "num_seeds_asked")},
                "num_non_embedding_params": best["num_non_embedding_params"],
                "train_flops": best["train_flops"],
                "trial_ids": list(best["trial_ids"]),
            }
        )
    return rows


def _lacking_cells(cells: pd.DataFrame, frame: SweepFrame) -> list[dict[str, Any]]:
    """Cells drawn hollow, or not at all, since the chosen point has fewer seeds than asked."""
    axes = [axis for axis in frame.point_axes if cells[axis].nunique(dropna=False) > 1]
    return [
        {
            "point": {axis: row[axis] for axis in axes},
            "num_seeds": int(row["num_seeds"]),
            "num_seeds_asked": int(row["num_seeds_asked"]),
            "missing": row["missing"],
        }
        for _, row in cells[~cells["complete"]].iterrows()
    ]


def _not_finished(frame: SweepFrame) -> list[dict[str, Any]]:
    """Trials that were begun and have no numbers."""
    trials = frame.trials[~frame.trials["status"].isin([FINISHED, PENDING])]
    return [
        {
            "trial_id": row["trial_id"],
            "status": row["status"],
            "axes": {axis: row[axis] for axis in frame.axes},
            "error": None if pd.isna(row["error"]) else row["error"],
        }
        for _, row in trials.iterrows()
    ]


# ------------------------------------------------------------------------------------------------------------ printing


def report_text(report: dict[str, Any]) -> str:
    """The report for a reader."""
    why = f" ({report['store_chosen']})" if report["store_chosen"] else ""
    others = f"; --sweep chooses another: {', '.join(report['other_sweeps'])}" if report["other_sweeps"] else ""
    requested = report["requested_at"][:16].replace("T", " ")
    counts = [f"{count} {status}" for status, count in report["trials"].items() if status != "asked"]
    lines = [
        f"store   {report['store']}{why}",
        f"sweep   {report['sweep']}, requested {requested} UTC{others}",
        f"trials  {report['trials']['asked']} asked: {', '.join(counts)}",
        "",
        *_variant_lines(report),
        "",
    ]
    if lacking := report["cells_lacking_seeds"]:
        lines.append(f"{len(lacking)} of {report['num_cells']} cells lack seeds and are drawn hollow:")
        lines += _listed(
            [
                f"{_pairs(c['point'])}: {c['num_seeds']} of {c['num_seeds_asked']} seeds ({c['missing']})"
                for c in lacking
            ]
        )
    if report["num_points_lacking_seeds"] > len(lacking):
        lines.append(
            f"{report['num_points_lacking_seeds']} of {report['num_points']} points lack seeds; hyperparameters were "
            "chosen among the others wherever a cell has one"
        )
    if failed := [trial for trial in report["not_finished"] if trial["error"]]:
        lines.append("errors:")
        lines += _listed([f"{trial['trial_id']} ({trial['status']}): {trial['error']}" for trial in failed])
    if report["damaged"]:
        lines.append("damaged parts of the store, passed over:")
        lines += _listed(report["damaged"])
    if fits := report["fits"]:
        lines += _fit_lines(fits)
    lines += [f"no figure {entry['figure']}: {entry['reason']}" for entry in report["skipped_figures"]]
    paths = [Path(path) for path in report["files"]]
    stems = list(dict.fromkeys(path.stem for path in paths))
    lines.append(f"written to {paths[0].parent}/")
    for stem in stems:
        suffixes = [path.suffix[1:] for path in paths if path.stem == stem]
        lines.append(f"  {stem}.{'{' + ','.join(suffixes) + '}' if len(suffixes) > 1 else suffixes[0]}")
    return "\n".join(lines)


def _variant_lines(report: dict[str, Any]) -> list[str]:
    value = report["metric"]
    valid = f"valid/{value.split('/')[1]}"
    table = [["variant", valid, value, "range of seeds", "seeds", "cell", "chosen"]]
    for row in report["variants"]:
        if not row["num_seeds"]:
            table.append([row["variant"], "–", "–", "–", "0", "no finished trial", ""])
            continue
        table.append(
            [
                row["variant"],
                f"{row[valid]:.4f}" if valid in row else "–",
                f"{row['mean']:.4f}",
                f"{row['low']:.4f} … {row['high']:.4f}",
                f"{row['num_seeds']}/{row['num_seeds_asked']}",
                _pairs(row["cell"]) or "–",
                _pairs(row["chosen"]) or "–",
            ]
        )
    if len({row[-1] for row in table[1:]}) == 1 and table[1][-1] in ("", "–"):
        table = [row[:-1] for row in table]
    if valid == value:
        table = [[row[0], *row[2:]] for row in table]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [f"best cell of each variant by {report['selected_by']}"] + [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    ]


def _fit_lines(fits: list[dict[str, Any]]) -> list[str]:
    fitted = [fit for fit in fits if not fit["why_not"]]
    if not fitted:
        reasons = sorted({fit["why_not"] for fit in fits})
        return [
            f"no power laws: {reasons[0]}" + (f" (and {len(reasons) - 1} more, see fits.csv)" if reasons[1:] else "")
        ]
    texts = []
    for fit in fitted:
        where = ", ".join(part for part in (fit["variant"], fit["panel"]) if part)
        interval = f"{fit['exponent_low']:.3f} … {fit['exponent_high']:.3f}"
        texts.append(f"{where}: {fit['y']} ∝ {fit['x']}^−{fit['exponent']:.3f} (95 %: {interval}; R² {fit['r2']:.2f})")
    return [f"{len(fitted)} of {len(fits)} power laws fitted (the others lack points, see fits.csv):", *_listed(texts)]


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{figures.axis_label(axis)} {figures.level_text(level)}" for axis, level in values.items())


def _listed(texts: Sequence[str]) -> list[str]:
    more = len(texts) - MAX_LISTED
    return [f"  {text}" for text in texts[:MAX_LISTED]] + ([f"  … and {more} more"] if more > 0 else [])


def _json_ready(item: Any) -> Any:
    """Plain Python values; NaN, which JSON lacks, as null."""
    if isinstance(item, dict):
        return {key: _json_ready(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_json_ready(value) for value in item]
    if hasattr(item, "item"):
        item = item.item()
    return None if isinstance(item, float) and item != item else item


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs it.

    Returns:
      The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python analysis/scaling.py",
        description="Draws a sweep's scaling curves, with a CSV of the numbers beside each figure.",
    )
    parser.add_argument(
        "store",
        nargs="?",
        metavar="STORE",
        help="results folder; default: HYLA_STORE, else results/, else results-tiny/",
    )
    parser.add_argument("--sweep", metavar="NAME", help="default: the sweep of the store that was requested last")
    parser.add_argument("--metric", help=f"y axis; default: the first of {', '.join(METRICS)} that there is")
    parser.add_argument("--split", help=f"evaluation split of the y axis; default: the first of {', '.join(SPLITS)}")
    parser.add_argument("--valid", action="store_true", help="add the in-distribution metric as faint dashed lines")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: figures/NAME/")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    try:
        chosen = choose_store(args.store, os.environ.get("HYLA_STORE"))
        report = analyse(chosen, args.sweep, args.metric, args.split, args.out, args.valid)
    except (NothingToShow, StoreError) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        print(json.dumps(_json_ready(report), ensure_ascii=False) if args.json else report_text(report), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
