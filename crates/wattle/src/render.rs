//! A result as a table a person understands at once: the figure, its 95 % interval, how it was got.

use std::path::Path;
use wattle_core::metrics::Metric;
use wattle_core::summary::Summary;
use wattle_lab::run::Ended;

/// How a figure is written.
enum Style {
    /// A share of one, in percent.
    Percent,
    /// With a prefix: mJ, kW.
    Si(&'static str),
    /// So much per unit.
    Per(&'static str),
}

/// The rows of the table: label, metric, style.
const ROWS: &[(&str, &str, Style)] = &[
    ("accuracy", "accuracy", Style::Percent),
    ("energy per query", "joules_per_query", Style::Si("J")),
    ("energy per output token", "joules_per_output_token", Style::Si("J")),
    ("energy, whole run", "energy_j", Style::Si("J")),
    ("power, mean", "mean_power_w", Style::Si("W")),
    ("power, idle", "idle_power_w", Style::Si("W")),
    ("output tokens", "output_tokens_per_s", Style::Per("s")),
    ("time to first token", "ttft_s", Style::Si("s")),
    ("time per output token", "itl_s", Style::Si("s")),
    ("latency", "latency_s", Style::Si("s")),
    ("correct per joule (IPJ)", "ipj", Style::Per("J")),
    ("correct per watt (IPW)", "ipw", Style::Per("W")),
];

/// The whole screen for a finished run.
pub(crate) fn result(ended: &Ended, report: Option<&Path>) -> String {
    let summary = &ended.summary;
    let mut out = format!(
        "\n{} on {}, {} queries, {}\n",
        summary.model, summary.dataset_name, summary.total_queries, summary.hardware_label
    );
    for warning in &summary.warnings {
        out += &wrapped(&format!("! {}", warning.text));
    }
    out += &format!("\n  {:24} {:>12}  {:24} {}\n", "", "", "95 % interval", "how");
    for (label, name, style) in ROWS {
        if let Some(metric) = summary.metrics.get(*name) {
            out += &row(label, metric, style, summary);
        }
    }
    if let Some(share) = summary.metrics.get("meter_cpu_fraction").and_then(|m| m.value) {
        out += &format!("\n  wattle's own sampler used {:.2} % of one core.\n", share * 100.0);
    }
    out += &format!("  files   {}\n", ended.run.display());
    if let Some(report) = report {
        out += &format!("  report  {}\n", report.display());
    }
    out += &next(summary);
    out
}

fn row(label: &str, metric: &Metric, style: &Style, summary: &Summary) -> String {
    let show = |x: f64| match style {
        Style::Percent => format!("{:.1} %", x * 100.0),
        Style::Si(unit) => si(x, unit),
        Style::Per(unit) => format!("{} /{unit}", significant(x)),
    };
    let Some(value) = metric.value else { return format!("  {label:24} {:>12}\n", "unknown") };
    let interval = match (metric.low, metric.high) {
        (Some(low), Some(high)) => format!("{} to {}", show(low), show(high)),
        (Some(low), None) => format!("above {}", show(low)),
        _ => String::new(),
    };
    let how = match metric.method.as_str() {
        method @ ("counter" | "integral") => {
            format!("measured ({method}), {}", summary.energy_perimeter.map_or("?", |p| p.name()))
        }
        "model" => format!("ESTIMATED, {}", summary.energy_perimeter.map_or("?", |p| p.name())),
        "clock" => match (metric.p50, metric.p99) {
            (Some(p50), Some(p99)) => format!("p50 {}, p99 {}", show(p50), show(p99)),
            _ => "clock".into(),
        },
        "score" => summary.scorer.clone().unwrap_or_else(|| "scored".into()),
        other => other.to_owned(),
    };
    format!("  {label:24} {:>12}  {interval:24} {how}\n", show(value))
}

/// What to try next.
fn next(summary: &Summary) -> String {
    let mut out = String::from("\nNext:\n");
    if summary.config.client == "embedded" {
        out += "  wattle run --model demo-300k                              a smaller model: cheaper, and worse by how much?\n";
        out += "  wattle run --client openai --url http://127.0.0.1:8000    a model on your own server\n";
    }
    if summary.metrics.get("energy_j").is_some_and(|m| m.method == "model" || m.value.is_none()) {
        out += "  wattle doctor                                             how to measure energy on this machine\n";
    }
    out += "  wattle list metrics                                       what each figure means\n";
    out
}

/// A figure with a prefix for thousands or thousandths.
pub(crate) fn si(value: f64, unit: &str) -> String {
    let (scaled, prefix) = match value.abs() {
        0.0 => (value, ""),
        x if x < 1e-3 => (value * 1e6, "µ"),
        x if x < 1.0 => (value * 1e3, "m"),
        x if x < 1e4 => (value, ""),
        x if x < 1e7 => (value / 1e3, "k"),
        _ => (value / 1e6, "M"),
    };
    format!("{} {prefix}{unit}", significant(scaled))
}

/// Three significant digits.
fn significant(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let digits = value.abs().log10().floor() as i32;
    format!("{value:.*}", usize::try_from(2 - digits).unwrap_or(0).min(9))
}

/// A paragraph of at most 100 columns, indented after its first line.
fn wrapped(text: &str) -> String {
    let mut out = String::new();
    let mut column = 0;
    for word in text.split(' ') {
        if column > 0 && column + word.chars().count() >= 100 {
            out += "\n  ";
            column = 2;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out += word;
        column += word.chars().count();
    }
    out + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits_and_a_fitting_prefix() {
        for (value, text) in [
            (0.0, "0 J"),
            (0.000_012_34, "12.3 µJ"),
            (0.012_34, "12.3 mJ"),
            (1.234, "1.23 J"),
            (123.4, "123 J"),
            (1234.0, "1234 J"),
            (12_345.0, "12.3 kJ"),
            (-0.5, "-500 mJ"),
        ] {
            assert_eq!(si(value, "J"), text);
        }
    }

    #[test]
    fn long_warnings_are_wrapped() {
        let text = wrapped(&"word ".repeat(60));
        assert!(text.lines().all(|l| l.chars().count() <= 100) && text.lines().count() > 2);
    }
}
