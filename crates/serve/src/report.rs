//! One run as one HTML file: no script, no network, nothing but text and pictures. What a model said is text, never markup.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use wattle_core::event::Event;
use wattle_core::metrics::METRICS;
use wattle_core::record::Record;
use wattle_core::summary::Summary;
use wattle_store::{RunDir, StoreError};

/// A picture of more points is a blot, and a file of more is heavy: of longer runs every n-th query is drawn.
const MOST_POINTS: usize = 2000;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The run cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The run has not been summed up.
    #[error("{} has no summary yet; finish it with \"wattle run --resume {}\"", .0.display(), .0.display())]
    Unfinished(PathBuf),
    /// The file cannot be written.
    #[error("cannot write {}: {error}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
}

/// Writes the report of the run in `run` to `out`, or to `report.html` in its folder, and says where.
pub fn write(run: &Path, out: Option<&Path>) -> Result<PathBuf, ReportError> {
    let dir = RunDir::open(run)?;
    let summary = dir.summary()?.ok_or_else(|| ReportError::Unfinished(run.into()))?;
    let mut queries = Queries::new(summary.total_queries);
    dir.replay(|line| {
        if let Event::Record(record) = line.event {
            queries.push(&record);
        }
    })?;
    let path = out.map_or_else(|| run.join("report.html"), Path::to_path_buf);
    std::fs::write(&path, html(&summary, &queries))
        .map_err(|error| ReportError::Write { path: path.clone(), error })?;
    Ok(path)
}

/// What the pictures need of the records, in flat memory.
struct Queries {
    every: u64,
    seen: u64,
    points: Vec<Point>,
    subjects: BTreeMap<String, Subject>,
}

struct Point {
    latency: f64,
    joules: f64,
    right: bool,
}

#[derive(Default)]
struct Subject {
    n: u64,
    score: f64,
    joules: f64,
}

impl Queries {
    fn new(total: u64) -> Self {
        let every = total.div_ceil(MOST_POINTS as u64).max(1);
        Self { every, seen: 0, points: Vec::new(), subjects: BTreeMap::new() }
    }

    fn push(&mut self, record: &Record) {
        let joules = record.share.map(|s| s.total().get());
        let score = record.score.as_ref().map_or(0.0, |s| s.value);
        if self.seen.is_multiple_of(self.every)
            && let Some(joules) = joules
        {
            self.points.push(Point { latency: record.exchange.latency().get(), joules, right: score >= 0.5 });
        }
        self.seen += 1;
        // A dataset may name a subject per item; a table of them all helps nobody.
        let name = record.item.subject.clone().unwrap_or_else(|| "(none)".into());
        if self.subjects.len() < 100 || self.subjects.contains_key(&name) {
            let subject = self.subjects.entry(name).or_default();
            subject.n += 1;
            subject.score += score;
            subject.joules += joules.unwrap_or(0.0);
        }
    }
}

fn html(summary: &Summary, queries: &Queries) -> String {
    let title = format!("{} on {}", summary.model, summary.dataset_name);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>{title}</title><style>{}</style></head><body>\n<h1>{title}</h1>\n\
         <p class=\"soft\">{} · {} queries · {} · run {}</p>\n",
        include_str!("assets/report.css"),
        text(&summary.hardware_label),
        summary.total_queries,
        text(&summary.generated_at),
        text(&summary.run_id),
        title = text(&title),
    );
    for warning in &summary.warnings {
        let _ = writeln!(out, "<p class=\"warn\" role=\"note\">{}</p>", text(&warning.text));
    }
    out += &scatter(queries);
    out += &metrics(summary);
    out += &subjects(queries);
    out += "</body></html>\n";
    out
}

fn metrics(summary: &Summary) -> String {
    let mut out = String::from(
        "<h2>Figures</h2>\n<table><thead><tr><th>metric</th><th class=\"n\">value</th><th class=\"n\">95 % interval</th>\
         <th>how</th><th>what it means</th></tr></thead><tbody>\n",
    );
    for definition in METRICS {
        let Some(metric) = summary.metrics.get(definition.name) else { continue };
        let value = metric
            .value
            .map_or_else(|| "unknown".into(), |v| format!("{} {}", figure(v), unit(definition.unit)));
        let interval = match (metric.low, metric.high) {
            (Some(low), Some(high)) if low < high => format!("{} to {}", figure(low), figure(high)),
            (Some(low), None) => format!("above {}", figure(low)),
            _ => String::new(),
        };
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{interval}</td><td>{}</td><td class=\"soft\">{}</td></tr>",
            definition.name,
            text(&value),
            text(&metric.method),
            text(definition.definition),
        );
    }
    out + "</tbody></table>\n"
}

/// Energy against latency, one dot a query.
fn scatter(queries: &Queries) -> String {
    const WIDTH: f64 = 720.0;
    const HEIGHT: f64 = 320.0;
    const LEFT: f64 = 60.0;
    const BOTTOM: f64 = 40.0;
    let most = |of: fn(&Point) -> f64| queries.points.iter().map(of).fold(0.0, f64::max);
    let (longest, costliest) = (most(|p| p.latency), most(|p| p.joules));
    if longest <= 0.0 || costliest <= 0.0 {
        return String::new();
    }
    let x = |latency: f64| LEFT + latency / longest * (WIDTH - LEFT - 10.0);
    let y = |joules: f64| HEIGHT - BOTTOM - joules / costliest * (HEIGHT - BOTTOM - 20.0);
    let mut out = format!(
        "<h2>Energy against latency</h2>\n<p class=\"soft\">One dot a query{}; <b style=\"color:var(--good)\">right</b>, \
         <b style=\"color:var(--bad)\">wrong</b>.</p>\n\
         <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"Energy of each query against its latency\">\
         <line class=\"axis\" x1=\"{LEFT}\" y1=\"{b}\" x2=\"{WIDTH}\" y2=\"{b}\"/>\
         <line class=\"axis\" x1=\"{LEFT}\" y1=\"10\" x2=\"{LEFT}\" y2=\"{b}\"/>",
        if queries.every > 1 { format!(" (every {}th)", queries.every) } else { String::new() },
        b = HEIGHT - BOTTOM,
    );
    for quarter in 0..=4 {
        let part = f64::from(quarter) / 4.0;
        let (latency, joules) = (longest * part, costliest * part);
        let _ = write!(
            out,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{} s</text>\
             <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{} J</text>",
            x(latency).min(WIDTH - 20.0),
            HEIGHT - BOTTOM + 16.0,
            figure(latency),
            LEFT - 6.0,
            y(joules) + 4.0,
            figure(joules),
        );
    }
    for point in &queries.points {
        let class = if point.right { "right" } else { "wrong" };
        let (x, y) = (x(point.latency), y(point.joules));
        let _ = write!(
            out,
            "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill-opacity=\".6\"/>"
        );
    }
    out + "</svg>\n"
}

fn subjects(queries: &Queries) -> String {
    if queries.subjects.len() < 2 {
        return String::new();
    }
    let mut out = String::from(
        "<h2>By subject</h2>\n<table><thead><tr><th>subject</th><th class=\"n\">queries</th><th class=\"n\">accuracy</th>\
         <th class=\"n\">J per query</th></tr></thead><tbody>\n",
    );
    for (name, subject) in &queries.subjects {
        let n = subject.n as f64;
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{:.1} %</td><td class=\"n\">{}</td></tr>",
            text(name),
            subject.n,
            subject.score / n * 100.0,
            if subject.joules > 0.0 { figure(subject.joules / n) } else { "unknown".into() },
        );
    }
    out + "</tbody></table>\n"
}

/// Text that stays text.
fn text(raw: &str) -> String {
    raw.chars().fold(String::with_capacity(raw.len()), |mut out, c| {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
        out
    })
}

/// Four significant digits; whole numbers as they are.
fn figure(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e12 {
        return format!("{value:.0}");
    }
    if value.abs() < 1e-4 {
        return format!("{value:.2e}");
    }
    let digits = value.abs().log10().floor() as i32;
    format!("{value:.*}", usize::try_from(3 - digits).unwrap_or(0))
}

const fn unit(unit: &str) -> &str {
    match unit.as_bytes() {
        b"1" => "",
        _ => unit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_model_said_is_text() {
        assert_eq!(
            text("<script>alert('x')&\"</script>"),
            "&lt;script&gt;alert(&#39;x&#39;)&amp;&quot;&lt;/script&gt;"
        );
    }

    #[test]
    fn figures_are_short() {
        let short: Vec<String> =
            [0.0, 12_345.0, 1234.2, 0.012_342, 0.000_001_2].iter().map(|v| figure(*v)).collect();
        assert_eq!(short, ["0", "12345", "1234", "0.01234", "1.20e-6"]);
    }
}
