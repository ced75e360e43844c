//! The curve as an SVG: panels one above the other, figures with their intervals. Light as it is drawn; a style sheet in it turns it
//! dark where the reader's screen is.

use crate::report::text;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::prelude::*;
use std::ops::Range;
use wattle_core::scale::{Axis, Figure, Scale, short};
use wattle_core::units::si;

const WIDTH: u32 = 760;
const PANEL: u32 = 270;
const FOOT: u32 = 34;
const LEFT: u32 = 76;
/// Room for the names of the lines.
const RIGHT: u32 = 44;
/// Of the width of a panel between its axes.
const ACROSS: f64 = (WIDTH - LEFT - RIGHT - 12) as f64;
/// How high a panel is between its axes, about.
const UP: f64 = (PANEL - 100) as f64;
/// How wide a letter of a label is, about.
const LETTER: f64 = 7.0;

// The colours of report.css. Their dark twins are found by these values in curve.css.
const INK: RGBColor = RGBColor(0x1b, 0x1f, 0x23);
const SOFT: RGBColor = RGBColor(0x66, 0x66, 0x77);
const LINE: RGBColor = RGBColor(0xd5, 0xd9, 0xde);
const PAPER: RGBColor = RGBColor(0xff, 0xff, 0xff);
const BAD: RGBColor = RGBColor(0xc2, 0x41, 0x0c);
const SERIES: [RGBColor; 2] = [RGBColor(0x1a, 0x7f, 0x5a), RGBColor(0x2f, 0x5f, 0xb3)];

/// One value of the setting.
pub(super) struct Place {
    /// As it is written.
    pub(super) label: String,
    /// If it is a number.
    pub(super) number: Option<f64>,
    /// Whether the server kept up.
    pub(super) kept_up: bool,
}

/// One figure against the setting.
pub(super) struct Panel {
    /// What it is.
    pub(super) title: String,
    /// Its unit, for [`si`].
    pub(super) unit: &'static str,
    /// Up to two lines: name (of more than one) and a figure for each place.
    pub(super) lines: Vec<(&'static str, Vec<Option<Figure>>)>,
}

type Drawn<T> = Result<T, DrawingAreaErrorKind<std::io::Error>>;

/// The whole picture, as one `<svg>` element.
pub(super) fn svg(title: &str, key: &str, places: &[Place], panels: &[Panel]) -> Drawn<String> {
    let mut out = String::new();
    let height = PANEL * panels.len() as u32 + FOOT;
    let across = Across::of(places);
    {
        let root = SVGBackend::with_string(&mut out, (WIDTH, height)).into_drawing_area();
        root.fill(&PAPER)?;
        let (body, foot) = root.split_vertically(height - FOOT);
        for (area, panel) in body.split_evenly((panels.len(), 1)).iter().zip(panels) {
            draw(area, key, places, &across, panel)?;
        }
        let note = match places.iter().all(|p| p.kept_up) {
            true => "Bars are 95 % intervals.",
            false => "Bars are 95 % intervals. ×: the server did not keep up.",
        };
        foot.draw(&Text::new(note, (LEFT as i32, 4), letters(14, &SOFT)))?;
        root.present()?;
    }
    let head = format!(
        "<svg class=\"curve\" role=\"img\" aria-labelledby=\"curve-title\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" xmlns=\"http://www.w3.org/2000/svg\">\n<title id=\"curve-title\">{}</title>\n<style>{}</style>\n",
        text(title),
        include_str!("../assets/curve.css"),
    );
    let drawn = out.split_once('>').map_or("", |(_, rest)| rest.trim_start());
    Ok(head + drawn)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw(area: &Area<'_>, key: &str, places: &[Place], across: &Across, panel: &Panel) -> Drawn<()> {
    let figures = panel.lines.iter().flat_map(|(_, figures)| figures.iter().flatten().copied());
    let Some(axis) = Axis::of_figures(figures) else { return Ok(()) };
    let axis = axis.rounded();
    let scale = if axis.scale == Scale::Log { ", logarithmic" } else { "" };
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}{scale}", panel.title), letters(19, &INK))
        .margin_top(8)
        .margin_right(RIGHT)
        .margin_left(12)
        .x_label_area_size(46)
        .y_label_area_size(LEFT - 12)
        .build_cartesian_2d(across.clone(), Upright(axis))?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(LINE)
        .axis_style(SOFT)
        .label_style(letters(15, &SOFT))
        .axis_desc_style(letters(15, &SOFT))
        .x_desc(match across.axis.scale {
            Scale::Log => format!("{key} (log₂)"),
            Scale::Linear => key.to_owned(),
        })
        .x_label_formatter(&|x| across.label(*x))
        .y_label_formatter(&|y| tick(*y, panel.unit))
        .draw()?;
    for (i, ((_, figures), color)) in panel.lines.iter().zip(SERIES).enumerate() {
        let at = |place: usize| Some((across.points[place], (*figures.get(place)?)?));
        let known: Vec<(usize, f64, Figure)> =
            (0..places.len()).filter_map(|p| at(p).map(|(x, f)| (p, x, f))).collect();
        // Between names there is nothing.
        if across.numbers {
            chart.draw_series(LineSeries::new(
                known.iter().map(|(_, x, f)| (*x, f.value)),
                color.stroke_width(2),
            ))?;
        }
        for (place, x, figure) in &known {
            let ends =
                [figure.low, figure.high].map(|e| e.unwrap_or(figure.value).clamp(axis.low, axis.high));
            let stem = PathElement::new(ends.map(|e| (*x, e)).to_vec(), color.stroke_width(1));
            chart.draw_series([stem])?;
            // An end that lies beyond the axis has no cap.
            let caps = [figure.low, figure.high].into_iter().flatten().filter(|e| axis.holds(*e));
            chart.draw_series(caps.map(|e| {
                EmptyElement::at((*x, e)) + PathElement::new(vec![(-5, 0), (5, 0)], color.stroke_width(1))
            }))?;
            let spot = (*x, figure.value);
            match i {
                0 => chart.draw_series([Circle::new(spot, 4, color.filled())])?,
                _ => chart.draw_series([TriangleMarker::new(spot, 6, color.filled())])?,
            };
            if !places[*place].kept_up {
                chart.draw_series([Cross::new(spot, 7, BAD.stroke_width(2))])?;
            }
        }
    }
    // Names at the ends of the lines, apart from each other.
    let last = |figures: &[Option<Figure>]| figures.iter().rposition(Option::is_some);
    let ends: Vec<_> =
        panel.lines.iter().map(|(name, f)| (*name, last(f).and_then(|p| Some((p, f[p]?.value))))).collect();
    let place = |i: usize| ends.get(i).and_then(|(_, end)| end.map(|(_, v)| axis.place(v) * UP));
    let near = match (place(0), place(1)) {
        (Some(a), Some(b)) => (16.0 - (b - a).abs()).max(0.0) / 2.0 * if b >= a { 1.0 } else { -1.0 },
        _ => 0.0,
    };
    for (i, ((name, end), color)) in ends.iter().zip(SERIES).enumerate() {
        let Some((at, value)) = end.filter(|_| !name.is_empty()) else { continue };
        let shift = if i == 0 { near } else { -near };
        let label = Text::new(*name, (11, shift as i32 - 6), letters(15, &color));
        chart.draw_series([EmptyElement::at((across.points[at], value)) + label])?;
    }
    Ok(())
}

/// Sizes are of the line; letters are smaller by a fifth.
fn letters<'a>(size: u32, color: &'a RGBColor) -> TextStyle<'a> {
    ("sans-serif", size).into_text_style(&(WIDTH, PANEL)).color(color)
}

/// The values of the setting, from left to right.
#[derive(Clone)]
struct Across {
    axis: Axis,
    /// Whether the values are numbers; if not, they stand side by side.
    numbers: bool,
    /// Free room at both ends, as a part of the width.
    margin: f64,
    points: Vec<f64>,
    /// Those that have a label, and it.
    labels: Vec<(f64, String)>,
}

impl Across {
    fn of(places: &[Place]) -> Self {
        let numbers: Option<Vec<f64>> = places.iter().map(|p| p.number).collect();
        let side_by_side = (0..places.len()).map(|i| i as f64).collect();
        let numeric = numbers.is_some();
        let points: Vec<f64> = numbers.unwrap_or(side_by_side);
        let flat = Axis { scale: Scale::Linear, low: 0.0, high: (places.len().max(2) - 1) as f64 };
        let axis = match numeric {
            true => Axis::of_settings(&points).unwrap_or(flat),
            false => flat,
        };
        let margin = if numeric { 0.05 } else { 0.5 / places.len().max(1) as f64 };
        let mut all = Self { axis, numbers: numeric, margin, points, labels: Vec::new() };
        let room =
            if numeric { 12 } else { ((ACROSS / places.len().max(1) as f64 / LETTER) as usize).max(10) - 2 };
        let mut free = f64::NEG_INFINITY;
        for (place, x) in places.iter().zip(&all.points) {
            let label = short(&place.label, room);
            let half = (label.chars().count() as f64 + 1.0) * LETTER / 2.0;
            let middle = all.part(*x) * ACROSS;
            if middle - half >= free {
                free = middle + half;
                all.labels.push((*x, label));
            }
        }
        all
    }

    /// Where a value lies, as a part of the width.
    fn part(&self, x: f64) -> f64 {
        self.margin + (1.0 - 2.0 * self.margin) * self.axis.place(x)
    }

    fn label(&self, x: f64) -> String {
        self.labels.iter().find(|(at, _)| *at == x).map_or_else(String::new, |(_, label)| label.clone())
    }
}

impl Ranged for Across {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        between(limit, self.part(*value))
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.labels.iter().map(|(x, _)| *x).collect()
    }

    fn range(&self) -> Range<f64> {
        self.axis.low..self.axis.high
    }
}

/// A figure, from the bottom up.
struct Upright(Axis);

impl Ranged for Upright {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        between(limit, self.0.place(*value))
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.0.ticks()
    }

    fn range(&self) -> Range<f64> {
        self.0.low..self.0.high
    }
}

fn between((from, to): (i32, i32), part: f64) -> i32 {
    from + (f64::from(to - from) * part).round() as i32
}

/// A round number, without the zeros that a measured one has.
fn tick(value: f64, unit: &str) -> String {
    let whole = si(value, unit);
    let (number, unit) = whole.split_at(whole.find(' ').unwrap_or(whole.len()));
    match number.contains('.') {
        true => format!("{}{unit}", number.trim_end_matches('0').trim_end_matches('.')),
        false => whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(labels: &[&str]) -> Vec<Place> {
        let place = |l: &&str| Place { label: (*l).to_owned(), number: l.parse().ok(), kept_up: true };
        labels.iter().map(place).collect()
    }

    #[test]
    fn labels_do_not_lie_on_each_other() {
        let crowd: Vec<String> = (100..160).map(|i| i.to_string()).collect();
        let crowd = Across::of(&places(&crowd.iter().map(String::as_str).collect::<Vec<_>>()));
        assert!((5..30).contains(&crowd.labels.len()), "{:?}", crowd.labels);
        let few = Across::of(&places(&["1", "2", "4", "8", "16", "32", "64", "128", "256"]));
        assert_eq!(few.labels.len(), 9);
    }

    #[test]
    fn ticks_are_short() {
        let ticks =
            [(2.5, "J"), (0.3, "J"), (0.1 + 0.2, "s"), (1500.0, ""), (0.5, "")].map(|(v, u)| tick(v, u));
        assert_eq!(ticks, ["2.5 J", "300 mJ", "300 ms", "1500", "0.5"]);
    }

    #[test]
    fn names_stand_side_by_side_and_are_cut_to_fit() {
        let long = "x".repeat(200);
        let names = Across::of(&places(&["a", &long, "c"]));
        assert!(!names.numbers && names.labels.len() == 3);
        assert!(names.labels[1].1.ends_with('…'));
        let long: Vec<&str> = vec![&long; 6];
        assert_eq!(Across::of(&places(&long)).labels.len(), 6);
        assert!((names.part(0.0) - 1.0 / 6.0).abs() < 1e-9 && (names.part(2.0) - 5.0 / 6.0).abs() < 1e-9);
    }
}
