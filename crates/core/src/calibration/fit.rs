//! Coefficients from cells: weighted least squares that one wild repeat does not bend, none of them negative.

use super::linear::{Matrix, Vector, dot, eigenvalues, inverse, not_negative, times};
use super::{Cell, Ladder, Quality};
use crate::cost::{Cost, PARTS};
use crate::stats::t_975;
use crate::units::Watts;
use std::collections::BTreeMap;

/// A design whose scaled columns have a greater condition number is refused: from 30 on, what one coefficient gains another loses
/// (Belsley, Kuh and Welsch, Regression Diagnostics, 1980, chapter 3).
pub const CONDITION_LIMIT: f64 = 30.0;
/// What loads drew above idle, together, must be so many times its standard error: by chance, one device in 700 that draws nothing
/// gets so far.
pub const LEAST_SIGNIFICANCE: f64 = 3.0;
/// The coefficients must explain so much of what rungs drew: one minus the square of what is missed of their medians by the square of
/// these. Where less is explained, half of what a load draws has nothing to do with its work.
pub const LEAST_EXPLAINED: f64 = 0.8;
/// Lengths and batches that differ by less do not tell parts of the cost from each other.
const VARIES: f64 = 1.5;
/// No cell is known better than this, however still its sensor stood: clocks, stamps and counted iterations are no better.
const FLOOR: f64 = 2e-3;
/// A repeat further from the median of its rung, in standard deviations, counts less (Huber).
const WILD: f64 = 2.5;
/// Weights and coefficients depend on each other; they settle in a few rounds.
const ROUNDS: usize = 12;
/// What is missed of a row is relative to what is expected of it, or to this part of the mean row if that is more.
const LEAST_EXPECTED: f64 = 0.01;
/// Median of the absolute value of a normal variable, inverted.
const MAD: f64 = 1.4826;

/// Why there is no fit, and what to do about it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum IllPosed {
    /// A ladder was not measured.
    #[error("the {} ladder is missing, and without it {}; calibrate again and let it finish", .0.name(), .0.tells())]
    Missing(Ladder),
    /// Its rungs are all alike.
    #[error("{}, so {}; {}", .0.alike(), .0.tells(), .0.way_out())]
    Flat(Ladder),
    /// The parts of the cost cannot be told from each other.
    #[error(
        "the loads are too much alike to tell the parts of their cost from each other (condition number {condition:.0}, at most {CONDITION_LIMIT:.0}); calibrate again with --thorough, a larger --max-concurrency, or a server with a longer context"
    )]
    Collinear {
        /// Of the scaled design.
        condition: f64,
    },
    /// There is nothing to explain.
    #[error(
        "the device drew no more with loads than without; see that it is the one that does the work (\"wattle doctor\"), and name its sensors with --source"
    )]
    NothingDrawn,
    /// Something was drawn, but not for the work.
    #[error(
        "what the device drew has little to do with the work of the loads ({:.0} % explained, at least {:.0} %); see that nothing else uses it and that it is the one that does the work (\"wattle doctor\"), and calibrate again", .explained * 100.0, LEAST_EXPLAINED * 100.0
    )]
    Unexplained {
        /// See [`LEAST_EXPLAINED`].
        explained: f64,
    },
    /// A figure that is none.
    #[error(
        "a load or the fit has a figure that is not finite ({0}); see how the sensors are with \"wattle doctor\", and calibrate again"
    )]
    NotFinite(&'static str),
}

impl Ladder {
    /// What it is there for.
    const fn tells(self) -> &'static str {
        match self {
            Ladder::Prefill => "the cost of a prompt token cannot be told from that of an iteration",
            Ladder::Decode => "the cost of a token cannot be told from that of an iteration",
            Ladder::Context => "the cost of looking back cannot be told from that of a token",
        }
    }

    const fn alike(self) -> &'static str {
        match self {
            Ladder::Prefill => "the prompts of the prefill ladder were all of one length",
            Ladder::Decode => "the server answered as many at once on every rung of the decode ladder",
            Ladder::Context => "the tokens of the context ladder all looked back at as much",
        }
    }

    const fn way_out(self) -> &'static str {
        match self {
            Ladder::Prefill | Ladder::Context => "give the server a longer context",
            Ladder::Decode => {
                "raise --max-concurrency, or let the server take more at once (vLLM --max-num-seqs, llama-server --parallel, OLLAMA_NUM_PARALLEL)"
            }
        }
    }
}

/// Coefficients, and how far they can be believed.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// Joules above idle.
    pub joules: Cost,
    /// Their covariance.
    pub covariance: [[f64; PARTS]; PARTS],
    /// Seconds.
    pub seconds: Cost,
    /// How far they can be believed.
    pub quality: Quality,
}

impl Fit {
    /// Half-width of the 95 % interval of each of the joules.
    pub fn bound(&self) -> Cost {
        Cost::from_parts(std::array::from_fn(|i| 1.96 * self.covariance[i][i].max(0.0).sqrt()))
    }

    /// No file could keep another: JSON has no infinity.
    fn is_finite(&self) -> bool {
        let q = &self.quality;
        let figures = [q.r2, q.condition, q.widened, q.seconds_r2];
        let missed = q.residuals.values().chain(q.seconds_residuals.values());
        let costs = self.joules.parts().into_iter().chain(self.seconds.parts());
        let all = costs.chain(self.covariance.into_iter().flatten()).chain(figures).chain(missed.copied());
        all.into_iter().all(f64::is_finite)
    }
}

/// Fits what cells drew above the idle power, which is known to a standard error.
pub fn fit(cells: &[Cell], idle: Watts, idle_error: Watts) -> Result<Fit, IllPosed> {
    let finite = |c: &Cell| {
        let other = [c.busy_s, c.window_s, c.energy_j, c.error_j];
        c.work.parts().into_iter().chain(other).all(f64::is_finite)
    };
    if !cells.iter().all(finite) || !idle.get().is_finite() || !idle_error.get().is_finite() {
        return Err(IllPosed::NotFinite("what was measured"));
    }
    check(cells)?;
    // The order in which cells come changes no sum.
    let mut cells: Vec<&Cell> = cells.iter().collect();
    cells.sort_by(|a, b| {
        (a.rung, a.energy_j).partial_cmp(&(b.rung, b.energy_j)).unwrap_or(a.rung.cmp(&b.rung))
    });
    let row = |cell: &Cell, y: f64, error: f64| Row {
        ladder: cell.ladder,
        rung: cell.rung,
        x: cell.work.parts(),
        y,
        error,
    };
    let drawn: Vec<Row> = cells.iter().map(|c| row(c, c.above_idle(idle), c.error_j)).collect();
    let took: Vec<Row> = cells.iter().map(|c| row(c, c.busy_s, 0.0)).collect();
    let shared = idle_error.get() * cells.iter().map(|c| c.window_s).sum::<f64>();
    if !is_significant(&drawn, shared) {
        return Err(IllPosed::NothingDrawn);
    }
    let joules = Regression::of(&drawn)?;
    let seconds = Regression::of(&took)?;
    let explained = joules.explained(&drawn);
    if explained < LEAST_EXPLAINED {
        return Err(IllPosed::Unexplained { explained });
    }
    let wider = joules.widened * joules.student.powi(2);
    let mut covariance = joules.covariance.map(|row| row.map(|x| x * wider));
    // An error of the idle power is the same in all cells: how far it moves each coefficient.
    let moved = joules.response(&drawn, cells.iter().map(|c| c.window_s));
    for (i, row) in covariance.iter_mut().enumerate() {
        row.iter_mut().zip(moved).for_each(|(x, m)| *x += moved[i] * m * idle_error.get().powi(2));
    }
    let mut repeats: BTreeMap<u32, u64> = BTreeMap::new();
    cells.iter().for_each(|c| *repeats.entry(c.rung).or_default() += 1);
    let fit = Fit {
        joules: Cost::from_parts(joules.cost),
        covariance,
        seconds: Cost::from_parts(seconds.cost),
        quality: Quality {
            cells: cells.len() as u64,
            repeats: repeats.values().copied().min().unwrap_or(0),
            r2: joules.r2(&drawn),
            condition: joules.condition,
            widened: joules.widened.sqrt(),
            residuals: joules.residuals(&drawn),
            seconds_r2: seconds.r2(&took),
            seconds_residuals: seconds.residuals(&took),
        },
    };
    fit.is_finite().then_some(fit).ok_or(IllPosed::NotFinite("a coefficient, or how good it is"))
}

/// Whether the joules above idle are more than noise: their sum against its error, of which `shared` is the same in all rows. What
/// each row adds is what its sensors leave open, or how far repeats of its rung lie apart, whichever is more.
fn is_significant(rows: &[Row], shared: f64) -> bool {
    let mut rungs: BTreeMap<u32, Vec<&Row>> = BTreeMap::new();
    rows.iter().for_each(|r| rungs.entry(r.rung).or_default().push(r));
    let (mut apart, mut free) = (0.0, 0usize);
    for rung in rungs.values() {
        let mean = rung.iter().map(|r| r.y).sum::<f64>() / rung.len() as f64;
        apart += rung.iter().map(|r| (r.y - mean).powi(2)).sum::<f64>();
        free += rung.len() - 1;
    }
    let spread = if free > 0 { apart / free as f64 * rows.len() as f64 } else { 0.0 };
    let told: f64 = rows.iter().map(|r| r.error.powi(2)).sum();
    let error = (spread.max(told) + shared.powi(2)).sqrt();
    let sum: f64 = rows.iter().map(|r| r.y).sum();
    sum > 0.0 && sum >= LEAST_SIGNIFICANCE * error
}

/// Refuses cells of which a ladder is missing or does not vary.
fn check(cells: &[Cell]) -> Result<(), IllPosed> {
    let ratio = |over: f64, under: f64| (under > 0.0).then(|| over / under);
    for ladder in Ladder::ALL {
        if !cells.iter().any(|c| c.ladder == ladder) {
            return Err(IllPosed::Missing(ladder));
        }
        let varied = |cell: &&Cell| match ladder {
            Ladder::Prefill => ratio(cell.work.prefill, cell.requests as f64),
            Ladder::Decode => ratio(cell.work.decode, cell.work.iterations),
            Ladder::Context => ratio(cell.work.context, cell.work.decode),
        };
        // Short prompts before long answers are the lowest rung of context, too.
        let on = |cell: &&Cell| {
            cell.ladder == ladder || (ladder == Ladder::Context && cell.ladder == Ladder::Decode)
        };
        let rungs = cells.iter().filter(on).filter_map(|c| varied(&c));
        let (low, high) = rungs.fold((f64::INFINITY, 0.0f64), |(l, h), x| (l.min(x), h.max(x)));
        if high < low * VARIES || high <= 0.0 {
            return Err(IllPosed::Flat(ladder));
        }
    }
    Ok(())
}

/// One equation: so much work, so many joules or seconds.
struct Row {
    ladder: Ladder,
    rung: u32,
    x: Vector,
    y: f64,
    error: f64,
}

/// Coefficients of the columns as they are, found with the columns scaled.
struct Regression {
    cost: Vector,
    covariance: Matrix,
    /// Of each row.
    weights: Vec<f64>,
    condition: f64,
    /// Mean square of what rungs miss, in units of what their repeats leave open; 1 at least.
    widened: f64,
    /// That square is itself known from few rungs only: the quantile of Student's t by that of the normal distribution.
    student: f64,
}

impl Regression {
    fn of(rows: &[Row]) -> Result<Self, IllPosed> {
        let size = rows.iter().map(|r| r.y.abs()).fold(0.0, f64::max);
        let mut weights: Vec<f64> = rows
            .iter()
            .map(|r| (r.error.powi(2) + (0.02 * r.y).powi(2) + (1e-6 * size).powi(2)).recip())
            .collect();
        let mut found = Self::solve(rows, weights.clone())?;
        for _ in 0..ROUNDS {
            weights = reweigh(rows, &found.cost);
            found = Self::solve(rows, weights)?;
        }
        let (lack, free) = found.lack_of_fit(rows);
        if free > 0 && lack > 1.0 {
            (found.widened, found.student) = (lack, t_975(free) / 1.96);
        }
        Ok(found)
    }

    fn solve(rows: &[Row], weights: Vec<f64>) -> Result<Self, IllPosed> {
        let length = |i: usize| {
            let square: f64 = rows.iter().zip(&weights).map(|(r, w)| w * r.x[i] * r.x[i]).sum();
            if square > 0.0 { square.sqrt() } else { 1.0 }
        };
        let scale: Vector = std::array::from_fn(length);
        let (mut gram, mut right) = ([[0.0; PARTS]; PARTS], [0.0; PARTS]);
        for (row, w) in rows.iter().zip(&weights) {
            let x: Vector = std::array::from_fn(|i| row.x[i] / scale[i]);
            for i in 0..PARTS {
                right[i] += w * x[i] * row.y;
                (0..PARTS).for_each(|j| gram[i][j] += w * x[i] * x[j]);
            }
        }
        let values = eigenvalues(gram);
        let (low, high) = values.iter().fold((f64::INFINITY, 0.0f64), |(l, h), v| (l.min(*v), h.max(*v)));
        let condition = if low > 0.0 { (high / low).sqrt() } else { f64::INFINITY };
        let inverse = inverse(&gram, [true; PARTS]).filter(|_| condition <= CONDITION_LIMIT);
        let Some(inverse) = inverse else { return Err(IllPosed::Collinear { condition }) };
        let scaled = not_negative(&gram, &right);
        Ok(Self {
            cost: std::array::from_fn(|i| scaled[i] / scale[i]),
            // Of all four, also where one came out as nothing: how far it might lie above that is open all the same.
            covariance: std::array::from_fn(|i| {
                std::array::from_fn(|j| inverse[i][j] / (scale[i] * scale[j]))
            }),
            weights,
            condition,
            widened: 1.0,
            student: 1.0,
        })
    }

    fn misses<'a>(&'a self, rows: &'a [Row]) -> impl Iterator<Item = (&'a Row, f64, f64)> {
        rows.iter().zip(&self.weights).map(|(r, w)| (r, *w, r.y - dot(&self.cost, &r.x)))
    }

    /// What coefficients do not explain is the same in every repeat, so it is looked at by rung. Its mean square, and of how many
    /// degrees of freedom.
    fn lack_of_fit(&self, rows: &[Row]) -> (f64, usize) {
        let mut rungs: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
        for (row, w, miss) in self.misses(rows) {
            let sum = rungs.entry(row.rung).or_default();
            *sum = (sum.0 + w * miss, sum.1 + w);
        }
        let free = rungs.len().saturating_sub(PARTS);
        let squares: f64 = rungs.values().filter(|s| s.1 > 0.0).map(|(miss, w)| miss * miss / w).sum();
        (squares / free.max(1) as f64, free)
    }

    /// How far coefficients move if every `y` moves by so much.
    fn response(&self, rows: &[Row], by: impl Iterator<Item = f64>) -> Vector {
        let mut right = [0.0; PARTS];
        for ((row, w), by) in rows.iter().zip(&self.weights).zip(by) {
            (0..PARTS).for_each(|i| right[i] += w * row.x[i] * by);
        }
        times(&self.covariance, &right)
    }

    fn r2(&self, rows: &[Row]) -> f64 {
        let all: f64 = self.weights.iter().sum();
        let mean = rows.iter().zip(&self.weights).map(|(r, w)| w * r.y).sum::<f64>() / all;
        let missed: f64 = self.misses(rows).map(|(_, w, miss)| w * miss * miss).sum();
        let spread: f64 = rows.iter().zip(&self.weights).map(|(r, w)| w * (r.y - mean).powi(2)).sum();
        if spread > 0.0 { (1.0 - missed / spread).max(0.0) } else { 0.0 }
    }

    /// How much of what rungs drew is explained. Of medians, which one wild repeat does not move, and not about their mean: there is
    /// no intercept, and loads that all draw a board's full power hardly differ.
    fn explained(&self, rows: &[Row]) -> f64 {
        let mut rungs: BTreeMap<u32, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
        for (row, _, miss) in self.misses(rows) {
            let rung = rungs.entry(row.rung).or_default();
            rung.0.push(row.y);
            rung.1.push(miss);
        }
        let (mut all, mut missed) = (0.0, 0.0);
        for (drawn, misses) in rungs.into_values() {
            all += median(drawn).powi(2);
            missed += median(misses).powi(2);
        }
        if all > 0.0 { 1.0 - missed / all } else { 0.0 }
    }

    fn residuals(&self, rows: &[Row]) -> BTreeMap<Ladder, f64> {
        // Of a row of which next to nothing is expected there is no relative error.
        let least = LEAST_EXPECTED * rows.iter().map(|r| r.y.abs()).sum::<f64>() / rows.len().max(1) as f64;
        let mut sums: BTreeMap<Ladder, (f64, f64)> = BTreeMap::new();
        for (row, _, miss) in self.misses(rows) {
            let relative = miss / (row.y - miss).max(least);
            let sum = sums.entry(row.ladder).or_default();
            *sum = (sum.0 + relative * relative, sum.1 + 1.0);
        }
        sums.into_iter().map(|(ladder, (squares, n))| (ladder, (squares / n).sqrt())).collect()
    }
}

/// Weights by what the sensors leave open and by how far repeats of a rung lie apart; a wild one counts less.
fn reweigh(rows: &[Row], cost: &Vector) -> Vec<f64> {
    let size = rows.iter().map(|r| r.y.abs()).fold(0.0, f64::max);
    let expected: Vec<f64> = rows.iter().map(|r| dot(cost, &r.x).max(1e-6 * size)).collect();
    let ratio = |i: usize| rows[i].y / expected[i];
    let mut rungs: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    rows.iter().enumerate().for_each(|(i, r)| rungs.entry(r.rung).or_default().push(i));
    // Of pairs, because the median of three is one of the three.
    let mut apart: Vec<f64> = Vec::new();
    for rung in rungs.values() {
        for (n, i) in rung.iter().enumerate() {
            apart.extend(rung[n + 1..].iter().map(|j| (ratio(*i) - ratio(*j)).abs()));
        }
    }
    let spread = MAD * median(apart) / std::f64::consts::SQRT_2;
    let told = median(rows.iter().zip(&expected).map(|(r, e)| (r.error / e).powi(2)).collect());
    let beyond = (spread * spread - told).max(0.0) + FLOOR * FLOOR;
    let mut weights = vec![0.0; rows.len()];
    for rung in rungs.values() {
        let middle = median(rung.iter().map(|i| ratio(*i)).collect());
        for i in rung {
            let error = (rows[*i].error.powi(2) + beyond * expected[*i].powi(2)).sqrt();
            let off = ((ratio(*i) - middle) * expected[*i] / error).abs();
            weights[*i] = error.powi(-2) * if off > WILD { WILD / off } else { 1.0 };
        }
    }
    weights
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}
