//! A result as a table a person understands at once: the figure, its 95 % interval, how it was got. 80 columns are enough.

use crate::chart;
use std::path::Path;
use wattle_core::metrics::Metric;
use wattle_core::spec::Spec;
use wattle_core::summary::Summary;
use wattle_core::sweep::{Load, Point, Sweep};
use wattle_core::units::si;
use wattle_lab::run::{Ended, Progress};
use wattle_lab::sweep::Swept;

/// Where a line ends.
const WIDTH: usize = 79;

/// The rows of the table: label, metric, and the unit it is shown in (`%` is a share of one).
const ROWS: &[(&str, &str, &str)] = &[
    ("accuracy", "accuracy", "%"),
    ("energy per query", "joules_per_query", "J"),
    ("energy per output token", "joules_per_output_token", "J"),
    ("energy, whole run", "energy_j", "J"),
    ("power, mean", "mean_power_w", "W"),
    ("power, idle", "idle_power_w", "W"),
    ("output tokens", "output_tokens_per_s", "1/s"),
    ("time to first token", "ttft_s", "s"),
    ("time per output token", "itl_s", "s"),
    ("latency", "latency_s", "s"),
    ("correct per joule (IPJ)", "ipj", "1/J"),
    ("correct per watt (IPW)", "ipw", "1/W"),
];

/// The rows of a load: several at once, or at times of their own.
const LOAD_ROWS: &[(&str, &str, &str)] = &[
    ("requests", "queries_per_s", "1/s"),
    ("requests in flight", "mean_in_flight", ""),
    ("sent late by", "send_lateness_s", "s"),
    ("goodput", "goodput_per_s", "1/s"),
    ("within the limits", "slo_met", "%"),
    ("energy of prompts", "prefill_j", "J"),
    ("energy of tokens", "decode_j", "J"),
    ("energy shared", "shared_j", "J"),
    ("energy in no request", "unattributed_j", "J"),
];

/// The rows of a command.
const COMMAND_ROWS: &[(&str, &str, &str)] = &[
    ("energy", "energy_j", "J"),
    ("energy per run", "joules_per_repetition", "J"),
    ("power, mean", "mean_power_w", "W"),
    ("power, idle", "idle_power_w", "W"),
    ("energy above idle", "net_energy_j", "J"),
    ("time per run", "seconds_per_repetition", "s"),
    ("CPU time per run", "cpu_s_per_repetition", "s"),
    ("peak memory", "peak_rss_bytes", "B"),
];

/// The whole screen for a finished run.
pub(crate) fn result(ended: &Ended, report: Option<&Path>) -> String {
    let summary = &ended.summary;
    let queries = if summary.total_queries == 1 { "query" } else { "queries" };
    let name = |text: &Option<String>| text.clone().unwrap_or_default();
    let mut out = format!(
        "\n{} on {}, {} {queries}, {}\n",
        name(&summary.model),
        name(&summary.dataset_name),
        summary.total_queries,
        summary.hardware_label
    );
    out += &warnings(summary);
    if summary.total_queries > 0 {
        out += &table(summary, ROWS);
        let Spec { concurrency, rate, trace, slo, .. } = &summary.config;
        let open = rate.is_some() || trace.is_some() || summary.dataset.as_deref() == Some("trace");
        if open || concurrency.is_some_and(|n| n > 1) || !slo.is_empty() {
            let known = |(_, name, _): &&(&str, &str, &str)| {
                summary.metrics.get(*name).is_some_and(|m| m.value.is_some())
                    && (open || *name != "send_lateness_s")
            };
            let rows: Vec<_> = LOAD_ROWS.iter().filter(known).copied().collect();
            out += &lines(summary, &rows);
        }
        out += &steady(summary);
    }
    out += &foot(summary, &ended.run, report);
    if ended.stopped.is_none() {
        out += &next(summary);
    }
    out
}

/// The screen for a run that gave up: what there is.
pub(crate) fn cut_off(summary: &Summary, run: &Path, report: Option<&Path>) -> String {
    let mut out = format!("\n{}, {} queries\n", summary.title(), summary.total_queries);
    out += &warnings(summary);
    if summary.total_queries > 0 {
        out += &table(summary, ROWS);
    }
    out + &foot(summary, run, report)
}

/// The whole screen for a command.
pub(crate) fn command(ended: &wattle_lab::exec::Ended, report: Option<&Path>) -> String {
    let summary = &ended.summary;
    let count = summary.repetitions.iter().filter(|r| !r.repetition.warmup).count();
    let times = if count == 1 { String::new() } else { format!(", {count} times") };
    let mut out = wrapped(&format!("{}{times}, {}", summary.title(), summary.hardware_label));
    out += &warnings(summary);
    // Of one run there is no mean.
    let rows: Vec<_> =
        COMMAND_ROWS.iter().copied().filter(|r| count != 1 || r.1 != "joules_per_repetition").collect();
    out += &table(summary, &rows);
    if !summary.phases.is_empty() {
        out += &format!("\n  {:23} {:>10}  {:>10}  {:>6}  power\n", "phase", "energy", "time", "times");
        for (name, phase) in &summary.phases {
            let joules = phase.energy.map(|e| e.value().get());
            let watts = joules.filter(|_| phase.seconds > 0.0).map(|j| si(j / phase.seconds, "W"));
            let name: String = name.chars().filter(|c| !c.is_control()).take(23).collect();
            out += &format!(
                "  {name:23} {:>10}  {:>10}  {:>6}  {}\n",
                joules.map_or_else(|| "unknown".into(), |j| si(j, "J")),
                si(phase.seconds, "s"),
                phase.count,
                watts.unwrap_or_default(),
            );
        }
    }
    if summary.devices.len() > 1 {
        out += &format!("\n  {:44} {:>10}  ±\n", "device", "energy");
        for device in &summary.devices {
            let energy = device.energy.map_or_else(
                || format!("{:>10}", "unknown"),
                |e| format!("{:>10}  {}", si(e.value().get(), "J"), si(e.bound().get(), "J")),
            );
            let name = format!("{} {}", device.device.name, device.device.id);
            out += &format!("  {:44} {energy}\n", name.chars().take(44).collect::<String>());
        }
    }
    "\n".to_owned() + &out + &foot(summary, &ended.run, report)
}

fn warnings(summary: &Summary) -> String {
    summary.warnings.iter().map(|warning| wrapped(&format!("! {}", warning.text))).collect()
}

fn table(summary: &Summary, rows: &[(&str, &str, &str)]) -> String {
    let perimeter = summary.energy_perimeter.map_or("", |p| p.name());
    let how = if perimeter.is_empty() { "how".to_owned() } else { format!("how (energy: {perimeter})") };
    let mut out = format!("\n  {:23} {:>10}  {:22} {how}\n", "", "", "95 % interval");
    out += &lines(summary, rows);
    out
}

fn lines(summary: &Summary, rows: &[(&str, &str, &str)]) -> String {
    let mut out = String::new();
    for (label, name, unit) in rows {
        // Without energy there is no point in saying so seven times.
        // Nor of what nobody could score.
        let scored = summary.metrics.get("accuracy").is_some_and(|m| m.n > 0);
        let of_score = ["accuracy", "ipj", "ipw"].contains(name);
        let silent =
            |m: &&Metric| m.value.is_none() && (summary.energy_perimeter.is_none() || of_score && !scored);
        if let Some(metric) = summary.metrics.get(*name).filter(|m| !silent(m)) {
            out += &row(label, metric, unit, summary);
        }
    }
    out
}

/// What is said of the steady part of a run: metric, unit, and words after it.
const STEADY: &[(&str, &str, &str)] = &[
    ("joules_per_output_token", "J", " per output token"),
    ("joules_per_query", "J", " per query"),
    ("mean_power_w", "W", ""),
    ("output_tokens_per_s", "", " output tokens/s"),
    ("ttft_s", "s", " to first token"),
    ("itl_s", "s", " per token"),
];

/// The steady part of a run, on one line or two.
fn steady(summary: &Summary) -> String {
    let Some(steady) = summary.steady.as_ref().filter(|s| s.reached) else { return String::new() };
    let parts = STEADY.iter().filter_map(|(name, unit, words)| {
        let value = steady.metrics.get(*name)?.value?;
        let shown = if unit.is_empty() { figures(value) } else { si(value, unit) };
        Some(format!("{shown}{words}"))
    });
    let whole = steady.seconds + steady.trimmed_start_s + steady.trimmed_end_s;
    let window = format!("in steady state, {:.1} of {whole:.1} s:", steady.seconds);
    let mut parts: Vec<String> = parts.map(|part| part + ",").collect();
    parts.last_mut().into_iter().for_each(|last| last.truncate(last.len() - 1));
    // As far in as the table.
    format!("\n  {}", filled(std::iter::once(window.as_str()).chain(parts.iter().map(String::as_str))))
}

/// What wattle itself cost, and where everything is.
fn foot(summary: &Summary, run: &Path, report: Option<&Path>) -> String {
    let mut out = String::from("\n");
    if let Some(share) = summary.metrics.get("meter_cpu_fraction").and_then(|m| m.value) {
        out += &format!("  wattle's own sampler used {:.2} % of one core.\n", share * 100.0);
    }
    out += &format!("  files   {}\n", run.display());
    if let Some(report) = report {
        out += &format!("  report  {}\n", report.display());
    }
    out
}

/// The columns of a sweep: title, metric, unit, and whether its 99th percentile is shown too.
const SWEPT: &[(&str, &str, &str, bool)] = &[
    ("req/s", "queries_per_s", "", false),
    ("tok/s", "output_tokens_per_s", "", false),
    ("TTFT", "ttft_s", "s", true),
    ("s/token", "itl_s", "s", true),
    ("power", "mean_power_w", "W", false),
    ("J/token", "joules_per_output_token", "J", false),
    ("good/s", "goodput_per_s", "", false),
    ("failed", "errors", "", false),
];

/// What a sweep found, one line for each run, and its curve.
pub(crate) fn sweep(swept: &Swept, plan: &Sweep, doubts: &[String], report: Option<&Path>) -> String {
    // That nothing failed is not worth a column.
    let fails = |p: &Point| p.metrics.get("errors").and_then(|m| m.value).is_some_and(|n| n > 0.0);
    let shown = |metric: &str| swept.knows(metric) && (metric != "errors" || swept.points.iter().any(fails));
    let columns: Vec<_> = SWEPT.iter().filter(|(_, metric, ..)| shown(metric)).collect();
    let mut rows = vec![vec![format!("{} ", swept.key)]];
    for (title, _, _, tail) in &columns {
        rows[0].push((*title).to_owned());
        rows[0].extend(tail.then(|| "p99".to_owned()));
    }
    for point in swept.in_order() {
        let mut row = vec![format!("{}{}", point.label(), if point.kept_up { " " } else { "!" })];
        let show = |value: Option<f64>, unit: &str| match value {
            None => "-".to_owned(),
            Some(v) if unit.is_empty() => figures(v),
            Some(v) => si(v, unit),
        };
        for (_, metric, unit, tail) in &columns {
            let metric = point.metrics.get(*metric);
            row.push(show(metric.and_then(|m| if *tail { m.p50 } else { m.value }), unit));
            row.extend(tail.then(|| show(metric.and_then(|m| m.p99), unit)));
        }
        rows.push(row);
    }
    let widths: Vec<usize> =
        (0..rows[0].len()).map(|c| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
        cells.collect::<Vec<_>>().join("  ") + "\n"
    };
    let mut out = String::from("\n");
    doubts.iter().for_each(|doubt| out += &wrapped(&format!("! {doubt}")));
    out += &format!("\n{}", rows.iter().map(line).collect::<String>());
    out += &chart::curve(swept, WIDTH);
    if swept.points.iter().any(|p| !p.kept_up) {
        out += "\n!: the server did not keep up\n";
    }
    let best = swept
        .points
        .iter()
        .filter(|p| p.kept_up)
        .max_by(|a, b| a.value.as_f64().unwrap_or(0.0).total_cmp(&b.value.as_f64().unwrap_or(0.0)));
    if let (Sweep::Search { of, .. }, Some(best)) = (plan, best) {
        out += &match of {
            Load::Rate => format!("\nThe server keeps up with {} requests a second.\n", best.value),
            Load::Concurrency => format!("\nMore than {} requests at once bring nothing more.\n", best.value),
        };
    }
    out += &format!("\n  sweep   {}\n", swept.output_dir.display());
    out + &report.map_or_else(String::new, |report| format!("  report  {}\n", report.display()))
}

/// One run of a sweep, on one line.
pub(crate) fn point(summary: &Summary) -> String {
    let value = |name: &str| summary.metrics.get(name).and_then(|m| m.value);
    let parts = [
        value("queries").map(|n| format!("{n} queries")),
        value("queries_per_s").map(|r| format!("{}/s", figures(r))),
        value("errors").filter(|n| *n > 0.0).map(|n| format!("{n} failed")),
    ];
    format!("  {}", parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
}

/// Three figures.
fn figures(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 || v.fract() == 0.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// How a run is doing, on one line.
pub(crate) fn live(progress: &Progress) -> String {
    let Progress::Load { errors, in_flight, ttft_s, itl_s, watts, joules_per_token, .. } = progress else {
        return String::new();
    };
    let times = |name: &str, times: &Option<(f64, f64)>| {
        times.map(|(p50, p99)| format!("{name} {}/{}", si(p50, "s"), si(p99, "s")))
    };
    let parts = [
        (*in_flight > 1).then(|| format!("{in_flight} in flight")),
        times("TTFT", ttft_s),
        times("ITL", itl_s),
        watts.map(|w| si(w, "W")),
        joules_per_token.map(|j| format!("{}/token", si(j, "J"))),
        (*errors > 0).then(|| format!("{errors} failed")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join("  ")
}

fn row(label: &str, metric: &Metric, unit: &str, summary: &Summary) -> String {
    let show = |x: f64| if unit == "%" { format!("{:.1} %", x * 100.0) } else { si(x, unit) };
    let Some(value) = metric.value else { return format!("  {label:23} {:>10}\n", "unknown") };
    let interval = match (metric.low, metric.high) {
        (Some(low), Some(high)) => format!("{} to {}", show(low), show(high)),
        (Some(low), None) => format!("above {}", show(low)),
        _ => String::new(),
    };
    let how = match metric.method.as_str() {
        "counter" => "measured".into(),
        "integral" => "measured (power)".into(),
        "model" => "ESTIMATED".into(),
        "score" => summary.scorer.clone().unwrap_or_else(|| "scored".into()),
        "clock" => metric.p99.map_or_else(|| "clock".into(), |p99| format!("p99 {}", show(p99))),
        other => other.to_owned(),
    };
    format!("  {label:23} {:>10}  {interval:22} {how}\n", show(value))
}

/// What to try next, as far as it was not just done.
fn next(summary: &Summary) -> String {
    let embedded = summary.config.client == "embedded";
    let hints = [
        (
            embedded && summary.model.as_deref() == Some("demo-1m"),
            "wattle run --model demo-300k",
            "a smaller model: cheaper, and worse?",
        ),
        (embedded, "wattle run --help", "your own questions, a model on a server"),
        (
            !embedded && summary.config.concurrency.is_none() && summary.config.rate.is_none(),
            "… --dataset synthetic --concurrency 8",
            "a load test",
        ),
        (
            summary.metrics.get("energy_j").is_some_and(|m| m.method == "model" || m.value.is_none()),
            "wattle doctor",
            "how to measure energy on this machine",
        ),
        (true, "wattle list metrics", "what each figure means"),
    ];
    let lines =
        hints.iter().filter(|(fits, ..)| *fits).map(|(_, command, why)| format!("  {command:30} {why}\n"));
    format!("\nNext:\n{}", lines.collect::<String>())
}

/// A paragraph that fits the screen, indented after its first line.
pub(crate) fn wrapped(text: &str) -> String {
    // A call to make stays on a line of its own, so that it can be copied.
    match text.rsplit_once(": wattle ") {
        Some((before, call)) => {
            format!("{}  wattle {call}\n", filled(format!("{before}:").split_whitespace()))
        }
        None => filled(text.split_whitespace()),
    }
}

/// The same of parts that stay whole.
fn filled<'a>(parts: impl Iterator<Item = &'a str>) -> String {
    let mut out = String::new();
    let mut column = 0;
    for word in parts {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > WIDTH {
            out += "\n  ";
            column = 2;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out += word;
        column += length;
    }
    out + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_to_make_can_be_copied() {
        let call = format!("wattle calibrate --url {}", "x".repeat(90));
        let text =
            wrapped(&format!("! measure once what work costs here, which takes a minute or two: {call}"));
        assert!(text.lines().any(|line| line.trim() == call), "{text}");
    }

    #[test]
    fn parts_stay_whole() {
        let parts = ["a figure of 116 W,"; 9];
        assert!(filled(parts.into_iter()).lines().all(|l| l.ends_with(",")));
    }

    #[test]
    fn long_warnings_are_wrapped() {
        let text = wrapped(&"word ".repeat(60));
        assert!(text.lines().all(|l| l.chars().count() <= WIDTH) && text.lines().count() > 2);
    }
}
