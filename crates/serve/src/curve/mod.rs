//! A sweep as a picture and a page: what each figure does as the setting changes. Read from `sweep.json` and the run folders beside it.

mod picture;

use crate::report::{ReportError, drawable, text};
use picture::{Panel, Place};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Component, Path, PathBuf};
use wattle_core::event::Event;
use wattle_core::metrics::Metric;
use wattle_core::scale::Figure;
use wattle_core::seen::Seen;
use wattle_core::stats::Histogram;
use wattle_core::summary::Summary;
use wattle_core::sweep::{Point, Swept};
use wattle_core::units::si;
use wattle_store::RunDir;

/// The figures that are drawn: metric, unit, and title.
const FIGURES: &[(&str, &str, &str)] = &[
    ("joules_per_output_token", "J", "Energy per output token"),
    ("output_tokens_per_s", "", "Output tokens per second"),
];

/// Whether a folder is that of a sweep.
pub fn is_sweep(folder: &Path) -> bool {
    folder.join("sweep.json").is_file()
}

/// What a sweep found, as it is kept in its folder.
pub fn read(folder: &Path) -> Result<Swept, ReportError> {
    wattle_store::read_json(&folder.join("sweep.json"))?.ok_or_else(|| ReportError::Empty(folder.into()))
}

/// The folder of a point's run; `None` if its name leads elsewhere.
pub fn run_folder(folder: &Path, point: &Point) -> Option<PathBuf> {
    let mut parts = Path::new(&point.run).components();
    let name = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    name.then(|| folder.join(&point.run))
}

/// Writes `curve.svg` and `report.html` to the sweep's folder, or the latter alone to `out`, and says where the page is.
pub fn write(folder: &Path, out: Option<&Path>) -> Result<PathBuf, ReportError> {
    let swept = read(folder)?;
    let runs: Vec<Run<'_>> = swept.in_order().into_iter().map(|p| Run::read(folder, p)).collect();
    if runs.is_empty() {
        return Err(ReportError::Empty(folder.into()));
    }
    let panels = panels(&swept, &runs);
    let title = title(&swept, &runs);
    let svg = match panels.is_empty() {
        true => String::new(),
        false => picture::svg(&title, &drawable(&swept.key), &places(&runs), &panels)
            .map_err(|error| ReportError::Picture(error.to_string()))?,
    };
    let put = |path: PathBuf, text: &str| match std::fs::write(&path, text) {
        Ok(()) => Ok(path),
        Err(error) => Err(ReportError::Write { path, error }),
    };
    let page = html(&swept, &runs, &panels, &title, &svg, out.is_none());
    match out {
        Some(out) => put(out.to_owned(), &page),
        None => {
            if !svg.is_empty() {
                put(folder.join("curve.svg"), &svg)?;
            }
            put(folder.join("report.html"), &page)
        }
    }
}

/// One point, and what its run folder has to say, if it is there.
struct Run<'a> {
    point: &'a Point,
    summary: Option<Summary>,
    /// Times to first token: the median, and the 99th percentile.
    ttft: [Option<Figure>; 2],
    /// Whether it has a page of its own.
    report: bool,
}

impl<'a> Run<'a> {
    fn read(folder: &Path, point: &'a Point) -> Self {
        let path = run_folder(folder, point);
        let dir = path.as_ref().and_then(|path| RunDir::open(path).ok());
        let (mut times, mut asked) = (Histogram::default(), Seen::default());
        let replayed = dir.as_ref().map(|dir| {
            dir.replay(|line| {
                if let Event::Record(record) = line.event
                    && asked.insert(record.item.index)
                    && let Some(ttft) = record.exchange.ttft()
                {
                    times.push(ttft.get());
                }
            })
        });
        let whole = matches!(replayed, Some(Ok(_)));
        let metric = point.metrics.get("ttft_s");
        let figure = |value: fn(&Metric) -> Option<f64>, q: f64| {
            let (low, high) = if whole { times.quantile_interval(q) } else { (None, None) };
            metric.and_then(value).map(|value| Figure { value, low, high })
        };
        Self {
            point,
            summary: dir.and_then(|d| d.summary().ok().flatten()),
            ttft: [figure(|m| m.p50, 0.5), figure(|m| m.p99, 0.99)],
            report: path.is_some_and(|path| path.join("report.html").is_file()),
        }
    }

    fn figure(&self, metric: &str) -> Option<Figure> {
        self.point.metrics.get(metric).and_then(Figure::of)
    }
}

fn places(runs: &[Run<'_>]) -> Vec<Place> {
    let place = |run: &Run<'_>| Place {
        label: drawable(&run.point.label()),
        number: run.point.value.as_f64(),
        kept_up: run.point.kept_up,
    };
    runs.iter().map(place).collect()
}

fn panels(swept: &Swept, runs: &[Run<'_>]) -> Vec<Panel> {
    let mut panels: Vec<Panel> = Vec::new();
    for (metric, unit, title) in FIGURES.iter().filter(|(metric, ..)| swept.knows(metric)) {
        let how = if swept.estimates(metric) { ", ESTIMATED" } else { "" };
        let figures = runs.iter().map(|r| r.figure(metric)).collect();
        panels.push(Panel { title: format!("{title}{how}"), unit, lines: vec![("", figures)] });
    }
    let times = |i: usize| runs.iter().map(|r| r.ttft[i]).collect::<Vec<_>>();
    if runs.iter().any(|r| r.ttft[0].is_some()) {
        let lines = vec![("median", times(0)), ("p99", times(1))];
        panels.push(Panel { title: "Time to first token".into(), unit: "s", lines });
    }
    panels
}

/// What was swept, and of what unless that is what changed.
fn title(swept: &Swept, runs: &[Run<'_>]) -> String {
    let titles: Vec<String> = runs.iter().filter_map(|r| Some(r.summary.as_ref()?.title())).collect();
    match titles.first() {
        Some(first) if titles.iter().all(|t| t == first) => format!("{first}, by {}", swept.key),
        _ => format!("By {}", swept.key),
    }
}

fn html(swept: &Swept, runs: &[Run<'_>], panels: &[Panel], title: &str, svg: &str, links: bool) -> String {
    let summary = runs.iter().find_map(|r| r.summary.as_ref());
    let about = [
        summary.map(|s| s.hardware_label.clone()),
        Some(format!("{} {}", runs.len(), if runs.len() == 1 { "run" } else { "runs" })),
        summary.map(|s| s.generated_at.clone()),
    ];
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><meta name=\"viewport\" content=\"width=device-width\"/>\
         <title>{title}</title><style>{}</style></head><body>\n<h1>{title}</h1>\n<p class=\"soft\">{}</p>\n",
        include_str!("../assets/report.css"),
        text(&about.into_iter().flatten().collect::<Vec<_>>().join(" · ")),
        title = text(title),
    );
    for (warning, at) in warnings(runs) {
        let at = if at.len() == runs.len() { String::new() } else { format!("{}: ", at.join(", ")) };
        let _ = writeln!(out, "<p class=\"warn\" role=\"note\">{}</p>", text(&format!("{at}{warning}")));
    }
    let _ = writeln!(out, "<div class=\"wide\">{svg}</div>");
    out += &table(swept, runs, panels, links);
    out + "</body></html>\n"
}

/// What is in doubt, and at which values.
fn warnings(runs: &[Run<'_>]) -> Vec<(String, Vec<String>)> {
    let mut order: Vec<String> = Vec::new();
    let mut at: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for run in runs {
        for warning in run.summary.iter().flat_map(|s| &s.warnings) {
            let labels = at.entry(warning.text.clone()).or_default();
            if labels.is_empty() {
                order.push(warning.text.clone());
            }
            labels.push(run.point.label());
        }
    }
    order.into_iter().map(|w| (w.clone(), at.remove(&w).unwrap_or_default())).collect()
}

/// The figures of the picture, to read.
fn table(swept: &Swept, runs: &[Run<'_>], panels: &[Panel], links: bool) -> String {
    let columns =
        || panels.iter().flat_map(|p| p.lines.iter().map(move |(name, figures)| (p, *name, figures)));
    let mut out = format!("<h2>Figures</h2>\n<table><thead><tr><th>{}</th>", text(&swept.key));
    for (panel, name, _) in columns() {
        let _ = write!(out, "<th class=\"n\">{}<br/><small>{}</small></th>", text(&panel.title), text(name));
    }
    out += "<th>kept up</th></tr></thead><tbody>\n";
    for (i, run) in runs.iter().enumerate() {
        let label = text(&run.point.label());
        let label = match links && run.report {
            true => format!("<a href=\"./{}/report.html\">{label}</a>", escaped(&run.point.run)),
            false => label,
        };
        let _ = write!(out, "<tr><td>{label}</td>");
        for (panel, _, figures) in columns() {
            out += &cell(figures.get(i).copied().flatten(), panel.unit);
        }
        let kept_up = if run.point.kept_up { "yes" } else { "× no" };
        let _ = writeln!(out, "<td>{kept_up}</td></tr>");
    }
    out + "</tbody></table>\n<p class=\"soft\">Below each figure is its 95 % interval; of percentiles, by ranks. Each value leads to the report of its run.</p>\n"
}

fn cell(figure: Option<Figure>, unit: &str) -> String {
    let Some(figure) = figure else { return "<td class=\"n\">unknown</td>".into() };
    let interval = match (figure.low, figure.high) {
        (Some(low), Some(high)) if low < high => format!("{} to {}", si(low, unit), si(high, unit)),
        (Some(low), None) => format!("above {}", si(low, unit)),
        _ => String::new(),
    };
    format!("<td class=\"n\">{}<br/><small>{}</small></td>", text(&si(figure.value, unit)), text(&interval))
}

/// A name as a part of an address.
fn escaped(name: &str) -> String {
    name.bytes().fold(String::new(), |mut out, byte| {
        match byte {
            b if b.is_ascii_alphanumeric() || b"-._~".contains(&b) => out.push(char::from(b)),
            b => {
                let _ = write!(out, "%{b:02X}");
            }
        }
        out
    })
}
