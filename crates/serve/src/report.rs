//! One run as one HTML file: no script, no network, nothing but text and pictures. What a model said is text, never markup.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use wattle_core::event::Event;
use wattle_core::metrics::{METRICS, Metric, WHOLE};
use wattle_core::record::Record;
use wattle_core::seen::Seen;
use wattle_core::steady::Trend;
use wattle_core::summary::Summary;
use wattle_core::units::si;
use wattle_core::{Estimate, Joules};
use wattle_store::{RunDir, StoreError};

/// A picture of more points is a blot, and a file of more is heavy: of longer runs every n-th query is drawn.
const MOST_POINTS: usize = 2000;
/// Nobody reads a longer table.
const MOST_ROWS: usize = 200;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The run cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The run has not been summed up, or has gone on since it was.
    #[error("{} has queries that are not summed up yet; do that with \"wattle run --resume {}\"", .0.display(), .0.display())]
    Unfinished(PathBuf),
    /// A sweep of which no run has ended.
    #[error("{} has no run that ended; go on with the call that began it and the same --name", .0.display())]
    Empty(PathBuf),
    /// The picture cannot be drawn.
    #[error("cannot draw the curve: {0}; this is a fault of wattle's")]
    Picture(String),
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
    let (mut asked, mut repetitions) = (Seen::default(), 0);
    dir.replay(|line| match line.event {
        Event::Record(record) if asked.insert(record.item.index) => queries.push(&record),
        Event::Repetition(_) => repetitions += 1,
        _ => {}
    })?;
    if (queries.seen, repetitions) != (summary.total_queries, summary.repetitions.len()) {
        return Err(ReportError::Unfinished(run.into()));
    }
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
    /// `None` if nothing was expected.
    right: Option<bool>,
}

#[derive(Default)]
struct Subject {
    n: u64,
    scored: u64,
    score: f64,
    metered: u64,
    joules: f64,
}

impl Queries {
    fn new(total: u64) -> Self {
        let every = total.div_ceil(MOST_POINTS as u64).max(1);
        Self { every, seen: 0, points: Vec::new(), subjects: BTreeMap::new() }
    }

    fn push(&mut self, record: &Record) {
        let joules = record.share.filter(|s| s.coverage >= WHOLE).map(|s| s.total().get());
        let score = record.score.as_ref().map(|s| s.value);
        if self.seen.is_multiple_of(self.every)
            && let Some(joules) = joules
        {
            self.points.push(Point {
                latency: record.exchange.latency().get(),
                joules,
                right: score.map(|s| s >= 0.5),
            });
        }
        self.seen += 1;
        // A dataset may name a subject per item; a table of them all helps nobody.
        let name = record.item.subject.clone().unwrap_or_else(|| "(none)".into());
        if self.subjects.len() < 100 || self.subjects.contains_key(&name) {
            let subject = self.subjects.entry(name).or_default();
            subject.n += 1;
            subject.scored += u64::from(record.score.is_some());
            subject.score += score.unwrap_or(0.0);
            subject.metered += u64::from(joules.is_some());
            subject.joules += joules.unwrap_or(0.0);
        }
    }
}

fn html(summary: &Summary, queries: &Queries) -> String {
    let title = summary.title();
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>{title}</title><style>{}</style></head><body>\n<h1>{title}</h1>\n\
         <p class=\"soft\">{} · {} · {} · run {}</p>\n",
        include_str!("assets/report.css"),
        text(&summary.hardware_label),
        match summary.model {
            Some(_) => format!("{} queries", summary.total_queries),
            None => format!("{} runs", summary.repetitions.iter().filter(|r| !r.repetition.warmup).count()),
        },
        text(&summary.generated_at),
        text(&summary.run_id),
        title = text(&title),
    );
    for warning in &summary.warnings {
        let _ = writeln!(out, "<p class=\"warn\" role=\"note\">{}</p>", text(&warning.text));
    }
    out += &scatter(summary, queries);
    out += &metrics("Figures", &summary.metrics);
    out += &steady(summary);
    out += &energies(summary);
    out += &subjects(queries);
    out += &settings(summary);
    out += "</body></html>\n";
    out
}

/// The steady part of the run, if it has one.
fn steady(summary: &Summary) -> String {
    let Some(steady) = summary.steady.as_ref().filter(|s| s.reached) else { return String::new() };
    let trends = [
        change("power", steady.trends.power),
        change("requests in flight", steady.trends.in_flight),
        change("temperature", steady.trends.temperature),
    ];
    let trends = trends.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let note = format!(
        "<p class=\"soft\">{} of the run, without {} at its beginning and {} at its end. Change in that time: {trends}. Energy and rates are those \
         of this window; figures of requests are of those that ended in it.</p>\n",
        si(steady.seconds, "s"),
        si(steady.trimmed_start_s, "s"),
        si(steady.trimmed_end_s, "s"),
    );
    let table = metrics("Steady state", &steady.metrics);
    table.replacen("</h2>\n", &format!("</h2>\n{note}"), 1)
}

/// How something changed, and whether that is chance.
fn change(what: &str, trend: Option<Trend>) -> Option<String> {
    let trend = trend?;
    let sure = match trend.significant {
        Some(true) => "",
        Some(false) => " (chance)",
        None => " (whether by chance cannot be told)",
    };
    Some(format!("{what} {:+.1} %{sure}", trend.change * 100.0))
}

fn metrics(title: &str, metrics: &BTreeMap<String, Metric>) -> String {
    let mut out = format!(
        "<h2>{title}</h2>\n<table><thead><tr><th>metric</th><th class=\"n\">value</th><th class=\"n\">95 % interval</th>\
         <th>how</th></tr></thead><tbody>\n",
    );
    for definition in METRICS {
        let Some(metric) = metrics.get(definition.name) else { continue };
        let Some(value) = metric.value else { continue };
        let show = |x: f64| si(x, definition.unit);
        let interval = match (metric.low, metric.high) {
            (Some(low), Some(high)) if low < high => format!("{} to {}", show(low), show(high)),
            (Some(low), None) => format!("above {}", show(low)),
            _ => String::new(),
        };
        let how = match (metric.method.as_str(), metric.p50, metric.p90, metric.p99) {
            ("model", ..) => "ESTIMATED".into(),
            ("counter" | "integral", ..) => format!("measured ({})", metric.method),
            (_, Some(p50), Some(p90), Some(p99)) => {
                format!("p50 {}, p90 {}, p99 {}", show(p50), show(p90), show(p99))
            }
            (other, ..) => other.to_owned(),
        };
        let _ = writeln!(
            out,
            "<tr><td>{}<br><small>{}</small></td><td class=\"n\">{}</td><td class=\"n\">{interval}</td><td>{}</td></tr>",
            definition.name,
            text(definition.definition),
            text(&show(value)),
            text(&how),
        );
    }
    out + "</tbody></table>\n"
}

/// Energy by device, by phase, and by run of a command.
fn energies(summary: &Summary) -> String {
    let rows = |title: &str, what: &str, rows: Vec<(String, Option<f64>, Option<Estimate<Joules>>)>| {
        if rows.is_empty() {
            return String::new();
        }
        let time = rows.iter().any(|(_, seconds, _)| seconds.is_some());
        let head = if time { "<th class=\"n\">time</th>" } else { "" };
        let mut out = format!(
            "<h2>{title}</h2>\n<table><thead><tr><th>{what}</th>{head}<th class=\"n\">energy</th>\
             <th class=\"n\">±</th><th>how</th></tr></thead><tbody>\n"
        );
        for (name, seconds, energy) in rows {
            let joules = |j: Joules| text(&si(j.get(), "J"));
            let time =
                seconds.map_or_else(String::new, |s| format!("<td class=\"n\">{}</td>", text(&si(s, "s"))));
            let (value, bound, how) = energy.map_or_else(
                || ("unknown".to_owned(), String::new(), String::new()),
                |e| {
                    (
                        joules(e.value()),
                        joules(e.bound()),
                        format!("{}, {:.1} % seen", e.method().name(), e.coverage() * 100.0),
                    )
                },
            );
            let _ = writeln!(
                out,
                "<tr><td>{}</td>{time}<td class=\"n\">{value}</td><td class=\"n\">{bound}</td><td>{how}</td></tr>",
                text(&name),
            );
        }
        out + "</tbody></table>\n"
    };
    let devices =
        summary.devices.iter().map(|d| (format!("{} {}", d.device.name, d.device.id), None, d.energy));
    let phases = summary.phases.iter().map(|(name, p)| {
        let times = if p.count == 1 { String::new() } else { format!(" × {}", p.count) };
        (format!("{name}{times}"), Some(p.seconds), p.energy)
    });
    let runs = summary.repetitions.iter().take(MOST_ROWS).map(|r| {
        let run = &r.repetition;
        let end = match (run.exit_code, run.signal) {
            (Some(0), _) => String::new(),
            (Some(code), _) => format!(", exit code {code}"),
            (None, Some(signal)) => format!(", signal {signal}"),
            _ => String::new(),
        };
        let name = if run.warmup { "warm-up" } else { "run" };
        (format!("{name} {}{end}", run.index + 1), Some(run.span.duration().get()), r.energy)
    });
    rows("Energy by device", "device", devices.collect())
        + &rows("Energy by phase", "phase", phases.collect())
        + &rows("Runs", "run", runs.collect())
}

/// Energy against latency, one dot a query.
fn scatter(summary: &Summary, queries: &Queries) -> String {
    const WIDTH: f64 = 720.0;
    const HEIGHT: f64 = 320.0;
    const LEFT: f64 = 70.0;
    const BOTTOM: f64 = 40.0;
    let most = |of: fn(&Point) -> f64| queries.points.iter().map(of).fold(0.0, f64::max);
    let (longest, costliest) = (most(|p| p.latency), most(|p| p.joules));
    if longest <= 0.0 || costliest <= 0.0 {
        return String::new();
    }
    let x = |latency: f64| LEFT + latency / longest * (WIDTH - LEFT - 10.0);
    let y = |joules: f64| HEIGHT - BOTTOM - joules / costliest * (HEIGHT - BOTTOM - 20.0);
    let estimated = summary.metrics.get("energy_j").is_some_and(|m| m.method == "model");
    let mut out = format!(
        "<h2>Energy against latency</h2>\n<p class=\"soft\">One dot a query{}; <b style=\"color:var(--good)\">right</b>, \
         <b style=\"color:var(--bad)\">wrong</b>{}.{}</p>\n\
         <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"Energy of each query against its latency\">\
         <line class=\"axis\" x1=\"{LEFT}\" y1=\"{b}\" x2=\"{WIDTH}\" y2=\"{b}\"/>\
         <line class=\"axis\" x1=\"{LEFT}\" y1=\"10\" x2=\"{LEFT}\" y2=\"{b}\"/>",
        if queries.every > 1 { format!(" (one in {})", queries.every) } else { String::new() },
        if queries.points.iter().any(|p| p.right.is_none()) { ", not scored" } else { "" },
        if estimated {
            " Energy is estimated; bands are the steps in which CPU time is counted."
        } else {
            ""
        },
        b = HEIGHT - BOTTOM,
    );
    for quarter in 0..=4 {
        let part = f64::from(quarter) / 4.0;
        let (latency, joules) = (longest * part, costliest * part);
        let _ = write!(
            out,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>\
             <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text>",
            x(latency).min(WIDTH - 30.0),
            HEIGHT - BOTTOM + 16.0,
            si(latency, "s"),
            LEFT - 6.0,
            y(joules) + 4.0,
            si(joules, "J"),
        );
    }
    // Wrong ones last, so that they lie on top.
    let (wrong, other): (Vec<&Point>, Vec<&Point>) =
        queries.points.iter().partition(|p| p.right == Some(false));
    for point in other.into_iter().chain(wrong) {
        let class = match point.right {
            Some(true) => "right",
            Some(false) => "wrong",
            None => "unscored",
        };
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
         <th class=\"n\">energy per query</th></tr></thead><tbody>\n",
    );
    let unknown = || "unknown".to_owned();
    for (name, subject) in &queries.subjects {
        let mean = |sum: f64, n: u64| (n > 0).then(|| sum / n as f64);
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            text(name),
            subject.n,
            mean(subject.score, subject.scored).map_or_else(unknown, |a| format!("{:.1} %", a * 100.0)),
            mean(subject.joules, subject.metered).map_or_else(unknown, |j| si(j, "J")),
        );
    }
    out + "</tbody></table>\n"
}

/// Everything that was asked for, and of what.
fn settings(summary: &Summary) -> String {
    let host = &summary.system_info;
    let config = serde_json::to_string_pretty(&summary.config).unwrap_or_default();
    format!(
        "<h2>Settings</h2>\n<p class=\"soft\">{}, {} logical CPUs, {} {}; wattle {}; energy of: {}</p>\n\
         <details><summary>All settings</summary><pre>{}</pre></details>\n",
        text(&host.cpu_brand),
        host.cpu_count,
        text(&host.os_name),
        text(&host.os_version),
        text(summary.versions.get("wattle").map_or("", String::as_str)),
        summary.energy_perimeter.map_or("nothing", |p| p.name()),
        text(&config),
    )
}

/// Text that stays text, in HTML and in XML.
pub(crate) fn text(raw: &str) -> String {
    drawable(raw).chars().fold(String::with_capacity(raw.len()), |mut out, c| {
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

/// Without what XML has no way to write.
pub(crate) fn drawable(raw: &str) -> String {
    let lawful = |c: &char| !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}') || "\n\t".contains(*c);
    raw.chars().filter(lawful).collect()
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
        assert_eq!(text("a\u{0}\u{1b}[2J\nb\u{ffff}"), "a[2J\nb");
    }

    #[test]
    fn what_cannot_be_told_is_not_called_chance() {
        let told = |significant| change("power", Some(Trend { change: -0.15, significant })).unwrap();
        assert_eq!(told(Some(true)), "power -15.0 %");
        assert_eq!(told(Some(false)), "power -15.0 % (chance)");
        assert_eq!(told(None), "power -15.0 % (whether by chance cannot be told)");
    }
}
