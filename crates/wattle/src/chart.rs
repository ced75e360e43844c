//! A curve in the terminal: one line for each value of a sweep, a bar up to its figure, and the interval as whiskers.

use wattle_core::scale::{Axis, Figure, Scale, short};
use wattle_core::sweep::Swept;

/// A label takes at most this much of a line.
const LABEL: usize = 20;
/// A bar shorter than this says nothing.
const LEAST_BAR: usize = 12;
/// And one longer than this is no easier to read.
const MOST_BAR: usize = 48;

/// What is drawn: the first that is known. Metric, unit, and what one of it is for.
const CURVES: &[(&str, &str, &str)] =
    &[("joules_per_output_token", "J", " per output token"), ("output_tokens_per_s", "", "output tokens/s")];

/// The curve of a sweep in lines of at most `width`; nothing if there is nothing to compare.
pub(crate) fn curve(swept: &Swept, width: usize) -> String {
    let Some((name, unit, what)) = CURVES.iter().find(|(name, ..)| swept.knows(name)) else {
        return String::new();
    };
    let points = swept.in_order();
    let figures: Vec<Option<Figure>> =
        points.iter().map(|p| p.metrics.get(*name).and_then(Figure::of)).collect();
    let most = figures.iter().flatten().map(|f| f.value.abs()).fold(0.0, f64::max);
    let (factor, prefix) = match most {
        x if unit.is_empty() || x >= 0.01 || x == 0.0 => (1.0, ""),
        x if x >= 1e-5 => (1e3, "m"),
        _ => (1e6, "µ"),
    };
    let figures: Vec<Option<Figure>> = figures.into_iter().map(|f| f.map(|f| f.times(factor))).collect();
    let Some(axis) = Axis::of_figures(figures.iter().flatten().copied()) else { return String::new() };
    let labels: Vec<String> = points
        .iter()
        .map(|p| format!("{}{}", short(&p.label(), LABEL - 1), if p.kept_up { " " } else { "!" }))
        .collect();
    let texts: Vec<String> =
        figures.iter().map(|f| f.map_or_else(|| "unknown".into(), |f| f.plus_minus())).collect();
    let longest = |all: &[String]| all.iter().map(|t| t.chars().count()).max().unwrap_or(0);
    let key = format!("{} ", short(&swept.key, LABEL - 1));
    let label = longest(&labels).max(key.chars().count());
    let bar = width.saturating_sub(label + 3 + longest(&texts)).clamp(LEAST_BAR, MOST_BAR);
    let how = if swept.estimates(name) { ", ESTIMATED" } else { "" };
    let scale = if axis.scale == Scale::Log { ", logarithmic" } else { "" };
    let mut out = format!("\n{key:>label$} {prefix}{unit}{what}{how}, 95 % interval{scale}\n");
    for ((name, text), figure) in labels.iter().zip(&texts).zip(&figures) {
        let drawn = figure.map_or_else(String::new, |f| line(&axis, &f, bar));
        out += format!("{name:>label$} {drawn:bar$}  {text}").trim_end();
        out.push('\n');
    }
    out
}

/// A bar with its whiskers, in `cells` cells.
fn line(axis: &Axis, figure: &Figure, cells: usize) -> String {
    let cell = |value: f64| (axis.place(value) * (cells - 1) as f64).round() as usize;
    let at = cell(figure.value);
    let (low, high) = (figure.low.map_or(at, cell).min(at), figure.high.map_or(at, cell).max(at));
    let draw = |i: usize| match i {
        i if i == at && (low == high || low < at && at < high) => '●',
        i if i == low => '├',
        // What lies beyond the end of the axis.
        i if i == high && figure.high.is_some_and(|h| !axis.holds(h)) => '→',
        i if i == high => '┤',
        i if i < low => '█',
        _ => '─',
    };
    (0..=high).map(draw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn swept(metric: &str, points: &[(Value, f64, f64, bool)]) -> Swept {
        let points: Vec<Value> = points
            .iter()
            .map(|(value, figure, half, kept_up)| {
                let metric = json!({metric: {"value": figure, "low": figure - half, "high": figure + half, "unit": "", "n": 9, "method": "counter"}});
                json!({"value": value, "run": "r", "kept_up": kept_up, "metrics": metric})
            })
            .collect();
        serde_json::from_value(json!({"key": "concurrency", "points": points, "output_dir": "s"})).unwrap()
    }

    #[test]
    fn a_fifty_fold_range_is_readable() {
        let points =
            [(json!(1), 2.05, 0.3, true), (json!(8), 0.31, 0.004, true), (json!(64), 0.041, 0.001, false)];
        let text = curve(&swept("joules_per_output_token", &points), 79);
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert!(lines[0].ends_with("J per output token, 95 % interval, logarithmic"), "{text}");
        assert!(lines[1].contains("├") && lines[1].ends_with("2.05 ±0.30"), "{text}");
        assert!(lines[2].ends_with("0.3100 ±0.0040"), "{text}");
        assert!(lines[3].contains("64! █") && lines[3].ends_with("0.0410 ±0.0010"), "{text}");
        let filled = |line: &str| line.chars().filter(|c| *c == '█').count();
        assert!(filled(lines[1]) > filled(lines[2]) && filled(lines[2]) > 2 * filled(lines[3]), "{text}");
        assert!(text.lines().all(|l| l.chars().count() <= 79), "{text}");
    }

    #[test]
    fn names_of_any_length_fit_and_throughput_is_drawn_where_there_is_no_energy() {
        let name = format!("meta/\u{1b}[31m{}", "x".repeat(90));
        let points = [(json!(name), 100.0, 5.0, true), (json!("b"), 50.0, 80.0, true)];
        let text = curve(&swept("output_tokens_per_s", &points), 79);
        assert!(text.contains("output tokens/s, 95 % interval\n") && text.contains("100.0 ±5.0"), "{text}");
        assert!(text.lines().all(|l| l.chars().count() <= 79) && !text.contains('\u{1b}'), "{text}");
        assert!(curve(&swept("seeds", &points), 79).is_empty());
    }

    #[test]
    fn a_whisker_beyond_the_axis_is_an_arrow() {
        let text = curve(&swept("output_tokens_per_s", &[(json!(1), 10.0, 90.0, true)]), 79);
        assert!(text.contains("├") && text.contains("→"), "{text}");
    }
}
