//! The part of a run in which it is in steady state: neither filling up, nor draining, nor drifting. docs/method.md#steady

mod bins;
mod trend;

pub use bins::Bins;
pub use trend::Trend;

use crate::exchange::Exchange;
use crate::metrics::Metric;
use crate::time::{Span, Stamp};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use trend::{around_line, effective, mean};

/// MSER-5 looks at means of so many observations.
const BATCH: usize = 5;
/// Of fewer means than this it says nothing.
const FEWEST_BATCHES: usize = 10;
/// The last means are few enough to be alike by chance: no cut is made among them.
const TAIL: usize = 5;
/// A beginning that differs from the rest by less is none worth cutting off.
const STANDS_OUT: f64 = 0.05;
/// Nor one that differs by fewer standard errors: the cut was made where the difference is greatest.
const ERRORS: f64 = 4.0;
/// One that differs by more than this is cut off however noisy the rest is.
const FAR_OFF: f64 = 0.25;
/// Both ends are looked at so often at most.
const ROUNDS: usize = 10;
/// A shorter run has no steady state to speak of.
const SHORTEST_S: f64 = 2.0;

// Columns of a flow.
const IN_FLIGHT: usize = 0;
const TOKENS: usize = 1;
const ANSWERS: usize = 2;

/// `steady` of `summary.json`: the window, how it was found, and its figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Steady {
    /// In which session it lies: the longest.
    pub session: u32,
    /// The window; if none was found, the whole session.
    #[serde(flatten)]
    pub span: Span,
    /// How long it is.
    pub seconds: f64,
    /// What was cut off before it.
    pub trimmed_start_s: f64,
    /// What was cut off after it.
    pub trimmed_end_s: f64,
    /// Whether steady state was reached.
    pub reached: bool,
    /// What changes in the window.
    pub trends: Trends,
    /// Its figures; none if steady state was not reached.
    pub metrics: BTreeMap<String, Metric>,
}

/// What changes in a window; `None` where it is not known.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Trends {
    /// Mean power of all devices of the perimeter.
    pub power: Option<Trend>,
    /// Requests in flight.
    pub in_flight: Option<Trend>,
    /// Temperature of the devices, in °C.
    pub temperature: Option<Trend>,
}

/// What happened to the requests of a session, bin by bin.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Flow(Bins<3>);

/// What happened to requests in a bin.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bin {
    /// The bin, as far as it lies in the session.
    pub span: Span,
    /// Requests in flight, on average.
    pub in_flight: f64,
    /// Output tokens that arrived.
    pub tokens: f64,
    /// Whole answers that ended.
    pub answers: f64,
}

impl Flow {
    /// Takes in a request that has ended.
    pub fn push(&mut self, exchange: &Exchange) {
        let bins = &mut self.0;
        // The session begins with the first try of one that was sent again.
        bins.reach(if exchange.attempts > 1 { exchange.due } else { exchange.sent });
        bins.spread(exchange.span(), IN_FLIGHT, 1.0);
        let pieces = exchange.tokens.len();
        // Of one that failed nobody counts the tokens: a piece is one.
        let tokens = exchange.usage.completion.map_or(pieces as f64, |n| n as f64);
        let each = tokens / pieces as f64;
        // What has come by the end of a bin, or of the session, is in it.
        let come = |at: Stamp| at.minus_nanos(1);
        exchange.tokens.iter().for_each(|at| bins.add(come(*at), TOKENS, each));
        if pieces == 0 {
            bins.add(come(exchange.done), TOKENS, tokens);
        }
        bins.add(come(exchange.done), ANSWERS, f64::from(u8::from(exchange.outcome.is_ok())));
    }

    /// The bins of the session `span`, none shorter than `least_s`; `None` if there are too few to find anything in.
    pub fn chart(mut self, span: Span, least_s: f64) -> Option<Vec<Bin>> {
        self.0.widen((least_s * 1e9) as u64);
        let bin = |(span, sums): (Span, [f64; 3])| Bin {
            span,
            in_flight: sums[IN_FLIGHT] / span.duration().get(),
            tokens: sums[TOKENS],
            answers: sums[ANSWERS],
        };
        let all: Vec<Bin> = self.0.within(span).map(bin).collect();
        // The first and the last bin are cut by the session's ends.
        let whole = all.len().saturating_sub(2);
        (span.duration().get() >= SHORTEST_S && whole >= BATCH * FEWEST_BATCHES).then_some(all)
    }
}

/// A stretch of a chart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Which bins, if steady state was reached; else all.
    pub bins: std::ops::Range<usize>,
    /// Whether it was.
    pub reached: bool,
}

/// Looks for steady state in series over the bins of a chart: what fills up or drains in any of them is cut off at both ends.
pub fn find(series: &[&[f64]]) -> Found {
    let length = series.iter().map(|s| s.len()).min().unwrap_or(0);
    let all = Found { bins: 0..length, reached: false };
    if length < BATCH * FEWEST_BATCHES + 2 {
        return all;
    }
    // The first and the last bin may be of a moment only.
    let (mut first, mut last) = (1, length - 1);
    // What drains hides where it was filled, and the other way round: each is looked at again without the other.
    for _ in 0..ROUNDS {
        let (mut start, mut end) = (0, 0);
        for series in series {
            let inner = &series[first..last];
            let reversed: Vec<f64> = inner.iter().rev().copied().collect();
            let (Some(filling), Some(draining)) = (transient(inner), transient(&reversed)) else {
                return all;
            };
            (start, end) = (start.max(filling), end.max(draining));
        }
        if start + end == 0 {
            // What is not cut begins and ends with the session.
            let first = if first > 1 { first } else { 0 };
            let last = if last < length - 1 { last } else { length };
            return Found { bins: first..last, reached: true };
        }
        (first, last) = (first + start, last.saturating_sub(end));
        if 2 * first > length || 2 * last < length || last - first < BATCH * FEWEST_BATCHES / 2 {
            return all;
        }
    }
    // Still cutting: it has not settled.
    all
}

/// How many values at the beginning of a series are not yet like the rest; `None` if it never settles.
fn transient(series: &[f64]) -> Option<usize> {
    let mut cuts = mser5(series);
    let none = cuts.iter().find(|(_, cut)| *cut == 0).map_or(0.0, |(statistic, _)| *statistic);
    // Of equals, the smallest.
    cuts.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let best = cuts.first().map_or(0, |(_, cut)| *cut);
    // By the rule a cut in the second half means that there is no steady state; but noise falls there, too.
    if 2 * best > series.len() && (stands_out(series, best) || Trend::of(series).is_some_and(|t| t.matters()))
    {
        return None;
    }
    // Noise also makes a cut longer than what it is to cut off, until that does not stand out in it any more.
    let fits = |(statistic, cut): &&(f64, usize)| {
        *statistic < none && 2 * cut <= series.len() && stands_out(series, *cut)
    };
    Some(cuts.iter().find(fits).map_or(0, |(_, cut)| *cut))
}

/// Whether what comes before a cut is another level than what comes after it, by more than noise makes of it. What noise is like
/// is seen in the longer part, around a line, because what fills up rises: after an early cut in what comes next, because what comes
/// late may drain; before a late one. An early part that is far off is cut in any case: that costs a few bins at worst.
fn stands_out(series: &[f64], cut: usize) -> bool {
    let early = 2 * cut <= series.len();
    let (before, after) = series.split_at(cut);
    let after = if early { &after[..after.len() / 2] } else { after };
    if before.is_empty() || after.is_empty() {
        return false;
    }
    let level = mean(after);
    let difference = (mean(before) - level).abs();
    let rest = around_line(if early { after } else { before }).1;
    let variance = rest.iter().map(|e| e * e).sum::<f64>() / rest.len() as f64;
    let worth = effective(&rest, 2.0) / rest.len() as f64;
    let error = (variance / worth * (1.0 / before.len() as f64 + 1.0 / after.len() as f64)).sqrt();
    let far_off = early && difference > FAR_OFF * level.abs();
    far_off || difference > (STANDS_OUT * level.abs()).max(ERRORS * error)
}

/// The statistic of MSER-5 for each cut: the squared standard error of the mean of what is left, taken as independent means of five.
/// The series is cut where it is least (White, Simulation 69, 323, 1997; White, Cobb and Spratt, Winter Simulation Conference 2000, 755).
fn mser5(series: &[f64]) -> Vec<(f64, usize)> {
    let batches: Vec<f64> = series.chunks_exact(BATCH).map(mean).collect();
    let (mut sum, mut squares) = (0.0, 0.0);
    // Around the last one, so that squares of large numbers do not drown their differences.
    let origin = batches.last().copied().unwrap_or(0.0);
    let each = batches.iter().enumerate().rev().map(|(cut, value)| {
        let (value, left) = (value - origin, (batches.len() - cut) as f64);
        (sum, squares) = (sum + value, squares + value * value);
        ((squares - sum * sum / left).max(0.0) / (left * left), cut * BATCH)
    });
    each.skip(TAIL - 1).collect()
}

#[cfg(test)]
mod tests;
