//! Where a figure lies between the ends of an axis: the choice between a linear and a logarithmic one, its ends and its ticks.

use crate::metrics::Metric;

/// Figures that differ by more than this factor are told apart on a logarithmic axis only: the least would be a twentieth of the
/// height.
const LOG_FIGURES: f64 = 20.0;
/// Settings are doubled as a rule; from three values on (1, 2, 4, 8) doublings are steps of equal length.
const LOG_SETTINGS: f64 = 4.0;
/// An interval may take at most so many times the room of the figures: one of two batches would hide them all.
const MOST_ROOM: f64 = 1.5;
/// A mark closer than this to the end of an axis lies on its title.
const ROOM: f64 = 1.03;

/// A figure and the ends of its 95 % interval, as far as they are known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figure {
    /// The figure.
    pub value: f64,
    /// Lower end.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
}

/// How an axis is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Equal steps are of equal length.
    Linear,
    /// Equal factors are.
    Log,
}

/// An axis from one end to the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Axis {
    /// How it is divided.
    pub scale: Scale,
    /// Where it begins.
    pub low: f64,
    /// Where it ends.
    pub high: f64,
}

impl Figure {
    /// The figure of a metric, if it is known.
    pub fn of(metric: &Metric) -> Option<Self> {
        let known = |end: Option<f64>| end.filter(|e| e.is_finite());
        let value = known(metric.value)?;
        Some(Self { value, low: known(metric.low), high: known(metric.high) })
    }

    /// The same in another unit, of which `factor` make one.
    pub fn times(self, factor: f64) -> Self {
        let times = |end: Option<f64>| end.map(|e| e * factor);
        Self { value: self.value * factor, low: times(self.low), high: times(self.high) }
    }

    /// `0.455 ±0.012`; both ways where they differ, and the figure alone where its interval is unknown.
    pub fn plus_minus(&self) -> String {
        let (down, up) = match (self.low, self.high) {
            (Some(low), Some(high)) => (self.value - low, high - self.value),
            (Some(low), None) => return format!("{0:.1$} >{low:.1$}", self.value, decimals(self.value, 3)),
            _ => (0.0, 0.0),
        };
        let least = decimals(self.value, 3);
        if down <= 0.0 && up <= 0.0 {
            return format!("{:.least$}", self.value);
        }
        // Two digits of the interval, and no more than three beyond those of the figure.
        let places = decimals(down.max(up), 2).min(least + 3);
        let value = format!("{:.places$}", self.value);
        match (down - up).abs() <= 0.1 * down.max(up) {
            true => format!("{value} ±{:.places$}", (down + up) / 2.0),
            false => format!("{value} +{up:.places$} −{down:.places$}"),
        }
    }
}

impl Axis {
    /// For figures with their intervals: from 0, or logarithmic if they are far apart. `None` if there are none.
    pub fn of_figures(figures: impl IntoIterator<Item = Figure>) -> Option<Self> {
        let figures: Vec<Figure> = figures.into_iter().collect();
        let values = || figures.iter().map(|f| f.value);
        let (least, most) = (values().reduce(f64::min)?, values().reduce(f64::max)?);
        let top = figures.iter().filter_map(|f| f.high).fold(most, f64::max).min(most * MOST_ROOM).max(most);
        if least > 0.0 && most / least > LOG_FIGURES {
            let bottom = figures.iter().filter_map(|f| f.low).fold(least, f64::min).max(least / MOST_ROOM);
            let low = steps(bottom / 11.0, bottom / ROOM).last().copied().unwrap_or(bottom / 2.0);
            return Some(Self { scale: Scale::Log, low, high: top });
        }
        Some(Self {
            scale: Scale::Linear,
            low: least.min(0.0),
            high: if top > least.min(0.0) { top } else { 1.0 },
        })
    }

    /// For the values of a setting: as far as they reach, and logarithmic if that is more than a factor of 4. `None` if there are none.
    pub fn of_settings(values: &[f64]) -> Option<Self> {
        let least = values.iter().copied().reduce(f64::min)?;
        let most = values.iter().copied().reduce(f64::max)?;
        let log = least > 0.0 && most / least > LOG_SETTINGS;
        Some(Self { scale: if log { Scale::Log } else { Scale::Linear }, low: least, high: most })
    }

    /// Where a value lies, from 0 to 1; what lies outside is at the end. On an axis of one value it is in the middle.
    pub fn place(&self, value: f64) -> f64 {
        let of = |x: f64| if self.scale == Scale::Log { x.max(f64::MIN_POSITIVE).ln() } else { x };
        let length = of(self.high) - of(self.low);
        if length > 0.0 { ((of(value) - of(self.low)) / length).clamp(0.0, 1.0) } else { 0.5 }
    }

    /// Whether a value lies on it.
    pub fn holds(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }

    /// The same from one round number to another, with some room at the end.
    pub fn rounded(self) -> Self {
        let Self { scale, low, high } = self;
        let (low, high) = match scale {
            Scale::Log => (low, steps(high * ROOM, high * 11.0).first().copied().unwrap_or(high)),
            Scale::Linear => {
                let step = step(high - low);
                ((low / step).floor() * step, (high * ROOM / step).ceil() * step)
            }
        };
        Self { scale, low, high }
    }

    /// Four to nine round numbers on it.
    pub fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = step(self.high - self.low);
                let first = (self.low / step).ceil() as i64;
                let last = (self.high / step + 1e-9).floor() as i64;
                (first..=last).map(|i| i as f64 * step).collect()
            }
            Scale::Log => {
                let all = steps(self.low, self.high);
                // Of more than three decades the powers of ten are enough.
                match all.len() > 9 {
                    true => {
                        all.into_iter().filter(|t| (t.log10() - t.log10().round()).abs() < 1e-6).collect()
                    }
                    false => all,
                }
            }
        }
    }
}

/// How many places after the point show so many digits.
fn decimals(value: f64, digits: i32) -> usize {
    match value.abs() {
        x if x == 0.0 || !x.is_finite() => 0,
        x => usize::try_from((digits - 1 - x.log10().floor() as i32).clamp(0, 12)).unwrap_or(0),
    }
}

/// 1, 2 or 5 times a power of ten, of which four to eight make the length.
fn step(length: f64) -> f64 {
    let power = 10f64.powf((length / 4.0).log10().floor());
    [5.0, 2.0, 1.0].into_iter().map(|m| m * power).find(|s| length / s >= 4.0).unwrap_or(power)
}

/// 1, 2 and 5 times the powers of ten from one positive value to another.
fn steps(low: f64, high: f64) -> Vec<f64> {
    let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let all = decades.flat_map(|d| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(d)));
    all.filter(|s| (low * (1.0 - 1e-9)..=high * (1.0 + 1e-9)).contains(s)).collect()
}

/// Text of at most so many letters; what is left out shows.
pub fn short(text: &str, most: usize) -> String {
    match text.chars().count() > most {
        true => text.chars().take(most.saturating_sub(1)).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn figures(values: &[f64]) -> impl Iterator<Item = Figure> {
        values.iter().map(|v| Figure { value: *v, low: None, high: None })
    }

    fn figure(value: f64, low: f64, high: f64) -> Figure {
        Figure { value, low: Some(low), high: Some(high) }
    }

    #[test]
    fn figures_start_at_zero_unless_they_are_far_apart() {
        let near = Axis::of_figures(figures(&[0.5, 9.0])).unwrap();
        assert_eq!((near.scale, near.low, near.high), (Scale::Linear, 0.0, 9.0));
        let far = Axis::of_figures(figures(&[0.041, 2.05])).unwrap();
        assert_eq!((far.scale, far.low, far.high), (Scale::Log, 0.02, 2.05));
        assert_eq!(
            Axis::of_figures(figures(&[0.0, 2.0])).unwrap().scale,
            Scale::Linear,
            "zero has no logarithm"
        );
        assert_eq!(Axis::of_figures(figures(&[])), None);
        assert_eq!(Axis::of_figures(figures(&[0.0])).unwrap().high, 1.0, "an axis has a length");
    }

    #[test]
    fn settings_that_are_doubled_twice_and_more_are_logarithmic() {
        assert_eq!(Axis::of_settings(&[1.0, 2.0, 4.0]).unwrap().scale, Scale::Linear);
        let log = Axis::of_settings(&[8.0, 1.0, 2.0, 4.0]).unwrap();
        assert_eq!((log.scale, log.low, log.high), (Scale::Log, 1.0, 8.0));
        assert!((log.place(2.0) - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(Axis::of_settings(&[0.0, 100.0]).unwrap().scale, Scale::Linear);
        assert_eq!(Axis::of_settings(&[3.0]).unwrap().place(3.0), 0.5);
    }

    #[test]
    fn an_interval_of_little_does_not_hide_the_figures() {
        let axis = Axis::of_figures([figure(1.0, -50.0, 52.0), figure(2.0, 1.9, 2.1)]).unwrap();
        assert_eq!((axis.low, axis.high), (0.0, 3.0));
        assert!(!axis.holds(52.0) && axis.place(52.0) == 1.0);
    }

    #[test]
    fn ticks_are_round() {
        let ticks = |axis: Axis| axis.ticks().iter().map(|t| format!("{t:.3}")).collect::<Vec<_>>().join(" ");
        let linear = |high| Axis { scale: Scale::Linear, low: 0.0, high };
        assert_eq!(ticks(linear(0.47)), "0.000 0.100 0.200 0.300 0.400");
        assert_eq!(ticks(linear(0.47).rounded()), "0.000 0.100 0.200 0.300 0.400 0.500");
        assert_eq!(linear(0.2).rounded().high, 0.25, "there is room above the greatest");
        let log = |low, high| Axis { scale: Scale::Log, low, high };
        assert_eq!(ticks(log(0.02, 1.7).rounded()), "0.020 0.050 0.100 0.200 0.500 1.000 2.000");
        assert_eq!(ticks(log(0.001, 900.0)), "0.001 0.010 0.100 1.000 10.000 100.000");
    }

    #[test]
    fn an_interval_has_two_digits_and_its_figure_as_many_places() {
        for (figure, text) in [
            (figure(0.4553, 0.4433, 0.4673), "0.455 ±0.012"),
            (figure(455.3, 443.3, 467.3), "455 ±12"),
            (figure(0.0817, 0.0713, 0.0921), "0.082 ±0.010"),
            (figure(1.0, 0.999_88, 1.000_12), "1.00000 ±0.00012"),
            (figure(2.0, 1.0, 5.0), "2.0 +3.0 −1.0"),
            (figure(3.0, 3.0, 3.0), "3.00"),
            (Figure { value: 12.34, low: None, high: None }, "12.3"),
            (Figure { value: 12.34, low: Some(11.0), high: None }, "12.3 >11.0"),
            (Figure { value: 0.0, low: None, high: None }, "0"),
        ] {
            assert_eq!(figure.plus_minus(), text);
        }
    }

    proptest! {
        #[test]
        fn what_is_more_lies_further_and_every_axis_has_ticks(values in prop::collection::vec(1e-9f64..1e9, 2..20)) {
            let axis = Axis::of_figures(figures(&values)).unwrap();
            let mut sorted = values.clone();
            sorted.sort_by(f64::total_cmp);
            prop_assert!(sorted.windows(2).all(|w| axis.place(w[0]) <= axis.place(w[1])));
            prop_assert!(values.iter().all(|v| axis.holds(*v)));
            let rounded = axis.rounded();
            prop_assert!(rounded.high >= axis.high * (1.0 - 1e-9));
            prop_assert!((3..=20).contains(&rounded.ticks().len()), "{rounded:?}: {:?}", rounded.ticks());
        }
    }
}
